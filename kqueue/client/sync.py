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
    """The connection of a producer to a fleet.

    ::

        with Client() as kq:
            ticket = kq.submit(problem=..., kernel=..., backend="cuda", lane="gpu")
            verdict = ticket.wait(timeout=60)
    """

    def __init__(
        self, config: Config | None = None, *, database_url: str | None = None, redis_url: str | None = None
    ) -> None:
        """Create a client, which connects at its first use.

        Args:
            config: all settings. By default :func:`kqueue.config.load` reads the environment and finds a fleet of
                ``kqueue up`` on this machine.
            database_url: URL of Postgres, instead of the configured one.
            redis_url: URL of Redis, instead of the configured one.

        Raises:
            ConfigError: no database is set.
        """
        self._transport: Transport = to_services(config, database_url=database_url, redis_url=redis_url)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close all connections. Evaluations continue. Waiting threads get a ``KqueueError``."""
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
        """Submit one evaluation, given by a :class:`Request` or by its fields.

        Args:
            request: the complete request. It can be combined only with ``allow_idle_lane``.
            problem: source of the reference, or ``sha256:`` and the hash of a stored problem's source.
            kernel: source of the candidate.
            backend: language of the kernel: ``cuda``, ``triton``, ``torch``, ``cpp`` or ``cupy``.
            lane: ``cpu``, ``gpu``, ``gpu.<model>``, or ``auto`` for ``gpu`` if a GPU worker is live, else ``cpu``.
            settings: the judge's settings.
            problem_label: a display name.
            kernel_label: a display name.
            batch: a name by which evaluations can be listed.
            idempotency_key: a key. Submissions with the same key return the same evaluation.
            priority: ``interactive`` runs before ``batch``, the default.
            producer: the submitter's name. Producers share the devices' time.
            reuse: False to judge the kernel again, even if an equal evaluation has a verdict.
            queue_wait_s: maximum seconds in the queue. Then the evaluation ends as ``expired``.
            allow_idle_lane: accept a lane (not ``auto``) that no live worker serves now.

        Raises:
            InvalidRequest: a field is wrong. The message names it and the fix.
            LaneUnavailable: no live worker serves the lane.
            UnknownProblem: no stored problem has the hash in ``problem``.
            DatabaseUnavailable: Postgres cannot be used.
            SchemaMismatch: the database belongs to another version of kqueue.
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
        """Submit all entries or none, in one transaction, and return tickets in the order of ``entries``.

        Raises:
            InvalidRequest: an entry is wrong. The message has its index.
            LaneUnavailable, UnknownProblem, DatabaseUnavailable, SchemaMismatch: the errors of :meth:`submit`.
        """
        return [self._ticket(s) for s in self._transport.submit(check_all(entries), allow_idle_lane)]

    def submit_each(self, entries: Iterable[Entry], *, allow_idle_lane: bool = False) -> list[Ticket | InvalidRequest]:
        """Submit every valid entry, and return a ticket for each in the order of ``entries``.

        For a refused entry the list contains the :class:`InvalidRequest`, which is not raised.

        Raises:
            DatabaseUnavailable: Postgres cannot be used. Nothing was submitted.
            SchemaMismatch: the database belongs to another version of kqueue.
        """
        results = self._transport.submit_each(check_each(entries), allow_idle_lane)
        return [result if isinstance(result, InvalidRequest) else self._ticket(result) for result in results]

    def evaluate(self, request: Request | None = None, *, timeout: float | None = None, **fields: Any) -> Verdict:
        """Submit one evaluation and wait for its verdict. All errors of :meth:`submit` are possible.

        Args:
            request: the complete request.
            timeout: seconds from submission, or None for no limit.
            fields: the other arguments of :meth:`submit`.

        Raises:
            WaitTimeout: the verdict did not come in time. ``evaluation_ids`` names the evaluation.
        """
        return self.submit(request, **fields).wait(timeout)

    def evaluate_batch(
        self, entries: Iterable[Entry], *, timeout: float | None = None, allow_idle_lane: bool = False
    ) -> list[Verdict | InvalidRequest]:
        """Submit every valid entry, wait, and return the verdicts in the order of ``entries``.

        For a refused entry the list contains the :class:`InvalidRequest`, which is not raised.

        Args:
            entries: requests, or mappings of their fields.
            timeout: seconds from submission, or None for no limit.
            allow_idle_lane: accept lanes (not ``auto``) that no live worker serves now.

        Raises:
            WaitTimeout: a verdict did not come in time. ``evaluation_ids`` names all submitted evaluations, and
                :meth:`verdict` returns the verdicts that exist.
        """
        results = self._transport.submit_each(check_each(entries), allow_idle_lane)
        ids = [result.evaluation_id for result in results if isinstance(result, Accepted)]
        verdicts = iter(wait_all(self._transport, ids, timeout))
        return [result if isinstance(result, InvalidRequest) else next(verdicts) for result in results]

    def get(self, evaluation_id: UUID | str) -> Ticket:
        """Return a ticket for an existing evaluation of any producer, or raise UnknownEvaluation."""
        identity = id_of(evaluation_id)
        self.verdict(identity)  # raises UnknownEvaluation
        return self._ticket_of(identity)

    def batch(self, name: str) -> list[Ticket]:
        """Return tickets for all evaluations of a batch in the order of submission, or none for an unknown batch.

        A producer can use this after a crash to find its evaluations.
        """
        return [self._ticket_of(identity) for identity in self._transport.batch(name)]

    def verdict(self, evaluation_id: UUID | str) -> Verdict | None:
        """Return an evaluation's verdict, or None if it has none yet. Raise UnknownEvaluation for an unknown id."""
        return self._transport.verdict(id_of(evaluation_id))

    def cancel(self, evaluation_id: UUID | str) -> bool:
        """Cancel an evaluation, and kill it if it runs. Return False if it already had its verdict.

        Raise UnknownEvaluation for an unknown id.
        """
        return self._transport.cancel(id_of(evaluation_id))

    def wait_all(self, tickets: Iterable[Ticket], timeout: float | None = None) -> list[Verdict]:
        """Wait for the verdicts of all tickets, and return them in order, or raise WaitTimeout."""
        return wait_all(self._transport, [ticket.evaluation_id for ticket in tickets], timeout)

    def as_completed(self, tickets: Iterable[Ticket], timeout: float | None = None) -> Iterator[tuple[Ticket, Verdict]]:
        """Yield each ticket with its verdict, in the order in which the verdicts come.

        Raises:
            WaitTimeout: a verdict did not come within ``timeout`` seconds from the call.
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
