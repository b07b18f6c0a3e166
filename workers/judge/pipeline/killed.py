"""Whose failure it is that Linux or an operator killed a sealed process, or a part of it."""

from __future__ import annotations

from collections.abc import Iterable

from kqueue.categories import Blame, Category
from kqueue.contract import Outcome, Phase
from kqueue.evidence import Facts
from workers.judge.forkserver.control import End, Report


def settle(outcome: Outcome, reports: Iterable[Report], *, alone: bool) -> Outcome:
    """Return the outcome with the right blame, now that all sealed processes have ended.

    Args:
        outcome: what came of the evaluation.
        reports: how its sealed processes ended.
        alone: True if the evaluation had its device alone, as the last of several tries.
    """
    if outcome.blame in (Blame.CANDIDATE, Blame.PROBLEM) and any(report.robbed for report in reports):
        # A compiler that Linux has killed, for instance, looks like one that refuses the source.
        return Outcome(
            category=Category.WORKER_LOST,
            message="the host had no memory left for a part of a sealed process",
            phase=outcome.phase,
            facts=Facts(out_of_memory=True, instead_of=outcome.category),
        )
    if alone and outcome.category is Category.WORKER_LOST and outcome.facts.reason == End.EXITED:
        # No filter keeps it from sending SIGKILL to itself here, and it has ended so each time.
        category = Category.REFERENCE_ERROR if outcome.phase is Phase.REFERENCE else Category.CRASHED
        return outcome.model_copy(update={"category": category})
    return outcome
