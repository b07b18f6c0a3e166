"""The client for threads."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import FIRST_COMPLETED, wait
from typing import TYPE_CHECKING, Any, Self
from uuid import UUID

from kqueue.client.connect import to_services
from kqueue.client.entries import Entry, check, check_all, check_each, entry_of, id_of
from kqueue.client.ticket import Ticket
from kqueue.client.transport import Accepted, Transport
from kqueue.client.waiting import Deadline, too_late, wait_all
from kqueue.contract import Backend, Request, Settings, Verdict
from kqueue.errors import InvalidRequest
from kqueue.states import Priority

if TYPE_CHECKING:
    from kqueue.config import Config


class Client:
    """A producer's connection to a fleet.

    ::

        with Client() as kq:
            ticket = kq.submit(problem=..., kernel=..., backend="cuda", lane="gpu")
            verdict = ticket.wait(timeout=60)
    """

    def __init__(
        self, config: Config | None = None, *, database_url: str | None = None, redis_url: str | None = None
    ) -> None:
        """Prepare a client; it connects when first used.

        Args:
            config: all settings; by default the environment's (:func:`kqueue.config.load`), which also
                finds a fleet started on this machine with ``kqueue up``.
            database_url: Postgres, instead of the configured one.
            redis_url: Redis, instead of the configured one.

        Raises:
            ConfigError: no database is known.
        """
        self._transport: Transport = to_services(config, database_url=database_url, redis_url=redis_url)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close all connections. Evaluations go on; threads that wait here get a ``KqueueError``."""
        self._transport.close()

    def submit(
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
    ) -> Ticket:
        """Submit one evaluation, as a :class:`Request` or by its fields.

        Args:
            request: the whole request. Only ``allow_idle_lane`` may be given beside it.
            problem: source of the reference; or ``sha256:`` and the hash of the source, for a stored problem.
            kernel: source of the candidate.
            backend: what the kernel is written in: ``cuda``, ``triton``, ``torch``, ``cpp``, ``cupy``.
            lane: ``auto`` (``gpu`` where a GPU worker lives, else ``cpu``), ``cpu``, ``gpu`` or
                ``gpu.<model>``.
            settings: how it is judged.
            problem_label: a name for people.
            kernel_label: a name for people.
            batch: a name under which evaluations are found again.
            idempotency_key: the same key again gives the same evaluation.
            priority: ``interactive`` comes before ``batch``, the default.
            producer: whose it is: producers share the devices' time.
            reuse: False has it judged anew, even if an equal evaluation was judged before.
            queue_wait_s: seconds that it may wait for a worker before it ends as ``expired``.
            allow_idle_lane: accept a lane (not ``auto``) that no live worker serves now.

        Raises:
            InvalidRequest: a field is wrong; the message names it and the fix.
            LaneUnavailable: no live worker serves the lane.
            UnknownProblem: no stored problem has the hash that ``problem`` names.
            DatabaseUnavailable: Postgres cannot be used.
            SchemaMismatch: the database is of another version of kqueue.
        """
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
        return self._ticket(self._transport.submit([check(entry)], allow_idle_lane)[0])

    def submit_batch(self, entries: Iterable[Entry], *, allow_idle_lane: bool = False) -> list[Ticket]:
        """Submit all or none, in one transaction; tickets come in the order of ``entries``.

        Raises:
            InvalidRequest: an entry is wrong; the message gives its number, from 0.
            LaneUnavailable: as :meth:`submit`. So are ``DatabaseUnavailable`` and ``SchemaMismatch``.
        """
        return [self._ticket(s) for s in self._transport.submit(check_all(entries), allow_idle_lane)]

    def submit_each(self, entries: Iterable[Entry], *, allow_idle_lane: bool = False) -> list[Ticket | InvalidRequest]:
        """Submit every entry that can be judged, and return a ticket for each in the order of ``entries``.

        For an entry that is refused the list holds the :class:`InvalidRequest`, which is not raised.

        Raises:
            DatabaseUnavailable: Postgres cannot be used. Nothing was submitted.
            SchemaMismatch: the database is of another version of kqueue.
        """
        results = self._transport.submit_each(check_each(entries), allow_idle_lane)
        return [result if isinstance(result, InvalidRequest) else self._ticket(result) for result in results]

    def evaluate(self, request: Request | None = None, *, timeout: float | None = None, **fields: Any) -> Verdict:
        """Submit one evaluation and wait for its verdict; arguments and errors as :meth:`submit`.

        Args:
            request: the whole request.
            timeout: seconds from submission; None for no limit.
            fields: as :meth:`submit`'s.

        Raises:
            WaitTimeout: the verdict did not come in time; ``evaluation_ids`` names the evaluation.
        """
        return self.submit(request, **fields).wait(timeout)

    def evaluate_batch(
        self, entries: Iterable[Entry], *, timeout: float | None = None, allow_idle_lane: bool = False
    ) -> list[Verdict | InvalidRequest]:
        """Submit every entry that can be judged, wait, and return the verdicts in the order of ``entries``.

        One bad entry never spoils the rest. For an entry that is refused the list holds the
        :class:`InvalidRequest`, which is not raised.

        Args:
            entries: requests, or mappings of their fields.
            timeout: seconds from submission; None for no limit.
            allow_idle_lane: as :meth:`submit`'s.

        Raises:
            WaitTimeout: a verdict did not come in time; ``evaluation_ids`` names what was submitted, and
                :meth:`verdict` has what came.
        """
        results = self._transport.submit_each(check_each(entries), allow_idle_lane)
        found = iter(wait_all(self._transport, [s.evaluation_id for s in results if isinstance(s, Accepted)], timeout))
        return [result if isinstance(result, InvalidRequest) else next(found) for result in results]

    def get(self, evaluation_id: UUID | str) -> Ticket:
        """Return a ticket for an evaluation that anybody submitted before.

        Raises:
            UnknownEvaluation: no evaluation has this id.
        """
        identity = id_of(evaluation_id)
        self.verdict(identity)  # refuses an id that no evaluation has
        return self._ticket_of(identity)

    def batch(self, name: str) -> list[Ticket]:
        """Return tickets for all that anybody submitted under a batch's name, in the order of submission.

        A producer that crashed finds its work again. The list is empty if the name is unknown.
        """
        return [self._ticket_of(identity) for identity in self._transport.batch(name)]

    def verdict(self, evaluation_id: UUID | str) -> Verdict | None:
        """Return an evaluation's verdict, None while it has none.

        Raises:
            UnknownEvaluation: no evaluation has this id.
        """
        return self._transport.verdict(id_of(evaluation_id))

    def cancel(self, evaluation_id: UUID | str) -> bool:
        """As :meth:`Ticket.cancel`.

        Raises:
            UnknownEvaluation: no evaluation has this id.
        """
        return self._transport.cancel(id_of(evaluation_id))

    def wait_all(self, tickets: Iterable[Ticket], timeout: float | None = None) -> list[Verdict]:
        """Wait for the verdicts of all tickets, and return them in their order.

        Raises:
            WaitTimeout: one did not come in time.
        """
        return wait_all(self._transport, [ticket.evaluation_id for ticket in tickets], timeout)

    def as_completed(self, tickets: Iterable[Ticket], timeout: float | None = None) -> Iterator[tuple[Ticket, Verdict]]:
        """Yield each ticket with its verdict, as the verdicts come.

        Raises:
            WaitTimeout: not all came within ``timeout`` seconds from now.
        """
        pending = {self._transport.watch(ticket.evaluation_id): ticket for ticket in tickets}
        everything = [ticket.evaluation_id for ticket in pending.values()]
        deadline = Deadline(timeout)
        try:
            while pending:
                done, _ = wait(pending, deadline.left_s(), FIRST_COMPLETED)
                if not done:
                    raise too_late(len(pending), everything, timeout)
                for future in done:
                    yield pending.pop(future), future.result()
        finally:
            for future in pending:
                future.cancel()

    def _ticket(self, submitted: Accepted) -> Ticket:
        return Ticket(*submitted, self._transport)

    def _ticket_of(self, evaluation_id: UUID) -> Ticket:
        return Ticket(evaluation_id, created=False, _transport=self._transport)
