"""A tournament on a fleet. It judges and records the evaluations that :mod:`kqueue.tuning.tournament` requests.

A proposal is one evaluation of one kernel, as in a tuning run (:mod:`kqueue.search.tuning`). Its scores have the device
seconds too.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any, Final

from kqueue.contract import Request, Verdict
from kqueue.errors import InvalidRequest
from kqueue.search.plan import TournamentPlan
from kqueue.search.tuning import Batches
from kqueue.store.searches import Proposal, Step
from kqueue.tuning.halving import Entry, Result
from kqueue.tuning.tournament import Tournament

#: Name of the device seconds among the scores.
_DEVICE: Final = "device_s"


def results_of(proposals: Sequence[Proposal]) -> list[Result]:
    """Return the results of a run's ended proposals.

    Raises:
        InvalidRequest: a proposal's record cannot be read.
    """
    return [_result(one) for one in proposals if one.ended_at is not None]


def _entry(proposal: Proposal) -> Entry:
    try:
        answer: dict[str, Any] = json.loads(proposal.answer or "")
        return Entry((str(int(answer["index"])),), int(answer["calls"]), int(answer["repeat"]))
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise InvalidRequest(f"proposal {proposal.number} does not belong to a tournament") from None


def _result(proposal: Proposal) -> Result:
    scores = proposal.scores or {}
    right = proposal.category == "passed"
    return Result(_entry(proposal), right, scores.get("speedup"), scores.get(_DEVICE, 0.0))


class TournamentRun(Batches[TournamentPlan]):
    """A tournament. See :class:`~kqueue.search.run.Runner`."""

    @cached_property
    def _tournament(self) -> Tournament:
        return self.plan.tournament()

    def _planned(self, number: int) -> tuple[list[dict[str, Any]], None]:  # noqa: ARG002 the results decide
        def columns(number: int, entry: Entry) -> dict[str, Any]:
            label, _, kernel = self.plan.candidates[int(entry.config[0])]
            values = {"calls": entry.calls, "repeat": entry.repeat, "given": False, "values": {"kernel": label}}
            answer = json.dumps(values | {"index": int(entry.config[0])}, ensure_ascii=False)
            return {"number": number, "parent": None, "answer": answer, "kernel": kernel}

        entries = self._tournament.next(results_of(list(self.proposals.values()))) or ()
        return [columns(number, entry) for number, entry in enumerate(entries, len(self.proposals))], None

    def _conclusion(self, step: Step) -> dict[str, Any]:  # noqa: ARG002 the results decide
        places = self._tournament.places(results_of(list(self.proposals.values())))
        return {"best": latest_of(list(self.proposals.values()), places[0].kernel) if places else None}

    def _finalists(self, steps: Mapping[int, Step]) -> None:
        """Return None, because the tournament itself consists of duels."""

    def _scores(self, verdict: Verdict) -> dict[str, float] | None:
        scores = super()._scores(verdict)
        return scores and scores | {_DEVICE: verdict.device_s * (verdict.reused_from is None)}

    def _evaluation(self, number: int, attempt: int) -> Request:
        entry = _entry(self.proposals[number])
        return self._request(self.plan.evaluation(entry), str(number), attempt, fresh=entry.repeat != 0)


def latest_of(proposals: Sequence[Proposal], kernel: int) -> int:
    """Return the number of the last proposal of a kernel."""
    return max(one.number for one in proposals if _entry(one).config == (str(kernel),))
