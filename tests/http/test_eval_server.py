"""The drop-in for `simple_eval_server`, as its clients use it; a stand-in judges."""

from __future__ import annotations

import json
import socket
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from uuid import UUID, uuid4

import httpx
import pytest
from sqlalchemy import Engine, text

from kqueue.categories import Category
from tests.http.standin import Served
from tests.samples import ended
from tests.waiting import until

#: A result's fields, as KernelBench has them.
RESULT = {
    "compiled": bool,
    "correctness": bool,
    "metadata": dict,
    "runtime": float,
    "runtime_stats": dict,
    "ref_runtime": float,
    "ref_runtime_stats": dict,
}
JSON = {"Content-Type": "application/json"}


def body(**changes: Any) -> dict[str, Any]:
    """All fields, as clients send them, of a kernel that no other test has."""
    return {
        "original_model_src": "p",
        "custom_model_src": uuid4().hex,
        "seed_num": 42,
        "num_correct_trials": 5,
        "num_perf_trials": 100,
        "verbose": False,
        "measure_performance": True,
        "preferred_device": None,
        "backend": "torch",
    } | changes


@pytest.fixture
def ask(http: httpx.Client) -> Callable[..., httpx.Response]:
    """Post a request; the answer."""
    return lambda **changes: http.post("/eval", json=body(**changes))


@pytest.fixture
def asked(engine: Engine, ask: Callable[..., httpx.Response]) -> Iterator[Callable[..., Any]]:
    """Post a request, and wait until it is an evaluation; its id and the answer that comes."""
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


def count(engine: Engine) -> int:
    with engine.connect() as connection:
        return connection.scalar(text("SELECT count(*) FROM evaluations")) or 0


def test_what_the_kernel_or_the_problem_did_is_a_200(ask, judging: None) -> None:
    """All of KernelBench's fields are there, of their types, and of a kernel that was not timed -1.0 and nothing."""
    result = ask().raise_for_status().json()
    assert {name: type(value) for name, value in result.items()} == RESULT
    assert (result["compiled"], result["correctness"], result["runtime"], result["ref_runtime"]) == (True, True, 0.5, 1)
    assert (result["metadata"]["category"], result["metadata"]["blame"]) == ("passed", "none")
    UUID(result["metadata"]["evaluation_id"])


@pytest.mark.parametrize(
    ("category", "status", "compiled"),
    [
        (Category.WRONG_VALUES, 200, True),
        pytest.param(Category.REFERENCE_ERROR, 200, False, marks=pytest.mark.nightly),
        pytest.param(Category.REFERENCE_TIMEOUT, 200, False, marks=pytest.mark.nightly),
        (Category.JUDGE_ERROR, 503, None),
        pytest.param(Category.CANCELLED, 409, None, marks=pytest.mark.nightly),
    ],
)
def test_how_an_evaluation_ends(asked, judge, engine: Engine, category: Category, status: int, compiled: Any) -> None:
    """Nothing of a kernel's own is an error of the server; what the fleet did is a 503, and is judged again.

    A cancelled one, which says nothing of the kernel, is a 409.
    """
    source = uuid4().hex
    for _ in range(2 if status == 503 else 1):
        identity, waiting = asked(custom_model_src=source)
        with engine.begin() as connection:
            connection.execute(text("UPDATE evaluations SET settings = jsonb_set(settings, '{max_attempts}', '1')"))
        judge(identity, ended(category))
        answer, found = waiting.result(60), waiting.result().json()
        assert answer.status_code == status
        if status == 503:
            assert (int(answer.headers["Retry-After"]) > 0, found["code"]) == (True, "judge_error")
            assert found["evaluation_ids"] == [str(identity)]
        elif status == 409:
            assert found["code"] == "cancelled"
        else:
            assert (found["metadata"]["category"], found["metadata"]["blame"]) == (category, category.blame)
            assert (found["compiled"], found["correctness"]) == (compiled, False)
            assert (found["runtime"], found["ref_runtime"]) == (-1.0, -1.0)


def test_equal_requests_are_one_evaluation(ask, asked, judge, engine: Engine) -> None:
    """At the same moment, and for a minute after its answer; the result says which was there before."""
    source = uuid4().hex
    identity, first = asked(custom_model_src=source)
    with ThreadPoolExecutor(8) as pool:
        others = [pool.submit(ask, custom_model_src=source) for _ in range(8)]
        judge(identity)
        answers = [first.result(60), *(one.result(60) for one in others), ask(custom_model_src=source)]
    found = [answer.raise_for_status().json()["metadata"] for answer in answers]
    assert {one["evaluation_id"] for one in found} == {str(identity)}
    assert [one["joined"] for one in found] == [False] + [True] * 9
    with engine.begin() as connection:
        connection.execute(text("UPDATE verdicts SET finished_at = finished_at - interval '61 s'"))
    later, waiting = asked(custom_model_src=source)
    judge(later)
    assert (later != identity, waiting.result(60).json()["metadata"]["joined"]) == (True, False)


def test_the_pages_of_a_fleet_without_gpus(http: httpx.Client, asked, judge) -> None:
    """They say so, in their usual forms, and how many wait; probes may ask with HEAD, and with a slash at the end."""
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


@pytest.mark.nightly
class TestMore:
    def test_a_key_decides_where_it_is_given(self, http: httpx.Client, ask, judging: None) -> None:
        """The same key is the same evaluation, another key another one; for another kernel or setting it is refused.

        Without a key, another setting is another evaluation.
        """
        source = uuid4().hex
        changes = ({"seed_num": 43}, {"num_correct_trials": 2}, {"num_perf_trials": 7})
        answers = [ask(custom_model_src=source, **change) for change in ({}, *changes)]
        assert len({answer.json()["metadata"]["evaluation_id"] for answer in answers}) == 4

        def post(key: str, **change: Any) -> httpx.Response:
            return http.post("/eval", json=body(custom_model_src=source) | change, headers={"Idempotency-Key": key})

        key = uuid4().hex
        same = {post(key).json()["metadata"]["evaluation_id"] for _ in range(2)}
        assert len(same) == 1
        assert post(uuid4().hex).json()["metadata"]["evaluation_id"] not in same
        for change in ({"custom_model_src": "other"}, *changes):
            refused = post(key, **change)
            assert (refused.status_code, refused.json()["code"]) == (409, "idempotency_conflict"), change
            assert f"'{key}' was used for another problem, kernel or lane" in refused.json()["detail"]

    def test_a_client_that_goes_away_ends_its_wait_alone(self, served, ask, asked, judge, engine, caplog) -> None:
        """The evaluation goes on, the server has nothing to complain of, and who comes back gets the answer."""
        given = body()
        content = json.dumps(given).encode()
        head = (
            f"POST /eval HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {served.admin}\r\nContent-Length: {len(content)}"
        )
        with socket.create_connection(("127.0.0.1", served.port)) as connection:
            connection.sendall(f"{head}\r\n\r\n".encode() + content)
            until(lambda: count(engine) == 1, what="the evaluation")
        with engine.connect() as connection:
            identity = connection.scalar(text("SELECT id FROM evaluations"))
        judge(identity)
        assert ask(**given).json()["metadata"]["evaluation_id"] == str(identity)
        assert not [record for record in caplog.records if record.exc_info], caplog.text

    def test_bodies(self, served: Served, http: httpx.Client, ask, judging: None) -> None:
        """JSON without a type is understood, unknown fields are named; all else is refused with what is wrong."""
        answer = ask(num_correct_trails=1, build_dir="/x").raise_for_status()
        assert answer.json()["metadata"]["ignored_fields"] == ["build_dir", "num_correct_trails"]
        request = http.build_request("POST", "/eval", content=json.dumps(body()))
        assert "content-type" not in request.headers
        assert http.send(request).json()["correctness"] is True
        for kind in ("application/x-www-form-urlencoded", "text/plain"):
            for path in ("/eval", "/evaluate"):
                answer = http.post(path, content="{}", headers={"Content-Type": kind})
                assert answer.status_code == 415
                assert "Content-Type: application/json" in answer.json()["detail"]
        assert http.post("/eval", content=b"{", headers=JSON).status_code == 400
        missing = http.post("/eval", json={"custom_model_src": "x"})
        assert (missing.status_code, "original_model_src" in missing.json()["detail"]) == (422, True)
        with socket.create_connection(("127.0.0.1", served.port)) as connection:
            connection.sendall(b"POST /eval HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 99999999999\r\n\r\n")
            assert connection.recv(64).startswith(b"HTTP/1.1 413"), "before it is read"
