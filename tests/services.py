"""Postgres and Valkey for tests."""

from __future__ import annotations

import functools
import os
import shutil
import socket
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, TypeVar
from uuid import uuid4

import psycopg
import pytest
from sqlalchemy import create_engine, text
from sqlalchemy.engine import make_url
from sqlalchemy.exc import DBAPIError

from kqueue.errors import LocalFleetError
from kqueue.local.servers import Postgres, Valkey
from kqueue.store import schema

#: The database of a cluster of :func:`with_schema`. Nothing connects to it.
_TEMPLATE: Final = "kqueue"
#: Catalogs in which a change of a schema, of rights or of statistics leaves rows.
_CATALOGS: Final = (
    "pg_attribute", "pg_class", "pg_constraint", "pg_db_role_setting", "pg_namespace", "pg_policy", "pg_proc",
    "pg_statistic", "pg_trigger",
)  # fmt: skip
#: Size of the tables up to which Postgres plans alike.
_TEN_PAGES: Final = 10 * 8192
#: Query for all of a database that must be as in a clone, besides rows.
_STATE: Final = (
    f"SELECT ({', '.join(f'(SELECT (count(*), max(xmin::text::int8)) FROM {name})' for name in _CATALOGS)},"
    " (SELECT (datdba, datacl, datallowconn, datconnlimit) FROM pg_database WHERE datname = current_database()),"
    " (SELECT max(reltuples) FROM pg_class WHERE relnamespace = 'public'::regnamespace AND relkind = 'r'),"
    " (SELECT array_agg(version_num) FROM alembic_version))::text"
)
#: Query for a statement that empties each table, with TRUNCATE from a size on.
_EMPTYING: Final = (
    "SELECT format(CASE WHEN pg_relation_size(oid) < %s THEN 'DELETE FROM %%s' ELSE 'TRUNCATE %%s CASCADE' END,"
    " oid::regclass) FROM pg_class WHERE relnamespace = 'public'::regnamespace AND relkind = 'r'"
    " AND relname <> 'alembic_version' AND pg_relation_size(oid) > 0"
)
_ATTRIBUTE: Final = "starts_services"
_F = TypeVar("_F", bound=Callable[..., Any])


def starts_services(function: _F) -> _F:
    """Mark the function of a fixture that starts services. Write this below ``@pytest.fixture``."""
    setattr(function, _ATTRIBUTE, True)
    return function


def starts_some(function: Callable[..., Any]) -> bool:
    """Return whether the function is marked with :func:`starts_services`."""
    return hasattr(function, _ATTRIBUTE)


#: Sockets on the ports of :func:`free_port`, until the tests end.
_held: Final[list[socket.socket]] = []


def free_port() -> int:
    """Return a free port of loopback. Servers can listen there, but no process gets it for port 0."""
    held = socket.socket()
    # On Linux, sockets with this option can share a port, and at most one of them listens.
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    held.bind(("127.0.0.1", 0))
    _held.append(held)
    port: int = held.getsockname()[1]
    return port


def start(service: Postgres | Valkey) -> None:
    """Start a service. If its program is missing, skip the test, or fail it in CI."""
    try:
        service.start()
    except LocalFleetError as error:
        if os.environ.get("CI"):
            raise
        pytest.skip(str(error))


@functools.cache
def _cluster() -> tempfile.TemporaryDirectory[str]:
    """Create a Postgres cluster at the newest schema, once per process, which removes it at exit."""
    place = tempfile.TemporaryDirectory(prefix="kqueue-cluster-")
    postgres = Postgres(Path(place.name), durable=False)
    start(postgres)
    with postgres:
        schema.upgrade(postgres.url)
    return place


def with_schema(directory: Path) -> Path:
    """Copy a cluster at the newest schema into the directory of a Postgres server before its first start.

    A copy takes a tenth of the time of initdb and all migrations.
    """
    directory.mkdir(mode=0o700, parents=True)
    shutil.copytree(Path(_cluster().name) / "data", directory / "data")
    return directory


def database(url: str, name: str) -> str:
    """Return the URL of another database on the same server."""
    return make_url(url).set(database=name).render_as_string(hide_password=False)


def as_user(url: str, name: str) -> str:
    """Return the URL of the same database for another user."""
    return make_url(url).set(username=name).render_as_string(hide_password=False)


def connected(url: str, **login: str) -> psycopg.Connection:
    """Connect to a database without SQLAlchemy, for single statements, with the login of the URL or another one."""
    plain = make_url(url).set(drivername="postgresql", **login).render_as_string(hide_password=False)
    return psycopg.connect(plain, autocommit=True)


def empty(connection: psycopg.Connection, largest_bytes: int) -> None:
    """Remove all rows. Larger tables are truncated, which could deadlock with other sessions' statements."""
    connection.execute("SET session_replication_role = replica")  # without foreign keys and triggers
    with connection.transaction():
        for (statement,) in connection.execute(_EMPTYING, [largest_bytes]).fetchall():
            connection.execute(statement)
    connection.execute("SELECT setval(oid::regclass, 1, false) FROM pg_class WHERE relkind = 'S'")


def _state(connection: psycopg.Connection) -> str:
    """Return all of a database that must be as in a clone, besides rows."""
    (state,) = connection.execute(_STATE).fetchone() or ("",)
    return state


class Server:
    """The run's Postgres server, on a cluster of :func:`with_schema`, from which databases are cloned."""

    def __init__(self, url: str) -> None:
        self._url = url
        #: The states of databases from :meth:`take`, and those that were given back, by URL.
        self._states: dict[str, str] = {}
        self._emptied: list[str] = []
        self._admin = create_engine(database(url, "postgres"), isolation_level="AUTOCOMMIT", pool_size=1)

    def execute(self, statement: str) -> None:
        """Run one statement as the server's owner."""
        with self._admin.connect() as connection:
            connection.execute(text(statement))

    def empty_database(self, name: str) -> str:
        """Create a database without a schema. Return its URL."""
        self.execute(f'CREATE DATABASE "{name}" TEMPLATE template0')
        return database(self._url, name)

    def clone(self, template: str = _TEMPLATE, owner: str = "postgres") -> str:
        """Create a database of a user with the newest schema, or another database's. Return its URL."""
        name = f"test_{uuid4().hex}"
        self.execute(f'CREATE DATABASE "{name}" OWNER "{owner}" TEMPLATE "{template}" STRATEGY file_copy')
        return database(self._url, name)

    def take(self) -> str:
        """Return the URL of a database without rows: one that was given back, or a clone."""
        if self._emptied:
            return self._emptied.pop()
        url = self.clone()
        with connected(url) as connection:
            self._states[url] = _state(connection)
        return url

    def give_back(self, url: str) -> None:
        """Remove the rows of a database from :meth:`take`, or the database if more has changed.

        This takes a tenth of the time of a clone.
        """
        self.cut(url)
        state, emptied = self._states.pop(url), database(self._url, f"test_{uuid4().hex}")
        try:
            # Under its new name, no process or cache of an earlier test reaches it.
            self.execute(f'ALTER DATABASE "{make_url(url).database}" RENAME TO "{make_url(emptied).database}"')
            with connected(emptied) as connection:
                if _state(connection) == state:
                    empty(connection, _TEN_PAGES)
                    self._states[emptied] = _state(connection)
                    self._emptied.append(emptied)
                    return
        except (psycopg.Error, DBAPIError):
            self.drop(url)  # something of the test still uses it, or has destroyed it
        self.drop(emptied)

    def drop(self, url: str) -> None:
        """Drop a database, even if it has connections."""
        self.execute(f'DROP DATABASE IF EXISTS "{make_url(url).database}" WITH (FORCE)')

    def cut(self, url: str) -> None:
        """Break every connection to a database, like a restart of the server."""
        self.execute(
            "SELECT pg_terminate_backend(pid, 10000) FROM pg_stat_activity "
            f"WHERE datname = '{make_url(url).database}' AND pid <> pg_backend_pid()"
        )
