"""`kqueue autopsy`, and the autopsies of `kqueue judge`."""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final
from uuid import uuid4

import typer

from kqueue.cli import options
from kqueue.cli.connection import reading
from kqueue.cli.render import console, emit, make_bar, say
from kqueue.errors import InvalidRequest
from kqueue.text import clean, one_line

if TYPE_CHECKING:
    from kqueue.contract import Outcome, Request, Result, Verdict
    from kqueue.features.autopsy.report import Report
    from kqueue.features.autopsy.run import OnRound
    from kqueue.features.autopsy.shrink import Autopsy
    from kqueue.judging import LocalJudge

#: Maximum seconds that `kqueue judge` spends on shrinking one failure.
_BUDGET_S: Final = 60.0
#: Maximum number of evaluations that are judged concurrently.
_WIDEST: Final = 8
_NOT_FOUND, _UNJUDGED = 1, 3


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
    from kqueue.features.autopsy import run
    from kqueue.features.autopsy.shrink import Autopsy
    from kqueue.judging import LocalJudge

    subject = examined.find("autopsy")
    with _reporting(evaluations, quiet=as_json) as on_round:
        if subject.device is None:
            report = _by_fleet(subject.request, subject.verdict, budget, evaluations, on_round)
        else:
            with LocalJudge(subject.device) as local:
                report = run.by_judge(Autopsy(subject.request, most=evaluations), local, budget, on_round)
    record, show = _finished(report, out)
    emit(report, lambda _: show(), as_json=as_json, record=lambda _: record)
    if report.ended == "interrupted":
        raise KeyboardInterrupt
    if not report.found:
        raise typer.Exit(_NOT_FOUND if report.judged else _UNJUDGED)


def _finished(report: Report, out: Path) -> tuple[dict[str, Any], Callable[[], None]]:
    """Write a report's repro.py into a folder. Return the report as a record, and a function that prints it."""
    file = None if report.repro is None else out / "repro.py"
    if file is not None and report.repro is not None:
        try:
            out.mkdir(parents=True, exist_ok=True)
            file.write_text(report.repro, encoding="utf-8")
        except OSError as error:
            raise InvalidRequest(f"{file} cannot be written: {error.strerror or error}") from None

    def show() -> None:
        for line in report.lines():
            console().print(clean(line), soft_wrap=True)
        if file is not None:
            words = f"{file} reproduces it. It runs the kernel without a sandbox: read it first."
            console().print(words, soft_wrap=True)

    return report.summary() | {"repro": None if file is None else str(file)}, show


def _by_fleet(request: Request, failure: Result | None, budget: float, most: int, on_round: OnRound) -> Report:
    from kqueue.client import connect
    from kqueue.features.autopsy import run
    from kqueue.features.autopsy.shrink import Autopsy
    from kqueue.store import workers

    with reading("autopsy") as read:
        live = read(workers.live_lanes)
    slots = live.get(request.lane) or max(live.values(), default=1)
    with connect() as client:
        request = request.model_copy(update={"batch": request.batch or f"autopsy-{uuid4()}"})
        return run.by_fleet(Autopsy(request, failure, width=min(slots, _WIDEST), most=most), client, budget, on_round)


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
                say(f"{line} ({made.evaluations} evaluation{'s' * (made.evaluations != 1)})")
            last = line

        yield report


def hint(verdict: Verdict) -> str | None:
    """Return a line on a failure that an autopsy can shrink."""
    from kqueue.features.autopsy.shrink import refused

    able = refused(verdict) is None
    return f"`kqueue autopsy {verdict.evaluation_id}` shrinks this failure to its smallest input" if able else None


def dissect(
    local: LocalJudge, request: Request, outcome: Outcome, folder: Path
) -> tuple[dict[str, Any], Callable[[], None]] | None:
    """Shrink a failure that depends on inputs. Return the report as a record, and the function that prints it."""
    from kqueue.features.autopsy import run
    from kqueue.features.autopsy.shrink import Autopsy, refused

    if refused(outcome) is not None:
        return None
    return _finished(run.by_judge(Autopsy(request, outcome), local, _BUDGET_S, lambda _: None), folder)
