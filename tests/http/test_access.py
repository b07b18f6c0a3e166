"""The access log of `kqueue serve`: what it tells of requests, and what it never does."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from uuid import UUID, uuid4

import httpx
import pytest
from sqlalchemy import Engine

from kqueue.config import Config
from kqueue.store import tokens
from tests.http.serving import Served
from tests.samples import request_fields
from tests.waiting import until

SECRET = "kq_a-secret-that-nobody-may-see"


@pytest.fixture
def served(config: Config, worker_id: UUID, tmp_path: Path) -> Iterator[Served]:
    """A server as a process, whose log is JSON."""
    with Served(config.model_copy(update={"log_json": True}), tmp_path / "http.log") as one:
        yield one


def requests_in(log: Path) -> list[dict[str, Any]]:
    known = [json.loads(line) for line in log.read_text().splitlines() if line.startswith("{")]
    return [record for record in known if record["event"] == "request"]


def line_of(served: Served, identity: str) -> dict[str, Any]:
    """The line of a request, which is written when its answer is on its way."""
    return until(lambda: [r for r in requests_in(served.log) if r["request"] == identity], what="the line")[0]


def test_a_request_has_a_line_and_an_id(served: Served, engine: Engine) -> None:
    """Method, route, status, times, bytes, token and evaluations; the id is the answer's header, or the caller's."""
    made, secret = tokens.create(engine, "night \x1b[31m run", [tokens.Scope.PROBLEMS])
    headers = {"Authorization": f"Bearer {secret}", "X-Request-ID": "mine-1"}
    with httpx.Client(base_url=served.url, headers=headers, timeout=60) as http:
        answer = http.post("/v1/evaluations?allow_idle_lane=true", json=request_fields()).raise_for_status()
        evaluation = answer.json()["evaluation_id"]
        assert answer.headers["x-request-id"] == "mine-1"
        told = line_of(served, "mine-1")
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
        told = line_of(served, shown.headers["x-request-id"])
        assert (told["route"], told["evaluation"]) == ("/v1/evaluations/{evaluation_id}", evaluation)
        entries = [request_fields(number) for number in (1, 2)]
        batch = http.post("/v1/evaluations/batch", json={"entries": entries}, headers={"X-Request-ID": "mine-2"})
        ids = [one["evaluation_id"] for one in batch.raise_for_status().json()["evaluations"]]
        assert line_of(served, "mine-2")["evaluations"] == ids
    assert secret not in served.log.read_text()


def test_refusals_have_lines_without_what_was_sent(served: Served) -> None:
    """Unknown tokens, paths, methods and too large bodies: no secret, no query, no path of the caller's making."""
    with httpx.Client(base_url=served.url, headers={"Authorization": f"Bearer {SECRET}"}, timeout=60) as http:
        answers = [
            http.get("/v1/fleet", params={"token": SECRET}),
            http.get(f"/{SECRET}/there"),
            http.post("/v1/evaluations", json={"kernel": SECRET}),
            http.request("BREW", f"/v1/evaluations/{uuid4()}"),
            http.post("/v1/evaluations", content=b"x" * (33 << 20)),
        ]
    lines = [line_of(served, answer.headers["x-request-id"]) for answer in answers]
    assert [line["status"] for line in lines] == [401, 404, 401, 405, 413]
    assert lines[0]["route"] == "/v1/fleet"
    assert lines[1]["route"] is None
    assert SECRET not in served.log.read_text()


def test_health_is_quiet_and_the_log_can_be_off(config: Config, worker_id: UUID, tmp_path: Path) -> None:
    """Probes leave no line at the level `info`; with the setting off nothing does, and ids are given all the same."""
    with Served(config.model_copy(update={"log_json": True}), tmp_path / "http.log") as served:
        headers = {"Authorization": f"Bearer {served.admin}"}
        for path in ("/health", "/metrics", "/openapi.json"):
            assert httpx.get(served.url + path, headers=headers, timeout=60).status_code == 200
        last = httpx.get(served.url + "/v1/categories", headers=headers, timeout=60)
        line_of(served, last.headers["x-request-id"])
        told = {record["route"] for record in requests_in(served.log)}
        assert not told & {"/health", "/metrics", "/openapi.json"}
    off = config.model_copy(update={"log_json": True, "http_access_log": False})
    with Served(off, tmp_path / "off.log") as served:
        answer = httpx.get(served.url + "/v1/categories", headers={"Authorization": f"Bearer {served.admin}"})
        assert answer.headers["x-request-id"]
    assert not requests_in(served.log)


def test_what_a_request_logs_has_its_id(served: Served, engine: Engine) -> None:
    """Also where the server fails: the answer has the id under which its log tells how."""
    secret = served.admin
    with engine.begin() as connection:
        connection.exec_driver_sql("ALTER TABLE evaluations RENAME COLUMN batch TO other")
    answer = httpx.get(f"{served.url}/v1/evaluations", headers={"Authorization": f"Bearer {secret}"}, timeout=60)
    assert answer.status_code == 503
    identity = answer.headers["x-request-id"]
    line_of(served, identity)
    known = [json.loads(line) for line in served.log.read_text().splitlines() if line.startswith("{")]
    mine = [record for record in known if record.get("request") == identity and record["event"] != "request"]
    assert mine, "the warning of the failure"
