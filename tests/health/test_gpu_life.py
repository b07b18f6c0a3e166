"""GPUs of a running fleet are drained, suspected, tested, quarantined and returned, while the other GPU goes on."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from kqueue.cli import app
from kqueue.store import gpus
from tests.fleet.told import Fleet, renewing
from tests.store.steps import change
from workers.judge.gpu import booking
from workers.judge.host.scratch import device_lock

pytestmark = pytest.mark.timeout(300)


@pytest.fixture(scope="module")
def running_fleet(start_gpu_fleet: Callable[..., Fleet]) -> Callable[[], Fleet]:
    """Return the module's fleet with a slot on each of two GPUs. If a test has ended it, start another first."""
    return renewing(start_gpu_fleet)


@pytest.fixture(autouse=True)
def fleet(running_fleet: Callable[[], Fleet], fake: Any, watcher: Any) -> Fleet:
    """Return a fleet with a slot on each of two GPUs in service whose self-tests pass."""
    fleet = running_fleet()
    fake.ends("pass")
    for number in (0, 1):
        watcher.until_state("serving", number)
        fleet.services.until(lambda number=number: watcher.paused(fleet, number) is None, what="a worker that goes on")
    return fleet


def _gpu(fleet: Any, *arguments: str) -> str:
    """Run `kqueue gpu` in this process and return its output."""
    settings = {name: value for name, value in fleet.environment.items() if name.startswith("KQUEUE_")}
    done = CliRunner().invoke(app, ["gpu", *arguments], env=settings, catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return done.output


def _test_now(services: Any) -> None:
    change(services.engine, "UPDATE gpus SET check_at = now() WHERE check_at IS NOT NULL")


def test_a_drained_gpu_ends_what_it_runs_and_takes_no_more(
    services: Any, fleet: Any, fake: Any, watcher: Any, tmp_path: Path
) -> None:
    """The other GPU goes on, and the drained one is not tested and gets evaluations again after its resume."""
    before = fake.tests()
    running = [services.submit(f"gate {tmp_path / 'gate'}", lane="gpu") for _ in range(2)]
    for identity in running:
        services.started(identity)
    drain = ("drain", "0", "--reason", "a new fan")
    assert "1 evaluations run on it" in _gpu(fleet, *drain)
    with ThreadPoolExecutor(1) as pool:
        draining = pool.submit(_gpu, fleet, *drain, "--wait")
        time.sleep(0.7)  # longer than the interval of the supervisor's checks
        assert not draining.done()
        (tmp_path / "gate").touch()
        assert "no evaluation runs on it" in draining.result()
    assert all(services.verdict(identity).passed for identity in running)
    services.until(lambda: watcher.paused(fleet) == "GPU 0 is drained: a new fan", what="the pause")
    after = [services.submit("ok", lane="gpu") for _ in range(4)]
    assert all(services.verdict(identity).passed for identity in after)
    slots = {services.attempts(identity)[0].worker_id for identity in after}
    assert slots == {worker.id for worker in fleet.live() if worker.device == fake.uuids[1]}
    assert "drained: a new fan" in _gpu(fleet, "list")

    assert "no evaluation runs on it" in _gpu(fleet, "drain", fake.uuids[1][:12], "--wait")
    waiting = services.submit("ok", lane="gpu")
    time.sleep(1.5)  # a worker would have begun it by now
    assert services.rows("SELECT state FROM evaluations WHERE id = :id", id=waiting)[0].state == "queued"
    assert fake.tests() == before
    assert "is in service again" in _gpu(fleet, "resume", "0")
    assert services.verdict(waiting).passed
    _gpu(fleet, "resume", "1")


def test_a_failed_evaluation_has_its_gpu_tested_and_a_good_one_goes_on(
    services: Any, fleet: Any, fake: Any, watcher: Any
) -> None:
    """The GPU is tested once in a fresh process, and the evaluation is tried again."""
    before = len(fake.tests())
    verdict = services.verdict(services.submit("unhealthy-once", lane="gpu", attempts=3))
    assert (verdict.passed, verdict.attempts) == (True, 2)
    services.until(lambda: len(fake.tests()) == before + 1, what="a test")
    for number in (0, 1):
        assert watcher.until_state("serving", number).failures == 0
    assert len(fake.tests()) == before + 1


def test_a_sick_gpu_is_quarantined_and_returns_when_it_has_passed(
    services: Any, fleet: Any, fake: Any, watcher: Any
) -> None:
    """Its worker pauses with the reason in its row, the other GPU works, and self-tests are repeated automatically."""
    fake.ends("fail")
    first = services.submit("unhealthy-once", lane="gpu", attempts=3)
    [sick] = services.until(lambda: [n for n in (0, 1) if watcher.gpu(n).state == "quarantined"], what="a quarantine")
    # It is tested again in 10 s.
    assert (watcher.gpu(sick).reason, watcher.gpu(sick).failures) == ("computed 7", 2)
    assert services.verdict(first).passed
    assert services.attempts(first)[-1].worker_id == next(
        worker.id for worker in fleet.live() if worker.device == fake.uuids[1 - sick]
    )
    assert watcher.paused(fleet, sick) == f"GPU {sick} is quarantined: computed 7"
    _test_now(services)
    services.until(lambda: watcher.gpu(sick).failures == 3, what="the test that heals, or does not")
    fake.ends("pass")
    assert "is being tested" in _gpu(fleet, "resume", str(sick))
    watcher.until_state("serving", sick)
    assert services.verdict(services.submit("ok", lane="gpu")).passed


def test_errors_of_applications_are_noted_and_those_of_the_gpu_have_it_tested(
    services: Any, fleet: Any, fake: Any, watcher: Any
) -> None:
    """Xid 13 is a kernel's invalid access, 79 a GPU lost from its bus. Uncorrectable ECC errors also start a test."""
    before = len(fake.tests())
    fake.xid(13)
    services.until(lambda: [x["xid"] for x in watcher.gpu().facts.get("xids", [])] == [13], what="the fact")
    assert len(fake.tests()) == before
    fake.xid(79)
    services.until(lambda: fake.tests()[before:] == [fake.uuids[0]], what="a test")
    assert [x["xid"] for x in watcher.until_state("serving").facts["xids"]] == [13, 79]
    fake.say(1, ecc=[3, 5])
    services.until(lambda: fake.tests()[before + 1 :] == [fake.uuids[1]], what="another test")


def test_facts_are_in_the_row_and_those_that_there_are_not_are_left_out(fleet: Any, fake: Any, watcher: Any) -> None:
    fake.say(0, temperature=77, throttle=0x8 | 0x40, processes=[[1, 5 << 30]])
    fleet.services.until(lambda: watcher.gpu().facts.get("temperature_c") == 77, what="the fact")
    facts = watcher.gpu().facts
    assert facts["throttle"] == ["HwSlowdown", "HwThermalSlowdown"]
    assert facts["remapped_rows"] == {"corrected": 0, "uncorrected": 0, "pending": False, "failed": False}
    assert facts["processes"][0]["memory_bytes"] == 5 << 30
    assert "retired_pages" not in facts
    listed = _gpu(fleet, "list")
    assert "HwThermalSlowdown" in listed
    assert "ECC uncorrected" in listed
    fake.say(0, throttle=0, processes=[])


@pytest.mark.nightly
def test_who_waits_for_memory_is_told_until_that_ends(services: Any, fleet: Any, fake: Any, watcher: Any) -> None:
    """Judges book memory in files next to the device's lock, which the supervisor only reads."""
    folder = device_lock(services.config().scratch, fake.uuids[1]).with_suffix(".memory")
    program = (
        "import sys, time; from pathlib import Path; from workers.judge.gpu.booking import Ledger\n"
        "ledger = Ledger(Path(sys.argv[1]), 100 << 30, patience_s=0)\n"
        "ledger.book(int(sys.argv[2]), label=sys.argv[3], wait_s=300); time.sleep(300)"
    )

    def book(nbytes: int, label: str) -> subprocess.Popen[bytes]:
        judge = subprocess.Popen([sys.executable, "-c", program, str(folder), str(nbytes), label])
        judges.append(judge)
        services.until(lambda: label in [entry.label for entry in booking.entries(folder)], what="a booking")
        return judge

    def told() -> Any:
        return (known := watcher.gpu(1).memory) and (known.booked_bytes >> 30, [one.label for one in known.waiting])

    judges: list[subprocess.Popen[bytes]] = []
    try:
        holder, first = book(60 << 30, "gpu1-0"), book(90 << 30, "first")
        book(10 << 30, "second")
        services.until(lambda: told() == (60, ["first", "second"]), what="two who wait")
        assert watcher.gpu(1).memory.capacity_bytes == 100 << 30
        first.kill()
        services.until(lambda: told() == (70, []), what="nobody who waits")
        holder.kill()
        services.until(lambda: told() == (10, []), what="one booking")
    finally:
        for judge in judges:
            judge.kill()
            judge.wait()
    services.until(lambda: told() is None, what="no booking")
    assert watcher.gpu(0).memory is None


@pytest.mark.nightly
def test_a_test_that_cannot_be_made_is_made_later(services: Any, fleet: Any, fake: Any, watcher: Any) -> None:
    """A test without free memory is no failure, but the GPU gets no evaluations until it passes."""
    fake.ends("unknown")
    gpus.ask_for_test(services.engine, fake.uuids[0], reason="a sign")
    services.until(lambda: "no memory is free" in (watcher.paused(fleet) or ""), what="a worker that pauses")
    assert (watcher.gpu().state, watcher.gpu().failures) == ("serving", 0)
    fake.ends("pass")
    _test_now(services)
    watcher.until_state("serving")


def test_a_hanging_test_in_the_judge_costs_neither_verdict_nor_slot(
    services: Any, fleet: Any, fake: Any, watcher: Any
) -> None:
    """The judge is killed, and the worker records the verdict."""
    verdict = services.verdict(services.submit("hang-in-self-test", lane="gpu", attempts=1))
    assert (verdict.category, verdict.written_by) == ("gpu_unhealthy", "worker")
    for number in (0, 1):
        watcher.until_state("serving", number)
    assert services.verdict(services.submit("ok", lane="gpu")).passed
