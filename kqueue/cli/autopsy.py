"""`kqueue autopsy`: find the smallest failing shape and input of a kernel, and write a program that reproduces it."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from kqueue.cli import options
from kqueue.cli.connection import database
from kqueue.cli.render import console, emit, make_bar, say
from kqueue.errors import InvalidRequest
from kqueue.text import clean, one_line

if TYPE_CHECKING:
    from kqueue.autopsy.report import Report
    from kqueue.autopsy.run import OnRound
    from kqueue.autopsy.shrink import Autopsy
    from kqueue.contract import Request, Result

#: Maximum number of evaluations that are judged concurrently.
_WIDEST: Final = 8
_FAILED, _UNJUDGED = 1, 3


def autopsy(
    examined: options.Examined,
    budget: Annotated[
        float, typer.Option(metavar="S", min=1, help="Time limit in seconds. The best so far is used.")
    ] = 60,
    evaluations: Annotated[int, typer.Option(metavar="N", min=1, help="Maximum number of evaluations.")] = 100,
    out: Annotated[Path, typer.Option(metavar="DIR", help="Folder for repro.py.")] = Path(),
    as_json: options.Json = False,
) -> None:
    """Find the smallest shape and input on which a kernel fails, and write repro.py, which reproduces it.

    Exit with 1 if there is no such failure.
    """
    subject = examined.find("autopsy")
    with _reporting(evaluations, quiet=as_json) as on_round:
        if subject.device is None:
            report = _by_fleet(subject.request, subject.verdict, budget, evaluations, on_round)
        else:
            report = _by_judge(subject.request, subject.device, budget, evaluations, on_round)
    file = write(report, out)
    emit(report, lambda report: show(report, file), as_json=as_json, record=lambda report: to_json(report, file))
    if report.ended == "interrupted":
        raise KeyboardInterrupt
    if not report.found:
        raise typer.Exit(_FAILED if report.judged else _UNJUDGED)


def write(report: Report, out: Path) -> Path | None:
    """Write repro.py into a folder, which is created if needed. Return its path, or None if there is no program.

    Raises:
        InvalidRequest: it cannot be written.
    """
    if report.repro is None:
        return None
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InvalidRequest(f"{out}: cannot create a folder for repro.py: {error.strerror or error}") from None
    file = out / "repro.py"
    try:
        file.write_text(report.repro, encoding="utf-8")
    except OSError as error:
        raise InvalidRequest(f"{file}: {error.strerror or error}") from None
    return file


def to_json(report: Report, file: Path | None) -> dict[str, Any]:
    """Return a report as a record, with ``file`` as the path of its repro.py."""
    return report.summary() | {"repro": None if file is None else str(file)}


def show(report: Report, file: Path | None) -> None:
    """Print a report, with ``file`` as the path of its repro.py."""
    for line in report.lines():
        console().print(clean(line), soft_wrap=True)
    if file is not None:
        console().print(f"{file} reproduces it. It runs the kernel without a sandbox: read it first.", soft_wrap=True)


def _by_fleet(request: Request, failure: Result | None, budget: float, most: int, on_round: OnRound) -> Report:
    from kqueue.autopsy import run
    from kqueue.autopsy.shrink import Autopsy
    from kqueue.client import Client
    from kqueue.config import load
    from kqueue.store import workers

    with database("autopsy") as engine:
        live = workers.live_lanes(engine, within_s=load().live_s)
    slots = live.get(request.lane) or max(live.values(), default=1)
    with Client() as client:
        made = Autopsy(request, failure, width=min(slots, _WIDEST), most=most)
        return run.by_fleet(made, client, budget, on_round)


def _by_judge(request: Request, device: str, budget: float, most: int, on_round: OnRound) -> Report:
    from kqueue.autopsy import run
    from kqueue.autopsy.shrink import Autopsy
    from kqueue.judging import LocalJudge

    with LocalJudge(device) as local:
        return run.by_judge(Autopsy(request, most=most), local, budget, on_round)


@contextmanager
def _reporting(most: int, *, quiet: bool) -> Generator[OnRound]:
    """Yield a function that reports progress on stderr: a bar on a terminal, or else a line for each improvement."""
    last = ""
    with make_bar(quiet=quiet) as bar:
        task = bar.add_task("", total=most)

        def report(made: Autopsy) -> None:
            nonlocal last
            line = made.progress()
            bar.update(task, completed=made.evaluations, description=one_line(line))
            if bar.disable and not quiet and line != last:
                say(f"{line} ({made.evaluations} evaluations)")
            last = line

        yield report
