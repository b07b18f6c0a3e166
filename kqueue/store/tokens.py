"""Tokens of the HTTP server. A secret is shown once; the table holds its SHA-256 digest.

Every function is one transaction. It raises :class:`~kqueue.errors.DatabaseUnavailable` if Postgres cannot be used.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
from collections.abc import Collection
from dataclasses import dataclass
from datetime import datetime, timedelta
from enum import StrEnum
from typing import Final
from uuid import UUID, uuid4

from sqlalchemy import Engine, and_, delete, func, or_, select, update
from sqlalchemy.dialects.postgresql import insert

from kqueue.states import Priority
from kqueue.store.engine import transaction
from kqueue.store.evaluations import OPEN
from kqueue.store.models import Evaluation, Session, Token
from kqueue.store.sql import any_uuid, read

#: The beginning of every secret, by which people and scanners of secrets recognise one.
PREFIX: Final = "kq_"
#: ``last_used_at`` is written at most so often.
_NOTED_EVERY: Final = timedelta(minutes=1)


class Scope(StrEnum):
    """The rights of a token's holder. Each scope includes those before it."""

    READ = "read"
    """Look at everything, sources and logs included."""
    SUBMIT = "submit"
    """Submit kernels for stored problems, wait for them, and cancel."""
    PROBLEMS = "problems"
    """Bring new problems, whose source the fleet runs too."""
    ADMIN = "admin"
    """Run the fleet: clean up, and reset GPUs."""

    def covers(self, other: Scope) -> bool:
        """Return True if this scope includes ``other``."""
        return _ORDER.index(self) >= _ORDER.index(other)


_ORDER: Final = list(Scope)


@dataclass(frozen=True, slots=True)
class Known:
    """A token, without its secret; moments in UTC.

    ``priority`` is the highest that its holder may ask for, ``weight`` its share of the devices beside others' 1.
    """

    id: UUID
    name: str
    scopes: tuple[Scope, ...]
    priority: Priority
    weight: float
    created_at: datetime
    expires_at: datetime | None
    revoked_at: datetime | None
    last_used_at: datetime | None


def create(
    engine: Engine,
    name: str,
    scopes: Collection[Scope],
    *,
    expires_after: timedelta | None = None,
    priority: Priority = Priority.INTERACTIVE,
    weight: float = 1.0,
) -> tuple[Known, str]:
    """Make a token. Return it and its secret, which is kept nowhere.

    Args:
        engine: the database.
        name: the holder's name, for people.
        scopes: what the token is good for.
        expires_after: how long the token is valid; None for ever.
        priority: the highest that its holder may ask for.
        weight: its share of the devices, where every other producer has 1.
    """
    secret = new_secret(PREFIX)
    with transaction(engine) as connection:
        rows = connection.execute(
            insert(Token)
            .values(
                id=uuid4(),
                name=name,
                digest=digest_of(secret),
                scopes=[scope.value for scope in scopes],
                expires_at=None if expires_after is None else func.now() + expires_after,
                priority=priority,
                weight=weight,
            )
            .returning(*COLUMNS)
        )
        [made] = read(Known, rows)
    return made, secret


def renew(engine: Engine, token_id: UUID, name: str, scopes: Collection[Scope]) -> str:
    """Give a token a new secret and return that. The former secret, and browsers that came by it, are refused then.

    A token without this id is made. A revoked or expired token becomes valid again.

    Args:
        engine: the database.
        token_id: the token's id.
        name: the holder's name, for people.
        scopes: what the token is good for.
    """
    secret = new_secret(PREFIX)
    given = {"name": name, "digest": digest_of(secret), "scopes": [scope.value for scope in scopes]}
    fresh = {"created_at": func.now(), "expires_at": None, "revoked_at": None, "last_used_at": None}
    with transaction(engine) as connection:
        connection.execute(
            insert(Token)
            .values(id=token_id, **given)
            .on_conflict_do_update(index_elements=[Token.id], set_=given | fresh)
        )
        connection.execute(delete(Session).where(Session.token_id == token_id))
    return secret


def find(engine: Engine, secret: str) -> Known | None:
    """Return the valid token with this secret and note its use; None if there is none.

    The search is for the digest, so the time that it takes says nothing about any secret.
    """
    digest = digest_of(secret)
    with transaction(engine) as connection:
        row = connection.execute(
            select(*COLUMNS, Token.digest, func.now().label("now")).where(Token.digest == digest, VALID)
        ).one_or_none()
        if row is None or not hmac.compare_digest(row.digest, digest):
            return None
        if row.last_used_at is None or row.now - row.last_used_at >= _NOTED_EVERY:
            # Nobody waits for another's note of the same.
            free = select(Token.id).where(Token.id == row.id).with_for_update(skip_locked=True)
            connection.execute(update(Token).where(Token.id.in_(free)).values(last_used_at=func.now()))
    return read(Known, [row])[0]


def listing(engine: Engine) -> list[Known]:
    """Return all tokens in the order in which they were made, those that are no longer valid included."""
    with transaction(engine) as connection:
        return read(Known, connection.execute(select(*COLUMNS).order_by(Token.created_at, Token.id)))


def revoke(engine: Engine, which: str) -> list[Known]:
    """Revoke the tokens whose id or name is ``which``, and log their browsers out.

    Returns:
        Those that were not revoked before.
    """
    try:
        matches = Token.id == UUID(which)
    except ValueError:
        matches = Token.name == which
    with transaction(engine) as connection:
        rows = connection.execute(
            update(Token).where(matches, Token.revoked_at.is_(None)).values(revoked_at=func.now()).returning(*COLUMNS)
        )
        revoked = read(Known, rows)
        connection.execute(delete(Session).where(Session.token_id == any_uuid([token.id for token in revoked])))
    return revoked


def unfinished(engine: Engine, token_id: UUID) -> int:
    """Return the number of a token's evaluations that have no verdict yet."""
    with transaction(engine) as connection:
        return connection.scalars(
            select(func.count()).select_from(Evaluation).where(Evaluation.token_id == token_id, OPEN)
        ).one()


def attribute(engine: Engine, token_id: UUID, evaluation_ids: Collection[UUID]) -> None:
    """Note the token with which evaluations were submitted."""
    with transaction(engine) as connection:
        connection.execute(
            update(Evaluation)
            .where(Evaluation.id.in_(evaluation_ids), Evaluation.token_id.is_(None))
            .values(token_id=token_id)
        )


#: The columns that make up a :class:`Known`.
COLUMNS: Final = (
    Token.id,
    Token.name,
    Token.scopes,
    Token.priority,
    Token.weight,
    Token.created_at,
    Token.expires_at,
    Token.revoked_at,
    Token.last_used_at,
)
#: The condition that a token is good at present.
VALID: Final = and_(Token.revoked_at.is_(None), or_(Token.expires_at.is_(None), Token.expires_at > func.now()))


def new_secret(prefix: str) -> str:
    """Return a secret that begins with ``prefix`` and that nobody can guess."""
    return prefix + secrets.token_urlsafe(32)


def digest_of(secret: str) -> str:
    """Return a secret as tables hold it."""
    return hashlib.sha256(secret.encode("utf-8", "surrogatepass")).hexdigest()
