"""Duels, from the evaluations of their batches."""

from __future__ import annotations

from sqlalchemy import Engine, select

from kqueue.contract import Request
from kqueue.errors import UnknownEvaluation
from kqueue.features.duel.duels import BATCH, Duel, Match, Trial, order, state_of
from kqueue.store import evaluations
from kqueue.store.engine import transaction
from kqueue.store.models import Evaluation
from kqueue.store.reports.detail import show


def duel(engine: Engine, identity: str) -> Duel:
    """Return the state of the duel with this id.

    Raises:
        InvalidRequest: no duel can have this id.
        UnknownEvaluation: there is no such duel.
    """
    state_of(identity, [])  # checks the id
    ids = evaluations.in_batch(engine, BATCH + identity)
    if not ids:
        raise UnknownEvaluation(identity, what="the duel")
    verdicts = evaluations.verdicts(engine, ids)
    return state_of(identity, [Trial.of(verdicts[one]) if one in verdicts else None for one in ids])


def requests(engine: Engine, now: Duel) -> list[Request]:
    """Return the requests of the rounds that are due, with the producer and the priority of the first round."""
    with transaction(engine) as connection:
        mine = select(Evaluation.id, Evaluation.producer, Evaluation.priority).where(Evaluation.batch == BATCH + now.id)
        rows = connection.execute(mine.order_by(Evaluation.submitted_at, Evaluation.id).limit(2)).all()
    first = [show(engine, row.id).request(priority=row.priority) for row in rows]
    sides = dict(zip(order(now.id, 0), first, strict=True))
    match = Match(sides[0], sides[1], now.id)
    done = now.rounds + sum(now.voids.values())
    return [request.model_copy(update={"producer": rows[0].producer}) for request in match.requests(done, now.due)]
