"""Slots, lanes and environments from settings and GPUs, and outcomes from deaths. No process is started."""

from __future__ import annotations

import selectors
import signal
import subprocess
import sys
import time
import uuid
from pathlib import Path
from typing import Any

import pytest
from celery.exceptions import Terminated, TimeLimitExceeded

from kqueue.broker import check_lane
from kqueue.config import Config, load
from kqueue.contract import Phase, gpu_model
from kqueue.errors import ConfigError
from workers.delivery import outcome_of
from workers.judge.gpu.devices import Device, choose, devices
from workers.judge.host.status_page import Record, StatusPage
from workers.plan import environment, plan
from workers.pool import ChildDied
from workers.process import WorkerProcess

GPUS = [Device(0, "GPU-aaaa-1", "NVIDIA H200", 150 << 30), Device(1, "GPU-bbbb-2", "NVIDIA A100-SXM4-80GB", 80 << 30)]


@pytest.fixture
def config(tmp_path: Path) -> Config:
    return load(
        home=tmp_path,
        scratch=tmp_path / "scratch",
        database_url="postgresql+psycopg://u:secret-d@h/d",
        redis_url="redis://:secret-r@h:6379/0",
        slots_per_gpu=3,
    )


def test_a_gpu_name_becomes_a_lane() -> None:
    """Vendors' current names give short, valid lanes."""
    names = {"h100": "NVIDIA H100 80GB HBM3", "a100": "NVIDIA A100-SXM4-80GB", "v100": "Tesla V100-SXM2-16GB"}
    for lane, name in (names | {"titan-v": "NVIDIA TITAN V", "rtx6000": "NVIDIA RTX 6000 Ada Generation"}).items():
        assert gpu_model(name) == lane
        check_lane(f"gpu.{lane}")


def test_gpus_are_chosen_by_index_and_uuid() -> None:
    """GPUs are chosen by `all`, `none`, indices and UUIDs, and `all` respects CUDA_VISIBLE_DEVICES."""
    assert choose("all", GPUS) == GPUS
    assert choose("none", GPUS) == []
    assert choose("1", GPUS) == GPUS[1:]
    assert choose("GPU-bbbb-2, 0", GPUS) == [GPUS[1], GPUS[0]]
    assert choose("1,1", GPUS) == GPUS[1:]
    assert choose("all", GPUS, "GPU-aaaa-1") == GPUS[:1]
    assert choose("all", GPUS, "") == []
    assert choose("all", []) == []
    for missing in ("7", "GPU-nope", "0,7", "h200", ","):
        with pytest.raises(ConfigError, match="NVIDIA H200"):  # the error lists the GPUs
            choose(missing, GPUS)


def test_slots_of_gpus(config: Config) -> None:
    """A GPU's slots share a lock, and a CPU slot exists only on request."""
    slots = plan(config, GPUS, 8)
    assert [s.name for s in slots] == ["gpu0-0", "gpu0-1", "gpu0-2", "gpu1-0", "gpu1-1", "gpu1-2"]
    assert slots[0].lanes == ("gpu", "gpu.h200")
    assert slots[3].lanes == ("gpu", "gpu.a100")
    assert {s.lock for s in slots[:3]} == {slots[0].lock} != {s.lock for s in slots[3:]}
    assert len({s.number for s in slots}) == len({s.scratch for s in slots}) == 6


def test_slots_of_a_host_without_gpus(config: Config) -> None:
    """There is one CPU slot per core, at most eight, and a host without any slot is an error."""
    assert len(plan(config, [], 2)) == 2
    assert len(plan(config, [], 64)) == 8
    assert [s.lanes for s in plan(config.model_copy(update={"cpu_slots": 1}), GPUS[:1], 4)][-1] == ("cpu",)
    with pytest.raises(ConfigError, match="KQUEUE_CPU_SLOTS"):
        plan(config.model_copy(update={"cpu_slots": 0}), [], 4)


def test_a_worker_sees_its_gpu_only(config: Config) -> None:
    """A GPU worker is pinned by UUID before any import. A CPU worker sees no GPU and interprets Triton."""
    gpu, *_, cpu = plan(config.model_copy(update={"cpu_slots": 2}), GPUS[:1], 8)
    on_gpu = environment(gpu, config, 8, {"TRITON_INTERPRET": "1", "OTEL_EXPORTER_OTLP_HEADERS": "key=secret"})
    assert on_gpu["CUDA_VISIBLE_DEVICES"] == "GPU-aaaa-1"
    assert "TRITON_INTERPRET" not in on_gpu
    assert not [name for name in on_gpu if name.startswith("OTEL_")]
    on_cpu = environment(cpu, config, 8, {})
    assert (on_cpu["CUDA_VISIBLE_DEVICES"], on_cpu["TRITON_INTERPRET"], on_cpu["OMP_NUM_THREADS"]) == ("", "1", "4")
    assert on_gpu["PYTORCH_NVML_BASED_CUDA_CHECK"] == "1"
    assert on_gpu["KQUEUE_DATABASE_URL"].endswith("u:secret-d@h/d")
    assert "secret" not in on_gpu["KQUEUE_SLOT"]
    servers = {"KQUEUE_OIDC_CLIENT_SECRET": "secret-o", "KQUEUE_CALLBACK_SECRET": "secret-c"}
    assert not {"secret-o", "secret-c"} & set(environment(cpu, config, 8, servers).values())


def test_no_message_has_a_secret() -> None:
    """A setting that is too short is not repeated."""
    with pytest.raises(ConfigError, match="CALLBACK_SECRET") as refused:
        load(callback_secret="hunter2")
    assert "hunter2" not in str(refused.value)


@pytest.mark.services
@pytest.mark.skipif(bool(devices()), reason="needs a host without GPUs")
def test_the_supervisor_refuses_what_cannot_be(config: Config) -> None:
    """A GPU on a host without one gives a line that names the setting, and exit status 3."""
    done = subprocess.run(
        [sys.executable, "-m", "workers.fleet"],
        env={"PATH": "/usr/bin:/bin"} | config.environment() | {"KQUEUE_GPUS": "0"},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 3
    assert "KQUEUE_GPUS" in done.stderr
    assert "Traceback" not in done.stderr
    assert "secret" not in done.stderr


def _record(phase: Phase | None, overdue: bool = False) -> Record:
    return Record(uuid.UUID(int=1), 1, phase, overdue)


#: Celery's error, the status page, whether memory was short, and the category.
ROWS: list[tuple[Any, Record, bool, str]] = [
    (ChildDied(-signal.SIGKILL), _record(Phase.CHECK), True, "worker_lost"),
    (ChildDied(-signal.SIGKILL), _record(None), False, "worker_lost"),
    (ChildDied(-signal.SIGTERM), _record(Phase.CHECK), False, "worker_lost"),
    (ChildDied(-signal.SIGALRM), _record(Phase.REFERENCE, True), False, "judge_error"),
    (ChildDied(-signal.SIGALRM), _record(Phase.CHECK, True), False, "judge_error"),
    (ChildDied(-signal.SIGABRT), _record(Phase.TIME), False, "judge_error"),
    (TimeLimitExceeded(5), _record(Phase.REFERENCE, True), False, "judge_error"),
    (TimeLimitExceeded(5), _record(Phase.CHECK, True), False, "judge_error"),
    (TimeLimitExceeded(5), _record(Phase.SELF_TEST, True), False, "gpu_unhealthy"),
    (ChildDied(-signal.SIGSEGV), _record(Phase.SELF_TEST), False, "gpu_unhealthy"),
    (ChildDied(-signal.SIGKILL), _record(Phase.SELF_TEST), False, "worker_lost"),
    (Terminated(-9), _record(Phase.CHECK), False, "cancelled"),
    (SystemExit(3), _record(Phase.REFERENCE), False, "judge_error"),
    (SystemExit("bye"), _record(Phase.CHECK), False, "judge_error"),
    (OSError("the database was away"), _record(Phase.CHECK), False, "worker_lost"),
]


def test_rows_that_no_test_can_bring_about() -> None:
    """An external signal ends an attempt as a lost worker, another end as the judge's or the GPU's error."""
    for error, record, oom, category in ROWS:
        outcome = outcome_of(error, record, out_of_memory=oom)
        assert outcome.category == category, error
        assert outcome.phase == record.phase
        assert outcome.message


def test_a_worker_that_ended_because_of_failures_is_soon_replaced(config: Config) -> None:
    """After other early ends the pause before the next start doubles."""
    [slot] = plan(load(gpus="none", cpu_slots=1, scratch=config.scratch), [], 2)
    worker = WorkerProcess(slot, selectors.DefaultSelector())
    pauses: dict[int, list[int]] = {}
    for failures in (0, 10):
        for _ in range(4):
            worker._started_at, worker.status_page = time.monotonic(), StatusPage()
            worker.status_page.failures[0] = failures
            worker.close()
            pauses.setdefault(failures, []).append(round(worker.start_at - time.monotonic()))
    assert pauses == {0: [1, 2, 4, 8], 10: [1, 1, 1, 1]}
