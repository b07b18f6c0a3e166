"""``python -m workers.testing.reaper``: run a program, and end it with all that it started.

It is a subreaper: what the program leaves behind becomes its child, even from a session of its own, and is killed when
the program has ended. It ends with whoever started it. Its last word on the descriptor that it is given is one line of
JSON, ``{"at": "gone", "status": ..., "stuck": ...}``: the program's exit status, negative for a signal; and whether
something could not be killed.
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

#: Tell the program to end as at Ctrl-C, so that its fixtures are torn down; abort it, so that it shows where it is.
END: Final = signal.SIGTERM
ABORT: Final = signal.SIGUSR1
#: Seconds that the program may take to end when it is told to, and that killed processes may take to die.
GRACE_S: Final = 30.0
KILLED_S: Final = 10.0
_HEEDED: Final = frozenset({signal.SIGCHLD, END, ABORT})


def main(parent: int, said: int, program: list[str]) -> None:
    """Run a program to its end.

    Args:
        parent: the process that this one ends with.
        said: a descriptor, which the program inherits.
        program: its words.
    """
    linux.prctl(linux.PR_SET_CHILD_SUBREAPER, 1)
    signal.pthread_sigmask(signal.SIG_BLOCK, _HEEDED)
    linux.prctl(linux.PR_SET_PDEATHSIG, END)
    if os.getppid() != parent:
        return
    die_with_reaper = linux.die_with(os.getpid())

    def in_child() -> None:
        die_with_reaper()
        # A shell's background job ignores it, and so would the tests.
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_SETMASK, ())

    child = subprocess.Popen(program, start_new_session=True, pass_fds=(said,), preexec_fn=in_child)
    ended = _wait(child)
    deadline = time.monotonic() + KILLED_S
    while not linux.sweep(set()) and time.monotonic() < deadline:
        time.sleep(0.01)
    word = {"at": "gone", "status": child.returncode if ended else None, "stuck": bool(linux.children(os.getpid()))}
    with contextlib.suppress(OSError):  # nobody listens any more
        # The program may have died within a line.
        os.write(said, b"\n" + json.dumps(word).encode() + b"\n")


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
