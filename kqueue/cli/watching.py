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
    from kqueue.contract import Outcome, Request, Verdict

#: Seconds between two looks at the files.
_LOOK_S: Final = 0.2
#: Seconds without a change after which a file counts as saved, because editors write in several steps.
_QUIET_S: Final = 0.3
#: Times of change and sizes of the files. None stands for a missing file.
_Stamps = Sequence[tuple[int, int, int] | None]


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

    files = [file for file in (kernel, Path(problem)) if file.is_file()]
    if kernel not in files:
        raise InvalidRequest(f"{kernel}: no such file: give a kernel's file, or give no --problem to watch a batch")
    with ExitStack() as stack:
        judge = _on_fleet(stack, url) if fleet or url is not None else _here(stack, device)
        stamps: _Stamps = ()
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


def _here(stack: ExitStack, device: str | None) -> Callable[[Request], Outcome]:
    from kqueue.judging import LocalJudge

    local = stack.enter_context(LocalJudge(device))
    say(where(local.machine))
    return local


def _on_fleet(stack: ExitStack, url: str | None) -> Callable[[Request], Verdict]:
    client = stack.enter_context(runs.client_of(url))

    def judge(request: Request) -> Verdict:
        ticket = client.submit(request)
        try:
            return ticket.wait()
        except KeyboardInterrupt:
            ticket.cancel()
            raise

    return judge


def _saved(files: Sequence[Path], before: _Stamps) -> _Stamps:
    """Wait until the files differ from ``before`` and do not change any more. Return their stamps."""
    while True:
        now = _stamps(files)
        if now == before or None in now:
            time.sleep(_LOOK_S)
            continue
        time.sleep(_QUIET_S)
        if _stamps(files) == now:
            return now


def _stamps(files: Sequence[Path]) -> _Stamps:
    stamps: list[tuple[int, int, int] | None] = []
    for file in files:
        try:
            status = file.stat()
        except OSError:
            stamps.append(None)
        else:
            stamps.append((status.st_mtime_ns, status.st_size, status.st_ino))
    return stamps
