"""What /proc says of processes that end, and what becomes of memory that they free."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Generator
from contextlib import contextmanager

from workers.judge.host import linux

#: Its first thread ends, as every program's may; another one goes on.
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
