"""A stranger who can write to Redis sends forged keys, messages and commands to a real worker."""

from __future__ import annotations

import base64
import json
import os
import pickle
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any
from uuid import UUID, uuid4

import pytest
from celery.worker.control import Panel

from kqueue import broker
from kqueue.limits import hard_limit_s
from kqueue.message import Message
from workers import messages

QUEUE = broker.queue("cpu").name
#: Queue of the reply to a question of this module.
ANSWER = "forged.reply.celery.pidbox"
#: Keys that stock kombu's transport or a sweeper reads, and the type of each.
KEYS = {
    QUEUE: "list",
    **{f"{QUEUE}\x06\x16{step}": "list" for step in (3, 6, 9)},
    ANSWER: "list",
    "unacked": "hash",
    "unacked_index": "zset",
    "unacked_mutex": "string",
    **{
        f"_kombu.binding{kind}.{exchange}": "set"
        for kind in ("", "_permanent")
        for exchange in ("celery.pidbox", "reply.celery.pidbox", "celeryev", "kqueue.unrouted")
    },
    "_kombu.binding_deadlines": "zset",
    "kqueue.sweeper": "string",
    "kqueue.sweeper.probes": "string",
    "kqueue.sweeper.prune": "string",
}
TYPES = ("string", "list", "set", "zset", "hash", "stream")
#: Entries of ``unacked``. The last one asks for a message to be put into a key that is no list.
UNACKED: dict[str, bytes] = {
    "no JSON": b"not json",
    "null": b"null",
    "a number": b"7",
    "too few": b"[1, 2]",
    "too many": b"[1, 2, 3, 4]",
    "an object": b"{}",
    "binary": bytes(range(256)),
    "nothing": b"",
    "deep": b"[" * 100_000,
    "no message": b'[7, "", "kqueue.cpu"]',
    "an exchange that is a list": b'[{}, [], "kqueue.cpu"]',
    "elsewhere": b'[{"headers": {}, "properties": {"delivery_info": {}}}, "", "unacked_index"]',
}
MEMBERS = ("", "x", "\x06\x16", "\x06\x16" * 9, "x\x06\x16\x06\x16unacked_index", b"\xff\xfe")


def make(writer: Any, key: str, kind: str) -> None:
    """Replace a key with one of the type ``kind``, at once: a worker may write the same key."""
    with writer.pipeline() as both:
        both.delete(key)
        if kind == "hash":
            both.hset(key, mapping=UNACKED)
        elif kind == "zset":
            both.zadd(key, dict.fromkeys([*UNACKED, *MEMBERS], 0))
        elif kind == "set":
            both.sadd(key, *MEMBERS)
        elif kind == "stream":
            both.xadd(key, {"x": "x"})
        elif kind == "list":
            both.lpush(key, *MEMBERS)
        else:
            both.set(key, "x")
        both.execute()


@pytest.fixture(scope="module")
def writer(services: Any) -> Iterator[Any]:
    """Return a client with which a stranger can write anything to Redis."""
    with services.redis() as client:
        yield client


@pytest.fixture(scope="module")
def worker(writer: Any, start_fleet: Any) -> Any:
    """Start one worker among forged keys."""
    make(writer, "unacked", "hash")
    make(writer, "unacked_index", "zset")
    for i, (key, right) in enumerate(KEYS.items()):
        if not key.startswith("unacked"):
            make(writer, key, [kind for kind in TYPES if kind != right][i % 5])
    return start_fleet()


def message(identity: Any = None, **changes: Any) -> dict[str, Any]:
    """Return a message in kombu's format. A change of None removes the field."""
    identity = str(uuid4()) if identity is None else identity
    body = changes.pop("content", [[identity], {}, {}])
    parts = {
        "body": base64.b64encode(json.dumps(body).encode()).decode(),
        "content-type": "application/json",
        "content-encoding": "utf-8",
        "headers": {"task": broker.EVALUATE, "id": identity, "timelimit": [2000, None], "kwargsrepr": "label"},
        "properties": {
            "delivery_tag": str(uuid4()),
            "body_encoding": "base64",
            "delivery_info": {"exchange": "", "routing_key": QUEUE},
        },
    }
    parts["headers"] |= changes.pop("in_headers", {})
    return {name: value for name, value in (parts | changes).items() if value is not None}


class Planted:
    """Creates a file when it is unpickled."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def __reduce__(self) -> Any:
        return (os.system, (f"touch {self.file}",))


SOMEBODY = str(UUID(int=7))
#: Items that are none of kqueue's messages.
JUNK: dict[str, Any] = {
    "empty": b"",
    "binary": bytes(range(256)),
    "text": b"no JSON",
    "half": b'{"body": "',
    "null": b"null",
    "number": b"1e999",
    "string": b'"x"',
    "list": b"[]",
    "object": b"{}",
    "deep": b"[" * 100_000,
    "deep and whole": b"[" * 60_000 + b"]" * 60_000,
    "deep body": message(body=base64.b64encode(b"[" * 60_000 + b"]" * 60_000).decode()),
    "long": json.dumps(message(in_headers={"x": "x" * 5_000_000})).encode(),
    "typed": b'{"__type__": "Decimal", "__value__": "x"}',
    "no headers": message(headers=None),
    "headers are a list": message(headers=[]),
    "no properties": message(properties=None),
    "no body": message(body=None),
    "body is no text": message(body=7),
    "body is no Base64": message(body="***"),
    "body is no JSON": message(body=base64.b64encode(b"\xff\xfe").decode()),
    "body is an object": message(content={"args": [SOMEBODY]}),
    "no task": message(in_headers={"task": None}),
    "task is a list": message(in_headers={"task": []}),
    "task is another": message(in_headers={"task": "os.system"}),
    "task is built in": message(in_headers={"task": "celery.map"}, content=[[{"task": "x"}, [1]], {}, {}]),
    "no id": message(in_headers={"id": None}),
    "id is a number": message(in_headers={"id": 7}),
    "id is no UUID": message("../../etc/passwd"),
    "id is not canonical": message("{" + SOMEBODY + "}"),
    "id is another's": message(in_headers={"id": SOMEBODY}),
    "two arguments": message(SOMEBODY, content=[[SOMEBODY, SOMEBODY], {}, {}]),
    "no argument": message(SOMEBODY, content=[[], {}, {}]),
    "named argument": message(SOMEBODY, content=[[], {"evaluation_id": SOMEBODY}, {}]),
    "more of a named one": message(SOMEBODY, content=[[SOMEBODY], {"bind": True}, {}]),
    "argument is an object": message(SOMEBODY, content=[[{"__type__": "uuid"}], {}, {}]),
    "YAML": message(**{"content-type": "application/x-yaml"}),
    "another encoding": message(**{"content-encoding": "binary"}),
    "protocol 1": {"task": broker.EVALUATE, "id": SOMEBODY, "args": [SOMEBODY], "kwargs": {}},
}


def raw(item: Any) -> bytes:
    """Return an item in its form in Redis."""
    return item if isinstance(item, bytes) else json.dumps(item).encode()


def judges(services: Any, worker: Any, pid: int) -> None:
    """Check that the same worker process still judges."""
    assert services.verdict(services.submit("ok")).category == "passed"
    [live] = worker.live()
    assert live.pid == pid


def dropped(services: Any, worker: Any, send: Any, kinds: dict[str, Any]) -> None:
    """Check that each of ``kinds`` leaves one line in the log, and that the same worker continues to judge."""
    [live] = worker.live()
    start = len(worker.log.read_text())

    def lines() -> int:
        return worker.log.read_text()[start:].count("a message was dropped")

    for kind, item in kinds.items():
        before = lines()
        send(raw(item))
        # Once in some hundred runs a message after a task vanishes, for a reason that is not known. A sweeper sends an
        # evaluation's message again.
        with suppress(AssertionError):
            services.until(lambda before=before: lines() > before, timeout_s=20)
        if lines() == before:
            send(raw(item))
        services.until(lambda before=before: lines() > before, what=f"the line about {kind!r}")
        assert lines() == before + 1, kind
    judges(services, worker, live.pid)
    assert "Traceback" not in worker.log.read_text()[start:]


def warnings(worker: Any, key: str) -> int:
    """Count the warnings that name a removed key."""
    return sum("a forged key was removed" in line and key in line for line in worker.log.read_text().splitlines())


def test_a_worker_starts_among_forged_keys(services: Any, worker: Any, writer: Any) -> None:
    """A worker starts despite keys of a wrong type and malformed entries, and logs each removed key."""
    [live] = worker.live()
    services.settled()
    judges(services, worker, live.pid)
    assert warnings(worker, QUEUE)
    assert "Traceback" not in worker.log.read_text()


@pytest.mark.parametrize(
    "kind",
    [kind if kind in ("string", "list", "hash") else pytest.param(kind, marks=pytest.mark.nightly) for kind in TYPES],
)
def test_a_worker_goes_on_among_forged_keys(services: Any, worker: Any, writer: Any, kind: str) -> None:
    """A running worker drops keys of the type ``kind`` and malformed entries, answers, and judges."""
    [live] = worker.live()
    before, start = warnings(worker, QUEUE), len(worker.log.read_text())
    for key in KEYS:
        make(writer, key, kind)
    services.settled()
    # The worker removes the key before it writes the line.
    services.until(lambda: (warnings(worker, QUEUE) > before) is (kind != "list"), what="the line")
    order = {"method": "ping", "reply_to": {"exchange": "reply.celery.pidbox", "routing_key": "forged"}}
    body = base64.b64encode(json.dumps(order).encode()).decode()
    writer.publish("/0.celery.pidbox", raw(message(body=body, headers={"clock": 1})))
    # An unread reply expires soon.
    services.until(lambda: 0 < writer.pttl(ANSWER) <= 10_000, what="the answer")
    assert live.name in base64.b64decode(json.loads(writer.lindex(ANSWER, 0))["body"]).decode()
    judges(services, worker, live.pid)
    assert "Traceback" not in worker.log.read_text()[start:]
    # Stock clients, such as this module's, still use them.
    writer.delete(*KEYS)


def test_a_sweeper_sends_among_forged_keys(services: Any, worker: Any, writer: Any) -> None:
    """A sweeper sends a message although its queue's key has a wrong type."""
    [live] = worker.live()
    make(writer, "kqueue.sweeper", "hash")
    identity = services.submit("ok", send=False)
    make(writer, QUEUE, "hash")
    services.age()
    assert services.verdict(identity).category == "passed"
    judges(services, worker, live.pid)


def test_junk_is_dropped(services: Any, worker: Any, writer: Any) -> None:
    """Any junk is logged and removed from Redis, and the same worker continues to judge."""
    dropped(services, worker, lambda item: writer.lpush(QUEUE, item), JUNK)
    services.settled()


def test_nothing_is_unpickled(services: Any, worker: Any, writer: Any, tmp_path: Path) -> None:
    """A pickle is not loaded, whether it is declared as one or hidden in JSON."""
    tmp_path.chmod(0o777)
    planted = pickle.dumps(Planted(tmp_path / "owned"))
    encoded = base64.b64encode(planted).decode()
    [live] = worker.live()
    for item in (
        planted,
        message(body=encoded, **{"content-type": "application/x-python-serialize", "content-encoding": "binary"}),
        message(body=encoded),
        message(body=encoded, in_headers={"compression": "application/x-gzip"}),
    ):
        writer.lpush(QUEUE, raw(item))
    judges(services, worker, live.pid)
    services.settled()
    assert list(tmp_path.iterdir()) == []


def test_a_flood_of_junk_does_not_stop_the_worker(services: Any, worker: Any, writer: Any) -> None:
    """An evaluation behind 2000 junk messages and an unknown id is judged, and nothing remains."""
    [live] = worker.live()
    writer.lpush(QUEUE, raw(message(SOMEBODY)))
    kinds = [raw(item) for name, item in JUNK.items() if name != "long"]
    writer.lpush(QUEUE, *(kinds[i % len(kinds)] for i in range(2000)))
    judges(services, worker, live.pid)
    services.settled()
    assert services.rows("SELECT 1 FROM evaluations WHERE id = :id", id=SOMEBODY) == []


WISHES: dict[str, dict[str, Any]] = {
    "a short limit": {"in_headers": {"timelimit": [0.01, 0.005]}},
    "a limit below zero": {"in_headers": {"timelimit": [-1, -1]}},
    "a limit that is none": {"in_headers": {"timelimit": "soon"}},
    "an endless limit": {"in_headers": {"timelimit": [1e300, None]}},
    "later": {"in_headers": {"eta": "2999-01-01T00:00:00+00:00"}},
    "a time that is none": {"in_headers": {"eta": {"x": 1}, "expires": []}},
    "expired long ago": {"in_headers": {"expires": "1999-01-01T00:00:00+00:00"}},
    "retried often": {"in_headers": {"retries": 10**6}},
    "another name": {"in_headers": {"shadow": "kqueue.harmless"}},
    "a group": {"in_headers": {"group": SOMEBODY, "stamps": {"a": 1}, "stamped_headers": ["a"]}},
    "a bomb to unpack": {"in_headers": {"compression": "application/x-gzip"}},
    "an answer elsewhere": {
        "properties": {
            "delivery_tag": [],
            "reply_to": "x",
            "body_encoding": "nonsense",
            "delivery_info": {"exchange": {"no": "such"}},
        }
    },
    "a label of markup": {"in_headers": {"kwargsrepr": "<script>alert(1)</script>\x1b]0;x\x07\u202e" + "x" * 5000}},
    "a label that is none": {"in_headers": {"kwargsrepr": {"a": []}, "argsrepr": 7}},
}


def test_wishes_in_a_message_count_for_nothing(services: Any, worker: Any, writer: Any) -> None:
    """Evaluations are judged completely and at once, whatever options their messages have."""
    [live] = worker.live()
    made = {wish: services.submit("sleep 0.1", send=False) for wish in WISHES}
    for wish, evaluation in made.items():
        writer.lpush(QUEUE, raw(message(str(evaluation), **WISHES[wish])))
    assert {wish: str(services.verdict(one).category) for wish, one in made.items()} == dict.fromkeys(made, "passed")
    judges(services, worker, live.pid)
    services.settled()


def test_no_other_task_is_called(services: Any, worker: Any, writer: Any) -> None:
    """Tasks that messages name as callbacks of their evaluations are never sent."""
    [live] = worker.live()
    # A sweeper sends it to a lane without workers.
    other = services.submit("ok", send=False, lane="gpu")
    call = {"task": broker.EVALUATE, "args": [str(other)], "kwargs": {}, "options": {"queue": QUEUE}}
    for link in ("callbacks", "errbacks", "chain", "chord"):
        evaluation = services.submit("ok", send=False)
        embed = {link: call if link == "chord" else [call]}
        writer.lpush(QUEUE, raw(message(str(evaluation), content=[[str(evaluation)], {}, embed])))
        assert services.verdict(evaluation).category == "passed"
    judges(services, worker, live.pid)
    services.settled()
    assert services.attempts(other) == []


# Remote-control commands -------------------------------------------------------------------------------

REFUSED: dict[str, dict[str, Any]] = {
    "shutdown": {},
    "pool_grow": {"n": 3},
    "pool_shrink": {"n": 1},
    "pool_restart": {"modules": ["os"], "reload": True},
    "autoscale": {"max": 9, "min": 9},
    "rate_limit": {"task_name": broker.EVALUATE, "rate_limit": "1/h"},
    "time_limit": {"task_name": broker.EVALUATE, "hard": 0.01},
    "add_consumer": {"queue": "elsewhere"},
    "cancel_consumer": {"queue": QUEUE},
    "election": {"id": "1", "topic": "x"},
    "disable_events": {},
    "terminate": {"signal": "SIGTERM", "task_id": SOMEBODY},
    "revoke_by_stamped_headers": {"headers": {"a": "b"}, "terminate": True},
    "hello": {"from_node": "x", "revoked": {SOMEBODY: 1}},
    "report": {},
    "objgraph": {"type": "Request"},
    "memsample": {},
    "memdump": {},
    "clock": {},
}


def test_orders_that_workers_do_not_obey(services: Any, worker: Any, writer: Any) -> None:
    """A refused command gets no reply, is logged, and does not stop the worker."""
    writer.delete(*KEYS)  # this module's client uses them
    [live] = worker.live()

    def refused() -> int:
        return worker.log.read_text().count("workers do not obey this order")

    for method, arguments in REFUSED.items():
        before = refused()
        assert services.app.control.broadcast(method, arguments=arguments, reply=True, timeout=0.1) == [], method
        services.until(lambda before=before: refused() > before, what=f"the line about {method}")
    judges(services, worker, live.pid)


def test_every_other_order_of_celery_is_refused_too() -> None:
    """Each command of Celery is either in the list above or among the few that are accepted."""
    assert set(Panel.data) - {"probe"} == set(REFUSED) | set(messages._ORDERS) | set(messages._ALIASES)


ORDERS: dict[str, Any] = {
    "no order": [],
    "a text": "revoke",
    "a method that is none": {"method": ["ping"]},
    "arguments that are none": {"method": "ping", "arguments": [1]},
    "an argument too much": {"method": "ping", "arguments": {"msg": "x"}},
    "by a pattern": {"method": "ping", "pattern": "(((a*)*)*)*b", "matcher": "pcre"},
    "for nobody": {"method": "ping", "destination": 7},
    "an answer elsewhere": {"method": "ping", "reply_to": {"exchange": "", "routing_key": QUEUE}},
    "an answer to nowhere": {"method": "ping", "reply_to": {"exchange": "reply.celery.pidbox", "routing_key": "\x06"}},
    "revoking nothing": {"method": "revoke", "arguments": {"task_id": []}},
    "revoking no id": {"method": "revoke", "arguments": {"task_id": ["x"]}},
    "revoking too much": {"method": "revoke", "arguments": {"task_id": [SOMEBODY] * 1001}},
    "revoking with more": {"method": "revoke", "arguments": {"task_id": SOMEBODY, "reason": "x"}},
}


def test_junk_among_orders(services: Any, worker: Any, writer: Any) -> None:
    """Junk in place of a command, or a clock of any value, does not stop the worker."""
    body = base64.b64encode(json.dumps({"method": "ping"}).encode()).decode()
    for clock in ("late", [], -1, 10**400, None):
        writer.publish("/0.celery.pidbox", raw(message(body=body, headers={"clock": clock})))
    orders = {
        kind: message(body=base64.b64encode(json.dumps(order).encode()).decode(), headers={"clock": "late"})
        for kind, order in ORDERS.items()
    }
    # An empty message is not logged.
    junk = {kind: item for kind, item in JUNK.items() if kind != "empty"}
    dropped(services, worker, lambda item: writer.publish("/0.celery.pidbox", item), orders | junk)


def test_what_flower_asks_is_answered(services: Any, worker: Any, writer: Any) -> None:
    """A worker with restricted commands and one task answers the questions behind Flower's pages."""
    writer.delete(*KEYS)  # this module's client uses them
    # The inspection ends with the only worker's reply.
    inspect = services.app.control.inspect(timeout=60, limit=1)
    methods = ("ping", "stats", "active_queues", "registered", "scheduled", "active", "reserved", "revoked", "conf")
    for method in methods:
        [answer] = getattr(inspect, method)().values()
        assert answer is not None, method
    answer = services.app.control.broadcast("registered", arguments={"builtins": True}, reply=True, timeout=60, limit=1)
    assert [tasks for one in answer for tasks in one.values()] == [[broker.EVALUATE]]


def test_a_running_evaluation_can_be_revoked_by_its_id(services: Any, worker: Any) -> None:
    """A client's cancel sends an id, and the worker chooses the signal."""
    evaluation = services.submit("sleep 60")
    services.started(evaluation)
    services.app.control.revoke(str(evaluation), terminate=True, signal="SIGHUP")
    assert services.verdict(evaluation).category == "cancelled"
    [live] = worker.live()
    judges(services, worker, live.pid)


def test_limits_are_kept_within_their_bounds() -> None:
    """A message's hard limit counts within the minimum and the maximum."""

    def limit(value: Any) -> Any:
        return messages.task(message(SOMEBODY, in_headers={"timelimit": value}), QUEUE)["headers"]["timelimit"]

    least, most = messages.SHORTEST_LIMIT_S, messages.LONGEST_LIMIT_S
    assert (least, most) == (hard_limit_s(0), 7 * 3600)
    assert limit([least + 1, 5]) == [least + 1, None]
    for short in (0, -1, 0.5, True, -(10**400)):
        assert limit([short, None]) == [least, None]
    for long in (None, [], [None, None], ["x"], [float("nan")], [10**400], [float("inf")], most + 1, {"0": 1}):
        assert limit(long) == [most, None]


def test_a_message_of_ours_is_read_as_it_was_meant(services: Any, writer: Any) -> None:
    """A message of the broker passes with its id, limit and label, and without additions."""
    evaluation = uuid4()
    message = Message(evaluation, "gpu.h200", deadlines_s=100.0, label="problem=p kernel=k\u202e\x1b[1m")
    broker.publish(services.app, [message])
    name = broker.queue("gpu.h200").name  # without waiting messages no sweeper orders the queue
    [lying] = writer.lrange(name, 0, -1)
    writer.delete(name)
    made = messages.task(json.loads(lying), name)
    assert made["headers"]["id"] == str(evaluation)
    assert made["headers"]["timelimit"] == [hard_limit_s(100.0), None]
    assert made["headers"]["kwargsrepr"] == "problem=p kernel=k\ufffd\ufffd[1m"
    assert json.loads(base64.b64decode(made["body"]))[0] == [str(evaluation)]
