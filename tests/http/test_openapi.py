"""The API against its own description: no 5xx, and no undocumented answer, for any request."""

from __future__ import annotations

from typing import NamedTuple

import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from schemathesis.checks import CHECKS as REGISTRY
from schemathesis.checks import load_all_checks
from sqlalchemy import Engine

from tests.http.standin import Served
from tests.samples import request_fields
from tests.store.steps import lasting_worker

#: The check of accepted data is left out, because a schema cannot express all rules for bodies.
load_all_checks()
_CONFORMS = [f"{what}_conformance" for what in ("status_code", "content_type", "response_headers", "response_schema")]
CHECKS = REGISTRY.get_by_names(["not_a_server_error", *_CONFORMS, "unsupported_method", "ignored_auth"])


class Api(NamedTuple):
    """A server's description, and a token."""

    schema: schemathesis.BaseSchema
    bearer: dict[str, str]


@pytest.fixture
def api(served: Served, judging: None, engine: Engine) -> Api:
    """The description from a server with a worker that passes every evaluation."""
    lasting_worker(engine, "gpu", "GPU-0")
    with served.client() as http:
        http.post("/v1/evaluations", json=request_fields(batch="tuesday")).raise_for_status()
    return Api(schemathesis.openapi.from_url(f"{served.url}/openapi.json"), {"Authorization": f"Bearer {served.admin}"})


@pytest.mark.nightly
def test_every_answer_is_in_the_description(api: Api) -> None:
    """Valid and invalid requests get no 5xx, and only documented statuses, media types and bodies."""
    for operation in (result.ok() for result in api.schema.get_all_operations()):
        for mode in schemathesis.GenerationMode:
            if operation.path in {"/health", "/v1/keys"} and mode is schemathesis.GenerationMode.NEGATIVE:
                continue  # They have no parameters and no token, so no request for them is wrong.

            @settings(
                max_examples=10, derandomize=True, deadline=None, database=None, suppress_health_check=list(HealthCheck)
            )
            @given(operation.as_strategy(generation_mode=mode))
            def ask(case: schemathesis.Case) -> None:
                case.call_and_validate(checks=CHECKS, headers=api.bearer, timeout=120)

            ask()
