"""Plan of the GPU memory of an evaluation, which is booked before it is allocated.

The plan is made in three steps with increasing knowledge: for drawing one input set, for the reference's first call by
the size of the inputs, and for all later calls by the size of the outputs and the reference's peak. (torch's meta
device would give sizes without memory, but a call on it imports modules for 1.6 to 3.3 s in each new sealed process.)
The plan allots memory to each process:

- the judge: the inputs of a call, shared with the candidate, the outputs of a call, the outputs kept from timed calls,
  and the comparison's buffers, and if there is enough memory, inputs and outputs of the reference's timed calls too;
- the reference: the peak of its calls, and some more;
- the candidate: twice the reference's peak, because a kernel can need other memory.

Small problems get at least a few gigabytes, so that no kernel fails for lack of a workspace. On a small GPU, or one
shared by many slots, the minimum is the amount that fits for all slots at the same time.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from kqueue.evidence import GpuMemory

#: Upper estimate in bytes of a process's CUDA context, of which each slot has three, and the memory in bytes left for
#: the driver and foreign processes.
_CONTEXT_BYTES: Final = 640 << 20
_OTHERS_BYTES: Final = 1 << 30
#: Minimum for each process, in bytes and as a share of one slot's part of the GPU.
_LEAST: Final = {"judge": (2 << 30, 1 / 6), "reference": (3 << 30, 1 / 6), "candidate": (8 << 30, 1 / 2)}
#: Maximum in bytes for the judge's kept outputs and comparison buffers, in addition to inputs and outputs.
_BESIDE_BYTES: Final = 2 << 30
#: Allowance for the reference's first call: a multiple of its inputs and weights, plus bytes for larger outputs.
#: Small problems have a multiple only. In half of KernelBench's level 1, nothing of 1 GiB and more takes more than 3.8
#: times its inputs, except a convolution: 8.5 GiB with inputs of 1 GiB.
_FIRST_TIMES: Final = 4
_FIRST_BYTES: Final = 8 << 30
_FIRST_TIMES_OF_LITTLE: Final = 32
#: Allowance beyond the peak of the reference's first calls, because small cases are held together, and in float64 too.
_MORE: Final = 1.25
_MORE_BYTES: Final = 2 << 30
#: Allowance for a kernel as a multiple of the reference's memory.
_KERNEL: Final = 2


def capacity(total: int, siblings: int) -> int:
    """Return the bytes that the evaluations of a GPU with ``siblings`` slots can book together, of ``total`` bytes."""
    return total - min(_OTHERS_BYTES + 3 * siblings * _CONTEXT_BYTES, total // 3)


@dataclass(frozen=True, slots=True)
class Plan:
    """Allowances of GPU memory in bytes for the processes of an evaluation, without their CUDA contexts.

    Attributes:
        inputs, outputs, weights: sizes for one call. ``outputs`` is None before the first call.
        judge, reference, candidate: allowance of each process.
        has_turns: True if the reference can be timed in turn with the candidate, for which both need their inputs.
    """

    inputs: int
    outputs: int | None
    weights: int
    judge: int
    reference: int
    candidate: int
    has_turns: bool = True

    @property
    def total(self) -> int:
        """Sum of the allowances, which is booked."""
        return self.judge + self.reference + self.candidate

    def evidence(self, used: int | None) -> GpuMemory:
        """Return the plan as evidence, with the observed memory in bytes."""
        return GpuMemory(
            inputs_bytes=self.inputs,
            outputs_bytes=self.outputs,
            weights_bytes=self.weights,
            judge_bytes=self.judge,
            reference_bytes=self.reference,
            candidate_bytes=self.candidate,
            used_bytes=used,
        )


def of_first_draw(*, whole: int, siblings: int, alone: bool) -> Plan:
    """Return the plan for importing the problem and drawing inputs, which all slots can have at the same time.

    Args:
        whole: bytes that all evaluations of the GPU can book together.
        siblings: number of the GPU's slots.
        alone: True to give the reference all memory, because it ran out of its share.
    """
    return Plan(0, None, 0, 0, whole if alone else whole // siblings, 0)


def of_first_call(inputs: int, weights: int, *, whole: int, siblings: int, alone: bool) -> Plan:
    """Return the plan for the reference's first call, during which no other process allocates anything."""
    call_bytes = inputs + weights
    needed = min(_FIRST_TIMES * call_bytes + _FIRST_BYTES, _FIRST_TIMES_OF_LITTLE * call_bytes)
    needed = max(needed, min(_FIRST_BYTES, whole // siblings))
    reference = whole if alone else max(min(needed, whole), call_bytes)
    return Plan(inputs, None, weights, 0, reference, 0)


def settled(inputs: int, outputs: int, weights: int, peak: int, *, whole: int, siblings: int) -> Plan:
    """Return the final plan, after the reference's first answer.

    ``peak`` is the peak memory of the reference's process so far.
    """
    share = whole // siblings
    least = {name: min(nbytes, int(part * share)) for name, (nbytes, part) in _LEAST.items()}
    judge = max(least["judge"], inputs + outputs + min(_BESIDE_BYTES, share // 6))
    must = outputs + weights
    both = max(judge, 2 * (inputs + outputs) + min(_BESIDE_BYTES, share // 6))
    has_turns = both + peak + must <= share  # More would leave less memory for the problems of other slots.
    judge = both if has_turns else judge
    more = min(_MORE_BYTES, max(share // 8, inputs + outputs))  # Another call can need both once more.
    reference = max(least["reference"], int(_MORE * peak) + more)
    reference = max(min(reference, whole - judge - must), peak)
    candidate = max(least["candidate"], _KERNEL * max(peak, inputs + outputs + weights))
    # If a problem fills the GPU, its kernels get the remaining memory.
    candidate = max(min(candidate, whole - judge - reference), must)
    return Plan(inputs, outputs, weights, judge, reference, candidate, has_turns)
