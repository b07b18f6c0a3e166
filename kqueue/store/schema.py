"""The schema's version: reading it, and changing it with ``migrations/``."""

from __future__ import annotations

import logging
from collections.abc import Generator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final

from sqlalchemy import Connection, Engine, text

from kqueue import program
from kqueue.errors import SchemaMismatch
from kqueue.store import roles
from kqueue.store.engine import connect, transaction, translate

if TYPE_CHECKING:
    from alembic.config import Config as AlembicConfig

_log = logging.getLogger(__name__)

#: Key of the advisory lock for changes of the schema, which serializes concurrent migration jobs.
_LOCK: Final = 0x6B71_7565_7565_0001


def head() -> str:
    """Return the revision that this version of kqueue needs."""
    # The files' names suffice. Importing Alembic would take longer than most commands that need the revision.
    return max(file.name.partition("_")[0] for file in (program.folder("migrations") / "versions").glob("[0-9]*_*.py"))


def current(url: str) -> str | None:
    """Return the database's revision, or None if it has no kqueue schema yet."""
    engine = connect(url, application="kqueue-schema", pool_size=1)
    try:
        return _current(engine)
    finally:
        engine.dispose()


def check(engine: Engine) -> None:
    """Return if the database's schema is the one that this version needs, or raise SchemaMismatch."""
    revision, wanted = _current(engine), head()
    if revision == wanted:
        return
    if revision is None:
        raise SchemaMismatch("the database has no kqueue schema yet: run `kqueue db upgrade`")
    _refuse_unknown(revision)
    raise SchemaMismatch(f"the database's schema is at {revision}, this kqueue needs {wanted}: run `kqueue db upgrade`")


@contextmanager
def checked(url: str, *, application: str, pool_size: int = 1) -> Generator[Engine]:
    """Check the schema of a database and yield an engine on it, whose connections are closed at the end.

    ``application`` is the name shown in ``pg_stat_activity``. Raise ConfigError if ``url`` is not a URL of a Postgres
    database. Raise SchemaMismatch if the schema is another version's.
    """
    engine = connect(url, application=application, pool_size=pool_size)
    try:
        check(engine)
        yield engine
    finally:
        engine.dispose()


def upgrade(url: str, revision: str = "head") -> None:
    """Upgrade the schema to ``revision``, and at the newest one set the privileges of the roles.

    Row-level security is enabled too. Roles that this user cannot create are skipped, with a warning that names the
    statements to run. Only logins with
    fewer privileges than the owner need them.
    """
    from alembic import command

    with _migrating(url) as config:
        command.upgrade(config, revision)
        refused = roles.apply(config.attributes["connection"]) if revision == "head" else []
    if refused:
        _log.warning(
            "this user cannot create all roles: if logins with fewer privileges are needed, run %s "
            "as a user that can, then run `kqueue db upgrade` again",
            " ".join(f"{statement};" for statement in refused),
        )


def downgrade(url: str, revision: str) -> None:
    """Downgrade the schema to ``revision`` (``base`` removes it completely). Data is lost."""
    from alembic import command

    with _migrating(url) as config:
        command.downgrade(config, revision)


def _current(engine: Engine) -> str | None:
    with transaction(engine) as connection:
        return _revision(connection)


def _revision(connection: Connection) -> str | None:
    if connection.scalar(text("SELECT to_regclass('alembic_version')")) is None:
        return None
    return connection.scalar(text("SELECT version_num FROM alembic_version"))


def _refuse_unknown(revision: str | None) -> None:
    """Raise SchemaMismatch for a revision that is older or newer than all of this version's migrations."""
    known = {path.name.partition("_")[0] for path in (program.folder("migrations") / "versions").glob("[0-9]*_*.py")}
    if revision is not None and revision < min(known):
        raise SchemaMismatch(
            f"the database's schema is at {revision}, which a development version made, and cannot be upgraded: use a"
            " new database (another KQUEUE_HOME). To keep its results, run `kqueue export` of that version first"
        )
    if revision is not None and revision not in known:
        raise SchemaMismatch(
            f"the database's schema is at {revision}, which this kqueue (at {head()}) does not know: "
            "it was made by a newer version, so upgrade kqueue here, or use another database (another KQUEUE_HOME)"
        )


def _alembic(connection: Connection | None = None) -> AlembicConfig:
    from alembic.config import Config

    config = Config()
    config.set_main_option("script_location", str(program.folder("migrations")).replace("%", "%%"))
    config.attributes["connection"] = connection
    return config


@contextmanager
def _migrating(url: str) -> Generator[AlembicConfig]:
    """Yield Alembic's configuration on one transaction, in which the schema changes completely or not at all."""
    from alembic.util import CommandError

    engine = connect(url, application="kqueue-migrate", pool_size=1)
    try:
        with translate(), engine.begin() as connection:
            connection.execute(text("SET LOCAL statement_timeout = 0"))
            connection.execute(text("SET LOCAL lock_timeout = 0"))
            connection.execute(text("SELECT pg_advisory_xact_lock(:lock)"), {"lock": _LOCK})
            _refuse_unknown(_revision(connection))
            yield _alembic(connection)
    except CommandError as error:
        raise SchemaMismatch(f"the schema cannot be migrated to this revision: {error}") from error
    finally:
        engine.dispose()
