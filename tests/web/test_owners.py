"""Owners over HTTP: every route, of pages too, for every role, and what another owner's work looks like."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from uuid import UUID, uuid4

import httpx
import pytest
from pydantic import SecretStr
from sqlalchemy import Engine

from kqueue.config import Config
from kqueue.features.receipts.checks import verify
from kqueue.receipts import create_key
from kqueue.states import Spent
from kqueue.store import evaluations, gpus, searches, tokens, workers
from kqueue.store.budgets import Budget
from kqueue.store.engine import Viewer, acting
from kqueue.store.tokens import Scope
from scripts.reference import scopes
from tests.http.standin import Served, end, report_arguments
from tests.samples import request_fields
from tests.waiting import until
from tests.web.visiting import HTML, OWN_FORM, enter

#: A word in all texts of the first owner.
MARK = "belongstoada"
#: Sets of scopes, by the name of the role.
ROLES: dict[str, tuple[Scope, ...]] = {
    "read": (Scope.READ,),
    "submit": (Scope.SUBMIT,),
    "problems": (Scope.PROBLEMS,),
    "admin": (Scope.ADMIN,),
    "read:all": (Scope.READ_ALL,),
    "cancel:all": (Scope.CANCEL_ALL,),
}
ALLOWED: dict[Scope | None, set[str]] = {
    None: {*ROLES},
    Scope.READ: {*ROLES} - {"cancel:all"},
    Scope.SUBMIT: {"submit", "problems", "admin"},
    Scope.PROBLEMS: {"problems", "admin"},
    Scope.ADMIN: {"admin"},
}
#: Route that the scope `submit` does not suffice for, because an autopsy submits problems.
AUTOPSY = ("POST", "/evaluations/{evaluation_id}/autopsy")
#: Queries that find the mark, and that do not wait for tests of GPUs.
QUERIES = {"/search": f"?q={MARK}", "/cleanup": "?wait_s=0", "/reset_devices": "?wait_s=0"}
REPORTS = "/v1/reports/"
UUID_OF_GPU = "GPU-00000000-0000-0000-0000-000000000000"


@dataclass
class Work:
    """The work of the first owner, on a server on which the other has nothing. ``nowhere`` names nothing that exists.

    ``pages`` are the routes for browsers.
    """

    served: Served
    places: dict[str, str]
    nowhere: dict[str, str]
    running: UUID
    clients: dict[tuple[str, str], httpx.Client]
    browsers: dict[tuple[str, str], httpx.Client]
    pages: set[tuple[str, str]]

    def ask(
        self, owner: str, role: str, route: tuple[str, str], places: Mapping[str, str], body: Any = None
    ) -> tuple[int, str]:
        """Send a request for one of the places, and return the status, and the text without the place."""
        method, path = route
        is_page = route in self.pages
        client = (self.browsers if is_page else self.clients)[owner, role]
        url = path.format(**places) + QUERIES.get(path, "")
        headers = (HTML | OWN_FORM) if is_page else {}
        with client.stream(method, url, json=None if is_page else body, headers=headers) as answer:
            # A page's stream ends with the fleet.
            is_stream = answer.headers.get("content-type", "").startswith("text/event-stream")
            text = next(answer.iter_text(), "") if is_stream else answer.read().decode("utf-8", "replace")
        for name in sorted({*places.values(), MARK}, key=len, reverse=True):
            text = text.replace(name, "PLACE") if len(name) > 1 and f"q={MARK}" not in url else text
        status = 401 if answer.headers.get("location", "").startswith("/login") else answer.status_code
        return status, text


def _body(path: str, places: Mapping[str, str]) -> Any:
    """Return the body of a POST, which names the place if it can."""
    problem = {"problem": f"sha256:{places['problem_hash']}"}
    match path:
        case "/v1/evaluations":
            return request_fields(**problem)
        case "/v1/evaluations/batch" | "/v1/evaluations/each":
            return {"entries": [request_fields(**problem)]}
        case "/v1/evaluations/wait":
            return {"evaluation_ids": [places["evaluation_id"]], "timeout": 0}
        case "/v1/duels":
            return {"a": request_fields(**problem), "b": {"kernel": "class ModelNew: b = 1", "backend": "torch"}}
        case _:
            return report_arguments(path.removeprefix(REPORTS), places) if path.startswith(REPORTS) else {}


@pytest.fixture
def work(
    serve: Any, house: Served, config: Config, login: str, engine: Engine, worker_id: UUID, tmp_path: Path
) -> Iterator[Work]:
    """A server with the gateway's role, and a key for receipts."""
    create_key(key := tmp_path / "receipts.pem")
    served = serve(config.model_copy(update={"database_url": SecretStr(login), "receipt_key": key}))
    workers.register(
        engine, id=(busy := uuid4()), name="gpu-0@here", host="here", pid=2, lanes=["gpu"], device=UUID_OF_GPU
    )
    gpus.register(engine, host="here", index=0, uuid=UUID_OF_GPU, name="NVIDIA H200")
    clients: dict[tuple[str, str], httpx.Client] = {}
    browsers: dict[tuple[str, str], httpx.Client] = {}
    for owner, (role, own) in itertools.product(("ada", "bob"), ROLES.items()):
        secret = tokens.create(engine, f"{role} of {owner}", own, owner=owner)[1]
        clients[owner, role] = served.client(secret)
        browsers[owner, role] = httpx.Client(base_url=served.url, headers=HTML, timeout=60)
        assert enter(browsers[owner, role], secret).status_code == 200
    marked = {"problem_label": f"{MARK}-p", "kernel_label": f"{MARK}-k", "batch": f"{MARK}-b"}
    fields = request_fields(0, problem=f"class Model: {MARK} = 1", kernel=f"class ModelNew: {MARK} = 1", **marked)
    ada = clients["ada", "problems"]
    done, running = (
        ada.post("/v1/evaluations", json=fields | more).json()["evaluation_id"]
        for more in ({}, {"kernel": f"class ModelNew: {MARK} = 2"})
    )
    assert end(engine, worker_id, UUID(done))
    assert evaluations.claim(engine, UUID(running), worker_id=busy, lease_s=3600) is not None
    sides = [request_fields(0, problem=fields["problem"], kernel=f"class ModelNew: {MARK} = {n}") for n in "34"]
    duel = ada.post("/v1/duels", json={"a": sides[0], "b": {"kernel": sides[1]["kernel"], "backend": "torch"}})
    with acting(Viewer("ada")):
        run = searches.create(engine, f"{MARK}-r", {"of": MARK})
        searches.begin_step(engine, run.id, 0, [{"number": 0, "prompt": MARK}], None)
    token, _ = tokens.create(engine, "budget", (Scope.READ,), owner="ada", budget=Budget(1000.0, 3600.0, Spent.REFUSE))
    hashed = hashlib.sha256(str(fields["problem"]).encode()).hexdigest()
    places = {
        "evaluation_id": done,
        "name": done,
        "job_id": done,
        "problem_hash": hashed,
        "batch": f"{MARK}-b",
        "duel_id": duel.json()["id"],
        "which": f"{MARK}-r",
        "run_id": str(run.id),
        "token_id": str(token.id),
        "label": f"{MARK}-k",
        "first": done,
        "second": done,
        "task_id": f"{MARK}-t",
        "device_id": "7",
        "kind": "roofline",
    }
    ids = ("evaluation_id", "name", "job_id", "first", "second", "run_id", "token_id")
    nowhere = {**places, **dict.fromkeys(ids, str(uuid4()))} | {
        "label": "unknown-k",
        "problem_hash": hashlib.sha256(b"unknown").hexdigest(),
        "batch": "unknown-b",
        "duel_id": "0" * 12 + places["duel_id"][12:],
        "which": "unknown-r",
        "task_id": "unknown-t",
    }
    described = {(method.upper(), path) for path, one in house.app.openapi()["paths"].items() for method in one}
    pages = {route for route in scopes(served.app) if route not in described or route == ("GET", "/")}
    yield Work(served, places, nowhere, UUID(running), clients, browsers, pages)
    for client in (*clients.values(), *browsers.values()):
        client.close()


def _routes(work: Work) -> dict[tuple[str, str], Scope | None]:
    """Return all routes of the application except the login with the scopes that they need."""
    return {route: needed for route, needed in scopes(work.served.app).items() if route[1] not in ("/login", "/logout")}


def test_each_route_for_each_role(work: Work) -> None:
    """A route answers the narrowest role whose scopes cover the one in its row, and refuses those without it."""
    for route, needed in _routes(work).items():
        allowed = ALLOWED[needed] - ({"submit"} if route == AUTOPSY else set())
        # Of the roles that are answered one suffices: tests/http/test_tokens.py compares scopes.
        for role in ROLES.keys() - allowed | {next(role for role in ROLES if role in allowed)}:
            # Nothing has these names, so no request changes anything.
            status, text = work.ask("bob", role, route, work.nowhere, {})
            assert (status in (401, 403)) is (role not in allowed), (*route, role, status, text[:300])


def test_each_route_for_another_owner(work: Work) -> None:
    """Another owner's work gets the same answers as unknown ids, and is in no list. Only ``read:all`` shows it."""
    names = {MARK, str(work.running), *(name for name in work.places.values() if len(name) > 1)}
    shown: set[tuple[str, str]] = set()
    # The server's view of the fleet is seconds old.
    fleet = ("GET", "/v1/fleet")
    until(lambda: str(work.running) in work.ask("ada", "read", fleet, work.places)[1], what="the evaluation")
    for route, needed in _routes(work).items():
        if needed is Scope.ADMIN:
            continue
        method, path = route
        # The widest role without `read:all`.
        theirs, nothing = (work.ask("bob", "admin", route, at, _body(path, at)) for at in (work.places, work.nowhere))
        if path == f"{REPORTS}now":
            pass
        elif "{" in path or method == "POST":
            assert theirs == nothing, route
            assert not path.startswith(REPORTS) or str(work.running) not in theirs[1], route
        elif path == "/search":
            assert "<mark>" not in theirs[1], route
        else:
            assert [name for name in (*names, "PLACE") if name in theirs[1]] == [], route
        if (method == "GET" or path.startswith(REPORTS)) and needed is Scope.READ:
            body = _body(path, work.places)
            own, everything = (
                work.ask(owner, role, route, work.places, body)
                for owner, role in (("ada", "read"), ("bob", "read:all"))
            )
            assert own[0] == everything[0], route
            if all(any(name in text for name in (*names, "PLACE")) for status, text in (own, everything)):
                shown.add(route)
    paths = {path for _, path in shown}
    assert paths >= {"/", "/v1/evaluations", "/v1/fleet", "/evaluations", "/runs", "/batches"}
    assert {path.removeprefix(REPORTS) for path in paths} >= {
        "show", "fleet", "results", "listing", "changes", "named", "search", "search_proposals", "problem",
        "unfinished", "trajectories", "ranking", "leaderboard", "resolve_id", "batch_state", "budgets",
    }  # fmt: skip


def test_only_scopes_of_all_owners_cancel_the_work_of_others(work: Work, engine: Engine) -> None:
    """The evaluation is unknown without ``read:all``, and refused without ``cancel:all``."""
    path = f"/v1/evaluations/{work.running}/cancel"
    answers: list[int] = []
    for more in ((), (Scope.READ_ALL,), (Scope.CANCEL_ALL,)):
        with work.served.client(tokens.create(engine, "of bob", (Scope.SUBMIT, *more), owner="bob")[1]) as client:
            answers.append(client.post(path).status_code)
    assert answers == [404, 403, 200]


def test_owners_share_no_keys_and_batches(work: Work) -> None:
    """Equal sources, keys and names of two owners have nothing in common."""
    fields = request_fields(5, batch="shared", idempotency_key="k", reuse=True)
    first, second, again = (
        work.clients[owner, "problems"].post("/v1/evaluations", json=fields).json() for owner in ("ada", "bob", "bob")
    )
    assert (first["created"], second["created"], again["created"]) == (True, True, False)
    assert second["evaluation_id"] == again["evaluation_id"] != first["evaluation_id"]
    for owner in ("ada", "bob"):
        assert work.clients[owner, "read"].get("/v1/batches/shared").json()["total"] == 1


def test_the_page_has_a_link_to_the_receipt(work: Work) -> None:
    """It is the file that the API signs, for the evaluation's owner only."""
    path = "/evaluations/{evaluation_id}/files/receipt.json".format(**work.places)
    ada, bob = work.browsers["ada", "read"], work.browsers["bob", "read"]
    assert path in ada.get(path.partition("/files")[0]).text
    checks, _ = verify(ada.get(path).raise_for_status().content, None)
    held = "category comparison complete form labels purpose rules signature speedup tolerance"
    assert " ".join(sorted(check.name for check in checks if check.holds)) == held
    assert bob.get(path).status_code == 404
