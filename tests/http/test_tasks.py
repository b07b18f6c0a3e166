"""KernelGYM's form: posted, followed and fetched under the id that its client chose; a stand-in judges."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest
from sqlalchemy import Engine, text

from kqueue.categories import Category
from kqueue.config import Config
from tests.http.serving import problem_of
from tests.http.standin import Served
from tests.samples import ended
from tests.waiting import until

pytestmark = pytest.mark.timeout(300)


def task_body(number: int = 0, **changes: Any) -> dict[str, Any]:
    """A request as KernelGYM's client sends it, with all its fields; another ``number`` is another task."""
    body: dict[str, Any] = {
        "task_id": f"parallel_task_{number:06d}_ab12cd34",
        "reference_code": "class Model: ...",
        "kernel_code": f"class ModelNew: task = {number}",
        "backend": "torch",
        "num_correct_trials": 5,
        "num_perf_trials": 100,
        "timeout": 60,
        "priority": "normal",
        "entry_point": "Model",
        "is_valid": None,
        "verbose_errors": True,
        "enable_profiling": True,
        "detect_decoy_kernel": True,
        "reference_backend": None,
        "use_reference_cache": True,
        "uuid": "7",
    }
    return body | changes


def rows(engine: Engine, columns: str = "*") -> list[Any]:
    """All evaluations, the oldest first."""
    with engine.connect() as connection:
        return list(connection.execute(text(f"SELECT {columns} FROM evaluations ORDER BY submitted_at")))


def test_a_task_from_beginning_to_end(http: httpx.Client, judging: None) -> None:
    """The answer is the result; status and result are found under the task's id."""
    answer = http.post("/evaluate", json=task_body()).raise_for_status().json()
    task_id = task_body()["task_id"]
    assert (answer["task_id"], answer["status"]) == (task_id, "completed")
    assert (answer["compiled"], answer["correctness"], answer["decoy_kernel"]) == (True, True, False)
    assert (answer["error_message"], answer["error_code"]) == (None, None)
    assert answer["metadata"]["category"] == "passed"
    assert answer["submitted_at"] <= answer["completed_at"]
    assert answer["processing_time"] >= 0
    assert (answer["reference_runtime"], answer["kernel_runtime"], answer["speedup"]) == (1.0, 0.5, 2.0)
    status = http.get(f"/status/{task_id}").raise_for_status().json()
    assert status == {
        "task_id": task_id,
        "status": "completed",
        "assigned_device": "cpu",
        "error_message": None,
    }
    assert http.get(f"/results/{task_id}").raise_for_status().json() == answer


def test_a_task_that_waits(http: httpx.Client, judge: Callable[..., None], engine: Engine) -> None:
    """An answer comes before its client gives up, with the status; the rest is polled."""
    body = task_body(timeout=0.5)
    answer = http.post("/evaluate", json=body).raise_for_status().json()
    assert (answer["status"], answer["compiled"], answer["correctness"]) == ("pending", None, None)
    assert http.get(f"/status/{body['task_id']}").json()["status"] == "pending"
    problem_of(http.get(f"/results/{body['task_id']}"), 404, "not_finished")
    [row] = rows(engine)
    judge(row.id)
    assert http.get(f"/status/{body['task_id']}").json()["status"] == "completed"
    assert http.get(f"/results/{body['task_id']}").json()["correctness"] is True


def test_what_the_fields_become(http: httpx.Client, engine: Engine) -> None:
    """Each known field is a setting; those that mean nothing here are passed over."""
    body = task_body(
        timeout=0.5,
        num_correct_trials=3,
        num_perf_trials=7,
        num_warmup=2,
        seed=9,
        detect_decoy_kernel=False,
        reference_backend="torch_compile",
    )
    http.post("/evaluate", json=body).raise_for_status()
    http.post("/evaluate", json=body | {"task_id": "untimed", "run_performance": False}).raise_for_status()
    timed, untimed = rows(engine, "settings, kernel_label")
    settings = timed.settings
    assert timed.kernel_label == body["task_id"]
    assert (settings["checks"], settings["seed"], settings["timing"]["calls"]) == (3, 9, 7)
    assert (settings["timing"]["warmup"], settings["timing"]["compiled_baseline"]) == (2, True)
    assert (settings["policies"]["decoys"], settings["deadlines"]["check_s"]) == ("allow", 0.5)
    assert (settings["timing"]["enabled"], untimed.settings["timing"]["enabled"]) == (True, False)


def test_another_entry_point(http: httpx.Client, engine: Engine) -> None:
    """The classes that a task names are those that are judged, on the lines where they are."""
    body = task_body(
        timeout=0.5, entry_point="Softmax", reference_code="class Softmax: ...", kernel_code="class SoftmaxNew: ..."
    )
    http.post("/evaluate", json=body).raise_for_status()
    with engine.connect() as connection:
        problem = connection.scalars(text("SELECT source FROM problems")).one()
        kernel = connection.scalars(text("SELECT source FROM kernels")).one()
    assert problem == "class Softmax: ...\n\nModel = Softmax\n"
    assert kernel == "class SoftmaxNew: ...\n\nModelNew = SoftmaxNew\n"


@pytest.mark.parametrize(
    ("category", "status", "code", "compiled"),
    [
        (Category.WRONG_VALUES, "completed", "CORRECTNESS_ERROR", True),
        (Category.COMPILE_ERROR, "completed", "COMPILATION_ERROR", False),
        (Category.SYNTAX_ERROR, "completed", "SYNTAX_ERROR", False),
        (Category.TIMEOUT, "completed", "TIMEOUT_ERROR", True),
        (Category.CRASHED, "completed", "RUNTIME_ERROR", True),
        (Category.REFERENCE_ERROR, "failed", "VALIDATION_ERROR", None),
        (Category.CANCELLED, "cancelled", "SYSTEM_ERROR", None),
    ],
)
def test_how_a_task_ends(
    http: httpx.Client,
    judge: Callable[..., None],
    engine: Engine,
    category: Category,
    status: str,
    code: str,
    compiled: bool | None,
) -> None:
    """What the kernel did is a result. Where nothing is known of it, nothing is said of it."""
    task_id = task_body()["task_id"]
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(http.post, "/evaluate", json=task_body())
        until(lambda: rows(engine), what="the task")
        judge(rows(engine)[0].id, ended(category, message="so it went"))
        answer = waiting.result(60).raise_for_status().json()
    assert (answer["status"], answer["error_code"]) == (status, code)
    assert (answer["compiled"], answer["correctness"]) == (compiled, None if compiled is None else False)
    # Clients compare and format the numbers of completed tasks.
    assert (answer["kernel_runtime"], answer["speedup"]) == ((None, None) if compiled is None else (-1.0, 0.0))
    assert answer["error_message"] == f"{category}: so it went"
    assert http.get(f"/status/{task_id}").json()["error_message"] == answer["error_message"]
    assert http.get(f"/results/{task_id}").json() == answer


def test_the_fleets_failure_is_no_result(http: httpx.Client, judge: Callable[..., None], engine: Engine) -> None:
    """It is a 503, after which clients ask again; the same task is then judged anew."""
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(http.post, "/evaluate", json=task_body())
        until(lambda: rows(engine), what="the task")
        with engine.begin() as connection:
            connection.execute(text("UPDATE evaluations SET settings = jsonb_set(settings, '{max_attempts}', '1')"))
        judge(rows(engine)[0].id, ended(Category.WORKER_LOST, message="so it went"))
        problem_of(waiting.result(60), 503, "worker_lost")
        waiting = pool.submit(http.post, "/evaluate", json=task_body())
        until(lambda: len(rows(engine)) == 2, what="the second evaluation")
        judge(rows(engine)[1].id)
        assert waiting.result(60).json()["correctness"] is True
    assert http.get(f"/results/{task_body()['task_id']}").json()["status"] == "completed"


def test_the_same_task_again(http: httpx.Client, judging: None, engine: Engine) -> None:
    """It is one evaluation, unless it is to be judged anew, or its kernel or a setting is another."""
    same = {http.post("/evaluate", json=task_body()).json()["metadata"]["evaluation_id"] for _ in range(2)}
    assert len(same) == len(rows(engine)) == 1
    others = [{"force_refresh": True}, {"kernel_code": "class ModelNew: other = 1"}, {"num_correct_trials": 2}]
    for number, change in enumerate(others, 2):
        answer = http.post("/evaluate", json=task_body(**change)).raise_for_status().json()
        assert len(rows(engine)) == number
        assert http.get(f"/results/{answer['task_id']}").json() == answer


def test_two_tokens_with_one_id(
    serve: Callable[[Config], Served], config: Config, token: Callable[..., str], engine: Engine, judging: None
) -> None:
    """Each finds its own task."""
    served = serve(config)
    with served.client(token("problems")) as one, served.client(token("problems")) as other:
        mine = one.post("/evaluate", json=task_body()).raise_for_status().json()
        problem_of(other.get(f"/status/{mine['task_id']}"), 404, "unknown_evaluation")
        theirs = other.post("/evaluate", json=task_body()).raise_for_status().json()
        assert mine["metadata"]["evaluation_id"] != theirs["metadata"]["evaluation_id"]
        assert one.get(f"/results/{mine['task_id']}").json() == mine
        assert other.get(f"/results/{mine['task_id']}").json() == theirs


@pytest.mark.parametrize(
    ("change", "status", "says"),
    [
        ({"task_id": ""}, 422, "task_id"),
        ({"task_id": "x" * 101}, 422, "task_id"),
        ({"task_id": 7}, 422, "task_id"),
        ({"kernel_code": ""}, 422, "empty"),
        ({"reference_code": None}, 422, "reference_code"),
        ({"entry_point": "a b"}, 422, "entry_point"),
        ({"timeout": 0}, 422, "timeout"),
        ({"backend": "tilelang"}, 422, "cuda, triton, torch, cpp, cupy"),
        ({"workflow": "kernel_simple"}, 422, "workflow"),
        ({"reference_backend": "onnx"}, 422, "reference_backend"),
        ({"device_preference": "gpu0"}, 422, "device_preference"),
        ({"device_preference": "cuda:3"}, 400, "no device 3"),
        ({"backend": "cuda"}, 503, "no live worker serves gpu"),
    ],
)
def test_bad_input_is_refused_with_what_to_do(
    http: httpx.Client, engine: Engine, change: dict[str, Any], status: int, says: str
) -> None:
    """And nothing is accepted."""
    answer = http.post("/evaluate", json=task_body(**change))
    assert answer.status_code == status, answer.text
    assert says in answer.json()["detail"]
    assert rows(engine) == []


@pytest.mark.parametrize("path", ["/status/nothing", "/results/nothing", "/status/%00", "/results/a/b"])
def test_unknown_tasks(http: httpx.Client, path: str) -> None:
    """404, whatever the id looks like."""
    answer = http.get(f"{http.base_url}{path}")
    assert answer.status_code == 404, answer.text


def test_a_request_that_is_neither(http: httpx.Client) -> None:
    """It is read as a job; one with fields of both too. The error says what is missing."""
    for body in ({}, task_body(problem_id=1)):
        answer = http.post("/evaluate", json=body)
        problem = problem_of(answer, 422, "invalid_request")
        assert "body.custom_cuda" in {error["field"] for error in problem["errors"]}
