"""The Alembic migrations of the database's schema, which :mod:`kqueue.store.schema` runs."""
