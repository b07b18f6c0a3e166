"""The server with the rights of its database role: every operation works, and no other access does."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple
from uuid import UUID, uuid4

import psycopg
import pytest
from pydantic import SecretStr
from sqlalchemy import Engine, text

from kqueue.config import Config
from kqueue.receipts import create_key
from kqueue.store import evaluations, gpus, roles, searches, tokens, workers
from kqueue.store.readable import READABLE
from tests.http.standin import Served, report_arguments
from tests.services import connected
from tests.store.steps import change
from tests.waiting import repeated

SOURCES = {"original_model_src": "class Model: ...", "custom_model_src": "class ModelNew: ...", "backend": "torch"}
JOB = {"problem_id": 1, "sample_id": 0, "ref_arch_src": "class Model: ...", "backend": "torch"}
TASK = {
    "task_id": "t",
    "reference_code": "class Model: ...",
    "kernel_code": "class ModelNew: t = 1",
    "backend": "torch",
}
DUEL = {"a": "entry", "b": {"kernel": "class ModelNew: b = 1", "backend": "torch"}}
WAIT = {"timeout": 30}


class Call(NamedTuple):
    """An operation's least scope, request and answer."""

    scope: str
    body: Any = None
    query: dict[str, Any] | None = None
    status: int = 200


#: All operations of the API. ``ID`` stands for a passed evaluation, ``OPEN`` for one that stays queued.
CALLS: dict[tuple[str, str], Call] = {
    ("post", "/v1/evaluations"): Call("problems", "entry", status=201),
    ("post", "/v1/evaluations/batch"): Call("problems", {"entries": ["entry"]}, status=201),
    ("post", "/v1/evaluations/each"): Call("problems", {"entries": ["entry"]}),
    ("get", "/v1/evaluations"): Call("read", query={"batch": "b"}),
    ("get", "/v1/evaluations/{evaluation_id}"): Call("read"),
    ("post", "/v1/evaluations/{evaluation_id}/cancel"): Call("submit"),
    ("get", "/v1/evaluations/{evaluation_id}/wait"): Call("read", query=WAIT),
    ("post", "/v1/evaluations/wait"): Call("read", {"evaluation_ids": ["ID"]}),
    ("get", "/v1/evaluations/{evaluation_id}/log"): Call("read"),
    ("get", "/v1/evaluations/{evaluation_id}/artifacts"): Call("read"),
    ("get", "/v1/evaluations/{evaluation_id}/artifacts/{name}"): Call("read"),
    ("get", "/v1/evaluations/{evaluation_id}/receipt"): Call("read"),
    ("get", "/v1/keys"): Call("read"),
    ("get", "/v1/batches/{batch}"): Call("read"),
    # The tests' server has no secret for callbacks.
    ("get", "/v1/callbacks/secret"): Call("submit", status=404),
    ("get", "/v1/batches/{batch}/events"): Call("read"),
    ("get", "/v1/categories"): Call("read"),
    ("get", "/v1/leaderboard"): Call("read"),
    ("get", "/v1/problems"): Call("read"),
    ("get", "/v1/problems/{problem_hash}"): Call("read"),
    ("get", "/v1/shared"): Call("read"),
    ("put", "/v1/problems/{problem_hash}/shared"): Call("problems"),
    ("get", "/v1/problems/{problem_hash}/board"): Call("read"),
    ("delete", "/v1/problems/{problem_hash}/shared"): Call("problems", status=204),
    ("get", "/v1/fleet"): Call("read"),
    ("get", "/metrics"): Call("read"),
    ("post", "/v1/duels"): Call("problems", DUEL, status=201),
    ("get", "/v1/duels/{duel_id}"): Call("read"),
    ("post", "/eval"): Call("problems", SOURCES),
    ("get", "/"): Call("read"),
    ("get", "/health"): Call("read"),
    ("get", "/gpu_status"): Call("read"),
    ("get", "/backend_info"): Call("read"),
    ("get", "/fault_statistics"): Call("read"),
    ("post", "/evaluate"): Call("problems", JOB | {"custom_cuda": "class ModelNew: job = 1"}),
    ("post", "/evaluate_sync"): Call("problems", JOB | {"custom_cuda": "class ModelNew: job = 2"}),
    ("get", "/job/{job_id}"): Call("read"),
    ("get", "/jobs"): Call("read"),
    ("get", "/status"): Call("read"),
    ("post", "/evaluate/batch"): Call("problems", {"batch_id": "b", "tasks": [TASK]}),
    ("post", "/workflow/submit"): Call("problems", {"payload": TASK}),
    ("get", "/workers/status"): Call("read"),
    # Each token sees only the tasks that it created.
    ("get", "/status/{task_id}"): Call("problems"),
    ("get", "/results/{task_id}"): Call("problems"),
    ("post", "/cleanup"): Call("admin", query={"wait_s": 60}),
    ("post", "/reset_gpu/{device_id}"): Call("admin", query={"grace_s": 0}),
    ("post", "/reset_devices"): Call("admin", query={"wait_s": 60}),
}


@pytest.fixture
def served(serve: Callable[[Config], Served], config: Config, login: str, worker_id: UUID, tmp_path: Path) -> Served:
    """A server with that login only, and a key for receipts."""
    create_key(key := tmp_path / "receipts.pem")
    return serve(config.model_copy(update={"database_url": SecretStr(login), "receipt_key": key}))


@pytest.fixture
def _a_gpu(engine: Engine, login: str) -> Iterator[None]:
    """Run a GPU with a worker, and a supervisor whose resets and tests pass, until the login's connections close."""
    uuid = "GPU-00000000-0000-0000-0000-000000000000"
    gpus.register(engine, host="here", index=0, uuid=uuid, name="NVIDIA H200")
    workers.register(engine, id=uuid4(), name="gpu-0@here", host="here", pid=2, lanes=["gpu", "gpu.h200"], device=uuid)

    def supervise() -> None:
        [gpu] = gpus.find(engine)
        if gpu.reset_due:
            gpus.test_after_reset(engine, uuid)
        elif gpu.due:
            gpus.record_pass(engine, uuid)
            change(engine, "UPDATE workers SET paused = NULL")

    with repeated(supervise, 0.05):
        yield


@pytest.mark.usefixtures("_a_gpu", "judging")
def test_all_that_is_offered_works(served: Served, token, fields, engine: Engine) -> None:
    """Each operation works with a token of its least scope, and the list covers all operations."""
    clients = {scope: served.client(token(scope)) for scope in ("read", "submit", "problems", "admin")}
    first = clients["problems"].post("/v1/evaluations", json=fields(0, batch="b")).json()["evaluation_id"]
    assert clients["read"].get(f"/v1/evaluations/{first}/wait", params=WAIT).json()["verdict"]["category"] == "passed"
    places = {"evaluation_id": first, "job_id": first, "name": "evidence.json", "batch": "b", "device_id": "0"}
    places["problem_hash"] = hashlib.sha256(str(fields()["problem"]).encode()).hexdigest()
    places["task_id"] = clients["problems"].post("/evaluate", json=TASK).json()["task_id"]
    places["duel_id"] = clients["problems"].post("/v1/duels", json=DUEL | {"a": fields()}).json()["id"]

    def meant(body: Any) -> Any:
        match body:
            case "entry":
                return fields(uuid4().int)
            case "ID":
                return first
            case list():
                return [meant(item) for item in body]
            case dict():
                return {name: meant(value) for name, value in body.items()}
            case _:
                return body

    offered = clients["read"].get("/openapi.json").json()["paths"]
    reports = {("post", f"/v1/reports/{name}") for name in READABLE.values()}
    assert {(method, path) for path, operations in offered.items() for method in operations} == CALLS.keys() | reports
    run = searches.create(engine, "run", {"algorithm": "PS"})
    places |= {"which": "run", "run_id": str(run.id), "token_id": str(run.id), "label": "none"}
    for name in READABLE.values():
        client = clients["problems" if name in ("share", "unshare") else "read"]
        answer = client.post(f"/v1/reports/{name}", json=report_arguments(name, places))
        assert (answer.status_code, answer.json().keys()) == (200, {"result"}), (name, answer.text)
    for (method, path), call in CALLS.items():
        answer = clients[call.scope].request(method, path.format(**places), json=meant(call.body), params=call.query)
        assert answer.status_code == call.status, (method, path, answer.text)
    assert clients["admin"].post("/reset_gpu/0", params={"grace_s": 0}).json()["status"] == "reset"
    gpus.drain(engine, gpus.find(engine)[0].uuid, reason="a new fan")
    assert [device["status"] for device in clients["admin"].post("/reset_devices").json()["devices"]] == ["healthy"]
    for client in clients.values():
        client.close()


def test_what_the_server_leaves_to_others(served: Served, token, fields, engine: Engine, worker_id: UUID) -> None:
    """The database writes the verdict of a cancelled evaluation, and workers handle a lost attempt."""
    with served.client(token("admin")) as http:
        identity = http.post("/v1/evaluations", json=fields(0)).json()["evaluation_id"]
        assert http.post(f"/v1/evaluations/{identity}/cancel").json()["cancelled"] is True
        verdict = http.get(f"/v1/evaluations/{identity}/wait").json()["verdict"]
        assert (verdict["category"], verdict["written_by"]) == ("cancelled", "client")
        identity = UUID(http.post("/v1/evaluations", json=fields(1)).json()["evaluation_id"])
        assert evaluations.claim(engine, identity, worker_id=worker_id, lease_s=3600) is not None
        change(engine, "UPDATE attempts SET lease_until = now() - interval '1 hour'")
        answer = http.post("/cleanup")
        assert (answer.status_code, answer.json()["swept"]) == (200, None), answer.text
        assert "supervisors sweep" in answer.json()["message"]
        assert http.get(f"/v1/evaluations/{identity}").json()["state"] == "running"
        right = f"INSERT (lane) ON evaluations {{}} {roles.TENANT}"
        change(engine, f"REVOKE {right.format('FROM')}")
        answer = http.post("/v1/evaluations", json=fields(2))
        change(engine, f"GRANT {right.format('TO')}")
        assert (answer.status_code, answer.json()["code"]) == (503, "database_unavailable")
        assert "permission" not in answer.text


def test_whoever_takes_the_server_over_gets_no_further(served: Served, login: str, token, fields, engine) -> None:
    """The server's login cannot write verdicts, change evaluations or sources, widen tokens, or gain rights."""
    with served.client(token("problems")) as http:
        identity = http.post("/v1/evaluations", json=fields()).json()["evaluation_id"]
    refused = [
        f"INSERT INTO verdicts (evaluation_id, category, blame) VALUES ('{identity}', 'passed', 'none')",
        "UPDATE verdicts SET category = 'passed'",
        f"INSERT INTO attempts (evaluation_id, number) VALUES ('{identity}', 1)",
        "UPDATE evaluations SET state = 'done'",
        "UPDATE evaluations SET settings = '{}'",
        "UPDATE evaluations SET kernel_hash = problem_hash",
        "DELETE FROM evaluations",
        "UPDATE kernels SET source = 'x'",
        "UPDATE problems SET source = 'x'",
        "UPDATE baselines SET measurement = '{}'",
        "INSERT INTO tokens (id, name, digest, scopes) VALUES (gen_random_uuid(), 'x', 'x', '{admin}')",
        "UPDATE tokens SET scopes = '{admin}'",
        "UPDATE tokens SET digest = 'x'",
        "UPDATE tokens SET revoked_at = NULL, expires_at = NULL",
        "DELETE FROM tokens",
        "UPDATE gpus SET uuid = 'x'",
        "UPDATE workers SET lanes = '{cpu}'",
        "INSERT INTO workers (id) VALUES (gen_random_uuid())",
        "GRANT kqueue_worker TO CURRENT_USER",
        "SET ROLE kqueue_worker",
        "SET ROLE postgres",
        "CREATE ROLE mine",
        "ALTER ROLE CURRENT_USER SUPERUSER",
        "ALTER FUNCTION kqueue_cancel SET search_path = public",
        "CREATE TABLE public.mine (x integer)",
        "SELECT rolpassword FROM pg_authid",
        "COPY kernels TO PROGRAM 'cat'",
    ]
    with connected(login) as connection:
        for statement in refused:
            with pytest.raises(psycopg.errors.InsufficientPrivilege):
                connection.execute(statement)  # pyright: ignore[reportArgumentType]
    assert [known.scopes for known in tokens.listing(engine)] == [(tokens.Scope.PROBLEMS,)]
    with engine.connect() as connection:
        assert connection.execute(text("SELECT state FROM evaluations")).scalar_one() == "queued"
        assert connection.scalar(text("SELECT count(*) FROM verdicts")) == 0
