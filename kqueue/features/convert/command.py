"""`kqueue convert`: verdicts as results of another project, and its results as fields of verdicts or as claims."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from statistics import geometric_mean
from typing import Annotated

import typer

from kqueue import formats
from kqueue.categories import Category
from kqueue.cli.render import say, write_json
from kqueue.errors import InvalidRequest
from kqueue.features.convert.records import Form, Record, from_verdict, get, lost, to_verdict, written
from kqueue.formats import common


def convert(
    file: Annotated[
        Path, typer.Argument(metavar="FILE", help="Verdicts (JSON lines, Parquet), results, or - for stdin.")
    ],
    *,
    to: Annotated[str, typer.Option(metavar="FORM", help="verdict, claims, or the name of a form.")],
    problems: Annotated[Path | None, typer.Option(metavar="SET", help="Their problems, for traces and claims.")] = None,
) -> None:
    """Convert verdicts to other projects' results, or back. List the fields that have no place in them."""
    from kqueue.features.convert.forms import FORMS, traces_of

    if to not in {"verdict", "claims", *FORMS}:
        raise InvalidRequest(f"--to {to}: use one of verdict, claims, {', '.join(FORMS)}")
    made, left, reasons = list[Record](), set[str](), Counter[str]()
    target = FORMS.get(to)
    for form, record in _results(Path("/dev/stdin") if str(file) == "-" else file, list(FORMS.values())):
        try:
            given = to_verdict(form, record) if form else _verdict(record)
            if to == "flashinfer-bench" and not form and problems:
                made += traces_of(problems, given)
            else:
                made.append(from_verdict(target, given) if target else given)
        except InvalidRequest as error:
            reasons[str(error)] += 1
            continue
        if form and form is not target:
            with suppress(InvalidRequest):
                left.update(f"{form.name}: {path}" for path in lost(record, written(form, given)))
        if target and form is not target:
            left.update(lost({**given, "other": None}, to_verdict(target, made[-1])))
    for content in target.join(made) if target else made if to == "verdict" else _claims(made, problems, reasons):
        write_json(content)
    if left:
        say(f"has no place in {to}: {', '.join(sorted(left))}")
    for why, count in reasons.items():
        say(f"{count} left out: {why}")
    if reasons:
        raise typer.Exit(1)


def _results(file: Path, forms: list[Form]) -> Iterator[tuple[Form | None, Record]]:
    """Yield the results in a file, each with its form, which is None for verdicts."""
    for content in common.rows(file):
        is_verdict = "blame" in content or "other" in content or isinstance(content.get("verdict", ...), dict | None)
        results = ([(form, one) for one in records] for form in forms if (records := form.split(content)))
        if (found := [(None, content)] if is_verdict else next(results, None)) is None:
            raise InvalidRequest(f"{file}: has no verdict, and no result of {', '.join(form.name for form in forms)}")
        yield from found


def _verdict(record: Record) -> Record:
    """Return the verdict in a line of `judge --json` or `show --json`, or in a row of an export, or refuse it."""
    if record.get("verdict", ...) is None:
        raise InvalidRequest("the kernel has no verdict")
    record = json.loads(json.dumps(record, default=str))  # Parquet has times
    labels = {name: record[name] for name in ("problem_label", "kernel_label") if record.get(name)}
    texts = {name: text for name in ("facts", "evidence", "environment") if isinstance(text := record.get(name), str)}
    found = {**labels, **record.get("verdict", record), **{name: json.loads(text) for name, text in texts.items()}}
    if found.get("category") and "compiled" not in found:  # rows of an export lack the derived values
        info, times = Category(found["category"]).info, {"timing_basis": get(found, "runtime.basis")}
        times |= {f"{one}_ms": ms for one in ("runtime", "baseline") if (ms := get(found, f"{one}.median_ms") or 0) > 0}
        found |= {"compiled": info.compiled, "correctness": info.correctness, **times}
    return found


def _claims(verdicts: list[Record], problems: Path | None, reasons: Counter[str]) -> Iterator[Record]:
    """Yield the claims of kernels that were right in all their results, with the sources of an export or a set."""
    known = {entry.name: entry for entry in formats.read(problems)} if problems else {}
    groups: dict[tuple[str, str], list[Record]] = {}
    for one in verdicts:
        groups.setdefault((str(one.get("problem_label")), str(one.get("kernel_label"))), []).append(one)
    for (problem, kernel), some in groups.items():
        source, text = some[0].get("problem"), some[0].get("kernel")
        if isinstance(entry := known.get(problem), formats.Problem):
            source, text = entry.source, entry.solutions.get(kernel)
        if not source or not text or any(one.get("category") != "passed" for one in some):
            reasons["no claim, because the kernel was not right, or an export or --problems lacks its sources"] += 1
            continue
        speedups = [speedup for one in some if (speedup := one.get("speedup"))]
        sources = {"reference": source, "kernel": formats.kernel(source, text), "backend": some[0].get("backend")}
        yield {"name": f"{problem}/{kernel}", **sources, "speedup": geometric_mean(speedups) if speedups else None}
