"""Over HTTP too, an evaluation with a judged equal has that verdict and is marked as reused."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from uuid import UUID, uuid4

import httpx
import pytest
from sqlalchemy import Engine, text

from kqueue import kernelbench
from kqueue.contract import Request
from kqueue.store import evaluations
from tests.samples import passed
from tests.waiting import until

FACTS = {"device": "test device", "torch": "2.13", "python": "3.11", "host": "here"}
SOURCES = ("class Model: ...", "class ModelNew: ...")


@pytest.fixture
def judged(engine: Engine, worker_id: UUID) -> Callable[[Request | UUID], UUID]:
    """Return a function that judges a request or an evaluation like a worker with reusable verdicts."""

    def one(what: Request | UUID) -> UUID:
        identity = evaluations.submit(engine, [what])[0].evaluation_id if isinstance(what, Request) else what
        claimed = evaluations.claim(engine, identity, worker_id=worker_id, lease_s=3600)
        assert claimed is not None
        evaluations.set_environment(engine, claimed.attempt_id, FACTS, conditions="known")
        evaluations.finish(engine, identity, claimed.number, passed(), written_by="judge", retry_delay_s=0)
        return identity

    return one


def queued(engine: Engine) -> list[Any]:
    """Return the queued evaluations."""
    with engine.connect() as connection:
        return list(connection.execute(text("SELECT * FROM evaluations WHERE state = 'queued'")))


def test_the_native_api_says_whose_verdict_it_is(http: httpx.Client, judged, fields) -> None:
    """Page, wait, list and file of an accepted evaluation name the origin of its verdict."""
    first = str(judged(Request(**fields(reuse=False))))
    identity = http.post("/v1/evaluations", json=fields(batch="b")).json()["evaluation_id"]
    shown = http.get(f"/v1/evaluations/{identity}").json()
    assert (shown["state"], shown["attempts"], shown["verdict"]["reused_from"]) == ("done", [], first)
    original = http.get(f"/v1/evaluations/{first}").json()["verdict"]
    assert (original["reused_from"], original["judged_at"]) == (None, None)
    assert shown["verdict"]["judged_at"] == original["finished_at"]
    assert shown["verdict"]["runtime_ms"] == original["runtime_ms"]
    assert http.get(f"/v1/evaluations/{identity}/wait", params={"timeout": 60}).json()["verdict"] == shown["verdict"]
    assert http.get(f"/v1/evaluations/{identity}/artifacts/verdict.json").json() == shown["verdict"]
    [listed] = http.get("/v1/evaluations", params={"batch": "b"}).json()["evaluations"]
    assert (listed["reused_from"], listed["device"]) == (first, "test device")
    assert [best["evaluation_id"] for best in http.get("/v1/leaderboard").json()["best"]] == [first]
    assert first in http.get("/v1/batches/b/events").text


def test_a_drop_in_reuses_and_another_key_does_not(http: httpx.Client, judged, engine: Engine) -> None:
    """`/eval` answers with any token's equal evaluation, but an explicit key has it judged."""
    first = judged(kernelbench.request_of(*SOURCES, backend="torch", lane="cpu"))
    body = dict(zip(("original_model_src", "custom_model_src"), SOURCES, strict=True)) | {"backend": "torch"}
    metadata = http.post("/eval", json=body).raise_for_status().json()["metadata"]
    assert (metadata["reused_from"], metadata["device_id"]) == (str(first), None)
    with ThreadPoolExecutor(1) as pool:
        fresh = pool.submit(http.post, "/eval", json=body, headers={"Idempotency-Key": uuid4().hex})
        until(lambda: queued(engine), what="the evaluation")
        mine = judged(queued(engine)[0].id)
        metadata = fresh.result(60).json()["metadata"]
    assert (metadata["evaluation_id"], metadata["reused_from"]) == (str(mine), None)


def test_a_refreshed_task_is_judged(http: httpx.Client, judged, engine: Engine) -> None:
    """KernelGYM's `force_refresh` judges a task again, whichever token's evaluation has its result."""
    body = {"task_id": "t", "reference_code": SOURCES[0], "kernel_code": SOURCES[1], "backend": "torch"}

    def ask(**more: Any) -> dict[str, Any]:
        with ThreadPoolExecutor(1) as pool:
            waiting = pool.submit(http.post, "/evaluate", json=body | more)
            until(lambda: queued(engine) or waiting.done(), what="the task")
            for row in queued(engine):
                judged(row.id)
            return waiting.result(60).raise_for_status().json()["metadata"]

    first = ask()["evaluation_id"]
    other = ask(task_id="other")
    assert (other["evaluation_id"] == first, other["reused_from"]) == (False, first)
    assert ask(force_refresh=True)["reused_from"] is None
