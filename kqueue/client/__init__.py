"""Clients: submitting evaluations and waiting for their verdicts, from scripts, trainers and services.

::

    with Client() as kq:
        verdict = kq.evaluate(problem=REFERENCE, kernel=SOURCE, backend="triton")

A request is refused, with :class:`~kqueue.errors.InvalidRequest`, before anything is written. An accepted evaluation
lies in Postgres and ends in one verdict, whatever happens to Redis, a worker or this process. A failed kernel is never
an exception. Threads may share a client. A client does not survive a fork.

A client is one of two faces on one of two transports:

=====================================  ===========================================================
:mod:`~kqueue.client.sync`             :class:`Client`, for threads
:mod:`~kqueue.client.aio`              :class:`AsyncClient`, for asyncio
:mod:`~kqueue.client.ticket`           handles on accepted evaluations
:mod:`~kqueue.client.remote`           ``RemoteClient`` and ``AsyncRemoteClient``: the faces over HTTP
:mod:`~kqueue.client.transport`        what a face asks of a transport
:mod:`~kqueue.client.database`         the transport to Postgres and Redis
:mod:`~kqueue.client.http`             the transport to ``kqueue serve``
=====================================  ===========================================================

The transport to Postgres and Redis is imported when a client is made that uses it: clients over HTTP load neither
Celery nor SQLAlchemy.
"""

from kqueue.client.aio import AsyncClient
from kqueue.client.sync import Client
from kqueue.client.ticket import AsyncTicket, Ticket

__all__ = ["AsyncClient", "AsyncTicket", "Client", "Ticket"]
