"""Whose turn it is, on a real worker: what is submitted while it is busy, in the order in which it begins."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest

from kqueue import Client, broker
from tests.fleet.told import Fleet, Services
from tests.store.steps import change

#: Evaluations of the producer that has many: more than a window of messages holds.
MANY = 20


class Turns:
    """One worker, kept busy from the start until :meth:`order` is asked for."""

    def __init__(self, services: Services, client: Client, gate: Path) -> None:
        self._services = services
        self._client = client
        self._gate = gate
        self._ids: list[UUID] = []

    def submit(self, kernel: str, **fields: Any) -> UUID:
        """Submit an evaluation as producers do."""
        ticket = self._client.submit(problem="p", kernel=kernel, backend="torch", lane="cpu", **fields)
        self._ids.append(ticket.evaluation_id)
        return ticket.evaluation_id

    def occupy(self, **fields: Any) -> None:
        """Have the worker judge an evaluation that ends when the order is asked for."""
        self._services.started(self.submit(f"gate {self._gate}", **fields))

    def many(self, **fields: Any) -> list[UUID]:
        """Submit many, each of its own kernel."""
        return [self.submit(f"ok {len(self._ids)}", **fields) for _ in range(MANY)]

    def order(self, head: UUID) -> list[UUID]:
        """Wait until ``head`` is the next in Redis, let the worker go on, and return all in the order they began."""
        self._services.until(lambda: self._head() == head, what="the order in Redis")
        self._gate.touch()
        for identity in self._ids:
            assert self._services.verdict(identity).passed
        begun = self._services.rows(
            "SELECT evaluation_id FROM attempts WHERE evaluation_id = ANY(:ids) ORDER BY started_at", ids=self._ids
        )
        return [row.evaluation_id for row in begun]

    def _head(self) -> UUID | None:
        with self._services.app.pool.acquire(block=True) as connection:
            client: Any = connection.default_channel.client
            # Workers take from the tail.
            last = client.lrange(broker.queue("cpu").name, -1, -1)
        return UUID(json.loads(last[0])["headers"]["id"]) if last else None


@pytest.fixture
def turns(services: Services, fleet: Fleet, tmp_path: Path) -> Iterator[Turns]:
    """One idle worker, for whom nobody has used anything of late."""
    services.until(lambda: all(worker.busy_with is None for worker in fleet.live()), what="an idle worker")
    change(services.engine, "DELETE FROM shares")
    with Client(services.config()) as client:
        yield Turns(services, client, tmp_path / "gate")


def test_one_does_not_wait_for_anothers_many(turns: Turns) -> None:
    """A producer's single evaluation begins after the one that runs, before all that another one queued earlier."""
    turns.occupy(producer="many")
    many = turns.many(producer="many")
    one = turns.submit("ok one", producer="one")
    assert turns.order(one)[1:] == [one, *many]
