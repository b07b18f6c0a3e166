"""Tokens: authentication, scopes, and the stored and displayed parts."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from uuid import UUID, uuid4

import httpx
import pytest
from sqlalchemy import Engine, text

from kqueue import BudgetSpent, ConfigError, RemoteClient, Request
from kqueue.config import Config, load
from kqueue.http.app import create_app
from kqueue.states import Priority
from kqueue.store import tokens
from tests.http.serving import command, problem_of
from tests.http.standin import Served, end
from tests.samples import request_fields
from tests.store.steps import change

#: The least scope of each of some requests.
NEEDS = [
    ("GET", "/v1/evaluations", "read"),
    ("GET", "/v1/fleet", "read"),
    ("GET", "/status", "read"),
    ("POST", "/v1/evaluations", "submit"),
    ("POST", "/v1/evaluations/00000000-0000-0000-0000-000000000000/cancel", "submit"),
    ("POST", "/cleanup", "admin"),
    ("POST", "/reset_devices", "admin"),
    ("POST", "/reset_gpu/0", "admin"),
]
#: A problem that is not stored, an entry with it, and the other fields of a job.
NEW = "class Model: new = 1"
ENTRY = {"problem": NEW, "kernel": "k", "backend": "torch", "lane": "cpu"}
JOB = {"problem_id": 1, "sample_id": 0, "custom_cuda": "k", "backend": "torch"}
TASK = {"task_id": "t", "reference_code": NEW, "kernel_code": "k", "backend": "torch"}
LONG = "Bearer " + "x" * 9999
ORDER = ["read", "submit", "problems", "admin"]


def open_to_all(config: Config) -> Config:
    """Settings that need no token of local clients."""
    return config.model_copy(update={"http_tokens": "trust-local-users"})


class TestAccess:
    def test_scopes(self, served: Served, token) -> None:
        """Each scope includes the ones before it."""
        for scope in ORDER:
            with served.client(token(scope)) as http:
                for method, path, needs in NEEDS:
                    answer = http.request(method, path)
                    if ORDER.index(scope) < ORDER.index(needs):
                        problem_of(answer, 403, "forbidden")
                        assert 'error="insufficient_scope"' in answer.headers["www-authenticate"]
                        assert f'scope="{needs}"' in answer.headers["www-authenticate"]
                    else:
                        assert answer.status_code not in {401, 403}, answer.text

    def test_without_one(self, served: Served) -> None:
        """A request without a token is a 401 with advice, and the API's description is open."""
        with served.stranger() as http:
            for method, path, _ in NEEDS:
                answer = http.request(method, path)
                problem_of(answer, 401, "unauthenticated")
                assert answer.headers["www-authenticate"].startswith("Bearer")
            assert http.get("/openapi.json").status_code == 200
            assert http.get("/health").json() == {"status": "healthy"}, "all else of the fleet is for readers"

    def test_a_wrong_one(self, serve, config: Config, worker_id) -> None:
        """A wrong token is refused, also if no token is needed."""
        with serve(open_to_all(config)).stranger() as http:
            for header in ("Bearer nonsense", "Bearer kq_", "Bearer", "Basic a3E6a3E=", "kq_x", "Bearer \xff", LONG):
                answer = http.get("/v1/evaluations", headers={"Authorization": header.encode("latin-1")})
                body = problem_of(answer, 401, "unauthenticated")
                assert header.partition(" ")[2] not in body["detail"] or len(header) < 8

    def test_as_a_password(self, served: Served, token) -> None:
        """Each route accepts a token as the password of HTTP Basic. No browser is asked for one or lets one be used."""
        with served.stranger() as http:
            for method, path, needs in NEEDS:
                answer = http.request(method, path, auth=("anybody", token(needs)))
                assert answer.status_code not in {401, 403}, answer.text
                answer = http.request(method, path, auth=("anybody", "kq_wrong"))
                problem_of(answer, 401, "unauthenticated")
                assert "basic" not in answer.headers["www-authenticate"].lower()
            for headers in ({"Origin": "https://evil.example"}, {"Sec-Fetch-Site": "cross-site"}):
                answer = http.get("/v1/fleet", auth=("", token("read")), headers=headers)
                problem_of(answer, 403, "forbidden")
            for malformed in ("Basic", "Basic !", "Basic \xe9", "Basic a3E=", "Basic gICA"):
                answer = http.get("/v1/fleet", headers={"Authorization": malformed.encode("latin-1")})
                problem_of(answer, 401, "unauthenticated")
        with httpx.Client(base_url=served.url.replace("://", f"://x:{token('read')}@")) as http:
            assert http.get("/v1/fleet").status_code == 200

    def test_revoked_and_expired(self, served: Served, engine: Engine, token) -> None:
        """A revoked or expired token is refused from the next request on."""
        secret = token("read")
        brief = tokens.create(engine, "brief", [tokens.Scope.READ], expires_after=timedelta(hours=1))[1]
        with served.client(secret) as http, served.client(brief) as short:
            assert http.get("/v1/fleet").status_code == short.get("/v1/fleet").status_code == 200
            assert [known.name for known in tokens.revoke(engine, "a read one")] == ["a read one"]
            assert tokens.revoke(engine, "a read one") == []
            change(engine, "UPDATE tokens SET expires_at = now() WHERE name = 'brief'")
            for client in (http, short):
                answer = client.get("/v1/fleet")
                problem_of(answer, 401, "unauthenticated")
                assert 'error="invalid_token"' in answer.headers["www-authenticate"]

    def test_what_lasts_ends_with_the_token(self, served: Served, engine: Engine, token, fields) -> None:
        """A wait gets 401 and a stream ends soon after a revocation, and those of another token go on."""
        secret, other = token("problems"), token("read")
        with served.client(secret) as http, served.client(other) as goes_on, ThreadPoolExecutor(2) as pool:
            made = http.post("/v1/evaluations", json=fields(0, batch="b")).raise_for_status().json()
            wait = f"/v1/evaluations/{made['evaluation_id']}/wait"
            ours, theirs = (
                pool.submit(client.get, wait, params={"timeout": seconds})
                for client, seconds in ((http, 55), (goes_on, 4))
            )
            with http.stream("GET", "/v1/batches/b/events") as stream:
                lines = stream.iter_lines()
                assert "progress" in next(line for line in lines if line.startswith("event:"))
                tokens.revoke(engine, "a problems one")
                assert [line for line in lines if line.startswith("event:")] == []
            problem_of(ours.result(), 401, "unauthenticated")
            assert theirs.result().json()["verdict"] is None

    def test_a_token_is_a_producer(self, served: Served, engine: Engine, fields) -> None:
        """The token's name replaces a declared one. A priority above its limit is an error in that entry's position."""
        known, secret = tokens.create(engine, "b", [tokens.Scope.PROBLEMS], priority=Priority.BATCH)
        high = fields(1, priority="interactive")
        with served.client(secret) as http:
            assert http.post("/v1/evaluations", json=fields(producer="another")).status_code == 201
            assert "at most" in problem_of(http.post("/v1/evaluations", json=high), 422, "invalid_request")["detail"]
            results = http.post("/v1/evaluations/each", json={"entries": [high, fields(2)]}).json()["results"]
            assert [result["evaluation"] is None for result in results] == [True, False]
        with engine.connect() as connection:
            whose = connection.scalars(text("SELECT DISTINCT producer FROM evaluations")).all()
        assert whose == [f"token:{known.id}"]

    def test_elsewhere_than_on_loopback(self, serve, config: Config, worker_id: UUID, token) -> None:
        """A server on an outside address requires tokens of local clients too."""
        served = serve(config.model_copy(update={"http_address": "0.0.0.0"}))
        with served.stranger() as stranger, served.client(token("read")) as reader:
            assert [http.get("/v1/fleet").status_code for http in (stranger, reader)] == [401, 200]


class TestProblems:
    @pytest.fixture
    def http(self, served: Served, token) -> Iterator[httpx.Client]:
        """A client with a token that can submit kernels but no new problems."""
        with served.client(token("submit")) as client:
            yield client

    def test_a_new_one_is_refused(self, http: httpx.Client, engine: Engine) -> None:
        """Each route that accepts a source returns 403, or says so of the task, and no row is written."""
        for path, body in (
            ("/v1/evaluations", ENTRY),
            ("/v1/evaluations/batch", {"entries": [ENTRY]}),
            ("/eval", {"original_model_src": NEW, "custom_model_src": "k", "backend": "torch"}),
            ("/evaluate", JOB | {"ref_arch_src": NEW}),
            ("/evaluate_sync", JOB | {"ref_arch_src": NEW}),
            ("/evaluate", TASK),
            ("/workflow/submit", {"payload": TASK}),
        ):
            answer = http.post(path, json=body)
            assert "can only name stored ones" in problem_of(answer, 403, "forbidden")["detail"]
            assert 'scope="problems"' in answer.headers["www-authenticate"]
        [task] = http.post("/evaluate/batch", json={"batch_id": "b", "tasks": [TASK]}).json()["results"]
        assert (task["status"], task["error_code"]) == ("failed", "forbidden")
        with engine.connect() as connection:
            for table in ("problems", "kernels", "evaluations"):
                assert connection.scalar(text(f"SELECT count(*) FROM {table}")) == 0

    def test_a_stored_one_is_named_or_repeated(self, http: httpx.Client, served: Served, token, fields) -> None:
        """A problem is given by its hash or its source, and one that is not stored is unknown to every token."""
        unknown = fields(2, problem=f"sha256:{'0' * 64}")
        with served.client(token("problems")) as other:
            assert other.post("/v1/evaluations", json=fields(0)).status_code == 201
            body = problem_of(other.post("/v1/evaluations", json=unknown), 422, "unknown_problem")
            tree = fields(3, kernel=f"# kqueue tree sha256:{'1' * 64}\nclass ModelNew: ...")
            told = problem_of(other.post("/v1/evaluations", json=tree), 422, "unknown_problem")
        assert (body["problem_hashes"], told["problem_hashes"]) == (["0" * 64], ["1" * 64])
        problem_of(http.post("/v1/evaluations", json=unknown), 422, "unknown_problem")
        for problem in (fields()["problem"], Request(**fields()).problem_name):
            answer = http.post("/v1/evaluations", json=fields(1, problem=problem))
            assert answer.status_code == 201, answer.text
            identity = answer.json()["evaluation_id"]
            assert http.get(f"/v1/evaluations/{identity}/artifacts/problem.py").text == fields()["problem"]


class TestTheSwitch:
    def test_nothing_else_opens(self, config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
        """An outside address or any other value of the setting does not allow access without a token."""
        for address in ("0.0.0.0", "::", "192.0.2.1", "fleet.example"):
            with pytest.raises(ConfigError, match="KQUEUE_HTTP_TOKENS: trust-local-users is for loopback"):
                create_app(open_to_all(config).model_copy(update={"http_address": address}))
        for value in ("auto", "none", "trust", "TRUST-LOCAL-USERS"):
            monkeypatch.setenv("KQUEUE_HTTP_TOKENS", value)
            with pytest.raises(ConfigError, match="KQUEUE_HTTP_TOKENS"):
                load()


class TestKept:
    def test_only_the_digest(self, engine: Engine, token) -> None:
        """A secret has 256 bits and is found by its digest only."""
        secret = token("read")
        assert re.fullmatch(r"kq_[\w-]{43}", secret)
        with engine.connect() as connection:
            row = connection.execute(text("SELECT * FROM tokens")).one()
        assert secret not in repr(row)
        assert len(row.digest) == 64
        known = tokens.find(engine, secret)
        assert known is not None
        assert known.id == row.id
        assert tokens.find(engine, secret[:-1]) is None
        [first] = tokens.listing(engine)
        assert first.last_used_at is not None
        tokens.find(engine, secret)
        assert tokens.listing(engine) == [first], "its use is noted once a minute"

    def test_a_new_secret(self, engine: Engine) -> None:
        """The former secret is refused at once. The token keeps its row, and is valid again however it ended."""
        identity = uuid4()
        first = tokens.renew(engine, identity, "mine", [tokens.Scope.READ])
        assert tokens.find(engine, first) is not None
        tokens.revoke(engine, str(identity))
        second = tokens.renew(engine, identity, "mine", [tokens.Scope.PROBLEMS])
        assert tokens.find(engine, first) is None
        found = tokens.find(engine, second)
        assert found is not None
        assert (found.id, found.scopes, found.last_used_at) == (identity, (tokens.Scope.PROBLEMS,), None)
        assert len(tokens.listing(engine)) == 1

    def test_how_many_may_wait(self, serve, config: Config, worker_id, engine, token, judge, fields) -> None:
        """Each token has a limit of queued evaluations, above which it gets a 429 with Retry-After."""
        served = serve(config.model_copy(update={"http_max_queued": 2}))
        with served.client(token("problems")) as one, served.client(token("problems", "read")) as other:
            first = one.post("/v1/evaluations", json=fields(0)).json()
            two = {"entries": [fields(1), fields(2)]}
            for way in ("batch", "each"):
                answer = one.post(f"/v1/evaluations/{way}", json=two)
                problem_of(answer, 429, "too_many_queued")
                assert int(answer.headers["retry-after"]) > 0
            assert one.post("/v1/evaluations", json=fields(1)).status_code == 201
            problem_of(one.post("/v1/evaluations", json=fields(2)), 429, "too_many_queued")
            assert other.post("/v1/evaluations/batch", json=two).status_code == 201
            judge(first["evaluation_id"])
            assert one.post("/v1/evaluations", json=fields(2)).status_code == 201


class TestCommand:
    def test_made_listed_and_revoked(self, config: Config, engine: Engine) -> None:
        """The secret is printed once on a line, and the list has all other fields."""
        create = ("token", "create", "--name", "trainer", "--scope", "submit", "--expires", "30d")
        secret = command(config, *create)[1].strip()
        known = tokens.find(engine, secret)
        assert known is not None
        assert (known.name, known.scopes) == ("trainer", (tokens.Scope.SUBMIT,))
        assert known.expires_at is not None
        assert known.expires_at - known.created_at == timedelta(days=30)
        made = json.loads(command(config, "token", "create", "--name", "ops", "--scope", "admin", "--json")[1])
        assert tokens.find(engine, made["token"]) is not None
        listed = command(config, "token", "list", "--json")[1]
        assert [json.loads(line)["name"] for line in listed.splitlines()] == ["trainer", "ops"]
        for shown in (listed, command(config, "token", "list")[1]):
            assert secret not in shown
            assert made["token"] not in shown
            assert known.id.hex not in shown.replace(str(known.id), "")
        status, out, _ = command(config, "token", "revoke", made["id"])
        assert (status, "ops" in out) == (0, True)
        assert tokens.find(engine, made["token"]) is None
        assert command(config, "token", "revoke", "ops")[0] == 1

    def test_what_is_wrong_is_named(self, config: Config, engine: Engine) -> None:
        """The command exits with 2, and creates no token."""
        for given, what in (
            (("--name", "x", "--scope", "root"), "--scope"),
            (("--name", " ", "--scope", "read"), "--name"),
            *((("--name", "x", "--scope", "read", "--expires", age), "--expires") for age in ("soon", "0d", "99999d")),
            *(
                (("--name", "n", "--scope", "read", "--budget", wrong), "3600s/day")
                for wrong in ("3600", "3600s", "0s/day", "10s/", "1h/1y", "5s/0d", "x/day")
            ),
        ):
            status, out, error = command(config, "token", "create", *given)
            assert (status, out) == (2, ""), given
            assert what in error
        assert tokens.listing(engine) == []


def test_a_spent_budget(served: Served, config: Config, engine: Engine, worker_id: UUID) -> None:
    """It is a 429 with the time to wait, a typed exception, and seconds used and left in `token list` and `cost`."""
    made = json.loads(
        command(config, "token", "create", "--name", "n", "--scope", "problems", "--budget", "1m/hour", "--json")[1]
    )
    assert made["budget"] == {"seconds": 60, "window_s": 3600, "then": "refuse", "used_s": 0, "left_s": 60}
    with served.client(made["token"]) as http:
        accepted = http.post("/v1/evaluations", json=request_fields(1)).raise_for_status().json()
        assert end(engine, worker_id, UUID(accepted["evaluation_id"]))
        change(engine, "UPDATE attempts SET started_at = now() - interval '900 s'")
        answer = http.post("/v1/evaluations", json=request_fields(2))
        body = problem_of(answer, 429, "budget_spent")
        assert 3500 < int(answer.headers["retry-after"]) <= 3600
        assert (body["budget_s"], body["window_s"]) == (60, 3600)
        assert http.get(f"/v1/evaluations/{accepted['evaluation_id']}").status_code == 200
        problem_of(http.post("/v1/evaluations/each", json={"entries": [request_fields(3)]}), 429, "budget_spent")
    with RemoteClient(url=served.url, token=made["token"]) as client, pytest.raises(BudgetSpent) as spent:
        client.submit(**request_fields(2))
    assert spent.value.retry_after_s > 3500
    [listed] = [json.loads(line) for line in command(config, "token", "list", "--json")[1].splitlines()][:1]
    assert 600 <= listed["budget"]["used_s"] <= 900
    assert listed["budget"]["left_s"] == 0
    [cost] = [json.loads(line) for line in command(config, "cost", "--json")[1].splitlines()]
    assert cost["budget"]["left_s"] == 0
    assert "then refuse" in " ".join(command(config, "cost")[1].split())
    command(config, "token", "edit", "n", "--budget", "3600s/7d", "--when-spent", "lower")[1]
    with httpx.Client(base_url=served.url, headers={"Authorization": f"Bearer {made['token']}"}, timeout=60) as http:
        assert http.post("/v1/evaluations", json=request_fields(2)).status_code == 201
    command(config, "token", "edit", made["id"], "--no-budget")[1]
    listed = [json.loads(line) for line in command(config, "token", "list", "--json")[1].splitlines()]
    assert [one["budget"] for one in listed] == [None] * len(listed)


def test_a_token_belongs_to_an_owner(config: Config, engine: Engine) -> None:
    """By default to one of its name. Names that no owner has, and an owner of a login that serves all, are refused."""
    create = ("token", "create", "--scope", "read", "--name")
    for name, more, sees in (
        ("a", (), "work of a"),
        ("b", ("--owner", "bob.2"), "work of bob.2"),
        ("Bob's night", ("--owner", "local", "--scope", "read:all"), "all work"),
        ("c", ("--expires", "1s"), "nothing"),
    ):
        status, _, told = command(config, *create, name, *more)
        assert status == 0
        if "--expires" in more:
            change(engine, "UPDATE tokens SET expires_at = now() WHERE name = 'c'")
        else:
            assert told.endswith(f", and sees {sees}\n")
        assert json.loads(command(config, "token", "list", "--json")[1].splitlines()[-1])["sees"] == sees
        assert sees in " ".join(command(config, "token", "list")[1].split())
    assert [known.owner for known in tokens.listing(engine)] == ["a", "bob.2", "local", "c"]
    status, _, error = command(config, *create, "Bob's night")
    assert (status, error.partition(":")[0], "--owner" in error) == (2, "--name", True)
    for refused in (
        (*create, "c", "--owner", "kqueue's probes"),
        ("db", "login", "c", "--role", "reader", "--owner", "bob.2"),
        ("mcp", "--http", "127.0.0.1:0", "--owner", "bob.2"),
    ):
        status, _, error = command(config, *refused)
        assert (status, error.partition(":")[0]) == (2, "--owner"), error


def test_a_limit_of_a_login_names_a_setting(config: Config) -> None:
    """Unknown settings, what is no number, and logins that serve all owners are refused."""
    for role, limit in (
        ("producer", "deadlines.chek_s=3"),
        ("producer", "max_attempts=x"),
        ("reader", "max_attempts=2"),
    ):
        status, _, error = command(config, "db", "login", "c", "--role", role, "--limit", limit)
        assert (status, error.partition(":")[0].split()[0]) == (2, "--limit"), error
