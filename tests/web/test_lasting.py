"""Answers that last: each of them ends soon after its credential, whatever the route."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any
from uuid import uuid4

import httpx
import pytest
from sqlalchemy import Engine

from kqueue.store import gpus, tokens, workers
from kqueue.store.tokens import Scope
from scripts.reference import scopes
from tests.http.standin import Served
from tests.samples import request_fields
from tests.store.steps import change
from tests.waiting import until
from tests.web.visiting import HTML, OWN_FORM, enter

#: Routes that last. Others than these are found too.
LEAST = {
    "/v1/batches/{batch}/events",
    "/v1/evaluations/wait",
    "/v1/evaluations/{evaluation_id}/wait",
    "/eval",
    "/evaluate",
    "/evaluate_sync",
    "/evaluate/batch",
    "/workflow/submit",
    "/live/now",
    "/live/evaluations/{evaluation_id}",
}
#: Routes of which one lasts. The others see that it has taken the GPU.
ONE_OF = {"/cleanup", "/reset_devices", "/reset_gpu/{device_id}"}
#: Seconds in which no answer is completed if all others last, and seconds in which it must end on a slow machine.
LASTS_S = 3.0
ENDS_S = 15.0
UUID_OF_GPU = "GPU-00000000-0000-0000-0000-000000000000"
SCOPES = (Scope.ADMIN, Scope.READ_ALL)


def body(path: str, evaluation_id: str) -> dict[str, Any]:
    """Return a body with the fields of every form of request."""
    if path.startswith("/v1/"):
        return {"evaluation_ids": [evaluation_id], "timeout": 300} if path.endswith("/wait") else {}
    sources = {"problem": "class Model: ...", "kernel": "class ModelNew: number = 0"}
    task = {"task_id": "t", "reference_code": sources["problem"], "kernel_code": sources["kernel"], "backend": "torch"}
    if path == "/evaluate":
        return task
    job = {"problem_id": 1, "sample_id": 1, "ref_arch_src": sources["problem"], "custom_cuda": sources["kernel"]}
    own = {"original_model_src": sources["problem"], "custom_model_src": sources["kernel"]}
    return task | job | own | {"batch_id": "b", "tasks": [task], "payload": task}


class Answer:
    """One request in a thread. ``status`` is 0 until it is answered."""

    def __init__(self, client: httpx.Client, method: str, url: str, **request: Any) -> None:
        self.status = 0
        self._thread = threading.Thread(target=self._read, args=(client, method, url), kwargs=request, daemon=True)
        self._thread.start()

    def _read(self, client: httpx.Client, method: str, url: str, **request: Any) -> None:
        with suppress(httpx.HTTPError), client.stream(method, url, **request) as answer:
            self.status = answer.status_code
            answer.read()

    def lasts(self, for_s: float) -> bool:
        """Return True if it is not complete after some seconds."""
        self._thread.join(for_s)
        return self._thread.is_alive()


@pytest.fixture
def places(served: Served, engine: Engine) -> dict[str, str]:
    """The parts of paths: a queued evaluation in a batch, and a GPU whose tests never end."""
    workers.register(engine, id=uuid4(), name="g", host="h", pid=2, lanes=["gpu"], device=UUID_OF_GPU)
    gpus.register(engine, host="h", index=0, uuid=UUID_OF_GPU, name="NVIDIA H200")
    with served.client() as http:
        fields = request_fields(0, batch="b")
        waits: str = http.post("/v1/evaluations", json=fields).raise_for_status().json()["evaluation_id"]
        until(lambda: http.get("/v1/fleet").json()["gpus"], what="the GPU in the view of the fleet")
    names = ("evaluation_id", "name", "job_id", "first", "second")
    others = {"problem_hash": "0" * 64, "duel_id": "0", "which": "r", "task_id": "t", "device_id": "0", "kind": "best"}
    return dict.fromkeys(names, waits) | others | {"batch": "b", "label": "l"}


def asker(served: Served, secret: str, places: dict[str, str]) -> tuple[Callable[[tuple[str, str]], Answer], list[Any]]:
    """Return a function that sends a request to a route, to a page with a session, and its two clients."""
    described = {(method.upper(), path) for path, one in served.app.openapi()["paths"].items() for method in one}
    limits = httpx.Limits(max_connections=None)
    api = httpx.Client(base_url=served.url, headers={"Authorization": f"Bearer {secret}"}, timeout=300, limits=limits)
    browser = httpx.Client(base_url=served.url, headers=HTML | OWN_FORM, timeout=300, limits=limits)
    assert enter(browser, secret).status_code == 200

    def ask(route: tuple[str, str]) -> Answer:
        method, path = route
        # A request that could cancel the evaluation names another one.
        named = places if method == "GET" else places | {"evaluation_id": str(uuid4())}
        url = path.format(**named) + "?timeout=300&wait_s=300"
        if route in described:
            return Answer(api, method, url, json=body(path, places["evaluation_id"]) if method == "POST" else None)
        return Answer(browser, method, url)

    return ask, [api, browser]


@pytest.mark.nightly
def test_what_lasts_ends_with_the_credential(served: Served, engine: Engine, places: dict[str, str]) -> None:
    """Every route whose answer lasts ends it after revocation, expiry or the end of the browser's session."""
    routes = [route for route in scopes(served.app) if route[1] not in ("/login", "/logout")]
    made = [tokens.create(engine, name, SCOPES, owner="local") for name in ("revoked", "expired", "left")]
    asks = [asker(served, secret, places) for _, secret in made]
    with ThreadPoolExecutor(16) as pool:
        first = dict(zip(routes, pool.map(asks[0][0], routes), strict=True))
    lasting, before = first, {}
    while lasting.keys() != before.keys():
        before = lasting
        time.sleep(LASTS_S)
        lasting = {route: one for route, one in before.items() if one.lasts(0)}
    paths = {path for _, path in lasting}
    assert paths >= LEAST
    assert paths & ONE_OF
    expired = {route: asks[1][0](route) for route in lasting}
    left = {route: asks[2][0](route) for route in lasting if route[1].startswith("/live/")}
    assert [route for answers in (expired, left) for route, one in answers.items() if not one.lasts(0.1)] == []
    begun = time.monotonic()
    tokens.revoke(engine, str(made[0][0].id))
    change(engine, "UPDATE tokens SET expires_at = now() WHERE id = :id", id=made[1][0].id)
    assert asks[2][1][1].post("/logout").status_code == 303
    for answers in (lasting, expired, left):
        slow = {route: one.status for route, one in answers.items() if one.lasts(begun + ENDS_S - time.monotonic())}
        assert slow == {}
        # On a slow machine a route that does not last can be among them, and answers later.
        for (_, path), one in answers.items():
            if path in LEAST:
                assert one.status == (200 if "/live/" in path or path.endswith("/events") else 401), path
    for _, clients in asks:
        for client in clients:
            client.close()
