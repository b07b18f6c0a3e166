"""Verdicts are reused by real fleets without a slot while the same workers run."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from kqueue import Client
from kqueue.states import Writer
from tests.fleet.told import Fleet, Services, renewing


@pytest.fixture(scope="module")
def running_fleet(start_fleet: Callable[..., Fleet]) -> Callable[[], Fleet]:
    """Return the module's fleet of one worker, which reuses verdicts. If a test has ended it, start another first."""
    return renewing(partial(start_fleet, reuse=True))


@pytest.mark.usefixtures("fleet")
def test_an_equal_evaluation_takes_no_slot(services: Services) -> None:
    """The verdict is there at once without a message, even while the only slot is busy."""
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


@pytest.mark.usefixtures("fleet")
def test_what_waits_is_answered_by_its_equal(services: Services, tmp_path: Path) -> None:
    """Of equal evaluations that wait for one slot, only one is judged."""
    gate = tmp_path / "gate"
    ids = [services.submit(f"known gate {gate}") for _ in range(4)]
    services.until(lambda: any(services.attempts(identity) for identity in ids), what="the first attempt")
    gate.touch()
    verdicts = [services.verdict(identity) for identity in ids]
    [judged] = [verdict for verdict in verdicts if verdict.reused_from is None]
    assert [v.reused_from for v in verdicts if v is not judged] == [judged.evaluation_id] * 3
    assert sum(len(services.attempts(identity)) for identity in ids) == 1
    assert [v.written_by for v in verdicts].count(Writer.DATABASE) == 3
