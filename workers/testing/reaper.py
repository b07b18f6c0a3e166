"""``python -m workers.testing.reaper``: run a program, and end it with all that it started.

It is a subreaper: processes that the program leaves behind become its children, even from other sessions, and are
killed when the program has ended. It ends with its own parent. Its last message on the given descriptor is a line of
JSON, ``{"at": "gone", "status": ..., "stuck": ...}``. ``status`` is the program's exit status, negative for a signal,
and ``stuck`` is true if a process could not be killed.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from typing import Final

from workers.judge.host import linux

#: Signals to the reaper: end the program like Ctrl-C, so that its fixtures are torn down, or abort it, so that it
#: prints its stacks.
END: Final = signal.SIGTERM
ABORT: Final = signal.SIGUSR1
#: Seconds for the program to end after such a signal, and for killed processes to die.
GRACE_S: Final = 30.0
KILLED_S: Final = 10.0
_HEEDED: Final = frozenset({signal.SIGCHLD, END, ABORT})


def main(parent: int, said: int, program: list[str]) -> None:
    """Run a program, which inherits the descriptor ``said``, to its end or the end of the process ``parent``."""
    linux.prctl(linux.PR_SET_CHILD_SUBREAPER, 1)
    signal.pthread_sigmask(signal.SIG_BLOCK, _HEEDED)
    linux.prctl(linux.PR_SET_PDEATHSIG, END)
    if os.getppid() != parent:
        return
    die_with_reaper = linux.die_with(os.getpid())

    def in_child() -> None:
        die_with_reaper()
        # A shell starts background jobs with SIGINT ignored, which the tests would inherit.
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_SETMASK, ())

    child = subprocess.Popen(program, start_new_session=True, pass_fds=(said,), preexec_fn=in_child)
    ended = _wait(child)
    deadline = time.monotonic() + KILLED_S
    while not linux.sweep(set()) and time.monotonic() < deadline:
        time.sleep(0.01)
    message = {"at": "gone", "status": child.returncode if ended else None, "stuck": bool(linux.children(os.getpid()))}
    with contextlib.suppress(OSError):  # the reader is gone
        # The program can have died within a line.
        os.write(said, b"\n" + json.dumps(message).encode() + b"\n")


def _wait(child: subprocess.Popen[bytes]) -> bool:
    """Wait for the program's end. Return False if it does not die."""
    kill_at = give_up_at = float("inf")
    while child.poll() is None:
        now = time.monotonic()
        if now >= give_up_at:
            return False
        if now >= kill_at:
            child.kill()
            kill_at, give_up_at = float("inf"), now + KILLED_S
        heard = signal.sigtimedwait(_HEEDED, 0.5)
        if heard is not None and heard.si_signo in (END, ABORT) and give_up_at == float("inf"):
            child.send_signal(signal.SIGINT if heard.si_signo == END else signal.SIGABRT)
            kill_at = min(kill_at, time.monotonic() + GRACE_S)
    return True


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3:])
