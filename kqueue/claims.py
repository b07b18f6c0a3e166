"""Published kernels with their claims: the files of papers, and what a verdict says about a claim.

A claim is a reference, a kernel and a speedup that its authors report. :func:`read` reads the released files of a
paper, and :func:`rule` compares a claim with the outcome of a judgement under the authors' own protocol and under the
strict comparison. Reading runs nothing.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any, Final, cast

from kqueue.categories import Category
from kqueue.contract import Result
from kqueue.errors import InvalidRequest
from kqueue.evidence import Severity
from kqueue.kernelbench import generations, problems_of, speedup_of
from kqueue.profiles import Protocol

#: Files of a folder that are read as sets.
_SETS: Final = frozenset({".json", ".jsonl"})
#: Outcomes of a limit that the authors' own machines did not have. They do not refute a claim.
_LIMITS: Final = frozenset({
    Category.COMPILE_TIMEOUT, Category.GPU_OUT_OF_MEMORY, Category.HOST_OUT_OF_MEMORY, Category.TIMEOUT,
    Category.OUTPUT_LIMIT, Category.SANDBOX_VIOLATION,
})  # fmt: skip
#: Exceptions of an import that lacks a package.
_MISSING: Final = ("ModuleNotFoundError", "ImportError")
_CHEATS: Final = frozenset({Category.REWARD_HACK, Category.REJECTED_BY_POLICY})


@dataclass(frozen=True, slots=True)
class Claim:
    """A published kernel.

    Attributes:
        name: name of the kernel, unique within its set.
        problem: source of the reference.
        kernel: source of the kernel.
        speedup: the published speedup, or None if only correctness is claimed.
        backend: the backend that the set names, or None.
    """

    name: str
    problem: str
    kernel: str
    speedup: float | None = None
    backend: str | None = None


@dataclass(frozen=True, slots=True)
class Claims:
    """A set of claims.

    Attributes:
        format: name of the files' format.
        profile: the protocol by which its authors compare values.
        claims: the claims, in the set's order.
        skipped: names of entries without a claim, each with the reason.
    """

    format: str
    profile: Protocol
    claims: Sequence[Claim]
    skipped: Sequence[tuple[str, str]]


class Ruling(StrEnum):
    """The result for a claim."""

    HOLDS = "holds"
    """The kernel is right, and the claim is not above the interval of the measured speedup."""
    SLOWER = "slower than claimed"
    """The kernel is right, and the claim is above the interval of the measured speedup."""
    WRONG = "wrong under its own protocol"
    """The kernel fails the comparison of its authors, or does not run."""
    STRICT = "wrong under strict only"
    """The kernel passes the comparison of its authors, and fails a rule of the strict one."""
    CHEAT = "cheat"
    """The kernel does not do the work, or attacks its judge."""
    UNJUDGED = "cannot be judged"
    """There is no result about the claim, for the given reason."""


@dataclass(frozen=True, slots=True)
class Ruled:
    """A claim with its result.

    Attributes:
        speedup, low, high: the measured speedup with its 95 % interval, or None where it was not timed.
        why: the rule, or the reason, in a few words.
        rule: the strict rule of :attr:`Ruling.STRICT` by which kernels are counted, or else an empty string.
    """

    name: str
    ruling: Ruling
    claimed: float | None
    speedup: float | None = None
    low: float | None = None
    high: float | None = None
    runtime_ms: float | None = None
    baseline_ms: float | None = None
    category: str = ""
    rule: str = ""
    why: str = ""
    evaluation_id: str = ""


def rule(claim: Claim, outcome: Result, *, evaluation_id: str = "") -> Ruled:
    """Return the result for a claim from its outcome, which has the row of exactly one profile."""
    low, high = outcome.speedup_interval or (outcome.speedup, outcome.speedup)
    ruling, strict, why = _ruling(claim, outcome, high)
    return Ruled(
        claim.name, ruling, claim.speedup, outcome.speedup, low, high, outcome.runtime_ms, outcome.baseline_ms,
        str(outcome.category), strict, why, evaluation_id,
    )  # fmt: skip


def _ruling(claim: Claim, outcome: Result, high: float | None) -> tuple[Ruling, str, str]:
    """Return the ruling, the strict rule and the reason."""
    category, evidence = outcome.category, outcome.evidence
    message = f"{category}: {outcome.message}"
    lacks = category is Category.IMPORT_ERROR and (outcome.facts.exception or "").endswith(_MISSING)
    if not outcome.judged or category in _LIMITS or lacks:
        return Ruling.UNJUDGED, "", message
    cheats = [finding.meaning for finding in evidence.findings or () if finding.severity is Severity.CHEAT]
    if category in _CHEATS or cheats:
        return Ruling.CHEAT, "", "; ".join(dict.fromkeys(cheats)) or message
    if evidence.provenance is not None and evidence.provenance.decoy:
        return Ruling.CHEAT, "", f"decoy: {evidence.provenance.why}"
    if outcome.passed:
        if claim.speedup is None:
            return Ruling.HOLDS, "", "only correctness is claimed"
        if high is None:
            return Ruling.UNJUDGED, "", evidence.untimed or "it is right, and its speedup could not be measured"
        return (Ruling.HOLDS if claim.speedup <= high else Ruling.SLOWER), "", ""
    own = next(iter(evidence.profiles or ()), None)
    if own is not None and own.passed:
        return Ruling.STRICT, _strict_rule(outcome), outcome.message
    # Protocols of papers do not check whether a call changes or returns its inputs, so only the strict comparison ends
    # here. Values were not compared.
    if outcome.facts.input is not None and (own is None or own.passed is None):
        return Ruling.STRICT, _strict_rule(outcome), outcome.message
    return Ruling.WRONG, "", f"{category}: {own.why}" if own is not None and own.passed is False else message


def _strict_rule(outcome: Result) -> str:
    """Return the rule of the strict comparison that a kernel fails."""
    facts = outcome.facts
    if facts.input is not None:
        return "works in place"
    if outcome.category not in {Category.WRONG_VALUES, Category.NOT_FINITE}:
        return str(outcome.category)
    if facts.effect is not None:
        return "effects other than the returned values"
    if facts.kind not in (None, "given"):
        return f"hidden inputs ({facts.kind})"
    if facts.precision_downgrade:
        return "lower precision than the reference's"
    return "training mode" if outcome.evidence.training_modules else "tolerance"


# reading ---------------------------------------------------------------------------------------------


def read(path: Path, problems: Path | None = None) -> Claims:
    """Read a set of claims: a file, or a folder with files of one format or with a run of KernelBench.

    Args:
        problems: the folder of KernelBench's problems, for a run of KernelBench.

    Raises:
        InvalidRequest: the path has no claims in a known format. The message names the place and the remedy.
    """
    if not path.exists():
        raise InvalidRequest(f"{path}: No such file or directory")
    skipped: list[tuple[str, str]] = []
    if path.is_dir() and any(generations(path)):
        if problems is None:
            raise InvalidRequest(f"{path}: a run of KernelBench has no references: give --problems DIR")
        run = _run(path, problems, skipped)
        return Claims("a run of KernelBench", Protocol.KERNELBENCH, _named(run), skipped)
    if problems is not None:
        raise InvalidRequest(f"--problems: only a run of KernelBench needs it, and {path} has its references")
    files = sorted(one for one in path.rglob("*") if one.suffix in _SETS) if path.is_dir() else [path]
    if not files:
        raise InvalidRequest(f"{path}: has neither *.json, *.jsonl nor level_L_problem_P_sample_S_kernel.py")
    kinds: set[str] = set()
    claims: list[Claim] = []
    for file in files:
        for where, record in _records(file):
            kind = "CUDA-L1" if "custom_code" in record else "JSON lines"
            kinds.add(kind)
            one = (_cuda_l1 if kind == "CUDA-L1" else _plain)(where, record)
            if isinstance(one, Claim):
                claims.append(one)
            else:
                skipped.append(one)
    if not claims or len(kinds) > 1:
        mixed = f"entries of {' and '.join(sorted(kinds))}: give one of them"
        raise InvalidRequest(f"{path}: has {mixed if claims else 'no kernel with a claim: see docs/rejudged.md'}")
    profile = Protocol.CUDA_L1 if kinds == {"CUDA-L1"} else Protocol.KERNELBENCH
    return Claims(kinds.pop(), profile, _named(claims), skipped)


def _named(claims: Sequence[Claim]) -> list[Claim]:
    """Return claims in their order. Raise InvalidRequest if two have the same name."""
    names: set[str] = set()
    for claim in claims:
        if claim.name in names:
            raise InvalidRequest(f"{claim.name}: two entries have this name: give each its own, or read them apart")
        names.add(claim.name)
    return list(claims)


def _records(file: Path) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield the entries of a file of JSON lines, or of CUDA-L1's object of lists by level, with their places."""
    try:
        text = file.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidRequest(f"{file}: cannot be read: {error}") from None
    levels = _level_lists(text) if text.lstrip()[:2] in ("{\n", "{\r", "{ ") else None
    if levels is not None:
        for level, entries in levels.items():
            for number, entry in enumerate(entries, 1):
                yield f"{file.name} level {level} entry {number}", {"level_id": level, **entry}
        return
    for number, line in enumerate(text.splitlines(), 1):
        if line.strip():
            yield f"{file.name} line {number}", _object(line, f"{file} line {number}")


def _level_lists(text: str) -> dict[str, list[dict[str, Any]]] | None:
    """Return CUDA-L1's lists by level, or None for another text."""
    try:
        found = json.loads(text)
        return {str(level): [{**entry} for entry in entries] for level, entries in found.items()}
    except (ValueError, TypeError, AttributeError):
        return None


def _object(line: str, where: str) -> Mapping[str, Any]:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise InvalidRequest(f"{where}: not JSON: {error}") from None
    if not isinstance(record, dict):
        raise InvalidRequest(f"{where}: an object is needed, with the fields reference, kernel and speedup")
    return cast("dict[str, Any]", record)


def _cuda_l1(where: str, record: Mapping[str, Any]) -> Claim | tuple[str, str]:
    """Read an entry of CUDA-L1. Its speedup is over eager PyTorch."""
    name = f"{record.get('level_id', '')}/{record.get('task_id', where)}".lstrip("/")
    score = record.get("score_default", record.get("score"))
    if not record["custom_code"]:
        return name, "no kernel is published"
    return Claim(name, _text(record, "ref_code", where), _text(record, "custom_code", where), _number(score, where))


def _plain(where: str, record: Mapping[str, Any]) -> Claim:
    known = {"name", "reference", "kernel", "speedup", "backend"}
    if unknown := sorted(record.keys() - known):
        raise InvalidRequest(f"{where}: no field {unknown[0]!r}: the fields are {', '.join(sorted(known))}")
    name = str(record.get("name") or where)[-200:]
    reference, kernel = _text(record, "reference", where), _text(record, "kernel", where)
    backend = record.get("backend")
    return Claim(
        name, reference, kernel, _number(record.get("speedup"), where), None if backend is None else str(backend)
    )


def _text(record: Mapping[str, Any], field: str, where: str) -> str:
    value = record.get(field)
    if not isinstance(value, str) or not value.strip():
        raise InvalidRequest(f"{where}: the field {field!r} must be a source")
    return value


def _number(value: object, where: str) -> float | None:
    if value is None:
        return None
    try:
        # CUDA-L1's files have numbers and texts.
        number = float(cast("Any", value))
    except (TypeError, ValueError):
        number = math.nan
    if isinstance(value, bool) or not math.isfinite(number) or number <= 0:
        raise InvalidRequest(f"{where}: the speedup must be a number above 0, not {value!r}")
    return number


def _run(folder: Path, problems: Path, skipped: list[tuple[str, str]]) -> list[Claim]:
    """Read a run of KernelBench. Its claims are the samples that its results call correct."""
    results = _results(folder)
    claims: list[Claim] = []
    for path, (level, problem, sample) in generations(folder):
        name = f"{level}/{problem}/{sample}"
        row = _row(results.get(str(problem)), sample)
        references = problems_of(problems, level).get(problem, [])
        if row is None or not row.get("correctness"):
            skipped.append((name, "its results do not call it correct"))
        elif len(references) != 1:
            skipped.append((name, f"{problems} has {len(references)} problems {problem} for level {level}"))
        else:
            reference, kernel = (one.read_text(encoding="utf-8", errors="replace") for one in (references[0], path))
            claims.append(Claim(name, reference, kernel, speedup_of(row)))
    if not claims:
        raise InvalidRequest(f"{folder}: its eval_results.json calls no sample correct that has a problem")
    return claims


def _results(folder: Path) -> dict[str, Any]:
    file = folder / "eval_results.json"
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
        return {str(int(name)): rows for name, rows in content.items()}
    except (OSError, ValueError, AttributeError) as error:
        raise InvalidRequest(f"{file}: the claims of a run are in this file, which cannot be read: {error}") from None


def _row(rows: Any, sample: int) -> Mapping[str, Any] | None:
    """Return a sample's row. Early results of KernelBench have one row for each problem, without a list."""
    entries = cast("list[dict[str, Any]]", rows if isinstance(rows, list) else [rows])
    return next(({"metadata": {}, **row} for row in entries if row.get("sample_id", 0) == sample), None)
