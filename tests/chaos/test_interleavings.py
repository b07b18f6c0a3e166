"""Cancellations, deaths and claims in random order on a fleet of several slots: each evaluation has one verdict."""

from __future__ import annotations

import os
import random
import signal
import time
from collections import Counter
from contextlib import suppress
from typing import Any
from uuid import UUID, uuid4

import pytest

from kqueue import Client
from kqueue.contract import Settings, Timing
from kqueue.store import evaluations
from kqueue.store import workers as registry
from tests.chaos.rig import PATIENCE_S, task_processes
from tests.samples import RELU, RELU_KERNEL
from tests.waiting import below

#: Settings of real judges' evaluations.
QUICK = Settings(checks=1, timing=Timing().off(), max_attempts=10)
#: Acts with their relative frequencies.
ACTS = {"cancel": 4, "kill a process": 4, "kill a worker": 0.3, "claim and fall silent": 1, "send again": 2}


@pytest.mark.nightly
@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    ("seed", "true", "many"), [(1, False, 40), (3, True, 200)], ids=["scripted judges", "real judges"]
)
def test_acts_in_random_order(services: Any, start_fleet: Any, whole: Any, seed: int, true: bool, many: int) -> None:
    """Each evaluation has one verdict: `cancelled` if it was cancelled, otherwise the category of its last attempt."""
    choose, gone, acts = random.Random(seed), uuid4(), Counter[str]()
    fleet = start_fleet(slots=3, true=true)
    registry.register(services.engine, id=gone, name="cpu@gone", host="gone", pid=1, lanes=["cpu"], device="cpu")
    ids: list[UUID] = []
    cancelled: set[UUID] = set()
    plan = [*ACTS, *choose.choices(list(ACTS), list(ACTS.values()), k=many - len(ACTS))]
    choose.shuffle(plan)
    with Client(services.config()) as client:
        for number, act in enumerate(plan):
            seconds = choose.choice((0, 0.1, 0.5))
            if not true:
                ids.append(services.submit(f"sleep {seconds}", attempts=10))
            elif number % 4 == 0:  # each takes seconds on a busy machine
                kernel = RELU_KERNEL.format(f"time.sleep({seconds}); return torch.relu(x)")
                ids.append(services.submit(kernel, problem=RELU, settings=QUICK))
            target = choose.choice(ids[-20:])
            match act:
                case "cancel":
                    done = client.get(target).cancel()
                    assert not (done and target in cancelled)
                    cancelled |= {target} if done else set()
                case "send again":
                    done = services.send(target) is None
                case "claim and fall silent":
                    # A worker has older ones already.
                    done = evaluations.claim(services.engine, ids[-1], worker_id=gone, lease_s=0.5) is not None
                case _:
                    workers = [worker.pid for worker in fleet.live()]
                    # With real judges, any process of a slot can die.
                    children = below if true else task_processes
                    pids = workers if act == "kill a worker" else [pid for one in workers for pid in children(one)]
                    if done := bool(pids):
                        with suppress(ProcessLookupError):
                            os.kill(choose.choice(pids), signal.SIGKILL)
            acts[act] += done
            time.sleep(choose.uniform(0, 0.5 if true else 0.1))
    assert all(acts[act] for act in ACTS), acts
    if not true:
        whole(*ids, category=None)
    for identity in ids:
        verdict, attempts = services.verdict(identity, PATIENCE_S), services.attempts(identity)
        *earlier, last = [None, *(attempt.category for attempt in attempts)]
        assert [attempt.number for attempt in attempts] == list(range(1, verdict.attempts + 1))
        assert (verdict.category == "cancelled") is (identity in cancelled)
        if verdict.category != "cancelled":
            assert {*earlier} <= {None, "worker_lost", "judge_error"}
            assert last == verdict.category
            # A kernel that lost its worker three times is suspected, and is not tried again.
            assert verdict.passed or (verdict.blame == "fleet" and len(attempts) >= 3), verdict
    assert services.rows("SELECT count(*) AS n FROM verdicts WHERE evaluation_id = ANY(:ids)", ids=ids)[0].n == len(ids)
    fleet.stop()
