"""Blame for a failure of a process: its problem's or kernel's, or the fleet's."""

from __future__ import annotations

import contextlib
from collections.abc import Generator, Iterable
from typing import Any, Final

import torch

from kqueue.categories import Blame, Category
from kqueue.contract import Outcome, Phase
from kqueue.evidence import Facts
from workers.judge.channel.gpu_memory import CudaCallError
from workers.judge.channel.protocol import Tag
from workers.judge.ending import EvaluationEnded
from workers.judge.forkserver.control import End, Report
from workers.judge.forkserver.process import SealedProcess

_OUT_OF_MEMORY: Final = 2  # cudaErrorMemoryAllocation
#: Categories of outputs whose values are wrong, which another run on the same input can overturn.
ABOUT_VALUES: Final = frozenset({Category.WRONG_VALUES, Category.NOT_FINITE})
#: Categories of outputs whose form differs from the reference's first answer.
ABOUT_FORM: Final = frozenset({Category.WRONG_OUTPUT_STRUCTURE, Category.WRONG_SHAPE, Category.WRONG_DTYPE})
UNSTEADY_FORM: Final = "the reference must return the same structure, shapes and dtypes for all inputs"


class OutOfAllowance(EvaluationEnded):
    """A reference needs more GPU memory than its allowance."""


def invalid_problem(message: str) -> EvaluationEnded:
    """Return the end of an evaluation whose problem is invalid."""
    return EvaluationEnded(Category.INVALID_PROBLEM, message, Phase.REFERENCE)


@contextlib.contextmanager
def blaming(
    what: str, process: SealedProcess, deadline_s: float, allowed_bytes: int, *, optional: bool = False
) -> Generator[None]:
    """Blame the problem for failures of a process that runs it, except for failures of the fleet.

    Args:
        what: the process's activity, for the message.
        process: the process. If the GPU had too little memory, it is ended to see which process holds the memory.
        deadline_s: the setting ``deadlines.reference_s``, for the message.
        allowed_bytes: the process's GPU memory allowance.
        optional: True if the evaluation can continue after the failure. The process can then live on.

    Raises:
        EvaluationEnded: ``invalid_problem``, ``reference_error``, ``reference_timeout``, ``worker_lost`` if the process
            was killed from outside, or ``gpu_unhealthy`` if other processes hold the GPU's memory.
    """
    try:
        yield
    except EvaluationEnded as ended:
        if ended.outcome.blame is Blame.PROBLEM:
            raise
        if ended.outcome.blame is Blame.FLEET and ended.outcome.category is not Category.WORKER_LOST:
            raise
        if ended.reply is not None and ended.reply.tag is Tag.GPU_MEMORY and not optional:
            raise _out_of_gpu_memory(what, process, allowed_bytes, dict(ended.outcome.facts)) from None
        raise _blamed(ended, what, deadline_s) from None
    except (torch.OutOfMemoryError, CudaCallError) as error:
        # The judge found no memory for its own copies.
        if optional or (isinstance(error, CudaCallError) and error.error_code != _OUT_OF_MEMORY):
            raise
        raise _out_of_gpu_memory(what, process, allowed_bytes, {}) from None


def _blamed(ended: EvaluationEnded, what: str, deadline_s: float) -> EvaluationEnded:
    outcome, reply = ended.outcome, ended.reply
    facts = outcome.facts.model_dump()
    phase = Phase.REFERENCE
    if reply is not None and reply.tag is Tag.PROBLEM:
        return invalid_problem(reply.message)
    if reply is not None:
        name = reply.exception.rpartition(".")[2]
        message = f"{what} raised {name}: {reply.message}"
        return EvaluationEnded(Category.REFERENCE_ERROR, message, phase, reply=reply, **facts)
    if outcome.category in ABOUT_FORM:
        return invalid_problem(f"{UNSTEADY_FORM}: {outcome.message}")
    if outcome.category in (Category.TIMEOUT, Category.COMPILE_TIMEOUT):
        message = f"the reference did not end within its deadline of {deadline_s:.4g} s (setting deadlines.reference_s)"
        if outcome.phase is not Phase.REFERENCE:
            message = f"{what}: {outcome.message}"
        return EvaluationEnded(Category.REFERENCE_TIMEOUT, message, phase, **facts)
    category = Category.WORKER_LOST if outcome.category is Category.WORKER_LOST else Category.REFERENCE_ERROR
    return EvaluationEnded(category, f"{what}: {outcome.message}", phase, **facts)


def _out_of_gpu_memory(what: str, process: SealedProcess, allowed_bytes: int, facts: dict[str, Any]) -> EvaluationEnded:
    """Return the blame for exhausted memory: the fleet's if the process could not get its allowance."""
    process.stop()
    process.imports.close()
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()
        if torch.cuda.mem_get_info()[0] < allowed_bytes:
            message = f"{what} found too little memory free on the GPU"
            return EvaluationEnded(Category.GPU_UNHEALTHY, message, Phase.REFERENCE)
    message = f"{what} needs more of the GPU's memory than the {allowed_bytes} bytes allowed to it"
    facts["allowed_bytes"] = allowed_bytes
    return OutOfAllowance(Category.REFERENCE_ERROR, message, Phase.REFERENCE, **facts)


def settle(outcome: Outcome, reports: Iterable[Report], *, alone: bool) -> Outcome:
    """Return the outcome with the right blame after all sealed processes have ended.

    ``alone`` is True if the evaluation had the device exclusively, which the last of several tries has.
    """
    if outcome.blame in (Blame.CANDIDATE, Blame.PROBLEM) and any(report.robbed for report in reports):
        # For instance, a compiler killed by Linux looks like one that rejects the source.
        return Outcome(
            category=Category.WORKER_LOST,
            message="the host had no memory left for a part of a sealed process",
            phase=outcome.phase,
            facts=Facts(out_of_memory=True, instead_of=outcome.category),
        )
    if alone and outcome.category is Category.WORKER_LOST and outcome.facts.reason == End.EXITED:
        # Without a seccomp filter the process can send itself SIGKILL, and it ended like this in each try.
        category = Category.REFERENCE_ERROR if outcome.phase is Phase.REFERENCE else Category.CRASHED
        return outcome.model_copy(update={"category": category})
    return outcome
