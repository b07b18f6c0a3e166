"""The Celery application: lanes, routes and delivery settings, with their reasons.

A message names one evaluation and has no other content that a worker acts on. Its ``kwargsrepr`` header is a label
for Flower. The worker that executes the evaluation reads the rest from Postgres. Functions that use Redis raise
BrokerUnavailable if it does not answer or refuses.
"""

from __future__ import annotations

import json
import logging
import os
import re
import ssl
from collections.abc import Generator, Iterable, Sequence
from contextlib import contextmanager, suppress
from itertools import count
from typing import Any, Final
from urllib.parse import parse_qsl, urlsplit
from uuid import UUID

from celery import Celery
from kombu.entity import Queue
from kombu.exceptions import KombuError
from redis.backoff import NoBackoff
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import RedisError, ResponseError, WatchError
from redis.retry import Retry

from kqueue.config import LANE, Config
from kqueue.errors import BrokerUnavailable, ConfigError, UnknownLane
from kqueue.limits import hard_limit_s
from kqueue.message import Message

_log = logging.getLogger(__name__)

#: The one task. Its only argument is the evaluation's id.
EVALUATE: Final = "kqueue.evaluate"
#: Seconds that a sender waits for Redis in each of two tries. A sweeper later sends the unsent messages.
SENDER_PATIENCE_S: Final = 3.0
#: Seconds that a worker waits for an answer of Redis. Its event loop, and so its hard limits, are blocked meanwhile. A
#: shorter wait would close connections needlessly (while Redis writes a large file), each with a second delivery.
CONSUMER_PATIENCE_S: Final = 10.0

#: Permitted parameters of a URL's query, for TLS.
_TLS_FILES: Final = frozenset({"ssl_ca_certs", "ssl_certfile", "ssl_keyfile"})
#: Permitted parameters of a URL of Sentinels, in addition to those for TLS.
_OF_SENTINELS: Final = frozenset({"master_name", "sentinel_username", "sentinel_password"})
_SENTINELS_FORM: Final = "sentinel://:password@host:26379;sentinel://host:26379/0?master_name=NAME"
_PREFIX: Final = "kqueue."
_LABEL_CHARACTERS: Final = 1000
#: Number of messages read from a queue at once.
_PAGE: Final = 1000
#: Number of surplus messages from which a queue is cut instead of read.
_TOO_LONG: Final = 1000
#: Tries to arrange a queue that changes meanwhile.
_ARRANGES: Final = 3
#: Maximum number of commands in a batch of messages: two for each message, one of them for Flower.
_PIPELINE: Final = 400
#: Maximum number of evaluations in one order to revoke. Workers refuse longer ones.
_REVOKED: Final = 1000
#: Key that names the Redis that was searched last. A Redis that lost its messages has lost the key too.
_MARKER: Final = "kqueue.sweeper"
_SEARCHING: Final = b"looking"
#: Celery's settings that every application has.
_SETTINGS: Final[dict[str, Any]] = {
    # Messages are only JSON, so a writer to Redis can at worst name an evaluation.
    "task_serializer": "json",
    "result_serializer": "json",
    "accept_content": ["json"],
    # Postgres is the record. A result backend in Redis turns a success into a failure when Redis is unreachable at
    # the end of the task.
    "result_backend": None,
    "task_ignore_result": True,
    "task_track_started": False,
    # One task at a time, and a fresh CUDA context for each evaluation. workers/pool.py counts only tasks in which
    # the child opened a device or had a process forked. A static check does not change the child.
    "worker_pool": "workers.pool:TaskPool",
    "worker_concurrency": 1,
    "worker_max_tasks_per_child": 1,
    # A message stays in Redis until a slot is free. Idle slots get the work, and no prefetched message is delivered
    # twice.
    "worker_prefetch_multiplier": 1,
    "worker_disable_prefetch": True,
    # Redis never redelivers a message. Postgres knows which evaluations must be judged again.
    "task_acks_late": True,
    "task_acks_on_failure": True,
    "task_acks_on_timeout": True,
    "task_reject_on_worker_lost": False,
    "task_retry_on_worker_lost": False,
    # A child that is not ready within this time is killed and replaced, again and again. The default, 4 s, can be
    # too short on a busy host.
    "worker_proc_alive_timeout": 60.0,
    # Running evaluations need no Redis, and an evaluation that Celery cancelled would be lost with its message.
    "worker_cancel_long_running_tasks_on_connection_loss": False,
    # For `revoke` by Flower and the client. Untrusted users must not reach Redis in any case.
    "worker_enable_remote_control": True,
    # Flower shows nothing without the worker's events, and no queued time without the sender's.
    "worker_send_task_events": True,
    "task_send_sent_event": True,
    # publish() below retries at most once, without a delay. Celery's own policy waits in between.
    "task_publish_retry": False,
    # An undeclared lane is an error at submission, not a queue without a reader.
    "task_create_missing_queues": False,
    "task_default_queue": "kqueue.unrouted",
    # A worker waits for Redis without a limit.
    "broker_connection_retry_on_startup": True,
    "broker_connection_max_retries": None,
    # The worker's own structured logs (kqueue/logs.py).
    "worker_hijack_root_logger": False,
    "worker_redirect_stdouts": False,
    "enable_utc": True,
    "timezone": "UTC",
}
#: The settings of Celery's connections to Redis.
_TRANSPORT: Final[dict[str, Any]] = {
    # Messages of one priority need one list, and a message that a worker took needs no copy in Redis: a dead
    # worker's evaluation is queued again in Postgres, and a sweeper sends it within seconds. A copy could also
    # be forged (kqueue/transport.py).
    "priority_steps": [0],
    "ack_emulation": False,
    # A sender does not wait, because the sweeper sends unsent messages. The immediate second try is for a
    # connection that broke since it was last used.
    "max_retries": 1,
    "interval_start": 0,
    "interval_step": 0.2,
    # Connecting takes a round trip or two, wherever Redis is.
    "socket_connect_timeout": SENDER_PATIENCE_S,
    # A connection that waits for messages sends nothing. Keepalive detects a lost peer. A health check every
    # 25 s detects a firewall that dropped the connection.
    "socket_keepalive": True,
    "health_check_interval": 25,
}


def check_lane(lane: str) -> str:
    """Return ``lane`` if its name is valid (``cpu``, ``gpu``, ``gpu.<model>``). Raise UnknownLane if it is not."""
    if not LANE.fullmatch(lane):
        raise UnknownLane(f"unknown lane {lane!r}: use auto, cpu, gpu, or gpu.<model> such as gpu.h200")
    return lane


def queue(lane: str) -> Queue:
    """Return the queue of a lane."""
    name = _PREFIX + check_lane(lane)
    return Queue(name, routing_key=name)


def parse(url: str) -> str:
    """Return ``url`` if it is a URL of Redis, in the form that kombu reads.

    kombu uses the addresses of Sentinels in turn, so each of them gets the user, the password and the database. The
    message of the ConfigError for another URL does not repeat it, because it can contain a password.
    """
    scheme = url.partition("://")[0]
    if scheme not in {"redis", "rediss", "redis+socket", "sentinel"} or scheme == url:
        raise ConfigError(
            "KQUEUE_REDIS_URL is not a Redis URL: use redis://:password@host:6379/0, redis+socket:///path, or "
            f"{_SENTINELS_FORM}"
        )
    if scheme == "sentinel":
        return _parse_sentinels(url)
    parts = urlsplit(url)
    try:
        numbered = re.fullmatch(r"/?\d*", parts.path) is not None and not parts.fragment
        sound = parts.port != 0 and (scheme == "redis+socket" or numbered)
    except ValueError:  # the port is not a number
        sound = False
    if not sound:
        raise ConfigError(
            "KQUEUE_REDIS_URL is not redis://:password@host:6379/0: port and database are numbers, and special "
            "characters in a password are written as %XX"
        )
    return url


def _parse_sentinels(url: str) -> str:
    addresses, mark, query = url.partition("?")
    with suppress(ValueError):  # a port is not a number, or logins or databases differ
        nodes = [urlsplit(address) for address in addresses.split(";")]
        [login] = {node.netloc.rpartition("@")[0] for node in nodes} - {""} or {""}
        [database] = {node.path.strip("/") for node in nodes} - {""} or {"0"}
        hosts = [node.netloc.rpartition("@")[2] for node in nodes if node.hostname and node.port != 0]
        sound = {(node.scheme, node.fragment) for node in nodes} == {("sentinel", "")} and len(hosts) == len(nodes)
        if sound and database.isdecimal() and _parameters(url).get("master_name"):
            return ";".join(f"sentinel://{login and login + '@'}{host}/{database}" for host in hosts) + mark + query
    raise ConfigError(
        f"KQUEUE_REDIS_URL is not {_SENTINELS_FORM}: NAME is the primary's name at the Sentinels, all addresses share "
        "one user, password and database, and special characters in a password are written as %XX"
    )


def _parameters(url: str) -> dict[str, str]:
    """Return the parameters of a URL's query."""
    return dict(parse_qsl(url.partition("?")[2], keep_blank_values=True))


def tls(url: str) -> dict[str, Any] | None:
    """Return Celery's settings for the TLS that ``url`` requests, or None if it requests none.

    The server's certificate and host name are always verified, with the authorities in the query's ``ssl_ca_certs`` or
    else with the system's. ``ssl_certfile`` and ``ssl_keyfile`` are for servers that require them. Raise ConfigError if
    another parameter is given, or a file cannot be read.
    """
    scheme, asked = url.partition("://")[0], _parameters(url)
    if scheme == "redis+socket":
        return None
    permitted = {"rediss": _TLS_FILES, "sentinel": _TLS_FILES | _OF_SENTINELS}.get(scheme, frozenset[str]())
    if unknown := asked.keys() - permitted:
        raise ConfigError(
            f"KQUEUE_REDIS_URL: {', '.join(sorted(unknown))} has no meaning there. TLS is "
            "rediss://...?ssl_ca_certs=FILE, with ssl_certfile and ssl_keyfile where the server asks for them. "
            "Certificates are always verified"
        )
    files = {name: file for name, file in asked.items() if name in _TLS_FILES}
    if scheme != "rediss" and not files:
        return None
    for name, file in files.items():
        if not os.access(file, os.R_OK):
            raise ConfigError(f"KQUEUE_REDIS_URL: {name} names {file}, which cannot be read")
    return {"ssl_cert_reqs": ssl.CERT_REQUIRED, "ssl_check_hostname": True, **files}


def _sentinel_options(url: str, secured: dict[str, Any] | None, patience_s: float) -> dict[str, Any]:
    """Return kombu's options for finding the primary of a URL of Sentinels."""
    asked = _parameters(url)
    login = {name: asked[f"sentinel_{name}"] for name in ("username", "password") if f"sentinel_{name}" in asked}
    waits = {"socket_timeout": patience_s, "socket_connect_timeout": SENDER_PATIENCE_S}
    # redis-py's default waits for seconds and tries again before it asks the next Sentinel.
    nodes = {"retry": Retry(NoBackoff(), 0), **waits, **login, **({"ssl": True, **secured} if secured else {})}
    return {"master_name": asked["master_name"], "sentinel_kwargs": nodes}


def make_app(config: Config, *, lanes: Iterable[str] = ("cpu", "gpu"), patience_s: float = SENDER_PATIENCE_S) -> Celery:
    """Return the Celery application of a fleet. It connects when first used.

    ``lanes`` are the lanes that a worker can serve. A sender needs none. ``patience_s`` is the maximum number of
    seconds for which it waits for an answer of Redis.
    """
    url = parse(config.require_redis())
    secured, sentinels = tls(url), url.startswith("sentinel:")
    broker = url.partition("?")[0] if secured or sentinels else url
    app = Celery("kqueue", broker=broker, set_as_current=False)
    app.conf.update(
        _SETTINGS,
        broker_use_ssl=secured,
        task_queues=[queue(lane) for lane in lanes],
        # Without a timeout a half-open connection waits without end.
        broker_transport_options={
            **_TRANSPORT,
            "socket_timeout": patience_s,
            **(_sentinel_options(url, secured, patience_s) if sentinels else {}),
        },
    )
    return app


def check(app: Celery) -> None:
    """Connect once."""
    with _translate(), app.connection_for_write() as connection:
        connection.ensure_connection(max_retries=1, interval_start=0)


def info(app: Celery) -> dict[str, Any]:
    """Return the server's report on its state and settings (``INFO``)."""
    with _translate(), app.connection_for_read() as connection:
        connection.ensure_connection(max_retries=1, interval_start=0)
        client: Any = connection.default_channel.client
        return dict(client.info())


def publish(app: Celery, messages: Sequence[Message]) -> None:
    """Send messages in their order. If a connection broke, some are sent twice, which is harmless.

    If Redis does not accept all of them, no evaluation is lost, because a sweeper sends the rest.
    """
    with _translate():
        try:
            _publish(app, messages)
        except (KombuError, RedisError, OSError) as error:
            # Redis can have restarted since the connection was last used. A Redis that does not answer, or refuses, is
            # not tried again.
            if is_wrong_type(fault := _root(error)):
                for lane in {message.lane for message in messages}:
                    with app.pool.acquire(block=True) as connection:
                        mend(connection.default_channel.client, queue(lane).name, "list")
            elif not isinstance(fault, RedisConnectionError | ConnectionError):
                raise
            _publish(app, messages)


def _publish(app: Celery, messages: Sequence[Message]) -> None:
    with app.producer_pool.acquire(block=True) as producer, producer.batch(max_size=_PIPELINE):
        for message in messages:
            identity = str(message.evaluation_id)
            app.send_task(
                EVALUATE,
                args=[identity],
                task_id=identity,
                queue=queue(message.lane),
                time_limit=hard_limit_s(message.deadlines_s),
                argsrepr=f"('{identity}',)",
                kwargsrepr=printable(message.label),
                retry=False,
                producer=producer,
                # Lists need no declaration, and a producer needs no permission to change bindings.
                declare=[],
            )


def mend(client: Any, key: str, kind: str) -> None:
    """Remove a key of the wrong type, which only a forger can have written.

    A correct list that replaces it meanwhile stays.
    """
    key_type = client.type(key).decode()
    if key_type in {"none", kind}:
        return
    with client.pipeline() as pipe, suppress(WatchError):
        if kind == "list":  # A worker has no permission to watch other keys, and they hold no messages.
            pipe.watch(key)
            if pipe.type(key).decode() == kind:
                return
            pipe.multi()
        pipe.delete(key)
        pipe.execute()
        _log.warning("a forged key was removed from Redis: %s is a %s and must be a %s", ascii(key), key_type, kind)


def is_wrong_type(error: BaseException) -> bool:
    """Return True if Redis refused a command because its key has another type."""
    return isinstance(error, ResponseError) and "WRONGTYPE" in str(error)


def _root(error: BaseException) -> BaseException:
    """Return the cause of one of kombu's errors."""
    while isinstance(error, KombuError) and error.__cause__ is not None:
        error = error.__cause__
    return error


def waiting(app: Celery, lane: str) -> set[UUID]:
    """Return the evaluations whose messages are in a lane's queue. No worker has fetched these messages."""
    identities: set[UUID] = set()
    with _translate(), app.pool.acquire(block=True) as connection:
        client: Any = connection.default_channel.client
        mend(client, queue(lane).name, "list")
        # Producers push at the head and workers pop from the tail, so no page misses a message that stays.
        for start in count(0, _PAGE):
            page = client.lrange(queue(lane).name, start, start + _PAGE - 1)
            identities.update(identity for message in page if (identity := _identity(message)) is not None)
            if len(page) < _PAGE:
                break
    return identities


def arrange(app: Celery, lane: str, order: Sequence[UUID]) -> set[UUID]:
    """Sort the messages in a lane's queue, remove all other messages, and return the evaluations of removed messages.

    Duplicates are removed too. A queue that changes all the time stays as it is. A queue with far too many messages,
    for example of an earlier version, is cut without reading the excess. A search then finds that those messages are
    missing. In ``order``, the next evaluation comes first. Evaluations without a message in the queue are skipped.
    """
    name = queue(lane).name
    removed: set[UUID] = set()
    with _translate(), app.pool.acquire(block=True) as connection:
        client: Any = connection.default_channel.client
        mend(client, name, "list")
        if client.llen(name) > _TOO_LONG + len(order):
            client.ltrim(name, -len(order) or 1, -1 if order else 0)
        with client.pipeline() as pipe:
            for _ in range(_ARRANGES):
                with suppress(WatchError):  # a worker or a producer changes the queue meanwhile
                    pipe.watch(name)
                    # Workers pop from the tail.
                    stored: list[bytes] = pipe.lrange(name, 0, -1)[::-1]
                    by_identity = {
                        identity: message for message in stored if (identity := _identity(message)) is not None
                    }
                    kept = [by_identity[identity] for identity in order if identity in by_identity]
                    if kept == stored:
                        break
                    # Not reset in the next try, because the answer to this one could have been lost.
                    removed |= by_identity.keys() - set(order)
                    pipe.multi()
                    pipe.ltrim(name, 1, 0)
                    if kept:
                        pipe.lpush(name, *kept)
                    pipe.execute()
                    break
    return removed


@contextmanager
def unseen(app: Celery, *, every_s: float) -> Generator[bool]:
    """Yield True if this Redis must be searched for lost messages. Record the search if the block succeeds.

    A search is due after ``every_s`` seconds, or if Redis has no record of one: it was emptied, restarted, or replaced
    by another server or a promoted replica. The next search finds messages that are lost during the block.
    """
    with app.pool.acquire(block=True) as connection:
        with _translate():
            client: Any = connection.default_channel.client
            run = str(client.info("server")["run_id"]).encode()
            mend(client, _MARKER, "string")
            recorded = client.get(_MARKER) == run and _expires_in_time(client, _MARKER, every_s)
            if not recorded:
                client.set(_MARKER, _SEARCHING)
        yield not recorded
        if not recorded:
            with _translate():
                # Only if the key still exists. Otherwise it was lost, perhaps with messages that this search had found.
                client.set(_MARKER, run, ex=_seconds(every_s), xx=True)


def turn(app: Celery, what: str, *, every_s: float) -> bool:
    """Return True if it is the caller's turn to do a chore that one sweeper does every ``every_s`` seconds."""
    with _translate(), app.pool.acquire(block=True) as connection:
        client: Any = connection.default_channel.client
        key = f"{_MARKER}.{what}"
        if client.set(key, 1, ex=_seconds(every_s), nx=True):
            return True
        return not _expires_in_time(client, key, every_s) and bool(client.set(key, 1, ex=_seconds(every_s)))


def _seconds(every_s: float) -> int:
    """Return the lifetime in seconds of a key that records when a chore was last done."""
    return max(1, round(every_s))


def _expires_in_time(client: Any, key: str, every_s: float) -> bool:
    """Return True if a key expires in time. A forged key that lasts longer must not prevent its chore."""
    return 0 <= client.pttl(key) <= 1000 * _seconds(every_s)


def revoke(app: Celery, *evaluation_ids: UUID) -> None:
    """Order the workers that execute evaluations to kill them, and workers that fetch them later to skip them."""
    with _translate():
        for start in range(0, len(evaluation_ids), _REVOKED):
            ids = [str(identity) for identity in evaluation_ids[start : start + _REVOKED]]
            app.control.revoke(ids, terminate=True, signal="SIGKILL")


def printable(label: str) -> str:
    """Return a label for Flower: one line, without characters that control a terminal or reverse text."""
    return "".join(char if char.isprintable() else "\ufffd" for char in label[:_LABEL_CHARACTERS])


def _identity(message: bytes) -> UUID | None:
    """Return the evaluation that a message in a queue names, or None if the message is malformed."""
    try:
        return UUID(json.loads(message)["headers"]["id"])
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None


@contextmanager
def _translate() -> Generator[None]:
    try:
        yield
    except (KombuError, RedisError, OSError) as error:
        # redis-py describes the client of each Sentinel in hundreds of characters.
        fault = re.sub(r"<redis\.client\..*? - ", "", str(_root(error)))
        if "SSL" in fault:
            raise BrokerUnavailable(
                f"Redis cannot be used over TLS: {fault}. Check that the server speaks TLS on this port, that "
                "ssl_ca_certs in KQUEUE_REDIS_URL holds its authority, and that its certificate names this host"
            ) from error
        raise BrokerUnavailable(
            f"Redis cannot be used: {fault}. Check KQUEUE_REDIS_URL, that the server runs, and that both speak TLS "
            "or neither"
        ) from error
