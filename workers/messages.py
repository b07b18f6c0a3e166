"""Strict reading of messages from Redis, whose writers are not trusted.

Stock Celery runs any task with any arguments, callbacks and limits that a message names, obeys orders such as
``shutdown`` or ``pool_grow`` from any sender, and ends on a message that is not JSON. This module reads each message
strictly, and gives Celery a new message built only from these parts:

=================  ===================================================================================
a task's message   an evaluation's id, a hard limit within bounds, and a label for Flower. All other fields
                   (callbacks, chains, chords, retries, times, another task's name) are ignored.
an order           revoking evaluations by id, and Flower's queries
any other message  dropped with a log line. It is gone from Redis by then.
=================  ===================================================================================

So a writer to Redis can only announce an evaluation or cancel one. An announcement is harmless, because a worker must
claim the evaluation in Postgres. A worker reads only messages from Redis (:mod:`kqueue.transport`).
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
from celery.worker import control
from celery.worker.control import Panel
from kombu.transport import redis

from kqueue import broker, transport
from kqueue.limits import LONGEST_LIMIT_S, hard_limit_s

_log: Any = structlog.get_logger(__name__)

#: Limit on a message in characters. A task's message has about 1500. An order that revokes many evaluations is longer.
_MESSAGE_CHARACTERS: Final = 128 << 10
#: Least hard limit in seconds. A shorter one could abort an honest evaluation.
SHORTEST_LIMIT_S = hard_limit_s(0.0)
#: Limit on the evaluations that one order revokes, and on the workers that it addresses.
_MOST: Final = 1000
#: Number of characters of a dropped message that are logged.
_SHOWN: Final = 200

#: The permitted orders with their permitted arguments. All other orders are removed from Celery.
_ORDERS: Final[Mapping[str, frozenset[str]]] = {
    "revoke": frozenset({"task_id", "terminate", "signal"}),
    # Flower sends it every few seconds, though events are already on.
    "enable_events": frozenset(),
    # Each program that begins to receive events sends it once.
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
#: Other names of permitted orders.
_ALIASES: Final = frozenset(
    {"dump_conf", "dump_active", "dump_reserved", "dump_schedule", "dump_revoked", "dump_tasks"}
)
_TOKEN: Final = re.compile(r"[A-Za-z0-9.-]{1,100}")


class Refused(Exception):
    """A message is dropped for the reason in the text."""


def task(payload: Any, queue: str) -> dict[str, Any]:
    """Build a new task message for Celery from the trusted parts of ``payload``, a message decoded from JSON.

    Raises:
        Refused: kqueue did not send the message.
    """
    headers, (args, kwargs, _embed) = _headers(payload), _body(payload, 3)
    if headers.get("task") != broker.EVALUATE:
        raise Refused("it names another task")
    identity = _identity(headers.get("id"))
    if args != [identity] or kwargs != {}:
        raise Refused("its argument differs from the evaluation that it names")
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
    """Build a new order for Celery from the trusted parts of ``payload``, a message decoded from JSON.

    Raises:
        Refused: workers do not obey this order.
    """
    headers, body = _headers(payload), _body(payload, None)
    if not isinstance(body, dict):
        raise Refused("it is not an order")
    method, arguments = body.get("method"), body.get("arguments") or {}
    if not isinstance(method, str) or method not in Panel.data:
        raise Refused("workers do not obey this order")
    if not isinstance(arguments, dict) or not set(arguments) <= _ORDERS.get(method, frozenset()):
        raise Refused(f"{method} takes no such arguments")
    if method == "revoke":
        named = arguments.get("task_id")
        ids = named if isinstance(named, list) else [named]
        if not 0 < len(ids) <= _MOST:
            raise Refused("it revokes nothing, or too many at once")
        # SIGKILL is the only signal that ends a judge.
        arguments = {
            "task_id": [_identity(identity) for identity in ids],
            "terminate": bool(arguments.get("terminate")),
            "signal": "SIGKILL",
        }
    destination = body.get("destination")
    if destination is not None and not (_texts(destination) and len(destination) <= _MOST):
        raise Refused("its destination is not a list of workers")
    if body.get("pattern") or body.get("matcher"):
        # Matching a hostile regular expression can take forever.
        raise Refused("it selects workers by a pattern")
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


class GuardedTransport(transport.RedisTransport):
    """A transport that delivers only messages rebuilt by :func:`task` and :func:`order`."""

    def _deliver(self, message: Any, queue: str) -> None:
        read = order if queue.endswith(".celery.pidbox") else task
        try:
            message = read(message, queue)
        except Exception as error:  # noqa: BLE001 no message must end a worker
            reason = str(error) if isinstance(error, Refused) else f"it cannot be read: {type(error).__name__}"
            _log.warning("a message was dropped", queue=queue, reason=reason, message=ascii(repr(message)[:_SHOWN]))
            return
        super()._deliver(message, queue)


class GuardedSentinelTransport(GuardedTransport, transport.SentinelTransport):
    """The same transport for a Redis that Sentinels name."""


def guard(app: Celery) -> None:
    """Make this process read messages strictly, run only our task, and obey only the permitted orders."""
    redis.loads = _decode  # pyright: ignore[reportPrivateImportUsage]
    transport.use(GuardedTransport, GuardedSentinelTransport)
    app.finalize()
    for name in set(app.tasks) - {broker.EVALUATE}:
        app.tasks.unregister(name)
    for name in set(Panel.data) - _ORDERS.keys() - _ALIASES:
        del Panel.data[name]
        Panel.meta.pop(name, None)
    Panel.data["stats"] = _stats


def _stats(state: Any) -> dict[str, Any]:
    """Answer Flower's query of a worker's state without the parts in which Celery leaves passwords of Sentinels."""
    answer = control.stats(state)
    for part in ("alternates", "transport_options"):
        answer["broker"].pop(part, None)
    return answer


def _decode(text: str) -> Any:
    """Decode JSON. Return None for other text, where kombu's own decoder raises, which ends the worker."""
    try:
        return json.loads(text) if len(text) <= _MESSAGE_CHARACTERS else None
    except (ValueError, RecursionError):
        return None


def _headers(payload: Any) -> dict[str, Any]:
    """Return the headers of a message, which must be JSON in UTF-8."""
    if not isinstance(payload, dict) or not isinstance(headers := payload.get("headers"), dict):
        raise Refused("it is not a message, or is too long")
    if (payload.get("content-type"), payload.get("content-encoding")) != ("application/json", "utf-8"):
        raise Refused("it is not JSON in UTF-8")
    return headers


def _body(payload: dict[str, Any], length: int | None) -> Any:
    """Return the body, which must be a list of ``length`` items unless that is None."""
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
            # A new tag, because acknowledging a message with another message's tag acknowledges that one.
            "delivery_tag": str(uuid4()),
        },
    }


def _identity(value: Any) -> str:
    """Return an evaluation's id, which must be in canonical form."""
    try:
        if isinstance(value, str) and str(UUID(value)) == value:
            return value
    except ValueError:
        pass
    raise Refused("it does not name an evaluation's id")


def _limit_s(value: Any) -> float:
    """Return the hard limit in seconds, clamped to its bounds. Without one, return the longest."""
    hard = value[0] if isinstance(value, list) and value else None
    if not isinstance(hard, int | float) or not hard < LONGEST_LIMIT_S:  # NaN too
        return LONGEST_LIMIT_S
    return float(max(hard, SHORTEST_LIMIT_S))


def _reply_to(value: Any) -> dict[str, str] | None:
    if value is None:
        return None
    if not isinstance(value, dict) or value.get("exchange") != transport.REPLIES:
        raise Refused("its reply would go elsewhere")
    return {"exchange": transport.REPLIES, "routing_key": _token(value.get("routing_key"))}


def _token(value: Any) -> str:
    if not isinstance(value, str) or not _TOKEN.fullmatch(value):
        raise Refused("its reply has no valid token")
    return value


def _texts(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(item, str) for item in value)
