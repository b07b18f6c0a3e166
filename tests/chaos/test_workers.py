"""Workers, supervisors and machines that die, and clocks that jump: each evaluation still gets one verdict."""

from __future__ import annotations

import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from kqueue.local import servers as embedded
from kqueue.local.servers import Postgres, Valkey
from tests.chaos.rig import Whole, kill_tree, worker_of
from tests.fleet.told import Services, fleets
from tests.services import with_schema
from workers.judge.host import linux
from workers.judge.sandbox import cgroups

#: Shifts the realtime clock of a process by this many seconds from the kernel's.
SHIM = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>
static long jump(void) {
    static volatile long *seconds;
    if (!seconds) {
        int file = open(getenv("CLOCK_JUMP"), O_RDONLY);
        void *page = mmap(0, 8, PROT_READ, MAP_SHARED, file, 0);
        close(file);
        if (page == MAP_FAILED) return 0;
        seconds = page;
    }
    return *seconds;
}
int clock_gettime(clockid_t clock, struct timespec *out) {
    int result = syscall(SYS_clock_gettime, clock, out);
    if (result == 0 && clock == CLOCK_REALTIME) out->tv_sec += jump();
    return result;
}
int gettimeofday(struct timeval *out, void *zone) {
    int result = syscall(SYS_gettimeofday, out, zone);
    if (result == 0) out->tv_sec += jump();
    return result;
}
"""


class Clock:
    """The realtime clock of a fleet's workers, or of a server, which can jump."""

    def __init__(self, place: Path) -> None:
        if shutil.which("gcc") is None:
            pytest.skip("no compiler for the clock that jumps")
        self._file = place / "jump"
        self.jump(0)
        (place / "shim.c").write_text(SHIM)
        subprocess.run(
            ["gcc", "-shared", "-fPIC", "-O1", "-o", place / "shim.so", place / "shim.c", "-ldl"], check=True
        )
        self.variables = {"LD_PRELOAD": f"{place}/shim.so", "CLOCK_JUMP": str(self._file)}
        self.python = place / "python"
        # Workers start with few environment variables.
        variables = shlex.join(["env", *(f"{name}={value}" for name, value in self.variables.items())])
        self.python.write_text(f'#!/bin/sh\nexec {variables} {sys.executable} "$@"\n')
        self.python.chmod(0o755)

    def jump(self, seconds: int) -> None:
        """Set the offset from the true time in seconds, also for running processes."""
        descriptor = os.open(self._file, os.O_WRONLY | os.O_CREAT)
        os.write(descriptor, seconds.to_bytes(8, "little", signed=True))
        os.close(descriptor)


def test_a_worker_told_to_end_finishes_first(services: Any, fleet: Any, whole: Any) -> None:
    """After SIGTERM to a worker's parent the evaluation ends normally, and another worker takes the slot."""
    running = services.submit("sleep 1")
    attempt = services.started(running)
    os.kill(worker_of(fleet, attempt), signal.SIGTERM)
    [only] = whole(running, attempts=1)
    assert (only.written_by, only.worker_id) == ("judge", attempt.worker_id)
    assert fleet.live()[0].id != attempt.worker_id


def test_a_worker_told_to_quit_hands_its_evaluation_back(services: Any, fleet: Any, whole: Any) -> None:
    """After SIGQUIT to a worker's parent the next worker judges its evaluation, and no attempt is used up."""
    running = services.submit("sleep-once", attempts=1)
    os.kill(worker_of(fleet, services.started(running)), signal.SIGQUIT)
    first, second = whole(running)
    assert (first.category, first.written_by, first.handed_back) == ("worker_lost", "worker", True)
    assert (second.category, second.handed_back) == ("passed", False)
    assert first.worker_id != second.worker_id


def test_a_worker_told_to_quit_before_it_knows_that_its_child_has_begun(services: Any, fleet: Any, whole: Any) -> None:
    """SIGQUIT does not wait for a child whose start the worker has not yet read."""
    whole(services.submit("ok"))
    time.sleep(1)  # another child is forked and reports its start
    worker = fleet.live()[0].pid
    children = linux.children(worker)
    for child in children:
        os.kill(child, signal.SIGSTOP)
    running = services.submit("sleep-once", attempts=1)
    services.until(lambda: str(running) in fleet.log.read_text(), what="the message")
    time.sleep(0.5)  # the task is handed out
    os.kill(worker, signal.SIGSTOP)
    for child in children:
        os.kill(child, signal.SIGCONT)
    services.started(running)
    os.kill(worker, signal.SIGQUIT)
    os.kill(worker, signal.SIGCONT)
    first, second = whole(running)
    assert (first.category, first.written_by, first.handed_back) == ("worker_lost", "worker", True)
    assert (second.category, second.handed_back) == ("passed", False)


def test_a_worker_told_to_quit_while_it_writes_a_task(services: Any, fleet: Any, whole: Any) -> None:
    """SIGQUIT does not wait for a child that has got a part of its task."""
    worker = fleet.live()[0].id
    (services.directory / "quit-while-writing").touch()
    [only] = whole(services.submit("ok"), attempts=1)
    assert only.worker_id != worker


def test_a_judge_killed_for_want_of_memory(services: Any, fleet: Any, whole: Any) -> None:
    """A judge killed by the kernel's out-of-memory killer is blamed on the host."""
    groups = cgroups.Groups()
    memory = groups.measures["cgroup_memory"]
    groups.close()
    if memory is not True:
        pytest.skip(f"no memory can be bounded here: {memory}")
    [attempt] = whole(services.submit("hog"), category="worker_lost", attempts=1)
    assert attempt.outcome["facts"] == {"signal": "SIGKILL", "out_of_memory": True}


@pytest.mark.services
@pytest.mark.nightly
def test_the_databases_clock_may_jump(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Leases that expire early cost a try, nothing waits until the clock has caught up, and one verdict stands."""
    tmp_path.chmod(0o755)
    clock, environment = Clock(tmp_path), embedded.clean_environment()
    monkeypatch.setattr(embedded, "clean_environment", lambda: environment | clock.variables)
    postgres = Postgres(with_schema(tmp_path / "pg"), durable=False)
    with postgres, Valkey(tmp_path / "valkey") as valkey:
        services = Services(postgres, valkey, tmp_path)
        with fleets(services) as start:
            fleet = start(retry_delay_s=2)
            for seconds in (3600, 0):
                retried = services.submit("unhealthy-once", attempts=3)
                services.until(lambda one=retried: services.attempts(one), what="its first try")
                running, waiting = services.submit("sleep 3", attempts=3), services.submit("ok", attempts=3)
                services.started(running)
                before = services.rows("SELECT now() AS at")[0].at
                clock.jump(seconds)
                assert abs((services.rows("SELECT now() AS at")[0].at - before).total_seconds()) > 3000
                attempts = [a for a in Whole(services)(running, waiting, retried) if a.category != "passed"]
                ended = {(a.category, a.written_by) for a in attempts}
                assert ended <= {("gpu_unhealthy", "judge"), ("worker_lost", "sweeper")}
            assert fleet.process.poll() is None
        services.engine.dispose()
        services.app.close()


def test_a_machine_that_is_gone_is_taken_over(services: Any, start_fleet: Any, fleet: Any, whole: Any) -> None:
    """If all processes of a host die at once, another host's sweeper ends the lease and its workers judge."""
    running, waiting = services.submit("sleep-once", attempts=3), services.submit("ok", attempts=3)
    services.started(running)
    second = start_fleet()
    kill_tree(fleet.process.pid)
    fleet.process.wait()
    lost, passed, *_ = whole(running, waiting)
    assert (lost.category, lost.written_by, passed.category) == ("worker_lost", "sweeper", "passed")
    assert passed.worker_id in {worker.id for worker in second.live()}


@pytest.mark.nightly
def test_a_hosts_clock_may_jump(services: Any, start_fleet: Any, whole: Any, tmp_path: Path) -> None:
    """Nothing is lost or judged twice, because leases use the database's clock and deadlines a monotonic one."""
    clock = Clock(tmp_path)
    fleet = start_fleet(variables={"JUDGES_PYTHON": str(clock.python)})
    worker = fleet.live()[0]
    assert "shim.so" in Path(f"/proc/{worker.pid}/maps").read_text()
    try:
        for seconds in (8 * 3600, -3600):  # past the visibility timeout, and backward
            running, waiting = services.submit("sleep 2", attempts=3), services.submit("ok", attempts=3)
            services.started(running)
            clock.jump(seconds)
            whole(running, waiting, attempts=1)
    finally:
        clock.jump(0)
    assert [w.id for w in fleet.live()] == [worker.id]
