"""The native API: requests, answers and errors."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from typing import Any
from uuid import UUID, uuid4

import httpx
import pytest
from sqlalchemy import Engine, text

from kqueue import broker
from kqueue.categories import Category
from kqueue.config import Config
from kqueue.store import evaluations, workers
from tests.http.serving import problem_of
from tests.http.standin import Served
from tests.samples import ended
from tests.store.steps import count
from tests.waiting import until

#: A request's wrong fields, and the field that the error names.
WRONG = [
    ({"color": "red"}, "body.color"),
    ({"backend": "fortran"}, "body.backend"),
    ({"kernel": 7}, "body.kernel"),
    ({"kernel": " "}, "body.kernel"),
    ({"kernel": "x" * (1 << 20) + "x"}, "body.kernel"),
    ({"kernel": "\0"}, "body.kernel"),
    ({"problem_label": "a\0b"}, "body.problem_label"),
    ({"queue_wait_s": -1}, "body.queue_wait_s"),
    ({"settings": {"checks": 0}}, "body.settings.checks"),
    ({"settings": {"deadlines": {"load_s": 1e9}}}, "body.settings.deadlines.load_s"),
]

#: Filters, and the evaluations of the three in these tests that match.
FILTERS = [
    ({"state": "queued", "kernel": "AT", "priority": "batch"}, [2]),
    ({"state": "done", "blame": "candidate", "problem": "el", "producer": "tok", "parts": True}, [1]),
    ({"problem": "relu", "lane": "cpu", "backend": "torch", "batch": "tues/day"}, [2, 1, 0]),
    ({"since": "2100-01-01T00:00:00Z"}, []),
]

#: Invalid filters.
NO_FILTERS = [
    *({"cursor": cursor} for cursor in ("x", "W10=", "Wzpd")),
    *({"limit": limit} for limit in (0, 1001)),
    *({name: "a\0b"} for name in ("state", "category", "batch", "since")),
]


class TestSubmit:
    def test_accepted_and_sent(self, http: httpx.Client, config: Config, fields) -> None:
        """The answer is a 201 with a Location, and the message is in the lane's queue."""
        answer = http.post("/v1/evaluations", json=fields())
        assert answer.status_code == 201
        identity = answer.json()["evaluation_id"]
        assert answer.json() == {"evaluation_id": identity, "created": True}
        assert answer.headers["location"] == f"/v1/evaluations/{identity}"
        with broker.make_app(config) as app:
            assert broker.waiting(app, "cpu") == {UUID(identity)}

    def test_a_key_gives_the_same_evaluation(self, http: httpx.Client, fields) -> None:
        """Field and header work alike and must not differ, and 200 marks a known key."""
        first = http.post("/v1/evaluations", json=fields(idempotency_key="k"))
        again = http.post("/v1/evaluations", json=fields(), headers={"Idempotency-Key": "k"})
        both = http.post("/v1/evaluations", json=fields(idempotency_key="k"), headers={"Idempotency-Key": "k"})
        assert [a.status_code for a in (first, again, both)] == [201, 200, 200]
        assert len({a.json()["evaluation_id"] for a in (first, again, both)}) == 1
        answer = http.post("/v1/evaluations", json=fields(idempotency_key="a"), headers={"Idempotency-Key": "b"})
        problem_of(answer, 422, "invalid_request")

    def test_wrong_fields_are_named(self, http: httpx.Client, engine: Engine, fields) -> None:
        """The error is a 422 with each wrong field and without sources, and no row is written."""
        for changes, where in WRONG:
            body = problem_of(http.post("/v1/evaluations", json=fields(**changes)), 422, "invalid_request")
            assert [error["field"] for error in body["errors"]] == [where]
            assert len(json.dumps(body)) < 2000
        assert count(engine, "evaluations") == 0

    def test_a_batch_s_key_counts_its_entries(self, serve, config: Config, worker_id, engine: Engine, fields) -> None:
        """An entry's own key has precedence, a repeated batch has equal ids, and keys without a token are unchanged."""
        batch = {"entries": [fields(0), fields(1, idempotency_key="own")]}
        with serve(config.model_copy(update={"http_tokens": "trust-local-users"})).stranger() as http:
            first, again = (
                http.post(f"/v1/evaluations/{way}", json=batch, headers={"Idempotency-Key": "step-3"})
                for way in ("batch", "each")
            )
        ids = [e["evaluation_id"] for e in first.json()["evaluations"]]
        assert [slot["evaluation"] for slot in again.json()["results"]] == [
            {"evaluation_id": identity, "created": False} for identity in ids
        ]
        with engine.connect() as connection:
            keys = connection.scalars(text("SELECT idempotency_key FROM evaluations")).all()
        assert set(keys) == {"step-3/0", "own"}

    def test_limits(self, serve, config: Config, worker_id: UUID, fields) -> None:
        """A batch or a body above its limit is a 413, also without an announced length."""
        with serve(config.model_copy(update={"http_max_batch": 2, "http_max_body_bytes": 4096})).client() as http:
            answer = http.post("/v1/evaluations/batch", json={"entries": [fields(i) for i in range(3)]})
            problem_of(answer, 413, "too_large")
            large = json.dumps(fields(kernel="#" * 5000)).encode()
            problem_of(http.post("/v1/evaluations", content=large), 413, "too_large")
            pieces = (large[i : i + 1000] for i in range(0, len(large), 1000))
            problem_of(http.post("/v1/evaluations", content=pieces), 413, "too_large")
            assert http.post("/v1/evaluations", json=fields()).status_code == 201


class TestWait:
    def test_in_vain(self, http: httpx.Client, judge, fields) -> None:
        """A timeout is no error, zero seconds return at once, and unknown evaluations and invalid times are errors."""
        identity = http.post("/v1/evaluations", json=fields()).json()["evaluation_id"]
        answer = http.get(f"/v1/evaluations/{identity}/wait", params={"timeout": 0})
        assert answer.json() == {"evaluation_id": identity, "verdict": None}
        judge(identity)
        answer = http.get(f"/v1/evaluations/{identity}/wait", params={"timeout": 0})
        assert answer.json()["verdict"]["category"] == "passed"
        problem_of(http.get(f"/v1/evaluations/{uuid4()}/wait"), 404, "unknown_evaluation")
        problem_of(http.get("/v1/evaluations/nonsense/wait"), 422, "invalid_request")
        for timeout in ("-1", "nan", "inf", "301", "soon"):
            answer = http.get(f"/v1/evaluations/{uuid4()}/wait", params={"timeout": timeout})
            problem_of(answer, 422, "invalid_request")

    def test_who_goes_away_ends_the_wait_and_not_the_evaluation(self, served: Served, judge, fields) -> None:
        """The server stops waiting for a disconnected client, and the evaluation continues."""
        listener = lambda: served.app.state.gateway._listener._waiters  # noqa: E731
        with served.client() as http:
            identity = http.post("/v1/evaluations", json=fields()).json()["evaluation_id"]
            with pytest.raises(httpx.ReadTimeout):
                http.get(f"/v1/evaluations/{identity}/wait", params={"timeout": 300}, timeout=0.5)
            until(lambda: not listener(), what="an end of waiting for nobody")
            judge(identity)
            assert http.get(f"/v1/evaluations/{identity}/wait").json()["verdict"]["category"] == "passed"


class TestReports:
    @pytest.fixture
    def three(self, http: httpx.Client, judge, fields) -> list[str]:
        """One passed, one failed, one queued evaluation."""
        labels = {"problem_label": "relu", "batch": "tues/day"}
        entries = [fields(i, kernel_label=label, **labels) for i, label in enumerate(("good", "bad", "late"))]
        ids = [http.post("/v1/evaluations", json=entry).json()["evaluation_id"] for entry in entries]
        judge(ids[0])
        judge(ids[1], ended(Category.WRONG_VALUES, message="off"))
        return ids

    def test_lists(self, http: httpx.Client, three: list[str]) -> None:
        """Each filter narrows the list, the error names a wrong one, and a cursor continues after the page."""
        for wanted, found in FILTERS:
            page = http.get("/v1/evaluations", params=wanted).json()
            assert [line["evaluation_id"] for line in page["evaluations"]] == [three[i] for i in found], wanted
            assert page["cursor"] is None
        for wanted in NO_FILTERS:
            body = problem_of(http.get("/v1/evaluations", params=wanted), 422, "invalid_request")
            assert next(iter(wanted)) in body["detail"]
        first = http.get("/v1/evaluations", params={"limit": 2}).json()
        second = http.get("/v1/evaluations", params={"limit": 2, "cursor": first["cursor"]}).json()
        assert [line["evaluation_id"] for page in (first, second) for line in page["evaluations"]] == three[::-1]
        assert second["cursor"] is None

    def test_a_batch_and_the_leaderboard(self, http: httpx.Client, three: list[str]) -> None:
        """A batch with any name has its progress, and the leaderboard the fastest passed kernel."""
        batch = http.get("/v1/batches/tues/day").json()
        assert (batch["total"], batch["queued"], batch["running"], batch["done"]) == (3, 1, 0, 2)
        assert batch["categories"] == {"passed": 1, "wrong_values": 1}
        assert batch["blames"] == {"none": 1, "candidate": 1}
        assert batch["finished_at"] is None
        problem_of(http.get("/v1/batches/friday"), 404, "unknown_batch")
        problem_of(http.get("/v1/batches/friday/events"), 404, "unknown_batch")
        [best] = http.get("/v1/leaderboard").json()["best"]
        assert (best["kernel_label"], best["speedup"], best["device"]) == ("good", 2.0, "test device")
        assert http.get("/v1/leaderboard", params={"problem": "gelu"}).json() == {"best": []}
        assert len(http.get("/v1/leaderboard", params={"device": "TEST", "precision": "fp32"}).json()["best"]) == 1

    def test_files(self, http: httpx.Client, three: list[str], fields) -> None:
        """Sources are available at once, the verdict after its end, and no file as a type that browsers execute."""
        good, late = three[0], three[2]
        listed = http.get(f"/v1/evaluations/{good}/artifacts").json()["artifacts"]
        assert " ".join(file["name"] for file in listed) == "problem.py kernel.py verdict.json evidence.json log.txt"
        for file in listed:
            answer = http.get(file["href"])
            assert len(answer.content) == file["bytes"]
            assert answer.headers["content-type"].startswith(file["media_type"])
            assert answer.headers["x-content-type-options"] == "nosniff"
            assert answer.headers["content-disposition"].startswith("attachment")
        assert http.get(listed[1]["href"]).text == fields(0)["kernel"]
        assert http.get(listed[2]["href"]).json() == http.get(f"/v1/evaluations/{good}").json()["verdict"]
        assert http.get(listed[3]["href"]).json() == {"durations_s": {"check": 0.1}}
        assert len(http.get(f"/v1/evaluations/{late}/artifacts").json()["artifacts"]) == 2
        problem_of(http.get(f"/v1/evaluations/{late}/artifacts/verdict.json"), 404, "not_finished")
        problem_of(http.get(f"/v1/evaluations/{good}/artifacts/passwd"), 422, "invalid_request")
        problem_of(http.get(f"/v1/evaluations/{uuid4()}/artifacts"), 404, "unknown_evaluation")
        log = http.get(f"/v1/evaluations/{good}/log")
        assert (log.text, log.headers["content-type"]) == ("hello\n", "text/plain; charset=utf-8")
        problem_of(http.get(f"/v1/evaluations/{late}/log"), 404, "not_finished")

    def test_the_fleet(self, http: httpx.Client, three: list[str], worker_id: UUID, engine: Engine) -> None:
        """It lists lanes, workers, no GPUs, and the holder of a device that a slot waits for, up to a second old."""
        lanes = {"cpu": {"queued": 1, "running": 0, "workers": 1}}
        until(lambda: http.get("/v1/fleet").json()["lanes"] == lanes, what="the present state")
        fleet = http.get("/v1/fleet").json()
        assert [worker["id"] for worker in fleet["workers"]] == [str(worker_id)]
        assert fleet["gpus"] == []
        assert (fleet["probes"]["judged"], fleet["probes"]["pauses"]) == (0, [])
        assert evaluations.claim(engine, UUID(three[2]), worker_id=worker_id, lease_s=60) is not None
        holder = "process 812 (python -m workers.fleet)"
        workers.wait_for_device(engine, {worker_id: holder})
        [worker] = until(
            lambda: [w for w in http.get("/v1/fleet").json()["workers"] if w["waits_for"]], what="the present state"
        )
        assert (worker["busy_with"], worker["waits_for"]) == (three[2], holder)
        assert worker["waits_since"] >= worker["busy_since"]
        waiting = http.get(f"/v1/evaluations/{three[2]}").json()["waiting"]
        assert (waiting["why"], holder in waiting["message"]) == ("device", True)

    def test_categories(self, http: httpx.Client) -> None:
        """The answer is the whole table. Unknown paths and methods are problems."""
        rows = http.get("/v1/categories").json()["categories"]
        assert [row["category"] for row in rows] == list(Category)
        assert rows[0]["retried"] is False
        problem_of(http.get("/v2/evaluations"), 404, "not_found")
        problem_of(http.delete("/v1/evaluations"), 405, "method_not_allowed")


def events_of(lines: Any) -> list[dict[str, str]]:
    """Return the parsed server-sent events."""
    found: list[dict[str, str]] = []
    event: dict[str, str] = {}
    for line in lines:
        if line:
            name, _, value = line.partition(": ")
            event[name] = value
        elif event:
            found.append(event)
            event = {}
    return found


class TestEvents:
    def test_to_the_end_and_again(self, http: httpx.Client, judge, fields) -> None:
        """The stream sends each verdict once, progress and the end, then none again. Foreign stream ids are named."""
        entries = [fields(i, batch="b") for i in range(3)]
        accepted = http.post("/v1/evaluations/batch", json={"entries": entries}).json()["evaluations"]
        ids = [entry["evaluation_id"] for entry in accepted]
        judge(ids[0])
        open_ = ids[1:]

        def judging_the_rest(lines: Iterator[str]) -> Iterator[str]:
            for line in lines:
                yield line
                while line == "event: progress" and open_:
                    judge(open_.pop(0))

        with http.stream("GET", "/v1/batches/b/events") as stream:
            assert stream.headers["content-type"].startswith("text/event-stream")
            events = events_of(judging_the_rest(stream.iter_lines()))
        named = [event for event in events if "event" in event]
        verdicts = [json.loads(event["data"]) for event in named if event["event"] == "verdict"]
        assert [verdict["evaluation_id"] for verdict in verdicts] == ids
        progress = [json.loads(event["data"]) for event in named if event["event"] == "progress"]
        assert (progress[0]["done"], progress[-1]["done"]) == (1, 3)
        assert named[-1]["event"] == "end"
        last = {"Last-Event-ID": named[-1]["id"]}
        assert http.get("/v1/batches/b/events", headers=last).status_code == 204
        for last in ("x", "2026-01-01", "end-", "end-5", "0001-01-01T00:00:00+00:00", "end-0001-01-01T00:00:59+00:00"):
            problem_of(http.get("/v1/batches/b/events", headers={"Last-Event-ID": last}), 422, "invalid_request")

    def test_taken_up_again(self, http: httpx.Client, engine: Engine, judge, fields) -> None:
        """A resumed stream sends later events than the last one, but not much earlier ones."""
        entries = [fields(i, batch="b") for i in range(3)]
        accepted = http.post("/v1/evaluations/batch", json={"entries": entries}).json()["evaluations"]
        ids = [entry["evaluation_id"] for entry in accepted]
        for identity in ids:
            judge(identity)
        old = datetime(2026, 1, 1, tzinfo=UTC)
        with engine.begin() as connection:
            connection.execute(
                text("UPDATE verdicts SET finished_at = :old WHERE evaluation_id = :id"), {"old": old, "id": ids[0]}
            )
            last = connection.scalar(text("SELECT finished_at FROM verdicts WHERE evaluation_id = :id"), {"id": ids[1]})
        with http.stream("GET", "/v1/batches/b/events", headers={"Last-Event-ID": last.isoformat()}) as stream:
            events = events_of(stream.iter_lines())
        sent = [json.loads(event["data"])["evaluation_id"] for event in events if event.get("event") == "verdict"]
        assert ids[2] in sent
        assert ids[0] not in sent

    def test_an_endless_one(self, serve: Callable[..., Served], config: Config, worker_id: UUID, fields) -> None:
        """It closes after a limit without `end`, so that a revoked token cannot follow for ever."""
        with serve(config, app={"stream_s": 0.9}).client() as http:
            http.post("/v1/evaluations", json=fields(batch="b"))
            with http.stream("GET", "/v1/batches/b/events") as stream:
                seen = [event["event"] for event in events_of(stream.iter_lines()) if "event" in event]
        assert seen == ["progress"]


def test_the_server_answers_while_hundreds_wait(http: httpx.Client, judge: Callable[..., None], fields) -> None:
    """Waiting takes no thread: with 100 open waits all other requests are answered as usual."""
    identity = http.post("/v1/evaluations", json=fields()).json()["evaluation_id"]

    async def run() -> list[str]:
        async with httpx.AsyncClient(
            base_url=http.base_url, headers=http.headers, timeout=150, limits=httpx.Limits(max_connections=None)
        ) as many:
            path = f"/v1/evaluations/{identity}/wait"
            waits = [asyncio.create_task(many.get(path, params={"timeout": 120})) for _ in range(100)]
            for _ in range(20):
                assert (await many.get("/health")).status_code == 200
                assert (await many.get(f"/v1/evaluations/{identity}")).json()["state"] == "queued"
            assert not any(wait.done() for wait in waits)
            await asyncio.to_thread(judge, identity)
            return [(await wait).json()["verdict"]["category"] for wait in waits]

    assert asyncio.run(run()) == ["passed"] * 100


def test_services_that_are_away(serve, config: Config, engine: Engine, worker_id: UUID, server, fields) -> None:
    """Without Redis submissions are accepted. Without Postgres the answer is a 503 with Retry-After."""
    gone = config.model_copy(update={"redis_url": type(config.redis_url)("redis://127.0.0.1:1/0")})
    with serve(gone).client() as http:
        assert http.post("/v1/evaluations", json=fields()).status_code == 201
        name = engine.url.database
        server.execute(f'ALTER DATABASE "{name}" ALLOW_CONNECTIONS false')
        server.cut(config.require_database())
        try:
            answer = http.get("/v1/evaluations")
            problem_of(answer, 503, "database_unavailable")
            assert int(answer.headers["retry-after"]) > 0
        finally:
            server.execute(f'ALTER DATABASE "{name}" ALLOW_CONNECTIONS true')
        assert http.get("/v1/evaluations").status_code == 200
