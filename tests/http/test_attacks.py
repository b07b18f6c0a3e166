"""The server under attack: by clients without a token, by pages in browsers, and by hostile or faulty token holders."""

from __future__ import annotations

import gzip
import hashlib
import json
import re
import resource
import socket
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from itertools import product
from typing import Any
from uuid import UUID

import httpx
import pytest
from sqlalchemy import Engine, text

from kqueue import kernelbench
from kqueue.config import MAX_BATCH, Config
from kqueue.http import server as servers
from kqueue.store import tokens
from tests.http.serving import problem_of
from tests.http.standin import Served
from tests.store.steps import count
from tests.waiting import until

JSON = {"Content-Type": "application/json"}

#: Routes that read a body.
BODIED = [f"/v1/evaluations{way}" for way in ("", "/batch", "/each", "/wait")]
BODIED += ["/eval", "/evaluate", "/evaluate_sync", "/evaluate/batch", "/workflow/submit"]
#: One form of the native API and two drop-ins.
SOME = BODIED[2::3]

#: Framings that leave the end of a body ambiguous.
FRAMINGS = [
    b"Content-Length: 5\r\nTransfer-Encoding: chunked",
    b"Transfer-Encoding: chunked\r\nContent-Length: 5",
    b"Content-Length: 0\r\nTransfer-Encoding: chunked",
    b"content-length:5\r\nTRANSFER-ENCODING:\tChunked",
    b"Content-Length: 5\r\nContent-Length: 6",
    *(b"Content-Length:" + length for length in b" 5, 6/ +5/ 0x5/ 5 5/".split(b"/")),
    *(b"Transfer-Encoding:" + coding for coding in b" chunked, identity/ identity, chunked/ xchunked/".split(b"/")),
    *(b"Transfer-Encoding: " + coding for coding in (b"chunked;x=y", b"identity")),
    *(b"Transfer-Encoding: chunked\r\nTransfer-Encoding: " + coding for coding in (b"identity", b"chunked")),
    *(name + b" : chunked" for name in (b"Transfer-Encoding", b"X: y\nTransfer-Encoding")),
    b"Content-Length : 5",
]
#: Malformed request heads.
NO_REQUESTS = [
    b"GET /v1/fleet HTTP/1.1\r\nHost: [::1\r\n\r\n",
    b"GET /v1/fleet HTTP/1.1\r\nHost: [\r\nAuthorization: Bearer kq_x\r\n\r\n",
    b"GET /v1/fleet HTTP/1.1\r\nHost: x\r\nHost: y\r\n\r\n",
    b"GET /v1/fleet HTTP/1.0\r\n\r\n",
    b"GET /v1/fleet HTTP/1.1\r\nHost: x\r\nX: " + b"x" * 100_000 + b"\r\n\r\n",
    b"GET /v1/fleet HTTP/1.1\r\nHost: x\r\n" + b"X: x\r\n" * 20_000 + b"\r\n",
    b"GET /v1/fleet HTTP/1.1\r\nHost: x\r\nContent-Length: " + b"9" * 5000 + b"\r\n\r\n",
    b"POST /eval HTTP/1.1\r\nHost: x\r\nContent-Length: -1\r\n\r\n",
    b"POST /eval HTTP/1.1\r\nHost: x\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\n",
    b"POST /eval HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: gzip\r\n\r\n",
    b"GET /\xff HTTP/1.1\r\nHost: x\r\n\r\n",
    b"GET http://127.0.0.1:1/v1/fleet HTTP/1.1\r\nHost: x\r\n\r\n",
    b"CONNECT 127.0.0.1:1 HTTP/1.1\r\nHost: x\r\n\r\n",
    b"GET /%2e%2e/%2e%2e/etc/passwd HTTP/1.1\r\nHost: x\r\n\r\n",
    b"GET /v1/evaluations/%00/log HTTP/1.1\r\nHost: x\r\n\r\n",
    b"GET /v1/fleet HTTP/1.1\r\nHost: x\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\n",
    b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
]
#: Headers of requests that a browser sends for a page of another site.
PAGES = [
    *({"Host": host} for host in ("[::1", "[", "127.0.0.1.evil.example", "localhost.evil.example")),
    *({"Origin": origin} for origin in ("http://[::1", "null")),
    *({"Sec-Fetch-Site": site} for site in ("cross-site", "same-site")),
]
#: Fields of an entry that are valid JSON and an invalid evaluation.
UNHOLDABLE = [
    *(f'"queue_wait_s": {number}' for number in ("NaN", "Infinity", "1e400")),
    '"settings": {"deadlines": {"load_s": NaN}}',
    '"settings": {"tolerance": {"atol": -Infinity, "rtol": 0}}',
    '"settings": {"seed": 1e300}',
    '"settings": {"checks": 1%s}' % ("0" * 4000),
    '"settings": {"limits": {"host_memory_bytes": 1%s}}' % ("0" * 400),
    '"settings": {"limits": {"file_bytes": 9223372036854775808}}',
    '"settings": {"limits": {"scratch_bytes": 1e300}}',
    '"settings": {"limits": {"output_bytes": 9223372036854775808}}',
    '"problem_label": "\\ud800"',
    '"batch": "\\udfff"',
    '"batch": "a\\u0000b"',
    '"idempotency_key": "\\ud800"',
    '"lane": "\\ud800"',
    '"lane": "gpu.\\u0000"',
    '"\\ud800": 1',
    '"__class__": {"__init__": 1}',
    '"settings": [[1]]',
    '"backend": null',
]
#: A request that could be smuggled after another one on the same connection.
FOLLOWER = b"GET /health HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"


def connected(url: str) -> socket.socket:
    host, _, port = url.removeprefix("http://").rpartition(":")
    return socket.create_connection((host, int(port)), timeout=30)


def first_line(connection: socket.socket) -> bytes:
    """Return the first line of a server's answer, or an empty one if the server closed the connection."""
    received = b""
    while b"\r\n" not in received and (more := connection.recv(4096)):
        received += more
    return received.partition(b"\r\n")[0]


def everything(connection: socket.socket) -> bytes:
    """Return all bytes that a server sends until it closes the connection."""
    received = b""
    while more := connection.recv(65536):
        received += more
    return received


class TestStrangers:
    def test_no_body_of_theirs_is_read(self, served: Served) -> None:
        """Requests without a token are refused before any byte of their bodies is sent."""
        head = b"POST %s HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n%s%s\r\n\r\n"
        sizes = (b"Content-Length: 1000000", b"Transfer-Encoding: chunked")
        for path, size, token in product(BODIED, sizes, (b"", b"Authorization: Bearer kq_wrong\r\n")):
            with connected(served.url) as connection:
                connection.sendall(head % (path.encode(), token, size))
                assert first_line(connection) == b"HTTP/1.1 401 Unauthorized", (path, size, token)

    def test_requests_that_are_none(self, served: Served, caplog: pytest.LogCaptureFixture) -> None:
        """Each malformed request is refused with a 4xx, and the server logs no error."""
        for head in NO_REQUESTS:
            with connected(served.url) as connection:
                connection.sendall(head)
                connection.shutdown(socket.SHUT_WR)
                line = first_line(connection)
            assert line[:10] == b"HTTP/1.1 4" or line == b"", (head[:100], line)
        assert not [record for record in caplog.records if record.exc_info], caplog.text

    @pytest.mark.parametrize("credential", [False, True])
    def test_no_request_has_two_ends(self, served: Served, credential: bool) -> None:
        """A body with an ambiguous end is refused with 400, and the server closes the connection without reading on."""
        bearer = b"Authorization: Bearer %s\r\n" % served.admin.encode() if credential else b""
        head = b"POST /eval HTTP/1.%d\r\nHost: x\r\nContent-Type: application/json\r\n%s%s\r\n\r\n"
        # HTTP/1.0 has no chunks.
        for minor, framing in [*((1, framing) for framing in FRAMINGS), (0, b"Transfer-Encoding: chunked")]:
            with connected(served.url) as connection:
                connection.sendall(head % (minor, bearer, framing) + b"0\r\n\r\n" + FOLLOWER)
                answer = everything(connection)
            assert answer.startswith(b"HTTP/1.1 400 "), (framing, answer)
            assert answer.count(b"HTTP/1.1 ") == 1, framing
            assert b"connection: close" in answer.lower(), framing

    def test_one_length_told_twice_is_one(self, served: Served) -> None:
        """Two equal lengths are unambiguous: the body has that length, and the next request follows it."""
        bearer = b"Authorization: Bearer %s\r\n" % served.admin.encode()
        head = b"POST /eval HTTP/1.1\r\nHost: x\r\n%sContent-Type: application/json\r\n%s\r\n{}"
        with connected(served.url) as connection:
            connection.sendall(head % (bearer, 2 * b"Content-Length: 2\r\n") + FOLLOWER)
            answer = everything(connection)
        assert re.findall(rb"HTTP/1.1 (\d+)", answer) == [b"422", b"200"]

    def test_pages_of_browsers(self, serve, config: Config, worker_id: UUID, token) -> None:
        """Pages get no access without a token, even if local programs do, under any host name."""
        with serve(config.model_copy(update={"http_tokens": "trust-local-users"})).stranger() as http:
            for headers in PAGES:
                for method, path in (("GET", "/v1/evaluations"), ("POST", "/cleanup"), ("GET", "/health")):
                    problem_of(http.request(method, path, headers=headers), 403, "forbidden")
                bearer = {"Authorization": f"Bearer {token('problems')}"}
                assert "Host" in headers or http.get("/v1/fleet", headers=headers | bearer).status_code == 200
            for own in ({}, {"Origin": str(http.base_url)}):
                assert http.get("/v1/fleet", headers=own).status_code == 200

    def test_no_page_is_allowed_anything(self, http: httpx.Client, fields) -> None:
        """No preflight is allowed, and a page's body is not parsed as JSON. A body without a type is."""
        asked = {"Origin": "http://evil.example", "Access-Control-Request-Method": "POST"}
        answer = http.options("/v1/evaluations", headers=asked)
        problem_of(answer, 405, "method_not_allowed")
        assert not [name for name in answer.headers if name.startswith("access-control")]
        for kind in ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x"):
            answer = http.post("/v1/evaluations", content=json.dumps(fields()), headers={"Content-Type": kind})
            problem_of(answer, 415, "unsupported_media_type")
        assert http.post("/v1/evaluations", content=json.dumps(fields())).status_code == 201

    def test_what_ails_the_services_is_not_told(self, serve, config, engine, worker_id, server, caplog) -> None:
        """Errors contain no hosts, paths, users or statements. The log has them, in one line per request."""
        served = serve(config)
        name = str(engine.url.database)
        server.execute(f'ALTER DATABASE "{name}" ALLOW_CONNECTIONS false')
        server.cut(config.require_database())
        try:
            with served.client("kq_" + "x" * 43) as stranger:
                for path in ("/health", "/v1/batches/%0aFAKE%1b%5b2J%0d", "/openapi.json/%0aFAKE"):
                    answer = stranger.get(path)
                    if answer.status_code == 404:
                        continue
                    body = problem_of_any(answer, 503, "database_unavailable")
                    for secret in (name, "FATAL", "socket", "host", "psycopg", "SELECT", "postgres://"):
                        assert secret not in body["detail"]
                body = problem_of_any(stranger.post("/eval", json={}), 503, "database_unavailable")
                assert name not in json.dumps(body)
        finally:
            server.execute(f'ALTER DATABASE "{name}" ALLOW_CONNECTIONS true')
        told = [record.getMessage() for record in caplog.records if record.name == "kqueue.http.failures"]
        assert any(name in line for line in told)
        assert not any(set(line) & {"\n", "\r", "\x1b"} for line in told)


def problem_of_any(answer: httpx.Response, status: int, code: str) -> dict[str, Any]:
    """Return the problem in an answer with an unprintable path."""
    assert (answer.status_code, answer.json()["code"]) == (status, code), answer.text
    return answer.json()


class TestConnections:
    def test_requests_that_do_not_come_in(self, serve, config: Config, worker_id: UUID, fields) -> None:
        """Slow and incomplete requests are disconnected, but waits for verdicts are not."""
        with serve(config, server={"receive_s": 1.0}).client() as http:
            identity = http.post("/v1/evaluations", json=fields()).json()["evaluation_id"]
            whole = b"GET /v1/categories HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n"
            starts = {
                b"": b"",
                b"GET / HTTP/1.1\r\nHost: 127.0.0.1\r\nX": b"x",
                b"POST /eval HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 9999\r\n\r\n{": b" ",
                whole + whole[:-2]: b"X: x\r\n",
            }
            with ExitStack() as stack:
                slow = {
                    stack.enter_context(connected(str(http.base_url))): drip for drip in starts.values() for _ in [0]
                }
                for connection, start in zip(slow, starts, strict=True):
                    connection.sendall(start)
                    connection.settimeout(0.1)
                open_still = dict(slow)
                deadline = time.monotonic() + 60
                while open_still:
                    assert time.monotonic() < deadline, "a connection is kept"
                    for connection, drip in list(open_still.items()):
                        try:
                            connection.sendall(drip)
                            if not connection.recv(65536):
                                del open_still[connection]
                        except TimeoutError:
                            pass
                        except OSError:
                            del open_still[connection]
            answer = http.get(f"/v1/evaluations/{identity}/wait", params={"timeout": 3})
            assert answer.json() == {"evaluation_id": identity, "verdict": None}

    def test_more_than_there_is_room_for(self, serve, config: Config, worker_id: UUID) -> None:
        """Clients over the limit are asked to retry, and are answered when a connection is free."""
        served = serve(config, server={"room": 5})
        with ExitStack() as stack:
            for _ in range(5):
                stack.enter_context(connected(served.url))
            until(lambda: httpx.get(f"{served.url}/health").status_code == 503, what="a refusal")
        until(lambda: httpx.get(f"{served.url}/health").status_code == 200, what="room")

    def test_room_is_made(self) -> None:
        """The soft limit of open files is raised to the hard one, with a reserve for the server itself."""
        limits = _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        wanted = 16_484 if hard == resource.RLIM_INFINITY else min(16_484, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted // 2, hard))
        try:
            assert servers._room() == wanted - 100
            assert resource.getrlimit(resource.RLIMIT_NOFILE) == (wanted, hard)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, limits)


class TestBodies:
    def test_values_that_nothing_can_hold(self, http: httpx.Client, engine: Engine, fields) -> None:
        """An invalid value is a 422 alone and in a batch, an error in its position otherwise, and no row is written."""
        for more in UNHOLDABLE:
            entry = f"{json.dumps(fields())[:-1]}, {more}}}"
            alone = http.post("/v1/evaluations", content=entry, headers=JSON)
            batch = http.post("/v1/evaluations/batch", content=f'{{"entries": [{entry}]}}', headers=JSON)
            each = http.post("/v1/evaluations/each", content=f'{{"entries": [{entry}]}}', headers=JSON)
            assert (alone.status_code, batch.status_code, each.status_code) == (422, 422, 200), (more, alone.text)
            [slot] = each.json()["results"]
            assert slot["error"]["status"] == 422
            assert all(len(answer.content) < 6000 for answer in (alone, batch, each))
        assert count(engine, "evaluations") == 0

    @pytest.mark.parametrize("path", SOME)
    def test_bodies_that_are_none(self, http: httpx.Client, path: str) -> None:
        """Compressed, nested, overlong or undecodable bodies are a 4xx from every route."""
        bodies = [
            gzip.compress(b" " * 1_000_000),
            b'{"kernel": 1' + b"0" * 5000 + b"}",
            b'{"entries": [{"kernel": "\xff"}]}',
            b"\x00",
            *(b'{"x": ' + b"[" * depth + b"]" * depth + b"}" for depth in (100, 500, 900, 950, 1000, 100_000)),
            *(b'{"entries": [{"settings": ' + b"[" * depth + b"]" * depth + b"}]}" for depth in (500, 950, 1000)),
        ]
        for body in bodies:
            for headers in (JSON, JSON | {"Content-Encoding": "gzip"}):
                answer = http.post(path, content=body, headers=headers)
                each = path.endswith("each") and b"settings" in body
                assert 400 <= answer.status_code < 500 or (each and answer.status_code == 200), answer.text
                assert len(answer.content) < 6000

    @pytest.mark.parametrize("path", SOME)
    def test_more_fields_than_anybody_means(self, http: httpx.Client, path: str) -> None:
        """Too many wrong fields are counted and not listed, because a list would take minutes and gigabytes."""
        flood = {f"field {number}": 0 for number in range(50_000)}
        [error] = problem_of(http.post(path, json=flood), 422, "invalid_request")["errors"]
        assert error["field"] == "body"
        assert "many more were given" in error["message"]

    def test_more_entries_than_anybody_means(self, http: httpx.Client, fields) -> None:
        """Entries are counted before they are validated, and the error names the first wrong one only."""
        flood = {"entries": [0] * (MAX_BATCH + 1), "evaluation_ids": [0] * 1001}
        for way, name in (("batch", "entries"), ("each", "entries"), ("wait", "evaluation_ids")):
            answer = http.post(f"/v1/evaluations/{way}", json={name: flood[name]})
            [error] = problem_of(answer, 422, "invalid_request")["errors"]
            assert error["field"].startswith(f"body.{name}")
        answer = http.post("/v1/evaluations/batch", json={"entries": [fields(), {"kernel": 1}, {"kernel": 2}]})
        assert {error["field"].split(".")[2] for error in answer.json()["errors"]} == {"1"}
        problem_of(http.post("/v1/evaluations/each", json={"entries": [{}] * 1001}), 413, "too_large")


def test_long_reading_keeps_nobody_from_the_rest(served: Served, token, engine: Engine, fields) -> None:
    """While every reading thread is busy, tokens are still checked and the fleet's health is still reported."""
    with served.client(token("problems")) as http, ThreadPoolExecutor(20) as pool, engine.connect() as connection:
        connection.execute(text("LOCK TABLE verdicts IN ACCESS EXCLUSIVE MODE"))
        held = [pool.submit(http.get, "/v1/leaderboard") for _ in range(20)]
        busy = text(
            "SELECT count(*) FROM pg_stat_activity WHERE wait_event_type = 'Lock' AND datname = current_database()"
        )

        def reading() -> int | None:
            with engine.connect() as watching:
                return watching.scalar(busy)

        until(lambda: reading() == 8, what="that all read")
        answers = [
            http.get("/health").status_code,
            http.post("/eval", json={}, headers={"Authorization": "x"}).status_code,
        ]
        assert not any(one.done() for one in held)
        connection.rollback()
        assert answers == [200, 401]
        assert {one.result().status_code for one in held} == {200}


class TestStreams:
    def test_how_many_may_be_open(self, serve, config: Config, worker_id: UUID, fields) -> None:
        """The limit of open streams is a 429 with Retry-After until one closes."""
        with serve(config, app={"streams": 2}).client() as http:
            http.post("/v1/evaluations", json=fields(batch="b"))
            with http.stream("GET", "/v1/batches/b/events") as first:
                lines = first.iter_lines()
                assert next(lines) == "retry: 1000"
                with http.stream("GET", "/v1/batches/b/events") as second:
                    others = second.iter_lines()
                    assert next(others) == "retry: 1000"
                    answer = http.get("/v1/batches/b/events")
                    problem_of(answer, 429, "too_many_streams")
                    assert int(answer.headers["retry-after"]) > 0

                def another() -> bool:
                    with http.stream("GET", "/v1/batches/b/events") as third:
                        return third.status_code == 200

                until(another, what="room for a stream")


class TestOthers:
    @pytest.fixture
    def pair(self, served: Served, token) -> Any:
        """Clients with two tokens of the scope `submit`."""
        with served.client(token("problems")) as one, served.client(token("problems", "read")) as other:
            yield one, other

    def test_a_key_is_its_token_s(self, pair: Any, engine: Engine, fields) -> None:
        """A key of another token makes another evaluation without a conflict, and of the same token the same one."""
        one, other = pair
        key = {"Idempotency-Key": "step-1"}
        mine = one.post("/v1/evaluations", json=fields(0), headers=key).json()["evaluation_id"]
        theirs = other.post("/v1/evaluations", json=fields(0, settings={"checks": 1}), headers=key)
        assert theirs.status_code == 201
        assert theirs.json()["evaluation_id"] != mine
        again = one.post("/v1/evaluations", json=fields(0, idempotency_key="step-1"))
        assert (again.status_code, again.json()["evaluation_id"]) == (200, mine)
        for way in ("batch", "each"):
            answer = one.post(f"/v1/evaluations/{way}", json={"entries": [fields(0, idempotency_key="step-1")]}).json()
            [found] = answer.get("evaluations") or [slot["evaluation"] for slot in answer["results"]]
            assert found == {"evaluation_id": mine, "created": False}
        assert count(engine, "evaluations") == 2

    def test_conflicts_tell_the_key_as_it_was_given(self, pair: Any, fields) -> None:
        """Alone, in a batch and in a position, a conflict names the client's key without the token's part."""
        one, _ = pair
        long = "k" * 200
        one.post("/v1/evaluations", json=fields(0, idempotency_key=long))
        clash = fields(1, idempotency_key=long)
        answers = [
            one.post("/v1/evaluations", json=clash),
            one.post("/v1/evaluations/batch", json={"entries": [fields(2), clash]}),
        ]
        problems = [problem_of(answer, 422, "idempotency_conflict") for answer in answers]
        [slot] = one.post("/v1/evaluations/each", json={"entries": [clash]}).json()["results"]
        for problem in [*problems, slot["error"]]:
            assert problem["keys"] == [long]
            assert "token:" not in json.dumps(problem)

    def test_nobody_plants_the_answer_to_another_s_request(self, pair: Any, engine: Engine, fields) -> None:
        """A client that guesses a later request of `/eval` and its key creates a different evaluation."""
        one, other = pair
        body = {"original_model_src": "class Model: ...", "custom_model_src": "class ModelNew: ...", "backend": "torch"}
        [first, _] = tokens.listing(engine)
        asked_for = {"num_correct_trials": 5, "num_perf_trials": 100, "measure_performance": True}
        wanted = kernelbench.request_of("class Model: ...", "class ModelNew: ...", backend="torch", **asked_for)
        digest = hashlib.sha256(wanted.model_dump_json().encode()).hexdigest()[:32]
        lenient = {"settings": {"tolerance": {"atol": 1e30, "rtol": 1e30}}}
        same = fields(problem="class Model: ...", kernel="class ModelNew: ...", **lenient)
        planted = other.post("/v1/evaluations", json=same | {"idempotency_key": f"same:{first.id}:{digest}:0"})
        assert planted.status_code == 201

        def recorded() -> Sequence[Any]:
            with engine.connect() as connection:
                sql = "SELECT id, idempotency_key, settings->'tolerance' AS tolerance FROM evaluations"
                return connection.execute(text(sql)).all()

        with ThreadPoolExecutor(1) as pool:
            asked = pool.submit(one.post, "/eval", json=body)
            rows = until(lambda: len(rows := recorded()) == 2 and rows, what="what was asked for")
            for row in rows:
                other.post(f"/v1/evaluations/{row.id}/cancel")
            asked.result()
        found = {row.idempotency_key: row.tolerance for row in rows}
        assert found[f"same:{first.id}:{digest}:0"] is None

    def test_all_are_of_one_house(self, pair: Any, fields) -> None:
        """A token's scope limits operations, not evaluations: any token can read them, and `submit` can cancel them."""
        one, other = pair
        identity = one.post("/v1/evaluations", json=fields(batch="b")).json()["evaluation_id"]
        assert other.get("/v1/batches/b").json()["total"] == 1
        assert other.get(f"/v1/evaluations/{identity}/artifacts/kernel.py").text == fields()["kernel"]
        assert other.post(f"/v1/evaluations/{identity}/cancel").json()["cancelled"] is True
