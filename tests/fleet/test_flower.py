"""What whoever watches the jobs sees, through Flower's own HTTP API, with a real worker behind it."""

from __future__ import annotations

import base64
import json
import os
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("flower")

SECRET = "ok # the source of a kernel that nobody else may see"


@pytest.fixture(scope="module")
def flower(services: Any) -> Iterator[str]:
    """Flower on loopback, as `kqueue up` and the compose file start it."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    env = os.environ | services.config().environment()
    env |= {"FLOWER_ADDRESS": "127.0.0.1", "FLOWER_PORT": str(port), "FLOWER_BASIC_AUTH": "ann:pass"}
    command = [sys.executable, "-m", "celery", "-A", "kqueue.broker_app", "flower"]
    with (services.directory / "flower.log").open("wb") as log:
        process = subprocess.Popen(command, env=env, stdout=log, stderr=log)
    try:
        services.until(lambda: _answers(port), what="Flower")
        yield f"http://127.0.0.1:{port}"
    finally:
        process.terminate()
        process.wait(60)


def _answers(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def _get(url: str, *, auth: str | None = "ann:pass") -> Any:
    headers = {"Authorization": "Basic " + base64.b64encode(auth.encode()).decode()} if auth else {}
    with urllib.request.urlopen(urllib.request.Request(url, headers=headers), timeout=60) as answer:
        return json.loads(answer.read())


def _task(services: Any, flower: str, identity: Any, state: str) -> dict[str, Any]:
    def look() -> dict[str, Any] | None:
        try:
            task = _get(f"{flower}/api/task/info/{identity}")
        except urllib.error.HTTPError:
            return None
        return task if task["state"] == state else None

    return services.until(look, what=f"{state} in Flower")


@pytest.fixture(scope="module")
def watched(services: Any, flower: str, fleet: Any) -> Any:
    """A fleet whose events Flower receives by now."""

    def seen() -> bool:
        identity = services.submit("ok")
        services.verdict(identity)
        return any(True for _ in _get(f"{flower}/api/tasks"))

    services.until(seen, what="Flower's first event")
    return fleet


def test_a_finished_evaluation(services: Any, flower: str, watched: Any) -> None:
    """Name, id, labels, lane and category are there; the source is not."""
    identity = services.submit(SECRET, problem_label="softmax", kernel_label="v7")
    services.verdict(identity)
    task = _task(services, flower, identity, "SUCCESS")
    assert task["name"] == "kqueue.evaluate"
    assert str(identity) in task["args"]
    assert "softmax" in task["kwargs"]
    assert "v7" in task["kwargs"]
    assert "cpu" in task["kwargs"]
    assert "'category': 'passed'" in task["result"]
    assert "nobody else may see" not in json.dumps(_get(f"{flower}/api/tasks"))


@pytest.mark.parametrize(
    ("kernel", "limit", "shown"),
    [
        ("exit 3", None, "judge_error: the judge exited with status 3"),
        ("signal SIGSEGV", None, "judge_error: the judge was killed by SIGSEGV"),
        ("gil", 1, "judge_error: the judge overran Celery's hard limit"),
    ],
)
def test_a_killed_judge(services: Any, flower: str, watched: Any, kernel: str, limit: float | None, shown: str) -> None:
    """The failure is readable, not `ExceptionWithTraceback()`."""
    identity = services.submit(kernel, time_limit=limit)
    services.verdict(identity)
    assert _task(services, flower, identity, "FAILURE")["exception"] == shown


def test_strangers_are_refused(flower: str) -> None:
    """Without the password there is no API."""
    with pytest.raises(urllib.error.HTTPError, match="401"):
        _get(f"{flower}/api/tasks", auth=None)
