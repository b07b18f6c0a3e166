"""Waits for verdicts, in threads and in asyncio."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from concurrent.futures import wait
from uuid import UUID

from kqueue.client.transport import Transport
from kqueue.contract import Verdict
from kqueue.errors import WaitTimeout


def wait_all(transport: Transport, ids: Sequence[UUID], timeout: float | None) -> list[Verdict]:
    """Wait for the verdicts of all ``ids``, and return them in order. Raise WaitTimeout after ``timeout`` seconds."""
    futures = [transport.watch(identity) for identity in ids]
    try:
        _, pending = wait(futures, timeout)
        if pending:
            raise too_late(len(pending), ids, timeout)
        return [future.result() for future in futures]
    finally:
        for future in futures:
            future.cancel()


async def await_all(transport: Transport, ids: Sequence[UUID], timeout: float | None) -> list[Verdict]:
    """Wait like :func:`wait_all`, in asyncio."""
    futures = [asyncio.wrap_future(transport.watch(identity)) for identity in ids]
    try:
        if futures:
            _, pending = await asyncio.wait(futures, timeout=timeout)
            if pending:
                raise too_late(len(pending), ids, timeout)
        return [future.result() for future in futures]
    finally:
        for future in futures:
            future.cancel()


class Deadline:
    """A timeout that several waits share, in seconds from its creation. None is no limit."""

    def __init__(self, timeout: float | None) -> None:
        self._at = None if timeout is None else time.monotonic() + timeout

    def left_s(self) -> float | None:
        """Return the remaining seconds, or None for no limit."""
        return None if self._at is None else max(0.0, self._at - time.monotonic())


def too_late(missing: int, ids: Sequence[UUID], timeout: float | None) -> WaitTimeout:
    """Return the error of a wait for ``ids`` in which ``missing`` verdicts did not come within ``timeout`` seconds."""
    subject = f"the verdict of {ids[0]}" if len(ids) == 1 else f"{missing} of {len(ids)} verdicts"
    return WaitTimeout(
        f"{subject} did not come within {timeout} s: wait again or cancel, because the evaluations continue", ids
    )
