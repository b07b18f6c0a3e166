"""The Celery application: lanes, routes and delivery settings, each with its reason.

A message names one evaluation and carries nothing else that a worker acts on. Its ``kwargsrepr`` header
is a label for Flower; the truth about the evaluation is read from Postgres by whoever executes it.
"""

from __future__ import annotations

import json
import os
import re
import ssl
from collections.abc import Generator, Iterable, Sequence
from contextlib import contextmanager
from itertools import count
from typing import Any, Final
from urllib.parse import parse_qsl, urlsplit
from uuid import UUID

from celery import Celery
from kombu.entity import Queue
from kombu.exceptions import KombuError
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import RedisError

from kqueue.config import Config
from kqueue.errors import BrokerUnavailable, ConfigError, UnknownLane
from kqueue.limits import hard_limit_s
from kqueue.message import Message

#: The one task. Its only argument is the evaluation's id.
EVALUATE: Final = "kqueue.evaluate"
#: Redis hands an unacknowledged message out again after this many seconds. Nothing waits for that: what a dead
#: worker ran is queued again in Postgres, and a sweeper sends it within seconds. So it lies above every hard limit,
#: and is the same for all clients, else a running evaluation is delivered twice (harmless, but a wasted slot).
VISIBILITY_TIMEOUT_S: Final = 7 * 3600
#: How long whoever sends waits for Redis, for each of two tries: a sweeper sends later what could not be sent.
SENDER_PATIENCE_S: Final = 3.0
#: How long a worker waits for an answer of Redis. Its event loop stands still meanwhile, and with it hard limits;
#: but a connection that is given up needlessly (Redis writes a large file) costs a second delivery.
CONSUMER_PATIENCE_S: Final = 10.0

#: What a URL's query may name for TLS.
_TLS_FILES: Final = frozenset({"ssl_ca_certs", "ssl_certfile", "ssl_keyfile"})
_LANE: Final = re.compile(r"cpu|gpu(\.[a-z0-9][a-z0-9_-]{0,30})?")
_PREFIX: Final = "kqueue."
_LABEL_CHARACTERS: Final = 1000
#: Messages read from a queue at once.
_PAGE: Final = 1000
#: Commands of a batch of messages that are sent at once: two a message, one of them Flower's.
_PIPELINE: Final = 400
#: Says which Redis was looked through last, so that one that lost its messages is noticed. Gone with them.
_MARKER: Final = "kqueue.sweeper"
_LOOKING: Final = b"looking"


def check_lane(lane: str) -> str:
    """Return ``lane`` if its name is one (``cpu``, ``gpu``, ``gpu.<model>``).

    Raises:
        UnknownLane: it is not.
    """
    if not _LANE.fullmatch(lane):
        raise UnknownLane(f"unknown lane {lane!r}: use auto, cpu, gpu, or gpu.<model> such as gpu.h200")
    return lane


def queue(lane: str) -> Queue:
    """The queue of a lane."""
    name = _PREFIX + check_lane(lane)
    return Queue(name, routing_key=name)


def parse(url: str) -> str:
    """Return ``url`` if it can be one of Redis.

    Raises:
        ConfigError: it cannot; the message does not repeat it, as it may hold a password.
    """
    scheme = url.partition("://")[0]
    if scheme not in {"redis", "rediss", "redis+socket"} or scheme == url:
        raise ConfigError(
            "KQUEUE_REDIS_URL is not one of Redis: use redis://:password@host:6379/0 or redis+socket:///path"
        )
    parts = urlsplit(url)
    try:
        sound = parts.port != 0 and (scheme == "redis+socket" or re.fullmatch(r"/?\d*", parts.path) is not None)
    except ValueError:  # the port is no number
        sound = False
    if not sound:
        raise ConfigError(
            "KQUEUE_REDIS_URL is not redis://:password@host:6379/0: port and database are numbers, and special "
            "characters in a password are written as %XX"
        )
    return url


def tls(url: str) -> dict[str, Any] | None:
    """What Celery is told of the TLS that ``url`` asks for; None where it asks for none.

    The server's certificate and the host's name in it are always verified, by the authorities in the query's
    ``ssl_ca_certs`` or else by the system's. ``ssl_certfile`` and ``ssl_keyfile`` are shown to the server.

    Raises:
        ConfigError: it asks for something else, or for a file that cannot be read.
    """
    parts = urlsplit(url)
    asked = dict(parse_qsl(parts.query, keep_blank_values=True))
    if parts.scheme == "redis+socket":
        return None
    if unknown := asked.keys() - (_TLS_FILES if parts.scheme == "rediss" else frozenset()):
        raise ConfigError(
            f"KQUEUE_REDIS_URL: {', '.join(sorted(unknown))} has no meaning there. TLS is "
            "rediss://...?ssl_ca_certs=FILE, with ssl_certfile and ssl_keyfile where the server asks for them; "
            "certificates are always verified"
        )
    if parts.scheme != "rediss":
        return None
    for name, file in asked.items():
        if not os.access(file, os.R_OK):
            raise ConfigError(f"KQUEUE_REDIS_URL: {name} names {file}, which cannot be read")
    return {"ssl_cert_reqs": ssl.CERT_REQUIRED, "ssl_check_hostname": True, **asked}


def make_app(config: Config, *, lanes: Iterable[str] = ("cpu", "gpu"), patience_s: float = SENDER_PATIENCE_S) -> Celery:
    """The Celery application of a fleet; it connects when first used.

    Args:
        config: the fleet's settings.
        lanes: those that a worker may be told to serve; a sender needs none.
        patience_s: how long an answer of Redis is waited for.

    Raises:
        ConfigError: no address of Redis is set, or what is set is not one.
    """
    url = parse(config.require_redis())
    secured = tls(url)
    app = Celery("kqueue", broker=url.partition("?")[0] if secured else url, set_as_current=False)
    app.conf.update(
        broker_use_ssl=secured,
        # Only JSON crosses: a writer to Redis can at worst name an evaluation.
        task_serializer="json",
        result_serializer="json",
        accept_content=["json"],
        # Postgres is the record. A result backend in Redis turns a success into a failure when Redis
        # is away at the moment that the task ends.
        result_backend=None,
        task_ignore_result=True,
        task_track_started=False,
        # One evaluation a process, one process a worker: a fresh CUDA context for each.
        worker_pool="workers.pool:TaskPool",
        worker_concurrency=1,
        worker_max_tasks_per_child=1,
        # A message stays in Redis until the slot is free: idle slots get the work, and nothing that was
        # fetched early comes back as a duplicate.
        worker_prefetch_multiplier=1,
        worker_disable_prefetch=True,
        # A dead worker's message comes back; a kernel that kills its process does not (that is a verdict).
        task_acks_late=True,
        task_acks_on_failure=True,
        task_acks_on_timeout=True,
        task_reject_on_worker_lost=False,
        task_retry_on_worker_lost=False,
        # A child that is not up in this time is killed and another forked, for ever: 4 s, the default, can be
        # too short on a busy host.
        worker_proc_alive_timeout=60.0,
        # Work that is under way does not need Redis; cancelled work is lost with its message.
        worker_cancel_long_running_tasks_on_connection_loss=False,
        # Flower's and the client's `revoke`. Redis must be out of strangers' reach in any case.
        worker_enable_remote_control=True,
        # Flower shows nothing without the worker's events, and no queued time without the sender's.
        worker_send_task_events=True,
        task_send_sent_event=True,
        # Sending is tried by publish() below, once more at most; Celery's own policy waits in between.
        task_publish_retry=False,
        # A lane that nobody declared is an error at submission, not a queue that nobody reads.
        task_create_missing_queues=False,
        task_queues=[queue(lane) for lane in lanes],
        task_default_queue="kqueue.unrouted",
        # A worker waits for Redis as long as it takes.
        broker_connection_retry_on_startup=True,
        broker_connection_max_retries=None,
        broker_transport_options={
            "visibility_timeout": VISIBILITY_TIMEOUT_S,
            # A sender does not wait: the sweeper sends what could not be sent. One more try, at once, is for
            # a connection that broke since it was last used.
            "max_retries": 1,
            "interval_start": 0,
            "interval_step": 0.2,
            # Unacknowledged messages past the visibility timeout are looked for every 10 s instead of every 100 s:
            # they are what a worker held that died hours ago, and each is a message less to look through.
            "unacked_restore_interval": 10,
            "unacked_restore_throttle": 1,
            # Without a timeout a half-open connection waits for ever.
            "socket_timeout": patience_s,
            # Connecting takes a round trip or two, wherever Redis is.
            "socket_connect_timeout": SENDER_PATIENCE_S,
            # A connection that waits for messages sends nothing: the system notices that its peer is gone, and
            # a question every 25 s that nothing answers, where a firewall forgot the connection.
            "socket_keepalive": True,
            "health_check_interval": 25,
        },
        # The worker's own structured logs (kqueue/logs.py).
        worker_hijack_root_logger=False,
        worker_redirect_stdouts=False,
        enable_utc=True,
        timezone="UTC",
    )
    return app


def check(app: Celery) -> None:
    """Connect once.

    Raises:
        BrokerUnavailable: Redis does not answer.
    """
    with _translate(), app.connection_for_write() as connection:
        connection.ensure_connection(max_retries=1, interval_start=0)


def info(app: Celery) -> dict[str, Any]:
    """What Redis says of itself and its settings (``INFO``).

    Raises:
        BrokerUnavailable: Redis does not answer.
    """
    with _translate(), app.connection_for_read() as connection:
        connection.ensure_connection(max_retries=1, interval_start=0)
        client: Any = connection.default_channel.client
        return dict(client.info())


def publish(app: Celery, messages: Sequence[Message]) -> None:
    """Send messages, in their order. Some may be sent twice, which is harmless, where a connection broke.

    Raises:
        BrokerUnavailable: Redis did not take all of them. No evaluation is lost: the sweeper sends it later.
    """
    with _translate():
        try:
            _publish(app, messages)
        except (KombuError, RedisError, OSError) as error:
            # Redis may have restarted since the connection was last used; one that does not answer is not asked
            # again, nor is one that refuses.
            if not isinstance(_root(error), RedisConnectionError | ConnectionError):
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
                # Lists need no declaring, and a producer no right to change what is bound to what.
                declare=[],
            )


def _root(error: BaseException) -> BaseException:
    """What an error of kombu's was raised for."""
    while isinstance(error, KombuError) and error.__cause__ is not None:
        error = error.__cause__
    return error


def waiting(app: Celery, lane: str) -> set[UUID]:
    """The evaluations whose messages lie in a lane's queue, not fetched by any worker.

    Raises:
        BrokerUnavailable: Redis did not answer.
    """
    found: set[UUID] = set()
    with _translate(), app.pool.acquire(block=True) as connection:
        client: Any = connection.default_channel.client
        # Producers push at the head and workers take from the tail: what stays is not missed between pages.
        for start in count(0, _PAGE):
            page = client.lrange(queue(lane).name, start, start + _PAGE - 1)
            found.update(identity for message in page if (identity := _identity(message)) is not None)
            if len(page) < _PAGE:
                break
    return found


@contextmanager
def unseen(app: Celery, *, every_s: float) -> Generator[bool]:
    """Whether this Redis is to be looked through, and after the block, if it ends well, a note that it was.

    It is where it does not remember that: it was emptied, restarted, replaced by another or by a replica that
    was promoted, or ``every_s`` seconds have passed. What is lost during the block is noticed the next time.

    Raises:
        BrokerUnavailable: Redis did not answer.
    """
    with app.pool.acquire(block=True) as connection:
        with _translate():
            client: Any = connection.default_channel.client
            run = str(client.info("server")["run_id"]).encode()
            known = client.get(_MARKER) == run
            if not known:
                client.set(_MARKER, _LOOKING)
        yield not known
        if not known:
            with _translate():
                # Only if it is still there: else it was lost, and with it what was seen.
                client.set(_MARKER, run, ex=max(1, round(every_s)), xx=True)


def turn(app: Celery, what: str, *, every_s: float) -> bool:
    """Whether it is time for ``what``, which one sweeper of a fleet is to do every ``every_s`` seconds.

    Raises:
        BrokerUnavailable: Redis did not answer.
    """
    with _translate(), app.pool.acquire(block=True) as connection:
        client: Any = connection.default_channel.client
        return bool(client.set(f"{_MARKER}.{what}", 1, ex=max(1, round(every_s)), nx=True))


def revoke(app: Celery, evaluation_id: UUID) -> None:
    """Have a worker that executes the evaluation kill it, and those that will fetch it pass it over.

    Raises:
        BrokerUnavailable: Redis did not take it.
    """
    with _translate():
        app.control.revoke(str(evaluation_id), terminate=True, signal="SIGKILL")


def printable(label: str) -> str:
    """A label for Flower: one line, nothing in it that turns text around or controls anything."""
    return "".join(char if char.isprintable() else "\ufffd" for char in label[:_LABEL_CHARACTERS])


def _identity(message: bytes) -> UUID | None:
    """The evaluation that a message in a queue names; None where it is not one of ours."""
    try:
        return UUID(json.loads(message)["headers"]["id"])
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None


@contextmanager
def _translate() -> Generator[None]:
    try:
        yield
    except (KombuError, RedisError, OSError) as error:
        fault = _root(error)
        if "SSL" in str(fault):
            raise BrokerUnavailable(
                f"Redis cannot be used over TLS: {fault}; check that the server speaks TLS on this port, that "
                "ssl_ca_certs in KQUEUE_REDIS_URL holds its authority, and that its certificate names this host"
            ) from error
        raise BrokerUnavailable(
            f"Redis cannot be used: {fault}; check KQUEUE_REDIS_URL, that the server runs, and that both speak TLS "
            "or neither"
        ) from error
