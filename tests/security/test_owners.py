"""Owners in Postgres itself: raw SQL of one owner's login, against another owner's rows and every function."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any
from uuid import UUID, uuid4

import psycopg
import pytest
from sqlalchemy import Connection, DateTime, Engine, text
from sqlalchemy.engine import make_url
from sqlalchemy.exc import DBAPIError

from kqueue.contract import Deadlines, Request, Settings
from kqueue.errors import InvalidRequest
from kqueue.store import baselines, evaluations, roles, schema, searches, tokens, workers
from kqueue.store.engine import Viewer, acting, connect
from kqueue.store.models import Base
from tests.samples import passed
from tests.services import Server, as_user, connected
from tests.store.steps import ENVIRONMENT, finish
from tests.waiting import until

MARK = "belongstoada"
#: Settings and calls that must change nothing for a login that is not trusted.
PRETENCES = (
    "",
    "SET kqueue.owner = 'ada'; SET kqueue.sees = 'all'",
    "SELECT kqueue_act('ada', false)",
    "SELECT set_config('kqueue.owner', 'ada', false), set_config('role', 'none', false)",
    "SET row_security = off",
)


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
        return connected(self.bob_url)

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
    schema.upgrade(as_user(url, name))
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
    owner_url = url if request.param == "superuser" else as_user(url, plain)
    admin = connect(url, application="tests")
    engines: list[Engine] = []
    for name in names:
        roles.login(admin, name, roles.PRODUCER, "x", owner=name[:3])
        engines.append(connect(as_user(url, name), application="tests"))
    worker = uuid4()
    workers.register(admin, id=worker, name="cpu-0@here", host="here", pid=1, lanes=["cpu"], device="cpu")
    made = Owners(admin, *engines, as_user(url, names[1]), owner_url, UUID(int=0), UUID(int=0), worker, fields)
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
            *("kqueue_fits", "kqueue_unshare"),
            *("kqueue_conclude", "kqueue_probe", "kqueue_correct", "kqueue_board", "kqueue_relieve"),
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


MODES = (
    *("ACCESS SHARE", "ROW SHARE", "ROW EXCLUSIVE", "SHARE UPDATE EXCLUSIVE", "SHARE", "SHARE ROW EXCLUSIVE"),
    *("EXCLUSIVE", "ACCESS EXCLUSIVE"),
)


def _refused(connection: psycopg.Connection[Any], statement: str, *values: object) -> bool:
    try:
        connection.execute(statement, values)
    except (psycopg.errors.InsufficientPrivilege, psycopg.errors.CheckViolation):
        return True
    return False


def test_no_login_locks_a_table_or_a_row_of_others(owners: Owners) -> None:
    """Of each relation it gets the lock of a reader at most, and of the rows of others none."""
    with owners.admin.connect() as connection:
        catalog = "SELECT relname FROM pg_class WHERE relnamespace = 'public'::regnamespace AND relkind = ANY(:kinds)"
        relations = sorted(connection.scalars(text(catalog), {"kinds": ["r", "v"]}))
        tables = sorted(connection.scalars(text(catalog), {"kinds": ["r"]}))
    assert set(tables) == {*Base.metadata.tables, "alembic_version"}
    with owners.raw() as connection, connection.transaction(force_rollback=True):
        for relation in relations:
            for mode in MODES:
                try:
                    with connection.transaction():
                        connection.execute(f"LOCK TABLE {relation} IN {mode} MODE NOWAIT")
                    assert mode == "ACCESS SHARE", relation
                except psycopg.errors.InsufficientPrivilege:
                    assert mode != "ACCESS SHARE" or relation not in roles._READABLE, relation
        for table in tables:
            for strength in ("UPDATE", "NO KEY UPDATE", "SHARE", "KEY SHARE"):
                try:
                    with connection.transaction():
                        assert not connection.execute(f"SELECT 1 FROM {table} FOR {strength}").rowcount, table
                except psycopg.errors.InsufficientPrivilege:
                    pass


def test_no_login_writes_for_others(owners: Owners) -> None:
    """With every privilege that it has, it changes no row of another owner and adds none, nor one for a token."""
    token, _ = tokens.create(owners.admin, "ada", [tokens.Scope.SUBMIT], owner="ada")
    mine = owners.submit(owners.bob, 2)
    with owners.admin.connect() as connection:
        before = {t: _others(connection, t) for t in roles._OWN}
    with owners.raw() as connection:
        for _, table, privilege, column in roles.rights(roles.PRODUCER):
            if privilege == "UPDATE":
                connection.execute(f"UPDATE {table} SET {column} = DEFAULT")
            elif privilege == "INSERT" and column == "owner":
                assert _refused(connection, f"INSERT INTO {table} (owner) VALUES ('ada')"), table
            elif privilege == "EXECUTE":
                assert table in CALLED, "call it below, or in a test of its own"
            else:
                assert privilege in ("INSERT", "SELECT"), "try it here"
            if privilege == "INSERT" and isinstance(Base.metadata.tables[table].c[column].type, DateTime):
                for time in ("infinity", "-infinity", "99999-01-01"):
                    assert _refused(connection, f"INSERT INTO {table} ({column}) VALUES (%s)", time), (table, column)
        for run in ("search_steps", "search_proposals"):
            row = "(run_id, number, step)" if run == "search_proposals" else "(run_id, number)"
            values = "SELECT id, 9, 0 FROM searched" if run == "search_proposals" else "SELECT id, 9 FROM searched"
            with owners.admin.connect() as admin:
                [identity] = admin.scalars(text("SELECT id FROM search_runs"))
            searched = f"WITH searched AS (SELECT '{identity}'::uuid AS id)"
            assert _refused(connection, f"{searched} INSERT INTO {run} {row} {values}"), run
        copied = "INSERT INTO evaluations (id, problem_hash, kernel_hash, lane, settings, producer) SELECT %s, "
        copied += "problem_hash, kernel_hash, lane, settings, %s FROM evaluations WHERE id = %s"
        for producer in (f"token:{token.id}", f"token:{uuid4()}", "kqueue's probes"):
            assert _refused(connection, copied, uuid4(), producer, mine.evaluation_id), producer
        assert not _refused(connection, copied, uuid4(), "bob", mine.evaluation_id)
    with owners.admin.connect() as connection:
        assert {t: _others(connection, t) for t in roles._OWN} == before


#: Functions that a producer's login can call. Those that take a name of a row have a test above or below.
CALLED = {
    *("kqueue_act", "kqueue_owner", "kqueue_sees_all", "kqueue_session", "kqueue_trusted", "kqueue_notify"),
    *("kqueue_cancel", "kqueue_reuse", "kqueue_waiting", "kqueue_unshare", "kqueue_fits", "kqueue_rules"),
}


def _others(connection: Connection, table: str) -> list[str]:
    """Return the rows of a table that do not mention the second producer."""
    rows = connection.scalars(text(f"SELECT to_jsonb(t)::text FROM {table} AS t"))
    return sorted(row for row in rows if '"owner": "bob"' not in row)


def test_a_login_adds_only_what_can_be_read(owners: Owners) -> None:
    """Hashes fit their sources. Settings that Python cannot read, or that exceed the login's limits, are refused."""
    owners.submit(owners.bob)
    good = Settings().model_dump(mode="json")
    forms = list(roles._forms(Settings.model_json_schema()))
    fits = text("SELECT kqueue_fits(CAST(:settings AS jsonb), CAST(:forms AS jsonb))")

    def accepted(settings: object) -> bool:
        try:
            with owners.admin.begin() as connection:
                return bool(connection.scalar(fits, {"settings": json.dumps(settings), "forms": json.dumps(forms)}))
        except DBAPIError:
            return False

    assert accepted(good)
    assert accepted({})
    assert accepted(good | {"tolerance": {"atol": 1, "rtol": 0.5}, "seed": 2**63 - 1, "profiles": ["cuda-l1"]})
    tried = [5, {**good, "more": 1}]
    for form in forms:
        parts = form["path"].split(".")
        for value in (
            None,
            True,
            "x",
            -1,
            0.5,
            1e301,
            [],
            ["x"],
            {"x": 1},
            form["least"],
            form["most"],
            form["most"] + 1,
        ):
            settings = json.loads(json.dumps(good))
            inner = settings
            for part in parts[:-1]:
                inner[part] = inner[part] or {}
                inner = inner[part]
            if form["path"]:
                inner[parts[-1]] = value
                tried.append(settings)
    read = [one for one in tried if accepted(one)]
    assert len(read) > len(forms)
    for settings in read:
        # Only workers find an incomplete tolerance, and debug switches of a timed kernel.
        if settings["tolerance"] is None or len(settings["tolerance"]) == 3:
            Settings.model_validate(settings | {"debug": {}})
    roles.login(owners.admin, make_url(owners.bob_url).username or "", roles.PRODUCER, "x", owner="bob", limits=LIMITS)
    for settings, fault in (
        (Settings(), "settings.deadlines.check_s: wrong, unknown or above 30"),
        (Settings(deadlines=Deadlines(check_s=30), max_attempts=3), "settings.max_attempts: .* above 2"),
    ):
        with pytest.raises(InvalidRequest, match=fault):
            owners.submit(owners.bob, 3, settings=settings)
    owners.submit(owners.bob, 3, settings=Settings(deadlines=Deadlines(check_s=30), max_attempts=1))
    with owners.raw() as connection:
        for table, columns in (("problems", "(hash, source)"), ("kernels", "(hash, source, backend)")):
            for digest, source in (("0" * 64, ""), ("1" * 64, "class Model: ..."), ("h", "x")):
                row = (digest, source, "torch")[: 2 + (table == "kernels")]
                with contextlib.suppress(psycopg.errors.CheckViolation):
                    connection.execute(f"INSERT INTO {table} {columns} VALUES ({', '.join(['%s'] * len(row))})", row)
                    assert source == "", table


LIMITS = {"deadlines.check_s": 30, "max_attempts": 2}


def test_what_blocks_the_fleet_is_ended(owners: Owners) -> None:
    """A locked row, and advisory locks of the fleet. Without the right to signal, the function says so."""
    mine = owners.submit(owners.bob, 4).evaluation_id
    superuser = owners.owner_url == str(owners.admin.url.render_as_string(False))
    locks = [0x6B71_7565_7565_0001 + number for number in range(6)]
    for hold, reason in (
        (
            lambda one: one.execute("SELECT pg_advisory_lock(k) FROM unnest(%s) AS k", [locks]),
            "held a lock of the fleet",
        ),
        (lambda one: one.execute("BEGIN; SELECT FROM evaluations FOR UPDATE"), "blocked the fleet"),
    ):
        with contextlib.closing(owners.raw()) as holder, ThreadPoolExecutor(1) as pool:
            hold(holder)
            waiting = pool.submit(evaluations.cancel, owners.admin, mine) if "blocked" in reason else None
            with owners.admin.begin() as connection:
                found = until(lambda: connection.execute(text("SELECT * FROM kqueue_relieve()")).all(), what="an end")
            assert found == [(make_url(owners.bob_url).username, reason, superuser)]
            if not superuser:
                holder.rollback()
            else:
                until(lambda: _is_ended(owners.admin, holder.info.backend_pid), what="the end")
            if waiting is not None:
                assert waiting.result(30)


def _is_ended(engine: Engine, pid: int) -> bool:
    with engine.connect() as connection:
        return not connection.scalar(text("SELECT count(*) FROM pg_stat_activity WHERE pid = :pid"), {"pid": pid})
