"""The trace that a request over HTTP names."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest
from sqlalchemy import Engine, text

from kqueue.config import Config
from tests.http.standin import Served
from tests.samples import request_fields
from tests.traces.collector import collector

PRODUCER = Path(__file__).parents[1] / "traces" / "producer.py"
PARENT = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"


def kept(engine: Engine) -> dict[str, str | None]:
    """What each evaluation names."""
    with engine.connect() as connection:
        rows = connection.execute(text("SELECT id, traceparent FROM evaluations"))
        return {str(row.id): row.traceparent for row in rows}


@pytest.mark.parametrize(("path", "many"), [("", False), ("/batch", True), ("/each", True)])
def test_the_header_is_kept(http: httpx.Client, engine: Engine, path: str, many: bool) -> None:
    """With each way to submit; one that is none counts for nothing, and the next request has its own."""
    for number, header in enumerate((PARENT, "nonsense", "\xff", None)):
        fields = request_fields(number)
        headers = {} if header is None else {"traceparent": header.encode("latin-1")}
        answer = http.post(f"/v1/evaluations{path}", json={"entries": [fields]} if many else fields, headers=headers)
        assert answer.is_success
    assert sorted(kept(engine).values(), key=str) == [PARENT, None, None, None]


def test_clients_over_http_send_it(
    serve: Callable[[Config], Served], config: Config, engine: Engine, worker_id: object
) -> None:
    """Both of them, in a producer that uses OpenTelemetry: its span of the submission is the parent."""
    served = serve(config)
    with collector() as taking:
        done = subprocess.run(
            [sys.executable, str(PRODUCER), served.url, served.admin, json.dumps(request_fields(reuse=False))],
            env=os.environ | taking.variables(),
            capture_output=True,
            text=True,
            timeout=90,
        )
        assert done.returncode == 0, done.stderr
        submits = [f"00-{span.trace}-{span.identity}-01" for span in taking.spans if span.name == "submit"]
    ids = done.stdout.split()
    assert len(ids) == 2
    assert kept(engine) == dict(zip(ids, submits, strict=True))
