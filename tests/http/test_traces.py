"""The trace that a request over HTTP names."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from itertools import product
from pathlib import Path

import httpx
from sqlalchemy import Engine, text

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


def test_the_header_is_kept(http: httpx.Client, engine: Engine) -> None:
    """With each way to submit; one that is none counts for nothing, and the next request has its own."""
    for number, (path, header) in enumerate(product(("", "/batch", "/each"), (PARENT, "nonsense", "\xff", None))):
        fields = request_fields(number)
        headers = {} if header is None else {"traceparent": header.encode("latin-1")}
        answer = http.post(f"/v1/evaluations{path}", json={"entries": [fields]} if path else fields, headers=headers)
        assert answer.is_success
    assert sorted(kept(engine).values(), key=str) == [PARENT] * 3 + [None] * 9


def test_clients_over_http_send_it(served: Served, engine: Engine) -> None:
    """Both of them, in a producer that uses OpenTelemetry: its span of the submission is the parent."""
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
