"""A producer over HTTP in a process of its own."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from uuid import UUID

from sqlalchemy import Engine

from kqueue.store import evaluations
from tests.http.standin import Served
from tests.samples import request_fields

#: What a producer that has a URL and a token has no use for.
NEEDLESS = {"alembic", "billiard", "celery", "kombu", "psycopg", "redis", "sqlalchemy"}
NEEDLESS |= {"numpy", "opentelemetry", "rich", "torch", "typer"}

PRODUCER = """
import json, sys
import kqueue
with kqueue.RemoteClient(sys.argv[1], token=sys.argv[2]) as kq:
    ticket = kq.submit(**json.loads(sys.argv[3]))
    assert ticket.verdict() is None
print(json.dumps([str(ticket.evaluation_id), sorted({name.partition(".")[0] for name in sys.modules})]))
"""


def test_a_producer_over_http_loads_little(served: Served, engine: Engine, token: Callable[..., str]) -> None:
    """Submitting and asking for the verdict load neither Celery nor a database's driver nor torch."""
    command = [sys.executable, "-c", PRODUCER, served.url, token("problems"), json.dumps(request_fields())]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    identity, loaded = json.loads(done.stdout)
    assert evaluations.existing(engine, [UUID(identity)]) == {UUID(identity)}
    assert NEEDLESS & set(loaded) == set()
