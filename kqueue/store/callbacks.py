"""Callbacks: URLs to which verdicts and the results of batches are sent.

A submission writes a callback. It is due when its evaluation has a verdict, or no evaluation of its batch is open.
Servers find and claim due callbacks, send them, and record the result.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from datetime import datetime
from typing import Final, NamedTuple
from uuid import UUID

from sqlalchemy import Connection, Engine, select, text
from sqlalchemy.dialects.postgresql import insert

from kqueue.contract import Request
from kqueue.errors import InvalidRequest
from kqueue.store.engine import transaction, viewer
from kqueue.store.models import Callback

#: Maximum number of attempts to send a callback.
ATTEMPTS: Final = 8
#: Seconds before the second attempt. Each further delay is three times as long: 1.5 hours in all.
RETRY_S: Final = 5.0
#: Seconds for which a claimed callback belongs to its server. Another one then sends it again.
_CLAIM_S: Final = 60.0
#: Maximum number of callbacks of one owner in a claim, so that an owner whose URL hangs does not delay other owners,
#: and of all owners.
_OF_AN_OWNER: Final = 8
CLAIMED: Final = 64
#: Statement that makes callbacks due. A batch that is submitted in parts can have no open evaluation between two of
#: them, so its last submission must be some seconds ago.
_DUE: Final = text("""
    UPDATE callbacks AS c SET next_at = now() WHERE c.next_at IS NULL AND c.attempts = 0 AND CASE WHEN c.batch IS NULL
        THEN EXISTS (SELECT FROM evaluations AS e WHERE e.id = c.evaluation_id AND e.state = 'done')
        ELSE EXISTS (SELECT FROM batches AS b
                     WHERE b.name = c.batch AND b.owner = c.owner AND b.last_at < now() - interval '5 s')
             AND NOT EXISTS (SELECT FROM evaluations AS e
                             WHERE e.batch = c.batch AND e.owner = c.owner AND e.state <> 'done') END
""")
#: Statement that claims callbacks. The last attempt counts even if its server never records the result.
_CLAIM: Final = text("""
    UPDATE callbacks AS c SET attempts = c.attempts + 1,
        next_at = CASE WHEN c.attempts + 1 < :attempts THEN now() + make_interval(secs => :claim_s) END
    FROM (SELECT due.id FROM (SELECT DISTINCT owner FROM callbacks WHERE next_at <= now()) AS o, LATERAL (
        SELECT id, next_at FROM callbacks WHERE owner = o.owner AND next_at <= now()
        ORDER BY next_at LIMIT :most FOR UPDATE SKIP LOCKED
    ) AS due ORDER BY due.next_at LIMIT :claimed) AS due
    WHERE c.id = due.id
    RETURNING c.id, c.owner, c.evaluation_id, c.batch, c.url, c.attempts
""")
#: Statement that records an attempt, unless another server has claimed the callback or its batch was submitted again.
_SETTLE: Final = text("""
    UPDATE callbacks SET error = given.error, delivered_at = CASE WHEN given.error IS NULL THEN now() END,
        next_at = CASE WHEN attempts < :most THEN now() + make_interval(secs => given.delay_s) END
    FROM (SELECT CAST(:error AS text), CAST(:delay_s AS float8)) AS given (error, delay_s)
    WHERE id = :id AND attempts = :attempts
""")


class Due(NamedTuple):
    """A claimed callback. ``attempts`` includes the attempt that is to be made."""

    id: UUID
    owner: str
    evaluation_id: UUID | None
    batch: str | None
    url: str
    attempts: int


@dataclass(frozen=True, slots=True)
class CallbackState:
    """The state of a callback, with the host of its URL."""

    host: str
    attempts: int
    next_at: datetime | None
    delivered_at: datetime | None
    error: str | None


def register(connection: Connection, requests: Mapping[UUID, Request]) -> None:
    """Write the callbacks of new evaluations. Raise InvalidRequest for a batch's callback from an agent's session."""
    calls = [{"evaluation_id": i, "url": one.callback_url} for i, one in requests.items() if one.callback_url]
    if calls:
        connection.execute(insert(Callback), calls)
    batches = {one.batch: one.batch_callback_url for one in requests.values() if one.batch_callback_url}
    if batches and viewer().session is not None:
        # The counts include evaluations that the session does not see.
        raise InvalidRequest("batch_callback_url: a batch can have work of other sessions: use callback_url")
    again = {"attempts": 0, "next_at": None, "delivered_at": None, "error": None}
    for batch, url in sorted(batches.items()):
        # A batch that grows after its end calls again.
        connection.execute(
            insert(Callback)
            .values(batch=batch, url=url)
            .on_conflict_do_update(index_elements=["owner", "batch"], set_={**again, "url": url})
        )


def states(engine: Engine, *, evaluation_id: UUID | None = None, batch: str | None = None) -> tuple[CallbackState, ...]:
    """Return the callbacks of an evaluation, or of the session's batches of a name."""
    of = Callback.evaluation_id == evaluation_id if batch is None else Callback.batch == batch
    with transaction(engine) as connection:
        columns = (getattr(Callback, one.name) for one in fields(CallbackState))
        return tuple(CallbackState(*row) for row in connection.execute(select(*columns).where(of)))


def claim(engine: Engine) -> list[Due]:
    """Claim the callbacks that are due now, a few of each owner."""
    with transaction(engine) as connection:
        connection.execute(_DUE)
        limits = {"claim_s": _CLAIM_S, "most": _OF_AN_OWNER, "claimed": CLAIMED, "attempts": ATTEMPTS}
        return [Due._make(row) for row in connection.execute(_CLAIM, limits)]


def settle(engine: Engine, due: Due, error: str | None) -> None:
    """Record that a callback was delivered, or the reason why it was not."""
    delay_s = None if error is None else RETRY_S * 3 ** (due.attempts - 1)
    values = {"id": due.id, "attempts": due.attempts, "error": error, "most": ATTEMPTS, "delay_s": delay_s}
    with transaction(engine) as connection:
        connection.execute(_SETTLE, values)
