"""Handles on accepted evaluations."""

from __future__ import annotations

import asyncio
from concurrent.futures import Future
from dataclasses import dataclass, field
from uuid import UUID

from kqueue.client.transport import Transport
from kqueue.client.waiting import await_all, wait_all
from kqueue.contract import Verdict


@dataclass(frozen=True, slots=True)
class Ticket:
    """A handle on an accepted evaluation.

    It may be dropped: the evaluation goes on, and :meth:`Client.get` finds it.

    Attributes:
        evaluation_id: its id.
        created: False if an earlier submission, or another process, made it.
    """

    evaluation_id: UUID
    created: bool = field(compare=False)
    _transport: Transport = field(repr=False, compare=False)

    def wait(self, timeout: float | None = None) -> Verdict:
        """Return the verdict, as soon as there is one.

        Args:
            timeout: seconds; None for no limit.

        Raises:
            WaitTimeout: it did not come in time; the evaluation goes on.
        """
        return wait_all(self._transport, [self.evaluation_id], timeout)[0]

    def watch(self) -> Future[Verdict]:
        """Return a future of the verdict. Whoever stops waiting cancels it."""
        return self._transport.watch(self.evaluation_id)

    def verdict(self) -> Verdict | None:
        """Return the verdict, None while there is none."""
        return self._transport.verdict(self.evaluation_id)

    def done(self) -> bool:
        """Return True if there is a verdict."""
        return self.verdict() is not None

    def cancel(self) -> bool:
        """End the evaluation as ``cancelled`` and kill it where it runs; return False if it had its verdict."""
        return self._transport.cancel(self.evaluation_id)


@dataclass(frozen=True, slots=True)
class AsyncTicket:
    """:class:`Ticket` for asyncio.

    Attributes:
        evaluation_id: its id.
        created: False if an earlier submission, or another process, made it.
    """

    evaluation_id: UUID
    created: bool = field(compare=False)
    _transport: Transport = field(repr=False, compare=False)

    async def wait(self, timeout: float | None = None) -> Verdict:
        """As :meth:`Ticket.wait`."""
        return (await await_all(self._transport, [self.evaluation_id], timeout))[0]

    async def verdict(self) -> Verdict | None:
        """As :meth:`Ticket.verdict`."""
        return await asyncio.to_thread(self._transport.verdict, self.evaluation_id)

    async def done(self) -> bool:
        """As :meth:`Ticket.done`."""
        return await self.verdict() is not None

    async def cancel(self) -> bool:
        """As :meth:`Ticket.cancel`."""
        return await asyncio.to_thread(self._transport.cancel, self.evaluation_id)
