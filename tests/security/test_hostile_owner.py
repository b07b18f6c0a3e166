"""One hostile owner against another on one fleet, with its own credentials: over HTTP, MCP, SQL and Redis.

tests/web/test_owners.py tries every route and page, tests/security/test_owners.py every table and function, and
tests/security/test_sharing.py shared problems and agents' sessions. SECURITY.md lists them all.
"""

from __future__ import annotations

from typing import Any
from uuid import UUID, uuid4

import pytest
import redis
from mcp import Client
from sqlalchemy import text
from sqlalchemy.engine import make_url

from kqueue.config import Config, load
from kqueue.contract import Request
from kqueue.mcp.connection import Connection, Sees
from kqueue.mcp.serving import make_server
from kqueue.store import evaluations, roles, workers
from kqueue.store.engine import connect
from kqueue.store.evaluations.publishing import published
from tests.mcp.agents import calls as calls_of
from tests.mcp.agents import text_of
from tests.samples import passed, request_fields
from tests.security.house import House
from tests.services import connected
from tests.store.steps import finish

MARK = "belongstoada"
pytestmark = pytest.mark.anyio


@pytest.fixture
def attacked(house: House) -> tuple[UUID, str, Config]:
    """Return a judged evaluation of the first owner, its problem, and the settings of the second owner's process."""
    engine = house.services.engine
    urls: dict[str, str] = {}
    for name in ("ada", "bob"):
        roles.login(engine, name, roles.PRODUCER, f"of-{name}", owner=name)
        url = make_url(str(house.services.postgres.url)).set(username=name, password=f"of-{name}")
        urls[name] = url.render_as_string(hide_password=False)
    workers.register(engine, id=(worker := uuid4()), name="cpu-0@here", host="here", pid=1, lanes=["cpu"], device="cpu")
    fields = request_fields(0, problem=f"class Model: {MARK}", kernel=f"class ModelNew: {MARK}", kernel_label=MARK)
    owned = connect(urls["ada"], application="tests")
    [one] = evaluations.submit(owned, [request := Request(**fields)], slots={"cpu": 1})
    claimed = evaluations.claim(engine, one.evaluation_id, worker_id=worker, lease_s=3600)
    assert claimed is not None
    finish(engine, claimed, passed(log=MARK))
    owned.dispose()
    config = load(database_url=urls["bob"], redis_url=house.guarded.url_of("producer"), lease_s=3600)
    return one.evaluation_id, request.problem_name, config


@pytest.mark.parametrize("sees", list(Sees))
async def test_no_tool_reaches_the_work_of_another_owner(
    attacked: tuple[UUID, str, Config], monkeypatch: pytest.MonkeyPatch, sees: Sees
) -> None:
    """With the login of its own database, whatever the operator lets its agents see."""
    identity, problem, config = attacked
    for name, value in config.environment().items():
        monkeypatch.setenv(name, value)
    calls = calls_of(str(identity), problem)
    async with Client(make_server(Connection(relays=False, sees=sees))) as client:
        assert {*calls, "explain"} == {tool.name for tool in (await client.list_tools()).tools}
        for tool, arguments in calls.items():
            said = await client.call_tool(tool, arguments)
            assert said.is_error or tool in ("submit", "problems", "leaderboard"), tool
            assert MARK not in text_of(said), tool
            assert "validation error" not in text_of(said), tool
        for name in ("kernel.py", "problem.py", "log", "verdict.json", "evidence.json"):
            said = await client.call_tool("read", {"uri": f"kqueue://evaluations/{identity}/{name}"})
            assert "no evaluation has this id" in text_of(said), name


def test_a_login_hears_ids_and_nothing_else(attacked: tuple[UUID, str, Config], house: House) -> None:
    """LISTEN gives the id of an evaluation that ended. The id is no key to anything."""
    identity, _, config = attacked
    with connected(config.require_database()) as connection:
        connection.execute("LISTEN kqueue_verdicts")
        with house.services.engine.begin() as other:
            other.execute(text("SELECT pg_notify('kqueue_verdicts', :id)"), {"id": str(identity)})
        assert [one.payload for one in connection.notifies(timeout=5, stop_after=1)] == [str(identity)]
        for table in ("evaluations", "verdicts", "summaries"):
            column = "id" if table == "evaluations" else "evaluation_id"
            assert connection.execute(f"SELECT FROM {table} WHERE {column} = %s", [identity]).rowcount == 0
        assert connection.execute("SELECT kqueue_cancel(%s)", [identity]).fetchone() == (None,)


def test_redis_gives_a_producer_nothing_to_read(attacked: tuple[UUID, str, Config], house: House) -> None:
    """No queue, key, channel or client can be read, so no id of an unfinished evaluation is learned there."""
    refused: list[Any] = []
    commands = ("LRANGE kqueue.cpu 0 -1", "LLEN kqueue.cpu", "BRPOP kqueue.cpu 1", "KEYS *", "SCAN 0", "MONITOR")
    commands += ("PSUBSCRIBE *", "SUBSCRIBE /0.celeryev/task.sent", "CLIENT LIST", "GET kqueue.sweeper", "CONFIG GET *")
    commands += ("EVAL return(1) 0", "DEL kqueue.cpu", "FLUSHALL", "ACL LIST")
    with redis.Redis.from_url(house.guarded.url_of("producer")) as client:
        for command in commands:
            try:
                client.execute_command(*command.split())
            except redis.exceptions.NoPermissionError:
                refused.append(command)
        # A forged message announces an evaluation again. Its claim in Postgres decides.
        client.lpush("kqueue.cpu", b'{"body": "forged", "headers": {"id": "x"}}')
    assert refused == list(commands)
    assert published(house.services.engine).get("cpu", set()) == set()
