"""The connection of a command to the fleet's database."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sqlalchemy import Engine


@contextmanager
def database(command: str) -> Generator[Engine]:
    """Connect to the fleet's database on behalf of a command.

    Raises:
        ConfigError, DatabaseUnavailable, SchemaMismatch: no database is configured, or it cannot be used.
    """
    from kqueue.config import load
    from kqueue.store import schema

    with schema.checked(load().require_database(), application=f"kqueue {command}") as engine:
        yield engine
