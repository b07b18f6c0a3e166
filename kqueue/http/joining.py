"""Accepting a request that may be asked for again: by a client that lost its answer, or whose server was restarted.

Clients of other evaluation servers post and wait on one connection. When that breaks they post again, without a key. So
equal requests of one caller are one evaluation while it is under way and for :data:`STANDS_S` seconds after its answer.
A client that wants its kernel evaluated once more gives another ``Idempotency-Key``. A client that gives the same key
gets the same answer for as long as the evaluation is kept, and a conflict if it asks for something else. If the fleet
failed or the evaluation was cancelled, the next request evaluates anew.
"""

from __future__ import annotations

import hashlib
from typing import Annotated, Final
from uuid import UUID

from fastapi import Header
from fastapi import Request as HttpRequest
from fastapi.responses import JSONResponse

from kqueue.categories import Blame, Category
from kqueue.client.database import takes_any_lane
from kqueue.contract import Request, Verdict
from kqueue.errors import IdempotencyConflict, LaneUnavailable
from kqueue.http import failures
from kqueue.http.auth import Caller
from kqueue.http.failures import HttpError
from kqueue.http.gateway import Gateway
from kqueue.store import reports

#: An equal request without a key gets the same answer for so many seconds.
STANDS_S: Final = 60.0

IdempotencyKey = Annotated[
    str | None,
    Header(
        alias="Idempotency-Key",
        min_length=1,
        max_length=200,
        description="Requests with the same key are one evaluation. Without it equal requests are, until a minute "
        "after their answer.",
    ),
]

#: What these routes may answer beside what all routes may: the evaluation was cancelled or the key names another, or
#: the caller has too many.
RESPONSES: Final = failures.documented(409, 429)


async def accept(
    gateway: Gateway,
    caller: Caller,
    request: Request,
    key: str | None,
    *,
    stands_s: float | None = STANDS_S,
    finished_counts: bool = True,
) -> tuple[UUID, bool]:
    """Return the evaluation for a request, and True if it was there before.

    The kernel is judged anew under a new key and where finished evaluations do not count. Else the verdict of an equal
    evaluation will do, whoever's it is.

    Args:
        gateway: the fleet.
        caller: who asks.
        request: what to evaluate.
        key: requests with the same key are one evaluation, whose answer stands; None: equal requests are.
        stands_s: seconds for which the answer stands without a key; None for no limit.
        finished_counts: False to evaluate anew what has its verdict.

    Raises:
        HttpError: 503, no worker could judge it now; 409, the key was used for something else; 403 and 429 as
            :meth:`Gateway.submit`.
        InvalidRequest, DatabaseUnavailable: as :meth:`kqueue.Client.submit`.
    """
    what = key if key is not None else request.model_dump_json()
    stands_s = None if key is not None else stands_s
    kind = "key" if stands_s is None else "same"
    family = f"{kind}:{caller.token_id or 'local'}:{hashlib.sha256(what.encode()).hexdigest()[:32]}:"
    within_s = stands_s if finished_counts else 0.0
    if key is not None or not finished_counts:
        request = request.model_copy(update={"reuse": False})
    any_lane = takes_any_lane(request, gateway.config.gpu_fallback)
    before = await gateway.read(reports.earlier, request, family=family, within_s=within_s, any_lane=any_lane)
    if before is not None and key is not None and not before.same:
        raise _conflict(key)
    if before is not None and before.stands:
        return before.evaluation_id, True
    # All equal requests of this moment have the same key: one of them makes the evaluation, the others get it.
    own = family + ("0" if before is None else before.evaluation_id.hex) + ("" if finished_counts else ":fresh")
    try:
        [ticket] = await gateway.submit(caller, [request.model_copy(update={"idempotency_key": own})])
    except LaneUnavailable as error:
        raise HttpError(503, str(error), code="lane_unavailable") from None
    except IdempotencyConflict as error:
        raise error if key is None else _conflict(key) from None
    return ticket.evaluation_id, not ticket.created


def _conflict(key: str) -> HttpError:
    return HttpError(409, str(IdempotencyConflict([key])), code="idempotency_conflict")


async def settle(gateway: Gateway, request: HttpRequest, evaluation_id: UUID) -> Verdict | JSONResponse:
    """Return the verdict on the kernel or the problem, or the error to answer with if neither is to blame.

    Raises:
        HttpError, ClientDisconnect: as :meth:`Gateway.wait`.
    """
    verdict = await gateway.wait(request, evaluation_id, None)
    assert verdict is not None
    if verdict.blame not in (Blame.FLEET, Blame.NOBODY):
        return verdict
    return refusal(verdict, request.url.path)


def refusal(verdict: Verdict, path: str) -> JSONResponse:
    """Return the error that stands for a verdict for which neither kernel nor problem is to blame."""
    return failures.answer(
        path,
        409 if verdict.category is Category.CANCELLED else 503,
        str(verdict.category),
        f"{verdict.category.info.meaning} {verdict.message}".strip(),
        evaluation_ids=[str(verdict.evaluation_id)],
    )
