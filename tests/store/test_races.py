"""Races for one evaluation: one verdict, no open attempts, and the right result for each party."""

from __future__ import annotations

import random
import threading
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from uuid import UUID, uuid4

import pytest
from sqlalchemy import Engine, text

from kqueue.categories import Category
from kqueue.contract import Outcome, Request
from kqueue.message import Message
from kqueue.store import evaluations, retention, tokens, workers
from kqueue.store.evaluations import Claim, Recorded
from tests.store.steps import change

PASSED = Outcome(category=Category.PASSED, message="fine")
LOST = Outcome(category=Category.WORKER_LOST, message="killed")
#: Number of rounds, enough for each pair of racers to meet in both orders.
ROUNDS = 6


def race(*racers: Callable[[], Any]) -> list[Any]:
    """Run all at the same moment in a random order, and return their results."""
    barrier = threading.Barrier(len(racers))

    def run(racer: Callable[[], Any]) -> Any:
        barrier.wait()
        return racer()

    order = random.sample(range(len(racers)), len(racers))
    with ThreadPoolExecutor(len(racers)) as pool:
        results = dict(zip(order, pool.map(run, [racers[place] for place in order]), strict=True))
    return [results[place] for place in range(len(racers))]


def facts(engine: Engine, identity: UUID) -> tuple[str, int, int, int]:
    """Return an evaluation's state and its numbers of verdicts, open attempts and attempts."""
    attempts = "SELECT count(*) FROM attempts WHERE evaluation_id = e.id"
    verdicts = "SELECT count(*) FROM verdicts WHERE evaluation_id = e.id"
    query = f"SELECT state, ({verdicts}), ({attempts} AND ended_at IS NULL), ({attempts}) FROM evaluations AS e"
    with engine.connect() as connection:
        return tuple(connection.execute(text(f"{query} WHERE id = :id"), {"id": identity}).one())


class Racers:
    """The operations of all parties on one evaluation."""

    def __init__(self, engine: Engine, identity: UUID, worker: UUID) -> None:
        self.engine, self.identity, self.worker = engine, identity, worker

    def claim(self) -> Claim | None:
        return evaluations.claim(self.engine, self.identity, worker_id=self.worker, lease_s=30)

    def cancel(self) -> bool:
        return evaluations.cancel(self.engine, self.identity)

    def finish(self, outcome: Outcome = PASSED, number: int = 1, by: str = "judge") -> Recorded:
        return evaluations.finish(self.engine, self.identity, number, outcome, written_by=by, retry_delay_s=0)

    def lose(self) -> list[tuple[UUID, Recorded]]:
        return evaluations.lose_worker(self.engine, self.worker, retry_delay_s=0, message="gone")

    def expire_leases(self) -> list[tuple[UUID, Recorded]]:
        return evaluations.expire_leases(self.engine, retry_delay_s=0)

    def publish(self) -> list[Message]:
        return evaluations.publish(self.engine, [self.identity])

    def unpublish(self) -> int:
        return evaluations.unpublish(self.engine, [self.identity])

    def is_due(self) -> bool:
        """Return whether it is queued without a message."""
        nexts = evaluations.upcoming(self.engine, {"cpu": 1000}).get("cpu", ())
        return self.identity in {one.id for one in nexts if not one.published}

    def expire_queued(self) -> int:
        return evaluations.expire_queued(self.engine)


@pytest.fixture
def begin(engine: Engine, fields, worker_id: UUID) -> Callable[..., Racers]:
    """Return a function that submits an evaluation."""

    def one(**changes: object) -> Racers:
        [submitted] = evaluations.submit(engine, [Request(**fields(**changes))])
        return Racers(engine, submitted.evaluation_id, worker_id)

    return one


def overdue(engine: Engine) -> None:
    """Expire every lease."""
    change(engine, "UPDATE attempts SET lease_until = now() - interval '1 s' WHERE ended_at IS NULL")


def test_cancel_claim(engine: Engine, begin) -> None:
    """A cancelled evaluation ends as `cancelled`, with a begun attempt or without one."""
    seen: Counter[bool] = Counter()
    for _ in range(ROUNDS):
        it = begin()
        cancelled, *claims = race(it.cancel, it.claim, it.claim)
        assert cancelled is True
        begun = [claim for claim in claims if claim is not None]
        assert len(begun) <= 1
        seen[bool(begun)] += 1
        assert facts(engine, it.identity) == ("done", 1, len(begun), len(begun))
        if begun:
            assert it.finish() is Recorded.LATE
        assert facts(engine, it.identity)[:3] == ("done", 1, 0)
        assert evaluations.verdict(engine, it.identity).category is Category.CANCELLED
        assert it.claim() is None


def test_cancel_finish_sweep_bury(engine: Engine, begin) -> None:
    """Judge, supervisor, sweeper and producer end one attempt at the same time."""
    for _ in range(ROUNDS):
        it = begin(settings={"max_attempts": 1})
        assert it.claim() is not None
        overdue(engine)
        cancelled, finished, lost, swept = race(it.cancel, it.finish, it.lose, it.expire_leases)
        assert facts(engine, it.identity) == ("done", 1, 0, 1)
        final = [finished] + [recorded for _, recorded in lost + swept]
        # Exactly one of the four wrote the verdict, and its result says so.
        assert final.count(Recorded.FINAL) + cancelled == 1
        verdict = evaluations.verdict(engine, it.identity)
        expected = "client" if cancelled else "judge" if finished is Recorded.FINAL else None
        assert expected is None or verdict.written_by == expected
        assert expected is not None or verdict.category is Category.WORKER_LOST


def test_retry_cancel_claim(engine: Engine, begin) -> None:
    """A fleet's failure requeues it while its producer cancels it and another worker claims it."""
    for _ in range(ROUNDS):
        it = begin(settings={"max_attempts": 3})
        assert it.claim() is not None
        failed, cancelled, claimed = race(lambda it=it: it.finish(LOST, by="worker"), it.cancel, it.claim)
        assert cancelled is True
        assert failed in (Recorded.RETRY, Recorded.LATE)
        assert failed is Recorded.RETRY or claimed is None
        if claimed is not None:
            assert it.finish(number=2) is Recorded.LATE
        assert facts(engine, it.identity)[:3] == ("done", 1, 0)


def test_one_try_is_spent_by_many_who_see_a_death(engine: Engine, begin) -> None:
    """Worker, supervisor and two sweepers see the same death, which costs one attempt and makes one message due."""
    for _ in range(ROUNDS):
        it = begin(settings={"max_attempts": 3})
        assert it.claim() is not None
        overdue(engine)
        race(lambda it=it: it.finish(LOST, by="worker"), it.lose, it.expire_leases, it.expire_leases)
        assert facts(engine, it.identity) == ("queued", 0, 0, 1)
        assert it.is_due()
        it.cancel()


def test_expire_claim_cancel(engine: Engine, begin) -> None:
    """At the end of the producer's limit it is expired or cancelled, and never judged."""
    for _ in range(ROUNDS):
        it = begin(queue_wait_s=60)
        change(engine, "UPDATE evaluations SET expires_at = now() - interval '1 s' WHERE id = :id", id=it.identity)
        cancelled, claimed, *_ = race(it.cancel, it.claim, it.expire_queued, it.expire_queued)
        assert claimed is None
        assert facts(engine, it.identity) == ("done", 1, 0, 0)
        verdict = evaluations.verdict(engine, it.identity)
        assert verdict.category is (Category.CANCELLED if cancelled else Category.EXPIRED)


def test_publishing_claim(engine: Engine, begin) -> None:
    """With two sweepers and two claims at once, it is claimed exactly once and its message is not lost."""
    for _ in range(ROUNDS):
        it = begin()
        claimed, *_ = race(it.claim, it.publish, it.unpublish, it.claim)
        claimed = claimed or it.claim()
        assert facts(engine, it.identity) == ("running", 0, 1, 1)
        assert it.finish() is Recorded.FINAL


def test_a_paused_worker_and_its_neighbour(engine: Engine, begin) -> None:
    """After a pause during both claims one worker has it, or it is queued and its message is due."""
    workers.register(engine, id=uuid4(), name="cpu-1@here", host="here", pid=2, lanes=["cpu"], device="cpu")
    for _ in range(ROUNDS):
        it = begin()
        it.publish()
        workers.pause(engine, {it.worker: None})
        claimed, _ = race(it.claim, lambda it=it: workers.pause(engine, {it.worker: "the host is short of memory"}))
        state, _, running, _ = facts(engine, it.identity)
        assert (state, running) == (("queued", 0) if claimed is None else ("running", 1))
        if claimed is None:
            assert it.is_due()
        it.cancel()
        it.lose()


def test_removing_and_submitting_again(engine: Engine, fields, worker_id: UUID) -> None:
    """A concurrent removal and submission of the same key lets no submission fail and loses none."""
    keys = [f"k{n}" for n in range(5)]
    requests = [Request(**fields(n, idempotency_key=key)) for n, key in enumerate(keys)]

    def prune() -> retention.Pruned:
        return retention.prune(engine, retention_days=1e-9, log_retention_days=None)

    for _ in range(ROUNDS):
        for submitted in evaluations.submit(engine, requests):
            it = Racers(engine, submitted.evaluation_id, worker_id)
            if it.claim() is not None:
                assert it.finish() is Recorded.FINAL
        again = race(lambda: evaluations.submit(engine, requests), prune, lambda: evaluations.submit(engine, requests))
        alive = evaluations.existing(engine, {s.evaluation_id for s in again[0]} | {s.evaluation_id for s in again[2]})
        # An evaluation found before its removal is gone with its verdict. The rest exists with its sources.
        assert all(s.evaluation_id in alive for result in (again[0], again[2]) for s in result if s.created)
        for identity in alive - set(evaluations.verdicts(engine, alive)):
            assert Racers(engine, identity, worker_id).claim().request.kernel.startswith("class ModelNew")
            assert Racers(engine, identity, worker_id).finish() is Recorded.FINAL
    while prune():
        pass
    for table in ("kernels", "problems", "attempts"):
        with engine.connect() as connection:
            assert connection.scalars(text(f"SELECT count(*) FROM {table}")).one() == 0


def test_claims_of_one_token(engine: Engine, fields: Callable[..., Any], worker_id: UUID) -> None:
    """Of simultaneous claims, a token with an upper limit of one running attempt gets one."""
    token = tokens.create(engine, "t", [tokens.Scope.SUBMIT], limits={"running": 1})[0].id
    for _ in range(ROUNDS):
        submitted = evaluations.submit(engine, [Request(**fields(n, reuse=False)) for n in range(3)])
        change(engine, "UPDATE evaluations SET producer = :it WHERE state = 'queued'", it=f"token:{token}")
        [begun] = filter(None, race(*(Racers(engine, one.evaluation_id, worker_id).claim for one in submitted)))
        Racers(engine, begun.evaluation_id, worker_id).finish()
        for one in submitted:
            evaluations.cancel(engine, one.evaluation_id)
