"""What an evaluation takes of its GPU's memory: planned before it is allocated, and booked.

The plan is made in three steps, each of which knows more: for drawing one set of inputs; for the reference's first
call, by the size of the inputs; for all that follows, by the size of the outputs and by what the reference has taken.
(torch's meta device would tell sizes without memory, but a call on it imports modules for 1.6 to 3.3 seconds, in each
sealed process anew.) Then it promises each process a part:

- the judge: the inputs of a call, which it shares with the candidate; room for the outputs of a call; what is kept of
  timed calls, and what comparing takes;
- the reference: what its calls took at most, and some more;
- the candidate: twice that, as a kernel may need other memory than the reference.

Small problems have at least a few gigabytes, so that no kernel fails for want of a workspace. Where a GPU is shared by
many places, or small, that is as much as fits for all of them at the same time.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

#: What a process takes of a GPU's memory by having opened it, in bytes, generously; each place has three of them. And
#: what is left for the driver and for others.
_CONTEXT_BYTES: Final = 640 << 20
_OTHERS_BYTES: Final = 1 << 30
#: The least that each process is promised, in bytes, and as a share of what one place of many may have.
_LEAST: Final = {"judge": (2 << 30, 1 / 6), "reference": (3 << 30, 1 / 6), "candidate": (8 << 30, 1 / 2)}
#: What the judge takes beside inputs and outputs, in bytes: pieces of timed calls, the comparison.
_BESIDE_BYTES: Final = 2 << 30
#: What the reference's first call may take: so many times its inputs and weights, and so many bytes beside them, as
#: outputs may be larger; where all of it is little, in multiples alone. In half of KernelBench's level 1 nothing of
#: 1 GiB and more takes more than 3.8 times its inputs, but for a convolution: 8.5 GiB with inputs of 1 GiB.
_FIRST_TIMES: Final = 4
_FIRST_BYTES: Final = 8 << 30
_FIRST_TIMES_OF_LITTLE: Final = 32
#: What the reference is allowed beyond what its first calls took: small cases are held together, in float64 too.
_MORE: Final = 1.25
_MORE_BYTES: Final = 2 << 30
#: How many times the reference's memory a kernel may take.
_KERNEL: Final = 2


def capacity(total: int, siblings: int) -> int:
    """Return what the evaluations of a GPU may book together, in bytes; all its judges know the same number.

    Args:
        total: the GPU's memory, in bytes.
        siblings: its places.
    """
    return total - min(_OTHERS_BYTES + 3 * siblings * _CONTEXT_BYTES, total // 3)


@dataclass(frozen=True, slots=True)
class Plan:
    """What each process of an evaluation may take of the GPU's memory, in bytes, its CUDA context left out.

    Attributes:
        inputs, outputs, weights: of one call; outputs are None before the first call.
        judge, reference, candidate: what each may take.
    """

    inputs: int
    outputs: int | None
    weights: int
    judge: int
    reference: int
    candidate: int

    @property
    def total(self) -> int:
        """What is booked."""
        return self.judge + self.reference + self.candidate

    def evidence(self) -> dict[str, Any]:
        """Return the plan as evidence."""
        return {
            "inputs_bytes": self.inputs,
            "outputs_bytes": self.outputs,
            "weights_bytes": self.weights,
            "judge_bytes": self.judge,
            "reference_bytes": self.reference,
            "candidate_bytes": self.candidate,
        }


def of_first_draw(*, whole: int, siblings: int, alone: bool) -> Plan:
    """Return the plan for importing the problem and drawing inputs: what all places can have at the same time.

    Args:
        whole: what all evaluations of the GPU may book together.
        siblings: the GPU's places.
        alone: True to give the reference all of it, as it has run out of less.
    """
    return Plan(0, None, 0, 0, whole if alone else whole // siblings, 0)


def of_first_call(inputs: int, weights: int, *, whole: int, siblings: int, alone: bool) -> Plan:
    """Return the plan for the reference's first call; no other process takes anything until it is over.

    Args:
        inputs, weights: their bytes.
        whole, siblings, alone: as for :func:`of_first_draw`.
    """
    known = inputs + weights
    needed = min(_FIRST_TIMES * known + _FIRST_BYTES, _FIRST_TIMES_OF_LITTLE * known)
    needed = max(needed, min(_FIRST_BYTES, whole // siblings))
    reference = whole if alone else max(min(needed, whole), known)
    return Plan(inputs, None, weights, 0, reference, 0)


def settled(inputs: int, outputs: int, weights: int, peak: int, *, whole: int, siblings: int) -> Plan:
    """Return the plan once the reference has answered.

    Args:
        inputs, outputs, weights: their bytes.
        peak: the most that the reference's process has taken so far.
        whole, siblings: as for :func:`of_first_draw`.
    """
    share = whole // siblings
    least = {name: min(nbytes, int(part * share)) for name, (nbytes, part) in _LEAST.items()}
    judge = max(least["judge"], inputs + outputs + min(_BESIDE_BYTES, share // 6))
    must = outputs + weights
    reference = max(least["reference"], int(_MORE * peak) + min(_MORE_BYTES, share // 8))
    reference = max(min(reference, whole - judge - must), peak)
    candidate = max(least["candidate"], _KERNEL * max(peak, inputs + outputs + weights))
    # A problem that fills the GPU leaves its kernels what is left.
    candidate = max(min(candidate, whole - judge - reference), must)
    return Plan(inputs, outputs, weights, judge, reference, candidate)
