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

    The evaluation continues without its ticket. :meth:`Client.get` returns a new one. ``created`` is False if the
    evaluation existed before.
    """

    evaluation_id: UUID
    created: bool = field(compare=False)
    _transport: Transport = field(repr=False, compare=False)

    def wait(self, timeout: float | None = None) -> Verdict:
        """Wait for the verdict and return it, or raise WaitTimeout after ``timeout`` seconds.

        The evaluation continues after a timeout.
        """
        return wait_all(self._transport, [self.evaluation_id], timeout)[0]

    def watch(self) -> Future[Verdict]:
        """Return a future of the verdict. A caller that stops waiting should cancel it."""
        return self._transport.watch(self.evaluation_id)

    def verdict(self) -> Verdict | None:
        """Return the verdict, or None if there is none yet."""
        return self._transport.verdict(self.evaluation_id)

    def done(self) -> bool:
        """Return True if there is a verdict."""
        return self.verdict() is not None

    def cancel(self) -> bool:
        """Cancel the evaluation, and kill it if it runs. Return False if it already had its verdict."""
        return self._transport.cancel(self.evaluation_id)


@dataclass(frozen=True, slots=True)
class AsyncTicket:
    """:class:`Ticket` for asyncio."""

    evaluation_id: UUID
    created: bool = field(compare=False)
    _transport: Transport = field(repr=False, compare=False)

    async def wait(self, timeout: float | None = None) -> Verdict:
        """Wait for the verdict and return it, or raise WaitTimeout after ``timeout`` seconds."""
        return (await await_all(self._transport, [self.evaluation_id], timeout))[0]

    async def verdict(self) -> Verdict | None:
        """Return the verdict, or None if there is none yet."""
        return await asyncio.to_thread(self._transport.verdict, self.evaluation_id)

    async def done(self) -> bool:
        """Return True if there is a verdict."""
        return await self.verdict() is not None

    async def cancel(self) -> bool:
        """Cancel the evaluation, and kill it if it runs. Return False if it already had its verdict."""
        return await asyncio.to_thread(self._transport.cancel, self.evaluation_id)
