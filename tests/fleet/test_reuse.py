"""Verdicts are reused by real fleets: without a slot, and while the same workers serve."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kqueue import Client
from kqueue.categories import Category
from kqueue.states import Writer
from tests.fleet.told import Fleet, Services

PROBLEM = """
import torch
class Model(torch.nn.Module):
    def forward(self, x):
        return torch.relu(x)
def get_inputs():
    return [torch.randn(64)]
def get_init_inputs():
    return []
"""
KERNEL = """
import torch
class ModelNew(torch.nn.Module):
    def forward(self, x):
        return x.clamp(min={least})
"""
#: Judged quickly.
QUICK = {"checks": 1, "timing": {"calls": 5, "warmup": 0}}


@pytest.fixture
def told(start_fleet: Callable[..., Fleet]) -> Iterator[Fleet]:
    """One worker whose judge does as told, for one test: other tests' workers are real."""
    fleet = start_fleet(reuse=True)
    yield fleet
    fleet.stop()


@pytest.mark.usefixtures("told")
def test_an_equal_evaluation_takes_no_slot(services: Services) -> None:
    """It is answered at once, also while the only slot is busy, and no message is sent for it."""
    fields: dict[str, Any] = {"problem": "p", "kernel": "known ok", "backend": "torch", "lane": "cpu"}
    with Client(services.config(lease_s=4)) as client:
        first = client.evaluate(**fields, timeout=60)
        running = services.submit("sleep 600")
        services.started(running)
        again = client.evaluate(**fields, timeout=60)
        assert (again.reused_from, again.attempts, again.category) == (first.evaluation_id, 0, first.category)
        queued = client.submit(**fields, reuse=False)
        assert not queued.done()
        assert client.cancel(running)
        fresh = queued.wait(60)
        assert (fresh.reused_from, fresh.attempts) == (None, 1)


@pytest.mark.usefixtures("told")
def test_what_waits_is_answered_by_its_equal(services: Services, tmp_path: Path) -> None:
    """Of equal evaluations that wait for one slot, one is judged."""
    gate = tmp_path / "gate"
    ids = [services.submit(f"known gate {gate}") for _ in range(4)]
    services.until(lambda: any(services.attempts(identity) for identity in ids), what="the first attempt")
    gate.touch()
    verdicts = [services.verdict(identity) for identity in ids]
    [judged] = [verdict for verdict in verdicts if verdict.reused_from is None]
    assert [v.reused_from for v in verdicts if v is not judged] == [judged.evaluation_id] * 3
    assert sum(len(services.attempts(identity)) for identity in ids) == 1
    assert [v.written_by for v in verdicts].count(Writer.DATABASE) == 3


def test_a_restart_changes_nothing(services: Services, start_fleet: Callable[..., Fleet]) -> None:
    """All slots of a host have one fingerprint, and the same one after a restart: what was judged before is reused."""
    fields: dict[str, Any] = {"problem": PROBLEM, "backend": "torch", "lane": "cpu", "settings": QUICK}
    kernels = [KERNEL.format(least=least) for least in ("0", "0.0", "-0.0", "0 * 1", "0 * 2", "0 * 3", "0 * 4")]
    marks = (
        "SELECT DISTINCT fingerprint FROM workers WHERE fingerprint IS NOT NULL AND host <> 'here' AND pid = ANY(:p)"
    )
    with Client(services.config(lease_s=4)) as client:
        known: set[str] = set()
        firsts: list[Any] = []
        for life in range(2):
            fleet = start_fleet(true=True, reuse=True, slots=2)
            pids = [worker.pid for worker in fleet.live()]
            assert len(pids) == 2
            batch = [fields | {"kernel": f"{kernel}\n# {life}"} for kernel in kernels]
            firsts += client.wait_all(client.submit_batch(batch), timeout=300)
            assert {verdict.category for verdict in firsts} == {Category.PASSED}
            known |= {row.fingerprint for row in services.rows(marks, p=pids)}
            again = client.evaluate(fields | {"kernel": f"{kernels[0]}\n# 0"}, timeout=300)
            assert (again.reused_from, again.runtime) == (firsts[0].evaluation_id, firsts[0].runtime)
            fleet.stop(signal.SIGTERM)
        assert len(known) == 1


def test_a_fleet_may_reuse_nothing(services: Services, start_fleet: Callable[..., Fleet]) -> None:
    """With KQUEUE_REUSE=false its workers have equal evaluations judged, each by itself."""
    fields: dict[str, Any] = {"problem": PROBLEM, "backend": "torch", "lane": "cpu", "settings": QUICK}
    fleet = start_fleet(true=True, reuse=False)
    with Client(services.config(lease_s=4)) as client:
        verdicts = [client.evaluate(fields | {"kernel": KERNEL.format(least="0 * 9")}, timeout=300) for _ in range(2)]
    assert [(v.category, v.attempts, v.reused_from) for v in verdicts] == [(Category.PASSED, 1, None)] * 2
    fleet.stop()
