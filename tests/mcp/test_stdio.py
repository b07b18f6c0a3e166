"""`kqueue mcp` on stdio, line by line."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.mcp.agents import COMMAND

HELLO = {"protocolVersion": "2025-06-18", "capabilities": {}, "clientInfo": {"name": "t", "version": "1"}}


def request(identity: int, method: str, **params: Any) -> str:
    """Return a JSON-RPC request as a line, with non-ASCII characters escaped."""
    return json.dumps({"jsonrpc": "2.0", "id": identity, "method": method, "params": params}) + "\n"


@pytest.mark.slow("starts a program")
def test_without_a_fleet_tools_are_listed_and_every_request_is_answered(tmp_path: Path) -> None:
    """A call's error names the command that starts a fleet, and a malformed line (half a surrogate) is refused."""
    given = {"problem": "class Model: ...", "backend": "torch"}
    lines = [
        request(1, "initialize", **HELLO),
        '{"jsonrpc":"2.0","method":"notifications/initialized"}\n',
        request(2, "tools/list"),
        request(3, "tools/call", name="judge", arguments=given | {"kernel": "\ud800"}),
        request(4, "tools/call", name="judge", arguments=given | {"kernel": "class ModelNew: ..."}),
        "junk\n",
    ]
    with subprocess.Popen(
        COMMAND,
        env=os.environ | {"KQUEUE_HOME": str(tmp_path)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.writelines(lines)
        process.stdin.flush()
        answers = {answer["id"]: answer for answer in (json.loads(process.stdout.readline()) for _ in range(5))}
        process.stdin.close()
    assert process.returncode == 0
    assert "judge" in {tool["name"] for tool in answers[2]["result"]["tools"]}
    assert answers[4]["result"]["isError"]
    assert "`kqueue up`" in answers[4]["result"]["content"][0]["text"]
    for identity in (3, None):
        assert answers[identity]["error"]["code"] == -32700
