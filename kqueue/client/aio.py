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
    """:class:`Client` for asyncio: the same methods as coroutines. Any number may wait at once.

    ::

        async with AsyncClient() as kq:
            verdict = await kq.evaluate(problem=..., kernel=..., backend="cuda")
    """

    def __init__(
        self, config: Config | None = None, *, database_url: str | None = None, redis_url: str | None = None
    ) -> None:
        """As :class:`Client`."""
        self._transport: Transport = to_services(config, database_url=database_url, redis_url=redis_url)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """As :meth:`Client.close`."""
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
        """As :meth:`Client.submit`."""
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
        """As :meth:`Client.submit_batch`."""
        submitted = await asyncio.to_thread(self._transport.submit, check_all(entries), allow_idle_lane)
        return [self._ticket(s) for s in submitted]

    async def submit_each(
        self, entries: Iterable[Entry], *, allow_idle_lane: bool = False
    ) -> list[AsyncTicket | InvalidRequest]:
        """As :meth:`Client.submit_each`."""
        results = await asyncio.to_thread(self._transport.submit_each, check_each(entries), allow_idle_lane)
        return [result if isinstance(result, InvalidRequest) else self._ticket(result) for result in results]

    async def evaluate(
        self,
        request: Request | None = None,
        *,
        timeout: float | None = None,
        **fields: Any,
    ) -> Verdict:
        """As :meth:`Client.evaluate`."""
        return await (await self.submit(request, **fields)).wait(timeout)

    async def evaluate_batch(
        self,
        entries: Iterable[Entry],
        *,
        timeout: float | None = None,
        allow_idle_lane: bool = False,
    ) -> list[Verdict | InvalidRequest]:
        """As :meth:`Client.evaluate_batch`."""
        results = await asyncio.to_thread(self._transport.submit_each, check_each(entries), allow_idle_lane)
        ids = [result.evaluation_id for result in results if isinstance(result, Accepted)]
        found = iter(await await_all(self._transport, ids, timeout))
        return [result if isinstance(result, InvalidRequest) else next(found) for result in results]

    async def get(self, evaluation_id: UUID | str) -> AsyncTicket:
        """As :meth:`Client.get`."""
        identity = id_of(evaluation_id)
        await self.verdict(identity)
        return self._ticket_of(identity)

    async def batch(self, name: str) -> list[AsyncTicket]:
        """As :meth:`Client.batch`."""
        return [self._ticket_of(identity) for identity in await asyncio.to_thread(self._transport.batch, name)]

    async def verdict(self, evaluation_id: UUID | str) -> Verdict | None:
        """As :meth:`Client.verdict`."""
        return await asyncio.to_thread(self._transport.verdict, id_of(evaluation_id))

    async def cancel(self, evaluation_id: UUID | str) -> bool:
        """As :meth:`Client.cancel`."""
        return await asyncio.to_thread(self._transport.cancel, id_of(evaluation_id))

    async def wait_all(
        self,
        tickets: Iterable[AsyncTicket],
        timeout: float | None = None,
    ) -> list[Verdict]:
        """As :meth:`Client.wait_all`."""
        return await await_all(self._transport, [ticket.evaluation_id for ticket in tickets], timeout)

    async def as_completed(
        self,
        tickets: Iterable[AsyncTicket],
        timeout: float | None = None,
    ) -> AsyncIterator[tuple[AsyncTicket, Verdict]]:
        """As :meth:`Client.as_completed`."""
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
