"""The drop-in for `simple_eval_server` as its clients use it, with a stand-in for the worker."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from uuid import UUID, uuid4

import httpx
import pytest
from sqlalchemy import Engine, text

from kqueue.categories import Category
from kqueue.features.eval_server.server import EvalRequest
from tests.samples import ended
from tests.store.steps import change
from tests.waiting import until

#: A result's fields in KernelBench.
RESULT = {"compiled": bool, "correctness": bool, "metadata": dict, "runtime": float, "runtime_stats": dict}
RESULT |= {"ref_runtime": float, "ref_runtime_stats": dict}


def body(**changes: Any) -> dict[str, Any]:
    """Return all fields that clients send, of a kernel that no other test has."""
    body: dict[str, Any] = {"original_model_src": "p", "custom_model_src": uuid4().hex, "seed_num": 42}
    body |= {"num_correct_trials": 5, "num_perf_trials": 100, "verbose": False, "measure_performance": True}
    return body | {"preferred_device": None, "backend": "torch"} | changes


@pytest.fixture
def ask(http: httpx.Client) -> Callable[..., httpx.Response]:
    """Post a request, and return the answer."""
    return lambda **changes: http.post("/eval", json=body(**changes))


@pytest.fixture
def asked(engine: Engine, ask: Callable[..., httpx.Response]) -> Iterator[Callable[..., Any]]:
    """Post a request, wait for its evaluation, and return its id and the pending answer."""
    newest = text("SELECT id FROM evaluations WHERE state = 'queued' AND NOT id = ANY(:known) LIMIT 1")
    known: list[UUID] = []

    def newcomer() -> UUID | None:
        with engine.connect() as connection:
            return connection.scalar(newest, {"known": known})

    with ThreadPoolExecutor(4) as pool:

        def one(**changes: Any) -> Any:
            answer = pool.submit(ask, **changes)
            known.append(until(newcomer, what="the evaluation"))
            return known[-1], answer

        yield one


def test_what_the_kernel_or_the_problem_did_is_a_200(ask, judging: None) -> None:
    """All fields of KernelBench are present with their types. The time of an untimed kernel is -1.0."""
    result = ask().raise_for_status().json()
    assert {name: type(value) for name, value in result.items()} == RESULT
    assert (result["compiled"], result["correctness"], result["runtime"], result["ref_runtime"]) == (True, True, 0.5, 1)
    assert (result["metadata"]["category"], result["metadata"]["blame"]) == ("passed", "none")
    UUID(result["metadata"]["evaluation_id"])


@pytest.mark.parametrize("category", [Category.WRONG_VALUES, Category.JUDGE_ERROR, Category.CANCELLED])
def test_how_an_evaluation_ends(asked, judge, engine: Engine, category: Category) -> None:
    """A kernel's failure is a 200, a cancellation a 409, and a fleet's failure a 503 that is judged again on retry."""
    source = uuid4().hex
    for _ in range(2 if category is Category.JUDGE_ERROR else 1):
        identity, waiting = asked(custom_model_src=source)
        change(engine, "UPDATE evaluations SET settings = jsonb_set(settings, '{max_attempts}', '1')")
        judge(identity, ended(category))
        answer, found = waiting.result(60), waiting.result().json()
        if category is Category.JUDGE_ERROR:
            assert (answer.status_code, found["code"], found["evaluation_ids"]) == (503, category, [str(identity)])
            assert int(answer.headers["Retry-After"]) > 0
        elif category is Category.CANCELLED:
            assert (answer.status_code, found["code"]) == (409, "cancelled")
        else:
            assert (answer.status_code, found["metadata"]["blame"]) == (200, category.blame)
            assert (found["metadata"]["category"], found["compiled"], found["correctness"]) == (category, True, False)
            assert (found["runtime"], found["ref_runtime"]) == (-1.0, -1.0)


def test_equal_requests_are_one_evaluation(ask, asked, judge, engine: Engine) -> None:
    """Equal requests at the same time or within a minute of the answer share an evaluation, and the result says so."""
    source = uuid4().hex
    identity, first = asked(custom_model_src=source)
    with ThreadPoolExecutor(8) as pool:
        others = [pool.submit(ask, custom_model_src=source) for _ in range(8)]
        judge(identity)
        answers = [first.result(60), *(one.result(60) for one in others), ask(custom_model_src=source)]
    found = [answer.raise_for_status().json()["metadata"] for answer in answers]
    assert {one["evaluation_id"] for one in found} == {str(identity)}
    assert [one["joined"] for one in found] == [False] + [True] * 9
    change(engine, "UPDATE verdicts SET finished_at = finished_at - interval '61 s'")
    later, waiting = asked(custom_model_src=source)
    judge(later)
    assert (later != identity, waiting.result(60).json()["metadata"]["joined"]) == (True, False)


def test_sessions_share_no_evaluation(served, token, judging: None) -> None:
    """Equal requests of two agents' sessions with one token are two evaluations."""
    sent, headers, found = body(), {"Authorization": f"Bearer {token(owner='ada')}"}, set[str]()
    for session in ("one", "two"):
        with httpx.Client(base_url=served.url, headers=headers | {"Kqueue-Session": session}, timeout=60) as http:
            found.add(http.post("/eval", json=sent).raise_for_status().json()["metadata"]["evaluation_id"])
    assert len(found) == 2


def test_the_pages_of_a_fleet_without_gpus(http: httpx.Client, asked, judge) -> None:
    """They report no GPUs in their usual forms, and the queue's length. HEAD and a trailing slash work."""
    waits, answer = asked()

    def seen() -> dict[str, Any] | None:
        health = http.get("/health").raise_for_status().json()
        return health if health["queued"] == 1 else None

    health = until(seen, what="the present state")
    assert (health["status"], health["queue"]["cpu"]["queued"], health["running"]) == ("healthy", 1, 0)
    assert [worker["state"] for worker in health["workers"]] == ["idle"]
    assert health["supported_backends"] == ["cpp", "torch", "triton"]
    assert (health["cuda_available"], health["total_gpu_devices"], health["devices"]) == (False, 0, [])
    judge(waits)
    answer.result(60)
    for path in ("/health", "/health/"):
        head = http.head(path)
        assert (head.status_code, head.content) == (200, b"")
        assert http.get(path).json()["status"] == "healthy"
    found = {path: http.get(path).raise_for_status().json() for path in ("/", "/gpu_status", "/backend_info")}
    assert found["/"]["num_gpus"] == 0
    assert (bool(found["/gpu_status"]["error"]), found["/gpu_status"]["devices"]) == (True, [])
    assert found["/backend_info"]["default_backend"] == "cuda"
    assert set(found["/backend_info"]["backend_descriptions"]) == set(found["/backend_info"]["supported_backends"])
    assert http.get("/fault_statistics").json()["per_device_faults"] == {}


def test_unknown_fields_change_nothing() -> None:
    """An unknown field is ignored, even if it has the name of an argument of another form."""
    unknown = {"problem": "q", "kernel": "other", "timeout_s": 1}
    plain = body(custom_model_src="k")
    assert EvalRequest(**plain, **unknown).as_request() == EvalRequest(**plain).as_request()
