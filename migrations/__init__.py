"""The database's schema, step by step (Alembic). Used through :mod:`kqueue.store.schema`."""
