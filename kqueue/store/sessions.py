"""Sessions of browsers, and the links that start one. A secret is shown once, and the table holds its SHA-256 digest.

A session has the rights of a token while the token is valid, at most until its own end, and until it is idle for too
long. Every function is one transaction and raises :class:`~kqueue.errors.DatabaseUnavailable` if Postgres cannot be
used.
"""

from __future__ import annotations

from collections.abc import Collection
from datetime import timedelta
from typing import Final
from uuid import UUID, uuid5

from sqlalchemy import Connection, Engine, delete, func, select, update
from sqlalchemy.dialects.postgresql import insert

from kqueue.store.engine import transaction
from kqueue.store.models import Session, Token
from kqueue.store.sql import read
from kqueue.store.tokens import COLUMNS, NOTED_EVERY, PREFIX, VALID, WIDE, Known, Scope, digest_of, new_secret

#: Prefix of session secrets, by which people and secret scanners recognise them.
_SESSION: Final = f"{PREFIX}session_"
#: Prefix of link secrets.
_LINK: Final = f"{PREFIX}link_"
#: Time for which a browser stays logged in by a token or a link.
LIFETIME: Final = timedelta(hours=12)
#: Time for which a link is valid.
LINK_LIFETIME: Final = timedelta(minutes=1)
#: Namespace of the ids of tokens for logins by link or OpenID Connect, one for each name, owner and set of scopes.
_FAMILY: Final = UUID("0f3ad3a1-6e5c-4d0a-8f6e-2f3f2f1b7c11")
_LIVE: Final = Session.ends_at > func.now()


def begin(engine: Engine, token_id: UUID) -> str:
    """Log a browser in with a token. Return the session's secret, which is not stored."""
    with transaction(engine) as connection:
        return _begin(connection, token_id)


def find(engine: Engine, secret: str, *, idle: timedelta = LIFETIME, used: bool = True) -> Known | None:
    """Return the token of the session with this secret, or None if either is not valid.

    A session ends ``idle`` after its last use. ``used`` is False if the request is no use of the session.
    """
    mine = (Session.digest == digest_of(secret), Session.is_link.is_(False))
    query = select(*COLUMNS).join(Session, Session.token_id == Token.id)
    query = query.where(*mine, _LIVE, VALID, Session.seen_at > func.now() - idle)
    with transaction(engine) as connection:
        tokens = read(Known, connection.execute(query))
        if tokens and used:
            due = Session.seen_at < func.now() - NOTED_EVERY
            connection.execute(update(Session).where(*mine, due).values(seen_at=func.now()))
    return tokens[0] if tokens else None


def end(engine: Engine, secret: str) -> None:
    """Log a browser out."""
    with transaction(engine) as connection:
        connection.execute(delete(Session).where(Session.digest == digest_of(secret), Session.is_link.is_(False)))


def invite(
    engine: Engine,
    name: str,
    *,
    scopes: Collection[Scope] = (Scope.PROBLEMS, *WIDE),
    lifetime: timedelta = LINK_LIFETIME,
    **owner: str,
) -> str:
    """Create a login link, by default for one browser with all rights but the operator's. Return its secret.

    The secret is not stored. Its sessions belong to a token of this name, which has no secret and can be revoked. A
    link that only reads logs in any number of browsers.
    """
    secret = new_secret(_LINK)
    with transaction(engine) as connection:
        token_id = _allow(connection, name, scopes, **owner)
        connection.execute(
            insert(Session).values(
                digest=digest_of(secret), token_id=token_id, is_link=True, ends_at=func.now() + lifetime
            )
        )
    return secret


def accept(engine: Engine, secret: str) -> str | None:
    """Log a browser in by a link, which ends unless it only reads. Return the session's secret, or None."""
    link = (Session.digest == digest_of(secret), Session.is_link.is_(True), _LIVE)
    token = select(Token.id).where(VALID)
    reads = Token.scopes.contained_by([Scope.READ.value, Scope.READ_ALL.value])
    once = delete(Session).where(*link, Session.token_id.in_(token.where(~reads))).returning(Session.token_id)
    often = select(Session.token_id).where(*link, Session.token_id.in_(token.where(reads)))
    with transaction(engine) as connection:
        token_id = connection.scalar(once) or connection.scalar(often)
        return None if token_id is None else _begin(connection, token_id)


def enter(engine: Engine, name: str, owner: str, scopes: Collection[Scope], lifetime: timedelta) -> str:
    """Log in the browser of a person whom an OpenID provider identified. Return the session's secret.

    Sessions of the same owner with other scopes end.
    """
    with transaction(engine) as connection:
        token_id = _allow(connection, name, scopes, owner=owner)
        former = select(Token.id).where(Token.owner == owner, Token.digest.is_(None), Token.id != token_id)
        connection.execute(delete(Session).where(Session.token_id.in_(former)))
        return _begin(connection, token_id, lifetime)


def _allow(connection: Connection, name: str, scopes: Collection[Scope], **columns: str) -> UUID:
    """Create the token of sessions with this name and these scopes, or make it valid again. Return its id."""
    row = {"name": name, "scopes": [scope.value for scope in scopes], **columns}
    # Another name or scope makes another token, because servers lack the right to change a token's.
    token_id = uuid5(_FAMILY, str(row))
    token = insert(Token).values(id=token_id, **row)
    connection.execute(token.on_conflict_do_update(index_elements=[Token.id], set_={"revoked_at": None}))
    return token_id


def _begin(connection: Connection, token_id: UUID, lifetime: timedelta = LIFETIME) -> str:
    """Add a session, and remove expired ones."""
    secret = new_secret(_SESSION)
    connection.execute(delete(Session).where(Session.ends_at <= func.now()))
    connection.execute(
        insert(Session).values(digest=digest_of(secret), token_id=token_id, ends_at=func.now() + lifetime)
    )
    return secret
