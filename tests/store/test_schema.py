"""The schema: upgrades, downgrades, no drift, and errors about another one."""

from __future__ import annotations

import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from enum import StrEnum
from pathlib import Path
from uuid import uuid4

import pytest
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import Engine, inspect, text

from kqueue.errors import SchemaMismatch
from kqueue.states import EvaluationState, Finding, GpuState, ProbeKind
from kqueue.store import schema
from kqueue.store.engine import connect
from kqueue.store.models import Base
from tests.chaos.version import know_later
from tests.store.steps import change

VIEWS = {"outcomes", "best_verdicts", "fleet_utilisation", "evaluation_overview"}


@pytest.fixture
def empty(server) -> Iterator[str]:
    """A database without a schema."""
    url = server.empty_database(f"empty_{uuid4().hex}")
    yield url
    server.drop(url)


@pytest.fixture
def later(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have this kqueue one more migration, so that its first one is an older version's."""
    know_later(tmp_path, monkeypatch)


def revisions() -> list[str]:
    """Return all revisions, the oldest first."""
    return [s.revision for s in ScriptDirectory.from_config(schema._alembic()).walk_revisions()][::-1]


def relations(url: str) -> set[str]:
    """Return the database's tables and views."""
    engine = connect(url, application="tests")
    try:
        found = inspect(engine)
        return set(found.get_table_names()) | set(found.get_view_names())
    finally:
        engine.dispose()


def test_every_step_goes_up_down_and_up(empty: str, later: None) -> None:
    """Each revision can be applied, reverted and applied again, and a full downgrade leaves no table."""
    before = "base"
    for revision in revisions():
        schema.upgrade(empty, revision)
        made = relations(empty)
        schema.downgrade(empty, before)
        schema.upgrade(empty, revision)
        assert (schema.current(empty), relations(empty)) == (revision, made)
        before = revision
    assert schema.current(empty) == schema.head()
    assert made == set(Base.metadata.tables) | VIEWS | {"alembic_version"}
    schema.downgrade(empty, "base")
    assert (schema.current(empty), relations(empty)) == (None, {"alembic_version"})


def test_models_and_migrations_agree(engine: Engine) -> None:
    """Autogenerate finds no difference between the models and the migrated schema."""
    with engine.connect() as connection:
        context = MigrationContext.configure(connection, opts={"compare_type": True, "compare_server_default": True})
        assert compare_metadata(context, Base.metadata) == []


def test_the_database_takes_the_states_that_there_are(engine: Engine) -> None:
    """A column's constraint has exactly the states of its enum."""
    columns: dict[str, type[StrEnum]] = {
        "evaluations_state": EvaluationState,
        "gpus_state": GpuState,
        "probes_kind": ProbeKind,
        "probes_finding": Finding,
    }
    with engine.connect() as connection:
        constraint = text("SELECT pg_get_constraintdef(oid) FROM pg_constraint WHERE conname = :name")
        for column, states in columns.items():
            known = connection.scalars(constraint, {"name": f"ck_{column}"}).one()
            assert set(re.findall(r"'(\w+)'", known)) == set(states), column


def test_migrations_started_together_take_turns(empty: str) -> None:
    """Concurrent migrations leave one correct schema without an error."""
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(schema.upgrade, [empty] * 4))
    assert schema.current(empty) == schema.head()


def test_an_upgrade_continues_from_an_older_schema(engine: Engine, database_url: str, later: None) -> None:
    """An older schema is refused with `kqueue db upgrade`, which upgrades it."""
    with pytest.raises(SchemaMismatch, match=f"at {revisions()[0]}, .* `kqueue db upgrade`"):
        schema.check(engine)
    schema.upgrade(database_url)
    schema.check(engine)


def test_check_says_what_to_do_about_another_schema(engine: Engine, database_url: str, empty: str) -> None:
    """A missing schema needs `kqueue db upgrade`, a development version's another database, a newer one its kqueue."""
    schema.check(engine)
    nothing = connect(empty, application="tests")
    with pytest.raises(SchemaMismatch, match="db upgrade"):
        schema.check(nothing)
    nothing.dispose()
    for revision, advice in (("0022", "use a new database"), ("9999", "newer version, so upgrade kqueue")):
        change(engine, "UPDATE alembic_version SET version_num = :number", number=revision)
        with pytest.raises(SchemaMismatch, match=advice):
            schema.check(engine)
        with pytest.raises(SchemaMismatch, match=advice):
            schema.upgrade(database_url)
        assert schema.current(database_url) == revision
