"""The clients over HTTP: the direct clients' guarantees, and faults of the network."""

from __future__ import annotations

import asyncio
import inspect
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from multiprocessing import get_context
from pathlib import Path
from typing import Any
from uuid import uuid4

import httpx
import pytest
from fastapi import FastAPI
from sqlalchemy import Engine, text
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from kqueue import (
    AccessRefused,
    AsyncClient,
    AsyncRemoteClient,
    Category,
    Client,
    ConfigError,
    IdempotencyConflict,
    InvalidRequest,
    KqueueError,
    LaneUnavailable,
    RemoteClient,
    Request,
    ServerUnavailable,
    Ticket,
    UnknownEvaluation,
    UnknownLane,
    Verdict,
    WaitTimeout,
)
from kqueue.cli.connection import asking
from kqueue.config import Config, load
from kqueue.http.app import create_app
from tests.http.serving import Served
from tests.http.standin import Served as InProcess
from tests.receiver import receiver
from tests.samples import request_fields
from tests.store.steps import change, count
from tests.traces.collector import collector

TRACED = Path(__file__).parents[1] / "traces" / "producer.py"
PARENT = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"


@pytest.fixture
def client(served: InProcess) -> Iterator[RemoteClient]:
    """A client of it."""
    with RemoteClient(served.url, token=served.admin) as client:
        yield client


class TestTheSameInterface:
    @pytest.mark.parametrize(("remote", "direct"), [(RemoteClient, Client), (AsyncRemoteClient, AsyncClient)])
    def test_every_method(self, remote: type, direct: type) -> None:
        """The clients over HTTP have the direct clients' public methods and signatures."""
        for name in {name for name, _ in inspect.getmembers(direct, callable) if not name.startswith("_")}:
            assert inspect.signature(getattr(remote, name)) == inspect.signature(getattr(direct, name))

    def test_the_whole_way(self, client: RemoteClient, config: Config, judging, fields) -> None:
        """Its verdict equals the direct client's. A forked process can use neither, and its parent goes on."""
        ticket = client.submit(**fields(kernel_label="mine"))
        verdict = ticket.wait(timeout=60)
        assert ticket.created
        assert verdict.passed
        assert verdict.speedup == 2.0
        with Client(config) as direct:
            other = direct.get(ticket.evaluation_id)

            def child() -> None:
                for use in (ticket.wait, ticket.done, other.wait, other.done):
                    with pytest.raises(KqueueError, match="belongs to another process"):
                        use()
                direct.close()
                client.close()

            process = get_context("fork").Process(target=child, daemon=True)
            process.start()
            process.join(30)
            assert (process.exitcode, other.wait(timeout=60)) == (0, verdict)
            assert direct.verdict(ticket.evaluation_id) == verdict
        assert client.get(str(ticket.evaluation_id)).verdict() == verdict
        assert ticket.done()
        assert ticket.cancel() is False
        assert client.evaluate(Request(**fields(1)), timeout=60).category is Category.PASSED

    def test_batches(self, client: RemoteClient, judging, fields) -> None:
        """Results keep their order, a bad entry spoils no other, and a batch is found by its name."""
        entries = [fields(i, batch="b") for i in range(12)]
        slots = client.evaluate_batch([*entries[:10], {"kernel": "x"}, fields(lane="gpu"), *entries[10:]], timeout=120)
        assert isinstance(slots[10], InvalidRequest)
        assert isinstance(slots[11], LaneUnavailable)
        verdicts = [slot for slot in slots if isinstance(slot, Verdict)]
        assert [verdict.evaluation_id for verdict in verdicts] == [t.evaluation_id for t in client.batch("b")]
        again = client.submit_batch([fields(i, idempotency_key=f"k{i}") for i in range(3)])
        assert dict(client.as_completed(again, timeout=60)).keys() == set(again)
        assert client.batch("nobody's") == []
        assert client.submit_batch([]) == client.evaluate_batch([]) == []

    def test_errors(self, client: RemoteClient, engine: Engine, fields) -> None:
        """Both clients raise the same exceptions with the same messages."""
        with pytest.raises(InvalidRequest, match=r"kernel: .*empty"):
            client.submit(**fields(kernel=" "))
        with pytest.raises(UnknownLane, match="tpu"):
            client.submit(**fields(lane="tpu"))
        with pytest.raises(LaneUnavailable, match="entry 1: lane: no live worker serves gpu"):
            client.submit_batch([fields(), fields(lane="gpu")])
        assert client.submit(**fields(lane="gpu"), allow_idle_lane=True).created
        client.submit(**fields(1, idempotency_key="k"))
        with pytest.raises(IdempotencyConflict) as conflict:
            client.submit(**fields(2, idempotency_key="k"))
        assert conflict.value.keys == {"k"}
        [slot] = client.submit_each([fields(2, idempotency_key="k")])
        assert isinstance(slot, IdempotencyConflict)
        unknown = uuid4()
        for ask in (client.get, client.verdict, client.cancel):
            with pytest.raises(UnknownEvaluation, match=str(unknown)):
                ask(unknown)
        with pytest.raises(UnknownEvaluation):
            client.get("nonsense")
        removed = client.submit(**fields())
        change(engine, "DELETE FROM evaluations")
        with pytest.raises(UnknownEvaluation):
            removed.wait(timeout=60)

    def test_closing_wakes_who_waits(self, served: InProcess, fields) -> None:
        """Closing raises an error in each waiter at once, and in later calls."""
        client = RemoteClient(served.url, token=served.admin)
        ticket = client.submit(**fields())
        with ThreadPoolExecutor() as pool:
            waiting = pool.submit(ticket.wait)
            time.sleep(0.5)
            client.close()
            with pytest.raises(KqueueError, match="closed"):
                waiting.result(timeout=60)
        client.close()
        with pytest.raises(KqueueError, match="closed"):
            client.submit(**fields())


class TestAddresses:
    def test_from_the_environment(self, served: InProcess, token, monkeypatch, fields) -> None:
        """KQUEUE_URL and KQUEUE_TOKEN configure a client."""
        monkeypatch.setenv("KQUEUE_URL", served.url)
        with RemoteClient() as client, pytest.raises(AccessRefused, match="token"):
            client.submit(**fields())
        monkeypatch.setenv("KQUEUE_TOKEN", token("problems"))
        with RemoteClient() as client:
            assert client.submit(**fields()).created
        with RemoteClient(token=token("read")) as client, pytest.raises(AccessRefused, match="scope submit"):
            client.submit(**fields())

    def test_a_token_in_the_url(self, served: InProcess, token, monkeypatch, fields, config: Config) -> None:
        """The URL's password or user is the token, unless another is set, and no message shows it."""
        secret = token("problems")
        for credentials in (f"x:{secret}", secret, f":{secret}"):
            monkeypatch.setenv("KQUEUE_URL", served.url.replace("://", f"://{credentials}@"))
            assert load().url == served.url
            with RemoteClient() as client:
                client.submit(**fields())
        monkeypatch.setenv("KQUEUE_TOKEN", token("read"))
        with RemoteClient() as client, pytest.raises(AccessRefused, match="scope submit"):
            client.submit(**fields())
        with pytest.raises(ConfigError, match="KQUEUE_URL") as refused:
            RemoteClient(f"http://x:{secret}@fleet:99999")
        assert secret not in str(refused.value)
        with asking(f"HTTP://x:{secret}@fleet") as (_, server):
            assert server.url == "HTTP://fleet"

    def test_no_address_and_no_token(self) -> None:
        """The constructor raises an error without the secret, and accepts a trailing line feed."""
        for url in (None, "fleet:18188", "ftp://fleet", "http://", "http://[::1", "http://fleet:99999", "http://f:x"):
            with pytest.raises(ConfigError, match="KQUEUE_URL"):
                RemoteClient(url)
        for token in ("kq_\u00e9", "kq_a b", "kq_a\r\nX: y", "\0"):
            with pytest.raises(ConfigError, match="KQUEUE_TOKEN") as refused:
                RemoteClient("http://127.0.0.1:1", token=token)
            assert token not in str(refused.value)
        RemoteClient("http://127.0.0.1:1", token="kq_good\n").close()

    def test_somebody_else_there(self, fields) -> None:
        """A proxy, a portal or another server is ServerUnavailable, and the token is sent to no other address."""
        answers: list[tuple[int, dict[str, str], bytes]] = [
            (200, {"Content-Type": "text/html"}, b"<html>log in</html>"),
            (200, {"Content-Type": "application/json"}, b"[]"),
            (200, {"Content-Encoding": "gzip"}, b"no gzip"),
            (301, {"Location": "https://elsewhere.example/"}, b""),
            (404, {}, b'{"detail": "Not Found"}'),
            (503, {"Retry-After": "Fri, 31 Dec 1999 23:59:59 GMT"}, b"busy"),
            (503, {"Retry-After": "nan"}, b"busy"),
            (429, {"Retry-After": "-5"}, b""),
        ]
        with receiver(lambda *_: answers[0]) as url:
            while answers:
                with RemoteClient(url, retry_s=0.1) as client, pytest.raises(ServerUnavailable, match="check the addr"):
                    client.submit(**fields())
                answers.pop(0)
            answers.append((200, {}, b'{"verdicts": 3, "unknown": []}'))
            with RemoteClient(url) as client, pytest.raises(ServerUnavailable, match="not answer like"):
                Ticket(uuid4(), False, client._transport).wait(timeout=60)

    def test_nobody_there(self, fields) -> None:
        """A refused connection raises the error after the given patience."""
        with socket.socket() as nobody:
            nobody.bind(("127.0.0.1", 0))
            url = f"http://127.0.0.1:{nobody.getsockname()[1]}"
            with RemoteClient(url, retry_s=0.3) as client, pytest.raises(ServerUnavailable, match="kqueue serve"):
                client.submit(**fields())


class Lossy:
    """A middleware that executes a request and drops the answer, a set number of times."""

    left = 0

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if not Lossy.left or scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        Lossy.left -= 1
        answer: list[Message] = []

        async def keep(message: Message) -> None:
            answer.append(message)

        await self._app(scope, receive, keep)
        await send(answer[0])
        raise ConnectionError("the rest of the answer is lost")


class TestFaults:
    def test_a_lost_answer_is_no_second_evaluation(self, serve, config: Config, worker_id, engine, fields) -> None:
        """The client repeats the request with the same key, and the producer still sees a new evaluation."""

        def lossy(given: Config) -> FastAPI:
            app = create_app(given)
            app.add_middleware(Lossy)
            return app

        served = serve(config, make=lossy)
        tickets: list[Any] = []
        ways: list[Callable[[RemoteClient], Iterable[Any]]] = [
            lambda client: [client.submit(**fields())],
            lambda client: client.submit_batch([fields(1), fields(2)]),
            lambda client: client.submit_each([fields(3), fields(4)]),
        ]
        for send in ways:
            with RemoteClient(served.url, token=served.admin) as client:
                Lossy.left = 2
                tickets += send(client)
            assert Lossy.left == 0
        assert all(ticket.created for ticket in tickets)
        assert count(engine, "evaluations") == len(tickets) == 5

    def test_no_room_is_waited_for(self, serve, config, worker_id, token, judge, engine, fields, monkeypatch) -> None:
        """A 429 is retried until the server has room or the patience ends."""
        monkeypatch.setattr("kqueue.http.failures.RETRY_AFTER_S", 1)
        served = serve(config.model_copy(update={"http_max_queued": 1}))
        secret = token("problems")
        with RemoteClient(served.url, token=secret) as client:
            later = threading.Timer(0.5, judge, [client.submit(**fields(0)).evaluation_id])
            later.start()
            assert client.submit(**fields(1)).created
            later.join()
        with (
            RemoteClient(served.url, token=secret, retry_s=0.1) as hasty,
            pytest.raises(ServerUnavailable, match="the limit is 1"),
        ):
            hasty.submit(**fields(2))
        assert count(engine, "evaluations") == 2

    def test_a_restart_while_many_wait(self, serve, config: Config, tmp_path, engine, judge, fields) -> None:
        """The next server answers each waiter, no evaluation runs twice, and no debug log has a token."""
        first = Served(config.model_copy(update={"log_level": "DEBUG"}), tmp_path / "serve.log")

        async def main() -> None:
            clients = [AsyncRemoteClient(first.url, token=first.admin) for _ in range(5)]
            tickets = [await clients[i % 5].submit(**fields(i)) for i in range(10)]
            waits = [asyncio.create_task(ticket.wait(timeout=150)) for ticket in tickets]
            await asyncio.sleep(0.5)
            await asyncio.to_thread(first.stop, signal.SIGKILL)
            assert not any(wait.done() for wait in waits)
            # Some verdicts are written while no server runs.
            for ticket in tickets[:2]:
                await asyncio.to_thread(judge, ticket.evaluation_id)
            second = await asyncio.to_thread(serve, config, port=first.port)
            while sum(wait.done() for wait in waits) < 2:
                await asyncio.sleep(0.1)
            for ticket in tickets[2:]:
                await asyncio.to_thread(judge, ticket.evaluation_id)
            verdicts = await asyncio.gather(*waits)
            assert all(verdict.passed for verdict in verdicts)
            assert [v.evaluation_id for v in verdicts] == [t.evaluation_id for t in tickets]
            # A stop during a wait asks the client to retry, and the server exits.
            last = await clients[0].submit(**fields(10))
            waiting = asyncio.create_task(last.wait(timeout=1.5))
            await asyncio.sleep(0.5)
            await asyncio.to_thread(second.close)
            with pytest.raises(WaitTimeout):
                await waiting
            for client in clients:
                await client.close()

        with first:
            assert httpx.get(f"{first.url}/v1/fleet", headers={"Authorization": "Bearer kq_wrong"}).status_code == 401
            asyncio.run(main())
        assert (count(engine, "evaluations"), count(engine, "attempts")) == (11, 10)
        written = first.log.read_text()
        assert "startup complete" in written
        assert not any(one in written for one in (first.admin, "kq_wrong"))


def kept(engine: Engine) -> dict[str, str | None]:
    """Return the stored trace of each evaluation."""
    with engine.connect() as connection:
        rows = connection.execute(text("SELECT id, traceparent FROM evaluations"))
        return {str(row.id): row.traceparent for row in rows}


def test_the_header_is_kept(http: httpx.Client, engine: Engine) -> None:
    """Each way to submit stores a valid header and ignores an invalid one, and no request inherits another's."""
    for number, (path, header) in enumerate(product(("", "/batch", "/each"), (PARENT, "nonsense", "\xff", None))):
        fields = request_fields(number)
        headers = {} if header is None else {"traceparent": header.encode("latin-1")}
        answer = http.post(f"/v1/evaluations{path}", json={"entries": [fields]} if path else fields, headers=headers)
        assert answer.is_success
    assert sorted(kept(engine).values(), key=str) == [PARENT] * 3 + [None] * 9


def test_clients_over_http_send_it(served: InProcess, engine: Engine) -> None:
    """In a producer with OpenTelemetry, both clients send its submission span as the parent."""
    with collector() as taking:
        done = subprocess.run(
            [sys.executable, str(TRACED), served.url, served.admin, json.dumps(request_fields(reuse=False))],
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
