"""Evaluations in Flower's HTTP API with a real worker, and its access control."""

from __future__ import annotations

import base64
import http.client
import itertools
import json
import socket
import urllib.error
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import redis

pytest.importorskip("flower")

from kqueue.flower import GuardedFlower
from tests.security.house import Flower, running_flower

SECRET = "ok # the source of a kernel that nobody else may see"


@pytest.fixture(scope="module")
def flower(services: Any) -> Iterator[Flower]:
    """Start Flower on loopback, in a folder with a stranger's configuration for it."""
    (services.directory / "flowerconfig.py").write_text("open('planted', 'w')\n")
    with running_flower(services.config(), services.directory / "flower.log") as flower:
        yield flower
    assert not (services.directory / "planted").exists()


def _task(services: Any, flower: Flower, identity: Any, state: str) -> dict[str, Any]:
    def look() -> dict[str, Any] | None:
        try:
            task = flower.get(f"/api/task/info/{identity}")
        except urllib.error.HTTPError:
            return None
        return task if task["state"] == state else None

    return services.until(look, what=f"{state} in Flower")


@pytest.fixture(scope="module")
def watched(services: Any, flower: Flower, running_fleet: Any) -> Any:
    """Return a fleet whose events already reach Flower."""

    def seen() -> bool:
        identity = services.submit("ok")
        services.verdict(identity)
        return any(True for _ in flower.get("/api/tasks"))

    fleet = running_fleet()
    services.until(seen, what="Flower's first event")
    return fleet


def test_a_finished_evaluation(services: Any, flower: Flower, watched: Any) -> None:
    """Name, id, labels, lane and category are shown, but not the source."""
    identity = services.submit(SECRET, problem_label="softmax", kernel_label="v7")
    task = _task(services, flower, identity, "SUCCESS")
    assert task["name"] == "kqueue.evaluate"
    assert str(identity) in task["args"]
    assert all(word in task["kwargs"] for word in ("softmax", "v7", "cpu"))
    assert "'category': 'passed'" in task["result"]
    assert "nobody else may see" not in json.dumps(flower.get("/api/tasks"))


def test_a_killed_judge(services: Any, flower: Flower, watched: Any) -> None:
    """The failure is readable, not `ExceptionWithTraceback()`."""
    for kernel, limit, shown in (
        ("exit 3", None, "judge_error: the judge exited with status 3"),
        ("gil", 1, "judge_error: the judge overran Celery's hard limit"),
    ):
        identity = services.submit(kernel, time_limit=limit)
        assert _task(services, flower, identity, "FAILURE")["exception"] == shown


def _status(flower: Flower, path: str, *, method: str = "GET", host: str | None = None, auth: str | bytes = "") -> int:
    """Request a page of Flower by the name ``host`` with the credentials ``auth``."""
    port = int(flower.url.rpartition(":")[2])
    encoded = base64.b64encode(auth.encode() if isinstance(auth, str) else auth).decode()
    headers = ({"Authorization": f"Basic {encoded}"} if auth else {}) | ({"Host": host} if host is not None else {})
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    try:
        connection.request(method, path, headers=headers)
        return connection.getresponse().status
    finally:
        connection.close()


def test_forged_tables_do_not_blind_flower(services: Any, flower: Flower, watched: Any) -> None:
    """Values of any type under keys that stock kombu would read do not stop Flower."""
    with redis.Redis.from_url(services.valkey.url.replace("redis+socket://", "unix://")) as client:
        for key in ("_kombu.binding.reply.celery.pidbox", "_kombu.binding_permanent.celeryev", "flower.unacked"):
            client.set(key, "x")
    [live] = watched.live()
    [queue] = flower.get("/api/workers?refresh=true")[live.name]["active_queues"]
    assert queue["name"] == "kqueue.cpu"


#: Paths of pages, the API, metrics, files, and a missing page.
PATHS = ("/", "/tasks", "/task/x/healthcheck", "/broker", "/api/tasks", "/metrics", "/static/js/flower.js", "/nothing")


def test_only_the_password_opens_a_page(flower: Flower) -> None:
    """Without the password only the health check answers, without any data."""
    for auth in ("", "ann", "ann:", "ann:wrong", "\xe4nn:pass", b"\xff\xfe:\x00"):
        assert {path: _status(flower, path, auth=auth) for path in PATHS} == dict.fromkeys(PATHS, 401), auth
        assert _status(flower, "/api/task/revoke/x", method="POST", auth=auth) == 401
        assert _status(flower, "/api/tasks", method="OPTIONS", auth=auth) == 401
        assert _status(flower, "/healthcheck", auth=auth) == 200
    found = {path: _status(flower, path, auth=flower.auth) for path in PATHS}
    assert found == dict.fromkeys(PATHS, 200) | {"/task/x/healthcheck": 404, "/nothing": 404}


def test_only_names_of_this_machine_are_accepted(flower: Flower) -> None:
    """A page that points its own name to Flower's address reaches nothing, even with the password."""
    evil = ("evil.example", "127.0.0.1.evil.example:5555", "localhost.evil.example", "[::1", "evil", "127.0.0.1:x@evil")
    for host, path in itertools.product(evil, ("/", "/api/tasks", "/healthcheck")):
        assert _status(flower, path, host=host, auth=flower.auth) in {400, 403}, (host, path)
    for host in ("127.0.0.1:80", "localhost:5555", "LOCALHOST", "[::1]:5555", "10.1.2.3:5555", socket.gethostname()):
        assert _status(flower, "/api/tasks", host=host, auth=flower.auth) == 200, host


def test_flower_does_not_start_without_a_password() -> None:
    """Missing credentials, or ones that Flower would misread, end the start with a message."""
    for known in (None, [], [""], ["ann"], ["ann:"], [":pass"], ["ann:pa", "ss"], ["ann:p\xe4ss"]):
        with pytest.raises(SystemExit, match="user:password"):
            GuardedFlower(options=SimpleNamespace(basic_auth=known))
