"""Run by Alembic for each command, on the connection that :mod:`kqueue.store.schema` opened."""

from __future__ import annotations

from alembic import context

from kqueue.store.models import Base

context.configure(connection=context.config.attributes["connection"], target_metadata=Base.metadata)
with context.begin_transaction():
    context.run_migrations()
