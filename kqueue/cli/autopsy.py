"""`kqueue autopsy`: the smallest failing shape and input of a kernel, and a program that shows the failure."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from kqueue.cli import options, sources
from kqueue.cli.render import say, write_json
from kqueue.errors import EvaluationFailed, InvalidRequest, KqueueError

if TYPE_CHECKING:
    from kqueue.autopsy.report import Report, Result
    from kqueue.autopsy.run import Told
    from kqueue.autopsy.shrink import Autopsy
    from kqueue.contract import Request

#: The most evaluations that are judged beside each other.
_WIDEST: Final = 8
_FAILED, _UNJUDGED = 1, 3


def register(app: typer.Typer) -> None:
    """Add the command to ``app``."""
    app.command()(autopsy)


def autopsy(
    what: Annotated[
        str,
        typer.Argument(metavar="ID|KERNEL", help="An evaluation's id, or its first digits; with --problem a kernel."),
    ],
    problem: Annotated[
        str | None, typer.Option("--problem", "-p", metavar="FILE", help="The reference of a kernel in a file.")
    ] = None,
    backend: options.Backend = None,
    lane: Annotated[str | None, typer.Option(help="With --problem: auto, cpu, gpu, or gpu.<model>.")] = None,
    device: Annotated[
        str | None,
        typer.Option(metavar="DEVICE", help="With --problem: judge without a fleet, on a GPU's index or UUID, or cpu."),
    ] = None,
    precision: options.Precision = None,
    settings: options.SettingsTree = None,
    assignments: options.Assignments = None,
    budget: Annotated[float, typer.Option(metavar="S", min=1, help="Seconds after which the best so far counts.")] = 60,
    evaluations: Annotated[int, typer.Option(metavar="N", min=1, help="Most evaluations.")] = 100,
    out: Annotated[Path, typer.Option(metavar="DIR", help="Where repro.py is written.")] = Path(),
    as_json: Annotated[bool, typer.Option("--json", help="Print the report as one JSON line.")] = False,
) -> None:
    """Find the smallest shape and input on which a kernel fails, and write repro.py, which shows it.

    Exit with 1 if there is no such failure.
    """
    if problem is None:
        if given := [
            name
            for name, value in (
                ("--backend", backend),
                ("--lane", lane),
                ("--device", device),
                ("--precision", precision),
                ("--settings", settings),
                ("--set", assignments),
            )
            if value
        ]:
            raise InvalidRequest(f"{given[0]}: an evaluation keeps what it was submitted with; give --problem too")
        with _telling(evaluations, quiet=as_json) as told:
            report = _of_evaluation(what, budget, evaluations, told)
    else:
        tree = options.settings_of(
            settings, assignments or (), precision=precision, checks=None, calls=None, no_timing=False
        )
        if device is not None and lane is not None:
            raise InvalidRequest("--lane and --device: give one; --device judges without a fleet")
        request = _request(problem, what, backend, lane, tree)
        with _telling(evaluations, quiet=as_json) as told:
            if device is None:
                report = _by_fleet(request, None, budget, evaluations, told)
            else:
                report = _by_judge(request, device, budget, evaluations, told)
    file = write(report, out)
    if as_json:
        write_json(to_json(report, file))
    else:
        show(report, file)
    if report.ended == "interrupted":
        raise KeyboardInterrupt
    if not report.found:
        raise typer.Exit(_FAILED if report.judged else _UNJUDGED)


def write(report: Report, out: Path) -> Path | None:
    """Write repro.py into a folder, which is made, and return where it is; None if there is none.

    Raises:
        InvalidRequest: it cannot be written.
    """
    if report.repro is None:
        return None
    _check_folder(out)
    file = out / "repro.py"
    try:
        file.write_text(report.repro, encoding="utf-8")
    except OSError as error:
        raise InvalidRequest(f"{file}: {error.strerror or error}") from None
    return file


def to_json(report: Report, file: Path | None) -> dict[str, Any]:
    """Return a report as a record; ``file`` is its repro.py."""
    return report.summary() | {"repro": None if file is None else str(file)}


def show(report: Report, file: Path | None) -> None:
    """Print a report; ``file`` is its repro.py."""
    from kqueue.cli.render import console
    from kqueue.text import clean

    for line in report.lines():
        console().print(clean(line), soft_wrap=True)
    if file is not None:
        console().print(f"{file} shows it. It runs the kernel without a sandbox: read it first.", soft_wrap=True)


def _check_folder(out: Path) -> None:
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InvalidRequest(f"{out}: no folder for repro.py: {error.strerror or error}") from None


def _request(problem: str, kernel: str, backend: str | None, lane: str | None, tree: dict[str, Any]) -> Request:
    from kqueue.contract import parse_request
    from kqueue.judging import guess_backend

    fields = sources.read_problem(problem)
    if "problem_label" not in fields:
        raise InvalidRequest(f"--problem {problem}: give a file")
    path = Path(kernel)
    source = sources.read_source(path)
    given = {
        "kernel": source,
        "kernel_label": path.stem,
        "backend": backend or guess_backend(source),
        "settings": tree,
        "priority": "interactive",
    }
    return parse_request(fields | given | ({} if lane is None else {"lane": lane}))


def _of_evaluation(which: str, budget: float, most: int, told: Told) -> Report:
    from kqueue.cli.results import database
    from kqueue.contract import parse_request
    from kqueue.store import reports

    with database("autopsy") as engine:
        detail = reports.show(engine, reports.resolve_id(engine, which))
    if detail.verdict is None:
        raise KqueueError(
            f"{detail.evaluation_id} has no verdict yet: `kqueue wait {detail.evaluation_id}` waits for it"
        )
    if detail.verdict.blame not in {"none", "candidate"}:
        raise EvaluationFailed(detail.verdict)
    request = parse_request(
        {
            "problem": detail.problem,
            "kernel": detail.kernel,
            "backend": detail.backend,
            "lane": detail.lane,
            "settings": detail.settings,
            "problem_label": detail.problem_label,
            "kernel_label": detail.kernel_label,
            "batch": f"autopsy-{detail.evaluation_id}",
            "priority": "interactive",
        }
    )
    return _by_fleet(request, detail.verdict, budget, most, told)


def _by_fleet(request: Request, failure: Result | None, budget: float, most: int, told: Told) -> Report:
    from kqueue.autopsy import run
    from kqueue.autopsy.shrink import Autopsy
    from kqueue.cli.results import database
    from kqueue.client import Client
    from kqueue.config import load
    from kqueue.store import workers

    with database("autopsy") as engine:
        live = workers.live_lanes(engine, within_s=load().live_s)
    slots = live.get(request.lane) or max(live.values(), default=1)
    with Client() as client:
        made = Autopsy(request, failure, width=min(slots, _WIDEST), most=most)
        return run.by_fleet(made, client, budget, told)


def _by_judge(request: Request, device: str, budget: float, most: int, told: Told) -> Report:
    from kqueue.autopsy import run
    from kqueue.autopsy.shrink import Autopsy
    from kqueue.judging import LocalJudge

    with LocalJudge(device) as local:
        return run.by_judge(Autopsy(request, most=most), local, budget, told)


@contextmanager
def _telling(most: int, *, quiet: bool) -> Generator[Told]:
    """Yield what says on stderr how far an autopsy is: a bar on a terminal, else a line for whatever is smaller.

    Args:
        most: evaluations at most.
        quiet: say nothing.
    """
    from kqueue.cli.progress import make_bar
    from kqueue.text import one_line

    last = ""
    with make_bar(quiet=quiet) as bar:
        task = bar.add_task("", total=most)

        def tell(made: Autopsy) -> None:
            nonlocal last
            line = made.progress()
            bar.update(task, completed=made.evaluations, description=one_line(line))
            if bar.disable and not quiet and line != last:
                say(f"{line} ({made.evaluations} evaluations)")
            last = line

        yield tell
