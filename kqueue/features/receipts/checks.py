"""The checks of a receipt (:mod:`kqueue.receipts`), and the comparison of its verdict with a new one."""

from __future__ import annotations

import json
import math
import statistics
from base64 import b64decode
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from pydantic import ValidationError

from kqueue.contract import Outcome, Request, Result, Verdict, rules_of
from kqueue.evidence import Environment
from kqueue.receipts import PREDICATE, Receipt, canonical, enclose, key_id, sha256, signable, signed
from kqueue.shapes import HELD_OUT

#: Maximum size of a receipt in bytes. A kernel of tests has up to 16 MiB.
MAX_BYTES: Final = 64 << 20
#: The form of receipts without an envelope, which is read only.
_FIRST: Final = "kqueue.receipt/1"
#: Parts of the first form that have other names now.
_RENAMED: Final = {
    b'"null_ms":': b'"overhead_ms":', b'"strangers":': b'"foreign_processes":', b'"canary":': b'"self_test":',
    b'"phase":"canary"': b'"phase":"self_test"',
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Check:
    """A statement about a receipt. ``holds`` is False if it is wrong, and None if the receipt cannot show it."""

    name: str
    holds: bool | None
    detail: str


def verify(content: bytes, known: Collection[str] | None) -> tuple[list[Check], Receipt | None]:
    """Return the checks of a file, and its receipt if it can be read. ``known`` has the fleet's public keys, if any."""
    try:
        if len(content) > MAX_BYTES:
            raise ValueError
        form, document, is_signed = _opened(content)
    except (ValueError, TypeError, KeyError, RecursionError):
        return [Check("form", False, f"no receipt of at most {MAX_BYTES} bytes, or its bytes were changed")], None
    if not form.holds:
        return [form], None
    checks = [form, *_signature(document, known, is_signed=is_signed)]
    given = document.get("verdict")
    try:
        # Unknown parts of facts, evidence and environment come from another version.
        loaded = {"verdict": Verdict.load(given)} if isinstance(given, dict) else {}
        receipt = Receipt.model_validate(document | loaded)
    except ValidationError as error:
        names = ", ".join(".".join(map(str, one["loc"])) for one in error.errors())
        return [*checks, Check("complete", False, f"missing, or unknown to this version of kqueue: {names}")], None
    first, *named = _rules(receipt)
    return [first, *checks, *named, *_content(receipt, document["verdict"])], receipt


def differing(receipt: Receipt, problem: str, kernel: str) -> list[str]:
    """Return the names of the given sources that are not the judged ones by their hashes."""
    wrong = [] if sha256(problem) in (receipt.problem_hash, receipt.public_problem_hash) else ["problem"]
    same = Request.model_construct(kernel=kernel, backend=receipt.verdict.backend).kernel_hash == receipt.kernel_hash
    same &= receipt.kernel_source_hash in (None, sha256(kernel))
    return wrong if same else [*wrong, "kernel"]


def compare(verdict: Verdict, now: Result, environment: Environment | None, *, whole: bool) -> Iterator[Check]:
    """Compare a verdict with a new one of ``environment``. ``whole`` is False without the shapes that are held out."""
    yield Check("category", verdict.category is now.category, f"{verdict.category}, and {now.category} now")
    then, today = (one.device if one else "an unknown device" for one in (verdict.environment, environment))
    times = [one.runtime and (one.runtime.low_ms, one.runtime.high_ms) for one in (verdict, now)]
    for name, pair in (("runtime_ms", times), ("speedup", [verdict.speedup_interval, now.speedup_interval])):
        (low, high), (low_now, high_now) = (one or (None, None) for one in pair)
        if low is None or high is None or low_now is None or high_now is None:
            yield Check(name, None, "not known on both sides")
        elif not whole:
            yield Check(name, None, "cannot be compared, because shapes that are held out were not judged again")
        elif then != today or verdict.timing_basis != now.timing_basis:
            sides = f"{then} by the {verdict.timing_basis}, and {today} by the {now.timing_basis} now"
            yield Check(name, None, f"another device or clock, so times cannot be compared: {sides}")
        else:
            agrees = max(low, low_now) <= min(high, high_now)
            shown = f"{low:.4g} to {high:.4g}, and {low_now:.4g} to {high_now:.4g} now"
            yield Check(name, agrees, f"the intervals {'overlap' if agrees else 'do not overlap'}: {shown}")


def _opened(content: bytes) -> tuple[Check, dict[str, Any], bool]:
    """Return the check of a file's form, its content, and whether the key that it names signed this."""
    given = json.loads(content)
    if "payload" in given:
        statement, [one] = json.loads(b64decode(given["payload"])), given["signatures"]
        form, document, signature = statement["predicateType"], statement["predicate"], b64decode(one["sig"])
    else:
        form, signature = given["schema"], bytes.fromhex(given["signature"])
        document = {name: value for name, value in given.items() if name not in ("schema", "signature")}
    fault = "not in canonical form: its bytes were changed, for example by an editor"
    if form == PREDICATE:
        covered, same = signable(document), enclose(document, signature)
    elif form == _FIRST:
        whole = document | {"schema": form}
        covered, same = canonical(whole), canonical(whole | {"signature": signature.hex()}) + b"\n"
    else:
        covered, same = b"", b""
        fault = f"of the form {form}, and this version of kqueue reads {PREDICATE} and {_FIRST}"
    if same != content:
        return Check("form", False, fault), {}, False
    is_signed = signed(document["public_key"], signature, covered)
    if form == _FIRST:
        document = {name: value for name, value in json.loads(renamed(content)).items() if name in document}
    return Check("form", True, f"{form} in canonical JSON"), document, is_signed


def renamed(content: bytes) -> bytes:
    """Return a receipt in the first form with the present names, which its signature does not cover."""
    for old, new in _RENAMED.items():
        content = content.replace(old, new)
    return content


def _signature(document: Mapping[str, Any], known: Collection[str] | None, *, is_signed: bool) -> Iterator[Check]:
    public = document["public_key"]
    changed = "not by the key that is named, so the content was changed"
    yield Check("signature", is_signed, f"by the key {key_id(public)}" if is_signed else changed)
    unknown = "not known to be a fleet's: anyone can create a key. Give the fleet's with --key"
    listed = None if known is None else public in known
    yield Check("key", listed, unknown if listed is None else f"{'one' if listed else 'none'} of the given keys")


def _rules(receipt: Receipt) -> Iterator[Check]:
    """Name the rules of the judgement. The first result is unknown under other ones than the problem's own."""
    evidence, given = receipt.verdict.evidence, receipt.settings
    others = ", ".join(f"{name}={json.dumps(value)}" for name, value in rules_of(given).items())
    words = "judged by other rules than the problem's own, by which the result is unknown: "
    yield Check("rules", None if others else True, words + others if others else "the problem's own")
    yield Check("comparison", True, str(given.get("comparison")))
    own, by = evidence.tolerances or (evidence.tolerance,), given.get("tolerances") or given.get("tolerance")
    bounds = [f"atol {one.atol:g}, rtol {one.rtol:g}, by the {one.by}" if one else "each dtype's own" for one in own]
    stated = {one.by for one in own if one} or {"problem"}
    yield Check("tolerance", stated == {"settings" if by else "problem"} or None, "; ".join(bounds))
    yield Check("purpose", True, f"a trial of: {receipt.purpose}" if receipt.purpose else "not known to be a trial")
    doubts = evidence.doubts.removeprefix("; but ")
    yield Check("labels", None if doubts else True, doubts or "none by which the verdict means little")


def _content(receipt: Receipt, given: Mapping[str, Any]) -> Iterator[Check]:
    """Check a receipt's parts against each other. ``given`` is the verdict as it is written."""
    verdict, evidence = receipt.verdict, receipt.verdict.evidence
    if evidence.emptied_at is not None:
        yield Check("complete", None, f"retention removed long evidence on {evidence.emptied_at:%Y-%m-%d}")
    else:
        missing = verdict.passed and None in (verdict.environment, evidence.durations_s)
        yield Check("complete", not missing, "environment or evidence is missing" if missing else "nothing is missing")
    if receipt.problem is None or receipt.kernel is None:
        yield Check("sources", None, "not included, only their hashes")
    else:
        wrong = differing(receipt, receipt.problem, receipt.kernel)
        whole = receipt.problem_hash == sha256(receipt.problem)
        # Only shapes that are held out give the judged problem another hash than the included one.
        rows = evidence.shapes.rows if evidence.shapes else ()
        known = whole or any(row.name.startswith(HELD_OUT) for row in rows)
        if not known and verdict.passed:
            wrong = sorted({*wrong, "problem"}, reverse=True)
        hidden = "" if whole else ", without shapes that are held out"
        words = f"not the judged {' and '.join(wrong)}" if wrong else f"the judged ones by their hashes{hidden}"
        yield Check("sources", False if wrong else known or None, words)
    derived = ("blame", "compiled", "correctness")
    fault = ", ".join(name for name in derived if given.get(name) != getattr(verdict, name))
    try:
        Outcome.model_validate({name: getattr(verdict, name) for name in Outcome.model_fields})
    except ValidationError as error:
        fault = str(error.errors()[0]["msg"]).removeprefix("Value error, ")
    words = f"{verdict.category} (to blame: {verdict.blame}) has the facts that it needs"
    yield Check("category", not fault, f"does not fit {verdict.category}: {fault}" if fault else words)
    yield _times(verdict)
    derived = ("runtime_ms", "baseline_ms", "timing_basis", "speedup")
    fault = ", ".join(name for name in derived if not _close(given.get(name), getattr(verdict, name)))
    holds = False if fault else None if verdict.speedup is None else True
    words = f"{verdict.speedup:.4g}x follows from the medians" if holds else "unknown"
    yield Check("speedup", holds, f"does not follow from the times: {fault}" if fault else words)


def _times(verdict: Verdict) -> Check:
    """Check the medians against the samples, and the mean over several shapes against their medians."""
    rows, wrong = verdict.evidence.shapes and verdict.evidence.shapes.rows, list[str]()
    samples: list[Sequence[float] | None] = []
    for name, one in (("runtime", verdict.runtime), ("baseline", verdict.baseline)):
        if one is None:
            continue
        medians = [one.median_ms] if rows is None else [getattr(row, f"{name}_ms") for row in rows]
        taken = [one.samples_ms] if rows is None else [getattr(row, f"{name}_samples_ms") for row in rows]
        samples += taken
        try:
            same = all(s is None or _close(statistics.median(s), m) for s, m in zip(taken, medians, strict=True))
            same &= None in taken or sum(map(len, filter(None, taken))) == one.count
            if rows is not None:
                weights = [row.weight for row in rows]
                mean = math.exp(statistics.fmean(map(math.log, medians), weights)) if min(medians) > 0 else 0.0
                same &= _close(one.median_ms, mean)
        except (ArithmeticError, ValueError, TypeError):
            same = False
        wrong += [] if same else [name]
    if wrong:
        return Check("times", False, f"the {' and '.join(wrong)} does not follow from the samples")
    if not samples or None in samples:
        return Check("times", None, "an older version recorded no samples" if samples else "not timed")
    return Check("times", True, f"follow from {sum(map(len, filter(None, samples)))} samples")


def _close(one: Any, other: Any) -> bool:
    """Return True for equal values, or times that are equal to the nanosecond, to which samples are rounded."""
    is_number = isinstance(one, float) and isinstance(other, float)
    return math.isclose(one, other, rel_tol=1e-9, abs_tol=1e-6) if is_number else one == other
