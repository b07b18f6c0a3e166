"""The subject of a command: the kernel of an evaluation, or of a file with its problem."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kqueue.cli import options, sources
from kqueue.errors import EvaluationFailed, InvalidRequest, KqueueError

if TYPE_CHECKING:
    from kqueue.contract import Request, Verdict

What = Annotated[
    str,
    typer.Argument(
        metavar="ID|KERNEL", help="An evaluation's id, or its first digits. With --problem, a kernel's file."
    ),
]
Problem = Annotated[
    str | None, typer.Option("--problem", "-p", metavar="FILE", help="The reference of a kernel in a file.")
]
Lane = Annotated[str | None, typer.Option("--lane", help="With --problem: auto, cpu, gpu, or gpu.<model>.")]
Device = Annotated[
    str | None,
    typer.Option(
        "--device",
        metavar="DEVICE",
        help="With --problem: judge without a fleet, on a GPU's index or UUID, or cpu.",
    ),
]


@dataclass(frozen=True, slots=True)
class Subject:
    """A kernel to examine.

    Attributes:
        verdict: its verdict, or None for a file.
        device: the device of a local judge, or None for the fleet.
    """

    request: Request
    verdict: Verdict | None = None
    device: str | None = None


def find(
    command: str,
    what: str,
    problem: str | None,
    *,
    backend: str | None,
    lane: str | None,
    device: str | None,
    precision: str | None,
    settings: str | None,
    assignments: Iterable[str] | None,
) -> Subject:
    """Return the kernel that a command's arguments name.

    Args:
        command: its name. Its evaluations are in the batch of this name and the examined evaluation's id.
        what: an evaluation's id or first digits, or a kernel's file.
        problem: the file of its problem, or None for an evaluation.
        backend, lane, device, precision, settings, assignments: options that are only for files.

    Raises:
        InvalidRequest: the arguments do not fit, or a file is wrong.
        EvaluationFailed: the fleet or the problem failed in the evaluation.
        KqueueError: it has no verdict yet, or the fleet cannot be used.
    """
    if problem is None:
        given = {
            "--backend": backend,
            "--lane": lane,
            "--device": device,
            "--precision": precision,
            "--settings": settings,
            "--set": assignments,
        }
        if wrong := [name for name, value in given.items() if value]:
            raise InvalidRequest(f"{wrong[0]}: an evaluation's options are fixed: give --problem too")
        return _of_evaluation(command, what)
    tree = options.settings_of(
        settings, assignments or (), precision=precision, checks=None, calls=None, no_timing=False
    )
    if device is not None and lane is not None:
        raise InvalidRequest("--lane and --device: give one of them. --device judges without a fleet")
    return Subject(_of_files(problem, what, backend, lane, tree), device=device)


def _of_files(problem: str, kernel: str, backend: str | None, lane: str | None, tree: dict[str, Any]) -> Request:
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


def _of_evaluation(command: str, prefix: str) -> Subject:
    from kqueue.cli.connection import database
    from kqueue.store import reports

    with database(command) as engine:
        detail = reports.show(engine, reports.resolve_id(engine, prefix))
    if detail.verdict is None:
        raise KqueueError(
            f"{detail.evaluation_id} has no verdict yet: `kqueue wait {detail.evaluation_id}` waits for it"
        )
    if detail.verdict.blame not in {"none", "candidate"}:
        raise EvaluationFailed(detail.verdict)
    request = detail.request(batch=f"{command}-{detail.evaluation_id}", priority="interactive")
    return Subject(request, detail.verdict)
