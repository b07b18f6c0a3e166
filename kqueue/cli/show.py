"""`kqueue show` and `kqueue diff`: one evaluation in full, and two side by side."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from kqueue.cli import options
from kqueue.cli.connection import database, detail_of, why
from kqueue.cli.render import (
    Columns,
    category_text,
    console,
    emit,
    finding,
    milliseconds,
    moment,
    print_table,
    provenance,
    ratio,
    span,
    table,
    text,
    yes_no,
)
from kqueue.states import EvaluationState
from kqueue.text import clean, one_line

if TYPE_CHECKING:
    from rich.text import Text

    from kqueue.contract import Outcome, Verdict
    from kqueue.evidence import Measurement
    from kqueue.store.reports import AttemptDetail, Detail

#: Maximum number of lines of the log that `show` prints without `--log`.
_LOG_LINES: Final = 20
_STYLES: Final = {"+": "green", "-": "red", "@": "cyan"}
_Id = Annotated[str, typer.Argument(help="An evaluation's id, or its first digits.")]


def show(
    evaluation: options.Evaluation,
    as_json: options.Json = False,
    source: Annotated[bool, typer.Option("--source", help="Show the sources too.")] = False,
    log: Annotated[bool, typer.Option("--log", help="Show the whole stored log.")] = False,
) -> None:
    """Show one evaluation.

    It prints settings, attempts, the verdict in words, times and the end of the log. `--json` has facts and evidence.
    """
    from kqueue.store import reports

    with database("show") as engine:
        detail = reports.show(engine, reports.resolve_id(engine, evaluation))
        waits = why(engine, detail.evaluation_id) if detail.state != EvaluationState.DONE else None

    def record(detail: Detail) -> dict[str, Any]:
        fields = asdict(detail) | {"waiting": waits and asdict(waits)}
        if not source:
            del fields["problem"], fields["kernel"]
        if detail.verdict is not None:
            fields["verdict"] = detail.verdict.model_dump(mode="json") | detail.verdict.summary()
        return fields

    def print_(detail: Detail) -> None:
        queued = detail.state == EvaluationState.QUEUED
        _print_fields(
            evaluation=detail.evaluation_id,
            state=detail.state,
            waits=waits and waits.message,
            **_about(detail),
            batch=detail.batch,
            submitted=moment(detail.submitted_at),
            expires=moment(detail.expires_at) if queued else "",
        )
        table(_ATTEMPT)(detail.attempts)
        if detail.verdict is not None:
            _print_verdict(detail.verdict, detail.kernel, all_of_log=log)
        if source:
            _print_block("problem", detail.problem)
            _print_block("kernel", detail.kernel)

    emit(detail, print_, as_json=as_json, record=record)


_ATTEMPT: Final[Columns[AttemptDetail]] = {
    "attempt": lambda attempt: attempt.number,
    "worker": lambda attempt: attempt.worker,
    "device": lambda attempt: (attempt.environment or {}).get("device"),
    "started": lambda attempt: moment(attempt.started_at),
    "took s": lambda attempt: (
        f"{(attempt.ended_at - attempt.started_at).total_seconds():.2f}" if attempt.ended_at else ""
    ),
    "category": lambda attempt: (
        category_text(attempt.category, attempt.category.blame) if attempt.category else "running"
    ),
    "message": lambda attempt: attempt.message,
}


def _about(detail: Detail) -> dict[str, str]:
    return {
        "problem": f"{detail.problem_label or ''} {detail.problem_hash[:12]}",
        "kernel": f"{detail.kernel_label or ''} {detail.kernel_hash[:12]} ({detail.backend})",
        "lane": detail.lane,
        "settings": _settings(detail.settings),
    }


def _print_fields(**fields: object) -> None:
    """Print names and values in two columns. Empty values are omitted."""
    for name, value in fields.items():
        if value is not None and value != "":
            console().print(f"{name:<11}", end="", style="bold")
            console().print(one_line(value), soft_wrap=True)


def _print_block(title: str, lines: str) -> None:
    console().print(f"--- {title}", style="bold")
    console().print(clean(lines.rstrip("\n")), soft_wrap=True)


def _settings(settings: Mapping[str, Any]) -> str:
    """Return precision, checks, and all settings that differ from the default."""
    from kqueue.contract import Settings

    default = dict(_flat(Settings().model_dump(mode="json")))
    shown = {"precision", "checks"}
    return " ".join(
        f"{name}={value}" for name, value in _flat(settings) if name in shown or default.get(name, ...) != value
    )


def _flat(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in tree.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield prefix + name, value


def _print_verdict(verdict: Verdict, kernel: str, *, all_of_log: bool) -> None:
    reused = verdict.reused_from and f"from {verdict.reused_from}, judged {moment(verdict.judged_at)}"
    environment = {} if verdict.environment is None else verdict.environment.model_dump()
    print_result(
        verdict,
        kernel,
        {
            "finished": f"{moment(verdict.finished_at)}, written by {verdict.written_by}",
            "reused": reused,
            **{f"  {name}": _value(value) for name, value in environment.items() if value is not None},
        },
        all_of_log=all_of_log,
    )


def print_result(result: Outcome | Verdict, kernel: str, fields: Mapping[str, object], *, all_of_log: bool) -> None:
    """Print the result of one kernel in words. Its facts and evidence are in the JSON form only.

    Args:
        kernel: the kernel's source.
        fields: further names and values to print.
        all_of_log: print the whole log, not only its last lines.
    """
    from kqueue import feedback

    console().print(category_text(result.category, result.blame), end="")
    console().print(f"  blame: {result.blame}")
    _print_fields(
        phase=result.phase,
        compiled=yes_no(result.compiled),
        correct=yes_no(result.correctness),
        runtime=_measurement(result.runtime),
        baseline=_measurement(result.baseline),
        speedup=ratio(result.speedup) + span(result.speedup_interval),
        provenance=provenance(result.evidence.provenance),
        **fields,
    )
    _print_block("in words", feedback.describe(result, kernel))
    # Findings that ended the evaluation are among its facts.
    if findings := result.evidence.findings or result.facts.findings:
        _print_block("findings", "\n".join(map(finding, findings)))
    if results := result.evidence.profiles:
        _print_block("profiles", "\n".join(f"{one.name}: {one.words}" for one in results))
    lines = result.log.splitlines()
    if lines and all_of_log:
        _print_block("log", result.log)
    elif lines:
        left_out = f", the last {_LOG_LINES} of {len(lines)} lines (--log for all)" if len(lines) > _LOG_LINES else ""
        _print_block(f"log{left_out}", "\n".join(lines[-_LOG_LINES:]))


def _measurement(taken: Measurement | None) -> str:
    if taken is None:
        return ""
    median, q1, q3, overhead = map(milliseconds, (taken.median_ms, taken.q1_ms, taken.q3_ms, taken.null_ms))
    return (
        f"{median} ms, quartiles {q1} to {q3}, {taken.count} calls, {'cold' if taken.cold_l2 else 'warm'} L2, "
        f"{overhead} ms launch overhead subtracted, basis {taken.basis}"
    )


def _value(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)


# diff ------------------------------------------------------------------------------------------------


def diff(
    first: _Id,
    second: _Id,
    context: Annotated[int, typer.Option(min=0, max=10_000, help="Number of lines round each change.")] = 3,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one record with `first`, `second` and `diff`.")
    ] = False,
) -> None:
    """Show the differences between two evaluations: verdicts, times and sources."""
    from kqueue import differences

    a, b = (detail_of("diff", name) for name in (first, second))
    changes = differences.of_sources(a, b, context=context)

    def record(pair: tuple[Detail, Detail]) -> dict[str, Any]:
        return {"first": _plain(pair[0]), "second": _plain(pair[1]), "diff": "\n".join(changes)}

    def print_(pair: tuple[Detail, Detail]) -> None:
        a, b = pair
        mine, others = _cells(a), _cells(b)
        rows = ((name, cell, others[name]) for name, cell in mine.items())
        print_table(("", *(str(one.evaluation_id)[:8] for one in pair)), rows)
        if summary := differences.of_times(a, b):
            console().print(text(summary))
        for line in changes or ["the sources are the same"]:
            console().print(clean(line), style=_STYLES.get(line[:1], ""), soft_wrap=True)

    emit((a, b), print_, as_json=as_json, record=record)


_SAME: Final = ("problem_label", "problem_hash", "kernel_label", "kernel_hash", "backend", "lane", "state", "settings")


def _plain(detail: Detail) -> dict[str, Any]:
    fields = {name: getattr(detail, name) for name in _SAME}
    return {
        "evaluation_id": str(detail.evaluation_id),
        **fields,
        "verdict": detail.verdict and detail.verdict.summary(),
    }


def _cells(detail: Detail) -> dict[str, str | Text]:
    verdict = detail.verdict
    runtime = verdict.runtime if verdict else None
    spread = f" ({milliseconds(runtime.q1_ms)} to {milliseconds(runtime.q3_ms)})" if runtime else ""
    return {
        **_about(detail),
        "device": (verdict.environment.device or "") if verdict and verdict.environment else "",
        "category": category_text(verdict.category, verdict.blame) if verdict else detail.state,
        "runtime ms": milliseconds(runtime.median_ms) + spread if runtime else "",
        "baseline ms": milliseconds(verdict.baseline_ms if verdict else None),
        "speedup": ratio(verdict.speedup if verdict else None),
        "message": verdict.message if verdict else "",
    }
