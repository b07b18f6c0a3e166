"""Shared problems, agents' sessions and erasure: what a hostile owner learns from them, in SQL and over HTTP."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any
from uuid import UUID

import httpx
import psycopg
import pytest
from pydantic import SecretStr
from sqlalchemy import Engine, text

from kqueue.config import Config
from kqueue.evidence import Evidence
from kqueue.store import erasure, evaluations, roles, searches, tokens
from kqueue.store.engine import Viewer, acting
from kqueue.store.tokens import Scope
from tests.http.fixtures import *  # noqa: F403
from tests.http.standin import Served, end
from tests.samples import passed, request_fields, timed
from tests.security.house import tables
from tests.services import connected

MARK = "belongstoada"
HIDDEN = 'SHAPES = [{"name": "a", "args": {"n": 4}}, {"name": "b", "args": {"n": 987654321}, "held_out": True}]'
SOURCE = f"class Model: shared = 1\n{HIDDEN}\n"
HASH = hashlib.sha256(SOURCE.encode()).hexdigest()


@dataclass
class Fleet:
    """Clients of owners, by name, on a server with the gateway's role. The first shares a problem."""

    served: Served
    engine: Engine
    worker: UUID
    clients: dict[str, httpx.Client] = field(default_factory=dict[str, httpx.Client])

    def client(self, owner: str, *scopes: Scope, **headers: str) -> httpx.Client:
        client = self.served.client(tokens.create(self.engine, owner, scopes or (Scope.PROBLEMS,), owner=owner)[1])
        client.headers.update(headers)
        return self.clients.setdefault(f"{owner} {len(self.clients)}", client)

    def submit(self, client: httpx.Client, number: int, status: int = 201, **more: Any) -> str:
        answer = client.post("/v1/evaluations", json=request_fields(number, **{"problem": f"sha256:{HASH}", **more}))
        assert answer.status_code == status, answer.text
        return answer.json().get("evaluation_id", answer.text)

    def judge(
        self, client: httpx.Client, number: int, runtime_ms: float, program: str = "", *, log: str = MARK, **more: Any
    ) -> str:
        """Submit a kernel, and record that it passed in this time."""
        identity = self.submit(client, number, **more)
        evidence = Evidence(program=program or str(number))
        outcome = timed(runtime_ms).model_copy(update={"log": log, "evidence": evidence})
        assert end(self.engine, self.worker, UUID(identity), outcome)
        return identity


@pytest.fixture
def fleet(serve: Callable[..., Served], config: Config, login: str, engine: Engine, worker_id: UUID) -> Iterator[Fleet]:
    served = serve(config.model_copy(update={"database_url": SecretStr(login)}))
    made = Fleet(served, engine, worker_id)
    yield made
    for client in made.clients.values():
        client.close()


def test_a_shared_problem_shows_its_statement_and_times_alone(fleet: Fleet) -> None:
    """Others judge against it by name. They see no held-out shape, source, label, id or log of each other."""
    ada, bob, eve = (fleet.client(name) for name in ("ada", "bob", "eve"))
    fast = fleet.judge(ada, 0, 0.5, problem=SOURCE, kernel_label=MARK, problem_label="relu", batch=MARK)
    place = f"/v1/problems/{HASH}"
    assert fleet.submit(bob, 1, 422)
    assert bob.put(f"{place}/shared").status_code == 422
    assert ada.put(f"{place}/shared").json()["label"] == "relu"
    fleet.judge(bob, 1, 0.25)
    fleet.judge(bob, 2, 0.75)
    # Eve submitted the same source herself, so the leaderboard does not list her.
    fleet.judge(eve, 3, 0.125, problem=SOURCE)
    assert ada.get(f"{place}/board").json() == {"entries": []}
    assert ada.put(f"{place}/shared", params={"leaderboard": True}).json()["leaderboard"] is True
    for client in (ada, bob, eve):
        entries = client.get(f"{place}/board").json()["entries"]
        assert [(one["rank"], one["owner"], one["runtime_ms"]) for one in entries] == [
            (1, "bob", 0.25),
            (2, "ada", 0.5),
        ]
        shown = "baseline_ms device measured owner precision rank runtime_ms settings speedup speedup_low"
        assert " ".join(sorted(entries[0])) == shown
    page = {"Accept": "text/html"}
    for client in (bob, eve):
        seen = [
            client.get(path).text
            for path in (place, "/v1/shared", "/v1/problems", "/v1/leaderboard", "/v1/evaluations")
        ]
        assert "987654321" not in "".join(seen)
        assert MARK not in "".join(seen)
        assert fast not in "".join(seen)
    assert "class Model: shared = 1" in bob.get(place).json()["source"]
    assert bob.delete(f"{place}/shared").status_code == 422
    assert ada.delete(f"{place}/shared", headers=page).status_code == 204
    assert bob.get(f"{place}/board").json() == {"entries": []}
    fleet.judge(bob, 4, 0.5)  # its copy stays
    fleet.submit(fleet.client("zoe"), 5, 422)


def test_a_board_ranks_programs_by_its_own_settings(fleet: Fleet) -> None:
    """Copies of a kernel are one program, many programs lower the bound, and other settings have no rank."""
    ada, bob = (fleet.client(name) for name in ("ada", "bob"))
    place, checks = f"/v1/problems/{HASH}", {"checks": 6}
    fleet.judge(ada, 0, 0.5, problem=SOURCE, settings=checks)
    assert ada.put(f"{place}/shared", params={"leaderboard": True}).status_code == 200
    loose = {"tolerance": {"atol": 1e9, "rtol": 0.0, "matched_ratio": 1.0}}
    fleet.judge(bob, 1, 0.125, settings=loose)
    fleet.judge(bob, 6, 0.125, settings={**checks, "timing": {"purpose": "train"}})  # too imprecise for a rank
    for number, runtime_ms in ((2, 0.25), (3, 0.625), (4, 1.25)):
        fleet.judge(bob, number, runtime_ms, "copy", settings={**checks, "policies": {"findings": "flag"}})

    def entries() -> list[dict[str, Any]]:
        return ada.get(f"{place}/board").json()["entries"]

    told = [(one["rank"], one["owner"], one["runtime_ms"], one["measured"], one["settings"]) for one in entries()]
    assert told == [(1, "ada", 0.5, 1, checks), (2, "bob", 0.625, 3, checks), (None, "bob", 0.125, 1, loose)]
    [bound] = [one["speedup_low"] for one in entries() if one["owner"] == "ada"]
    fleet.judge(ada, 5, 1.0, settings=checks)
    [first] = [one for one in entries() if one["owner"] == "ada"]
    assert (first["speedup"], first["speedup_low"] < bound < 2) == (2.0, True)


def test_a_login_of_the_database_gets_no_shared_problem(fleet: Fleet, config: Config) -> None:
    """It reads neither the table, nor the copy with held-out shapes, nor the board, and forges neither."""
    ada, bob = fleet.client("ada"), fleet.client("bob")
    fleet.judge(ada, 0, 0.5, problem=SOURCE)
    assert ada.put(f"/v1/problems/{HASH}/shared", params={"leaderboard": True}).status_code == 200
    fleet.judge(bob, 1, 0.5)
    roles.login(fleet.engine, name := f"bob_{fleet.worker.hex[:8]}", roles.PRODUCER, "x", owner="bob")
    refused = psycopg.errors.InsufficientPrivilege, psycopg.errors.CheckViolation
    with connected(config.require_database(), username=name, password="x") as connection:
        connection.execute("SET kqueue.owner = 'ada'; SET kqueue.sees = 'all'; SET kqueue.session = ''")
        assert connection.execute("SELECT * FROM shared_problems").fetchall() == []
        assert connection.execute("SELECT * FROM problems").fetchall() == []
        for statement in (
            "SELECT kqueue_board(hash, 9) FROM (SELECT 'x' AS hash) AS one",
            f"INSERT INTO shared_problems (hash, label, source) VALUES ('{HASH}', 'x', 'poison')",
            f"INSERT INTO shared_problems (hash, owner, label, source) VALUES ('{HASH}', 'ada', 'x', 'poison')",
            "INSERT INTO problems (hash, source, shared_from) VALUES ('x', 'held_out', 'ada')",
            "INSERT INTO evaluations (id, session) VALUES (gen_random_uuid(), 'mine')",
            "DELETE FROM shared_problems",
        ):
            with pytest.raises(refused):
                connection.execute(statement)
        assert connection.execute("SELECT kqueue_unshare(%s)", [HASH]).fetchone() == (False,)
    with fleet.engine.connect() as connection:
        connection.execute(text(f'DROP ROLE "{name}"'))
        connection.commit()


def test_a_session_reads_what_it_submitted(fleet: Fleet) -> None:
    """Another session of the same owner looks like another owner: in reads, cancellations, keys, reuse and SQL."""
    first, second = (fleet.client("ada", **{"Kqueue-Session": name}) for name in ("one", "two"))
    whole = fleet.client("ada")
    fields: dict[str, Any] = {"problem": f"class Model: {MARK}", "idempotency_key": "k", "reuse": True}
    identity = fleet.judge(first, 0, 0.5, kernel=f"class ModelNew: {MARK}", batch=MARK, **fields)
    digest = hashlib.sha256(str(fields["problem"]).encode()).hexdigest()
    names = [identity, MARK, digest]
    for path in (
        *(f"/v1/evaluations/{identity}{rest}" for rest in ("", "/log", "/artifacts/kernel.py", "/wait?timeout=0")),
        *("/v1/evaluations", "/v1/problems", "/v1/leaderboard", f"/v1/batches/{MARK}", f"/v1/problems/{digest}"),
    ):
        own, other = first.get(path), second.get(path)
        assert any(name in own.text for name in names), path
        text_of_other = other.text.replace(path, "")
        if f"evaluations/{identity}" not in path and digest not in path and "batches" not in path:
            assert not any(name in text_of_other for name in names), path
        else:
            assert other.status_code in (404, 422), path
    assert second.post(f"/v1/evaluations/{identity}/cancel").status_code == 404
    assert whole.get(f"/v1/evaluations/{identity}").status_code == 200
    again = second.post("/v1/evaluations", json=request_fields(0, kernel=f"class ModelNew: {MARK}", **fields)).json()
    assert (again["created"], again.get("reused", False)) == (True, False)
    with acting(Viewer("ada", held=True, session="two")):
        assert not evaluations.existing(fleet.engine, [UUID(identity)])
    for wrong in ("a b", "one;evaluations=x", "one;more=1", "x" * 65):
        assert fleet.client("ada", **{"Kqueue-Session": wrong}).get("/v1/problems").status_code == 400
    wide = fleet.client("ada", Scope.ADMIN, Scope.READ_ALL, **{"Kqueue-Session": ""})
    fleet.submit(fleet.client("bob"), 7, problem="class Model: bob = 1")
    assert {one["owner"] for one in wide.get("/v1/evaluations").json()["evaluations"]} == {"ada"}
    assert wide.post("/cleanup").status_code == 403
    for session in (first, wide):
        assert session.put(f"/v1/problems/{digest}/shared").status_code == 403
        assert session.delete(f"/v1/problems/{digest}/shared").status_code == 403


def test_sessions_with_equal_keys_have_their_own_duels(fleet: Fleet) -> None:
    """Rounds of one session do not occupy the keys of another."""
    body = {"a": request_fields(0), "b": {"kernel": request_fields(1)["kernel"], "backend": "torch"}}
    session = fleet.client("ada")
    session.params = {"trials": "with"}
    for name in ("one", "two"):
        session.headers["Kqueue-Session"] = name
        begun = session.post("/v1/duels", json=body, headers={"Idempotency-Key": "k"}).json()
        for one in session.get("/v1/evaluations").json()["evaluations"]:
            assert end(fleet.engine, fleet.worker, UUID(one["evaluation_id"]), passed())
        assert session.get(f"/v1/duels/{begun['id']}").status_code == 200
        assert len(session.get("/v1/evaluations").json()["evaluations"]) > 2


def test_a_session_s_limits(fleet: Fleet) -> None:
    """They count all its submissions. Another session has its own."""
    few = fleet.client("ada", **{"Kqueue-Session": "one;evaluations=2"})
    kept = {"problem": "class Model: ..."}
    for number in range(2):
        fleet.submit(few, number, **kept)
    assert "2 evaluations in all" in fleet.submit(few, 2, 403, **kept)
    fleet.submit(fleet.client("ada", **{"Kqueue-Session": "two;evaluations=1;seconds=9"}), 3, **kept)
    assert "used up" in fleet.submit(fleet.client("ada", **{"Kqueue-Session": "three;seconds=0"}), 4, 403, **kept)


def test_erasure_leaves_costs_alone(fleet: Fleet) -> None:
    """No table has a text of the owner, its tokens are revoked, a repetition does nothing, and others keep theirs."""
    ada, bob = fleet.client("ada"), fleet.client("bob")
    marked = {"problem": f"class Model: {MARK}", "problem_label": MARK, "kernel_label": MARK, "batch": MARK}
    fleet.judge(ada, 0, 0.5, kernel=f"class ModelNew: {MARK}", idempotency_key=MARK, **marked)
    fleet.submit(ada, 1, kernel=f"class ModelNew: {MARK} = 2", **marked)
    kept = fleet.judge(bob, 2, 0.5, log="of bob", problem="class Model: bob = 1")
    with acting(Viewer("ada")):
        run = searches.create(fleet.engine, MARK, {"of": MARK})
        searches.begin_step(fleet.engine, run.id, 0, [{"number": 0, "prompt": MARK}], MARK)
    cost = (
        "SELECT owner, count(*), sum(extract(epoch FROM ended_at - started_at)) FROM evaluations e LEFT JOIN attempts a"
    )
    cost += " ON a.evaluation_id = e.id GROUP BY 1 ORDER BY 1"

    def costs() -> list[Any]:
        with fleet.engine.connect() as connection:
            return [tuple(row) for row in connection.execute(text(cost))]

    before = costs()
    erased = erasure.erase(fleet.engine, "ada", cancel=partial(evaluations.cancel, fleet.engine))
    assert (erased.evaluations, erased.searches, erased.tokens, erased.left) == (2, 1, 1, 0)
    digests = [hashlib.sha256(str(marked["problem"]).encode()).hexdigest()]
    assert [name for name, rows in tables(fleet.engine).items() if any(one in rows for one in (MARK, *digests))] == []
    assert costs() == before
    assert ada.get("/v1/evaluations").status_code == 401
    assert bob.get(f"/v1/evaluations/{kept}/log").text == "of bob"
    again = erasure.erase(fleet.engine, "ada", cancel=partial(evaluations.cancel, fleet.engine))
    assert again == erasure.Erased(0, 0, 0, 0, 0)
    admin = fleet.client("local", Scope.READ, Scope.READ_ALL)
    for one in admin.get("/v1/evaluations").json()["evaluations"]:
        assert admin.get(f"/v1/evaluations/{one['evaluation_id']}").status_code == 200
