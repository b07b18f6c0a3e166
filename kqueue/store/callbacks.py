"""Callbacks: URLs to which servers send verdicts and the results of batches. A submission writes a callback."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from datetime import datetime
from uuid import UUID

from sqlalchemy import Connection, Engine, func, select
from sqlalchemy.dialects.postgresql import insert

from kqueue.contract import Request
from kqueue.errors import InvalidRequest
from kqueue.store.engine import transaction, viewer
from kqueue.store.models import Callback


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
    again = {"id": func.gen_random_uuid(), "attempts": 0, "next_at": None, "delivered_at": None, "error": None}
    for batch, url in sorted(batches.items()):
        # A batch that grows after its end calls again, with another id, because receivers ignore a known one.
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
