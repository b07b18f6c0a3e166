"""Connections to Postgres, and the translation of its errors into kqueue's."""

from __future__ import annotations

import re
from collections.abc import Collection, Generator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Final

import psycopg
from psycopg import errors as pg
from psycopg.conninfo import conninfo_to_dict
from sqlalchemy import Connection, Engine, create_engine, event, exc, text
from sqlalchemy.engine import URL, make_url

from kqueue.errors import ConfigError, DatabaseUnavailable, SchemaMismatch

CONNECT_TIMEOUT_S: Final = 5
#: Limits of every session. A process that stops in the middle of a transaction must not keep its locks, and no session
#: must wait without limit for a lock.
_SESSION: Final = {
    "timezone": "UTC",
    "statement_timeout": "30s",
    "lock_timeout": "10s",
    "idle_in_transaction_session_timeout": "60s",
    # The database's functions leave it to :func:`notify`.
    "kqueue.notifies": "after",
}
#: Settings with which a connection detects within half a minute that its peer is gone.
_KEEPALIVE: Final[dict[str, Any]] = {
    "keepalives": 1,
    "keepalives_idle": 10,
    "keepalives_interval": 5,
    "keepalives_count": 3,
    "tcp_user_timeout": 30_000,
}

#: Faults of the connection or the server, not of the statement.
_UNAVAILABLE: Final = (psycopg.OperationalError, psycopg.InterfaceError, psycopg.InternalError)
#: Function of Postgres that detects that a migration changed the result type of a prepared statement. The statement
#: fails once, then the driver prepares it again. The error has no specific code, and its message is localized.
_STALE_PLAN: Final = "RevalidateCachedQuery"
#: Connection of the :func:`together` block that the current thread executes.
_shared: Final[ContextVar[Connection | None]] = ContextVar("shared", default=None)


@dataclass(frozen=True, slots=True)
class Viewer:
    """The caller for whom transactions act. The default is a session of the fleet itself.

    Attributes:
        owner: owner of all rows that the transactions write. None for the database session's own.
        held: True if the transactions see the owner's rows only. Row-level security of the database enforces this.
        session: the agent's session to which a held viewer's transactions are restricted in the same way.
        most: maximum number of evaluations of the session. None for no limit.
        seconds: maximum slot seconds of the session, after which it submits no more. None for no limit.
    """

    owner: str | None = None
    held: bool = False
    session: str | None = None
    most: int | None = None
    seconds: float | None = None


#: The fleet itself, which sees all rows that the database session can see.
FLEET: Final = Viewer()
_viewer: Final[ContextVar[Viewer | None]] = ContextVar("viewer", default=None)
_ACT: Final = "SELECT kqueue_act(%s, %s), set_config('kqueue.session', %s, true)"
#: Statement that notifies. It waits at most 0.1 s for other commits that notify.
_NOTIFY: Final = text("""
    SELECT set_config('lock_timeout', '100', true), kqueue_notify(:channel, payload)
    FROM unnest(CAST(:payloads AS text[])) AS payload
""")
_OTHER_SCHEMA: Final = (pg.UndefinedTable, pg.UndefinedColumn, pg.UndefinedFunction)


def parse(url: str) -> URL:
    """Return the parsed URL of the database, with the driver that kqueue uses."""
    try:
        parsed = _several(url) or make_url(url)
        if parsed.get_backend_name() not in {"postgresql", "postgres"}:
            raise ConfigError(f"KQUEUE_DATABASE_URL names {parsed.drivername}: kqueue needs postgresql+psycopg://...")
        parsed = parsed.set(drivername="postgresql+psycopg")
        _arguments(parsed)
    except (exc.ArgumentError, ValueError, psycopg.ProgrammingError):
        raise ConfigError(
            "KQUEUE_DATABASE_URL is not a URL: use postgresql+psycopg://user:password@host:port/db. Ports are numbers, "
            "and several hosts have one each or none"
        ) from None
    hosts = parsed.query.get("host") or parsed.host or ""
    if (isinstance(hosts, tuple) or "," in hosts) and "target_session_attrs" not in parsed.query:
        # A standby accepts connections too, and refuses every statement that writes.
        parsed = parsed.update_query_dict({"target_session_attrs": "read-write"})
    return parsed


def _arguments(url: URL) -> dict[str, Any]:
    """Return libpq's parameters of a URL."""
    _, arguments = url.get_dialect()().create_connect_args(url)
    return dict(arguments)


def _several(url: str) -> URL | None:
    """Return the parsed URL if it has libpq's list of hosts, ``a:5432,b:5432``, which SQLAlchemy does not read."""
    scheme, _, rest = url.partition("://")
    if "," not in re.split("[/?]", rest.rpartition("@")[2])[0]:
        return None
    query: dict[str, Any] = conninfo_to_dict(f"postgresql://{rest}")
    user, password, database = (query.pop(name, None) for name in ("user", "password", "dbname"))
    return URL.create(scheme, user, password, database=database, query=query)


def connect(url: str, *, application: str, pool_size: int = 5, fenced: bool = False) -> Engine:
    """Return an engine on the database, whose URL has SQLAlchemy's or libpq's form. It connects on first use.

    ``application`` is the name in ``pg_stat_activity``. Of the connections ``pool_size`` are persistent, and two more
    can be opened temporarily. ``fenced`` refuses transactions outside :func:`acting`, so that no query can forget for
    whom it reads.
    """
    engine = create_engine(
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

    def act(connection: Connection) -> None:
        viewer = _viewer.get()
        if viewer is None and fenced:
            raise RuntimeError("a transaction for no viewer: see kqueue.store.engine.acting")
        if viewer is not None and viewer.owner is not None:
            # Each transaction begins with it, and through SQLAlchemy it takes several times as long.
            raw: Any = connection.connection.driver_connection
            raw.execute(_ACT, (viewer.owner, viewer.held, viewer.session or ""))

    event.listen(engine, "begin", act)
    return engine


def act_as(viewer: Viewer) -> None:
    """Let all transactions of the current context act for a caller, from now on."""
    _viewer.set(viewer)


def viewer() -> Viewer:
    """Return the caller for whom transactions of the current context act."""
    return _viewer.get() or FLEET


@contextmanager
def acting(viewer: Viewer) -> Generator[None]:
    """Let all transactions of a block act for a caller."""
    token = _viewer.set(viewer)
    try:
        yield
    finally:
        _viewer.reset(token)


def connect_listener(url: str, *, application: str) -> psycopg.Connection:
    """Return an autocommit connection outside any pool, for receiving notifications."""
    arguments = _arguments(parse(url))
    arguments |= {"connect_timeout": CONNECT_TIMEOUT_S, "application_name": application, **_KEEPALIVE}
    with translate():
        return psycopg.connect(autocommit=True, **arguments)


@contextmanager
def translate() -> Generator[None]:
    """Raise kqueue's errors for errors of SQLAlchemy and psycopg that the statement did not cause.

    It is DatabaseUnavailable if Postgres is unreachable, refused the request or did not answer in time, or a migration
    has just changed the result type of a prepared statement. It is SchemaMismatch if a table, column or function that
    kqueue needs is missing.
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
            f"the database lacks an object that this kqueue needs ({_line(fault)}): run `kqueue db upgrade`"
        ) from error
    if isinstance(fault, pg.InsufficientPrivilege):
        raise DatabaseUnavailable(
            f"the login in KQUEUE_DATABASE_URL lacks the right ({_line(fault)}): use a login whose role has it"
        ) from error
    if isinstance(fault, pg.FeatureNotSupported) and fault.diag.source_function == _STALE_PLAN:
        raise DatabaseUnavailable(f"the schema has just changed ({_line(fault)}): try again") from error
    if lost or isinstance(fault, _UNAVAILABLE):
        raise DatabaseUnavailable(
            f"Postgres cannot be used ({_line(fault)}): check KQUEUE_DATABASE_URL and that the server runs"
        ) from error


def lacks_right(error: DatabaseUnavailable) -> bool:
    """Return True if the login lacks the right for the request, False if Postgres could not be used."""
    return isinstance(getattr(error.__cause__, "orig", None), pg.InsufficientPrivilege)


def _line(fault: BaseException | None) -> str:
    """Return the first line of an error's text, because libpq's errors can have many lines."""
    return (str(fault).strip() or type(fault).__name__).splitlines()[0]


@contextmanager
def transaction(engine: Engine) -> Generator[Connection]:
    """Yield the connection of one transaction, which is committed at the end of the block.

    Errors are translated by :func:`translate`. Inside :func:`together` all blocks share one transaction.
    """
    shared = _shared.get()
    with translate():
        if shared is not None and shared.engine is engine:
            yield shared
        else:
            with engine.begin() as connection:
                yield connection


def notify(engine: Engine, channel: str, payloads: Collection[object]) -> None:
    """Notify listening processes in a separate transaction. All of them read the database too if none comes.

    Two transactions that notify cannot commit at the same time, and neither can commit while the queue of notifications
    is full. Any login can cause both, so no transaction that matters notifies.
    """
    if payloads:
        with suppress(DatabaseUnavailable), transaction(engine) as connection:
            connection.execute(_NOTIFY, {"channel": channel, "payloads": [str(one) for one in payloads]})


@contextmanager
def together(engine: Engine) -> Generator[None]:
    """Merge all transactions of a block into one, for callers that read with several functions of the store.

    Beginning and ending a transaction and checking its connection takes three times as many messages as a query.
    """
    with translate(), engine.begin() as connection:
        token = _shared.set(connection)
        try:
            yield
        finally:
            _shared.reset(token)
