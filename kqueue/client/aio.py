"""The client for asyncio."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable, Mapping
from typing import TYPE_CHECKING, Any, Self
from uuid import UUID

from kqueue.client.connect import to_services
from kqueue.client.entries import Entry, check, check_all, check_each, entry_of, id_of
from kqueue.client.ticket import AsyncTicket
from kqueue.client.transport import Accepted, Transport
from kqueue.client.waiting import Deadline, await_all, too_late
from kqueue.contract import Backend, Request, Settings, Verdict
from kqueue.errors import InvalidRequest
from kqueue.states import Priority

if TYPE_CHECKING:
    from kqueue.config import Config


class AsyncClient:
    """:class:`Client` for asyncio, with coroutines as methods. Any number of them can wait at once.

    ::

        async with AsyncClient() as kq:
            verdict = await kq.evaluate(problem=..., kernel=..., backend="cuda")
    """

    def __init__(
        self, config: Config | None = None, *, database_url: str | None = None, redis_url: str | None = None
    ) -> None:
        """Create a client. :class:`Client` documents the arguments."""
        self._transport: Transport = to_services(config, database_url=database_url, redis_url=redis_url)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Close all connections. Evaluations continue. Waiting tasks get a ``KqueueError``."""
        await asyncio.to_thread(self._transport.close)

    async def submit(
        self,
        request: Request | None = None,
        *,
        problem: str | None = None,
        kernel: str | None = None,
        backend: Backend | str | None = None,
        lane: str = "auto",
        settings: Settings | Mapping[str, Any] | None = None,
        problem_label: str | None = None,
        kernel_label: str | None = None,
        batch: str | None = None,
        idempotency_key: str | None = None,
        priority: Priority | str | None = None,
        producer: str | None = None,
        reuse: bool | None = None,
        queue_wait_s: float | None = None,
        allow_idle_lane: bool = False,
    ) -> AsyncTicket:
        """Submit one evaluation. :meth:`Client.submit` documents arguments and errors."""
        entry = entry_of(
            request,
            problem=problem,
            kernel=kernel,
            backend=backend,
            lane=lane,
            settings=settings,
            problem_label=problem_label,
            kernel_label=kernel_label,
            batch=batch,
            idempotency_key=idempotency_key,
            priority=priority,
            producer=producer,
            reuse=reuse,
            queue_wait_s=queue_wait_s,
        )
        return self._ticket((await asyncio.to_thread(self._transport.submit, [check(entry)], allow_idle_lane))[0])

    async def submit_batch(self, entries: Iterable[Entry], *, allow_idle_lane: bool = False) -> list[AsyncTicket]:
        """Submit all entries or none, in one transaction, and return tickets in the order of ``entries``."""
        submitted = await asyncio.to_thread(self._transport.submit, check_all(entries), allow_idle_lane)
        return [self._ticket(s) for s in submitted]

    async def submit_each(
        self, entries: Iterable[Entry], *, allow_idle_lane: bool = False
    ) -> list[AsyncTicket | InvalidRequest]:
        """Submit every valid entry. The result of a refused entry is its error, which is not raised."""
        results = await asyncio.to_thread(self._transport.submit_each, check_each(entries), allow_idle_lane)
        return [result if isinstance(result, InvalidRequest) else self._ticket(result) for result in results]

    async def evaluate(
        self,
        request: Request | None = None,
        *,
        timeout: float | None = None,
        **fields: Any,
    ) -> Verdict:
        """Submit one evaluation and wait for its verdict. :meth:`Client.evaluate` documents arguments and errors."""
        return await (await self.submit(request, **fields)).wait(timeout)

    async def evaluate_batch(
        self,
        entries: Iterable[Entry],
        *,
        timeout: float | None = None,
        allow_idle_lane: bool = False,
    ) -> list[Verdict | InvalidRequest]:
        """Submit every valid entry, wait, and return the verdicts in the order of ``entries``."""
        results = await asyncio.to_thread(self._transport.submit_each, check_each(entries), allow_idle_lane)
        ids = [result.evaluation_id for result in results if isinstance(result, Accepted)]
        verdicts = iter(await await_all(self._transport, ids, timeout))
        return [result if isinstance(result, InvalidRequest) else next(verdicts) for result in results]

    async def get(self, evaluation_id: UUID | str) -> AsyncTicket:
        """Return a ticket for an existing evaluation of any producer, or raise UnknownEvaluation."""
        identity = id_of(evaluation_id)
        await self.verdict(identity)
        return self._ticket_of(identity)

    async def batch(self, name: str) -> list[AsyncTicket]:
        """Return tickets for all evaluations of a batch in the order of submission, or none for an unknown batch."""
        return [self._ticket_of(identity) for identity in await asyncio.to_thread(self._transport.batch, name)]

    async def verdict(self, evaluation_id: UUID | str) -> Verdict | None:
        """Return an evaluation's verdict, or None if it has none yet. Raise UnknownEvaluation for an unknown id."""
        return await asyncio.to_thread(self._transport.verdict, id_of(evaluation_id))

    async def cancel(self, evaluation_id: UUID | str) -> bool:
        """Cancel an evaluation, and kill it if it runs. Return False if it already had its verdict."""
        return await asyncio.to_thread(self._transport.cancel, id_of(evaluation_id))

    async def wait_all(
        self,
        tickets: Iterable[AsyncTicket],
        timeout: float | None = None,
    ) -> list[Verdict]:
        """Wait for the verdicts of all tickets, and return them in order, or raise WaitTimeout."""
        return await await_all(self._transport, [ticket.evaluation_id for ticket in tickets], timeout)

    async def as_completed(
        self,
        tickets: Iterable[AsyncTicket],
        timeout: float | None = None,
    ) -> AsyncIterator[tuple[AsyncTicket, Verdict]]:
        """Yield each ticket with its verdict, in the order in which the verdicts come."""
        pending = {asyncio.wrap_future(self._transport.watch(ticket.evaluation_id)): ticket for ticket in tickets}
        everything = [ticket.evaluation_id for ticket in pending.values()]
        deadline = Deadline(timeout)
        try:
            while pending:
                done, _ = await asyncio.wait(pending, timeout=deadline.left_s(), return_when=asyncio.FIRST_COMPLETED)
                if not done:
                    raise too_late(len(pending), everything, timeout)
                for future in done:
                    yield pending.pop(future), future.result()
        finally:
            for future in pending:
                future.cancel()

    def _ticket(self, submitted: Accepted) -> AsyncTicket:
        return AsyncTicket(*submitted, self._transport)

    def _ticket_of(self, evaluation_id: UUID) -> AsyncTicket:
        return AsyncTicket(evaluation_id, created=False, _transport=self._transport)
