"""Least privilege in the database: the rights of each role, tried with its login on a real server."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any
from uuid import uuid4

import psycopg
import pytest
from sqlalchemy import Engine, text
from sqlalchemy.engine import make_url

from kqueue.client import Client
from kqueue.errors import ConfigError, DatabaseUnavailable
from kqueue.local.servers import Postgres
from kqueue.store import roles, schema, tokens
from kqueue.store.engine import connect
from kqueue.store.models import Base
from tests.mcp.agents import Here, over_http, over_stdio, text_of, told
from tests.services import as_user, connected, database, start, starts_services
from tests.store.steps import change

EVERYBODY = set(roles.ROLES)
SENDERS = {roles.PRODUCER, roles.GATEWAY, roles.TENANT}
NOBODY: set[str] = set()


@pytest.fixture
def logins(server: Any, database_url: str, engine: Engine) -> Iterator[dict[str, str]]:
    """Return the URL of a login of each role, by role."""
    names = {role: f"{role}_{uuid4().hex[:8]}" for role in roles.ROLES}
    for role, name in names.items():
        roles.login(engine, name, role, "secret")
    yield {role: as_user(database_url, name) for role, name in names.items()}
    server.cut(database_url)  # sessions that end at this moment can still own temporary tables
    for name in names.values():
        server.execute(f'DROP ROLE "{name}"')


IDENTITY = "'00000000-0000-0000-0000-000000000007'"
#: Statements and the roles that can execute each.
STATEMENTS: dict[str, set[str]] = {
    **{f"SELECT * FROM {name}": EVERYBODY for name in roles._READABLE},
    "SELECT * FROM tokens": {roles.GATEWAY},
    "SELECT name, owner FROM tokens": {roles.GATEWAY, roles.TENANT},
    "SELECT url FROM callbacks": {roles.GATEWAY},
    "SELECT * FROM logins": NOBODY,
    "UPDATE logins SET owner = 'o'": NOBODY,
    "UPDATE evaluations SET owner = 'o'": NOBODY,
    "INSERT INTO problems (hash, owner, source) VALUES ('h', 'o', 's')": NOBODY,
    "SET ROLE kqueue_tenant": {roles.GATEWAY, roles.TENANT},
    "ALTER TABLE evaluations NO FORCE ROW LEVEL SECURITY": NOBODY,
    "ALTER TABLE evaluations DISABLE ROW LEVEL SECURITY": NOBODY,
    "CREATE POLICY mine ON evaluations USING (true)": NOBODY,
    f"INSERT INTO tokens (id, digest) VALUES ({IDENTITY}, 'd')": NOBODY,
    f"INSERT INTO tokens (id, name, scopes, owner) VALUES ({IDENTITY}, 'n', '{{read}}', 'o')": {roles.GATEWAY},
    "UPDATE tokens SET scopes = '{admin}'": NOBODY,
    "UPDATE tokens SET digest = 'd'": NOBODY,
    "SELECT * FROM kqueue_relieve()": {roles.WORKER},
    "SELECT kqueue_unshare('h')": SENDERS,
    "SELECT kqueue_fits('{}', '[]')": {roles.PRODUCER},
    "DELETE FROM shared_problems": {roles.GATEWAY, roles.TENANT},
    "INSERT INTO audit (actor, action, subject) VALUES ('a', 'login', 's')": {roles.GATEWAY},
    "INSERT INTO audit (at, actor, action, subject) VALUES (now(), 'a', 'login', 's')": NOBODY,
    "SELECT * FROM audit": NOBODY,
    "UPDATE audit SET actor = 'b'": NOBODY,
    "DELETE FROM audit": NOBODY,
    "UPDATE tokens SET last_used_at = now()": {roles.GATEWAY},
    "INSERT INTO problems (hash, source) VALUES ('h', 's')": SENDERS,
    "UPDATE problems SET source = 's'": NOBODY,
    "DELETE FROM problems": NOBODY,
    "INSERT INTO kernels (hash, backend, source) VALUES ('h', 'torch', 's')": SENDERS,
    "UPDATE kernels SET source = 's'": NOBODY,
    "DELETE FROM kernels": NOBODY,
    f"INSERT INTO evaluations (id, problem_hash, kernel_hash, lane, settings) "
    f"VALUES ({IDENTITY}, 'h', 'h', 'cpu', '{{}}')": SENDERS,
    f"INSERT INTO evaluations (id, state) VALUES ({IDENTITY}, 'done')": NOBODY,
    "UPDATE evaluations SET state = 'done'": {roles.WORKER},
    "UPDATE evaluations SET settings = '{}'": NOBODY,
    "UPDATE evaluations SET kernel_hash = 'h'": NOBODY,
    "UPDATE evaluations SET published_at = now()": SENDERS | {roles.WORKER},
    "UPDATE evaluations SET token_id = NULL": {roles.GATEWAY, roles.TENANT},
    "DELETE FROM evaluations": NOBODY,
    f"INSERT INTO attempts (evaluation_id, number, worker_id, lease_until) VALUES ({IDENTITY}, 1, {IDENTITY}, now())": {
        roles.WORKER
    },
    "UPDATE attempts SET category = 'passed'": {roles.WORKER},
    "UPDATE attempts SET evaluation_id = NULL": NOBODY,
    "DELETE FROM attempts": NOBODY,
    f"INSERT INTO verdicts (evaluation_id, category) VALUES ({IDENTITY}, 'passed')": NOBODY,
    f"SELECT kqueue_conclude(jsonb_build_object('evaluation_id', {IDENTITY}))": {roles.WORKER},
    "UPDATE verdicts SET category = 'passed'": NOBODY,
    "UPDATE verdicts SET runtime_ms = 0": NOBODY,
    "DELETE FROM verdicts": NOBODY,
    "INSERT INTO baselines (problem_hash) VALUES ('h')": {roles.WORKER},
    "UPDATE baselines SET measurement = '{}'": {roles.WORKER},
    "UPDATE baselines SET problem_hash = 'h'": NOBODY,
    "INSERT INTO environments (hash) VALUES ('h')": {roles.WORKER},
    "UPDATE environments SET facts = '{}'": NOBODY,
    f"INSERT INTO workers (id) VALUES ({IDENTITY})": {roles.WORKER},
    "UPDATE workers SET paused = 'x'": {roles.GATEWAY, roles.WORKER},
    "DELETE FROM workers": {roles.WORKER},
    "UPDATE gpus SET state = 'drained'": {roles.GATEWAY, roles.WORKER},
    "DELETE FROM gpus": NOBODY,
    f"SELECT kqueue_cancel({IDENTITY})": SENDERS | {roles.WORKER},
    "SELECT kqueue_probe(jsonb_build_object('lane', 'cpu'))": {roles.WORKER},
    "UPDATE evaluations SET probe = true": NOBODY,
    "INSERT INTO probes (evaluation_id) VALUES (NULL)": NOBODY,
    "UPDATE probes SET finding = 'agreed'": {roles.WORKER},
    "UPDATE probes SET duration_ms = 1": NOBODY,
    "DELETE FROM probes": NOBODY,
    "UPDATE probe_lanes SET ended = 0": {roles.WORKER},
    "INSERT INTO probe_pauses (host) VALUES ('h')": {roles.WORKER},
    "UPDATE probe_pauses SET resumed_at = now()": {roles.GATEWAY, roles.WORKER},
    "UPDATE probe_pauses SET reason = 'r'": NOBODY,
    f"INSERT INTO search_runs (id, name, plan) VALUES ({IDENTITY}, 'n', '{{}}')": {roles.PRODUCER},
    "UPDATE search_steps SET summary = 's'": {roles.PRODUCER},
    "UPDATE search_proposals SET answer = 'a'": {roles.PRODUCER},
    "DELETE FROM search_runs": NOBODY,
    f"INSERT INTO sessions (digest, token_id, ends_at) VALUES ('d', {IDENTITY}, now())": {roles.GATEWAY},
    f"INSERT INTO sessions (digest, token_id, is_link, ends_at) VALUES ('d', {IDENTITY}, true, now())": NOBODY,
    "SELECT digest FROM sessions": {roles.GATEWAY},
    "UPDATE sessions SET ends_at = now()": NOBODY,
    "UPDATE sessions SET seen_at = now()": {roles.GATEWAY},
    "DELETE FROM sessions": {roles.GATEWAY},
    "UPDATE alembic_version SET version_num = '9999'": NOBODY,
    "TRUNCATE verdicts": NOBODY,
    "DROP TABLE verdicts": NOBODY,
    "DROP FUNCTION kqueue_cancel": NOBODY,
    "ALTER TABLE verdicts DISABLE TRIGGER ALL": NOBODY,
    "CREATE TABLE mine (x integer)": NOBODY,
    "CREATE FUNCTION mine() RETURNS integer LANGUAGE sql AS 'SELECT 1'": NOBODY,
    "CREATE OR REPLACE FUNCTION kqueue_cancel(which uuid) RETURNS boolean LANGUAGE sql AS 'SELECT true'": NOBODY,
    "CREATE ROLE mine": NOBODY,
    "ALTER ROLE CURRENT_USER CONNECTION LIMIT 300": NOBODY,
    "GRANT kqueue_worker TO kqueue_reader": NOBODY,
    "SET ROLE postgres": NOBODY,
    "SELECT rolpassword FROM pg_authid": NOBODY,
    "SELECT pg_read_file('postgresql.conf')": NOBODY,
    "COPY problems FROM PROGRAM 'id'": NOBODY,
    "SELECT pg_reload_conf()": NOBODY,
}


def test_a_role_may_do_what_it_needs_and_nothing_else(logins: dict[str, str]) -> None:
    for role, url in logins.items():
        with psycopg.connect(make_url(url).set(drivername="postgresql").render_as_string(False)) as connection:
            for statement, who in STATEMENTS.items():
                refused = False
                try:
                    connection.execute(statement)
                except psycopg.errors.InsufficientPrivilege:
                    refused = True
                except psycopg.Error:
                    pass  # a violated constraint, for example, proves the right
                connection.rollback()
                assert refused is (role not in who), (role, statement)


def test_no_table_was_forgotten() -> None:
    """Each table is either readable by all roles or listed here."""
    views = {"outcomes", "best_verdicts", "fleet_utilisation", "evaluation_overview"}
    hidden = {"audit", "callbacks", "logins", "sessions", "tokens"}
    assert set(roles._READABLE) == set(Base.metadata.tables) - hidden | views | {"alembic_version"}


def granted(engine: Engine) -> set[tuple[str, str, str, str]]:
    """Return the roles' rights in the database."""
    with engine.connect() as connection:
        return {tuple(row) for row in connection.execute(roles._GRANTED, {"roles": list(roles.ROLES)})}  # type: ignore[misc]


def test_an_upgrade_makes_the_rights_exact(database_url: str, engine: Engine) -> None:
    """An upgrade revokes surplus rights and restores missing ones, and a second one changes nothing."""
    wanted = {right for role in roles.ROLES for right in roles.rights(role)}
    assert granted(engine) == wanted
    change(engine, "GRANT INSERT ON verdicts TO kqueue_producer")
    change(engine, "GRANT UPDATE (source) ON problems TO kqueue_worker")
    change(engine, "REVOKE SELECT ON workers FROM kqueue_reader")
    change(engine, "REVOKE EXECUTE ON FUNCTION kqueue_cancel FROM kqueue_producer")
    change(engine, "GRANT EXECUTE ON FUNCTION kqueue_cancel TO PUBLIC")
    schema.upgrade(database_url)
    assert granted(engine) == wanted


def test_a_downgrade_leaves_the_roles_and_takes_their_rights(database_url: str, engine: Engine, server: Any) -> None:
    """A downgrade in one database does not affect other databases of the cluster."""
    other = server.clone()
    schema.downgrade(database_url, "base")
    assert granted(engine) == set()
    at_other = connect(other, application="tests")
    assert granted(at_other) == {right for role in roles.ROLES for right in roles.rights(role)}
    at_other.dispose()
    server.drop(other)


@pytest.fixture
@starts_services
def fresh(tmp_path: Path) -> Iterator[Callable[[str], None]]:
    """Return a function that runs a statement as the owner of a server without roles, with its address as ``url``."""
    with Postgres(tmp_path / "postgres", durable=False) as postgres:
        start(postgres)

        def execute(statement: str) -> None:
            with connected(postgres.url) as connection:
                connection.execute(statement)

        execute.url = postgres.url  # type: ignore[attr-defined]
        yield execute


def test_databases_of_a_cluster_without_the_roles(fresh: Any, caplog: pytest.LogCaptureFixture) -> None:
    """Concurrent migrations of several databases share the roles that one of them creates."""
    names = ("one", "other")
    for name in names:
        fresh(f"CREATE DATABASE {name}")
    with ProcessPoolExecutor(2, mp_context=get_context("spawn")) as pool:
        list(pool.map(schema.upgrade, [database(fresh.url, name) for name in names]))
    for name in names:
        engine = connect(database(fresh.url, name), application="tests")
        assert granted(engine) == {right for role in roles.ROLES for right in roles.rights(role)}
        engine.dispose()
        fresh(f"DROP DATABASE {name}")
    for role in roles.ROLES:
        fresh(f"DROP ROLE {role}")
    fresh("CREATE ROLE plain LOGIN")
    fresh("CREATE DATABASE theirs OWNER plain")
    url = as_user(database(fresh.url, "theirs"), "plain")
    with caplog.at_level(logging.WARNING):
        schema.upgrade(url)
    engine = connect(url, application="tests")
    schema.check(engine)
    assert granted(engine) == set()
    for role in roles.ROLES:
        assert f"CREATE ROLE {role} NOLOGIN;" in caplog.text
        fresh(f"CREATE ROLE {role} NOLOGIN")
    assert "GRANT kqueue_tenant TO kqueue_gateway;" in caplog.text
    fresh("GRANT kqueue_tenant TO kqueue_gateway")
    caplog.clear()
    schema.upgrade(url)
    assert caplog.text == ""
    assert granted(engine) == {right for role in roles.ROLES for right in roles.rights(role)}
    engine.dispose()


def test_somebody_else_changes_no_right(logins: dict[str, str], engine: Engine) -> None:
    """An upgrade by a role's login, at the newest schema, does nothing."""
    before = granted(engine)
    for url in logins.values():
        schema.upgrade(url)
    assert granted(engine) == before


# Logins ------------------------------------------------------------------------------------------------


def test_a_login_has_a_verifier_and_one_role(server: Any, database_url: str, engine: Engine) -> None:
    """The password is stored as SCRAM's verifier. A login that gets another role loses the first, and its limit."""
    name = f"login_{uuid4().hex[:8]}"

    def most() -> int:
        with engine.connect() as connection:
            return connection.scalars(text("SELECT rolconnlimit FROM pg_roles WHERE rolname = :n"), {"n": name}).one()

    def state() -> tuple[str, set[str]]:
        with engine.connect() as connection:
            verifier = connection.scalar(text("SELECT rolpassword FROM pg_authid WHERE rolname = :n"), {"n": name})
            groups = connection.scalars(
                text("SELECT roleid::regrole::text FROM pg_auth_members WHERE member = to_regrole(:n)"), {"n": name}
            ).all()
        return verifier or "", set(groups)

    roles.login(engine, name, roles.PRODUCER, "one")
    first, groups = state()
    assert first.startswith("SCRAM-SHA-256$")
    assert groups == {roles.PRODUCER}
    assert most() == 50
    server.execute(f'ALTER ROLE "{name}" CONNECTION LIMIT -1')  # made by an older version
    schema.upgrade(database_url)
    assert most() == 50
    server.execute(f'ALTER ROLE "{name}" CONNECTION LIMIT 200')
    roles.login(engine, name, roles.PRODUCER, "one")
    assert most() == 200
    roles.login(engine, name, roles.READER, "two")
    second, groups = state()
    assert second.startswith("SCRAM-SHA-256$")
    assert second != first
    assert groups == {roles.READER}
    assert most() == -1
    server.execute(f'DROP ROLE "{name}"')


def test_what_is_made_no_login(engine: Engine) -> None:
    """The owner's password is never changed, a group does not become a login, and an empty password is refused."""
    for name in ("postgres", "kqueue_worker"):
        with pytest.raises(ConfigError, match="choose another name"):
            roles.login(engine, name, roles.READER, "x")
    with pytest.raises(ConfigError, match="password"):
        roles.login(engine, "somebody", roles.READER, "")


def test_a_role_makes_no_logins(logins: dict[str, str]) -> None:
    """Only the owner can make logins."""
    engine = connect(logins[roles.PRODUCER], application="tests")
    with pytest.raises(DatabaseUnavailable, match="denied"):
        roles.login(engine, "somebody", roles.READER, "x")
    engine.dispose()


# Cancelling --------------------------------------------------------------------------------------------


def test_a_producer_cannot_turn_the_function_against_its_owner(
    logins: dict[str, str], engine: Engine, fields: Callable[..., dict[str, Any]], redis_url: str
) -> None:
    """The function does not use tables and operators of the producer, even if they precede the real ones."""
    with Client(database_url=logins[roles.PRODUCER], redis_url=redis_url) as client:
        # A producer uses the whole client: submitting, again under a key, reading, cancelling, waiting.
        first, second = client.submit_batch([fields(1, idempotency_key="k"), fields(2)], allow_idle_lane=True)
        assert client.submit(**fields(1, idempotency_key="k"), allow_idle_lane=True) == first
        assert first.verdict() is None
        assert (first.cancel(), first.cancel(), client.cancel(second.evaluation_id)) == (True, False, True)
        assert [v.category for v in client.wait_all([first, second], timeout=20)] == ["cancelled", "cancelled"]
        ticket = client.submit(**fields(), allow_idle_lane=True)
        with connected(logins[roles.PRODUCER]) as connection:
            connection.execute("CREATE TEMP TABLE evaluations (id uuid, state text)")
            connection.execute("CREATE TEMP TABLE verdicts (evaluation_id uuid)")
            connection.execute(
                "CREATE FUNCTION pg_temp.pg_notify(text, text) RETURNS void LANGUAGE plpgsql AS "
                "'BEGIN RAISE EXCEPTION ''%'', current_user; END'"
            )
            connection.execute("SET search_path = pg_temp, public")
            done = connection.execute("SELECT public.kqueue_cancel(%s)", [ticket.evaluation_id]).fetchone()
        assert done == (True,)
        verdict = ticket.verdict()
    assert (verdict.category, verdict.written_by) == ("cancelled", "client")


def test_an_agent_needs_no_more_than_a_producer_or_the_gateway(
    logins: dict[str, str], redis_url: str, worker_id: Any, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The tools on stdio need only a producer's login, and those over HTTP only the gateway's."""
    given = {"problem": "class Model: ...", "kernel": "class ModelNew: ...", "backend": "torch", "timeout_s": 0}
    settings = {"KQUEUE_REDIS_URL": redis_url, "KQUEUE_LEASE_S": "3600"}

    async def use(client: Any) -> None:
        identity = told(await client.call_tool("judge", given))["evaluation_id"]
        assert text_of(await client.call_tool("cancel", {"evaluation_id": identity})) == "It is cancelled."
        assert told(await client.call_tool("verdict", {"evaluation_id": identity}))["category"] == "cancelled"
        assert len(told(await client.call_tool("problems", {}))["rows"]) == 1
        assert told(await client.call_tool("leaderboard", {}))["rows"] == []

    async def on_stdio() -> None:
        async with over_stdio(settings | {"KQUEUE_DATABASE_URL": logins[roles.PRODUCER]}) as client:
            await use(client)

    async def on_http(url: str) -> None:
        async with over_http(url, tokens.create(engine, "an agent", [tokens.Scope.PROBLEMS])[1]) as client:
            await use(client)

    asyncio.run(on_stdio())
    for name, value in (settings | {"KQUEUE_DATABASE_URL": logins[roles.GATEWAY]}).items():
        monkeypatch.setenv(name, value)
    with Here() as here:
        asyncio.run(on_http(here.url))
