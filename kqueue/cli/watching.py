"""`kqueue watch`: the progress of batches and evaluations, or a verdict at each save of a kernel's file."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from kqueue.cli import options, runs, sources
from kqueue.cli.judge import where
from kqueue.cli.render import console, say
from kqueue.cli.submit import follow
from kqueue.errors import InvalidRequest
from kqueue.text import clean

if TYPE_CHECKING:
    from kqueue.client import Client
    from kqueue.client.remote import RemoteClient
    from kqueue.contract import Request, Verdict

#: Seconds between two looks at the files.
_LOOK_S: Final = 0.2
#: Seconds without a change after which a file counts as saved, because editors write in several steps.
_QUIET_S: Final = 0.3


def watch(
    names: Annotated[
        list[str],
        typer.Argument(
            metavar="BATCH|ID...|FILE", help="Batches, evaluations by their first digits, or a kernel's file."
        ),
    ],
    *,
    problem: Annotated[
        str | None,
        typer.Option("--problem", "-p", metavar="FILE", help="The reference: judge the kernel at each save."),
    ] = None,
    backend: options.Backend = None,
    device: options.Device = None,
    fleet: options.Fleet = False,
    url: runs.Url = None,
    timeout: options.Timeout = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON line per change.")] = False,
) -> None:
    """Show the progress of batches and evaluations until all have ended. Exit with 1 if one did not pass.

    A terminal shows a bar. Otherwise a line is printed for each change. With `--problem` it judges a kernel's file
    whenever it is saved, until Ctrl-C.
    """
    if problem is None:
        if fleet or any(given is not None for given in (backend, device, url)):
            raise InvalidRequest("--backend, --device, --fleet and --url need --problem, to judge a file at each save")
        follow(names, timeout, as_json=as_json)
    elif len(names) != 1 or timeout is not None or as_json:
        raise InvalidRequest("--problem: give one kernel's file, and neither --timeout nor --json")
    else:
        _at_each_save(Path(names[0]), problem, backend=backend, device=device, fleet=fleet, url=url)


def _at_each_save(
    kernel: Path, problem: str, *, backend: str | None, device: str | None, fleet: bool, url: str | None
) -> None:
    """Judge the kernel now and whenever its file or the problem's is saved, until Ctrl-C.

    Saves during an evaluation are judged once, after it.
    """
    from kqueue.feedback import describe
    from kqueue.judging import LocalJudge

    files = [file for file in (kernel, Path(problem)) if file.is_file()]
    if kernel not in files:
        raise InvalidRequest(f"{kernel}: no such file: give a kernel's file, or give no --problem to watch a batch")
    with ExitStack() as stack:
        if fleet or url is not None:
            judge = _on_fleet(stack.enter_context(runs.client_of(url)))
        else:
            judge = stack.enter_context(LocalJudge(device))
            say(where(judge.machine))
        stamps: Sequence[object] = ()
        try:
            while True:
                stamps = _saved(files, stamps)
                try:
                    fields: Mapping[str, Any] = sources.read_problem(problem)
                    request = options.of_file(kernel, backend, fields)
                    verdict = judge(request)
                except InvalidRequest as error:
                    say(f"{time.strftime('%H:%M:%S')} {error}")
                else:
                    words = clean(describe(verdict, request.kernel))
                    console().print(f"{time.strftime('%H:%M:%S')} {words}\n", soft_wrap=True, markup=False)
        except KeyboardInterrupt:
            say("stopped")


def _on_fleet(client: Client | RemoteClient) -> Callable[[Request], Verdict]:
    def judge(request: Request) -> Verdict:
        ticket = client.submit(request)
        try:
            return ticket.wait()
        except KeyboardInterrupt:
            ticket.cancel()
            raise

    return judge


def _saved(files: Sequence[Path], before: Sequence[object]) -> Sequence[object]:
    """Wait until the files' stamps differ from ``before`` and do not change any more. Return the stamps."""
    while True:
        now = [_stamp(file) for file in files]
        if now != before and None not in now:
            time.sleep(_QUIET_S)
            if now == [_stamp(file) for file in files]:
                return now
        time.sleep(_LOOK_S)


def _stamp(file: Path) -> object:
    """Return a value that changes with each save. None while an editor replaces the file."""
    try:
        status = file.stat()
    except OSError:
        return None
    return status.st_mtime_ns, status.st_size, status.st_ino
