"""Evaluations in the database, submitted and claimed."""

from __future__ import annotations

from collections.abc import Callable
from uuid import UUID

import pytest
from sqlalchemy import Engine

from kqueue.categories import Category
from kqueue.contract import Outcome, Request
from kqueue.store import evaluations
from kqueue.store.evaluations import Claim
from tests.samples import ended, measurement
from tests.store.steps import ENVIRONMENT, change


@pytest.fixture
def submit(engine: Engine, fields) -> Callable[..., UUID]:
    """Return a function that submits one evaluation and returns its id."""

    def one(**changes: object) -> UUID:
        return evaluations.submit(engine, [Request(**fields(**changes))])[0].evaluation_id

    return one


@pytest.fixture
def claim(engine: Engine, worker_id: UUID) -> Callable[[UUID], Claim]:
    """Return a function that claims a claimable evaluation."""

    def one(identity: UUID) -> Claim:
        claimed = evaluations.claim(engine, identity, worker_id=worker_id, lease_s=30)
        assert claimed is not None
        return claimed

    return one


@pytest.fixture
def conclude(engine: Engine, submit, claim) -> Callable[..., UUID]:
    """Return a function that submits an evaluation without reuse and ends it with an outcome."""

    def one(outcome: Outcome, number: int = 0, **changes: object) -> UUID:
        claimed = claim(submit(number=number, **{"reuse": False, **changes}))
        evaluations.set_environment(engine, claimed.attempt_id, ENVIRONMENT, conditions="")
        evaluations.finish(engine, claimed.evaluation_id, 1, outcome, written_by="judge", retry_delay_s=3600)
        return claimed.evaluation_id

    return one


@pytest.fixture
def judged(conclude: Callable[..., UUID]) -> Callable[..., UUID]:
    """Return a function that ends a new evaluation with a category, and with a time against a baseline of 10 ms."""

    def one(category: Category, number: int = 0, ms: float | None = None, log: str = "", **changes: object) -> UUID:
        times = {} if ms is None else {"runtime": measurement(ms), "baseline": measurement(10)}
        return conclude(ended(category, message=str(category), log=log, **times), number, **changes)

    return one


@pytest.fixture
def enqueue(engine: Engine, fields) -> Callable[..., list[UUID]]:
    """Return a function that submits evaluations of a producer and returns their ids."""

    def some(count: int = 1, producer: str = "", priority: str = "batch", **changes: object) -> list[UUID]:
        submitted = evaluations.submit(engine, [Request(**fields(n, **changes)) for n in range(count)])
        ids = [s.evaluation_id for s in submitted]
        # A request cannot name a token as its producer.
        statement = "UPDATE evaluations SET producer = :producer, priority = :priority WHERE id = ANY(:ids)"
        change(engine, statement, producer=producer, priority=priority, ids=ids)
        return ids

    return some
