"""Alembic's environment, which runs for each command on the connection from :mod:`kqueue.store.schema`."""

from __future__ import annotations

from alembic import context

from kqueue.store.models import Base

context.configure(connection=context.config.attributes["connection"], target_metadata=Base.metadata)
with context.begin_transaction():
    context.run_migrations()
