"""Texts for language models: the task, and a verdict."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Final

from kqueue import examinations
from kqueue.categories import Blame, Category
from kqueue.contract import Result, Verdict
from kqueue.evidence import Evidence, Facts, PassResult, ShapeResult, json_number
from kqueue.figures import milliseconds, provenance, ratio, speedup
from kqueue.shapes import public

#: A traceback's frame in the kernel's own file.
_FRAME: Final = re.compile(r'File "[^"\n]*/kernel\.py", line (\d+)(?:,? in (\S+))?')
#: Begin of the stack of a process that died or was ended. The calls that were made last come first.
_STACK: Final = "(most recent call first):"
#: The kernel's line at the beginning of a message. Before the text of an exception is its type.
_LINE: Final = re.compile(r"line (\d{1,9}): ")
_FOLDER: Final = re.compile(r"(?<![\w.])(?<!:/)/(?:[\w.+-]+/)+")
_CONTEXT_LINES: Final = 2
#: Number of the last characters that a process wrote before it died, such as a message of the C library.
_WRITTEN: Final = 300
#: Relative errors of products whose factors were rounded to 11 or 8 bits.
_PRECISIONS: Final = ((1e-4, 1e-3, "TF32 or fp16"), (1e-3, 1e-2, "bf16"))
_LOWER: Final = "a lower precision than the reference's"
#: Maximum ratio of runtime to speed-of-light bound of a kernel that is limited by memory.
_NEAR_BOUND: Final = 1.5


def instruction(problem: str, backend: str) -> str:
    """Return the task as text: write a kernel of ``backend`` that replaces the reference ``problem``.

    Shapes that are held out are not in it.
    """
    return (
        f"Write a {backend} kernel that replaces this PyTorch reference and is faster. Answer with one fenced block of "
        "Python: a class ModelNew (torch.nn.Module) with the constructor and forward of Model, and with the same "
        f"weights for the same seed.\n\n```python\n{public(problem).strip()}\n```\n"
    )


def describe(verdict: Result, kernel: str, *, note: str = "", limit: int = 6000) -> str:
    """Return a verdict as text: the failure with its location, or the time of a correct kernel with its limits.

    ``note`` is a line about the kernel, such as its location in a model's answer. A text longer than ``limit``
    characters is cut at its end.
    """
    if not verdict.judged:
        lines = [
            f"NOT JUDGED ({verdict.category}, to blame: {verdict.blame}): {verdict.message}",
            "There is no result for the kernel.",
        ]
    elif verdict.passed:
        lines = ["CORRECT: " + verdict.message, *_times(verdict), *_limits(verdict)]
    else:
        lines = [*_failure(verdict), *_lacked(verdict), *_where(verdict, kernel)]
        lines += [*_differences(verdict), *causes(verdict)]
    lines += shape_lines(verdict.evidence)
    if note:
        lines.insert(1, note)
    if verdict.judged:
        lines += [f"Profile {one.name}: {one.words}" for one in verdict.evidence.profiles or ()]
        lines += examinations.lines(verdict.evidence)
    if isinstance(verdict, Verdict) and verdict.reused_from is not None:
        when = "" if verdict.judged_at is None else f", of {verdict.judged_at:%Y-%m-%d %H:%M} UTC"
        lines.append(f"This is the verdict of the equal evaluation {verdict.reused_from}{when}. Nothing was run again.")
    if verdict.blame is not Blame.FLEET:
        for finding in verdict.evidence.findings or ():
            lines.append(f"Note: {finding.meaning}" + ("" if finding.line is None else f" (line {finding.line})"))
    text = "\n".join(lines)
    return text if len(text) <= limit else f"{text[: limit - 14]}\n... (cut off)"


def shape_lines(evidence: Evidence) -> Iterator[str]:
    """Yield a line for each shape of the problem and for each pass, and one for the worst speedup and the spread."""
    for each in evidence.passes or ():
        yield f"Pass {each.name}: {_timed(each)}."
    if (known := evidence.shapes) is None:
        return
    for row in known.rows:
        weight = "" if row.weight == 1 else f", weight {row.weight:g}"
        timed = "" if row.runtime_ms is None else f", {_timed(row)}"
        yield f"Shape {row.name}: {row.category or 'not judged, because another shape failed'}{timed}{weight}."
    if known.worst_speedup is not None and known.spread is not None:
        yield "Runtime and speedup are the shapes' weighted geometric means."
        yield (
            f"The worst speedup is {ratio(known.worst_speedup)} ({known.worst}), and the best is {known.spread:.2f} "
            "times that."
        )


def _timed(row: ShapeResult | PassResult) -> str:
    times = f", speedup {speedup(row.speedup, row.speedup_interval)}" if row.speedup is not None else ""
    runtime, baseline = (milliseconds(ms) or "unknown" for ms in (row.runtime_ms, row.baseline_ms))
    return f"{runtime} ms, reference {baseline} ms{times}"


def last_frame(log: str) -> tuple[int, str | None] | None:
    """Return the line of the kernel's source, and the function, of the innermost frame of the last stack in a log."""
    _, marker, stack = log.rpartition(_STACK)
    frames = list(_FRAME.finditer(stack))
    return (int((frame := frames[0 if marker else -1])[1]), frame[2]) if frames else None


def _failure(verdict: Result) -> Iterator[str]:
    phase = f" in the phase {verdict.phase}" if verdict.phase else ""
    headline, _, rest = verdict.message.partition("\n")
    yield f"FAILED: {verdict.category}{phase}: {_short(headline)}"
    yield verdict.category.info.meaning
    if rest.strip():
        yield _short(rest.rstrip())
    written, aborted, _ = verdict.log.partition("Fatal Python error")
    if aborted and written.strip():
        yield f"Before it ended it wrote: {_short(' '.join(written[-_WRITTEN:].split()))}"


def _where(verdict: Result, kernel: str) -> Iterator[str]:
    """Yield the source lines round the last frame of the last traceback in the log, unless that was handled."""
    log = verdict.log
    if at := _LINE.match(verdict.message):
        number, function = int(at[1]), None
    elif (verdict.facts.exception or _STACK in log or "Traceback (" not in log) and (frame := last_frame(log)):
        number, function = frame
    else:
        return
    if not 1 <= number <= len(lines := kernel.splitlines()):
        return
    yield f"At line {number}{f', in {function}' if function else ''}:"
    for at in range(max(1, number - _CONTEXT_LINES), min(len(lines), number + _CONTEXT_LINES) + 1):
        yield f"{'>' if at == number else ' '} {at:4d} | {lines[at - 1]}"


def _lacked(verdict: Result) -> Iterator[str]:
    if (short := verdict.facts.shortage) is not None:
        description = f"{short.kernel or 'a kernel'}{f' with {short.settings}' if short.settings else ''}"
        yield f"The launch of {description} needs {short.required} of {short.resource}, and this GPU has {short.limit}."


def _differences(verdict: Result) -> Iterator[str]:
    facts, comparison = verdict.facts, verdict.evidence.comparison
    yield from first_wrong(facts)
    if facts.first and facts.effect is None and comparison is not None and comparison.kernelbench_correct:
        yield "torch.allclose on the problem's own inputs would have accepted it."


def first_wrong(facts: Facts) -> Iterator[str]:
    """Yield the number of wrong values and the first of them, if there are any."""
    if not facts.first:
        return
    given = facts.kind == "given"
    on = "on the problem's own inputs" if given else f"on {facts.kind} inputs (the problem's shapes, other values)"
    what = facts.effect or f"output {facts.output}"
    yield f"{what[0].upper()}{what[1:]}, {on}: {facts.wrong} of {facts.of} values are wrong. The first:"
    for wrong in facts.first:
        yield f"  index {list(wrong.index)}: expected {json_number(wrong.expected)}, got {json_number(wrong.got)}"


def causes(verdict: Result) -> Iterator[str]:
    """Yield the known facts that can explain wrong values or a failed launch, each with the remedy."""
    facts, evidence = verdict.facts, verdict.evidence
    if verdict.category is Category.LAUNCH_RESOURCES_EXCEEDED and facts.cuda_code == 1:
        yield (
            "CUDA error 1 (invalid argument): check the launch. A block has 1 to 1024 threads, no dimension is 0, and "
            "a kernel with more than 48 KiB of dynamic shared memory needs cudaFuncSetAttribute (in CuPy "
            "max_dynamic_shared_size_bytes). If the launch is right, check the arguments of other CUDA calls."
        )
    if not facts.first:
        return
    if facts.likeness is not None and facts.unwritten != facts.wrong:
        yield facts.likeness
    if facts.unwritten is not None and facts.unwritten == facts.of:
        yield "The call wrote nothing: check that it launches the kernel, and returns a new output."
    elif facts.unwritten is not None:
        which = "All" if facts.unwritten >= (facts.wrong or 0) else f"{facts.unwritten} of the"
        yield f"{which} wrong values were never written: check the grid, the masks and the tail of each dimension."
    elif verdict.category is Category.NOT_FINITE and evidence.parameters is None:
        yield "The kernel computed these values: check for overflow, division by 0, and values that it must not read."
    if (facts.effect or "").startswith("gradient"):
        yield "The outputs of forward are right."
        if any("complex" in one.dtype for one in evidence.inputs or ()):
            yield "Complex gradients are conjugated: multiply the upstream gradient by the derivative's conjugate."
    if facts.ties_only:
        yield "The indices differ only where the values at them are equal: break ties as the reference does."
    if evidence.parameters is not None:
        yield (
            f"The kernel's parameters are not the reference's: {evidence.parameters}. Both models are constructed under"
            " one seed, so ModelNew must create the same parameters in the same order."
        )
    if evidence.reference_draws:
        yield (
            "The reference draws random numbers in forward, under a seed that is set before each call: the kernel must"
            " make the same draws from torch's default generator."
        )
    if evidence.training_modules:
        yield (
            f"The reference is in training mode, and so its {', '.join(evidence.training_modules)} does not compute as"
            " in eval(): BatchNorm uses the statistics of the batch, and Dropout drops values."
        )
    if facts.errors and facts.errors.precision_downgrade and facts.likeness is None and facts.unwritten is None:
        error = facts.errors.relative_norm
        which = next((name for least, most, name in _PRECISIONS if least <= error < most), _LOWER)
        yield f"The error is small: a constant or a formula is slightly wrong, or the kernel computes in {which}."


def _times(verdict: Result) -> Iterator[str]:
    runtime = verdict.runtime
    if runtime is None:
        if verdict.evidence.untimed is None:  # The message has the reason.
            yield "It was not timed."
        return
    if verdict.runtime_ms is None:
        yield f"It has no time: its calls took no longer than the launch overhead, {runtime.overhead_ms:.4g} ms."
        return
    clock = "the GPU's clock" if runtime.basis == "gpu_clock" else "the CPU's clock, including launching and waiting"
    yield (
        f"Runtime: {runtime.median_ms:.4g} ms (median of {runtime.count} calls, quartiles {runtime.q1_ms:.4g} and "
        f"{runtime.q3_ms:.4g} ms, {clock})."
    )
    if verdict.baseline_ms is not None:
        times = "" if verdict.speedup is None else f": speedup {speedup(verdict.speedup, verdict.speedup_interval)}"
        yield f"Reference: {verdict.baseline_ms:.4g} ms{times}."


def _limits(verdict: Result) -> Iterator[str]:
    evidence, runtime = verdict.evidence, verdict.runtime_ms
    if evidence.floor is not None and runtime is not None and runtime > 0:
        floor = evidence.floor
        share = floor.floor_ms / runtime
        yield (
            f"Memory: reading the inputs and writing the outputs once ({floor.bytes_in + floor.bytes_out} bytes at "
            f"{floor.bandwidth_gbs} GB/s) takes {floor.floor_ms:.4g} ms, {share:.0%} of the runtime."
        )
        yield (
            "It is limited by memory bandwidth. Less time is not possible without moving fewer bytes."
            if share * _NEAR_BOUND >= 1
            else "It is not limited by the memory that it must access. Check for passes over intermediate results, "
            "uncoalesced access, arithmetic, and launches."
        )
    if evidence.provenance is not None:
        yield f"GPU time by source: {provenance(evidence.provenance)}."


def _short(text: str) -> str:
    """Return ``text`` without a worker's folders, which mean nothing to a reader."""
    return _FOLDER.sub("", text)
