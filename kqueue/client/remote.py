"""The clients over HTTP, for producers that have a URL and a token instead of the database's credentials.

::

    with RemoteClient("http://fleet:18188", token="kq_...") as kq:
        verdict = kq.evaluate(problem=REFERENCE, kernel=SOURCE, backend="triton")

They are :class:`~kqueue.Client` and :class:`~kqueue.AsyncClient` on another transport. Every submission carries an
idempotency key, which the client creates if its producer gave none. A submission whose answer was lost is sent again
and never evaluated twice. A wait continues through restarts of the server. The extra ``http`` is required.
"""

from __future__ import annotations

from kqueue.client.aio import AsyncClient
from kqueue.client.http import HttpTransport
from kqueue.client.sync import Client


class RemoteClient(Client):
    """:class:`Client` over HTTP, with the same methods, verdicts and exceptions."""

    def __init__(self, url: str | None = None, *, token: str | None = None, retry_s: float = 60.0) -> None:
        """Create a client, which connects at its first use.

        Args:
            url: ``http://host:18188``, or ``unix:///path`` of a server's unix socket. By default ``KQUEUE_URL``, or
                the unix socket of the fleet that ``kqueue up`` runs on this machine.
            token: by default ``KQUEUE_TOKEN``, or the token of the fleet on this machine if ``url`` is that fleet's.
                On the unix socket the server's own user needs none.
            retry_s: seconds for which a request is repeated while the server cannot be reached or has no room. Then
                ``ServerUnavailable`` is raised. Waits for verdicts end only with their own timeouts.

        Raises:
            ConfigError: no server is known, or ``url`` is neither an HTTP URL nor a unix socket's.
        """
        self._transport = HttpTransport(url, token, retry_s)


class AsyncRemoteClient(AsyncClient):
    """:class:`AsyncClient` over HTTP, with the same methods, verdicts and exceptions."""

    def __init__(self, url: str | None = None, *, token: str | None = None, retry_s: float = 60.0) -> None:
        """Create a client. :class:`RemoteClient` documents the arguments."""
        self._transport = HttpTransport(url, token, retry_s)
