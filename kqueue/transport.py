"""kombu's Redis transport without its bookkeeping in Redis, for the programs of a fleet that read messages.

Stock kombu stores more in Redis than messages: unacknowledged ones (``unacked``, ``unacked_index``,
``unacked_mutex``), lists for further priorities, and tables of bindings (``_kombu.binding*``). If one of these keys has
another type or a malformed entry, a reader ends, and so does each reader that is started later. A fleet needs none of
them: Postgres knows which messages are missing, all messages have one priority, and an address determines the queue of
its reply. ``kqueue/broker.py`` turns the first two off, and :class:`Channel` the tables. So a fleet reads only lists
of messages. :func:`kqueue.broker.mend` removes keys that are not lists.

The module extends private parts of kombu's Redis transport, so kombu is pinned to a minor version.
"""

from __future__ import annotations

from queue import Empty
from typing import Any, Final, Literal

from kombu import transport as transports
from kombu.transport import redis
from kombu.utils.json import dumps
from redis.exceptions import ResponseError

from kqueue import broker

#: Suffix of the addresses of replies, and of their queues.
REPLIES: Final = "reply.celery.pidbox"
#: Lifetime in milliseconds of unread replies.
_REPLY_MS: Final = 10_000


class Channel(redis.Channel):
    """A channel that reads lists of messages only."""

    #: A sweep sends an unfinished message again from Postgres.
    do_restore = False

    def _new_queue(self, queue: str, auto_delete: bool = False, **_: Any) -> None:
        """Declare a queue, for which Redis needs nothing."""

    def _size(self, queue: str) -> Literal[0]:  # noqa: ARG002
        """Return 0 as the length, because no caller of a declaration uses it."""
        return 0

    def _queue_bind(self, exchange: str, routing_key: str, pattern: str, queue: str) -> None:  # noqa: ARG002
        """Bind a queue to an exchange. Only publish/subscribe channels need a record of it, in memory."""
        if self.typeof(exchange).type == "fanout":
            self._fanout_queues[queue] = (exchange, routing_key.replace("#", "*"))

    def _delete(self, queue: str, *_arguments: Any, **_: Any) -> None:
        """Do nothing, because a queue of replies expires."""

    def _lookup(self, exchange: str, routing_key: str, default: str | None = None) -> list[str]:  # noqa: ARG002
        """Return the one queue that an address names."""
        return [f"{routing_key}.{exchange}" if exchange else routing_key]

    def _put(self, queue: str, message: Any, **_: Any) -> None:
        """Send a reply, or put a message back."""
        with self.conn_or_acquire() as client:
            broker.mend(client, queue, "list")
            client.lpush(queue, dumps(message))
            if queue.endswith(REPLIES):
                client.pexpire(queue, _REPLY_MS)

    def _brpop_read(self, **options: Any) -> Any:
        """Deliver the next message. Remove queues that are not lists."""
        try:
            return super()._brpop_read(**options)
        except ResponseError as error:
            if not broker.is_wrong_type(error):
                raise
            with self.conn_or_acquire() as client:
                for queue in self.active_queues:
                    broker.mend(client, queue, "list")
            raise Empty from None


class RedisTransport(redis.Transport):
    """kombu's Redis transport with this module's channels."""

    Channel = Channel


class SentinelChannel(Channel, redis.SentinelChannel):
    """The same channel on the primary that Sentinels name."""


class SentinelTransport(RedisTransport, redis.SentinelTransport):
    """kombu's transport for Sentinels with this module's channels."""

    Channel = SentinelChannel


def use(transport: type[RedisTransport], sentinels: type[SentinelTransport]) -> None:
    """Make this process connect to Redis by ``transport``, and by ``sentinels`` if Sentinels name the server."""
    for scheme, one in (("redis", transport), ("rediss", transport), ("sentinel", sentinels)):
        transports.TRANSPORT_ALIASES[scheme] = f"{one.__module__}:{one.__qualname__}"
