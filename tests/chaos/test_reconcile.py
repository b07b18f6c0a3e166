"""The soak's reconciliation finds what it is there to find."""

from __future__ import annotations

import time
from dataclasses import replace
from uuid import UUID, uuid4

from sqlalchemy import Engine

from kqueue.categories import Category
from kqueue.contract import Request, Settings
from kqueue.store import evaluations
from tests.chaos.monkey import Event
from tests.chaos.reconcile import Reconciliation, reconcile
from tests.chaos.watch import Life
from tests.samples import ended

EXPECTED = {"good": Category.PASSED, "bad": Category.CRASHED}
#: The pid of the worker that the fixture `worker_id` registers.
PID = 1


def _submitted(engine: Engine, name: str) -> UUID:
    request = Request(
        problem="p", kernel="k", backend="torch", lane="cpu", settings=Settings(max_attempts=1), kernel_label=name,
        batch="soak",
    )  # fmt: skip
    return evaluations.submit(engine, [request])[0].evaluation_id


def _judged(engine: Engine, worker: UUID, name: str, category: Category) -> UUID:
    identity = _submitted(engine, name)
    claim = evaluations.claim(engine, identity, worker_id=worker, lease_s=60)
    assert claim is not None
    evaluations.finish(engine, identity, 1, ended(category), written_by="judge", retry_delay_s=0)
    return identity


def _found(engine: Engine, accepted: dict[UUID, str], *events: Event) -> Reconciliation:
    return reconcile(engine, "soak", accepted, EXPECTED, events)


def _struck(worker: int | None) -> Event:
    return Event("worker killed", time.time() - 60, time.time() + 60, worker, 7)


def test_what_came_as_expected_is_no_fault(engine: Engine, worker_id: UUID) -> None:
    """Right and wrong kernels with the verdicts that are due to them."""
    accepted = {_judged(engine, worker_id, name, category): name for name, category in EXPECTED.items()}
    found = _found(engine, accepted)
    assert found.faults == []
    assert (found.counts["accepted"], found.counts["as expected"], found.counts["attempts"]) == (2, 2, 2)


def test_chaos_explains_a_lost_worker(engine: Engine, worker_id: UUID) -> None:
    """An act that struck the worker, or all, while the attempt ran."""
    accepted = {_judged(engine, worker_id, "good", Category.WORKER_LOST): "good"}
    for worker in (PID, None):
        found = _found(engine, accepted, _struck(worker))
        assert (found.faults, found.struck) == ([], {"worker killed": 1})
        assert found.counts["fleet's fault, explained by chaos"] == 1


def test_chaos_elsewhere_or_earlier_explains_nothing(engine: Engine, worker_id: UUID) -> None:
    """Another worker's death, one that was over before, and the loss of Redis."""
    accepted = {_judged(engine, worker_id, "good", Category.WORKER_LOST): "good"}
    earlier = Event("worker killed", time.time() - 60, time.time() - 30, PID, 7)
    on_redis = replace(_struck(None), action="Redis killed")
    faults = _found(engine, accepted, _struck(PID + 1), earlier, on_redis).faults
    assert [fault.split(":")[0] for fault in faults] == ["no act of chaos explains", "wrong verdict"]


def test_a_neighbour_s_end_explains_what_could_not_be_timed(engine: Engine, worker_id: UUID) -> None:
    """What is left of it dies on the same device."""
    accepted = {_judged(engine, worker_id, "good", Category.TIMING_UNSTABLE): "good"}
    found = _found(engine, accepted, _struck(PID + 1))
    assert (found.faults, found.struck) == ([], {"worker killed": 1})


def test_chaos_excuses_no_wrong_word_on_a_kernel(engine: Engine, worker_id: UUID) -> None:
    """A right kernel that is blamed was wronged, whatever happened meanwhile; so is a wrong one that passed."""
    accepted = {
        _judged(engine, worker_id, "good", Category.TIMEOUT): "good",
        _judged(engine, worker_id, "bad", Category.PASSED): "bad",
    }
    faults = _found(engine, accepted, _struck(None)).faults
    assert [fault.split(":")[0] for fault in faults] == ["wrong verdict", "wrong verdict"]


def test_what_is_lost_open_or_surplus_is_found(engine: Engine, worker_id: UUID) -> None:
    """Accepted and not stored; stored and not accepted; queued, or running, for ever."""
    _judged(engine, worker_id, "good", Category.PASSED)
    queued, running = _submitted(engine, "good"), _submitted(engine, "good")
    assert evaluations.claim(engine, running, worker_id=worker_id, lease_s=60)
    faults = _found(engine, {uuid4(): "bad", queued: "good", running: "good"}).faults
    kinds = sorted(fault.split(":")[0] for fault in faults)
    assert kinds == ["left open", "lost", "not ended once", "not ended once", "surplus"]


def test_a_leak_is_told_from_a_life() -> None:
    """Descriptors, sockets and memory may move a little, and not grow."""
    quiet = Life("worker", 60.0, (30, 32), (10, 9), (300 << 20, 310 << 20))
    assert quiet.leaks() == []
    leaking = Life("worker", 60.0, (30, 60), (10, 40), (300 << 20, 500 << 20))
    assert len(leaking.leaks()) == 3
