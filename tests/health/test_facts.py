"""Facts about GPUs from NVML and the kernel's log, and the resulting decisions."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode

from kqueue.categories import Category
from tests.health.gpus import GIB, Gpus
from tests.waiting import until
from workers.judge.ending import EvaluationEnded
from workers.judge.gpu import facts, self_test
from workers.judge.pipeline import health


@pytest.fixture
def nvml(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Gpus:
    gpus = Gpus(tmp_path / "nvml")
    spec = importlib.util.spec_from_file_location("nvml_double", gpus.directory / "pynvml.py")
    assert spec.loader is not None
    double = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(double)
    monkeypatch.setitem(sys.modules, "pynvml", double)
    for module in (facts, health):
        monkeypatch.setattr(module, "_nvml", double)
    monkeypatch.setattr(facts, "sees_all", lambda: True)
    return gpus


def look(gpu: str, policy: Any, *, wait_s: float = 60.0) -> health.Sharing:
    """Return a detector of foreign GPU processes whose fleet is this process."""
    return health.Sharing(gpu, policy, fleet=os.getpid(), wait_s=wait_s, look_s=0.05)


@pytest.fixture
def dead() -> int:
    process = subprocess.Popen(["true"])
    process.wait()
    return process.pid


@pytest.fixture
def mine() -> Iterator[int]:
    with subprocess.Popen(["sleep", "60"]) as process:
        yield process.pid
        process.kill()


def test_a_device_that_computes_rightly_passes() -> None:
    self_test.chains("cpu")
    self_test.products("cpu")


def test_one_wrong_bit_is_seen() -> None:

    class Wrong(TorchFunctionMode):
        def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            values = function(*args, **(kwargs or {}))
            if function is torch.arange:
                values[len(values) // 3] ^= 1
            return values

    for work in (self_test.chains, self_test.products):
        with Wrong(), pytest.raises(self_test.SelfTestError, match="instead of"):
            work("cpu")


def test_memory_of_the_dead_belongs_to_nobody(nvml: Gpus, dead: int) -> None:
    """Memory of living processes is accounted for. If it is unknown or hidden, nothing is reported."""
    gpu = nvml.uuids[0]
    nvml.say(memory=[50 * GIB, 140 * GIB], processes=[[os.getpid(), 30 * GIB], [dead, 19 * GIB]])
    assert facts.unaccounted_bytes(gpu) == 20 * GIB
    nvml.say(processes=[[os.getpid(), None]])
    assert facts.unaccounted_bytes(gpu) is None


def test_a_container_is_told_nothing_of_memory(nvml: Gpus, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(facts, "sees_all", lambda: False)
    assert facts.unaccounted_bytes(nvml.uuids[0]) is None
    assert health.Memory(nvml.uuids[0]).leak() is None
    sharing = look(nvml.uuids[0], "refuse")
    nvml.say(processes=[[1, GIB]], working=[1])
    sharing.before_timing()
    assert sharing.foreign_processes is None


def test_memory_that_is_left_behind_is_found(nvml: Gpus, dead: int) -> None:
    """A leak is memory that remains for a while after its process."""
    memory = health.Memory(nvml.uuids[0], stays_s=0.2)
    nvml.say(memory=[GIB + GIB // 2, 140 * GIB])
    assert memory.leak() == 0
    nvml.say(memory=[9 * GIB, 140 * GIB], processes=[[dead, 8 * GIB]])
    assert memory.leak() == 8 * GIB


def test_errors_are_told_once_whoever_tells_them(nvml: Gpus, tmp_path: Path) -> None:
    """Each error of a requested GPU is reported once, from NVML or the kernel's log."""
    log = tmp_path / "kmsg"
    log.write_text("3,1,1,-;NVRM: Xid (PCI:0000:3b:00): 48, before this began\n")
    gpu = nvml.uuids[0]
    errors = facts.Errors({gpu: gpu}, log)
    assert errors.news() == []
    with log.open("a") as out:
        out.write(
            "3,2,2,-;NVRM: Xid (PCI:0000:3b:00): 79, pid='<unknown>', name=<unknown>, GPU has fallen off the bus.\n"
        )
        out.write("3,3,3,-;NVRM: Xid (PCI:0000:5e:00): 79, another GPU\n")
        out.write("6,4,4,-;usb 1-1: Xid is not what this is about\n")
    nvml.xid(79)
    nvml.xid(31)
    assert sorted(errors.news()) == [(gpu, 31), (gpu, 79)]
    assert errors.news() == []


def test_what_is_new_and_bad_calls_for_a_test() -> None:
    """Old errors and heat start no GPU self-test."""
    ecc, rows = {"uncorrected_ecc": {"volatile": 3}}, {"remapped_rows": {"failed": True}}
    for before, now, what in (
        ({"uncorrected_ecc": {"volatile": 1}}, ecc, "2 more memory errors"),
        ({"remapped_rows": {"failed": False}}, rows, "could not be remapped"),
        ({}, {"error": "GPU is lost"}, "GPU is lost"),
    ):
        assert what in (facts.breakage(before, now) or "")
        assert facts.breakage(now, now) is None
    assert facts.breakage({}, {"temperature_c": 90}) is None


def test_strangers_at_work_keep_a_kernel_from_being_timed(nvml: Gpus, mine: int) -> None:
    """The policy decides for active foreign processes. They and idle ones are recorded, and the fleet's are ignored."""
    gpu, stranger = nvml.uuids[0], 1
    nvml.say(processes=[[stranger, 3 * GIB], [mine, GIB]], working=[mine])
    for policy in ("wait", "refuse", "label"):
        sharing = look(gpu, policy, wait_s=0.3)
        sharing.before_timing()
        sharing.after_timing()
        assert [(s.pid, s.memory_bytes, s.active) for s in sharing.foreign_processes or ()] == [(1, 3 * GIB, False)]
    nvml.say(working=[mine, stranger])
    for policy in ("wait", "refuse"):
        sharing = look(gpu, policy, wait_s=0.3)
        with pytest.raises(EvaluationEnded) as ended:
            sharing.before_timing()
        assert ended.value.outcome.category is Category.TIMING_UNSTABLE
        assert ended.value.outcome.facts.foreign_processes == sharing.foreign_processes
    sharing = look(gpu, "label")
    sharing.before_timing()
    sharing.after_timing()
    assert [s.active for s in sharing.foreign_processes or ()] == [True]


def test_a_stranger_that_stops_is_waited_for_and_one_that_begins_is_seen(nvml: Gpus) -> None:
    nvml.say(processes=[[1, GIB]], working=[1])
    sharing = look(nvml.uuids[0], "wait")
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(sharing.before_timing)
        until(lambda: sharing.foreign_processes, what="the stranger")
        nvml.say(working=[])
        waiting.result()
    assert [s.active for s in sharing.foreign_processes or ()] == [True]
    nvml.say(working=[1])
    with pytest.raises(EvaluationEnded, match="while the kernel was timed"):
        sharing.after_timing()


def test_where_activity_is_not_told_a_stranger_is_only_told(nvml: Gpus) -> None:
    nvml.say(processes=[[1, GIB]])
    del nvml.state["gpus"][0]["working"]
    nvml.write()
    sharing = look(nvml.uuids[0], "refuse")
    sharing.before_timing()
    assert [s.active for s in sharing.foreign_processes or ()] == [None]
