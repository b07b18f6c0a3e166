"""The command `kqueue mcp`: start, exit, requirements, and an unreachable fleet."""

from __future__ import annotations

import asyncio
import importlib.util
import os
import signal
import subprocess

import anyio
import httpx
import pytest

from kqueue.config import load
from kqueue.mcp import connection as fleet
from tests.http.serving import command, problem_of
from tests.http.standin import Served
from tests.mcp.agents import COMMAND, Here, Http, over_http, told
from tests.services import free_port

GIVEN = {"problem": "class Model: ...", "kernel": "class ModelNew: ...", "backend": "torch"}


def test_without_the_sdk_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    """It exits with 3 and one line. An HTTP option without `--http` is refused first."""
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "mcp" else find(name))
    assert command(load(), "mcp") == (3, "", "serving tools to agents needs the MCP SDK: `pip install 'kqueue[mcp]'`")
    status, _, said = command(load(), "mcp", "--allow-host", "fleet.example")
    assert (status, "--allow-host: only for --http" in said) == (2, True)


def test_a_bad_address() -> None:
    """The error is one line with the address."""
    status, out, said = command(load(url="http://127.0.0.1:1"), "mcp", "--http", "192.0.2.1:0")
    assert (status, out, said.count("\n"), "cannot listen on 192.0.2.1:0" in said) == (3, "", 0, True), said


@pytest.mark.nightly
def test_it_ends_when_it_is_told() -> None:
    """A signal ends the process on stdio at once, although its input is open."""
    with subprocess.Popen(
        COMMAND, env=os.environ | {"KQUEUE_URL": "http://127.0.0.1:1"}, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        hello = (
            '{"jsonrpc":"2.0","id":1,"method":"initialize","params":{"protocolVersion":"2025-06-18","capabilities":{},'
            '"clientInfo":{"name":"t","version":"1"}}}\n'
        )
        process.stdin.write(hello.encode())
        process.stdin.flush()
        assert b'"kqueue"' in process.stdout.readline()
        process.terminate()
        assert process.wait(60) == -signal.SIGTERM


def test_the_http_server_ends_with_open_sessions(served: Served, token) -> None:
    """SIGTERM ends it with 0 during an agent's session."""

    async def main(server: Http) -> int:
        async with anyio.create_task_group() as tasks, over_http(server.url, token(), mode="legacy") as client:
            told(await client.call_tool("judge", GIVEN | {"timeout_s": 0}))
            status = await asyncio.to_thread(server.stop)
            tasks.cancel_scope.cancel()
        return status

    with Http({"KQUEUE_URL": served.url}) as server:
        assert server.url.startswith("http://127.0.0.1:")
        assert asyncio.run(main(server)) == 0


@pytest.mark.anyio
async def test_a_wait_lives_through_a_restart(serve, config, worker_id, token, judge, queued, monkeypatch) -> None:
    """Progress reports an unreachable fleet, and the verdict arrives after its return."""
    heard: list[str] = []
    port = free_port()
    served = serve(config, port=port)
    monkeypatch.setenv("KQUEUE_URL", served.url)
    monkeypatch.setattr(fleet, "_RETRY_S", 0.3)

    async def progress(_seconds: float, _of: float | None, message: str | None) -> None:
        heard.append(message or "")

    async def until(words: str) -> None:
        with anyio.fail_after(90):
            while not any(words in message for message in heard):
                await anyio.sleep(0.05)

    async def restart() -> None:
        await until("waits:")
        await asyncio.to_thread(served.close)
        await until("cannot be reached")
        await asyncio.to_thread(serve, config, port=port)
        [identity] = queued()
        await asyncio.to_thread(judge, identity)

    with Here() as here:
        async with over_http(here.url, token()) as client, anyio.create_task_group() as tasks:
            tasks.start_soon(restart)
            result = await client.call_tool("judge", GIVEN | {"timeout_s": 300}, progress_callback=progress)
    assert told(result)["passed"]


@pytest.mark.slow("starts a server")
def test_an_agent_elsewhere_is_told_that_the_fleet_is_away(monkeypatch: pytest.MonkeyPatch) -> None:
    """The answer is a 503 with Retry-After, without the fleet's address."""
    monkeypatch.setenv("KQUEUE_URL", "http://127.0.0.1:1")
    monkeypatch.setattr(fleet, "_RETRY_S", 0.3)
    with Here() as here:
        answer = httpx.post(here.url, json={}, headers={"Authorization": "Bearer kq_x"}, timeout=60)
        assert "127.0.0.1:1" not in problem_of(answer, 503, "database_unavailable")["detail"]
        assert answer.headers["retry-after"]
