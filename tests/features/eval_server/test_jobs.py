"""The job form: accepted, followed and listed by clients without evaluations, with a stand-in for the worker."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import httpx
import pytest
from sqlalchemy import Engine, text

from kqueue.categories import Category
from tests.samples import ended

pytestmark = pytest.mark.timeout(300)


def job_body(number: int = 0, **changes: Any) -> dict[str, Any]:
    """Return a request. Each ``number`` is a different sample."""
    body = {"problem_id": 19, "sample_id": number, "level": 1, "custom_cuda": f"class ModelNew: sample = {number}"}
    body |= {"ref_arch_src": "class Model: ...", "backend": "torch"}
    return body | changes


def test_a_job_from_beginning_to_end(http: httpx.Client, judge: Callable[..., None], engine: Engine) -> None:
    """A job has the evaluation's id, the result of `/eval` and ordered times, and unknown fields are ignored."""
    accepted = http.post("/evaluate", json=job_body(timeout=60, build_dir="/x", device="cuda:0")).json()
    assert accepted["status"] == "queued"
    path = f"/job/{accepted['job_id']}"
    queued = http.get(path).json()
    assert (queued["status"], queued["result"], queued["error"], queued["device"]) == ("queued", None, None, None)
    judge(accepted["job_id"])
    job = http.get(path).json()
    assert (job["job_id"], job["status"], job["error"], job["device"]) == (accepted["job_id"], "completed", None, "cpu")
    assert (job["result"]["compiled"], job["result"]["correctness"]) == (True, True)
    assert job["result"]["metadata"]["evaluation_id"] == accepted["job_id"]
    assert job["queued_at"] <= job["started_at"] <= job["completed_at"]
    assert job["execution_time"] == pytest.approx(job["completed_at"] - job["started_at"])
    with engine.connect() as connection:
        row = connection.execute(text("SELECT problem_label, kernel_label, batch, settings FROM evaluations")).one()
    assert (row.problem_label, row.kernel_label, row.batch) == ("level_1_problem_19", "sample_0", "jobs")
    assert max(row.settings["deadlines"].values()) == 60


def test_how_a_job_ends(http: httpx.Client, judge: Callable[..., None]) -> None:
    """Failures of the kernel or the problem are results, all other failures errors, and unknown jobs a 404."""
    ends = {Category.WRONG_VALUES: "completed", Category.REFERENCE_ERROR: "completed", Category.EXPIRED: "failed"}
    for number, (category, told) in enumerate(ends.items()):
        job_id = http.post("/evaluate", json=job_body(number)).json()["job_id"]
        judge(job_id, ended(category, message="so it went"))
        job = http.get(f"/job/{job_id}").json()
        assert job["status"] == told
        if told == "completed":
            assert (job["result"]["correctness"], job["result"]["metadata"]["category"]) == (False, category)
            # A repeated request within a minute returns the same job.
            answer = http.post("/evaluate_sync", json=job_body(number))
            assert (answer.status_code, answer.json()) == (200, job)
        else:
            assert (job["result"], job["error"]) == (None, f"{category}: so it went")
    assert {http.get(path).status_code for path in ("/job/nonsense", "/job/%00", "/results/none")} == {404}
