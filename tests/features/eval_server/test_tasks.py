"""KernelGYM's form: posted, followed and fetched by the client's id, with a stand-in for the worker."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from uuid import UUID

import httpx
import pytest
from sqlalchemy import Engine, text

from kqueue.categories import Category
from kqueue.config import Config
from kqueue.evidence import Evidence, LibraryKernel, Provenance
from kqueue.states import Priority
from kqueue.store import tokens
from tests.http.serving import Served as SeparatelyServed
from tests.http.serving import problem_of
from tests.http.standin import Served
from tests.samples import ended, passed
from tests.store.steps import change
from tests.waiting import until

pytestmark = pytest.mark.timeout(300)


def task_body(number: int = 0, **changes: Any) -> dict[str, Any]:
    """Return a request with all fields of KernelGYM's client. Each ``number`` is a different task."""
    body: dict[str, Any] = {"task_id": f"parallel_task_{number:06d}_ab12cd34", "reference_code": "class Model: ..."}
    body |= {"kernel_code": f"class ModelNew: task = {number}", "backend": "torch", "timeout": 60}
    body |= {"num_correct_trials": 5, "num_perf_trials": 100, "priority": "normal", "entry_point": "Model"}
    body |= {"is_valid": None, "verbose_errors": True, "enable_profiling": True, "detect_decoy_kernel": True}
    body |= {"reference_backend": None, "use_reference_cache": True, "uuid": "7"}
    return body | changes


def rows(engine: Engine, columns: str = "*") -> list[Any]:
    """Return all evaluations, the oldest first."""
    with engine.connect() as connection:
        return list(connection.execute(text(f"SELECT {columns} FROM evaluations ORDER BY submitted_at")))


def test_a_task_from_beginning_to_end(http: httpx.Client, judging: None) -> None:
    """The answer is the result, and status and result are found by the task's id."""
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
    assert status == {"task_id": task_id, "status": "completed", "assigned_device": "cpu", "error_message": None}
    assert http.get(f"/results/{task_id}").raise_for_status().json() == answer


def test_a_task_that_waits(http: httpx.Client, judge: Callable[..., None], engine: Engine) -> None:
    """The server answers with the status before the client's timeout, and the client polls."""
    body = task_body(timeout=0.5)
    answer = http.post("/evaluate", json=body).raise_for_status().json()
    assert (answer["status"], answer["compiled"], answer["correctness"]) == ("pending", None, None)
    assert http.get(f"/status/{body['task_id']}").json()["status"] == "pending"
    problem_of(http.get(f"/results/{body['task_id']}"), 404, "not_finished")
    [row] = rows(engine)
    judge(row.id)
    assert http.get(f"/status/{body['task_id']}").json()["status"] == "completed"
    assert http.get(f"/results/{body['task_id']}").json()["correctness"] is True


#: Status, code and compilation result by an evaluation's end.
ENDS = {
    Category.WRONG_VALUES: ("completed", "CORRECTNESS_ERROR", True),
    Category.COMPILE_ERROR: ("failed", "COMPILATION_ERROR", False),
    Category.SYNTAX_ERROR: ("failed", "SYNTAX_ERROR", False),
    Category.TIMEOUT: ("completed", "TIMEOUT_ERROR", True),
    Category.CRASHED: ("completed", "RUNTIME_ERROR", True),
    Category.REFERENCE_ERROR: ("failed", "VALIDATION_ERROR", None),
    Category.CANCELLED: ("cancelled", "SYSTEM_ERROR", None),
}


def test_how_a_task_ends(http, judge, engine) -> None:
    """A kernel's failure is a result, and unknown facts are left out of it."""
    for number, (category, (status, code, compiled)) in enumerate(ENDS.items()):
        body = task_body(number, timeout=0.1)
        http.post("/evaluate", json=body).raise_for_status()
        judge(rows(engine)[-1].id, ended(category, message="so it went"))
        answer = http.get(f"/results/{body['task_id']}").raise_for_status().json()
        assert (answer["status"], answer["error_code"]) == (status, code)
        assert (answer["compiled"], answer["correctness"]) == (compiled, None if compiled is None else False)
        # Clients compare and format the numbers of completed tasks.
        assert (answer["kernel_runtime"], answer["speedup"]) == ((None, None) if compiled is None else (-1.0, 0.0))
        assert answer["error_message"] == f"{category}: so it went"
        assert http.get(f"/status/{body['task_id']}").json()["error_message"] == answer["error_message"]


def test_the_fleets_failure_is_no_result(http: httpx.Client, judge: Callable[..., None], engine: Engine) -> None:
    """It is a 503 that clients retry, and the same task is then judged again."""
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(http.post, "/evaluate", json=task_body())
        until(lambda: rows(engine), what="the task")
        change(engine, "UPDATE evaluations SET settings = jsonb_set(settings, '{max_attempts}', '1')")
        judge(rows(engine)[0].id, ended(Category.WORKER_LOST, message="so it went"))
        problem_of(waiting.result(60), 503, "worker_lost")
        waiting = pool.submit(http.post, "/evaluate", json=task_body())
        until(lambda: len(rows(engine)) == 2, what="the second evaluation")
        judge(rows(engine)[1].id)
        assert waiting.result(60).json()["correctness"] is True
    assert http.get(f"/results/{task_body()['task_id']}").json()["status"] == "completed"


def test_two_tokens_with_one_id(served: Served, token: Callable[..., str], judging: None) -> None:
    """Each token finds the task that it created."""
    with served.client(token("problems")) as one, served.client(token("problems")) as other:
        mine = one.post("/evaluate", json=task_body()).raise_for_status().json()
        problem_of(other.get(f"/status/{mine['task_id']}"), 404, "unknown_evaluation")
        theirs = other.post("/evaluate", json=task_body()).raise_for_status().json()
        assert mine["metadata"]["evaluation_id"] != theirs["metadata"]["evaluation_id"]
        assert one.get(f"/results/{mine['task_id']}").json() == mine
        assert other.get(f"/results/{mine['task_id']}").json() == theirs


def test_a_request_that_is_neither(http: httpx.Client) -> None:
    """A request with the fields of neither form, or of both, is parsed as a job, and the error names missing fields."""
    for body in ({}, task_body(problem_id=1)):
        problem = problem_of(http.post("/evaluate", json=body), 422, "invalid_request")
        assert "body.custom_cuda" in {error["field"] for error in problem["errors"]}


def test_what_the_fields_become(http: httpx.Client, engine: Engine) -> None:
    """Each known field becomes a setting, the named classes are judged, and unknown fields are ignored."""
    body = task_body(timeout=0.1, num_correct_trials=3, num_perf_trials=7, num_warmup=2, seed=9, run_performance=False)
    body |= {"detect_decoy_kernel": False, "reference_backend": "torch_compile", "entry_point": "Softmax"}
    body |= {"reference_code": "class Softmax: ...", "kernel_code": "class SoftmaxNew: ..."}
    http.post("/evaluate", json=body).raise_for_status()
    [row] = rows(engine, "settings, kernel_label")
    settings = row.settings
    assert row.kernel_label == body["task_id"]
    assert (settings["checks"], settings["seed"], settings["timing"]["calls"]) == (3, 9, 7)
    assert (settings["timing"]["warmup"], settings["timing"]["compiled_baseline"]) == (2, True)
    assert (settings["policies"]["decoys"], settings["deadlines"]["check_s"]) == ("allow", 0.1)
    assert settings["timing"]["purpose"] == "check"
    with engine.connect() as connection:
        problem = connection.scalars(text("SELECT source FROM problems")).one()
        kernel = connection.scalars(text("SELECT source FROM kernels")).one()
    assert problem == "class Softmax: ...\n\nModel = Softmax\n"
    assert kernel == "class SoftmaxNew: ...\n\nModelNew = SoftmaxNew\n"


def test_priorities(http: httpx.Client, served: Served, engine: Engine) -> None:
    """`high` is interactive if the token allows it, and all other priorities are batch."""
    for number, priority in enumerate((None, "low", "normal", "high")):
        http.post("/evaluate", json=task_body(number, timeout=0.1, priority=priority)).raise_for_status()
    _, secret = tokens.create(engine, "b", [tokens.Scope.PROBLEMS], priority=Priority.BATCH)
    with served.client(secret) as lowly:
        lowly.post("/evaluate", json=task_body(9, timeout=0.1, priority="high")).raise_for_status()
    assert [row.priority for row in rows(engine, "priority")] == ["batch", "batch", "batch", "interactive", "batch"]


def test_a_batch_and_an_envelope(http: httpx.Client, served: Served, judging: None, engine: Engine) -> None:
    """Results keep the positions of a batch, a bad task spoils no other, and an envelope's id is the task's."""
    tasks = [task_body(0), task_body(1, backend="fortran"), task_body(2), task_body(3, backend="cuda")]
    answer = http.post("/evaluate/batch", json={"batch_id": "b", "tasks": tasks}).raise_for_status().json()
    assert (answer["batch_id"], answer["batch_status"]) == ("b", "completed")
    assert [answer[f"{which}_tasks"] for which in ("total", "completed", "failed")] == [4, 2, 2]
    right, wrong, other, away = answer["results"]
    assert [result["task_id"] for result in answer["results"]] == [task["task_id"] for task in tasks]
    assert (right["correctness"], other["correctness"]) == (True, True)
    assert (wrong["status"], wrong["error_code"], wrong["compiled"]) == ("failed", "VALIDATION_ERROR", None)
    assert (away["status"], away["error_code"]) == ("failed", "lane_unavailable")
    tasks = [task_body(4, reference_code="class Model: new"), task_body(5)]
    with served.client(tokens.create(engine, "b", [tokens.Scope.SUBMIT])[1]) as lowly:
        new, known = lowly.post("/evaluate/batch", json={"batch_id": "b", "tasks": tasks}).json()["results"]
    assert (new["status"], new["error_code"], known["status"]) == ("failed", "forbidden", "completed")
    assert http.get(f"/results/{right['task_id']}").json() == right
    body = {"task_id": "mine", "workflow": "kernelbench", "payload": task_body(3, task_id="theirs")}
    done = http.post("/workflow/submit", json=body).raise_for_status().json()
    assert (done["task_id"], done["status"]) == ("mine", "completed")
    assert done["result"] == http.get("/results/mine").json()
    assert len(rows(engine)) == 4
    missing = {"task_id": "t", "payload": {"kernel_code": "k"}}
    assert "reference_code" in problem_of(http.post("/workflow/submit", json=missing), 422, "invalid_request")["detail"]


def test_a_restart(serve, config: Config, worker_id: UUID, engine: Engine, judge: Any, tmp_path: Path) -> None:
    """A server that stops answers with the status, and the next one finds the task."""
    bodies = {"/evaluate": task_body(0), "/evaluate/batch": {"batch_id": "b", "tasks": [task_body(1)]}}
    with SeparatelyServed(config, tmp_path / "log") as served, ThreadPoolExecutor(2) as pool:
        http = httpx.Client(base_url=served.url, headers={"Authorization": f"Bearer {served.admin}"}, timeout=60)
        waiting = [pool.submit(http.post, path, json=body) for path, body in bodies.items()]
        until(lambda: len(rows(engine)) == 2, what="the tasks")
        assert served.stop() == 0
        one, batch = [answer.result(60).raise_for_status().json() for answer in waiting]
        assert (one["status"], batch["batch_status"]) == ("pending", "processing")
        serve(config, port=served.port)
        for body in (task_body(0), task_body(1)):
            assert http.get(f"/status/{body['task_id']}").json()["status"] == "pending"
        for row in rows(engine):
            judge(row.id)
        assert http.get(f"/results/{one['task_id']}").json()["correctness"] is True
        assert http.post("/evaluate", json=task_body(0)).json()["status"] == "completed"
        assert len(rows(engine)) == 2


def test_what_coverage_is_rewarded_by(http: httpx.Client, judge: Callable[..., None], engine: Engine) -> None:
    """The metadata have the number and time of custom kernels and of all kernels, if known."""
    known: dict[str, Any] = {"own_share": 0.75, "own": ("mine",), "unclear_share": 0.0, "unclear": (), "decoy": False}
    known |= {"library": (LibraryKernel(name="cublas", share=0.25),), "copies_share": 0.0, "why": "w", "basis": "b"}
    http.post("/evaluate", json=task_body(timeout=0.1)).raise_for_status()
    judge(rows(engine)[0].id, passed(evidence=Evidence(provenance=Provenance(**known))))
    metadata = http.get(f"/results/{task_body()['task_id']}").raise_for_status().json()["metadata"]
    assert (metadata["num_custom_kernels"], metadata["num_total_kernels"]) == (1, 2)
    assert [metadata[f"{of}_time_in_profiling_us"] for of in ("custom_kernel_cuda", "total_kernel_run")] == [375, 500]
