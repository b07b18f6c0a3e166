"""Accepting a request that may be asked for again: by a client that lost its answer, or whose server was restarted.

Clients of other evaluation servers post and wait on one connection. When that breaks they post again, without a key. So
equal requests of one caller are one evaluation while it is under way and for :data:`STANDS_S` seconds after its answer.
A client that wants its kernel evaluated once more gives another ``Idempotency-Key``. A client that gives the same key
gets the same answer for as long as the evaluation is kept. If the fleet failed or the evaluation was cancelled, the
next request evaluates anew.
"""

from __future__ import annotations

import hashlib
from typing import Annotated, Final
from uuid import UUID

from fastapi import Header
from fastapi import Request as HttpRequest
from fastapi.responses import JSONResponse

from kqueue.categories import Blame, Category
from kqueue.contract import Request, Verdict
from kqueue.errors import LaneUnavailable
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

#: What these routes may answer beside what all routes may: the evaluation was cancelled, or the caller has too many.
RESPONSES: Final = failures.documented(409, 429)


async def accept(
    gateway: Gateway, caller: Caller, request: Request, key: str | None, *, finished_counts: bool = True
) -> tuple[UUID, bool]:
    """Return the evaluation for a request, and True if it was there before.

    Args:
        gateway: the fleet.
        caller: who asks.
        request: what to evaluate.
        key: requests with the same key are one evaluation.
        finished_counts: False to evaluate anew what has its verdict.

    Raises:
        HttpError: 503, no worker could judge it now; 403 and 429 as :meth:`Gateway.submit`.
        IdempotencyConflict: the key was used for something else.
        InvalidRequest, DatabaseUnavailable: as :meth:`kqueue.Client.submit`.
    """
    what = key if key is not None else request.model_dump_json()
    kind = "same" if key is None else "key"
    family = f"{kind}:{caller.token_id or 'local'}:{hashlib.sha256(what.encode()).hexdigest()[:32]}:"
    stands_s = STANDS_S if key is None else None
    within_s = stands_s if finished_counts else 0.0
    before = await gateway.read(reports.earlier, request, family=family, within_s=within_s)
    if before is not None and before.stands:
        return before.evaluation_id, True
    # All equal requests of this moment have the same key: one of them makes the evaluation, the others get it.
    own = family + ("0" if before is None else before.evaluation_id.hex)
    try:
        [ticket] = await gateway.submit(caller, [request.model_copy(update={"idempotency_key": own})])
    except LaneUnavailable as error:
        raise HttpError(503, str(error), code="lane_unavailable") from None
    return ticket.evaluation_id, not ticket.created


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
