"""The job form: accepted, followed and listed, by clients that know nothing of evaluations; a stand-in judges."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest
from sqlalchemy import Engine, text

from kqueue.categories import Category
from tests.http.serving import Served, patient, problem_of
from tests.http.standin import worker_that_passes_all
from tests.samples import ended
from tests.waiting import until

pytestmark = pytest.mark.timeout(300)


def job_body(number: int = 0, **changes: Any) -> dict[str, Any]:
    """A request; another ``number`` is another sample."""
    body = {
        "problem_id": 19,
        "sample_id": number,
        "level": 1,
        "custom_cuda": f"class ModelNew: sample = {number}",
        "ref_arch_src": "class Model: ...",
        "backend": "torch",
    }
    return body | changes


def test_a_job_from_beginning_to_end(http: httpx.Client, judge: Callable[..., None], engine: Engine) -> None:
    """Its id is the evaluation's, its result that of `/eval`; moments are in order. Unknown fields are passed over."""
    accepted = http.post("/evaluate", json=job_body(timeout=60, build_dir="/x", device="cuda:0")).json()
    assert accepted["status"] == "queued"
    path = f"/job/{accepted['job_id']}"
    queued = http.get(path).json()
    assert (queued["status"], queued["result"], queued["error"], queued["device"]) == ("queued", None, None, None)
    judge(accepted["job_id"])
    job = http.get(path).json()
    known = (accepted["job_id"], "completed", None, "cpu")
    assert (job["job_id"], job["status"], job["error"], job["device"]) == known
    assert (job["result"]["compiled"], job["result"]["correctness"]) == (True, True)
    assert job["result"]["metadata"]["evaluation_id"] == accepted["job_id"]
    assert job["queued_at"] <= job["started_at"] <= job["completed_at"]
    assert job["execution_time"] == pytest.approx(job["completed_at"] - job["started_at"])
    with engine.connect() as connection:
        row = connection.execute(text("SELECT problem_label, kernel_label, batch, settings FROM evaluations")).one()
    assert (row.problem_label, row.kernel_label, row.batch) == ("level_1_problem_19", "sample_0", "jobs")
    assert max(row.settings["deadlines"].values()) == 60


@pytest.mark.parametrize(
    ("category", "told"),
    [
        (Category.WRONG_VALUES, "completed"),
        pytest.param(Category.REFERENCE_ERROR, "completed", marks=pytest.mark.nightly),
        pytest.param(Category.EXPIRED, "failed", marks=pytest.mark.nightly),
    ],
)
def test_how_a_job_ends(http: httpx.Client, judge: Callable[..., None], category: Category, told: str) -> None:
    """What the kernel or the problem did is a result; what says nothing of them is an error, and none."""
    job_id = http.post("/evaluate", json=job_body()).json()["job_id"]
    judge(job_id, ended(category, message="so it went"))
    job = http.get(f"/job/{job_id}").json()
    assert job["status"] == told
    if told == "completed":
        assert job["result"]["correctness"] is False
        assert job["result"]["metadata"]["category"] == category
        # Asked for again within a minute it is the same job.
        answer = http.post("/evaluate_sync", json=job_body())
        assert (answer.status_code, answer.json()) == (200, job)
    else:
        assert (job["result"], job["error"]) == (None, f"{category}: so it went")


def seed_of(engine: Engine, evaluation_id: str) -> int:
    """The seed of an evaluation."""
    with engine.connect() as connection:
        found = text("SELECT settings -> 'seed' FROM evaluations WHERE id = :id")
        return connection.scalars(found, {"id": evaluation_id}).one()


@pytest.mark.nightly
class TestMore:
    def test_a_cancelled_job(self, http: httpx.Client) -> None:
        """It failed; who waits for it is told 409."""
        with ThreadPoolExecutor(1) as pool:
            waiting = pool.submit(http.post, "/evaluate_sync", json=job_body())
            active = lambda: http.get("/jobs").json()["active_jobs"]  # noqa: E731
            until(active, what="the job")
            [line] = active()
            assert http.post(f"/v1/evaluations/{line['job_id']}/cancel").json()["cancelled"] is True
            problem_of(waiting.result(60), 409, "cancelled")
        assert http.get(f"/job/{line['job_id']}").json()["status"] == "failed"

    def test_lists(self, http: httpx.Client, judge: Callable[..., None], fields: Callable[..., dict[str, Any]]) -> None:
        """Jobs with and without an answer, by the names that they were given; no other evaluations."""
        names = [(19, 0), ("p-2.1_x", "best")]
        ids = [
            http.post("/evaluate", json=job_body(n, problem_id=problem, sample_id=sample)).json()["job_id"]
            for n, (problem, sample) in enumerate(names)
        ]
        http.post("/v1/evaluations", json=fields())
        judge(ids[0])
        listed = http.get("/jobs").json()
        [done], [active] = listed["completed_jobs"], listed["active_jobs"]
        assert [(line["job_id"], line["problem_id"], line["sample_id"]) for line in (done, active)] == [
            (identity, problem, sample) for identity, (problem, sample) in zip(ids, names, strict=True)
        ]
        assert (done["status"], active["status"]) == ("completed", "queued")
        counts = {"queued_jobs": 2, "active_jobs": 2, "completed_jobs": 1, "available_devices": 1}
        until(lambda: http.get("/status").json()["queue_info"] == counts, what="the present state")
        status = http.get("/status").json()
        assert (status["server_status"], status["device_status"]) == ("running", {"cpu": "idle"})

    def test_the_same_job_again(self, http: httpx.Client, engine: Engine) -> None:
        """Equal requests are one job; another sample, or another key, is another."""
        ask = lambda body, **headers: http.post("/evaluate", json=body, headers=headers).json()["job_id"]  # noqa: E731
        same = {ask(job_body()) for _ in range(3)}
        assert len(same) == 1
        key = {"Idempotency-Key": "again"}
        others = {ask(job_body(1)), ask(job_body(), **key), ask(job_body(), **key)}
        assert len(others - same) == 2
        with engine.connect() as connection:
            assert connection.scalar(text("SELECT count(*) FROM evaluations")) == 3
        for change in (
            {"num_correct_trials": 2},
            {"timeout": 7},
            {"seed": 1},
            {"custom_cuda": "class ModelNew: o = 1"},
        ):
            problem_of(http.post("/evaluate", json=job_body() | change, headers=key), 409, "idempotency_conflict")
        # What decides nothing of a verdict is no conflict.
        assert http.post("/evaluate", json=job_body() | {"sample_id": 7}, headers=key).json()["job_id"] in others

    @pytest.mark.parametrize("name", ["seed_num", "seed"])
    def test_a_seed_under_either_name(self, http: httpx.Client, engine: Engine, judging: None, name: str) -> None:
        """It is the evaluation's, by both forms that KernelBench's clients use."""
        job_id = http.post("/evaluate", json=job_body(**{name: 7})).raise_for_status().json()["job_id"]
        body = {"original_model_src": "p", "custom_model_src": "k", "backend": "torch", name: 8}
        other = http.post("/eval", json=body).raise_for_status().json()["metadata"]["evaluation_id"]
        assert [seed_of(engine, identity) for identity in (job_id, other)] == [7, 8]

    def test_a_killed_server_while_a_hundred_wait(self, config, engine, worker_id, tmp_path) -> None:
        """Each client posts again and gets its answer; none is evaluated twice."""

        def accepted() -> int:
            with engine.connect() as connection:
                return connection.scalar(text("SELECT count(*) FROM evaluations")) or 0

        async def through_a_restart(served: Served) -> list[httpx.Response]:
            limits = httpx.Limits(max_connections=None)
            async with httpx.AsyncClient(base_url=served.url, timeout=200, limits=limits) as http:
                waiting = [
                    asyncio.create_task(patient(http, "/evaluate_sync", job_body(sample))) for sample in range(100)
                ]
                while await asyncio.to_thread(accepted) < 100:
                    await asyncio.sleep(0.1)
                await asyncio.to_thread(served.stop, signal.SIGKILL)
                await asyncio.to_thread(served.start)
                assert not any(task.done() for task in waiting)
                with worker_that_passes_all(engine, worker_id):
                    return await asyncio.gather(*waiting)

        open_to_all = config.model_copy(update={"http_tokens": "trust-local-users"})
        with Served(open_to_all, tmp_path / "log") as served:
            answers = asyncio.run(through_a_restart(served))
        assert {(answer.status_code, answer.json()["status"]) for answer in answers} == {(200, "completed")}
        assert len({answer.json()["job_id"] for answer in answers}) == accepted() == 100
        with engine.connect() as connection:
            assert connection.scalar(text("SELECT count(*) FROM attempts")) == 100
