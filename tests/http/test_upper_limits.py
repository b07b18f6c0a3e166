"""Upper limits of tokens and scopes: one refusal by each way to submit, defaults, and the commands."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import httpx
import pytest
from sqlalchemy import Engine

from kqueue import InvalidRequest, RemoteClient, upper_limits
from kqueue.config import Config
from kqueue.contract import Settings, parse_request
from kqueue.errors import ConfigError
from kqueue.http.app import create_app
from kqueue.store import tokens
from tests.http.serving import command, problem_of
from tests.http.standin import Served
from tests.samples import request_fields

#: Sources and fields of the drop-ins, with a deadline and a number of calls.
SOURCES = {"original_model_src": "class Model: ...", "custom_model_src": "class ModelNew: ...", "backend": "torch"}
JOB = {"problem_id": 1, "sample_id": 1, "ref_arch_src": "class Model: ...", "custom_cuda": "class ModelNew: ..."}
TASK = {"task_id": "t", "reference_code": "class Model: ...", "kernel_code": "class ModelNew: ...", "backend": "torch"}
LIMITS = {"deadlines.check_s": 30.0, "timing.calls": 50, "source_bytes": 1000}
OVER = request_fields(settings={"timing": {"calls": 60}})
WORDS = "settings.timing.calls: 60 exceeds your upper limit of 50"


@pytest.fixture
def limited(served: Served, token: Callable[..., str]) -> Iterator[httpx.Client]:
    """A client whose token has upper limits."""
    with served.client(token(limits=LIMITS)) as client:
        yield client


def settings_of(client: httpx.Client, evaluation_id: str) -> dict[str, Any]:
    """Return the settings of an evaluation."""
    return client.get(f"/v1/evaluations/{evaluation_id}").raise_for_status().json()["settings"]


def test_each_way_refuses_in_the_same_words(limited: httpx.Client, served: Served) -> None:
    """A set number above the limit is a 422 with the limit, and nothing is stored."""
    for path, body in {
        "/v1/evaluations": OVER,
        "/v1/evaluations/batch": {"entries": [request_fields(1), OVER]},
        "/v1/duels": {"a": OVER, "b": {"kernel": "class ModelNew: b = 1", "backend": "torch"}},
        "/eval": SOURCES | {"num_perf_trials": 60},
        "/evaluate": TASK | {"num_perf_trials": 60},
        "/evaluate_sync": JOB | {"backend": "torch", "num_perf_trials": 60},
        "/workflow/submit": {"payload": TASK | {"num_perf_trials": 60}},
    }.items():
        assert problem_of(limited.post(path, json=body), 422, "invalid_request")["detail"] == WORDS, path
    tasks = limited.post("/evaluate/batch", json={"batch_id": "b", "tasks": [TASK | {"num_perf_trials": 60}]}).json()
    assert [one["error_message"] for one in tasks["results"]] == [WORDS]
    assert limited.get("/v1/evaluations").json()["evaluations"] == []
    results = limited.post("/v1/evaluations/each", json={"entries": [OVER, request_fields(2)]}).json()["results"]
    assert [one["error"] and one["error"]["detail"] for one in results] == [WORDS, None]
    secret, refused = (
        limited.headers["authorization"].split()[1],
        pytest.raises(InvalidRequest, match="upper limit of 50"),
    )
    with RemoteClient(served.url, token=secret) as client, refused:
        client.submit(**OVER)
    large = request_fields(problem=f"class Model: '{'é' * 600}'")
    detail = problem_of(limited.post("/v1/evaluations", json=large), 422, "invalid_request")["detail"]
    assert detail == "problem: its 1215 bytes exceed your upper limit of 1000"


def test_numbers_that_are_not_set_are_lowered(limited: httpx.Client) -> None:
    """The evaluation has the limit in its settings. An explicit default is refused, and lower numbers are kept."""
    first = limited.post("/v1/evaluations", json=request_fields(1)).raise_for_status().json()
    lowered = settings_of(limited, first["evaluation_id"])
    assert (lowered["deadlines"]["check_s"], lowered["timing"]["calls"]) == (30, 50)
    assert lowered["deadlines"]["time_s"] == Settings().deadlines.time_s
    default = {"deadlines": {"check_s": Settings().deadlines.check_s}}
    answer = limited.post("/v1/evaluations", json=request_fields(1, settings=default))
    assert "check_s: 60 exceeds your upper limit of 30" in problem_of(answer, 422, "invalid_request")["detail"]
    lower = request_fields(2, settings={"deadlines": {"check_s": 5}})
    second = limited.post("/v1/evaluations", json=lower).raise_for_status().json()
    assert settings_of(limited, second["evaluation_id"])["deadlines"]["check_s"] == 5


def test_clients_of_drop_ins_send_defaults(limited: httpx.Client) -> None:
    """They are lowered, and the same request with the same key is the same evaluation."""
    body = JOB | {"backend": "torch", "num_perf_trials": 100, "num_correct_trials": 5, "timeout": 300}
    ids = {
        limited.post("/evaluate", json=body, headers={"Idempotency-Key": "k"}).raise_for_status().json()["job_id"]
        for _ in range(2)
    }
    [identity] = ids
    lowered = settings_of(limited, identity)
    assert (lowered["deadlines"]["check_s"], lowered["timing"]["calls"]) == (30, 50)
    shorter = limited.post("/evaluate", json=body | {"timeout": 20}).raise_for_status().json()["job_id"]
    assert settings_of(limited, shorter)["deadlines"]["check_s"] == 20


def test_limits_by_scope(
    serve: Callable[[Config], Served], config: Config, worker_id: object, token: Callable[..., str]
) -> None:
    """``*`` is for all tokens, a higher scope takes precedence, and a token's own limits do before all."""
    table = {"*": {"max_attempts": 2, "checks": 4}, "submit": {"checks": 3}, "problems": {"checks": "2"}}
    served = serve(config.model_copy(update={"http_limits": json.dumps(table)}))
    for secret, checks in (
        (token("admin"), 4),
        (token("problems"), 2),
        (token("submit", "problems"), 2),
        (token("problems", limits={"checks": 1}), 1),
    ):
        with served.client(secret) as client:
            answer = client.post("/v1/evaluations", json=request_fields(settings={"checks": checks + 1}, reuse=False))
            assert f"checks: {checks + 1} exceeds your upper limit of {checks}" in answer.json()["detail"]
            made = client.post("/v1/evaluations", json=request_fields(reuse=False)).raise_for_status().json()
            kept = settings_of(client, made["evaluation_id"])
            assert (kept["checks"], kept["max_attempts"]) == (checks, 2)
    with pytest.raises(InvalidRequest, match="running"):
        upper_limits.parse({"running": "3e9"})  # no integer of the database
    for wrong in ("{", '{"reader": {}}', '{"*": {"deadline": 3}}', '{"*": {"checks": 0}}', '{"*": {"running": 2}}'):
        with pytest.raises(ConfigError, match="KQUEUE_HTTP_LIMITS"):
            create_app(config.model_copy(update={"http_limits": wrong}))


def _numbers(schema: Mapping[str, Any], node: Mapping[str, Any], path: str = "") -> Iterator[str]:
    for name, field in node.get("properties", {}).items():
        for kind in field.get("anyOf", [field]):
            if kind.get("type") in ("integer", "number"):
                yield path + name
            elif "$ref" in kind:
                yield from _numbers(schema, schema["$defs"][kind["$ref"].split("/")[-1]], f"{path}{name}.")


def test_every_number_can_have_a_limit(config: Config, engine: Engine) -> None:
    """The command takes each number of a request and of running attempts, and names all for an unknown one."""
    schema = Settings.model_json_schema()
    paths = {*_numbers(schema, schema), "source_bytes", "running"}
    assert {"deadlines.check_s", "tolerance.atol", "seed", "limits.host_memory_bytes", "max_attempts"} < paths
    create = ("token", "create", "--name", "guest", "--scope", "read")
    status, _, error = command(config, *create, "--limit", "deadlines.chek_s=3")
    assert (status, {path for path in paths if path in error}) == (2, paths)
    for wrong in ("timing.purpose=1", "checks=0", "checks=2.5", "checks", "deadlines.check_s=nan", "checks=4XiB"):
        status, _, error = command(config, *create, "--limit", wrong)
        assert (status, error.startswith(f"--limit {wrong.partition('=')[0]}: ")) == (2, True), error
    assert tokens.listing(engine) == []
    listed = {"tolerances": [None, {"atol": 1e-2, "rtol": 0}]}
    with pytest.raises(InvalidRequest, match=r"settings.tolerances: a value exceeds your upper limit tolerance.atol"):
        upper_limits.apply(parse_request(request_fields(settings=listed)), {"tolerance.atol": 1e-3})
    most = {path: 1 if "ratio" in path else 1 << 30 for path in paths}
    most |= dict.fromkeys((path for path in paths if path.startswith("deadlines.")), 3600)
    most |= {"checks": 100, "max_attempts": 10, "timing.calls": 10000, "timing.warmup": 1000, "limits.processes": 65536}
    given = [word for path, number in most.items() for word in ("--limit", f"{path}={number}")]
    assert command(config, *create, *given, "--limit", "limits.host_memory_bytes=4GiB")[0] == 0
    [known] = tokens.listing(engine)
    assert known.limits == most | {"limits.host_memory_bytes": 4 << 30}
    assert command(config, "token", "edit", "guest", "--limit", "checks=3")[0] == 0
    assert "checks=3" in command(config, "token", "list")[1]
    assert json.loads(command(config, "token", "list", "--json")[1])["limits"] == {"checks": 3}
    assert command(config, "token", "edit", "guest", "--no-limits")[0] == 0
    assert [token.limits for token in tokens.listing(engine)] == [{}]
    assert command(config, "token", "edit", "guest", "--no-limits", "--no-budget")[0] == 2
