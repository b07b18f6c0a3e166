"""Blame for a sealed process, or a part of it, that Linux or an operator killed."""

from __future__ import annotations

from collections.abc import Iterable

from kqueue.categories import Blame, Category
from kqueue.contract import Outcome, Phase
from kqueue.evidence import Facts
from workers.judge.forkserver.control import End, Report


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
