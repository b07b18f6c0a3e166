"""Duels over HTTP, by clients, and on the page of their batch."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import httpx
from sqlalchemy import Engine, text

from kqueue import AsyncRemoteClient, RemoteClient
from kqueue.categories import Category
from kqueue.store import tokens
from tests.http.serving import problem_of
from tests.http.standin import Served
from tests.samples import ended, request_fields
from tests.store.steps import count
from tests.web.fixtures import *  # noqa: F403
from tests.web.reading import HOSTILE, shown, took

Judge = Callable[..., None]


class TestDuels:
    def test_concurrent_reads_submit_each_round_once_for_the_one_that_began_it(
        self, served: Served, engine: Engine, token, judge, fields
    ) -> None:
        """Readers without the right to submit only look. The key begins no second duel."""
        begins, reads, other = token("problems"), token("read"), token("submit")
        body = {"a": fields(1), "b": {"kernel": "class ModelNew: b = 1", "backend": "torch"}, "within": 0.05}
        with served.client(begins) as http:
            one, same = (http.post("/v1/duels", json=body, headers={"Idempotency-Key": "k"}) for _ in range(2))
            assert one.status_code == 201
            assert one.json() == same.json()
            path = f"/v1/duels/{one.json()['id']}"
            problem_of(http.post("/v1/duels", json=body | {"rounds": 1}), 422, "invalid_request")
            for changed in ({"rounds": 8}, {"within": 0.06}, {"a": fields(2)}, {"a": fields(2), "rounds": 8}):
                refused = http.post("/v1/duels", json=body | changed, headers={"Idempotency-Key": "k"})
                assert problem_of(refused, 422, "idempotency_conflict")["keys"] == ["k"]
            problem_of(http.get(path[:-1]), 422, "invalid_request")
            problem_of(http.get(f"/v1/duels/{'0' * 12}-40"), 404, "unknown_evaluation")
        assert count(engine, "evaluations") == 2
        self.judge_all(engine, judge)
        with served.client(reads) as http:
            assert http.get(path).json()["due"] == 9
        assert count(engine, "evaluations") == 2
        with served.client(other) as http, ThreadPoolExecutor(4) as pool:
            states = [answer.raise_for_status().json() for answer in pool.map(lambda _: http.get(path), range(4))]
        assert {(state["rounds"], state["due"]) for state in states} == {(1, 0)}
        assert count(engine, "evaluations") == 20
        with engine.connect() as connection:
            assert connection.scalar(text("SELECT count(DISTINCT producer) FROM evaluations")) == 1
            assert connection.scalar(text("SELECT bool_or(reuse) FROM evaluations")) is False
        self.judge_all(engine, judge)
        with served.client(reads) as http:
            assert (end := http.get(path).json())["reason"] == "equal"
        assert (end["rounds"], end["ratio"], end["most"]) == (10, 1.0, 40)
        with served.client(begins) as http:
            assert http.post("/v1/duels", json=body, headers={"Idempotency-Key": "k"}).json() == end

    @staticmethod
    def judge_all(engine: Engine, judge: Callable[..., None]) -> None:
        with engine.connect() as connection:
            for identity in connection.scalars(text("SELECT id FROM evaluations WHERE state = 'queued'")).all():
                judge(identity)


def test_clients(served: Served, judging, fields) -> None:
    """Both clients and the server's route give the same state of a duel."""
    a, b = fields(1, kernel_label="a"), fields(2, kernel_label="b")
    heard: list[int] = []
    with RemoteClient(served.url, token=served.admin) as client:
        end = client.duel(a, b, rounds=7, report=lambda now: heard.append(now.rounds))
    assert (end.reason, end.rounds, end.a_label, end.b_label) == ("rounds", 7, "a", "b")
    with served.client() as http:
        assert http.get(f"/v1/duels/{end.id}").json() == end.model_dump(mode="json")

    async def waited() -> None:
        async with AsyncRemoteClient(served.url, token=served.admin) as kq:
            assert (await kq.duel(a, b, rounds=7, report=lambda now: heard.append(now.rounds))).reason == "rounds"

    asyncio.run(waited())
    assert heard == [number // 2 for number in range(1, 15)] * 2


def test_a_duel_goes_on_within_its_first_limits(served: Served, token, engine: Engine, judge) -> None:
    """Later rounds have the settings of the first, also if the limits were lowered meanwhile."""
    with served.client(token(limits={"timing.calls": 50})) as limited:
        sides = {"a": request_fields(0), "b": {"kernel": "class ModelNew: b = 1", "backend": "torch"}}
        duel = limited.post("/v1/duels", json=sides).raise_for_status().json()
        batch = {"batch": f"duel-{duel['id']}"}
        before = limited.get("/v1/evaluations", params=batch).json()["evaluations"]
        for one in before:
            judge(one["evaluation_id"])
        tokens.set_limits(engine, "a problems one", {"timing.calls": 5})
        limited.get(f"/v1/duels/{duel['id']}").raise_for_status()
        after = limited.get("/v1/evaluations", params=batch).json()["evaluations"]
        assert len(after) > len(before) > 0
        assert {
            limited.get(f"/v1/evaluations/{one['evaluation_id']}").json()["settings"]["timing"]["calls"]
            for one in after
        } == {50}


def test_a_duel_has_its_state(served: Served, browser: httpx.Client, judge: Judge) -> None:
    """The page of a duel's batch names the winner and which kernel is which."""
    b = {"kernel": "class ModelNew: b", "backend": "torch", "kernel_label": f"b {HOSTILE}"}
    with served.client() as api:
        begun = api.post("/v1/duels", json={"a": request_fields(kernel_label="first one"), "b": b}).raise_for_status()
        batch = f"duel-{begun.json()['id']}"
        for row in api.get("/v1/evaluations", params={"batch": batch}).json()["evaluations"]:
            judge(row["evaluation_id"], ended(Category.CRASHED) if row["kernel_label"] == "first one" else took(0.5))
    page = shown(browser, f"/batches/{batch}")
    assert "B wins, because A ended as crashed" in page
    assert "first one and b " in page
