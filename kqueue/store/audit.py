"""The audit log: who cancelled, submitted, logged in, and used or changed rights.

It is a table, because its writers are servers on several hosts and commands, whose log lines go to different places or
to a terminal. Servers can only add entries. Every function is one transaction and raises
:class:`~kqueue.errors.DatabaseUnavailable` if Postgres cannot be used.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from typing import Literal
from uuid import UUID

from sqlalchemy import Engine, delete, insert, select

from kqueue.errors import DatabaseUnavailable
from kqueue.store.engine import lacks_right, transaction
from kqueue.store.models import AuditEntry
from kqueue.store.sql import columns, fetch

#: The actions that are recorded.
Action = Literal[
    "login", "login denied", "logout", "cancel", "submit", "token create", "token edit", "token revoke", "scope"
]


@dataclass(frozen=True, slots=True)
class Entry:
    """An entry. ``actor`` did ``action`` to ``subject``, for ``owner`` with a token."""

    at: datetime
    actor: str
    owner: str | None
    action: str
    subject: str
    token_id: UUID | None


def record(
    engine: Engine, action: Action, *subjects: str, actor: str, owner: str | None = None, token_id: UUID | None = None
) -> None:
    """Add an entry for each subject, unless the database's login is a producer's, which cannot write here."""
    row = {"actor": actor, "owner": owner, "token_id": token_id, "action": action}
    if not subjects:
        return
    try:
        with transaction(engine) as connection:
            # Without `inline` the statement would return the id, which servers cannot read.
            connection.execute(insert(AuditEntry).inline(), [row | {"subject": subject} for subject in subjects])
    except DatabaseUnavailable as error:
        if not lacks_right(error):
            raise


def listing(engine: Engine, *, since: datetime, actor: str | None, limit: int) -> list[Entry]:
    """Return the last entries of an actor or of all, the newest first."""
    query = select(*columns(Entry, AuditEntry)).where(AuditEntry.at >= since)
    query = query if actor is None else query.where(AuditEntry.actor == actor)
    return fetch(engine, Entry, query.order_by(AuditEntry.id.desc()).limit(limit))


def forget(engine: Engine, before: datetime) -> int:
    """Remove the entries from before a time. Return their number."""
    with transaction(engine) as connection:
        return connection.execute(delete(AuditEntry).where(AuditEntry.at < before)).rowcount
