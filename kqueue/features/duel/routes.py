"""The routes of duels below ``/v1``, and the state of a duel from the evaluations of its batch, also on its page."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Final

from fastapi import APIRouter
from markupsafe import Markup
from sqlalchemy import Engine, select

from kqueue import contract
from kqueue.contract import Request
from kqueue.errors import IdempotencyConflict, UnknownEvaluation
from kqueue.features.duel.duels import BATCH, ID, MOST, Duel, Match, Trial, order, state_of
from kqueue.http.auth import Reader, Submitter
from kqueue.http.gateway import Caller, CurrentGateway, Gateway
from kqueue.http.shapes import Body, Text
from kqueue.http.v1 import REFUSALS, Key, KeyedSubmission
from kqueue.store import budgets, evaluations
from kqueue.store.engine import acting, transaction
from kqueue.store.models import Evaluation
from kqueue.store.reports.detail import show
from kqueue.store.tokens import Scope
from kqueue.web.present import render

router: Final = APIRouter(prefix="/v1", tags=["v1"])


class Rival(Body):
    """The second kernel of a duel. All else is as in the first one's request."""

    kernel: str
    backend: contract.BackendName
    kernel_label: Text = None


class DuelBody(Body):
    """A duel to begin. The key and the batch of `a` are ignored, and no verdict is reused."""

    a: Request
    b: Rival
    within: float | None = None
    """End as `equal` once the interval of the ratio lies within this part of 1, such as 0.01."""
    rounds: int = MOST
    """Maximum number of rounds."""


@router.post("/duels", status_code=201, responses=REFUSALS)
async def begin_duel(body: DuelBody, caller: Submitter, gateway: CurrentGateway, idempotency_key: Key = None) -> Duel:
    """Begin a duel of two kernels, and submit its first round. The same `Idempotency-Key` begins no second one."""
    b = contract.parse_request(dict(body.a) | dict(body.b))
    key = None if idempotency_key is None else f"{caller.token_id}/{idempotency_key}"
    match = Match.of(body.a, b, within=body.within, most=body.rounds, key=key)
    requests = match.requests(0, match.state([]).due)
    try:
        if await _submit_rounds(gateway, caller, requests):
            return match.state([None] * len(requests))
        return await gateway.read(state_in, match.id)
    except (IdempotencyConflict, UnknownEvaluation):  # with other options the key's evaluations are of another batch
        raise IdempotencyConflict([idempotency_key or ""]) from None


@router.get("/duels/{duel_id}")
async def duel(duel_id: str, caller: Reader, gateway: CurrentGateway) -> Duel:
    """Return the state of a duel, and submit its next rounds if they are due and the caller can submit.

    The rounds count for the producer that began the duel. The duels of other owners can be read only.
    """
    now = await gateway.read(state_in, duel_id)
    if now.due == 0 or not caller.may(Scope.SUBMIT):
        return now
    with acting(replace(caller.viewer, held=True)):
        if not await gateway.read(evaluations.in_batch, BATCH + now.id):
            return now
    requests = await gateway.read(due_requests, now)
    token_id = budgets.token_of(requests[0].producer)
    payer = Caller(caller.name, (Scope.SUBMIT,), token_id, owner=caller.owner, restricted=caller.restricted)
    await _submit_rounds(gateway, payer, requests)
    return now.model_copy(update={"due": 0})


async def _submit_rounds(gateway: Gateway, payer: Caller, requests: Sequence[Request]) -> bool:
    """Submit rounds, and return False if they exist."""
    submission = KeyedSubmission(payer, gateway)
    return (await submission.all([submission.put(request) for request in requests]))[0].created


def state_in(engine: Engine, identity: str) -> Duel:
    """Return the state of the duel with this id, or raise UnknownEvaluation."""
    state_of(identity, [])  # checks the id
    ids = evaluations.in_batch(engine, BATCH + identity)
    if not ids:
        raise UnknownEvaluation(identity, what="the duel")
    verdicts = evaluations.verdicts(engine, ids)
    return state_of(identity, [Trial.of(verdicts[one]) if one in verdicts else None for one in ids])


def due_requests(engine: Engine, now: Duel) -> list[Request]:
    """Return the requests of the rounds that are due, with the producer and the priority of the first round."""
    with transaction(engine) as connection:
        mine = select(Evaluation.id, Evaluation.producer, Evaluation.priority).where(Evaluation.batch == BATCH + now.id)
        rows = connection.execute(mine.order_by(Evaluation.submitted_at, Evaluation.id).limit(2)).all()
    first = [show(engine, row.id).request(priority=row.priority) for row in rows]
    sides = dict(zip(order(now.id, 0), first, strict=True))
    match = Match(sides[0], sides[1], now.id)
    done = now.rounds + sum(now.voids.values())
    return [request.model_copy(update={"producer": rows[0].producer}) for request in match.requests(done, now.due)]


def of_batch(engine: Engine, batch: str) -> Markup | None:
    """Return the state of the duel whose batch this is, or None for another batch."""
    identity = batch.removeprefix(BATCH)
    if not batch.startswith(BATCH) or not ID.fullmatch(identity):
        return None
    return Markup(render("duel/batch.html", duel=state_in(engine, identity)))  # noqa: S704 the template escapes
