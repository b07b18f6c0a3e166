"""Clients that submit evaluations and wait for their verdicts, for scripts, trainers and services.

::

    with Client() as kq:
        verdict = kq.evaluate(problem=REFERENCE, kernel=SOURCE, backend="triton")

An invalid request raises :class:`~kqueue.errors.InvalidRequest` before anything is written. An accepted evaluation is
stored in Postgres and gets exactly one verdict, even if Redis, a worker or this process fails. A failed kernel is never
an exception. Threads can share a client. A forked process cannot use its parent's client.

A client combines an interface of :mod:`~kqueue.client.interfaces` with the transport to Postgres and Redis in
:mod:`~kqueue.client.database`, or with the transport to ``kqueue serve`` in :mod:`~kqueue.client.remote`.

The transport to Postgres and Redis is imported when it is first used, so that clients over HTTP load neither Celery nor
SQLAlchemy.
"""

from kqueue.client.interfaces import AsyncClient, AsyncTicket, Client, Ticket
from kqueue.config import names_server

__all__ = ["AsyncClient", "AsyncTicket", "Client", "Ticket", "connect"]


def connect(url: str | None = None) -> Client:
    """Return a client of a server: at ``url``, or in ``KQUEUE_URL`` if no database is set. Else of the fleet itself."""
    if url is None and not names_server():
        return Client()
    from kqueue.client.remote import RemoteClient

    return RemoteClient(url)
