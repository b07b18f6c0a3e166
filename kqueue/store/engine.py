"""Connections to Postgres, and the translation of its errors to kqueue's."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Final

import psycopg
from psycopg import errors as pg
from sqlalchemy import Connection, Engine, create_engine, exc
from sqlalchemy.engine import URL, make_url

from kqueue.errors import ConfigError, DatabaseUnavailable, SchemaMismatch

CONNECT_TIMEOUT_S: Final = 5
#: The limits of every session. A process that is stopped in the middle of a transaction must not keep its locks, and no
#: session waits without end for another's locks.
_SESSION: Final = {
    "timezone": "UTC",
    "statement_timeout": "30s",
    "lock_timeout": "10s",
    "idle_in_transaction_session_timeout": "60s",
}
#: A connection notices within half a minute that its peer is gone.
_KEEPALIVE: Final[dict[str, Any]] = {
    "keepalives": 1,
    "keepalives_idle": 10,
    "keepalives_interval": 5,
    "keepalives_count": 3,
    "tcp_user_timeout": 30_000,
}

#: Faults of the connection or the server, not of the statement.
_UNAVAILABLE: Final = (psycopg.OperationalError, psycopg.InterfaceError, psycopg.InternalError)
#: Where Postgres notices that a migration has changed the type of what a prepared statement returns. The statement
#: fails once, as the driver prepares it anew. The error has no code of its own, and its message is in any language.
_STALE_PLAN: Final = "RevalidateCachedQuery"
#: The connection of :func:`together`, in the thread that is in its block.
_shared: Final[ContextVar[Connection | None]] = ContextVar("shared", default=None)
_OTHER_SCHEMA: Final = (pg.UndefinedTable, pg.UndefinedColumn, pg.UndefinedFunction)


def parse(url: str) -> URL:
    """Return the database's URL, with the driver that kqueue uses.

    Raises:
        ConfigError: it is not a URL of a Postgres database.
    """
    try:
        parsed = make_url(url)
    except exc.ArgumentError:
        raise ConfigError("KQUEUE_DATABASE_URL is not a URL: use postgresql+psycopg://user:password@host/db") from None
    if parsed.get_backend_name() not in {"postgresql", "postgres"}:
        raise ConfigError(f"KQUEUE_DATABASE_URL names {parsed.drivername}: kqueue needs postgresql+psycopg://...")
    return parsed.set(drivername="postgresql+psycopg")


def connect(url: str, *, application: str, pool_size: int = 5) -> Engine:
    """Return an engine on the database. It connects when first used.

    Args:
        url: SQLAlchemy or libpq URL of Postgres.
        application: shown in ``pg_stat_activity``.
        pool_size: connections kept; two more may be opened for a moment.

    Raises:
        ConfigError: ``url`` is not one of a Postgres database.
    """
    return create_engine(
        parse(url),
        pool_size=pool_size,
        max_overflow=2,
        pool_pre_ping=True,
        connect_args={
            "connect_timeout": CONNECT_TIMEOUT_S,
            "application_name": application,
            "options": " ".join(f"-c {name}={value}" for name, value in _SESSION.items()),
            **_KEEPALIVE,
        },
    )


def connect_listener(url: str, *, application: str) -> psycopg.Connection:
    """Return a connection outside any pool, in autocommit, for waiting for notifications.

    Raises:
        DatabaseUnavailable: it cannot be had.
    """
    dsn = parse(url).set(drivername="postgresql").render_as_string(hide_password=False)
    with translate():
        return psycopg.connect(
            dsn, autocommit=True, connect_timeout=CONNECT_TIMEOUT_S, application_name=application, **_KEEPALIVE
        )


@contextmanager
def translate() -> Generator[None]:
    """Raise kqueue's errors for errors of SQLAlchemy and psycopg that are no fault of the statement.

    Raises:
        DatabaseUnavailable: Postgres cannot be reached, refused, or did not answer in time; or a migration has just
            changed what a prepared statement returns.
        SchemaMismatch: a table or column that kqueue needs is not there.
    """
    try:
        yield
    except exc.TimeoutError as error:
        raise DatabaseUnavailable(f"no free connection to Postgres: {error}") from error
    except exc.DBAPIError as error:
        _raise(error.orig, error, lost=error.connection_invalidated)
        raise
    except psycopg.Error as error:
        _raise(error, error, lost=False)
        raise


def _raise(fault: BaseException | None, error: Exception, *, lost: bool) -> None:
    if isinstance(fault, _OTHER_SCHEMA):
        raise SchemaMismatch(
            f"the database lacks what this kqueue needs ({_line(fault)}): run `kqueue db upgrade`"
        ) from error
    if isinstance(fault, pg.InsufficientPrivilege):
        raise DatabaseUnavailable(
            f"the login in KQUEUE_DATABASE_URL may not do this: {_line(fault)}; use one whose role may"
        ) from error
    if isinstance(fault, pg.FeatureNotSupported) and fault.diag.source_function == _STALE_PLAN:
        raise DatabaseUnavailable(f"the schema has just changed ({_line(fault)}): ask again") from error
    if lost or isinstance(fault, _UNAVAILABLE):
        raise DatabaseUnavailable(
            f"Postgres cannot be used: {_line(fault)}; check KQUEUE_DATABASE_URL and that the server runs"
        ) from error


def lacks_right(error: DatabaseUnavailable) -> bool:
    """Return True if the login may not do what was asked, False if Postgres could not be used."""
    return isinstance(getattr(error.__cause__, "orig", None), pg.InsufficientPrivilege)


def _line(fault: BaseException | None) -> str:
    """Return the first line of an error's text; libpq's errors can have many."""
    return (str(fault).strip() or type(fault).__name__).splitlines()[0]


@contextmanager
def transaction(engine: Engine) -> Generator[Connection]:
    """Yield the connection of one transaction, committed at the end of the block, within :func:`translate`.

    Within :func:`together` that is the one transaction of all.
    """
    shared = _shared.get()
    with translate():
        if shared is not None and shared.engine is engine:
            yield shared
        else:
            with engine.begin() as connection:
                yield connection


@contextmanager
def together(engine: Engine) -> Generator[None]:
    """Have all transactions of a block be one: for whoever reads by several functions of the store.

    To begin and to end one, and to see that its connection lives, takes three times as many messages as a query.
    """
    with translate(), engine.begin() as connection:
        token = _shared.set(connection)
        try:
            yield
        finally:
            _shared.reset(token)
