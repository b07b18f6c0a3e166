"""Clients that submit evaluations and wait for their verdicts, for scripts, trainers and services.

::

    with Client() as kq:
        verdict = kq.evaluate(problem=REFERENCE, kernel=SOURCE, backend="triton")

An invalid request raises :class:`~kqueue.errors.InvalidRequest` before anything is written. An accepted evaluation is
stored in Postgres and gets exactly one verdict, even if Redis, a worker or this process fails. A failed kernel is never
an exception. Threads can share a client. A forked process cannot use its parent's client.

A client combines one of two interfaces with one of two transports:

=====================================  ===========================================================
:mod:`~kqueue.client.sync`             :class:`Client`, for threads
:mod:`~kqueue.client.aio`              :class:`AsyncClient`, for asyncio
:mod:`~kqueue.client.ticket`           handles on accepted evaluations
:mod:`~kqueue.client.remote`           ``RemoteClient`` and ``AsyncRemoteClient``: the interfaces over HTTP
:mod:`~kqueue.client.transport`        the protocol of transports
:mod:`~kqueue.client.database`         the transport to Postgres and Redis
:mod:`~kqueue.client.http`             the transport to ``kqueue serve``
=====================================  ===========================================================

The transport to Postgres and Redis is imported when it is first used, so that clients over HTTP load neither Celery nor
SQLAlchemy.
"""

from kqueue.client.aio import AsyncClient
from kqueue.client.sync import Client
from kqueue.client.ticket import AsyncTicket, Ticket

__all__ = ["AsyncClient", "AsyncTicket", "Client", "Ticket"]
