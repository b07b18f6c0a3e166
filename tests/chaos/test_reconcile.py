"""The soak's reconciliation finds each kind of fault."""

from __future__ import annotations

import time
from uuid import UUID, uuid4

from sqlalchemy import Engine

from kqueue.categories import Category
from kqueue.contract import Request, Settings
from kqueue.store import evaluations
from tests.chaos.monkey import Event
from tests.chaos.reconcile import reconcile
from tests.chaos.watch import Life
from tests.samples import ended

EXPECTED = {"good": Category.PASSED, "bad": Category.CRASHED}
#: Pid of the worker that the fixture `worker_id` registers.
PID = 1


def _submitted(engine: Engine, batch: str, name: str) -> UUID:
    settings = Settings(max_attempts=1)
    fields = {"problem": "p", "kernel": "k", "backend": "torch", "lane": "cpu"}
    request = Request.model_validate(fields | {"settings": settings, "kernel_label": name, "batch": batch})
    return evaluations.submit(engine, [request])[0].evaluation_id


def _judged(engine: Engine, worker: UUID, batch: str, name: str, category: Category) -> UUID:
    identity = _submitted(engine, batch, name)
    assert evaluations.claim(engine, identity, worker_id=worker, lease_s=60)
    evaluations.finish(engine, identity, 1, ended(category), written_by="judge", retry_delay_s=0)
    return identity


def _act(worker: int | None, action: str = "worker killed", until: float = 60) -> Event:
    return Event(action, time.time() - 60, time.time() + until, worker, 7)


def test_verdicts_that_chaos_does_not_explain_are_faults(engine: Engine, worker_id: UUID) -> None:
    """A lost worker is explained by an act on it or on all, timing by any act, and blame on a kernel by none."""
    lost, elsewhere = Category.WORKER_LOST, [_act(PID + 1), _act(PID, until=-30), _act(None, "Redis killed")]
    for number, (found, acts, faults) in enumerate((
        (EXPECTED, [], []),
        ({"good": lost}, [_act(PID)], []),
        ({"good": lost}, [_act(None)], []),
        ({"good": Category.TIMING_UNSTABLE}, [_act(PID + 1)], []),
        ({"good": lost}, elsewhere, ["no act of chaos explains", "wrong verdict"]),
        ({"good": Category.TIMEOUT, "bad": Category.PASSED}, [_act(None)], ["wrong verdict"] * 2),
    )):  # fmt: skip
        batch = f"soak {number}"
        accepted = {_judged(engine, worker_id, batch, name, category): name for name, category in found.items()}
        told = reconcile(engine, batch, accepted, EXPECTED, acts)
        assert [fault.split(":")[0] for fault in told.faults] == faults, batch
        assert told.counts["accepted"] == told.counts["attempts"] == len(found)
        explained = not faults and found is not EXPECTED
        assert told.counts.get("fleet's fault, explained by chaos", 0) == explained
        assert told.struck == ({"worker killed": 1} if explained else {})


def test_what_is_lost_open_or_surplus_is_found(engine: Engine, worker_id: UUID) -> None:
    """Evaluations that are lost, surplus, or queued or running for ever are faults."""
    _judged(engine, worker_id, "soak", "good", Category.PASSED)
    queued, running = _submitted(engine, "soak", "good"), _submitted(engine, "soak", "good")
    assert evaluations.claim(engine, running, worker_id=worker_id, lease_s=60)
    faults = reconcile(engine, "soak", {uuid4(): "bad", queued: "good", running: "good"}, EXPECTED, []).faults
    kinds = sorted(fault.split(":")[0] for fault in faults)
    assert kinds == ["left open", "lost", "not ended once", "not ended once", "surplus"]


def test_a_leak_is_told_from_a_life() -> None:
    """Descriptors, sockets and memory can vary a little but not grow."""
    assert Life("worker", 60.0, (30, 32), (10, 9), (300 << 20, 310 << 20)).leaks() == []
    assert len(Life("worker", 60.0, (30, 60), (10, 40), (300 << 20, 500 << 20)).leaks()) == 3
