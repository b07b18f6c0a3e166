"""The connection to a fleet's own services."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kqueue.client.transport import Transport

if TYPE_CHECKING:
    from kqueue.config import Config


def to_services(config: Config | None, *, database_url: str | None, redis_url: str | None) -> Transport:
    """Return a transport to Postgres and Redis. :class:`kqueue.Client` documents arguments and errors."""
    # Clients over HTTP must load neither Celery nor SQLAlchemy.
    from kqueue.client.database import DatabaseTransport

    return DatabaseTransport(config, database_url=database_url, redis_url=redis_url)
