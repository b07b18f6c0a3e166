"""Forked children have a new program's state and nothing of their owner's."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from kqueue.local.process import running
from tests.waiting import until

#: Program of an owner with a handler, a descriptor and a changed setting. The fork's function is formatted in.
OWNER = """
import json, os, signal, sys, time
from pathlib import Path
from kqueue.local.process import Child
def told():
    print(json.dumps({{
        "session": os.getsid(0) == os.getpid(),
        "descriptors": [os.path.exists(f"/proc/self/fd/{{number}}") for number in range(64)].count(True),
        "input": os.readlink("/proc/self/fd/0"),
        "environment": dict(os.environ),
        "handlers": [str(signal.getsignal(number)) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)],
        "blocked": len(signal.pthread_sigmask(signal.SIG_BLOCK, ())),
        "words": Path("/proc/self/cmdline").read_text().rstrip(chr(0)).split(chr(0)),
    }}))
    return 0
def fail():
    raise ValueError("what went wrong")
def wait():
    time.sleep(600)
os.environ["SECRET"] = "owner's"
os.pipe()
os.set_inheritable(os.dup(1), True)
signal.signal(signal.SIGTERM, lambda *_: None)
signal.signal(signal.SIGHUP, signal.SIG_IGN)
sys.stdout.write("not yet written")
child = Child(["/usr/bin/python", "-P", "-m", "part"], log=Path("log"), environment={{"ONE": "1"}}, run={run})
{then}
"""


def owner(folder: Path, run: str, then: str) -> str:
    """Run an owner and return its output."""
    code = OWNER.format(run=run, then=then)
    return subprocess.run([sys.executable, "-c", code], cwd=folder, capture_output=True, text=True, check=True).stdout


def test_a_fork_has_what_a_new_program_would_have(tmp_path: Path) -> None:
    """It has a session, an environment and default signals, and no descriptor, handler or output of its owner."""
    assert owner(tmp_path, "told", "print(child.wait(30), child.status)") == "not yet writtenTrue 0\n"
    assert json.loads((tmp_path / "log").read_text()) == {
        "session": True,
        "descriptors": 3,
        "input": "/dev/null",
        "environment": {"ONE": "1"},
        "handlers": [str(signal.default_int_handler), str(signal.SIG_DFL), str(signal.SIG_IGN)],
        "blocked": 0,
        "words": ["python", "-P", "-m", "part"],
    }


@pytest.mark.parametrize(
    ("run", "then", "status", "said"),
    [
        ("lambda: 3", "", 3, ""),
        ("lambda: 'a reason'", "", 1, "a reason\n"),
        ("fail", "", 1, "ValueError: what went wrong\n"),
        ("wait", "child.send(signal.SIGTERM)", -signal.SIGTERM, ""),
    ],
    ids=["status", "reason", "exception", "signal"],
)
def test_it_is_known_how_a_fork_ended(tmp_path: Path, run: str, then: str, status: int, said: str) -> None:
    """The exit status equals a program's, and the error text is in the log."""
    assert owner(tmp_path, run, f"{then}\nprint(child.wait(30), child.status)").endswith(f"True {status}\n")
    log = (tmp_path / "log").read_text()
    assert log.endswith(said) if said else not log


def test_a_fork_ends_with_its_owner(tmp_path: Path) -> None:
    pid = int(owner(tmp_path, "wait", "print('', child.pid, flush=True); os._exit(0)").split()[-1])
    until(lambda: not running(pid))


def test_what_forks_share_starts_no_thread_and_opens_nothing() -> None:
    """A lock of another thread would stay held in a fork, so the shared modules start none. They do not load torch."""
    code = (
        "import os, sys; from kqueue.local import parts; import kqueue.cli\n"
        "parts.load_modules([*parts.Workers.modules, *parts.Flower.modules, *parts.Http.modules])\n"
        "print(len(os.listdir('/proc/self/task')), sorted(map(int, os.listdir('/proc/self/fd')))[:4],"
        " {'torch', 'numpy'} & {*sys.modules})"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "1 [0, 1, 2, 3] set()\n"  # descriptor 3 belongs to the listing
