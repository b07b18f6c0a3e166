"""Steps shared by the tests of the store."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from uuid import UUID, uuid4

from sqlalchemy import Engine, text

from kqueue.categories import Category
from kqueue.contract import Outcome
from kqueue.store import evaluations, workers
from kqueue.store.evaluations import Claim, Recorded

PASSED = Outcome(category=Category.PASSED, message="fine")
LOST = Outcome(category=Category.JUDGE_ERROR, message="the judge failed")
ENVIRONMENT = {"device": "cpu", "torch": "2.13", "python": "3.11", "host": "here", "cores": 2}


def together(count: int, act: Callable[[int], Any]) -> list[Any]:
    """Call ``act(0..count-1)`` in as many threads, started at the same moment."""
    barrier = threading.Barrier(count)

    def run(number: int) -> Any:
        barrier.wait()
        return act(number)

    with ThreadPoolExecutor(count) as pool:
        return list(pool.map(run, range(count)))


def count(engine: Engine, table: str, where: str = "true") -> int:
    with engine.connect() as connection:
        return connection.scalars(text(f"SELECT count(*) FROM {table} WHERE {where}")).one()


def change(engine: Engine, statement: str, **values: object) -> None:
    """Change the database directly, mostly its timestamps."""
    with engine.begin() as connection:
        connection.execute(text(statement), values)


def lasting_worker(engine: Engine, lane: str = "cpu", device: str = "cpu") -> UUID:
    """Register a worker of a lane that counts as alive however long the test takes."""
    identity = uuid4()
    workers.register(engine, id=identity, name=f"{lane}-0@here", host="here", pid=1, lanes=[lane], device=device)
    change(engine, "UPDATE workers SET heartbeat_at = now() + interval '1 hour' WHERE id = :id", id=identity)
    return identity


def unchecked(engine: Engine, *tables: str) -> None:
    """Remove the checks of tables, so that a test can write rows that an earlier version accepted."""
    of_table = "SELECT conname FROM pg_constraint WHERE contype = 'c' AND conrelid = cast(:table AS regclass)"
    for table in tables:  # A transaction each, because workers lock tables in another order.
        with engine.begin() as connection:
            for name in connection.scalars(text(of_table), {"table": table}).all():
                connection.execute(text(f'ALTER TABLE {table} DROP CONSTRAINT "{name}"'))


def finish(engine: Engine, claimed: Claim, outcome: Outcome, by: str = "judge") -> Recorded:
    """End a claimed attempt without a delay for a retry."""
    return evaluations.finish(engine, claimed.evaluation_id, claimed.number, outcome, written_by=by, retry_delay_s=0)


def used(engine: Engine, producer: str, seconds: float, ended: float = 1, priority: str = "batch") -> None:
    """Record CPU seconds of a producer's equally long, ended evaluations."""
    columns = "(producer, resource, priority, seconds, squares, ended)"
    statement = f"INSERT INTO shares {columns} VALUES (:who, 'cpu', :priority, :s, :s * :s / :n, :n)"
    change(engine, statement, who=producer, priority=priority, s=float(seconds), n=float(ended))
