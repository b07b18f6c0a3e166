"""Clients of the SDK for `kqueue mcp` on stdio and on streamable HTTP."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import IO, Any

import httpx2
from mcp import Client, StdioServerParameters
from mcp.client.streamable_http import streamable_http_client
from mcp_types import CallToolResult

from kqueue.http.server import Server, listen
from kqueue.mcp.connection import Connection
from kqueue.mcp.serving import create_app
from tests.waiting import until

COMMAND = [sys.executable, "-m", "kqueue", "mcp"]


def over_stdio(environment: Mapping[str, str], *options: str, mode: str = "auto") -> Client:
    """Return a client that starts `kqueue mcp` and hides its logs."""
    kept = {name: value for name, value in os.environ.items() if name == "KQUEUE_HOME"}
    command, *arguments = (*COMMAND, *options)
    return Client(StdioServerParameters(command=command, args=arguments, env={**kept, **environment}), mode=mode)


@asynccontextmanager
async def over_http(url: str, token: str, *, mode: str = "auto") -> AsyncGenerator[Client]:
    """Open a client of a `kqueue mcp --http`, with a token."""
    headers = {"Authorization": f"Bearer {token}"}
    async with (
        httpx2.AsyncClient(headers=headers, timeout=httpx2.Timeout(30.0, read=300.0)) as http,
        Client(streamable_http_client(url, http_client=http), mode=mode) as client,
    ):
        yield client


def text_of(result: CallToolResult) -> str:
    [block] = result.content
    return block.text  # type: ignore[union-attr]


def told(result: CallToolResult) -> dict[str, Any]:
    """Return the structured content of an answer that is no error."""
    assert not result.is_error, text_of(result)
    assert result.structured_content is not None
    return result.structured_content


def refusal(result: CallToolResult) -> str:
    """Return the text of an error."""
    assert result.is_error, text_of(result)
    return text_of(result)


def quoted(text: str) -> str:
    """Return the text within an answer's only pair of marks, after a check of the marks."""
    [(mark, inside)] = re.findall(
        r"^<<< data ([0-9a-f]{12}): [^\n]*; not instructions\n(.*?)\n\1 >>>$", text, re.M | re.S
    )
    assert text.count(mark) == 2
    return inside


class Http:
    """`kqueue mcp --http` as a separate process, until the block ends."""

    def __init__(self, environment: Mapping[str, str], *options: str) -> None:
        self._environment = environment
        self._options = options
        self._process: subprocess.Popen[str] | None = None
        self._log: list[str] = []
        self.url = ""

    def __enter__(self) -> Http:
        self._process = subprocess.Popen(
            [*COMMAND, "--http", "127.0.0.1:0", *self._options],
            env=os.environ | self._environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for stream in (self._process.stdout, self._process.stderr):
            threading.Thread(target=self._read, args=[stream], daemon=True).start()
        until(lambda: self._said() or self._process is None or self._process.poll() is not None, 120, "the server")
        assert self.url, "".join(self._log)
        return self

    def _read(self, stream: IO[str]) -> None:
        with contextlib.suppress(ValueError):
            for line in stream:
                self._log.append(line)

    def _said(self) -> bool:
        found = re.search(r"serves (http://\S+)", "".join(self._log))
        self.url = found[1] if found else ""
        return bool(found)

    @property
    def log(self) -> str:
        """Return all output so far."""
        return "".join(self._log)

    def stop(self, number: int = signal.SIGTERM) -> int:
        """Stop the server, and return its exit status."""
        assert self._process is not None
        if self._process.poll() is None:
            self._process.send_signal(number)
        return self._process.wait(60)

    def __exit__(self, *_: object) -> None:
        self.stop()


class Here:
    """The same server in a thread of this process, until the block ends, for the environment's fleet."""

    def __init__(self, hosts: Sequence[str] = ("127.0.0.1",)) -> None:
        self._listening = listen("127.0.0.1", 0)
        self.address = f"http://127.0.0.1:{self._listening.getsockname()[1]}"
        self.url = f"{self.address}/mcp"
        self._server = Server(create_app(Connection(relays=True), hosts))
        self._thread = threading.Thread(target=self._server.run, kwargs={"sockets": [self._listening]})

    def __enter__(self) -> Here:
        self._thread.start()
        until(lambda: self._server.started or not self._thread.is_alive(), what="the server")
        assert self._server.started
        return self

    def __exit__(self, *_: object) -> None:
        self._server.should_exit = True
        self._thread.join()
        self._listening.close()


def calls(identity: str, problem: str) -> dict[str, dict[str, Any]]:
    """Return arguments of each tool that name an evaluation or a problem, by the tool's name."""
    one, kernel = {"evaluation_id": identity}, {"kernel": "class ModelNew: ...", "backend": "torch"}
    return {
        **dict.fromkeys(("verdict", "autopsy", "sanitize", "profile", "cancel"), one),
        "wait": {"evaluation_ids": [identity], "timeout_s": 0},
        "read": {"uri": f"kqueue://evaluations/{identity}/kernel.py"},
        "judge": {"problem": problem, "timeout_s": 0, **kernel},
        "submit": {"problem": problem, "kernels": [kernel]},
        "tune": {"problem": problem, "backend": "torch", "kernel": "N = 1\nclass ModelNew: ...", "grid": {"N": [1, 2]}},
        "duel": {"problem": problem, "a": "class A: ...", "b": "class B: ...", "timeout_s": 0}
        | {"a_backend": "torch", "b_backend": "torch"},
        "problems": {},
        "leaderboard": {},
    }
