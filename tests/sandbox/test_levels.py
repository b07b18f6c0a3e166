"""Isolation levels of sets of measures, and a fork server's control groups and refusals."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from kqueue.folders import clean_environment
from workers.judge.forkserver import handle as launch
from workers.judge.sandbox import reach
from workers.judge.sandbox.level import MEASURES, Level, lacking, reached
from workers.judge.slot_config import SlotConfig


def test_a_missing_measure_costs_its_level() -> None:
    measures: dict[str, object] = dict.fromkeys(MEASURES, True)
    assert reached(measures) is Level.FULL
    assert reached({}) is Level.NONE
    assert not lacking({}, Level.NONE)
    for missing, level in (
        ("no_new_privs", Level.NONE),
        ("limits", Level.NONE),
        ("seccomp", Level.BASIC),
        ("files", Level.BASIC),
        ("network_namespace", Level.STRONG),
        ("cgroup_memory", Level.STRONG),
        ("user_namespace", Level.FULL),
        ("own_uid", Level.FULL),
    ):
        without = measures | {missing: "refused: for a reason"}
        assert reached(without) is level
        if level is not Level.FULL:
            told = lacking(without, list(Level)[list(Level).index(level) + 1])[missing]
            assert "for a reason" in told
            assert MEASURES[missing] in told
    neither = measures | {"own_uid": "no", "scopes": "no"}
    assert reached(neither) is Level.BASIC
    assert set(lacking(neither, Level.STRONG)) == {"own_uid", "scopes"}
    assert reached(neither | {"own_uid": True}) is Level.STRONG


def test_a_worker_does_not_start_below_its_level(tmp_path: Path) -> None:
    slot = SlotConfig(name="s", number=0, device="cpu", siblings=1, scratch=tmp_path, lock=tmp_path / "lock", uid=None)
    given = dict.fromkeys(MEASURES, True) | {"seccomp": "refused: by the host", "level": "basic"}

    def forkserver() -> launch.ForkServer:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        process = subprocess.Popen(["cat"], stdin=theirs, stdout=subprocess.DEVNULL)
        process.returncode = 0  # reaped by the handle
        theirs.send(json.dumps(given).encode())
        theirs.close()
        return launch.ForkServer(slot, process.pid, ours)

    allowed = forkserver()
    allowed.wait_ready("basic")
    allowed.stop()
    refused = forkserver()
    with pytest.raises(
        launch.ForkServerError, match=r"KQUEUE_ISOLATION=strong .*only basic.*seccomp .*by the host, remedy: use"
    ):
        refused.wait_ready("strong")
    assert not refused.alive()


_READ_ONLY = """
for place in / /tmp /var/tmp /usr/tmp; do mount -o remount,bind,ro $place 2>/dev/null; done
mount -t tmpfs -o mode=711 kqueue-test "$0" && exec "$@"
"""


def test_nothing_but_the_scratch_directory_need_be_writable(tmp_path: Path) -> None:
    """A worker in a container with a read-only file system needs only a writable temporary directory."""
    if subprocess.run(["unshare", "--mount", "true"], capture_output=True).returncode:
        pytest.skip("nothing can be mounted here")
    there = ["unshare", "--mount", "sh", "-c", _READ_ONLY, str(tmp_path), sys.executable, "-c"]
    look = "from workers.judge.sandbox import reach; print(reach.find('')[1])"
    checkout = str(Path(__file__).parents[2])
    environment = clean_environment(os.environ | {"PYTHONPATH": checkout, "TMPDIR": str(tmp_path)})
    found = subprocess.run([*there, look], env=environment, cwd="/", capture_output=True, text=True)
    assert found.stdout == "True\n", found.stderr
    del environment["TMPDIR"]
    without = subprocess.run([*there, look], env=environment, cwd="/", capture_output=True, text=True)
    assert "No usable temporary directory" in without.stderr


def test_of_a_checkout_only_the_packages_are_in_reach() -> None:
    """A candidate can read ``kqueue`` and ``workers`` of a checkout, but not its history or its tests."""
    checkout = Path(__file__).parents[2]
    readable = {Path(path) for path in reach.find("")[0].readable}
    assert {checkout / "kqueue", checkout / "workers"} <= readable
    assert not readable & {checkout, checkout / "tests", checkout / ".git"}


def test_a_link_to_the_environment_is_in_reach(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter's own paths go through it, and the covers of a group hide all other directories."""
    (link := tmp_path / "venv").symlink_to(sys.prefix)
    monkeypatch.setattr(sys, "prefix", str(link))
    assert str(link) in reach.find("")[0].readable
    monkeypatch.setenv("HOME", sys.base_prefix)
    (home := tmp_path / "home").symlink_to(sys.base_prefix)
    monkeypatch.setattr(sys, "prefix", str(home))
    assert str(home) not in reach.find("")[0].readable
