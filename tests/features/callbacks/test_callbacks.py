"""Callbacks: signed, sent at least once, and only to addresses that the server may reach."""

from __future__ import annotations

import hashlib
import hmac
import json
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from uuid import UUID

import httpx
import pytest
from pydantic import ValidationError
from sqlalchemy import Engine, text

from kqueue import Client, InvalidRequest, Request
from kqueue.config import Config, networks
from kqueue.features.callbacks import sending
from kqueue.http import gateway
from kqueue.store import callbacks, evaluations
from kqueue.store.engine import FLEET, Viewer, acting
from tests.http.fixtures import *  # noqa: F403
from tests.http.standin import Served
from tests.samples import request_fields
from tests.waiting import until

SECRET = "a secret of the fleet"


class Receiver(ThreadingHTTPServer):
    """A server that keeps what it is sent, and answers by the path: a status, `/hang`, or `/flaky`."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, Any, bytes]] = []
        self.over = threading.Event()
        super().__init__(("127.0.0.1", 0), _Handler)
        threading.Thread(target=self.serve_forever, kwargs={"poll_interval": 0.02}).start()

    def url(self, path: str) -> str:
        return f"http://127.0.0.1:{self.server_port}{path}"

    def bodies(self, path: str) -> list[Any]:
        return [json.loads(body) for at, _, body in self.calls if at == path]


class _Handler(BaseHTTPRequestHandler):
    server: Receiver

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.server.calls.append((self.path, self.headers, body))
        if self.path == "/hang":
            self.server.over.wait(30)
        while self.path == "/endless" and not self.server.over.wait(0.01):
            self.wfile.write(b"HTTP/1.1 103 Early Hints\r\nx: y\r\n\r\n")
        first = len(self.server.bodies(self.path)) == 1
        status = 503 if self.path == "/flaky" and first else int(self.path[1:]) if self.path[1:].isdigit() else 204
        self.send_response(status)
        if status == 302:
            self.send_header("Location", self.server.url("/elsewhere"))
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    running = Receiver()
    yield running
    running.over.set()
    running.shutdown()
    running.server_close()


@pytest.fixture
def calling(
    serve: Callable[..., Served], config: Config, worker_id: UUID, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., Served]:
    """Return a function that starts a server which sends callbacks to loopback, quickly."""
    monkeypatch.setattr(sending, "RETRY_S", 0.05)
    monkeypatch.setattr(sending, "_EVERY_S", 0.05)

    def start(networks: str = "127.0.0.0/8") -> Served:
        given = {"callback_secret": SECRET, "callback_networks": networks}
        return serve(Config.model_validate(config.model_dump() | given))

    return start


def request(number: int, **changes: Any) -> Request:
    """Return a request for a kernel with a number."""
    return Request.model_validate(request_fields(number, **changes))


def state_of(engine: Engine, identity: UUID | str) -> callbacks.CallbackState:
    [state] = callbacks.states(engine, evaluation_id=UUID(str(identity)))
    return state


def test_a_verdict_is_sent_signed(calling, receiver: Receiver, token, judge, engine: Engine, caplog) -> None:
    """The body has the verdict, its signature is the owner's, and a failed attempt is repeated."""
    caplog.set_level("INFO")
    served = calling()
    with httpx.Client(base_url=served.url, headers={"Authorization": f"Bearer {token(owner='ada')}"}) as http:
        body = request_fields() | {"callback_url": receiver.url("/flaky")}
        identity = http.post("/v1/evaluations", json=body).json()["evaluation_id"]
        [shown] = http.get(f"/v1/evaluations/{identity}").json()["callbacks"]
        assert (shown["host"], shown["attempts"], shown["next_at"]) == ("127.0.0.1", 0, None)
        secret = http.get("/v1/callbacks/secret").json()["secret"]
        judge(identity)
        until(lambda: state_of(engine, identity).delivered_at, what="the delivery")
    assert "answered with 503" in caplog.text
    assert "/flaky" not in caplog.text
    (_, given, first), (_, _, second) = receiver.calls
    assert (json.loads(first)["attempt"], json.loads(second)["attempt"]) == (1, 2)
    stamp = given["KQueue-Timestamp"]
    mac = hmac.new(secret.encode(), f"{stamp}.".encode() + first, hashlib.sha256)
    assert given["KQueue-Signature"] == f"sha256={mac.hexdigest()}"
    assert abs(time.time() - int(stamp)) < 600
    sent = json.loads(first)
    one = sent["evaluation"]
    assert (sent["event"], one["evaluation_id"], one["passed"], "log" in one) == ("evaluation", identity, True, False)
    assert sending.secret_of(SECRET, "eve") != secret != SECRET


def test_an_agent_s_session_calls_for_its_own_work_only(calling, receiver: Receiver, token) -> None:
    """A batch can have work of other sessions, and the owner's secret signs for all of them."""
    headers = {"Authorization": f"Bearer {token(owner='ada')}", "Kqueue-Session": "one"}
    with httpx.Client(base_url=calling().url, headers=headers) as http:
        body = request_fields(batch="b") | {"callback_url": receiver.url("/204")}
        assert http.post("/v1/evaluations", json=body).status_code == 201
        refused = http.post("/v1/evaluations", json=body | {"batch_callback_url": receiver.url("/204")})
        assert (refused.status_code, "other sessions" in refused.text) == (422, True)
        assert http.get("/v1/callbacks/secret").status_code == 403


def test_cancelled_and_reused_verdicts_and_batches(calling, receiver: Receiver, config: Config, judge, engine) -> None:
    """Cancelled evaluations call, a reused verdict calls at once, and a batch calls once all have ended, and again."""
    with Client(config) as client:
        client.submit(request(1, callback_url=receiver.url("/cancelled"))).cancel()
        first, second = (
            client.submit(request(number, batch="b", batch_callback_url=receiver.url("/batch"))) for number in (2, 3)
        )
        judge(first.evaluation_id)
        with engine.begin() as connection:
            connection.execute(text("UPDATE batches SET last_at = last_at - interval '1 min'"))
        calling()
        until(lambda: receiver.bodies("/cancelled"), what="the call")
        assert receiver.bodies("/cancelled")[0]["evaluation"]["category"] == "cancelled"
        assert receiver.bodies("/batch") == []
        judge(second.evaluation_id)
        until(lambda: receiver.bodies("/batch"), what="the batch's call")
        sent = receiver.bodies("/batch")[0]["batch"]
        assert (sent["batch"], sent["total"], sent["categories"]) == ("b", 2, {"passed": 2})
        judge(client.submit(request(4, batch="b", batch_callback_url=receiver.url("/again"))).evaluation_id)
        with engine.begin() as connection:
            connection.execute(
                text("UPDATE batches SET last_at = now() + interval '1 day'")
            )  # by a clock that was ahead
        until(lambda: receiver.bodies("/again"), what="the second call")
        again = receiver.bodies("/again")[0]
        assert again["batch"]["total"] == 3
        assert again["id"] != receiver.bodies("/batch")[0]["id"]  # Receivers ignore an id that they know.


def test_attempts_end(calling, receiver: Receiver, config: Config, judge, engine: Engine, monkeypatch) -> None:
    """A redirect is not followed, an attempt has a deadline, and after the last attempt none follows."""
    monkeypatch.setattr(sending, "ATTEMPTS", 2)
    with Client(config) as client:
        tickets = {
            path: client.submit(request(number, callback_url=receiver.url(path)))
            for number, path in enumerate(("/302", "/hang", "/endless", "/500"))
        }
        calling()

        def ended(path: str) -> bool:
            state = state_of(engine, tickets[path].evaluation_id)
            return state.attempts == 2 and state.next_at is None

        for paths in (("/302", "/500"), ("/hang", "/endless")):
            for path in paths:
                judge(tickets[path].evaluation_id)
            until(lambda paths=paths: all(map(ended, paths)), what="the last attempts")
            until(lambda: receiver.bodies("/302")[1:] and receiver.bodies("/500")[1:], what="the last calls")
            # Only a receiver that hangs can have a short deadline.
            monkeypatch.setattr(sending, "_ATTEMPT_S", 0.3)
    errors = {path: state_of(engine, ticket.evaluation_id).error for path, ticket in tickets.items()}
    assert errors["/302"] == "the receiver answered with 302"
    assert errors["/hang"] == "the receiver did not answer within 0.3 s"
    assert errors["/endless"] == "the receiver did not answer within 0.3 s"
    assert errors["/500"] == "the receiver answered with 500"
    assert receiver.bodies("/elsewhere") == []


def test_addresses(calling, receiver: Receiver, config: Config, judge, engine: Engine) -> None:
    """Callbacks reach public addresses and those of the setting, and no others under any name or notation."""
    for refused in (
        *("127.0.0.1", "10.0.0.1", "172.16.3.4", "192.168.0.1", "169.254.169.254", "0.0.0.0", "100.64.0.1"),
        *("::1", "::", "fe80::1%eth0", "fc00::1", "ff02::1", "::ffff:127.0.0.1", "64:ff9b::7f00:1", "2002:7f00:1::"),
        *("::7f00:1", "fec0::1", "64:ff9b:1::1", "2001:0:1::1", "::ffff:0:a00:1", "0.1.2.3", "255.255.255.255"),
        "224.0.0.1",
    ):
        assert not sending.is_allowed(refused, networks("10.1.0.0/16")), refused
    for allowed in ("1.1.1.1", "2606:4700::1111", "10.1.2.3", "::ffff:10.1.2.3"):
        assert sending.is_allowed(allowed, networks("192.0.2.0/24, 10.1.0.0/16")), allowed
    calling(networks="")
    named = receiver.url("/named").replace("127.0.0.1", "localhost")
    decimal = receiver.url("/decimal").replace("127.0.0.1", "2130706433")
    with Client(config) as client:
        tickets = [
            client.submit(request(number, callback_url=url))
            for number, url in enumerate((receiver.url("/ip"), named, decimal))
        ]
        for ticket in tickets:
            judge(ticket.evaluation_id)
            until(lambda one=ticket: state_of(engine, one.evaluation_id).error, what="the refusal")
            assert "has no public address" in (state_of(engine, ticket.evaluation_id).error or "")
    assert receiver.calls == []


def test_the_name_is_resolved_once(calling, receiver: Receiver, config: Config, judge, engine, monkeypatch) -> None:
    """The connection goes to the checked address, so a name server that changes its answer gains nothing."""
    looked: list[str] = []
    real = sending.socket.getaddrinfo

    def look(host: str, *more: Any, **named: Any) -> Any:
        looked.append(host)
        return real("127.0.0.1" if host == "rebinding.test" else host, *more, **named)

    monkeypatch.setattr(sending.socket, "getaddrinfo", look)
    calling()
    with Client(config) as client:
        url = receiver.url("/once").replace("127.0.0.1", "rebinding.test")
        ticket = client.submit(request(1, callback_url=url))
        judge(ticket.evaluation_id)
        until(lambda: receiver.bodies("/once"), what="the call")
    assert looked.count("rebinding.test") == 1
    assert receiver.calls[0][1]["Host"] == f"rebinding.test:{receiver.server_port}"


def test_a_claim_that_its_server_lost(config: Config, judge, engine: Engine, worker_id: UUID) -> None:
    """A claimed callback is sent again after a minute, and one owner's many callbacks leave room for others."""
    with Client(config) as client:
        mine = [client.submit(request(i, callback_url="https://a.test/")) for i in range(12)]
    with acting(Viewer("ada")):
        [hers] = evaluations.submit(engine, [request(20, callback_url="https://b.test/")])
    for identity in (*(ticket.evaluation_id for ticket in mine), hers.evaluation_id):
        judge(identity)
    due = sending.claim(engine)
    assert sorted(one.owner for one in due) == ["ada", *["local"] * 8]
    assert len(sending.claim(engine)) == 4
    assert sending.claim(engine) == []
    with engine.begin() as connection:
        connection.execute(text("UPDATE callbacks SET next_at = next_at - interval '61 s'"))
    again = sending.claim(engine)
    assert {one.attempts for one in again} == {2}
    sending.settle(engine, due[0], None)  # late
    assert all(state_of(engine, one.evaluation_id or UUID(int=0)).delivered_at is None for one in again)
    later = text("UPDATE callbacks SET next_at = next_at - interval '61 s'")
    while claimed := sending.claim(engine):
        with engine.begin() as connection:
            connection.execute(later)
        last = claimed[0].attempts
    assert last == sending.ATTEMPTS  # even if no server ever settles one
    with acting(Viewer("ada", held=True)):
        assert callbacks.states(engine, evaluation_id=mine[0].evaluation_id) == ()
    with acting(FLEET):
        assert sending.content(engine, due[0]) is not None


def test_the_host_of_a_url(config: Config, engine: Engine, worker_id: UUID) -> None:
    """A callback's state has the host of its URL, and nothing of the rest."""
    for url, host in {
        "https://[::1]:8080/?token=a": "[::1]",
        "http://a.test?b@c": "a.test",
        "http://a.test:1#b": "a.test",
    }.items():
        with Client(config) as client:
            assert state_of(engine, client.submit(request(1, callback_url=url)).evaluation_id).host == host


def test_refusals(http: httpx.Client, config: Config, engine: Engine, calling, monkeypatch) -> None:
    """Wrong URLs, a batch without a name, and a server without a secret or the feature are refused with what to do."""
    for url in (
        "", "http://a/\r\nx:y", "ftp://a.test/", "https://user:pw@a.test/", "https:///x", "/x", "https://a.test/ x",
        "http://a:99999/",
    ):  # fmt: skip
        with pytest.raises(InvalidRequest, match="callback_url"), Client(config) as client:
            client.submit(**request_fields(), callback_url=url)
    with pytest.raises(InvalidRequest, match="batch_callback_url needs a batch"), Client(config) as client:
        client.submit(**request_fields(), batch_callback_url="https://a.test/")
    monkeypatch.setattr(gateway, "features", dict)
    for sender in (http, calling().client()):
        answer = sender.post("/v1/evaluations", json=request_fields() | {"callback_url": "https://a.test/"})
        assert (answer.status_code, "KQUEUE_CALLBACK_SECRET" in answer.text) == (422, True)
    assert http.get("/v1/callbacks/secret").status_code == 404
    with acting(Viewer("local", held=True, session="s")), pytest.raises(InvalidRequest, match="session"):
        evaluations.submit(engine, [request(1, batch="b", batch_callback_url="https://a.test/")])
    with pytest.raises(ValidationError, match="callback_networks"):
        Config(callback_networks="10.1.0.0/99")
