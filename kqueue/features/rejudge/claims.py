"""Published kernels with their claims: the files of papers, and what a verdict says about a claim.

A claim is a reference, a kernel and a speedup that its authors report. :func:`read` reads the released files of a
paper, and :func:`rule` compares a claim with the outcome of a judgement under the authors' own protocol and under the
strict comparison. Reading runs nothing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, Final

from pydantic import BaseModel, Field

from kqueue.categories import Blame, Category
from kqueue.contract import Verdict
from kqueue.errors import InvalidRequest, LaneUnavailable
from kqueue.evidence import Evidence, Severity
from kqueue.features.kernelbench.runs import generations, problems_of, results_of, speedup_of
from kqueue.features.rejudge import releases
from kqueue.formats import common
from kqueue.formats.common import Refused
from kqueue.profiles import Protocol

#: Outcomes of a limit that the authors' own machines did not have. They do not refute a claim.
_LIMITS: Final = frozenset({
    Category.COMPILE_TIMEOUT, Category.GPU_OUT_OF_MEMORY, Category.HOST_OUT_OF_MEMORY, Category.TIMEOUT,
    Category.OUTPUT_LIMIT, Category.SANDBOX_VIOLATION,
})  # fmt: skip
#: Exceptions of an import that lacks a package.
_MISSING: Final = ("ModuleNotFoundError", "ImportError")
#: Outcomes of a kernel whose answers were never seen, for example because it was written for another GPU.
_NOT_RUN: Final = frozenset({
    Category.SYNTAX_ERROR, Category.ENTRY_POINT_MISSING, Category.IMPORT_ERROR, Category.COMPILE_ERROR,
    Category.INIT_ERROR, Category.RUNTIME_ERROR, Category.CUDA_ERROR, Category.ILLEGAL_MEMORY_ACCESS,
    Category.LAUNCH_RESOURCES_EXCEEDED, Category.CRASHED,
})  # fmt: skip
_CHEATS: Final = frozenset({Category.REWARD_HACK, Category.REJECTED_BY_POLICY})


_Source = Annotated[str, Field(min_length=1)]


class Claim(BaseModel, extra="forbid"):
    """A published kernel. Its fields are the ones of an entry of JSON lines.

    Attributes:
        name: name of the kernel, unique within its set.
        reference: source of the reference.
        kernel: source of the kernel.
        speedup: the published speedup, or None if only correctness is claimed.
        backend: the backend that the set names, or None.
        audit: the label of an audit, or None.
    """

    name: str
    reference: _Source
    kernel: _Source
    speedup: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None
    backend: str | None = None
    audit: str | None = None


@dataclass(frozen=True, slots=True)
class Claims:
    """A set of claims in order, the entries without one, and the protocol by which its authors compare values."""

    profile: Protocol
    claims: Sequence[Claim]
    skipped: Sequence[Refused]


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
        is_open: True if judging again can give another result, because there is no verdict or the fleet failed.
        audit: the claim's label.
        labels: the rules of the kernel's findings that are more than notes, and ``decoy``, with commas between.
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
    device: str = ""
    evaluation_id: str = ""
    is_open: bool = False
    audit: str | None = None
    labels: str = ""

    @property
    def ran(self) -> bool:
        """True if the judge could observe the kernel at work, so that the ruling says something about its label."""
        return self.ruling is not Ruling.UNJUDGED and self.category not in _NOT_RUN

    @property
    def is_stopped(self) -> bool:
        """True if the kernel got no verdict as a right kernel without a doubt."""
        return self.category != Category.PASSED or bool(self.labels)

    def holds_within(self, share: float) -> bool:
        """Return True if the claim is not above the interval of the measured speedup by more than this share."""
        return self.claimed is not None and self.high is not None and self.claimed <= self.high * (1 + share)


def rule(claim: Claim, result: Verdict | InvalidRequest | None) -> Ruled:
    """Return the result for a claim.

    ``result`` is a verdict with the row of exactly one profile, the error of a refused request, or None without a
    verdict.
    """
    if not isinstance(result, Verdict):
        why = "no verdict" if result is None else str(result)
        is_open = result is None or isinstance(result, LaneUnavailable)
        return Ruled(claim.name, Ruling.UNJUDGED, claim.speedup, why=why, is_open=is_open, audit=claim.audit)
    low, high = result.speedup_interval or (result.speedup, result.speedup)
    ruling, strict, why = _ruling(claim, result, high)
    return Ruled(
        claim.name, ruling, claim.speedup, result.speedup, low, high, result.runtime_ms, result.baseline_ms,
        str(result.category), strict, why, result.environment.device if result.environment else "",
        str(result.evaluation_id), result.blame in {Blame.FLEET, Blame.NOBODY}, claim.audit, _labels(result.evidence),
    )  # fmt: skip


def _labels(evidence: Evidence) -> str:
    """Return the names of what the judge reports about a kernel, whatever its verdict."""
    rules = [finding.rule for finding in evidence.findings or () if finding.severity is not Severity.NOTE]
    return ", ".join(dict.fromkeys(rules + ["decoy"] * bool(evidence.provenance and evidence.provenance.decoy)))


def _ruling(claim: Claim, verdict: Verdict, high: float | None) -> tuple[Ruling, str, str]:
    """Return the ruling, the strict rule and the reason."""
    category, evidence = verdict.category, verdict.evidence
    message = f"{category}: {verdict.message}"
    lacks = category is Category.IMPORT_ERROR and (verdict.facts.exception or "").endswith(_MISSING)
    if not verdict.judged or category in _LIMITS or lacks:
        return Ruling.UNJUDGED, "", message
    cheats = [finding.meaning for finding in evidence.findings or () if finding.severity is Severity.CHEAT]
    if category in _CHEATS or cheats:
        return Ruling.CHEAT, "", "; ".join(dict.fromkeys(cheats)) or message
    if evidence.provenance is not None and evidence.provenance.decoy:
        return Ruling.CHEAT, "", f"decoy: {evidence.provenance.why}"
    if verdict.passed:
        if claim.speedup is None:
            return Ruling.HOLDS, "", "only correctness is claimed"
        if high is None:
            return Ruling.UNJUDGED, "", evidence.untimed or "it is right, and its speedup could not be measured"
        return (Ruling.HOLDS if claim.speedup <= high else Ruling.SLOWER), "", ""
    own = next(iter(evidence.profiles or ()), None)
    if own is not None and own.passed:
        return Ruling.STRICT, _strict_rule(verdict), verdict.message
    # Protocols of papers do not check whether a call changes or returns its inputs, so only the strict comparison ends
    # here. Values were not compared.
    if verdict.facts.input is not None and (own is None or own.passed is None):
        return Ruling.STRICT, _strict_rule(verdict), verdict.message
    return Ruling.WRONG, "", f"{category}: {own.why}" if own is not None and own.passed is False else message


def _strict_rule(verdict: Verdict) -> str:
    """Return the rule of the strict comparison that a kernel fails."""
    facts = verdict.facts
    if facts.input is not None:
        return "works in place"
    if verdict.category not in {Category.WRONG_VALUES, Category.NOT_FINITE}:
        return str(verdict.category)
    if facts.effect is not None:
        return "effects other than the returned values"
    if facts.kind not in (None, "given"):
        return f"hidden inputs ({facts.kind})"
    if facts.errors and facts.errors.precision_downgrade:
        return "lower precision than the reference's"
    return "training mode" if verdict.evidence.training_modules else "tolerance"


# reading ---------------------------------------------------------------------------------------------


def read(path: Path, problems: Path | None = None) -> Claims:
    """Read a set of claims: a file, a folder with files of one format or a run of KernelBench, or a checkout.

    ``problems`` is the folder of the problems of a run of KernelBench. Raise an InvalidRequest that names the place and
    the remedy if the path has no claims in a known format.
    """
    if path.is_dir() and any(generations(path)):
        if problems is None:
            raise InvalidRequest(f"{path}: a run of KernelBench has no references: give --problems DIR")
        profile, entries = Protocol.KERNELBENCH, list(_run(path, problems))
    elif problems is not None:
        raise InvalidRequest(f"--problems: only a run of KernelBench needs it, and {path} has its references")
    elif checkout := releases.reader(path):
        profile = Protocol.KERNELBENCH_2025
        entries = [one if isinstance(one, Refused) else _claim(one["name"], one) for one in checkout(path)]
    else:
        files = [*common.files(path, "*.json"), *common.files(path, "*.jsonl")] if path.is_dir() else [path]
        records = [record for file in files for record in _records(file)]
        is_cuda_l1 = any("custom_code" in record for _, record in records)
        if is_cuda_l1 and not all("custom_code" in record for _, record in records):
            raise InvalidRequest(f"{path}: has entries of CUDA-L1 and of another form: give one of them")
        profile = Protocol.CUDA_L1 if is_cuda_l1 else Protocol.KERNELBENCH
        entries = [(_cuda_l1 if is_cuda_l1 else _claim)(where, record) for where, record in records]
    claims = [entry for entry in entries if isinstance(entry, Claim)]
    if not claims:
        raise InvalidRequest(f"{path}: has no kernel with a claim: see docs/kernelbench.md#published-claims")
    name, number = Counter(claim.name for claim in claims).most_common(1)[0]
    if number > 1:
        raise InvalidRequest(f"{name}: {number} entries have this name: give each its own, or read them apart")
    return Claims(profile, claims, [entry for entry in entries if isinstance(entry, Refused)])


def _records(file: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the entries of a file of JSON lines, or of CUDA-L1's object of lists by level, with their places."""
    text = common.read_text(file)
    levels = common.fields(text)
    if levels and all(isinstance(entries, list) for entries in levels.values()):
        records = {
            f"level {level} entry {number}": {"level_id": level, **entry} if isinstance(entry, dict) else {}
            for level, entries in levels.items()
            for number, entry in enumerate(entries, 1)
        }
    else:
        lines = enumerate(text.split("\n"), 1)
        records = {f"line {number}": common.fields(line) for number, line in lines if line.strip()}
    for place, record in records.items():
        where = f"{file.name} {place}"
        if not record:
            raise InvalidRequest(f"{where}: a JSON object is needed, with the fields reference, kernel and speedup")
        yield where, record


def _claim(where: str, fields: Mapping[str, Any]) -> Claim:
    """Validate a claim. Its place is the default of its name."""
    try:
        return common.valid(Claim, {"name": where, **fields})
    except InvalidRequest as error:
        raise InvalidRequest(f"{where}: {error}") from None


def _cuda_l1(where: str, record: Mapping[str, Any]) -> Claim | Refused:
    """Read an entry of CUDA-L1. Its speedup is over eager PyTorch."""
    name = f"{record.get('level_id', '')}/{record.get('task_id', where)}".lstrip("/")
    if record["custom_code"] in (None, "", "None"):  # the release writes "None" for some missing kernels
        return Refused(name, "no kernel is published")
    speedup = record.get("score_default", record.get("score"))
    fields = {"reference": record.get("ref_code"), "kernel": record["custom_code"], "speedup": speedup}
    return _claim(where, {"name": name, **fields})


def _run(folder: Path, problems: Path) -> Iterator[Claim | Refused]:
    """Read a run of KernelBench. Its claims are the samples that its results call correct."""
    results = results_of(folder / "eval_results.json")
    for path, (level, problem, sample) in generations(folder):
        name = f"{level}/{problem}/{sample}"
        row = next((row for row in results.get(str(problem), ()) if row["sample_id"] == sample), None)
        references = problems_of(problems, level).get(problem, [])
        if row is None or not row["correctness"]:
            yield Refused(name, "its results do not call it correct")
        elif len(references) != 1:
            yield Refused(name, f"{problems} has {len(references)} problems {problem} for level {level}")
        else:
            sources = {"reference": common.read_text(references[0]), "kernel": common.read_text(path)}
            yield _claim(name, {**sources, "speedup": speedup_of(row)})
