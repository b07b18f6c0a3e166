"""Linux's reports on ended processes, the cause of a kill for lack of memory, and the owner of a uid."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.judge.rig import Rig
from workers.judge.forkserver import handle
from workers.judge.host import linux, uids
from workers.judge.sandbox import cgroups
from workers.judge.sandbox.cgroups import Group, Groups, Lack

#: Program whose first thread exits while another thread runs on.
_LEADERLESS = """
import ctypes, threading, time
threading.Thread(target=time.sleep, args=(1000,)).start()
print("ready", flush=True)
ctypes.CDLL(None).syscall(60, 0)
"""


@contextmanager
def started(program: str) -> Generator[int]:
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        yield process.pid
        process.kill()


def test_a_process_is_exiting_when_all_of_its_threads_are() -> None:
    with started(_LEADERLESS) as pid:
        while not linux.is_zombie(pid):
            time.sleep(0.01)
        assert not linux.is_exiting(pid)
        os.kill(pid, signal.SIGKILL)
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
        assert linux.is_exiting(pid)
    assert linux.is_exiting(pid)
    assert not linux.is_exiting(os.getpid())


def test_the_lack_of_an_outer_group_is_not_a_group_s_own() -> None:
    """A kill for lack of memory in an outer group is not attributed to the inner group."""
    groups = Groups()
    try:
        if groups.measures["cgroup_memory"] is not True:
            pytest.skip(f"no memory can be bounded here: {groups.measures['cgroup_memory']}")
        outer = groups.group(128 << 20, 64)
        assert outer is not None
        for place in outer._places:
            if place.kind == "v2":
                cgroups._divide(place.directory)
        group = Group(outer._places, "inner", 1 << 30, 64)
        eat = [sys.executable, "-c", "x = b'y' * (256 << 20)"]
        assert subprocess.run(eat, preexec_fn=group.join, check=False).returncode == -9
        assert group.out_of_memory() is Lack.OTHERS
        group.remove()
        outer.remove()
    finally:
        groups.close()


#: First uid above the range of fleets, so that no process has it.
FIRST = 63000


@pytest.mark.skipif(os.geteuid() != 0, reason="only root's fleets have uids to give")
def test_who_has_other_temporary_files_gets_another_uid(tmp_path: Path) -> None:
    """Jobs of a cluster have separate temporary files, and with one uid they would kill each other's candidates."""
    mine = uids.hold(FIRST)
    command = [sys.executable, "-c", f"from workers.judge.host import uids; print(uids.hold({FIRST}).uid)"]
    done = subprocess.run(command, env=os.environ | {"TMPDIR": str(tmp_path)}, capture_output=True, text=True)
    mine.release()
    assert int(done.stdout) > mine.uid, done.stderr


@pytest.mark.skipif(os.geteuid() != 0, reason="only a fleet of root has uids")
def test_a_fork_server_kills_the_processes_of_its_uids() -> None:
    """No process that an earlier user of a slot's uids left is alive when a fork server is ready."""
    with Rig() as rig:
        assert rig.slot.uid is not None
        left = [subprocess.Popen(["sleep", "1000"], user=uid) for uid in uids.all_of(rig.slot.uid)]
        again = handle.start(rig.slot)
        again.wait_ready()
        again.stop()
        assert {process.poll() for process in left} == {-signal.SIGKILL}
