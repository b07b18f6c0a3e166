"""The connection of a command to the fleet's database, and the reason why an evaluation waits."""

from __future__ import annotations

import getpass
import os
import socket
from collections.abc import Generator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from uuid import UUID

    from sqlalchemy import Engine

    from kqueue.store.reports import Detail, Waiting


@contextmanager
def database(command: str) -> Generator[Engine]:
    """Connect to the fleet's database on behalf of a command."""
    from kqueue.config import load
    from kqueue.store import schema

    with schema.checked(load().require_database(), application=f"kqueue {command}") as engine:
        yield engine


def detail_of(command: str, evaluation: str) -> Detail:
    """Return the evaluation with this id or these first digits, on behalf of a command."""
    from kqueue.store import reports

    with database(command) as engine:
        return reports.show(engine, reports.resolve_id(engine, evaluation))


def actor() -> str:
    """Return this command's user and host. A user without an entry in /etc/passwd is named by its uid."""
    try:
        user = getpass.getuser()
    except (KeyError, OSError):
        user = f"uid {os.geteuid()}"
    return f"{user} on {socket.gethostname()}"


def why(engine: Engine, evaluation_id: UUID) -> Waiting | None:
    """Return the reason why an evaluation waits, or None if it does not."""
    from kqueue.config import load
    from kqueue.store import reports

    return reports.waiting(engine, evaluation_id, within_s=load().live_s)
