"""Tokens of the HTTP server. A secret is shown once, and the table holds its SHA-256 digest.

Every function is one transaction and raises :class:`~kqueue.errors.DatabaseUnavailable` if Postgres cannot be used.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from enum import StrEnum
from types import MappingProxyType
from typing import Any, Final
from uuid import UUID, uuid4

from sqlalchemy import ColumnElement, Connection, Engine, and_, delete, func, or_, select, update
from sqlalchemy.dialects.postgresql import insert

from kqueue.states import Priority
from kqueue.store import budgets
from kqueue.store.budgets import Budget
from kqueue.store.engine import transaction
from kqueue.store.evaluations import OPEN
from kqueue.store.models import LOCAL, Evaluation, Session, Token
from kqueue.store.sql import any_uuid, columns, read

#: Prefix of every secret, by which people and secret scanners recognise it.
PREFIX: Final = "kq_"
#: Minimum interval between two updates of the last use of a token or a session.
NOTED_EVERY: Final = timedelta(minutes=1)


class Scope(StrEnum):
    """The rights of a token's holder. Each of the first four includes those before it.

    They apply to the work of the token's owner, except ``admin``, which concerns the fleet. The last two extend reading
    and cancelling to the work of all owners.
    """

    READ = "read"
    """Read everything, including sources and logs."""
    SUBMIT = "submit"
    """Submit kernels for stored problems, wait for them, and cancel."""
    PROBLEMS = "problems"
    """Submit new problems, whose source the fleet runs too."""
    ADMIN = "admin"
    """Operate the fleet: clean up, and reset GPUs."""
    READ_ALL = "read:all"
    """Read the work of all owners."""
    CANCEL_ALL = "cancel:all"
    """Cancel evaluations of all owners, in addition to ``submit``."""

    def covers(self, other: Scope) -> bool:
        """Return True if this scope includes ``other``."""
        if self in WIDE or other in WIDE:
            return self is other or (self is Scope.READ_ALL and other is Scope.READ)
        return _ORDER.index(self) >= _ORDER.index(other)


_ORDER: Final = list(Scope)
#: Scopes that concern the work of all owners. The fleet's own user has them.
WIDE: Final = (Scope.READ_ALL, Scope.CANCEL_ALL)


@dataclass(frozen=True, slots=True)
class Known:
    """A token without its secret. Times are UTC.

    Attributes:
        priority: the highest priority that its holder can request.
        weight: its share of the devices, relative to other producers, which have 1 by default.
        owner: owner of its submissions.
        limits: upper limits of the numbers in its requests, by path (:mod:`kqueue.upper_limits`).
        budget: its budget, with the used part. None for no limit.
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
    owner: str
    limits: Mapping[str, float]
    budget: Budget | None = None


def create(
    engine: Engine,
    name: str,
    scopes: Collection[Scope],
    *,
    owner: str = LOCAL,
    expires_after: timedelta | None = None,
    priority: Priority = Priority.INTERACTIVE,
    weight: float = 1.0,
    limits: Mapping[str, float] = MappingProxyType({}),
    budget: Budget | None = None,
) -> tuple[Known, str]:
    """Create a token. Return it and its secret, which is not stored.

    ``name`` is the holder's name, for people, and ``priority`` the highest one that its holder can request. ``weight``
    is its share of the devices, relative to other producers, which have 1 by default. ``limits`` are upper limits of
    the numbers in its requests, by path (:mod:`kqueue.upper_limits`).
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
                owner=owner,
                expires_at=None if expires_after is None else func.now() + expires_after,
                priority=priority,
                weight=weight,
                limits=dict(limits),
                **_budget_columns(budget),
            )
            .returning(*COLUMNS)
        )
        [token] = read(Known, rows, budget=budget)
    return token, secret


def set_budget(engine: Engine, which: str, budget: Budget | None) -> list[Known]:
    """Set or remove the budget of the valid tokens whose id or name is ``which``, and return them.

    Their earlier attempts count too, if they lie in the window.
    """
    with transaction(engine) as connection:
        changed = _change(connection, which, _budget_columns(budget))
    return [replace(token, budget=budget) for token in changed]


def set_limits(engine: Engine, which: str, limits: Mapping[str, float]) -> list[Known]:
    """Replace the upper limits of the valid tokens whose id or name is ``which``, and return them."""
    with transaction(engine) as connection:
        return _change(connection, which, {"limits": dict(limits)})


def _change(connection: Connection, which: str, values: Mapping[str, Any]) -> list[Known]:
    """Change the tokens whose id or name is ``which`` and that are not revoked, and return them."""
    changed = update(Token).where(_matches(which), Token.revoked_at.is_(None)).values(values)
    return read(Known, connection.execute(changed.returning(*COLUMNS)))


def renew(engine: Engine, token_id: UUID, name: str, scopes: Collection[Scope]) -> str:
    """Replace a token's secret and return the new one. The old secret and its browser sessions become invalid.

    A token without this id is created. A revoked or expired token becomes valid again. ``name`` is the holder's name,
    for people.
    """
    secret = new_secret(PREFIX)
    row = {"name": name, "digest": digest_of(secret), "scopes": [scope.value for scope in scopes]}
    fresh = {"created_at": func.now(), "expires_at": None, "revoked_at": None, "last_used_at": None}
    with transaction(engine) as connection:
        connection.execute(
            insert(Token).values(id=token_id, **row).on_conflict_do_update(index_elements=[Token.id], set_=row | fresh)
        )
        connection.execute(delete(Session).where(Session.token_id == token_id))
    return secret


def find(engine: Engine, secret: str) -> Known | None:
    """Return the valid token with this secret and record its use, or return None.

    The query is for the digest, so its duration reveals nothing about any secret.
    """
    digest = digest_of(secret)
    with transaction(engine) as connection:
        row = connection.execute(
            select(*COLUMNS, Token.digest, func.now().label("now")).where(Token.digest == digest, VALID)
        ).one_or_none()
        if row is None or not hmac.compare_digest(row.digest, digest):
            return None
        if row.last_used_at is None or row.now - row.last_used_at >= NOTED_EVERY:
            # A locked row is skipped, because the lock's holder records the same use.
            free = select(Token.id).where(Token.id == row.id).with_for_update(skip_locked=True)
            connection.execute(update(Token).where(Token.id.in_(free)).values(last_used_at=func.now()))
    return read(Known, [row])[0]


def listing(engine: Engine) -> list[Known]:
    """Return all tokens in the order of their creation, including those that are no longer valid."""
    with transaction(engine) as connection:
        tokens = read(Known, connection.execute(select(*COLUMNS).order_by(Token.created_at, Token.id)))
        _, by_token = budgets.look(connection, [token.id for token in tokens])
    return [replace(token, budget=by_token.get(token.id)) for token in tokens]


def revoke(engine: Engine, which: str) -> list[Known]:
    """Revoke the tokens whose id or name is ``which``, and log their browsers out.

    Returns:
        The tokens that were not revoked before.
    """
    with transaction(engine) as connection:
        revoked = _change(connection, which, {"revoked_at": func.now()})
        connection.execute(delete(Session).where(Session.token_id == any_uuid([token.id for token in revoked])))
    return revoked


def unfinished(engine: Engine, token_id: UUID) -> int:
    """Return the number of a token's evaluations without a verdict."""
    with transaction(engine) as connection:
        return connection.scalars(
            select(func.count()).select_from(Evaluation).where(Evaluation.token_id == token_id, OPEN)
        ).one()


def attribute(engine: Engine, token_id: UUID, evaluation_ids: Collection[UUID]) -> None:
    """Record the token with which evaluations were submitted."""
    with transaction(engine) as connection:
        connection.execute(
            update(Evaluation)
            .where(Evaluation.id.in_(evaluation_ids), Evaluation.token_id.is_(None))
            .values(token_id=token_id)
        )


#: Columns of a :class:`Known`.
COLUMNS: Final = columns(Known, Token)
#: SQL condition for a valid token.
VALID: Final = and_(Token.revoked_at.is_(None), or_(Token.expires_at.is_(None), Token.expires_at > func.now()))


def _matches(which: str) -> ColumnElement[bool]:
    """Return the SQL condition for a token with this id or name."""
    try:
        return Token.id == UUID(which)
    except ValueError:
        return Token.name == which


def _budget_columns(budget: Budget | None) -> dict[str, Any]:
    if budget is None:
        return dict.fromkeys(("budget_s", "budget_window_s", "budget_then"))
    return {"budget_s": budget.seconds, "budget_window_s": budget.window_s, "budget_then": budget.then}


def new_secret(prefix: str) -> str:
    """Return a random secret that begins with ``prefix``."""
    return prefix + secrets.token_urlsafe(32)


def digest_of(secret: str) -> str:
    """Return the digest of a secret, which the tables hold instead of it."""
    return hashlib.sha256(secret.encode("utf-8", "surrogatepass")).hexdigest()
