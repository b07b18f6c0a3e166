"""Callbacks: URLs to which verdicts and the results of batches are sent.

A submission writes a callback. The transaction that writes an evaluation's verdict makes its callback due. A batch's
callback is due while no evaluation of the batch is open. Servers claim due callbacks, send them, and record the result.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Final, NamedTuple
from urllib.parse import urlsplit
from uuid import UUID

from sqlalchemy import Connection, Engine, select, text
from sqlalchemy.dialects.postgresql import insert

from kqueue.contract import Request
from kqueue.store.engine import transaction
from kqueue.store.models import Callback

#: Maximum number of attempts to send a callback.
ATTEMPTS: Final = 8
#: Seconds before the second attempt. Each further delay is three times as long: 1.5 hours in all.
RETRY_S: Final = 5.0
#: Seconds for which a claimed callback belongs to its server. Another one then sends it again.
_CLAIM_S: Final = 60.0
#: Maximum number of callbacks of one owner in a claim, so that an owner whose URL hangs does not delay other owners.
_OF_AN_OWNER: Final = 8
#: Statement that makes callbacks due for batches that ended. A batch that is submitted in parts can have none open
#: between two of them, so its last submission must be some seconds ago.
_BATCHES: Final = text("""
    UPDATE callbacks AS c SET next_at = now() FROM batches AS b
    WHERE c.batch IS NOT NULL AND c.next_at IS NULL AND c.delivered_at IS NULL AND c.attempts = 0
      AND b.name = c.batch AND b.owner = c.owner AND b.last_at < now() - interval '5 s'
      AND NOT EXISTS (SELECT FROM evaluations AS e WHERE e.batch = c.batch AND e.owner = c.owner AND e.state <> 'done')
""")
_CLAIM: Final = text("""
    UPDATE callbacks AS c SET attempts = c.attempts + 1, next_at = now() + make_interval(secs => :claim_s)
    FROM (SELECT DISTINCT owner FROM callbacks WHERE next_at <= now()) AS o, LATERAL (
        SELECT id FROM callbacks WHERE owner = o.owner AND next_at <= now()
        ORDER BY next_at LIMIT :most FOR UPDATE SKIP LOCKED
    ) AS due
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
    """The state of a callback. It has the URL's host only, because the rest of a URL can contain secrets."""

    host: str
    attempts: int
    next_at: datetime | None
    delivered_at: datetime | None
    error: str | None

    def in_words(self) -> str:
        """Return the state in words."""
        if self.delivered_at is not None:
            return f"delivered at {self.delivered_at:%Y-%m-%d %H:%M:%S} UTC, attempt {self.attempts}"
        if self.error is None:
            return "not sent yet"
        then = "gave up" if self.next_at is None else f"next attempt at {self.next_at:%H:%M:%S} UTC"
        return f"attempt {self.attempts} of {ATTEMPTS} failed ({self.error}), {then}"


def register(connection: Connection, requests: Mapping[UUID, Request], reused: Collection[UUID], now: datetime) -> None:
    """Write the callbacks of new evaluations. Those in ``reused`` have their verdicts already."""
    if calls := [
        {"evaluation_id": identity, "url": request.callback_url, "next_at": now if identity in reused else None}
        for identity, request in requests.items()
        if request.callback_url is not None
    ]:
        connection.execute(insert(Callback), calls)
    batches = {one.batch: one.batch_callback_url for one in requests.values() if one.batch_callback_url is not None}
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
        rows = connection.execute(select(Callback.__table__).where(of)).all()
        return tuple(
            CallbackState(urlsplit(row.url).hostname or "", row.attempts, row.next_at, row.delivered_at, row.error)
            for row in rows
        )


def claim(engine: Engine) -> list[Due]:
    """Claim the callbacks that are due now, a few of each owner."""
    with transaction(engine) as connection:
        connection.execute(_BATCHES)
        rows = connection.execute(_CLAIM, {"claim_s": _CLAIM_S, "most": _OF_AN_OWNER}).all()
    return [Due._make(row) for row in rows]


def settle(engine: Engine, due: Due, error: str | None) -> None:
    """Record that a callback was delivered, or the reason why it was not."""
    delay_s = None if error is None else RETRY_S * 3 ** (due.attempts - 1)
    values = {"id": due.id, "attempts": due.attempts, "error": error, "most": ATTEMPTS, "delay_s": delay_s}
    with transaction(engine) as connection:
        connection.execute(_SETTLE, values)
