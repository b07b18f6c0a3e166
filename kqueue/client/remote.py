"""The clients over HTTP, for producers that have a URL and a token instead of the database's credentials.

::

    with RemoteClient("http://fleet:18188", token="kq_...") as kq:
        verdict = kq.evaluate(problem=REFERENCE, kernel=SOURCE, backend="triton")

They are :class:`~kqueue.Client` and :class:`~kqueue.AsyncClient` on another transport. Every submission carries an
idempotency key, made here if its producer gave none: a submission whose answer was lost is sent again and never
evaluated twice. A wait goes on through restarts of the server. Needs the extra ``http``.
"""

from __future__ import annotations

from kqueue.client.aio import AsyncClient
from kqueue.client.http import HttpTransport
from kqueue.client.sync import Client


class RemoteClient(Client):
    """:class:`~kqueue.Client` over HTTP: the same methods, verdicts and exceptions."""

    def __init__(self, url: str | None = None, *, token: str | None = None, retry_s: float = 60.0) -> None:
        """Prepare a client; it connects when first used.

        Args:
            url: ``http://host:18188``, or ``unix:///path`` of a server's unix socket; by default ``KQUEUE_URL``, or
                the unix socket of the fleet that ``kqueue up`` runs on this machine.
            token: by default ``KQUEUE_TOKEN``. On its unix socket the server's own user needs none; at the URL of the
                fleet on this machine that fleet's token is used.
            retry_s: seconds for which a server that cannot be reached or has no room is asked again, before
                ``ServerUnavailable`` is raised. A wait for verdicts ends with its own timeout only.

        Raises:
            ConfigError: no server is known, or ``url`` is neither one of HTTP nor of a unix socket.
        """
        self._transport = HttpTransport(url, token, retry_s)


class AsyncRemoteClient(AsyncClient):
    """:class:`~kqueue.AsyncClient` over HTTP: the same methods, verdicts and exceptions."""

    def __init__(self, url: str | None = None, *, token: str | None = None, retry_s: float = 60.0) -> None:
        """As :class:`RemoteClient`."""
        self._transport = HttpTransport(url, token, retry_s)
