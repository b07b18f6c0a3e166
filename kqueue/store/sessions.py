"""Sessions of browsers, and the links that start one. A secret is shown once, and the table holds its SHA-256 digest.

A session has the rights of a token while the token is valid, and at most until its own end. Every function is one
transaction and raises :class:`~kqueue.errors.DatabaseUnavailable` if Postgres cannot be used.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Final
from uuid import UUID, uuid5

from sqlalchemy import Connection, Engine, delete, func, select
from sqlalchemy.dialects.postgresql import insert

from kqueue.states import Priority
from kqueue.store.engine import transaction
from kqueue.store.models import Session, Token
from kqueue.store.sql import fetch
from kqueue.store.tokens import COLUMNS, PREFIX, VALID, WIDE, Known, Scope, digest_of, new_secret

#: Prefix of session secrets, by which people and secret scanners recognise them.
_SESSION: Final = f"{PREFIX}session_"
#: Prefix of link secrets.
_LINK: Final = f"{PREFIX}link_"
#: Time for which a browser stays logged in.
LIFETIME: Final = timedelta(hours=12)
#: Time for which a link is valid.
LINK_LIFETIME: Final = timedelta(minutes=1)
#: Namespace of the ids of tokens for logins by link, one for each name.
_FAMILY: Final = UUID("0f3ad3a1-6e5c-4d0a-8f6e-2f3f2f1b7c11")
_LIVE: Final = Session.ends_at > func.now()


def begin(engine: Engine, token_id: UUID) -> str:
    """Log a browser in with a token. Return the session's secret, which is not stored."""
    with transaction(engine) as connection:
        return _begin(connection, token_id)


def find(engine: Engine, secret: str) -> Known | None:
    """Return the token of the session with this secret, or None if either is not valid."""
    query = select(*COLUMNS).join(Session, Session.token_id == Token.id)
    mine = query.where(Session.digest == digest_of(secret), Session.is_link.is_(False), _LIVE, VALID)
    tokens = fetch(engine, Known, mine)
    return tokens[0] if tokens else None


def end(engine: Engine, secret: str) -> None:
    """Log a browser out."""
    with transaction(engine) as connection:
        connection.execute(delete(Session).where(Session.digest == digest_of(secret), Session.is_link.is_(False)))


def invite(engine: Engine, name: str) -> str:
    """Create a login link for one browser, to read and cancel everything and to submit problems. Return its secret.

    The secret is not stored. Its sessions belong to a token of this name, which has no secret and can be revoked.
    """
    secret = new_secret(_LINK)
    token_id = uuid5(_FAMILY, name)
    token = {
        "name": name,
        "digest": digest_of(new_secret(PREFIX)),
        "scopes": [scope.value for scope in (Scope.PROBLEMS, *WIDE)],
    }
    with transaction(engine) as connection:
        connection.execute(
            insert(Token)
            .values(id=token_id, priority=Priority.INTERACTIVE, **token)
            .on_conflict_do_update(index_elements=[Token.id], set_={"revoked_at": None, "scopes": token["scopes"]})
        )
        connection.execute(
            insert(Session).values(
                digest=digest_of(secret), token_id=token_id, is_link=True, ends_at=func.now() + LINK_LIFETIME
            )
        )
    return secret


def accept(engine: Engine, secret: str) -> str | None:
    """Log a browser in by a link and invalidate the link. Return the session's secret, or None for an invalid link."""
    with transaction(engine) as connection:
        token_id = connection.scalar(
            delete(Session)
            .where(Session.digest == digest_of(secret), Session.is_link.is_(True), _LIVE)
            .where(Session.token_id.in_(select(Token.id).where(VALID)))
            .returning(Session.token_id)
        )
        return None if token_id is None else _begin(connection, token_id)


def _begin(connection: Connection, token_id: UUID) -> str:
    """Add a session, and remove expired ones."""
    secret = new_secret(_SESSION)
    connection.execute(delete(Session).where(Session.ends_at <= func.now()))
    connection.execute(
        insert(Session).values(digest=digest_of(secret), token_id=token_id, ends_at=func.now() + LIFETIME)
    )
    return secret
