"""What a worker takes from Redis, and nothing else: whoever can write there is not trusted.

Stock Celery runs any task with any arguments, callbacks and limits that a message asks for, obeys orders such
as ``shutdown`` or ``pool_grow`` from anybody, and ends where a message is not JSON at all. Here each message is
read strictly as it arrives, and what goes on to Celery is made anew from the little that was read:

=================  ===================================================================================
a task's message   an evaluation's id, a hard limit within bounds, a label for Flower; anything else in
                   it (callbacks, chains, chords, retries, times, another task's name) counts for nothing
an order           revoking evaluations by their ids, and the questions that Flower asks
anything else      dropped with a line in the log; it is gone from Redis by then
=================  ===================================================================================

So a writer to Redis can have an evaluation looked at, which its claim in Postgres makes harmless, or cancelled.
Restored messages (``unacked``) come back through the queue and are read again.

It extends private parts of kombu's Redis transport, whose minor version is pinned.
"""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Mapping
from typing import Any, Final
from uuid import UUID, uuid4

import structlog
from celery import Celery
from celery.worker.control import Panel
from kombu import transport as transports
from kombu.transport import redis

from kqueue import broker
from kqueue.limits import hard_limit_s

_log: Any = structlog.get_logger(__name__)

#: A task's message has about 1500 characters; an order that revokes many evaluations at once has the most.
_MESSAGE_CHARACTERS: Final = 128 << 10
#: The hard limit's bounds in seconds: below the first an honest evaluation could be broken off.
SHORTEST_LIMIT_S = hard_limit_s(0.0)
LONGEST_LIMIT_S = float(broker.VISIBILITY_TIMEOUT_S)
#: Evaluations that one order may revoke, and workers that it may be for.
_MOST: Final = 1000
#: How much of a dropped message is logged.
_SHOWN: Final = 200

#: What an order may ask for, and what may be said with it. Of the rest Celery's own worker keeps nothing.
_ORDERS: Final[Mapping[str, frozenset[str]]] = {
    "revoke": frozenset({"task_id", "terminate", "signal"}),
    # Flower says it every few seconds, to workers whose events are on already.
    "enable_events": frozenset(),
    # Whoever begins to listen to events says it once.
    "heartbeat": frozenset(),
    "ping": frozenset(),
    "stats": frozenset(),
    "conf": frozenset({"with_defaults"}),
    "active": frozenset({"safe"}),
    "reserved": frozenset(),
    "scheduled": frozenset(),
    "revoked": frozenset(),
    "registered": frozenset({"taskinfoitems", "builtins"}),
    "active_queues": frozenset(),
    "query_task": frozenset({"ids"}),
}
#: Other names of the same.
_ALIASES: Final = frozenset(
    {"dump_conf", "dump_active", "dump_reserved", "dump_schedule", "dump_revoked", "dump_tasks"}
)
_REPLIES_TO: Final = "reply.celery.pidbox"
_TOKEN: Final = re.compile(r"[A-Za-z0-9.-]{1,100}")


class Refused(Exception):
    """A message that a worker takes no notice of; says why."""


def task(payload: Any, queue: str) -> dict[str, Any]:
    """A task's message as Celery is given it, made anew from what may be taken from ``payload``.

    Args:
        payload: what lay in the queue, decoded from JSON.
        queue: the queue's name.

    Raises:
        Refused: it is not one of ours.
    """
    headers, (args, kwargs, _embed) = _headers(payload), _body(payload, 3)
    if headers.get("task") != broker.EVALUATE:
        raise Refused("it names another task")
    identity = _identity(headers.get("id"))
    if args != [identity] or kwargs != {}:
        raise Refused("its argument is not the evaluation that it names")
    return _payload(
        [[identity], {}, {"callbacks": None, "errbacks": None, "chain": None, "chord": None}],
        {
            "lang": "py",
            "task": broker.EVALUATE,
            "id": identity,
            "root_id": identity,
            "parent_id": None,
            "retries": 0,
            "timelimit": [_limit_s(headers.get("timelimit")), None],
            "argsrepr": f"('{identity}',)",
            "kwargsrepr": broker.printable(label if isinstance(label := headers.get("kwargsrepr"), str) else ""),
            "ignore_result": True,
        },
        queue,
    )


def order(payload: Any, queue: str) -> dict[str, Any]:
    """An order to workers as Celery is given it, made anew.

    Args:
        payload: what was published, decoded from JSON.
        queue: the worker's own mailbox.

    Raises:
        Refused: it is none that a worker obeys.
    """
    headers, body = _headers(payload), _body(payload, None)
    if not isinstance(body, dict):
        raise Refused("it is no order")
    method, arguments = body.get("method"), body.get("arguments") or {}
    if not isinstance(method, str) or method not in Panel.data:
        raise Refused("it orders what workers do not do")
    if not isinstance(arguments, dict) or not set(arguments) <= _ORDERS.get(method, frozenset()):
        raise Refused(f"{method} takes no such arguments")
    if method == "revoke":
        named = arguments.get("task_id")
        ids = named if isinstance(named, list) else [named]
        if not 0 < len(ids) <= _MOST:
            raise Refused("it revokes nothing, or too much at once")
        # A judge is ended by SIGKILL or not at all.
        arguments = {
            "task_id": [_identity(identity) for identity in ids],
            "terminate": bool(arguments.get("terminate")),
            "signal": "SIGKILL",
        }
    destination = body.get("destination")
    if destination is not None and not (_texts(destination) and len(destination) <= _MOST):
        raise Refused("it is for nobody in particular")
    if body.get("pattern") or body.get("matcher"):
        # A regular expression may keep whoever matches it busy for ever.
        raise Refused("it chooses workers by a pattern")
    clock = headers.get("clock")
    return _payload(
        {
            "method": method,
            "arguments": arguments,
            "destination": destination,
            "reply_to": _reply_to(body.get("reply_to")),
            "ticket": ticket if (ticket := body.get("ticket")) is None else _token(ticket),
        },
        {"clock": clock if isinstance(clock, int) and 0 <= clock < 2**53 else 0},
        queue,
    )


class Transport(redis.Transport):
    """kombu's Redis transport, which hands on what :func:`task` and :func:`order` made of a message."""

    def _deliver(self, message: Any, queue: str) -> None:
        read = order if queue.endswith(".celery.pidbox") else task
        try:
            message = read(message, queue)
        except Exception as error:  # noqa: BLE001 what somebody wrote there never ends a worker
            reason = str(error) if isinstance(error, Refused) else f"it cannot be read: {type(error).__name__}"
            _log.warning("a message was dropped", queue=queue, reason=reason, message=ascii(repr(message)[:_SHOWN]))
            return
        super()._deliver(message, queue)


def guard(app: Celery) -> None:
    """Have this process read messages strictly, run no task but ours, and obey no other order."""
    redis.loads = _decode  # pyright: ignore[reportPrivateImportUsage]
    for scheme in ("redis", "rediss"):
        transports.TRANSPORT_ALIASES[scheme] = f"{__name__}:Transport"
    app.finalize()
    for name in set(app.tasks) - {broker.EVALUATE}:
        app.tasks.unregister(name)
    for name in set(Panel.data) - _ORDERS.keys() - _ALIASES:
        del Panel.data[name]
        Panel.meta.pop(name, None)


def _decode(text: str) -> Any:
    """What lay in Redis, decoded; None where it is not JSON. kombu's own raises then, which ends the worker."""
    try:
        return json.loads(text) if len(text) <= _MESSAGE_CHARACTERS else None
    except (ValueError, RecursionError):
        return None


def _headers(payload: Any) -> dict[str, Any]:
    """The headers of a message in JSON and UTF-8."""
    if not isinstance(payload, dict) or not isinstance(headers := payload.get("headers"), dict):
        raise Refused("it is no message, or too long")
    if (payload.get("content-type"), payload.get("content-encoding")) != ("application/json", "utf-8"):
        raise Refused("it is not JSON in UTF-8")
    return headers


def _body(payload: dict[str, Any], length: int | None) -> Any:
    """The body, a list of ``length`` where that is given."""
    body, properties = payload.get("body"), payload.get("properties")
    if not isinstance(body, str) or not isinstance(properties, dict):
        raise Refused("it has no body")
    try:
        read = json.loads(base64.b64decode(body, validate=True))
    except (ValueError, RecursionError):
        raise Refused("its body is not JSON in Base64") from None
    if length is not None and not (isinstance(read, list) and len(read) == length):
        raise Refused("its body holds no arguments")
    return read


def _payload(body: Any, headers: dict[str, Any], queue: str) -> dict[str, Any]:
    return {
        "body": base64.b64encode(json.dumps(body).encode()).decode(),
        "content-type": "application/json",
        "content-encoding": "utf-8",
        "headers": headers,
        "properties": {
            "correlation_id": headers.get("id"),
            "reply_to": None,
            "delivery_mode": 2,
            "delivery_info": {"exchange": "", "routing_key": queue},
            "priority": 0,
            "body_encoding": "base64",
            # Its own: with another message's tag this one's end would be taken for that one's.
            "delivery_tag": str(uuid4()),
        },
    }


def _identity(value: Any) -> str:
    """An evaluation's id as we write it."""
    try:
        if isinstance(value, str) and str(UUID(value)) == value:
            return value
    except ValueError:
        pass
    raise Refused("what it names is no evaluation's id")


def _limit_s(value: Any) -> float:
    """The hard limit in seconds, within its bounds; the longest where there is none."""
    hard = value[0] if isinstance(value, list) and value else None
    if not isinstance(hard, int | float) or not hard < LONGEST_LIMIT_S:  # not a number, such as NaN, too
        return LONGEST_LIMIT_S
    return float(max(hard, SHORTEST_LIMIT_S))


def _reply_to(value: Any) -> dict[str, str] | None:
    if value is None:
        return None
    if not isinstance(value, dict) or value.get("exchange") != _REPLIES_TO:
        raise Refused("it wants its answer elsewhere")
    return {"exchange": _REPLIES_TO, "routing_key": _token(value.get("routing_key"))}


def _token(value: Any) -> str:
    if not isinstance(value, str) or not _TOKEN.fullmatch(value):
        raise Refused("its answer could not be told from others")
    return value


def _texts(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(item, str) for item in value)
