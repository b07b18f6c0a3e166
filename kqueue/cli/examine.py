"""`kqueue sanitize` and `profile`: examinations of one kernel."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kqueue.categories import Category
from kqueue.cli import options
from kqueue.cli.render import category_text, console, emit, form_of, say, write_picture
from kqueue.errors import InvalidRequest
from kqueue.text import clean, one_line

if TYPE_CHECKING:
    from kqueue.cli.options import Subject
    from kqueue.contract import Request, Result

#: Exit statuses for findings, and for an incomplete run of a tool.
_FOUND, _INCOMPLETE = 1, 3

_Timeout = Annotated[
    float,
    typer.Option("--timeout", metavar="S", min=1, help="Maximum seconds to wait for the fleet before cancelling."),
]


def sanitize(
    examined: options.Examined,
    tool: Annotated[
        list[str] | None,
        typer.Option("--tool", metavar="TOOL", help="memcheck, racecheck, initcheck or synccheck. Repeatable."),
    ] = None,
    whole: Annotated[bool, typer.Option("--whole", help="Do not reduce the problem's sizes.")] = False,
    timeout: _Timeout = 900,
    as_json: options.Json = False,
) -> None:
    """Run a kernel under compute-sanitizer, with small sizes unless its result differs there.

    All four tools run by default. Exit with 1 if there are findings, and with 3 if a tool could not complete.
    """
    from kqueue import examinations
    from kqueue.contract import Sanitizer

    if wrong := [name for name in tool or () if name not in list(Sanitizer)]:
        raise InvalidRequest(f"--tool {wrong[0]}: use one of {', '.join(Sanitizer)}")
    tools = [*map(Sanitizer, tool or Sanitizer)]
    subject = examined.find("sanitize")
    known = Category.PASSED if subject.verdict is None else subject.verdict.category
    with _judging(subject, timeout) as judge:
        request, *rest = examinations.sanitizing(subject.request, tools, whole=whole)
        result = judge(request)
        if rest and not (result.judged and result.category is known):
            result = judge(request := rest[0])
    runs = result.evidence.sanitized or ()
    small = request.problem != subject.request.problem
    sanitized = {"small": small, "sanitized": [run.model_dump(mode="json") for run in runs]}
    emit(result, _show, as_json=as_json, record=lambda result: result.summary() | sanitized)
    if small and runs and not as_json:
        say("the problem's sizes were reduced. A kernel that needs its own sizes can fail only there (see --whole)")
    if any(run.findings for run in runs):
        raise typer.Exit(_FOUND)
    if not runs or any(run.error is not None for run in runs):
        raise typer.Exit(_INCOMPLETE)


def profile(
    examined: options.Examined,
    against: Annotated[
        str | None, typer.Option(metavar="ID|KERNEL", help="Another kernel of the problem for comparison.")
    ] = None,
    out: Annotated[str | None, typer.Option(metavar="FILE", help="Draw the roofline, .svg or .png.")] = None,
    timeout: _Timeout = 900,
    as_json: options.Json = False,
) -> None:
    """Profile each GPU kernel of one call with Nsight Compute: its work, and its stalls.

    A profiled evaluation is shown and not judged again. Exit with 3 if no counters could be read.
    """
    from kqueue import charts, examinations

    form = form_of(out)
    subjects = [examined.find("profile", one) for one in (examined.what, against) if one is not None]
    if len({subject.request.problem for subject in subjects}) > 1:
        raise InvalidRequest(f"--against {against}: it is a kernel of another problem")
    results: list[Result] = []
    with ExitStack() as stack:
        judge: Callable[[Request], Result] | None = None
        for subject in subjects:
            if subject.verdict is not None and examinations.is_profiled(subject.verdict.evidence):
                results.append(subject.verdict)
                continue
            judge = judge or stack.enter_context(_judging(subject, timeout))
            results += map(judge, examinations.profiling(subject.request))
    counted = [profiled for result in results if (profiled := result.evidence.profile) is not None and profiled.kernels]
    names = [subject.request.kernel_label or "the kernel" for subject in subjects]

    def show(results: Sequence[Result]) -> None:
        for result in results:
            _show(result)
        if len(counted) > 1:
            _print(examinations.compared(counted[0], counted[1]))

    taken = [one.summary() | {"profile": one.evidence.model_dump(mode="json").get("profile")} for one in results]
    emit(tuple(results), show, as_json=as_json, record=lambda _: {"kernels": taken})
    if len(counted) < len(subjects):
        raise typer.Exit(_INCOMPLETE)
    if out is not None:
        if len(set(names)) < len(names):
            names = [f"{index}: {name}" for index, name in enumerate(names, 1)]
        roofline = examinations.roofline("Roofline", dict(zip(names, counted, strict=True)))
        write_picture(Path(out), charts.render(roofline, form=form))


@contextmanager
def _judging(subject: Subject, timeout: float) -> Generator[Callable[[Request], Result]]:
    """Yield a function that judges a request, on the fleet or on this machine."""
    if subject.device is not None:
        from kqueue.judging import LocalJudge

        with LocalJudge(subject.device) as local:
            yield local
        return
    from kqueue.client import connect

    with connect() as client:

        def judge(request: Request) -> Result:
            ticket = client.submit(request)
            say(f"judging it as {ticket.evaluation_id}")
            try:
                return ticket.wait(timeout)
            except BaseException:
                ticket.cancel()
                raise

        yield judge


def _show(result: Result) -> None:
    from kqueue import examinations

    console().print(category_text(result.category, result.blame), end="")
    console().print(f": {one_line(result.message)}", soft_wrap=True)
    _print(examinations.lines(result.evidence))


def _print(lines: Iterator[str]) -> None:
    for line in lines:
        console().print(clean(line), soft_wrap=True)
