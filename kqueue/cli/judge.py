"""`kqueue judge`: verdicts on this machine, without a fleet. `kqueue watch`: progress, or a verdict at each save."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from kqueue import registry
from kqueue.cli import options, sources
from kqueue.cli.render import console, progress, say, table, write_json
from kqueue.cli.show import print_result
from kqueue.cli.sources import Entry
from kqueue.cli.submit import VERDICT, Item, follow, say_verdict
from kqueue.errors import InvalidRequest, JudgeUnavailable
from kqueue.text import clean, one_line

if TYPE_CHECKING:
    from kqueue.client import Client
    from kqueue.contract import Outcome, Request, Verdict
    from kqueue.judging import LocalJudge, Machine

#: Exit statuses, in order of precedence: this machine could not judge a kernel, a kernel was refused, a kernel failed.
_UNJUDGED, _REFUSED, _FAILED = 3, 2, 1
_STATUSES: Final = (_UNJUDGED, _REFUSED, _FAILED)
#: Seconds without a change after which a file counts as saved, because editors write in several steps.
_QUIET_S: Final = 0.3


def judge(
    problem: Annotated[str, typer.Argument(metavar="PROBLEM", help="File with the reference.")],
    kernels: Annotated[list[str], typer.Argument(metavar="KERNEL", help="Files, folders and globs.")],
    *,
    backend: options.Backend = None,
    device: options.Device = None,
    tree: options.Tree = None,
    judging: options.Judging,
    autopsies: Annotated[
        Path | None,
        typer.Option(
            "--autopsy", metavar="DIR", help="Shrink each failure, for up to a minute, to DIR/KERNEL/repro.py."
        ),
    ] = None,
    log: Annotated[bool, typer.Option("--log", help="Show the whole stored log of a single kernel.")] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON line per kernel, as soon as it is judged.")
    ] = False,
) -> None:
    """Judge kernels on this machine, without a fleet. Exit with 1 if one did not pass."""
    from kqueue.judging import LocalJudge

    fields: dict[str, Any] = {"settings": judging.tree(), **sources.read_problem(problem), **sources.read_tree(tree)}
    if "problem_label" not in fields:
        raise InvalidRequest(f"{problem}: only a fleet has stored problems: give a file")
    if backend is not None:
        fields["backend"] = backend
    local = LocalJudge(device)
    tasks = [_task(local, entry) for entry in sources.from_kernels(sources.find_kernels(kernels), fields)]
    if autopsies is not None:
        autopsies.mkdir(parents=True, exist_ok=True)
    with ExitStack() as stack:
        if any(task.request is not None for task in tasks):
            stack.enter_context(local)
            if not as_json:
                say(where(local.machine))
        advance = stack.enter_context(progress(len(tasks), quiet=as_json or len(tasks) == 1))
        names: Counter[str] = Counter()
        try:
            for task in tasks:
                _run(local, task)
                if autopsies is not None:
                    name = Path(task.item.entry.where).stem
                    names[name] += 1
                    _dissect(local, task, autopsies / (name if names[name] == 1 else f"{name}-{names[name]}"))
                advance(str(task.outcome.category) if task.outcome else "")
                if task.outcome is not None and len(tasks) > 1 and not as_json:
                    say_verdict(task.item)
                if as_json:
                    _write(task, local)
        except KeyboardInterrupt:
            stack.close()  # remove the bar before the table is printed
            if not as_json:
                _print_table(tasks)
            raise
    if not as_json:
        _print(tasks, all_of_log=log)
    if statuses := {task.status for task in tasks} - {0}:
        raise typer.Exit(min(statuses, key=_STATUSES.index))


@dataclass(slots=True)
class _Task:
    """A kernel with its result.

    Attributes:
        status: its exit status, 0 if it passed.
        autopsy: the autopsy of its failure as a record, and the function that prints it.
    """

    item: Item
    request: Request | None = None
    outcome: Outcome | None = None
    status: int = 0
    autopsy: tuple[dict[str, Any], Callable[[], None]] | None = None

    def fail(self, error: Exception, status: int) -> None:
        """Record and print the reason why there is no verdict."""
        self.item.error, self.status = str(error), status
        say(f"{self.item.entry.where}: {error}" if self.item.entry.where not in str(error) else str(error))


def _task(local: LocalJudge, entry: Entry) -> _Task:
    from kqueue.contract import parse_request

    task = _Task(Item(entry := sources.with_backend(entry)))
    try:
        if entry.error is not None:
            raise entry.error
        local.check(request := parse_request(entry.fields))
        task.request = request
    except (InvalidRequest, JudgeUnavailable) as error:
        task.fail(error, _REFUSED if isinstance(error, InvalidRequest) else _UNJUDGED)
    return task


def _run(local: LocalJudge, task: _Task) -> None:
    """Judge a kernel that was not refused."""
    from kqueue.categories import Blame

    if task.request is None:
        return
    before = len(local.doubts)
    try:
        task.outcome = local(task.request)
    except JudgeUnavailable as error:
        task.fail(error, _UNJUDGED)
        return
    for doubt in local.doubts[before:]:
        say(f"{task.item.entry.where}: the GPU could be unfit: {doubt}")
    task.item.verdict = task.outcome.summary()
    if not task.outcome.passed:
        task.status = _UNJUDGED if task.outcome.blame is Blame.FLEET else _FAILED


def _dissect(local: LocalJudge, task: _Task, folder: Path) -> None:
    """Shrink a kernel's failure, if the failure depends on inputs."""
    if task.request is not None and task.outcome is not None:
        try:
            for part in registry.attached("failure"):
                task.autopsy = part.dissect(local, task.request, task.outcome, folder)
        except InvalidRequest as error:
            task.fail(error, _UNJUDGED)
    if task.autopsy is not None and task.autopsy[0]["ended"] == "interrupted":
        raise KeyboardInterrupt


def _write(task: _Task, local: LocalJudge) -> None:
    record = task.item.to_json()
    if task.autopsy is not None:
        record["autopsy"] = task.autopsy[0]
    if task.outcome is not None and task.request is not None:
        record["verdict"] = {
            **task.outcome.model_dump(mode="json"),
            **task.outcome.summary(),
            "backend": task.request.backend,
            "environment": local.machine.environment.model_dump(mode="json"),
        }
    write_json(record)


def _print(tasks: Sequence[_Task], *, all_of_log: bool) -> None:
    if len(tasks) > 1:
        _print_table(tasks)
    elif tasks[0].outcome is not None:
        print_result(tasks[0].outcome, tasks[0].item.entry.fields["kernel"], {}, all_of_log=all_of_log)
    for task in tasks:
        if task.autopsy is not None:
            if len(tasks) > 1:
                console().print(f"--- {one_line(task.item.entry.where)}", style="bold")
            task.autopsy[1]()


def _print_table(tasks: Sequence[_Task]) -> None:
    judged = (task.item for task in tasks if task.outcome is not None)
    table({"kernel": lambda item: item.entry.where, **VERDICT})(judged)


def where(machine: Machine) -> str:
    """Return the device and software of a local judge in one line."""
    environment = machine.environment
    device = environment.device if machine.device == "cpu" else f"{environment.device} ({machine.device})"
    return f"judging on {device}, torch {environment.torch}, isolation {machine.isolation}"


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
    url: options.Url = None,
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
    from kqueue.client import connect
    from kqueue.feedback import describe
    from kqueue.judging import LocalJudge

    files = [file for file in (kernel, Path(problem)) if file.is_file()]
    if kernel not in files:
        raise InvalidRequest(f"{kernel}: no such file: give a kernel's file, or give no --problem to watch a batch")
    sources.read_problem(problem)  # an unreadable one is refused before the wait for a save
    with ExitStack() as stack:
        judge: Callable[[Request], Outcome | Verdict]
        if fleet or url is not None:
            judge = partial(_on_fleet, stack.enter_context(connect(url)))
        else:
            judge = stack.enter_context(local := LocalJudge(device))
            say(where(local.machine))
        judged = None
        # Ctrl-C is the only end.
        stack.enter_context(suppress(KeyboardInterrupt))
        while True:
            saved = _stamps(files)
            time.sleep(_QUIET_S)
            if saved in (None, judged) or saved != _stamps(files):
                continue
            judged = saved
            try:
                request = options.of_file(kernel, backend, sources.read_problem(problem))
                words = clean(describe(judge(request), request.kernel))
            except InvalidRequest as error:
                say(f"{time.strftime('%H:%M:%S')} {error}")
            else:
                console().print(f"{time.strftime('%H:%M:%S')} {words}\n", soft_wrap=True, markup=False)
    say("stopped")


def _on_fleet(client: Client, request: Request) -> Verdict:
    ticket = client.submit(request)
    try:
        return ticket.wait()
    except KeyboardInterrupt:
        ticket.cancel()
        raise


def _stamps(files: Sequence[Path]) -> object:
    """Return a value that changes with each save. None while an editor replaces a file."""
    with suppress(OSError):
        return [(status.st_mtime_ns, status.st_size, status.st_ino) for status in map(Path.stat, files)]
    return None
