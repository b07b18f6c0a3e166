"""The access log of `kqueue serve`: the fields of requests, and no secrets."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from uuid import UUID, uuid4

import httpx
import pytest
from sqlalchemy import Engine
from structlog.testing import capture_logs

from kqueue import RemoteClient
from kqueue.config import Config
from kqueue.http import OPEN_WARNING
from kqueue.store import tokens
from tests.http.serving import Served as Process
from tests.http.standin import Served
from tests.samples import request_fields
from tests.waiting import until

SECRET = "kq_a-secret-that-nobody-may-see"


@pytest.fixture(scope="module")
def process(house: Served, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Process]:
    """A server process with JSON logs, a socket, and no tokens for local users."""
    place = tmp_path_factory.mktemp("access")
    settings = {"log_json": True, "http_tokens": "trust-local-users", "http_socket": place / "run" / "http.sock"}
    with Process(house.config.model_copy(update=settings), place / "http.log") as one:
        yield one


@pytest.fixture
def http(process: Process, token: Callable[..., str], worker_id: UUID) -> Iterator[httpx.Client]:
    """A client of it with the scope `admin`."""
    headers = {"Authorization": f"Bearer {token('admin')}"}
    with httpx.Client(base_url=process.url, headers=headers, timeout=60) as client:
        yield client


def records(log: Path) -> list[dict[str, Any]]:
    """Return the complete lines. The server can write a further one at the same time."""
    lines = log.read_text().splitlines(keepends=True)
    return [json.loads(line) for line in lines if line.startswith("{") and line.endswith("\n")]


def line_of(process: Process, identity: str) -> dict[str, Any]:
    """Return the line of a request. The server writes it after it starts to send the answer."""

    def found() -> list[dict[str, Any]]:
        return [one for one in records(process.log) if one["event"] == "request" and one["request"] == identity]

    return until(found, what="the line")[0]


def test_a_request_has_a_line_and_an_id(process: Process, http: httpx.Client, engine: Engine) -> None:
    """The line has method, route, status, times, bytes, token, evaluations, and the id of the answer or the request."""
    made, secret = tokens.create(engine, "night \x1b[31m run", [tokens.Scope.PROBLEMS])
    http.headers.update({"Authorization": f"Bearer {secret}", "X-Request-ID": "mine-1"})
    answer = http.post("/v1/evaluations?allow_idle_lane=true", json=request_fields()).raise_for_status()
    evaluation = answer.json()["evaluation_id"]
    assert answer.headers["x-request-id"] == "mine-1"
    told = line_of(process, "mine-1")
    assert (told["method"], told["route"], told["status"]) == ("POST", "/v1/evaluations", 201)
    assert (told["caller"], told["token"]) == ("night \\x1b[31m run", str(made.id))
    assert told["evaluation"] == evaluation
    assert told["bytes_in"] == len(answer.request.content)
    assert told["bytes_out"] == len(answer.content)
    assert told["duration_ms"] > 0
    assert told["client"] == "127.0.0.1"
    assert told["level"] == "info"
    shown = http.get(f"/v1/evaluations/{evaluation}", headers={"X-Request-ID": "a\tb"})
    assert len(shown.headers["x-request-id"]) == 32, "what is no plain name is not taken"
    told = line_of(process, shown.headers["x-request-id"])
    assert (told["route"], told["evaluation"]) == ("/v1/evaluations/{evaluation_id}", evaluation)
    entries = [request_fields(number) for number in (1, 2)]
    batch = http.post("/v1/evaluations/batch", json={"entries": entries}, headers={"X-Request-ID": "mine-2"})
    ids = [one["evaluation_id"] for one in batch.raise_for_status().json()["evaluations"]]
    assert line_of(process, "mine-2")["evaluations"] == ids
    assert secret not in process.log.read_text()


def test_refusals_have_lines_without_what_was_sent(process: Process, http: httpx.Client) -> None:
    """The line of a refused request has no secret, no query and no path that the client chose."""
    http.headers["Authorization"] = f"Bearer {SECRET}"
    answers = [
        http.get("/v1/fleet", params={"token": SECRET}),
        http.get(f"/{SECRET}/there"),
        http.post("/v1/evaluations", json={"kernel": SECRET}),
        http.request("BREW", f"/v1/evaluations/{uuid4()}"),
        http.post("/v1/evaluations", content=b"x" * (33 << 20)),
    ]
    lines = [line_of(process, answer.headers["x-request-id"]) for answer in answers]
    assert [line["status"] for line in lines] == [401, 404, 401, 405, 413]
    assert [line["route"] for line in lines[:2]] == ["/v1/fleet", None]
    assert SECRET not in process.log.read_text()


def test_health_is_quiet_and_the_log_can_be_off(process: Process, http: httpx.Client, serve, config: Config) -> None:
    """Probes log no line at the level `info`. With the setting off no request does, but each still has an id."""
    quiet = {http.get(path).headers["x-request-id"] for path in ("/health", "/metrics", "/openapi.json")}
    line_of(process, http.get("/v1/categories").headers["x-request-id"])
    assert not [one for one in records(process.log) if one.get("request") in quiet]
    with capture_logs() as told, serve(config.model_copy(update={"http_access_log": False})).client() as silent:
        assert silent.get("/v1/categories").headers["x-request-id"]
    assert not [one for one in told if one["event"] == "request"]


def test_what_a_request_logs_has_its_id(process: Process, http: httpx.Client, engine: Engine) -> None:
    """The log lines of a request have the id of its answer, also if the server fails."""
    rename = "ALTER TABLE evaluations RENAME COLUMN {} TO {}"
    with engine.begin() as connection:
        connection.exec_driver_sql(rename.format("batch", "other"))
    try:
        answer = http.get("/v1/evaluations")
    finally:
        with engine.begin() as connection:
            connection.exec_driver_sql(rename.format("other", "batch"))
    assert answer.status_code == 503
    identity = answer.headers["x-request-id"]
    line_of(process, identity)
    mine = [one for one in records(process.log) if one.get("request") == identity and one["event"] != "request"]
    assert mine, "the warning of the failure"


def test_it_says_where_it_listens_and_ends_when_told(process: Process, http: httpx.Client) -> None:
    """It logs both addresses and a warning about local users without tokens, and exits on SIGTERM during a wait."""
    path = process.log.parent / "run" / "http.sock"
    log = process.log.read_text()
    assert f"kqueue serves {process.url}\n" in log
    assert f"kqueue serves unix://{path}: its owner needs no token" in log
    assert OPEN_WARNING in log
    until(lambda: httpx.get(f"{process.url}/v1/fleet").status_code == 200, what="an answer without a token")
    with RemoteClient(f"unix://{path}") as kq, ThreadPoolExecutor(1) as pool:
        ticket = kq.submit(**request_fields())
        waiting = pool.submit(http.get, f"/v1/evaluations/{ticket.evaluation_id}/wait", params={"timeout": 300})
        time.sleep(0.5)
        assert process.stop() == 0
        waiting.exception(60)
    assert not path.exists()
