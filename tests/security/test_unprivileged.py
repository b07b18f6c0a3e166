"""A fleet of an ordinary user, which judges, isolates as its level says, and ends without a remainder."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from kqueue.config import FLEET_FILE
from kqueue.local.process import running
from tests.samples import RELU, RELU_KERNEL, stated
from tests.waiting import below
from workers.judge.host import linux
from workers.judge.sandbox import level

#: Uid of a user without an entry in /etc/passwd, as in many containers, and of no other test.
USER = 12321
#: Program that becomes the user and runs a command. If only root can reach the interpreter, it runs in a private view.
BECOME = f"""
import os, sys
from workers.judge.sandbox import seal, view
view.rebuild()
seal.become({USER})
os.execv(sys.executable, [sys.executable, "-P", *sys.argv[1:]])
"""
#: Attempts on the fleet's files, services and processes. `reached()` returns the names of those that succeeded.
REACH = """
import os, socket

def connect(family, address):
    with socket.socket(family) as link:
        link.connect(address)

def reached():
    attempts = {
        "credentials": lambda: open("%(home)s/fleet.json").read(),
        "folder": lambda: os.listdir("%(home)s/logs"),
        "database": lambda: connect(socket.AF_UNIX, "%(home)s/postgres/run/.s.PGSQL.5432"),
        "queue": lambda: connect(socket.AF_UNIX, "%(home)s/valkey/run/valkey.sock"),
        "server": lambda: connect(socket.AF_INET, ("127.0.0.1", %(port)d)),
        "slots": lambda: os.listdir("%(scratch)s"),
        "environment": lambda: open("/proc/%(pid)d/environ").read(),
        "signal": lambda: os.kill(%(pid)d, 0),
        "leftover": lambda: open("%(home)s/left", "w").close(),
    }
    found = []
    for name, attempt in attempts.items():
        try:
            attempt()
            found.append(name)
        except OSError:
            pass
    return found
"""
KERNELS = {
    "right": ("return torch.relu(x)", "passed"),
    "crashing": ("import ctypes; return ctypes.string_at(0)", "crashed"),
    "hanging": ("time.sleep(1000)", "timeout"),
    "hungry": ("held = [b'x' * (1 << 28) for _ in range(64)]; return torch.relu(x)", "host_out_of_memory"),
    "thieving": ("found = reached(); assert not found, found; return torch.relu(x)", "passed"),
}

pytestmark = [
    pytest.mark.nightly,
    pytest.mark.services,
    pytest.mark.timeout(400),
    pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user"),
]


@dataclass
class User:
    home: Path

    def start(self, *words: str) -> subprocess.Popen[str]:
        """Start Python with these arguments as the user, with only its own environment."""
        # Like a PATH that root's login leaves behind, whose folders only root can enter.
        path = os.pathsep.join([f"{self.home}/closed/bin", f"{self.home}/loop", "", "bin", os.environ["PATH"]])
        environment = {"HOME": str(self.home), "PATH": path, "KQUEUE_PROBE_SHARE": "0"}
        environment |= {"KQUEUE_HOME": f"{self.home}/fleet", "KQUEUE_SCRATCH": f"{self.home}/scratch"}
        return subprocess.Popen(
            [sys.executable, "-c", BECOME, *words], env=environment, cwd="/", text=True,
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip

    def run(self, *words: str) -> str:
        """Run Python with these arguments as the user. Return its output."""
        said, _ = self.start(*words).communicate(timeout=200)
        return said

    def processes(self) -> list[str]:
        """Return the names of the user's processes."""
        found = [int(one.name) for one in Path("/proc").glob("[0-9]*") if one.exists() and one.stat().st_uid == USER]
        return [linux.name(pid) for pid in found if running(pid)]


@pytest.fixture
def user() -> Iterator[User]:
    if subprocess.run(["unshare", "--mount", "true"], capture_output=True, check=False).returncode:
        pytest.skip("no view of the interpreter can be made for another user here")
    home = Path(tempfile.mkdtemp(prefix="kqueue-user-"))
    home.chmod(0o711)
    os.chown(home, USER, USER)
    (home / "closed").mkdir(mode=0o700)
    (home / "loop").symlink_to("loop")
    yield User(home)
    shutil.rmtree(home)


def test_a_user_who_is_not_root_runs_a_fleet(user: User) -> None:
    """Each kernel gets its category, none reaches the fleet, the level is what was tried, and nothing is left."""
    up = user.start("-m", "kqueue", "up", "--gpus", "none", "--cpu-slots", "2", "--no-flower", "--http-port", "0")
    try:
        assert up.stdout is not None
        said = ""
        while "Ctrl-C" not in said:
            line = up.stdout.readline()
            said += line
            assert line, said
        children = list(below(up.pid))
        port = int(said.rpartition("http      http://127.0.0.1:")[2].split()[0])
        look = REACH % {"home": user.home / "fleet", "scratch": user.home / "scratch", "pid": up.pid, "port": port}
        # Without a seal, the same user reaches all of it. Its system can allow it separate namespaces.
        apart = "os.execvp('unshare', ['unshare', '-Urnm', '/bin/echo', 'allowed'])"
        unsealed = user.run("-c", f"{look}\nprint('reached', len(reached()), flush=True)\n{apart}")
        assert "reached 9\n" in unsealed
        (user.home / "fleet" / "left").unlink()
        sources = {name: look + RELU_KERNEL.format(body) for name, (body, _) in KERNELS.items()}
        for name, source in {"problem": RELU, **sources}.items():
            (user.home / f"{name}.py").write_text(source)
        words = ["-p", f"{user.home}/problem.py", *(f"{user.home}/{name}.py" for name in KERNELS), "-b", "torch"]
        words += ["--no-timing", "--set", "deadlines.check_s=10", "--set", f"limits.host_memory_bytes={3 << 29}"]
        told = user.run("-m", "kqueue", "submit", *words, "--wait", "--json")
        lines = [json.loads(line) for line in told.splitlines() if line.startswith("{")]
        found = {line["kernel_label"]: line["verdict"]["category"] for line in lines}
        assert found == {name: category for name, (_, category) in KERNELS.items()}, told
        verdict = stated(user.run("-m", "kqueue", "receipt", lines[0]["id"]))["verdict"]
        assert verdict["category"] == "passed"
        isolation = verdict["evidence"]["isolation"]
        assert isolation["own_uid"] == "the fleet is not root"
        assert isolation["level"] == level.reached(isolation)
        doctor = user.run("-m", "kqueue", "doctor")
        assert isolation["level"] in doctor.partition("isolation")[2].splitlines()[0]
        assert f"PATH {user.home}/closed/bin (Permission denied)" in doctor, doctor
        assert (isolation["network_namespace"] is True) is ("allowed" in unsealed), unsealed
    finally:
        up.send_signal(signal.SIGINT)
        last, _ = up.communicate(timeout=90)
    assert up.returncode == 0, last
    assert not any(map(running, children))
    assert user.processes() == []
    assert not (user.home / "fleet" / FLEET_FILE).exists()
    assert [path for path in (user.home / "scratch").rglob("*") if "slot" in path.name] == []
    assert not (user.home / "fleet" / "left").exists()
