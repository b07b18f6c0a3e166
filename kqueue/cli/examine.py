"""`kqueue sanitize` and `kqueue profile`: a kernel once more, under a tool of the CUDA toolkit."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kqueue.cli import options, pictures, subjects
from kqueue.cli.render import say, write_json
from kqueue.errors import InvalidRequest

if TYPE_CHECKING:
    from kqueue.cli.subjects import Subject
    from kqueue.contract import Request, Result, Sanitizer
    from kqueue.evidence import Profile
    from kqueue.examinations import Requests

#: Exit statuses: something was found; the tools do not say all.
_FOUND, _UNTOLD = 1, 3

_Json = Annotated[bool, typer.Option("--json", help="Print what was found as one JSON line.")]
_Timeout = Annotated[
    float, typer.Option("--timeout", metavar="S", min=1, help="Longest wait for the fleet; what is left is cancelled.")
]


def register(app: typer.Typer) -> None:
    """Add the commands to ``app``."""
    app.command()(sanitize)
    app.command()(profile)


def sanitize(
    what: subjects.What,
    problem: subjects.Problem = None,
    tool: Annotated[
        list[str] | None,
        typer.Option("--tool", metavar="TOOL", help="memcheck, racecheck, initcheck or synccheck; repeatable."),
    ] = None,
    whole: Annotated[bool, typer.Option("--whole", help="Leave the problem's sizes as they are.")] = False,
    backend: options.Backend = None,
    lane: subjects.Lane = None,
    device: subjects.Device = None,
    precision: options.Precision = None,
    settings: options.SettingsTree = None,
    assignments: options.Assignments = None,
    timeout: _Timeout = 900,
    as_json: _Json = False,
) -> None:
    """Run a kernel under compute-sanitizer: with small sizes, unless it fares differently there.

    All four tools by default. Exit with 1 if something was found, and with 3 if a tool could not say all.
    """
    from kqueue import examinations

    tools = _tools(tool)
    subject = subjects.find(
        "sanitize",
        what,
        problem,
        backend=backend,
        lane=lane,
        device=device,
        precision=precision,
        settings=settings,
        assignments=assignments,
    )
    known = None if subject.verdict is None else subject.verdict.category
    with _judging(subject, timeout) as judge:
        request, result = _run(examinations.sanitizing(subject.request, tools, known, whole=whole), judge)
    runs = result.evidence.sanitized or ()
    small = request.problem != subject.request.problem
    if as_json:
        write_json(result.summary() | {"small": small, "sanitized": [run.model_dump(mode="json") for run in runs]})
    else:
        _show(result, examinations.lines(result.evidence))
        if small and runs:
            say("the problem's sizes were made small, where a kernel made for its own may fail alone (--whole)")
    if any(run.findings for run in runs):
        raise typer.Exit(_FOUND)
    if not runs or any(run.error is not None for run in runs):
        raise typer.Exit(_UNTOLD)


def profile(
    what: subjects.What,
    problem: subjects.Problem = None,
    against: Annotated[
        str | None, typer.Option(metavar="ID|KERNEL", help="Another kernel of the problem, to compare it with.")
    ] = None,
    out: Annotated[str | None, typer.Option(metavar="FILE", help="Draw the roofline, .svg or .png.")] = None,
    backend: options.Backend = None,
    lane: subjects.Lane = None,
    device: subjects.Device = None,
    precision: options.Precision = None,
    settings: options.SettingsTree = None,
    assignments: options.Assignments = None,
    timeout: _Timeout = 900,
    as_json: _Json = False,
) -> None:
    """Count with Nsight Compute what each kernel of one call does, and what it waits for.

    An evaluation that was profiled already is shown and not judged again. Exit with 3 if nothing could be counted.
    """
    from kqueue import charts, examinations

    form = pictures.form_of(out)
    found = [
        subjects.find(
            "profile",
            one,
            problem,
            backend=backend,
            lane=lane,
            device=device,
            precision=precision,
            settings=settings,
            assignments=assignments,
        )
        for one in (what, against)
        if one is not None
    ]
    if len({subject.request.problem for subject in found}) > 1:
        raise InvalidRequest(f"--against {against}: it is a kernel of another problem")
    results: list[Result] = []
    with ExitStack() as stack:
        judge: Callable[[Request], Result] | None = None
        for subject in found:
            if subject.verdict is not None and examinations.is_profiled(subject.verdict.evidence):
                results.append(subject.verdict)
                continue
            judge = judge or stack.enter_context(_judging(subject, timeout))
            results.append(_run(examinations.profiling(subject.request), judge)[1])
    counted = [told for result in results if (told := result.evidence.profile) is not None and told.kernels]
    names = [subject.request.kernel_label or "the kernel" for subject in found]
    if as_json:
        write_json(
            {
                "kernels": [
                    result.summary() | {"profile": (told := result.evidence.profile) and told.model_dump(mode="json")}
                    for result in results
                ]
            }
        )
    else:
        for result in results:
            _show(result, examinations.lines(result.evidence))
        if len(counted) > 1:
            _print(examinations.compared(counted[0], counted[1]))
    if len(counted) < len(found):
        raise typer.Exit(_UNTOLD)
    if out is not None:
        roofline = examinations.roofline("Roofline", _named(names, counted))
        pictures.write(Path(out), charts.render(roofline, form=form))


def _tools(given: list[str] | None) -> list[Sanitizer]:
    from kqueue.contract import Sanitizer

    if wrong := [name for name in given or () if name not in list(Sanitizer)]:
        raise InvalidRequest(f"--tool {wrong[0]}: it is one of {', '.join(Sanitizer)}")
    return [Sanitizer(name) for name in given] if given else list(Sanitizer)


@contextmanager
def _judging(subject: Subject, timeout: float) -> Generator[Callable[[Request], Result]]:
    """Yield what judges a request: the fleet, or a judge on this machine."""
    if subject.device is not None:
        from kqueue.judging import LocalJudge

        with LocalJudge(subject.device) as local:
            yield local
        return
    from kqueue.client import Client

    with Client() as client:

        def judge(request: Request) -> Result:
            ticket = client.submit(request)
            say(f"judging it as {ticket.evaluation_id}")
            try:
                return ticket.wait(timeout)
            except BaseException:
                ticket.cancel()
                raise

        yield judge


def _run(requests: Requests, judge: Callable[[Request], Result]) -> tuple[Request, Result]:
    """Have requests judged, until one is the last; return it, and what became of it."""
    request = next(requests)
    while True:
        result = judge(request)
        try:
            request = requests.send(result)
        except StopIteration:
            return request, result


def _named(names: Sequence[str], profiles: Sequence[Profile]) -> dict[str, Profile]:
    """Return profiles by the kernels' names, which may be the same."""
    if len(set(names)) < len(names):
        names = [f"{place}: {name}" for place, name in enumerate(names, 1)]
    return dict(zip(names, profiles, strict=True))


def _show(result: Result, lines: Iterator[str]) -> None:
    from kqueue.cli.render import category_text, console
    from kqueue.text import one_line

    console().print(category_text(result.category, result.blame), end="")
    console().print(f": {one_line(result.message)}", soft_wrap=True)
    _print(lines)


def _print(lines: Iterator[str]) -> None:
    from kqueue.cli.render import console
    from kqueue.text import clean

    for line in lines:
        console().print(clean(line), soft_wrap=True)
