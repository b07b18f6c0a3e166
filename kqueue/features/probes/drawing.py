"""Probes: evaluations with a known outcome, which a fleet runs among the real ones to verify its judge.

A probe is a kernel that must pass, a cheat that must be refused, or a known-duration kernel, whose ``forward`` takes a
known time. Names, constants and shapes are random in each probe, so that no result can be cached.

A known-duration kernel busy-waits on a clock until its time is over, so a call never takes less. On a GPU, nothing else
takes long, and the judged time must equal that time. On a CPU, another process can be scheduled at the moment when the
time is over. There, only the shortest of many calls counts, and the bounds are wide.
"""

from __future__ import annotations

import random
import textwrap
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from kqueue.categories import Blame, Category
from kqueue.contract import Purpose, Request, Settings, Timing, Verdict
from kqueue.states import Finding, ProbeKind

#: Relative weights of the kinds of probes in a random draw.
_WEIGHTS: Final = {ProbeKind.CHEAT: 2, ProbeKind.HONEST: 1, ProbeKind.KNOWN_DURATION: 1}
#: Categories of wrong answers.
_FOUND_OUT: Final = frozenset({Category.WRONG_VALUES, Category.NONDETERMINISTIC})
#: Categories of a shortage of time or memory, which a busy host can cause for any kernel.
_SHORTAGES: Final = frozenset(
    {Category.TIMEOUT, Category.COMPILE_TIMEOUT, Category.HOST_OUT_OF_MEMORY, Category.GPU_OUT_OF_MEMORY}
    | {Category.OUTPUT_LIMIT}
)
#: Seconds after which a probe that no worker began expires.
_WAIT_S: Final = 900.0
#: Range of a known duration on a CPU in milliseconds, which is long compared with the pauses of a busy host.
_CPU_DURATION_MS: Final = (20.0, 30.0)
#: Range of a known duration on a GPU in milliseconds, which is long compared with a launch.
_GPU_DURATION_MS: Final = (2.0, 4.0)
#: Ratio of the reference's known duration to the kernel's on a CPU.
_LONGER: Final = 2.0
#: Permitted judged time as a share of the known duration: of the median by the GPU's clock, and of the shortest call by
#: the CPU's. A call cannot be shorter than its known duration, and 5 % allow for drift between clocks.
_GPU_BAND: Final = (0.95, 1.1)
_CPU_BAND: Final = (0.95, 1.75)
#: Permitted range of the same ratio of the times by the CPU's clock. The exact value is :data:`_LONGER`.
_CPU_RATIO: Final = (1.3, 3.0)
#: Number of timed calls of a known-duration kernel. Even on a busy CPU some of them are undisturbed.
_DURATION_CALLS: Final = 15


@dataclass(frozen=True, slots=True)
class Probe:
    """An evaluation to submit, with its kernel's name within its kind, and the known duration of ``forward`` if any."""

    kind: ProbeKind
    idea: str
    request: Request
    duration_ms: float | None = None


@dataclass(frozen=True, slots=True)
class Judgement:
    """The result of a probe in one line of words. ``bias`` is the relative error of the judged time, if known."""

    finding: Finding
    words: str
    bias: float | None = None


#: Kernels that must be refused: bodies of ``forward``, with ``ANSWER`` for the correct answer.
_CHEATS: Final[Mapping[str, str]] = {
    "zeros": "return torch.zeros_like(GIVEN)",
    "cached": "if not hasattr(self, 'KEPT'):\n    self.KEPT = ANSWER\nreturn self.KEPT.clone()",
    "copy": "return GIVEN.clone()",
    "sample": "OUT = torch.zeros_like(GIVEN)\nOUT[:2] = (ANSWER)[:2]\nreturn OUT",
    "near": "return (ANSWER) + OFF",
    "last row": "OUT = ANSWER\nOUT[-1] = GIVEN[-1]\nreturn OUT",
}
#: Problems: the result of ``forward``, and an equivalent expression that agrees within the tolerance.
_ANSWERS: Final[Mapping[str, tuple[str, str]]] = {
    "affine": ("GIVEN * FIRST + SECOND", "torch.add(torch.mul(GIVEN, FIRST), SECOND)"),
    "wave": ("torch.sin(GIVEN * FIRST) + SECOND", "SECOND + (FIRST * GIVEN).sin()"),
    "ramp": ("torch.relu(GIVEN + FIRST) * SECOND", "SECOND * (GIVEN + FIRST).clamp(min=0.0)"),
    "curve": ("GIVEN * GIVEN * FIRST - SECOND", "(GIVEN ** 2) * FIRST - SECOND"),
}
_MODULE: Final = """
import time
import torch

class NAME(torch.nn.Module):
    def forward(self, GIVEN):
BODY
"""
_INPUTS: Final = """
def get_inputs():
    return [torch.randn(ROWS, COLUMNS)]

def get_init_inputs():
    return []
"""
_TRITON: Final = """
import torch
import triton
import triton.language as tl

@triton.jit
def LAUNCHED(source, target, count, BLOCK: tl.constexpr):
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    GIVEN = tl.load(source + place, mask=place < count)
    tl.store(target + place, GIVEN * FIRST + SECOND, mask=place < count)

class ModelNew(torch.nn.Module):
    def forward(self, GIVEN):
        OUT = torch.empty_like(GIVEN)
        LAUNCHED[(triton.cdiv(GIVEN.numel(), 256),)](GIVEN, OUT, GIVEN.numel(), BLOCK=256)
        return OUT
"""
#: A single program computes everything, and writes when the GPU's nanosecond clock reaches the duration.
_TRITON_WAIT: Final = """
import torch
import triton
import triton.language as tl

@triton.jit
def clock(after):
    return tl.inline_asm_elementwise(
        "mov.u64 $0, %globaltimer;", "=l,l", [after], dtype=tl.int64, is_pure=False, pack=1
    )

@triton.jit
def LAUNCHED(source, target, count, duration, BLOCK: tl.constexpr):
    begun = clock(duration)
    now = begun
    while now - begun < duration:
        now = clock(now)
    for first in range(0, count, BLOCK):
        place = first + tl.arange(0, BLOCK)
        GIVEN = tl.load(source + place, mask=place < count)
        tl.store(target + place, GIVEN * FIRST + SECOND, mask=place < count)

class ModelNew(torch.nn.Module):
    def forward(self, GIVEN):
        OUT = torch.empty_like(GIVEN)
        LAUNCHED[(1,)](GIVEN, OUT, GIVEN.numel(), DURATION_NS, BLOCK=256)
        return OUT
"""
_CPU_WAIT: Final = """\
OVER = time.perf_counter() + DURATION_S
OUT = ANSWER
while time.perf_counter() < OVER:
    pass
return OUT
"""


def draw(lane: str, kind: ProbeKind | None = None) -> Probe:
    """Return a random probe for a lane, of the given kind or of any."""
    lot = random.SystemRandom()
    kind = kind or lot.choices(list(_WEIGHTS), list(_WEIGHTS.values()))[0]
    on_gpu = lane.startswith("gpu")
    idea = "affine" if kind is ProbeKind.KNOWN_DURATION else lot.choice(list(_ANSWERS))
    right, same = _ANSWERS[idea]
    problem, kernel, triton = f"return {right}", f"return {same}", None
    duration_ms, timing = None, Timing().off()
    if kind is ProbeKind.CHEAT:
        idea = lot.choice(list(_CHEATS))
        kernel = _CHEATS[idea].replace("ANSWER", same)
    elif kind is ProbeKind.HONEST and on_gpu and idea == "affine":
        idea, triton = "triton", _TRITON
    elif kind is ProbeKind.KNOWN_DURATION:
        duration_ms = round(lot.uniform(*(_GPU_DURATION_MS if on_gpu else _CPU_DURATION_MS)), 3)
        timing = Timing(purpose=Purpose.PUBLISH, calls=_DURATION_CALLS, warmup=1)
        if on_gpu:
            idea, triton = "GPU's timer", _TRITON_WAIT.replace("DURATION_NS", str(round(duration_ms * 1e6)))
        else:
            idea = "host's clock"
            problem, kernel = (
                _CPU_WAIT.replace("ANSWER", answer).replace("DURATION_S", repr(duration_ms * times / 1e3))
                for answer, times in ((right, _LONGER), (same, 1.0))
            )
    names = _substitutions(lot)
    request = Request(
        problem=_filled(_module("Model", problem) + _INPUTS, names),
        kernel=_filled(triton or _module("ModelNew", kernel), names),
        backend="torch" if triton is None else "triton",
        lane=lane,
        settings=Settings(checks=2, timing=timing),
        reuse=False,
        queue_wait_s=_WAIT_S,
    )
    return Probe(kind, idea, request, duration_ms)


def judge(verdict: Verdict, *, kind: ProbeKind, duration_ms: float | None) -> Judgement:
    """Return the result of a probe, whose known duration is ``duration_ms``. A failure of the fleet shows nothing.

    Neither does a shortage on its host.
    """
    category = verdict.category
    if category.blame not in (Blame.NONE, Blame.CANDIDATE) or category in _SHORTAGES:
        return Judgement(Finding.VOID, f"{category}: this shows nothing about the judge")
    if kind is ProbeKind.CHEAT:
        if category is Category.PASSED:
            return Judgement(Finding.CHEAT_ACCEPTED, "a cheat passed")
        if category in _FOUND_OUT:
            return Judgement(Finding.AGREED, f"a cheat was refused: {category}")
        return Judgement(Finding.CHEAT_MISTAKEN, f"a cheat that runs was refused as {category}")
    if category is not Category.PASSED:
        return Judgement(Finding.HONEST_REFUSED, f"an honest kernel was refused: {category}")
    if duration_ms is None:
        return Judgement(Finding.AGREED, "an honest kernel passed")
    return _judge_clock(verdict, duration_ms)


def _judge_clock(verdict: Verdict, duration_ms: float) -> Judgement:
    taken, other = verdict.runtime, verdict.baseline
    if taken is None:
        return Judgement(Finding.CLOCK_UNEVEN, "a known-duration kernel passed without a time")
    if taken.basis == "gpu_clock":
        low, high = _GPU_BAND
        least = most = taken.median_ms
    else:
        # The judge subtracts the launch overhead. With it, the shortest call takes at least the known duration.
        low, high = _CPU_BAND
        least, most = taken.min_ms + taken.overhead_ms, taken.min_ms
    bias = (most if most > duration_ms else min(least, duration_ms)) / duration_ms - 1
    summary = f"a known duration of {duration_ms:.3f} ms was timed at {most:.3f} ms"
    if least < low * duration_ms:
        return Judgement(Finding.CLOCK_SHORT, summary, bias)
    if most > high * duration_ms:
        if verdict.evidence.foreign_processes:
            return Judgement(Finding.VOID, f"{summary}, with other or unidentified processes on the GPU")
        return Judgement(Finding.CLOCK_LONG, summary, bias)
    if other is not None and (taken.basis, other.basis) == ("cpu_clock", "cpu_clock"):
        ratio = (other.min_ms + other.overhead_ms) / (taken.min_ms + taken.overhead_ms)
        if not _CPU_RATIO[0] <= ratio <= _CPU_RATIO[1]:
            summary += f", and its reference with {_LONGER:.0f} times the duration at {ratio:.2f} times the time"
            return Judgement(Finding.CLOCK_UNEVEN, summary, bias)
    return Judgement(Finding.AGREED, summary, bias)


def _substitutions(lot: random.SystemRandom) -> dict[str, str]:
    """Return the substitutions for the names in capitals in a probe's sources."""
    names = {name: f"v{lot.getrandbits(48):012x}" for name in ("GIVEN", "OUT", "KEPT", "OVER", "LAUNCHED")}
    return names | {
        "FIRST": f"{lot.uniform(0.6, 1.4):.6f}",
        "SECOND": f"{lot.uniform(0.6, 1.4):.6f}",
        # Larger than the tolerance of 1e-4 + 1e-4 * |value|, because values are hardly larger than 10.
        "OFF": f"{lot.choice((-1, 1)) * lot.uniform(3e-3, 6e-3):.6f}",
        "ROWS": str(lot.randint(8, 40)),
        "COLUMNS": str(lot.randint(24, 96)),
    }


def _module(name: str, body: str) -> str:
    return _MODULE.replace("NAME", name).replace("BODY", textwrap.indent(body, " " * 8))


def _filled(form: str, substitutions: Mapping[str, str]) -> str:
    for name, stands_for in substitutions.items():
        form = form.replace(name, stands_for)
    return form
