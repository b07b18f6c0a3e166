"""The API against its own description: whatever it is sent, no 5xx, and no answer that it does not describe."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple
from uuid import uuid4

import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from schemathesis.checks import CHECKS as REGISTRY
from schemathesis.checks import load_all_checks

from kqueue.config import load
from kqueue.local.valkey import Valkey
from kqueue.store import tokens, workers
from kqueue.store.engine import connect
from tests.http.standin import Served, worker_that_passes_all
from tests.samples import request_fields
from tests.services import Server

#: Whether data are accepted is not among them: bodies are checked by more than a schema can say.
load_all_checks()
CHECKS = REGISTRY.get_by_names(
    [
        "not_a_server_error",
        "status_code_conformance",
        "content_type_conformance",
        "response_headers_conformance",
        "response_schema_conformance",
        "unsupported_method",
        "ignored_auth",
    ]
)


class Api(NamedTuple):
    """What a server says of itself, and a token with which it answers."""

    schema: schemathesis.BaseSchema
    bearer: dict[str, str]


@pytest.fixture(scope="module")
def api(server: Server, valkey: Valkey, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Api]:
    """The description that a server gives of itself, with a judge behind it that passes everything."""
    home: Path = tmp_path_factory.mktemp("openapi")
    url = server.clone()
    config = load(database_url=url, redis_url=valkey.url, home=home, scratch=home, lease_s=3600)
    engine = connect(url, application="tests")
    worker = uuid4()
    workers.register(engine, id=worker, name="cpu-0@here", host="here", pid=1, lanes=["cpu", "gpu"], device="cpu")
    served = Served(config)
    try:
        with worker_that_passes_all(engine, worker):
            secret = tokens.create(engine, "tests", [tokens.Scope.ADMIN])[1]
            with served.client(secret) as http:
                http.post("/v1/evaluations", json=request_fields(batch="tuesday")).raise_for_status()
            described = schemathesis.openapi.from_url(f"{served.url}/openapi.json")
            yield Api(described, {"Authorization": f"Bearer {secret}"})
    finally:
        served.close()
        engine.dispose()
        server.drop(url)


def test_every_answer_is_in_the_description(api: Api) -> None:
    """No 5xx, and statuses, media types and bodies as described, for requests right and wrong."""
    for operation in (result.ok() for result in api.schema.get_all_operations()):
        for mode in schemathesis.GenerationMode:
            if operation.path == "/health" and mode is schemathesis.GenerationMode.NEGATIVE:
                continue  # It takes nothing and needs no token, so no request for it is wrong.

            @settings(
                max_examples=10, derandomize=True, deadline=None, database=None, suppress_health_check=list(HealthCheck)
            )
            @given(operation.as_strategy(generation_mode=mode))
            def ask(case: schemathesis.Case) -> None:
                case.call_and_validate(checks=CHECKS, headers=api.bearer, timeout=120)

            ask()


def test_every_route_is_described(api: Api) -> None:
    """Each operation says what it does, how it fails, and who may use it."""
    open_to_all = {"/"}
    for path, operations in api.schema.raw_schema["paths"].items():
        for method, operation in operations.items():
            where = f"{method} {path}"
            assert operation.get("description") or operation.get("summary"), where
            assert "503" in operation["responses"], where
            if path not in open_to_all:
                assert operation.get("security"), where
                assert {"401", "403"} <= operation["responses"].keys(), where
            for status, response in operation["responses"].items():
                if status >= "400":
                    assert "application/problem+json" in response["content"], (where, status)
