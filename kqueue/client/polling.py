"""Waits for verdicts over HTTP. A few requests serve any number of waits."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Final
from uuid import UUID

from kqueue.client.server import Server
from kqueue.contract import Verdict
from kqueue.errors import KqueueError, ServerUnavailable, UnknownEvaluation

#: Maximum number of concurrent requests for verdicts. Each burst of new waits gets one until this limit is reached.
POLLS: Final = 32
#: Seconds for which the server holds one request for verdicts.
_POLL_S: Final = 30.0
#: Maximum number of ids in one request.
_POLL_IDS: Final = 1000
#: Seconds within which new waits share a request.
_BURST_S: Final = 0.005


class Polling:
    """The waits for verdicts of one server. All methods must run in one event loop."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self._waits: dict[UUID, list[Future[Verdict]]] = {}
        self._unasked: set[UUID] = set()
        self._polls: set[asyncio.Task[None]] = set()

    def add(self, evaluation_id: UUID, future: Future[Verdict]) -> None:
        """Set ``future`` to the evaluation's verdict when it comes, or to the error that prevents it."""
        self._waits.setdefault(evaluation_id, []).append(future)
        self._unasked.add(evaluation_id)
        asyncio.get_running_loop().call_later(_BURST_S, self._poll)

    def remove(self, evaluation_id: UUID, future: Future[Verdict]) -> None:
        """Remove a future that is done or cancelled."""
        waits = self._waits.get(evaluation_id, [])
        if future in waits:
            waits.remove(future)
        if not waits:
            self._waits.pop(evaluation_id, None)

    def fail(self, error: KqueueError) -> None:
        """End all waits with an error."""
        for evaluation_id in list(self._waits):
            self._settle(evaluation_id, error)

    def _settle(self, evaluation_id: UUID, outcome: Verdict | KqueueError) -> None:
        for future in self._waits.pop(evaluation_id, []):
            if future.set_running_or_notify_cancel():
                if isinstance(outcome, Verdict):
                    future.set_result(outcome)
                else:
                    future.set_exception(outcome)

    def _poll(self) -> None:
        """Request the verdicts that no active request covers."""
        self._unasked &= self._waits.keys()
        while self._unasked and len(self._polls) < POLLS:
            ids = [self._unasked.pop() for _ in range(min(_POLL_IDS, len(self._unasked)))]
            task = asyncio.get_running_loop().create_task(self._ask(ids))
            self._polls.add(task)
            task.add_done_callback(self._answered)

    def _answered(self, task: asyncio.Task[None]) -> None:
        self._polls.discard(task)
        if not task.cancelled():
            self._poll()

    async def _ask(self, ids: Sequence[UUID]) -> None:
        body = {"evaluation_ids": [str(identity) for identity in ids], "timeout": _POLL_S}
        try:
            answer = await self._server.ask("POST", "/v1/evaluations/wait", body=body, patient=True)
            for fields in answer["verdicts"]:
                verdict = Verdict.load(fields)
                self._settle(verdict.evaluation_id, verdict)
            for unknown in answer["unknown"]:
                self._settle(UUID(unknown), UnknownEvaluation(unknown))
        except KqueueError as error:
            for identity in ids:
                self._settle(identity, error)
        except (ValueError, KeyError) as error:
            malformed = ServerUnavailable(f"{self._server.url} does not answer like a kqueue server: {error}")
            for identity in ids:
                self._settle(identity, malformed)
        finally:
            self._unasked |= self._waits.keys() & set(ids)
