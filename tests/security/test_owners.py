"""Owners in Postgres itself: raw SQL of one owner's login, against another owner's rows and every function."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any
from uuid import UUID, uuid4

import psycopg
import pytest
from sqlalchemy import Engine, text
from sqlalchemy.engine import make_url

from kqueue.contract import Request
from kqueue.store import baselines, evaluations, roles, schema, searches, workers
from kqueue.store.engine import Viewer, acting, connect
from kqueue.store.models import Base
from tests.samples import passed
from tests.services import Server
from tests.store.steps import ENVIRONMENT, finish

MARK = "belongstoada"
#: Settings and calls that must change nothing for a login that is not trusted.
PRETENCES = (
    "",
    "SET kqueue.owner = 'ada'; SET kqueue.sees = 'all'",
    "SELECT kqueue_act('ada', false)",
    "SELECT set_config('kqueue.owner', 'ada', false), set_config('role', 'none', false)",
    "SET row_security = off",
)


def _as(url: str, name: str) -> str:
    """Return the URL of the same database for another user."""
    return make_url(url).set(username=name).render_as_string(hide_password=False)


@dataclass
class Owners:
    """Two producers of different owners. The first has a judged and a queued evaluation, and a search."""

    admin: Engine
    ada: Engine
    bob: Engine
    bob_url: str
    owner_url: str
    judged: UUID
    queued: UUID
    worker: UUID
    fields: Callable[..., dict[str, object]]

    def raw(self) -> psycopg.Connection[Any]:
        """Connect as the second producer."""
        url = make_url(self.bob_url).set(drivername="postgresql").render_as_string(False)
        return psycopg.connect(url, autocommit=True)

    def submit(self, engine: Engine, number: int = 0, **more: object) -> evaluations.Submitted:
        [one] = evaluations.submit(engine, [Request(**self.fields(number, **more))], slots={"cpu": 1}, reuse_s=3600)
        return one


@pytest.fixture(scope="module")
def plain(server: Server) -> Iterator[str]:
    """Return the name of a user without privileges, and of its database with kqueue's schema."""
    name = f"plain_{uuid4().hex[:8]}"
    server.execute(f'CREATE ROLE "{name}" LOGIN')
    url = server.empty_database(name)
    server.execute(f'ALTER DATABASE "{name}" OWNER TO "{name}"')
    schema.upgrade(_as(url, name))
    yield name
    server.drop(url)
    server.execute(f'DROP ROLE "{name}"')


@pytest.fixture(params=["superuser", "plain"])
def owners(
    request: pytest.FixtureRequest, server: Server, plain: str, fields: Callable[..., dict[str, object]]
) -> Iterator[Owners]:
    """Tables of a superuser, whom no policy holds, and of a user without privileges."""
    names = [f"{name}_{uuid4().hex[:8]}" for name in ("ada", "bob")]
    url = server.clone() if request.param == "superuser" else server.clone(plain, plain)
    owner_url = url if request.param == "superuser" else _as(url, plain)
    admin = connect(url, application="tests")
    engines: list[Engine] = []
    for name in names:
        roles.login(admin, name, roles.PRODUCER, "x", owner=name[:3])
        engines.append(connect(_as(url, name), application="tests"))
    worker = uuid4()
    workers.register(admin, id=worker, name="cpu-0@here", host="here", pid=1, lanes=["cpu"], device="cpu")
    made = Owners(admin, *engines, _as(url, names[1]), owner_url, UUID(int=0), UUID(int=0), worker, fields)
    marked = {"problem": f"class Model: {MARK}", "batch": f"{MARK}-b", "kernel_label": MARK, "problem_label": MARK}
    made.judged = made.submit(made.ada, **marked).evaluation_id
    claimed = evaluations.claim(admin, made.judged, worker_id=worker, lease_s=3600)
    assert claimed is not None
    assert claimed.owner == "ada"
    environment = evaluations.set_environment(admin, claimed.attempt_id, ENVIRONMENT, conditions="seal")
    finish(admin, claimed, passed(log=MARK))
    outcome = passed()
    assert outcome.baseline is not None
    baselines.put(admin, claimed.hashes[0], environment, MARK, outcome.baseline, owner=claimed.owner)
    made.queued = made.submit(made.ada, 1, kernel=f"class ModelNew: {MARK}", idempotency_key="key").evaluation_id
    run = searches.create(made.ada, f"{MARK}-r", {"of": MARK})
    searches.begin_step(made.ada, run.id, 0, [{"number": 0, "prompt": MARK}], MARK)
    yield made
    for engine in (admin, *engines):
        engine.dispose()
    server.drop(url)
    for name in names:
        server.execute(f'DROP ROLE "{name}"')


def test_no_table_and_no_view_shows_rows_of_others(owners: Owners) -> None:
    """Whatever the session sets or calls. The owner itself sees its rows in each table that has any."""
    seen: set[str] = set()
    with owners.ada.connect() as connection:
        for relation in roles._READABLE:
            rows = str(connection.execute(text(f"SELECT * FROM {relation}")).all())
            seen |= {relation} if MARK in rows or str(owners.judged) in rows else set()
    rest = {"batches", "search_runs", "search_steps", "search_proposals", "baselines", "evaluation_overview"}
    assert seen >= rest | {"problems", "kernels", "evaluations", "attempts", "verdicts", "summaries", "best_verdicts"}
    for pretence in PRETENCES:
        with owners.raw() as connection:
            if pretence:
                connection.execute(pretence)
            for relation in sorted(seen):
                try:
                    rows = connection.execute(f"SELECT * FROM {relation}").fetchall()
                except psycopg.errors.InsufficientPrivilege:
                    assert "row_security" in pretence
                    rows = []
                assert rows == [], (pretence, relation)


def test_no_condition_of_a_query_sees_rows_of_others(owners: Owners) -> None:
    """Functions of the login run after the policies, so that they get no row to report."""
    notices: list[str] = []
    with owners.raw() as connection:
        connection.add_notice_handler(lambda diagnostic: notices.append(str(diagnostic.message_primary)))
        connection.execute("""
            CREATE FUNCTION pg_temp.report(seen text) RETURNS boolean LANGUAGE plpgsql COST 0.0001 AS
            'BEGIN RAISE NOTICE ''%'', seen; RETURN true; END'
        """)
        for table, column in (("kernels", "source"), ("problems", "source"), ("verdicts", "log"), ("batches", "name")):
            connection.execute(f"SELECT count(*) FROM {table} WHERE pg_temp.report({column})")
    assert notices == []


def test_no_function_serves_rows_of_others(owners: Owners) -> None:
    """Each function that runs with its owner's rights answers as if another owner's evaluation did not exist."""
    unknown = uuid4()
    with owners.admin.connect() as connection:
        definers = connection.scalars(text("SELECT proname FROM pg_proc WHERE prosecdef AND proname ~ '^kqueue_'"))
        # The last five cannot be called by a producer (tests/security/test_roles.py) or are a trigger.
        assert set(definers) == {
            *("kqueue_trusted", "kqueue_owner", "kqueue_sees_all", "kqueue_waiting", "kqueue_cancel", "kqueue_reuse"),
            *("kqueue_conclude", "kqueue_probe", "kqueue_correct", "kqueue_board"),
        }
    for pretence in PRETENCES[:-1]:
        with owners.raw() as connection:
            if pretence:
                connection.execute(pretence)
            for identity in (owners.queued, unknown):
                assert connection.execute("SELECT kqueue_cancel(%s)", [identity]).fetchone() == (None,), pretence
                assert connection.execute("SELECT kqueue_reuse(ARRAY[%s], 3600)", [identity]).fetchall() == []
                changed = "UPDATE evaluations SET published_at = now() WHERE id = %s"
                assert connection.execute(changed, [identity]).rowcount == 0
            state = connection.execute("SELECT kqueue_owner(), kqueue_sees_all(), kqueue_trusted()").fetchone()
            assert state == ("bob", False, False)
    with owners.raw() as connection:
        # It only counts, and the window of a lane is common to all owners.
        assert connection.execute("SELECT kqueue_waiting('cpu', 8)").fetchone() in [(0,), (1,)]
    assert evaluations.cancel(owners.ada, owners.queued)


def test_a_hash_is_no_right_to_a_source(owners: Owners) -> None:
    """An evaluation cannot refer to another owner's problem or kernel, although its hash is known."""
    with owners.admin.connect() as connection:
        problem, kernel = connection.execute(
            text("SELECT problem_hash, kernel_hash FROM evaluations WHERE id = :id"), {"id": owners.judged}
        ).one()
    statement = (
        "INSERT INTO evaluations (id, problem_hash, kernel_hash, lane, settings) VALUES (%s, %s, %s, 'cpu', '{}')"
    )
    with owners.raw() as connection, pytest.raises(psycopg.errors.ForeignKeyViolation):
        connection.execute(statement, [uuid4(), problem, kernel])


def test_a_callback_tells_nothing_of_another_owner(owners: Owners) -> None:
    """A callback for another owner's evaluation would become due with its verdict."""
    statement = "INSERT INTO callbacks (evaluation_id, url) VALUES (%s, 'https://a.test/')"
    with owners.raw() as connection:
        for identity in (owners.queued, uuid4()):
            with pytest.raises(psycopg.errors.InsufficientPrivilege):
                connection.execute(statement, [identity])


def test_equal_requests_of_two_owners_have_nothing_in_common(owners: Owners) -> None:
    """Neither a verdict nor a key is reused, and the second owner's problem has its own time of submission."""
    equal = {"problem": f"class Model: {MARK}", "reuse": True}
    assert owners.submit(owners.ada, **equal).reused
    second = owners.submit(owners.bob, **equal)
    assert (second.created, second.reused) == (True, False)
    mine = owners.submit(owners.bob, 1, kernel=f"class ModelNew: {MARK}", idempotency_key="key")
    assert mine.created
    assert mine.evaluation_id != owners.queued
    claimed = evaluations.claim(owners.admin, second.evaluation_id, worker_id=owners.worker, lease_s=3600)
    assert claimed is not None
    environment = evaluations.set_environment(owners.admin, claimed.attempt_id, ENVIRONMENT, conditions="seal")
    assert baselines.get(owners.admin, claimed.hashes[0], environment, MARK, owner="ada") is not None
    assert baselines.get(owners.admin, claimed.hashes[0], environment, MARK, owner=claimed.owner) is None
    finish(owners.admin, claimed, passed(log="hello"))
    assert owners.submit(owners.bob, **equal).reused


def test_a_server_acts_for_one_owner_or_for_all(owners: Owners) -> None:
    """A session of the tables' owner sees one owner's rows if its caller does. A fenced engine needs a caller."""
    engine = connect(owners.owner_url, application="tests", fenced=True)
    counted: dict[Viewer, int] = {}
    for viewer in (Viewer("bob", held=True), Viewer("bob"), Viewer("ada", held=True)):
        with acting(viewer), engine.begin() as connection:
            counted[viewer] = connection.scalars(text("SELECT count(*) FROM evaluations")).one()
            assert connection.scalar(text("SELECT kqueue_owner()")) == viewer.owner
    assert list(counted.values()) == [0, 2, 2]
    with pytest.raises(RuntimeError, match="no viewer"), engine.begin():
        pass
    engine.dispose()


def test_every_table_of_owners_has_forced_row_level_security(owners: Owners) -> None:
    """So has each table that refers to one. Views use the rights and policies of the caller."""
    with owners.admin.connect() as connection:
        forced = connection.scalars(text("SELECT relname FROM pg_class WHERE relrowsecurity AND relforcerowsecurity"))
        assert set(forced) == set(roles._OWN)
        invoked = connection.scalars(
            text("SELECT relname FROM pg_class WHERE 'security_invoker=true' = ANY(reloptions)")
        )
        assert set(invoked) == {"best_verdicts", "evaluation_overview", "fleet_utilisation", "outcomes"}
    owned = {name for name, table in Base.metadata.tables.items() if "owner" in table.columns} - {"logins"}
    assert owned <= set(roles._OWN)
