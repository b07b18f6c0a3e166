"""The drop-in for `simple_eval_server`, by clients as its users write them, before a real fleet.

The judge does what it is told (tests/fleet/judges.py), but for the last tests: there it is the real one.
"""

from __future__ import annotations

import asyncio
import json
import signal
import socket
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from uuid import UUID, uuid4

import httpx
import pytest

from kqueue import broker
from kqueue.categories import Category
from kqueue.contract import MAX_SOURCE_BYTES
from kqueue.store import evaluations, tokens
from kqueue.store.tokens import Scope
from tests.fleet.told import Fleet, Services
from tests.http.serving import Served, patient
from tests.waiting import until

pytestmark = pytest.mark.timeout(600)

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


def request_body(kernel: str) -> dict[str, Any]:
    """All fields, as clients send them."""
    return {
        "original_model_src": "p",
        "custom_model_src": kernel,
        "seed_num": 42,
        "num_correct_trials": 5,
        "num_perf_trials": 100,
        "verbose": False,
        "measure_performance": True,
        "preferred_device": None,
        "backend": "torch",
    }


class SimpleEvalClient:
    """What people have: it posts, waits on the connection, and posts again when that breaks or the server says so."""

    def __init__(self, url: str) -> None:
        self.url = url
        # Hundreds of threads share it.
        self._http = httpx.Client(timeout=300, limits=httpx.Limits(max_connections=None))

    def evaluate(self, kernel: str, tries: int = 1, **changes: Any) -> httpx.Response:
        body = request_body(kernel) | changes
        for left in reversed(range(tries)):
            try:
                answer = self._http.post(f"{self.url}/eval", json=body)
            except httpx.TransportError:
                if not left:
                    raise
            else:
                if answer.status_code < 500 or not left:
                    return answer
            time.sleep(0.3)
        raise AssertionError("unreachable")


@pytest.fixture(scope="module")
def fleet(start_fleet: Callable[..., Fleet]) -> Fleet:
    """Two workers of the lane `cpu`."""
    return start_fleet(slots=2)


@pytest.fixture(scope="module")
def served(services: Services, fleet: Fleet, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A server before them that lets this machine's clients in without tokens, as theirs did."""
    with Served(
        services.config(http_tokens="trust-local-users", retry_delay_s=0.1), tmp_path_factory.mktemp("served") / "log"
    ) as served:
        yield served


@pytest.fixture
def client(served: Served) -> SimpleEvalClient:
    return SimpleEvalClient(served.url)


@pytest.fixture
def kernel() -> Callable[[str], str]:
    """A told kernel that no other test has."""
    return lambda what: f"{what} {uuid4().hex}"


def test_a_client_gets_kernelbench_s_result(client: SimpleEvalClient, kernel: Callable[[str], str]) -> None:
    """All fields are there, of their types, and of a kernel that was not timed -1.0 and nothing."""
    answer = client.evaluate(kernel("ok"))
    assert answer.status_code == 200
    result = answer.json()
    assert {name: type(value) for name, value in result.items()} == RESULT
    assert (result["compiled"], result["correctness"]) == (True, True)
    assert (result["runtime"], result["ref_runtime"]) == (-1.0, -1.0)
    assert (result["metadata"]["category"], result["metadata"]["blame"]) == ("passed", "none")
    UUID(result["metadata"]["evaluation_id"])


@pytest.mark.parametrize(
    ("what", "category", "blame", "compiled"),
    [
        ("wrong", "wrong_values", "candidate", True),
        ("problem reference_error", "reference_error", "problem", False),
        ("problem reference_timeout", "reference_timeout", "problem", False),
    ],
)
def test_what_the_kernel_or_the_problem_did_is_a_200(
    client: SimpleEvalClient, kernel: Callable[[str], str], what: str, category: str, blame: str, compiled: bool
) -> None:
    """Nothing of a kernel's own, or of a problem's, is an error of the server."""
    answer = client.evaluate(kernel(what))
    assert answer.status_code == 200
    result = answer.json()
    assert (result["metadata"]["category"], result["metadata"]["blame"]) == (category, blame)
    assert (result["compiled"], result["correctness"]) == (compiled, False)


def test_what_the_fleet_did_is_a_503_and_is_done_anew(client: SimpleEvalClient, kernel: Callable[[str], str]) -> None:
    """A judge that fails in every attempt is answered with 503; who asks again has the kernel judged again."""
    source = kernel("raise")
    first, second = (client.evaluate(source) for _ in range(2))
    for answer in (first, second):
        assert answer.status_code == 503
        assert int(answer.headers["Retry-After"]) > 0
        assert answer.json()["code"] == "judge_error"
        assert isinstance(answer.json()["detail"], str)
    assert first.json()["evaluation_ids"] != second.json()["evaluation_ids"]


def test_a_cancelled_evaluation_is_a_409(
    client: SimpleEvalClient, services: Services, kernel: Callable[[str], str]
) -> None:
    """It says nothing of the kernel, and the fleet did not fail."""
    with ThreadPoolExecutor(1) as pool:
        source = kernel("sleep 60")
        answer = pool.submit(client.evaluate, source)
        identity = until(lambda: _evaluations(services, source))[0]
        httpx.post(f"{client.url}/v1/evaluations/{identity}/cancel").raise_for_status()
        assert answer.result(30).status_code == 409
        assert answer.result().json()["code"] == "cancelled"


def _evaluations(services: Services, kernel: str) -> list[UUID]:
    rows = services.rows(
        "SELECT e.id FROM evaluations e JOIN kernels k ON k.hash = e.kernel_hash WHERE k.source = :kernel",
        kernel=kernel,
    )
    return [row.id for row in rows]


# The same request again --------------------------------------------------------------------------------


def test_equal_requests_are_one_evaluation(
    client: SimpleEvalClient, services: Services, kernel: Callable[[str], str]
) -> None:
    """At the same moment, while it runs, and right after its answer; the result says which was there before."""
    source = kernel("sleep 1")
    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(lambda _: client.evaluate(source), range(8)))
    answers.append(client.evaluate(source))
    assert {answer.status_code for answer in answers} == {200}
    assert len({answer.json()["metadata"]["evaluation_id"] for answer in answers}) == 1
    assert sorted(answer.json()["metadata"]["joined"] for answer in answers) == [False] + [True] * 8
    assert len(_evaluations(services, source)) == 1


def test_another_setting_is_another_evaluation(client: SimpleEvalClient, kernel: Callable[[str], str]) -> None:
    """Equal means every field that the judge is told."""
    source = kernel("ok")
    answers = [client.evaluate(source, **change) for change in ({}, {"seed_num": 43}, {"num_correct_trials": 2})]
    assert len({answer.json()["metadata"]["evaluation_id"] for answer in answers}) == 3


def test_an_answer_stands_for_a_minute_only(
    client: SimpleEvalClient, services: Services, kernel: Callable[[str], str]
) -> None:
    """Who asks later has the kernel judged, and timed, once more."""
    source = kernel("ok")
    first = client.evaluate(source).json()["metadata"]["evaluation_id"]
    with services.engine.begin() as connection:
        connection.exec_driver_sql(
            "UPDATE verdicts SET finished_at = finished_at - interval '61 s' WHERE evaluation_id = %s", (UUID(first),)
        )
    again = client.evaluate(source).json()["metadata"]
    assert again["evaluation_id"] != first
    assert again["joined"] is False


def test_a_key_decides_where_it_is_given(client: SimpleEvalClient, kernel: Callable[[str], str]) -> None:
    """The same key is the same evaluation, another key another one; for another kernel or setting it is refused."""
    source = kernel("ok")

    def post(key: str, **change: Any) -> httpx.Response:
        body = {"original_model_src": "p", "custom_model_src": source, "backend": "torch"} | change
        return httpx.post(f"{client.url}/eval", json=body, headers={"Idempotency-Key": key}, timeout=60)

    key = uuid4().hex
    same = {post(key).json()["metadata"]["evaluation_id"] for _ in range(2)}
    assert len(same) == 1
    assert post(uuid4().hex).json()["metadata"]["evaluation_id"] not in same
    others = {"custom_model_src": kernel("ok")}, {"seed_num": 43}, {"num_correct_trials": 2}, {"num_perf_trials": 7}
    for change in others:
        refused = post(key, **change)
        assert (refused.status_code, refused.json()["code"]) == (409, "idempotency_conflict"), change
        assert f"'{key}' was used for another problem, kernel or lane" in refused.json()["detail"]
    assert {post(key).json()["metadata"]["evaluation_id"]} == same


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_restart_while_a_hundred_wait(
    services: Services, fleet: Fleet, tmp_path: Path, number: int, kernel: Callable[[str], str]
) -> None:
    """Each client posts again and gets its answer; none is evaluated twice."""
    mark = uuid4().hex
    like = {"like": f"ok {mark}%"}
    of_mark = "FROM evaluations e JOIN kernels k ON k.hash = e.kernel_hash WHERE k.source LIKE :like"

    async def through_a_restart(served: Served) -> list[httpx.Response]:
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(base_url=served.url, timeout=300, limits=limits) as http:
            waiting = [asyncio.create_task(patient(http, "/eval", request_body(f"ok {mark} {n}"))) for n in range(100)]
            while services.rows(f"SELECT count(*) AS n {of_mark}", **like)[0].n < 100:
                await asyncio.sleep(0.1)
            for hold in holds:
                assert evaluations.verdict(services.engine, hold) is None
            await asyncio.to_thread(served.stop, number)
            await asyncio.to_thread(served.start)
            for hold in holds:
                evaluations.cancel(services.engine, hold)
                broker.revoke(services.app, hold)
            return await asyncio.gather(*waiting)

    with Served(services.config(http_tokens="trust-local-users"), tmp_path / "log") as served:
        holds = [services.submit(kernel("sleep 600")) for _ in range(2)]
        for hold in holds:
            services.started(hold)
        answers = asyncio.run(through_a_restart(served))
    assert {answer.status_code for answer in answers} == {200}
    found = {answer.json()["metadata"]["evaluation_id"] for answer in answers}
    assert found == {str(row.id) for row in services.rows(f"SELECT e.id {of_mark}", **like)}
    assert len(found) == 100
    attempts = services.rows(f"SELECT sum(e.attempts) AS n {of_mark}", **like)
    assert attempts[0].n == 100


def test_a_client_that_goes_away_ends_its_wait_alone(
    services: Services, served: Served, kernel: Callable[[str], str]
) -> None:
    """The evaluation goes on, the server has nothing to complain of, and who comes back gets the answer."""
    source = kernel("sleep 1")
    body = json.dumps({"original_model_src": "p", "custom_model_src": source, "backend": "torch"}).encode()
    with socket.create_connection(("127.0.0.1", served.port)) as connection:
        head = (
            f"POST /eval HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\nContent-Length: {len(body)}"
        )
        connection.sendall(f"{head}\r\n\r\n".encode() + body)
        [identity] = until(lambda: _evaluations(services, source))
    assert services.verdict(identity).category is Category.PASSED
    assert SimpleEvalClient(served.url).evaluate(source).json()["metadata"]["evaluation_id"] == str(identity)
    assert "Traceback" not in served.log.read_text()


# What cannot be served ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "status", "says"),
    [
        ({"seed_num": "many"}, 422, "seed_num"),
        ({"seed_num": -1}, 422, "seed_num"),
        ({"num_correct_trials": 0}, 422, "num_correct_trials"),
        ({"num_correct_trials": 1.5}, 422, "num_correct_trials"),
        ({"num_perf_trials": 100_000}, 422, "num_perf_trials"),
        ({"measure_performance": "perhaps"}, 422, "measure_performance"),
        ({"original_model_src": None}, 422, "original_model_src"),
        ({"original_model_src": "  "}, 422, "empty"),
        ({"custom_model_src": "x\0"}, 422, "NUL"),
        ({"custom_model_src": "\ud800"}, 422, "UTF-8"),
        ({"custom_model_src": "#" * (MAX_SOURCE_BYTES + 1)}, 422, str(MAX_SOURCE_BYTES)),
        ({"backend": "hip"}, 422, "cuda, triton, torch, cpp, cupy"),
        ({"preferred_device": "first"}, 422, "preferred_device"),
        ({"preferred_device": 0}, 400, "has no GPU"),
        ({"backend": "cuda"}, 503, "no live worker serves gpu"),
    ],
)
def test_bad_input_is_refused_with_what_to_do(
    client: SimpleEvalClient, kernel: Callable[[str], str], change: dict[str, Any], status: int, says: str
) -> None:
    """Each is a problem whose `detail` names the field; nothing of a source is repeated."""
    answer = httpx.post(
        f"{client.url}/eval",
        content=json.dumps(
            {"original_model_src": "p", "custom_model_src": kernel("ok secret"), "backend": "torch"} | change
        ),
        headers=JSON,
        timeout=60,
    )
    assert answer.status_code == status
    assert answer.headers["content-type"] == "application/problem+json"
    assert says in answer.json()["detail"]
    assert "secret" not in answer.text


def test_a_body_that_is_none(client: SimpleEvalClient, served: Served) -> None:
    """Not JSON is 400, a missing field 422, and what is too large 413 before it is read."""
    assert httpx.post(f"{client.url}/eval", content=b"{", headers=JSON).status_code == 400
    missing = httpx.post(f"{client.url}/eval", json={"custom_model_src": "x"})
    assert missing.status_code == 422
    assert "original_model_src" in missing.json()["detail"]
    with socket.create_connection(("127.0.0.1", served.port)) as connection:
        connection.sendall(b"POST /eval HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 99999999999\r\n\r\n")
        assert connection.recv(64).startswith(b"HTTP/1.1 413")


def test_a_body_of_another_type(client: SimpleEvalClient, kernel: Callable[[str], str]) -> None:
    """JSON without a type is understood; with a wrong one the error names the header."""
    text = json.dumps(request_body(kernel("ok")))
    with httpx.Client() as http:
        request = http.build_request("POST", f"{client.url}/eval", content=text, timeout=300)
        assert "content-type" not in request.headers
        assert http.send(request).json()["correctness"] is True
    for kind in ("application/x-www-form-urlencoded", "text/plain"):
        for path in ("/eval", "/evaluate"):
            answer = httpx.post(f"{client.url}{path}", content=text, headers={"Content-Type": kind})
            assert answer.status_code == 415
            assert "Content-Type: application/json" in answer.json()["detail"]


def test_health_as_probes_ask_for_it(client: SimpleEvalClient) -> None:
    """With HEAD, and with a slash at its end."""
    for path in ("/health", "/health/"):
        head = httpx.head(f"{client.url}{path}")
        assert (head.status_code, head.content) == (200, b"")
        assert httpx.get(f"{client.url}{path}").json()["status"] == "healthy"


def test_unknown_fields_are_passed_over_and_named(client: SimpleEvalClient, kernel: Callable[[str], str]) -> None:
    """As the servers before did; but nobody has to guess why a misspelt one has no effect."""
    answer = client.evaluate(kernel("ok"), num_correct_trails=1, build_dir="/x")
    assert answer.status_code == 200
    assert answer.json()["metadata"]["ignored_fields"] == ["build_dir", "num_correct_trails"]


def test_tokens(services: Services, fleet: Fleet, tmp_path: Path, kernel: Callable[[str], str]) -> None:
    """Reading, submitting, new problems and running the fleet need tokens of their scopes; the status needs none."""
    secrets = {scope: tokens.create(services.engine, f"test-{scope}", [scope])[1] for scope in Scope}
    body = {"original_model_src": uuid4().hex, "custom_model_src": kernel("ok"), "backend": "torch"}
    with Served(services.config(), tmp_path / "log") as served:

        def status(method: str, path: str, scope: Scope | None, **more: Any) -> int:
            headers = {} if scope is None else {"Authorization": f"Bearer {secrets[scope]}"}
            return httpx.request(method, served.url + path, headers=headers, timeout=60, **more).status_code

        assert httpx.get(f"{served.url}/health").json() == {"status": "healthy"}
        assert status("GET", "/status", None) == 401
        assert status("GET", "/status", Scope.READ) == 200
        callers = (None, Scope.READ, Scope.SUBMIT, Scope.PROBLEMS)
        assert [status("POST", "/eval", scope, json=body) for scope in callers] == [401, 403, 403, 200]
        assert status("POST", "/eval", Scope.SUBMIT, json=body) == 200, "the problem is stored by now"
        for path in ("/cleanup", "/reset_devices", "/reset_gpu/0"):
            assert [status("POST", path, scope) for scope in callers] == [401, 403, 403, 403]
        assert status("POST", "/reset_gpu/0", Scope.ADMIN) == 400


# How the fleet is -----------------------------------------------------------------------------------------


def test_health_while_many_wait(client: SimpleEvalClient, services: Services, kernel: Callable[[str], str]) -> None:
    """It tells of them, and is answered by a server that has nothing else to do but wait."""
    source = kernel("sleep 3")
    with ThreadPoolExecutor(60) as pool:
        waiting = [pool.submit(client.evaluate, f"{source} {n}") for n in range(4)]
        quick = kernel("ok")
        waiting += [pool.submit(client.evaluate, f"{quick} {n}") for n in range(50)]

        def busy() -> dict[str, Any] | None:
            found = httpx.get(f"{client.url}/health").raise_for_status().json()
            return found if found["queued"] >= 40 and found["running"] == 2 else None

        health = until(busy, what="that all wait")
        assert health["queue"]["cpu"]["queued"] == health["queued"]
        assert [worker["state"] for worker in health["workers"]] == ["busy", "busy"]
        assert {one.result(120).status_code for one in waiting} == {200}
    assert health["supported_backends"] == ["cpp", "torch", "triton"]
    assert (health["cuda_available"], health["total_gpu_devices"], health["devices"]) == (False, 0, [])
    assert health["status"] == "healthy"


def test_the_other_pages_of_a_fleet_without_gpus(client: SimpleEvalClient) -> None:
    """They say so, in their usual forms."""
    found = {
        path: httpx.get(client.url + path).raise_for_status().json() for path in ("/", "/gpu_status", "/backend_info")
    }
    assert found["/"]["num_gpus"] == 0
    assert found["/gpu_status"]["error"]
    assert found["/gpu_status"]["devices"] == []
    assert found["/backend_info"]["default_backend"] == "cuda"
    assert set(found["/backend_info"]["backend_descriptions"]) == set(found["/backend_info"]["supported_backends"])
    assert httpx.get(f"{client.url}/fault_statistics").json()["per_device_faults"] == {}


def test_without_the_database(services: Services, served: Served, client: SimpleEvalClient, kernel) -> None:
    """Everything is a 503 that says when to ask again, and is well by itself when the database is back."""
    services.postgres.stop()
    try:
        failing = until(lambda: (a := httpx.get(f"{served.url}/health", timeout=30)).status_code == 503 and a)
        assert int(failing.headers["Retry-After"]) > 0
        refused = client.evaluate(kernel("ok"))
        assert refused.status_code == 503
        assert refused.json()["code"] == "database_unavailable"
    finally:
        services.postgres.start()
    assert client.evaluate(kernel("ok"), tries=100).status_code == 200
    until(lambda: httpx.get(f"{served.url}/health", timeout=30).status_code == 200, what="health")
