"""The HTTP application in a thread of the tests, and a stand-in for a worker."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from inspect import signature
from pathlib import Path
from types import MappingProxyType
from typing import Any
from uuid import UUID

import httpx
import pytest
from fastapi import FastAPI
from sqlalchemy import Engine, text

from kqueue.config import Config
from kqueue.contract import Outcome
from kqueue.evidence import Evidence
from kqueue.filters import Filters
from kqueue.http.app import create_app
from kqueue.http.devices import Fleet
from kqueue.http.server import Server, listen, listen_at
from kqueue.store import engine as database
from kqueue.store import evaluations
from kqueue.store.readable import READABLE
from kqueue.web.now import Glances
from tests.http.serving import admin_token
from tests.samples import passed, request_fields
from tests.services import connected, empty
from tests.waiting import repeated, until


class Served:
    """The application on uvicorn in a thread of this process, until closed."""

    def __init__(
        self,
        config: Config,
        path: Path | None = None,
        *,
        server: Mapping[str, Any] = MappingProxyType({}),
        app: Mapping[str, Any] = MappingProxyType({}),
        make: Callable[..., FastAPI] = create_app,
        port: int = 0,
    ) -> None:
        """Serve on loopback, and on a unix socket at ``path`` too, with other limits of server and application."""
        self.config = config
        self._admin = ""
        self.app = make(config, **app)
        self._sockets = [listen("127.0.0.1", port), *([] if path is None else [listen_at(path)])]
        self.port = self._sockets[0].getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self._server = Server(self.app, **server)
        self._thread = threading.Thread(target=self._server.run, kwargs={"sockets": self._sockets})
        with pytest.MonkeyPatch.context() as patch:
            # A busy machine can take longer to open a connection than a server waits for Postgres.
            patch.setattr(database, "CONNECT_TIMEOUT_S", 60)
            self._thread.start()
            until(lambda: self._server.started or not self._thread.is_alive(), what="the server")
        assert self._server.started

    @property
    def admin(self) -> str:
        """Return the secret of a token with the scope `admin`."""
        self._admin = self._admin or admin_token(self.config)
        return self._admin

    def client(self, token: str | None = None) -> httpx.Client:
        """Return an HTTP client with a token, by default with the scope `admin`. The caller closes it."""
        return httpx.Client(base_url=self.url, headers={"Authorization": f"Bearer {token or self.admin}"}, timeout=60)

    def stranger(self) -> httpx.Client:
        """Return an HTTP client without a token. The caller closes it."""
        return httpx.Client(base_url=self.url, timeout=60)

    def emptied(self) -> str:
        """Remove all rows, and the server's caches of them. Return the database's URL."""
        url = self.config.require_database()
        with connected(url) as connection:
            empty(connection, sys.maxsize)
        self._admin = ""
        self.app.state.fleet = Fleet(self.app.state.gateway)
        self.app.state.glances = Glances()
        return url

    def close(self) -> None:
        # A signal's handler would end the streams of all servers in this process.
        self._server.should_exit = True
        self._thread.join()
        for listening in self._sockets:
            listening.close()


def submit(http: httpx.Client, number: int, **fields: object) -> UUID:
    """Submit one of many different evaluations."""
    answer = http.post("/v1/evaluations", json=request_fields(number, **fields)).raise_for_status()
    return UUID(answer.json()["evaluation_id"])


def end(engine: Engine, worker_id: UUID, identity: UUID, outcome: Outcome | None = None, **changes: str) -> bool:
    """End an evaluation like a worker, in an environment with changes. Return False if it cannot be claimed."""
    claimed = evaluations.claim(engine, identity, worker_id=worker_id, lease_s=30)
    if claimed is None:
        return False
    facts: dict[str, Any] = {"device": "test device", "torch": "2.13", "python": "3.11", "host": "here", **changes}
    evaluations.set_environment(engine, claimed.attempt_id, facts, conditions=None)
    given = outcome or passed(log="hello\n", evidence=Evidence(durations_s={"check": 0.1}))
    evaluations.finish(engine, identity, claimed.number, given, written_by="judge", retry_delay_s=0)
    return True


def report_arguments(name: str, places: Mapping[str, str]) -> dict[str, Any]:
    """Return the arguments of a report, which name the place where they can."""
    values: dict[str, Any] = {key: places[key] for key in ("evaluation_id", "problem_hash", "batch", "which", "run_id")}
    values |= {"prefix": places["evaluation_id"], "word": places["which"], "first": places["batch"]}
    values |= {"second": places["batch"], "problem": places["problem_hash"], "kernel": places["label"]}
    values |= {"ids": [places["evaluation_id"]], "batches": [places["batch"]], "token_ids": [places["token_id"]]}
    values |= {"limit": 20, "by": "owner", "since": None, "until": None, "after": None}
    [names] = [set(signature(report).parameters) for report, known in READABLE.items() if known == name]
    names |= set(Filters.__annotations__) if "filters" in names else set()
    return {key: values[key] for key in names & values.keys()}


def worker_that_passes_all(engine: Engine, worker_id: UUID) -> AbstractContextManager[None]:
    """Pass every queued evaluation, in the background."""
    queued = text("SELECT id FROM evaluations WHERE state = 'queued' AND available_at <= now()")

    def work() -> None:
        with engine.connect() as connection:
            ids = connection.scalars(queued).all()
        for identity in ids:
            end(engine, worker_id, identity)

    return repeated(work)
