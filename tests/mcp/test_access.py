"""Access to `kqueue mcp --http`: each client has the rights of its token at `/v1`, and no more."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from datetime import timedelta
from json import dumps
from pathlib import Path
from random import Random
from typing import Any
from uuid import uuid4

import httpx
import pytest
from mcp import Client
from sqlalchemy import Engine, text

from kqueue.config import Config
from kqueue.mcp import connection as fleet
from kqueue.mcp.serving import make_server
from kqueue.states import Priority
from kqueue.store import tokens
from tests.http.serving import problem_of
from tests.http.standin import Served
from tests.mcp.agents import Here, calls, over_http, over_stdio, refusal, text_of, told

NEW = {"problem": "class Model: new = 1", "kernel": "class ModelNew: ...", "backend": "torch", "timeout_s": 0}
HELLO = {
    "jsonrpc": "2.0",
    "id": 1,
    "method": "initialize",
    "params": {"protocolVersion": "2025-06-18", "capabilities": {}, "clientInfo": {"name": "tests", "version": "1"}},
}
pytestmark = pytest.mark.anyio
NO_TEXT = b"Bearer kq_\xe9"
ACCEPTS = {"Accept": "application/json, text/event-stream"}


def hello(here: Here, credential: str | bytes | None, **headers: str) -> httpx.Response:
    """Return the server's answer to the first message of a session."""
    given: dict[str, Any] = {} if credential is None else {"Authorization": credential}
    return httpx.post(here.url, json=HELLO, headers=ACCEPTS | given | headers, timeout=60)


def test_without_a_token_nothing_is_answered(here: Here, token, engine: Engine) -> None:
    """A missing, wrong, expired or revoked token is a 401 before the body is read, and each request is checked."""
    gone = token(expires_after=timedelta(seconds=-1))
    for credential in (None, "Bearer kq_wrong", f"Bearer {gone}", "Basic eDp5", "Bearer", "kq_wrong", NO_TEXT):
        answer = hello(here, credential)
        problem_of(answer, 401, "unauthenticated")
        assert answer.headers["www-authenticate"].startswith("Bearer")
    good = token("read")
    assert hello(here, f"Bearer {good}").status_code == 200
    tokens.revoke(engine, "a read one")
    problem_of(hello(here, f"Bearer {good}"), 401, "unauthenticated")
    answer = httpx.post(here.url, content=b"{", headers=ACCEPTS, timeout=60)
    problem_of(answer, 401, "unauthenticated")


async def test_a_scope_is_that_of_v1(here: Here, served: Served, token, queued) -> None:
    """`read` can query, `submit` can judge for stored problems, and new problems need `problems`."""
    async with over_http(here.url, token("read")) as client:
        said = refusal(await client.call_tool("judge", NEW))
        assert "this needs a token of the scope submit" in said
        assert "about this session's token and not the kernel" in said
        assert "scope submit" in refusal(
            await client.call_tool(
                "submit", {"problem": NEW["problem"], "kernels": [{"kernel": "k", "backend": "torch"}]}
            )
        )
        assert text_of(await client.call_tool("problems", {})) == "There are none."
    async with over_http(here.url, token("submit")) as client:
        assert "this needs a token of the scope problems" in refusal(await client.call_tool("judge", NEW))
    assert queued() == []
    async with over_http(here.url, token("problems")) as client:
        identity = told(await client.call_tool("judge", NEW))["evaluation_id"]
    with served.client(token("problems")) as http:
        # A session's submissions are stored with the session.
        other = {name: NEW[name] for name in ("problem", "backend")} | {"kernel": "class ModelNew: stored = 1"}
        assert http.post("/v1/evaluations", json=other | {"problem": "class Model: stored = 1"}).status_code == 201
    async with over_http(here.url, token("submit")) as client:
        assert "scope problems" in refusal(await client.call_tool("judge", NEW))
        again = NEW | {"problem": "class Model: stored = 1", "kernel": "class ModelNew: another = 1"}
        assert told(await client.call_tool("judge", again))["state"] == "queued"
    async with over_http(here.url, token("read")) as client:
        assert "scope submit" in refusal(await client.call_tool("cancel", {"evaluation_id": identity}))
    assert len(queued()) == 3


async def test_limits_and_priorities_are_those_of_the_token(
    serve, config, worker_id, token, engine, monkeypatch
) -> None:
    """Evaluations count as the token's, and a priority above the token's limit is an error."""
    monkeypatch.setenv("KQUEUE_URL", serve(config.model_copy(update={"http_max_queued": 2})).url)
    monkeypatch.setattr(fleet, "_RETRY_S", 0.3)
    with Here() as here:
        async with over_http(here.url, token(priority=Priority.BATCH)) as client:
            assert "priority: this token can request batch at most" in refusal(await client.call_tool("judge", NEW))
            for number in range(2):
                given = NEW | {"priority": "batch", "kernel": f"class ModelNew: n = {number}"}
                told(await client.call_tool("judge", given))
            said = refusal(await client.call_tool("judge", NEW | {"priority": "batch"}))
            assert "2 evaluations of this token have no verdict yet: the limit is 2" in said
            assert "says nothing about the kernel" in said
        async with over_http(here.url, token()) as client:
            told(await client.call_tool("judge", NEW))
    query = "SELECT priority, count(*), count(DISTINCT token_id) FROM evaluations GROUP BY 1 ORDER BY 1"
    with engine.connect() as connection:
        assert [tuple(row) for row in connection.execute(text(query))] == [("batch", 2, 1), ("interactive", 1, 1)]


def test_a_session_is_its_token_s_alone(here: Here, token) -> None:
    """Another token gets the same answer as for an unknown session, and a missing token is refused."""
    mine, other = token("read"), token("submit")
    began = hello(here, f"Bearer {mine}")
    session = {"Mcp-Session-Id": began.headers["mcp-session-id"], "Mcp-Protocol-Version": "2025-06-18"}
    listing = {"jsonrpc": "2.0", "id": 2, "method": "tools/list"}

    def ask(credential: str, **headers: str) -> httpx.Response:
        given = ACCEPTS | session | headers | {"Authorization": f"Bearer {credential}"}
        return httpx.post(here.url, json=listing, headers=given, timeout=60)

    assert ask(mine).status_code == 200
    assert "leaderboard" in ask(mine).text
    strange = ask(other)
    assert strange.status_code == 404
    assert strange.text == ask(other, **{"Mcp-Session-Id": "0" * 32}).text.replace("0" * 32, session["Mcp-Session-Id"])
    assert "leaderboard" not in strange.text
    assert httpx.delete(here.url, headers=ACCEPTS | session, timeout=60).status_code == 401
    with httpx.stream("GET", here.url, headers=ACCEPTS | session | {"Authorization": f"Bearer {other}"}) as answer:
        assert answer.status_code == 404


async def test_calls_at_once_act_with_their_own_tokens(here: Here, token, engine: Engine) -> None:
    """Concurrent sessions in one process each submit with the token that opened them."""
    mine = [token(weight=float(number + 1)) for number in range(4)]

    async def one(number: int) -> None:
        async with over_http(here.url, mine[number], mode=["auto", "legacy"][number % 2]) as client:
            for turn in range(5):
                given = NEW | {"kernel": f"class ModelNew: of = {number}, {turn}", "kernel_label": str(number)}
                told(await client.call_tool("judge", given))

    await asyncio.gather(*(one(number) for number in range(4)))
    with engine.connect() as connection:
        found = connection.execute(
            text("SELECT kernel_label, weight FROM evaluations e JOIN tokens t ON t.id = e.token_id")
        ).all()
    assert len(found) == 20
    assert all(float(label) + 1 == weight for label, weight in found)


def test_junk_is_refused_and_the_next_call_is_answered(here: Here, token) -> None:
    """Bodies, ids and types that are no message of the protocol get a 4xx or an error, never a 5xx."""
    random, credential = Random(7), {"Authorization": f"Bearer {token('read')}"}
    json = {"Content-Type": "application/json"}
    began = hello(here, credential["Authorization"]).headers["mcp-session-id"]
    bodies = [b"", b"{", b"null", b"[]", b"\xff", b"9" * 5000, b"[" * 50_000, random.randbytes(10_000)]
    messages: list[Any] = [
        {"id": 10**400},
        {"id": -1.5e308},
        {"id": {}},
        {"method": 7},
        {"params": []},
        {"jsonrpc": "1.0"},
    ]
    messages += [{"params": {"name": name, "arguments": "x"}} for name in ("judge", "\0", "x" * 10_000)]
    bodies += [dumps(HELLO | {"method": "tools/call"} | message).encode() for message in messages]
    for session in ({}, {"Mcp-Session-Id": began}, {"Mcp-Session-Id": "x" * 5000}):
        for kind in (json, {"Content-Type": "text/html"}):
            for body in bodies:
                answer = httpx.post(here.url, content=body, headers=ACCEPTS | credential | session | kind, timeout=60)
                assert answer.status_code < 500, (body[:60], session, kind, answer.text)
                assert answer.status_code >= 400 or "error" in answer.text.lower() or not answer.text, answer.text
    assert hello(here, credential["Authorization"]).status_code == 200


def test_other_names_of_this_address_are_refused(here: Here, token) -> None:
    """A foreign host name that resolves to this address is refused even with a token, and so is a foreign origin."""
    credential = f"Bearer {token('read')}"
    port = here.address.rpartition(":")[2]
    assert hello(here, credential, Host=f"127.0.0.1:{port}").status_code == 200
    for host in ("evil.example", f"evil.example:{port}", "127.0.0.1.evil.example", ""):
        assert hello(here, credential, Host=host).status_code in {400, 421}, host
    assert hello(here, credential, Origin="http://evil.example").status_code == 403
    assert hello(here, credential, Origin=here.address).status_code == 200


def test_a_name_that_is_allowed(served: Served, token, monkeypatch: pytest.MonkeyPatch) -> None:
    """An allowed proxy's host name is accepted, with and without a port."""
    monkeypatch.setenv("KQUEUE_URL", served.url)
    with Here(["fleet.example"]) as here:
        for host, status in (("fleet.example", 200), ("fleet.example:443", 200), ("127.0.0.1", 421)):
            assert hello(here, f"Bearer {token('read')}", Host=host).status_code == status, host


async def test_a_fleet_that_trusts_this_process_lets_no_stranger_in(
    serve, config: Config, worker_id, token, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A fleet that trusts local users, on TCP or the owner's socket, is not open to MCP clients without a token."""
    path = tmp_path / "run" / "http.sock"
    served = serve(config.model_copy(update={"http_tokens": "trust-local-users"}), path)
    for url in (served.url, f"unix://{path}"):
        monkeypatch.setenv("KQUEUE_URL", url)
        monkeypatch.setenv("KQUEUE_TOKEN", token("admin"))
        with Here() as here:
            problem_of(hello(here, None), 401, "unauthenticated")
            problem_of(hello(here, "Bearer kq_wrong"), 401, "unauthenticated")
            assert hello(here, f"Bearer {token('read')}").status_code == 200
            async with over_http(here.url, token("read")) as client:
                assert "scope submit" in refusal(await client.call_tool("judge", NEW))


@pytest.mark.parametrize("trust", [pytest.param("required", marks=pytest.mark.nightly), "trust-local-users"])
async def test_tokens_are_asked_for_without_kqueue_serve_too(
    config: Config, worker_id, token, queued, monkeypatch: pytest.MonkeyPatch, trust: str
) -> None:
    """On the fleet's own Postgres and Redis the same tokens are valid, with the same scopes."""
    for name, value in config.environment().items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("KQUEUE_HTTP_TOKENS", trust)
    with Here() as here:
        problem_of(hello(here, None), 401, "unauthenticated")
        problem_of(hello(here, "Bearer kq_wrong"), 401, "unauthenticated")
        async with over_http(here.url, token("submit")) as client:
            assert "this needs a token of the scope problems" in refusal(await client.call_tool("judge", NEW))
        async with over_http(here.url, token("problems")) as client:
            assert told(await client.call_tool("judge", NEW))["state"] == "queued"
    assert len(queued()) == 1


@pytest.mark.parametrize("wrong", [False, pytest.param(True, marks=pytest.mark.nightly)])
async def test_on_stdio_the_process_s_own_token_counts(served: Served, token, wrong: bool) -> None:
    """Its scope limits the process, and a wrong one is an error of each call."""
    async with over_stdio({"KQUEUE_URL": served.url, "KQUEUE_TOKEN": "kq_wrong" if wrong else token("read")}) as client:
        said = refusal(await client.call_tool("judge", NEW))
    assert ("the token is unknown, expired or revoked" if wrong else "scope submit") in said
    assert "kq_wrong" not in said


@pytest.mark.parametrize("door", ["http", "stdio"])
async def test_an_agent_reads_only_what_its_owner_submitted(
    here: Here, served: Served, token, judge, config: Config, monkeypatch: pytest.MonkeyPatch, door: str
) -> None:
    """By each tool, another owner's evaluation and problem look like unknown ones, and its own are there."""
    with served.client(token(owner="ada")) as ada:
        fields = {name: NEW[name] for name in ("problem", "kernel", "backend")}
        identity = ada.post("/v1/evaluations", json=fields).json()["evaluation_id"]
        stored = f"sha256:{ada.get('/v1/problems').json()['problems'][0]['problem_hash']}"
    judge(identity)
    for name, value in config.environment().items():
        monkeypatch.setenv(name, value)
    inside = Client(make_server(fleet.Connection(relays=False, owner="bob", limits=";evaluations=1")))
    async with over_http(here.url, token(owner="bob")) if door == "http" else inside as client:
        unknown, nowhere = str(uuid4()), f"sha256:{'0' * 64}"
        theirs, nothing = calls(identity, stored), calls(unknown, nowhere)
        assert {*theirs, "explain"} == {tool.name for tool in (await client.list_tools()).tools}
        for tool, arguments in theirs.items():
            said, same = [await client.call_tool(tool, one) for one in (arguments, nothing[tool])]
            text = text_of(said).replace(identity, unknown).replace(stored[7:], nowhere[7:])
            assert (said.is_error, text) == (same.is_error, text_of(same)), tool
            assert "validation error" not in text, (tool, text)
            assert tool in ("submit", "problems", "leaderboard") or said.is_error, (tool, text)
        mine = told(await client.call_tool("judge", NEW))["evaluation_id"]
        assert told(await client.call_tool("verdict", {"evaluation_id": mine}))["state"] == "queued"
        assert len(told(await client.call_tool("problems", {}))["rows"]) == 1
        if door == "stdio":
            said = refusal(await client.call_tool("judge", NEW | {"kernel": "class ModelNew: more = 1"}))
            assert "exceed it. This is about this session's token and not the kernel: report it to the user" in said


async def test_upper_limits_and_the_end_of_a_token(here: Here, token, engine: Engine) -> None:
    """A tool refuses what the token's limits exclude, and an open stream ends soon after the revocation."""
    secret = token(limits={"deadlines.check_s": 30})
    async with over_http(here.url, secret) as client:
        said = refusal(await client.call_tool("judge", NEW | {"settings": {"deadlines": {"check_s": 31}}}))
        assert "settings.deadlines.check_s: 31 exceeds your upper limit of 30" in said
    own = {"Authorization": f"Bearer {secret}"}
    session = {"Mcp-Session-Id": hello(here, own["Authorization"]).headers["mcp-session-id"]}
    headers = {"Accept": "text/event-stream", "Mcp-Protocol-Version": "2025-06-18"} | own | session
    async with httpx.AsyncClient(timeout=30) as http, http.stream("GET", here.url, headers=headers) as answer:
        assert answer.status_code == 200
        tokens.revoke(engine, "a problems one")
        with suppress(httpx.RemoteProtocolError):
            assert await answer.aread() == b""
