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

import pytest
from sqlalchemy import create_engine, text
from sqlalchemy.engine import make_url

from kqueue.errors import LocalFleetError
from kqueue.local.servers import Postgres, Valkey
from kqueue.store import schema

#: The database of a cluster of :func:`with_schema`. Nothing connects to it.
_TEMPLATE: Final = "kqueue"
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


class Server:
    """The run's Postgres server, on a cluster of :func:`with_schema`, from which databases are cloned."""

    def __init__(self, url: str) -> None:
        self._url = url
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

    def drop(self, url: str) -> None:
        """Drop a database, even if it has connections."""
        self.execute(f'DROP DATABASE IF EXISTS "{make_url(url).database}" WITH (FORCE)')

    def cut(self, url: str) -> None:
        """Break every connection to a database, like a restart of the server."""
        self.execute(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity "
            f"WHERE datname = '{make_url(url).database}' AND pid <> pg_backend_pid()"
        )
