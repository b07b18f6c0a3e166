"""Each measure of the seal, attacked from a process that is really sealed.

Attacks that an unsealed process of the same user can make are tried there too, because other failures prove nothing.
"""

from __future__ import annotations

import contextlib
import importlib.util
import itertools
import os
import platform
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.sandbox.fleets import Fleet, greet
from tests.waiting import until
from workers.judge.sandbox import cgroups
from workers.judge.sandbox.level import MEASURES, reached

pytestmark = pytest.mark.slow("attacks the seal in many processes")

#: Errors of Landlock or of a file's permissions, and of the filter.
REFUSED = ("EACCES", "EPERM")


def refused(answer: dict[str, Any]) -> bool:
    return answer.get("errno") in REFUSED


@pytest.fixture(scope="module")
def outside() -> Iterator[Path]:
    """A directory that every user can read and write, with a file that every user can read."""
    place = Path(tempfile.mkdtemp(prefix="kqueue-outside-"))
    place.chmod(0o777)
    (place / "secret").write_text("secret")
    (place / "secret").chmod(0o644)
    yield place
    shutil.rmtree(place)


@pytest.fixture(scope="module")
def server(outside: Path) -> Iterator[tuple[str, str, str]]:
    """Servers that greet on a path and on an abstract name, and a path that receives datagrams."""
    path, name, box = str(outside / "socket"), f"@kqueue-test-{os.getpid()}", str(outside / "box")
    with contextlib.ExitStack() as stack:
        for address in (path, "\0" + name[1:]):
            listener = stack.enter_context(socket.socket(socket.AF_UNIX))
            listener.bind(address)
            greet(listener, b"hello")
        stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)).bind(box)
        for made in (path, box):
            Path(made).chmod(0o777)
        yield path, name, box


def test_each_measure_is_named_once_and_reported(fleet: Fleet) -> None:
    assert set(MEASURES) <= set(fleet.isolation)
    assert all(value is True or isinstance(value, str) for name, value in fleet.isolation.items() if name in MEASURES)
    assert fleet.isolation["level"] == reached(fleet.isolation)


# Files -----------------------------------------------------------------------------------------------


def out_of_reach(fleet: Fleet, answer: dict[str, Any]) -> bool:
    """Return whether the kernel refused or the process's own directories have no such file."""
    return refused(answer) or (fleet.isolation["mounts"] is True and answer.get("errno") == "ENOENT")


def test_files_out_of_reach_are_not_read(fleet: Fleet, outside: Path) -> None:
    fleet.require("files")
    secret = str(outside / "secret")
    assert fleet.do("read", secret, sealed=False)["value"] == "secret"
    assert out_of_reach(fleet, fleet.do("read", secret))
    assert out_of_reach(fleet, fleet.do("read_by_symlink", secret))
    assert "value" not in fleet.do("link_in", secret)
    for path in ("/", "/var", "/root", "/home", str(Path(__file__).parent)):
        assert out_of_reach(fleet, fleet.do("listing", path)), path
    for path in ("/tmp", "/dev/shm"):
        answer = fleet.do("listing", path)
        assert refused(answer) if fleet.isolation["mounts"] is not True else outside.name not in answer["value"], path
    assert fleet.do("listing", "/usr")["value"]


def test_nothing_is_written_outside(fleet: Fleet, outside: Path) -> None:
    fleet.require("files")
    for place in (Path("/tmp"), Path("/dev/shm"), Path("/var/tmp"), outside):
        path = place / f"kqueue-left-{os.getpid()}"
        try:
            if not place.is_dir() or "errno" in fleet.do("write", str(path), sealed=False):
                assert place != outside
                continue
            path.unlink()
            answer = fleet.do("write", str(path))
            if place == outside or fleet.isolation["mounts"] is not True:
                assert out_of_reach(fleet, answer)
            else:
                assert "errno" not in answer
                assert path.name not in fleet.do("listing", str(place))["value"]
            assert not path.exists()
        finally:
            path.unlink(missing_ok=True)


def test_files_are_bounded_by_the_mount(ordinary_fleet: Fleet) -> None:
    ordinary_fleet.require("mounts")
    for do, place in (("hoard", "."), ("hoard", "/dev/shm"), ("litter", "/tmp")):
        assert ordinary_fleet.do(do, place, files=16 << 20)["errno"] == "ENOSPC"


def test_what_it_runs_on_cannot_be_changed(fleet: Fleet) -> None:
    fleet.require("files")
    torch = importlib.util.find_spec("torch")  # without an import, which takes seconds
    for path in (torch.origin, "/usr/bin/env", "/etc/passwd", "/proc/sys/kernel/core_pattern"):
        assert refused(fleet.do("write", path)), path


def test_other_processes_are_out_of_sight(fleet: Fleet) -> None:
    fleet.require("files")
    for name in ("cmdline", "status", "stat", "environ", "maps"):
        assert refused(fleet.do("read", f"/proc/{os.getpid()}/{name}")), name
    assert "value" in fleet.do("read", f"/proc/{os.getpid()}/cmdline", sealed=False)
    assert refused(fleet.do("listing", "/proc"))
    assert fleet.do("status")["value"]["Name"]


def test_what_the_host_does_is_out_of_sight(fleet: Fleet) -> None:
    """Files about the host's hardware are readable, and files about the host's activity are not."""
    fleet.require("files")
    for name in ("meminfo", "stat", "loadavg", "uptime", "vmstat", "sys/fs/file-nr"):
        assert "value" in fleet.do("read", f"/proc/{name}", sealed=False), name
        assert refused(fleet.do("read", f"/proc/{name}")), name
    assert refused(fleet.do("listing", "/sys/devices/system/node"))
    for path in ("/proc/cpuinfo", "/sys/devices/system/cpu/online", "/proc/sys/vm/overcommit_memory"):
        assert "value" in fleet.do("read", path), path


def test_its_own_memory_can_be_shown(fleet: Fleet) -> None:
    """The judge reads outputs through this memory, whatever the fleet's user."""
    assert fleet.do("own_memory")["value"] == "mine"


def test_devices_are_out_of_reach(fleet: Fleet) -> None:
    fleet.require("files")
    allowed = {"null", "zero", "full", "random", "urandom"}
    devices = (node for node in Path("/dev").iterdir() if node.is_char_device() or node.is_block_device())
    answers = fleet.do("order_devices", [str(node) for node in devices if node.name not in allowed])["value"]
    assert answers
    assert set(answers.values()) <= {*REFUSED, "ENXIO", "ENODEV"}, answers
    assert refused(fleet.do("make_device"))


def test_devices_take_no_orders(fleet: Fleet) -> None:
    fleet.require("devices")
    assert fleet.do("order_device", "/dev/zero", sealed=False)["errno"] == "ENOTTY"
    assert fleet.do("order_device", "/dev/zero")["errno"] == "EACCES"


# Sockets ---------------------------------------------------------------------------------------------


def test_no_socket_can_be_made(ordinary_fleet: Fleet) -> None:
    """One kind of socket is allowed, because CUDA starts with it, and it can only listen."""
    ordinary_fleet.require("seccomp")
    families, kinds = ("UNIX", "INET", "INET6", "NETLINK", "PACKET", "VSOCK", "ALG"), ("STREAM", "DGRAM", "RAW")
    made = {
        (family, kind)
        for family, kind in itertools.product(families, kinds)
        if ordinary_fleet.do("make_socket", getattr(socket, f"AF_{family}"), getattr(socket, f"SOCK_{kind}")).get(
            "errno"
        )
        != "EPERM"
    }
    assert made == {("UNIX", "STREAM")}
    assert "errno" not in ordinary_fleet.do("make_socket", socket.AF_INET, socket.SOCK_STREAM, sealed=False)


def test_nobody_is_reached_by_a_path_or_a_name(fleet: Fleet, server: tuple[str, str, str]) -> None:
    fleet.require("seccomp")
    path, name, box = server
    assert fleet.do("connect", path, sealed=False)["value"] == "hello"
    assert refused(fleet.do("connect", path))
    assert refused(fleet.do("connect", name))
    assert "errno" not in fleet.do("datagrams_by_a_pair", box, sealed=False)
    assert refused(fleet.do("datagrams_by_a_pair", box))
    assert refused(fleet.do("send_to", box))


def test_the_network_has_no_interface_but_a_dead_loopback(fleet: Fleet) -> None:
    fleet.require("network_namespace")
    assert fleet.do("interfaces")["value"] == ["lo"]


# Other processes -------------------------------------------------------------------------------------


@pytest.mark.parametrize("whom", ["SIBLING", "FORKSERVER"])
def test_others_are_not_touched(fleet: Fleet, whom: str) -> None:
    """A sealed process cannot attack another one of the same user, such as the judge of an ordinary user's fleet."""
    fleet.require("seccomp", "files", "scopes")
    for attack in ("attach", "read_memory", "open_memory", "take_descriptor", "kill", "queue_signal"):
        if fleet.name == "root" or whom == "FORKSERVER" or "errno" not in fleet.do(attack, whom, sealed=False):
            assert refused(fleet.do(attack, whom)), attack


def test_others_are_not_slowed_down(ordinary_fleet: Fleet) -> None:
    ordinary_fleet.require("seccomp")
    for how in ("nice", "nice of the user", "affinity", "idle", "limit", "io"):
        assert "errno" not in ordinary_fleet.do(how, "SIBLING", sealed=False), how
        assert ordinary_fleet.do(how, "SIBLING")["errno"] == "EPERM", how


# System calls ----------------------------------------------------------------------------------------

#: Calls with their arguments. Some are dangerous without a seal.
CALLS: list[tuple[str, list[Any]]] = [
    ("userfaultfd", [0]), ("io_uring_setup", [0, None]), ("bpf", [0, None, 0]),
    ("perf_event_open", [None, 0, -1, -1, 0]), ("keyctl", [0, -3, 0]), ("add_key", [None, None, None, 0, 0]),
    ("unshare", [0x10000000]), ("setns", [0, 0]), ("mount", [None, None, None, 0, None]), ("fsopen", [None, 0]),
    ("open_tree", [-1, None, 0]), ("chroot", [None]), ("pivot_root", [None, None]), ("shmget", [0, 4096, 0o1600]),
    ("semget", [0, 1, 0o1600]), ("msgget", [0, 0o1600]), ("mq_open", [None, 0, 0, None]),
    ("sched_setattr", [0, None, 0]), ("personality", [0x0040000]), ("name_to_handle_at", [-1, None, None, None, 0]),
    ("fanotify_init", [0, 0]), ("kcmp", [1, 1, 0, 0, 0]), ("process_vm_readv", [1, None, 0, None, 0, 0]),
    ("pidfd_getfd", [-1, 0, 0]), ("kexec_load", [0, 0, None, -1]), ("init_module", [None, 0, None]),
    ("reboot", [0, 0, 0, None]),
]  # fmt: skip


def test_the_filter_refuses(root_fleet: Fleet) -> None:
    root_fleet.require("seccomp")
    for name, arguments in CALLS:
        assert root_fleet.do("call", name, *arguments)["errno"] == "EPERM", name
        if name in ("keyctl", "unshare", "setns", "personality", "shmget", "pidfd_getfd", "sched_setattr"):
            assert root_fleet.do("call", name, *arguments, sealed=False).get("errno") != "EPERM", name


def test_no_namespace_is_entered_by_clone(root_fleet: Fleet) -> None:
    root_fleet.require("seccomp")
    for flag in (0x00020000, 0x02000000, 0x04000000, 0x08000000, 0x10000000, 0x20000000, 0x40000000):
        assert root_fleet.do("clone_with", flag)["errno"] == "EPERM", flag
    assert root_fleet.do("call", "clone3", None, 0)["errno"] == "ENOSYS"
    assert "errno" not in root_fleet.do("clone_with", 0)


def test_real_time_scheduling_is_refused(fleet: Fleet) -> None:
    fleet.require("seccomp")
    for policy in (os.SCHED_FIFO, os.SCHED_RR, 6):
        assert fleet.do("real_time", policy)["errno"] == "EPERM"
    assert "errno" not in fleet.do("real_time", os.SCHED_FIFO, sealed=False) or fleet.name == "ordinary"
    assert refused(fleet.do("better_nice"))


def test_it_dies_with_its_parent_whatever_it_says(fleet: Fleet) -> None:
    fleet.require("seccomp")
    assert "errno" not in fleet.do("survive_parent", sealed=False)
    assert fleet.do("survive_parent")["errno"] == "EPERM"


def test_the_memory_killer_takes_it_first_whatever_it_says(fleet: Fleet) -> None:
    fleet.require("files")
    assert "errno" not in fleet.do("spare_from_memory_killer", sealed=False)
    assert refused(fleet.do("spare_from_memory_killer"))


def test_terminals_are_not_typed_into(fleet: Fleet) -> None:
    fleet.require("seccomp")
    assert fleet.do("type_into_terminal", sealed=False)["errno"] != "EPERM"
    assert fleet.do("type_into_terminal")["errno"] == "EPERM"


@pytest.mark.skipif(platform.machine() != "x86_64", reason="there is one door on this processor")
def test_other_doors_into_the_kernel_are_shut(fleet: Fleet) -> None:
    fleet.require("seccomp")
    assert fleet.do("x32_system_call")["errno"] == "EPERM"
    control = fleet.do("old_system_call", sealed=False)
    if control["signal"] or "errno" in control:
        pytest.skip("this kernel does not run 32-bit programs")
    assert fleet.do("old_system_call")["errno"] == "EPERM"


# Identity and limits ---------------------------------------------------------------------------------


def test_nothing_is_held_that_matters(fleet: Fleet) -> None:
    fleet.require("no_capabilities", "no_new_privs", "seccomp")
    status = fleet.do("status")["value"]
    assert status["NoNewPrivs"] == "1"
    assert status["Seccomp"] == "2"
    for name in ("CapInh", "CapPrm", "CapEff", "CapAmb"):
        assert int(status[name], 16) == 0, name
    if fleet.isolation["own_uid"] is True:
        assert "0" not in status["Uid"].split()
        assert status["Groups"] == ""


def test_limits_hold(fleet: Fleet) -> None:
    limits = fleet.do("limits")["value"]
    assert [limits[name] for name in ("CORE", "RTPRIO", "NICE", "MSGQUEUE")] == [0, 0, 0, 0]
    assert limits["NOFILE"] == 4096
    assert limits["FSIZE"] == 1 << 30
    # Standard streams, the answer's pipe, and the directory that is being listed.
    assert limits["descriptors"] == 5


# Control groups --------------------------------------------------------------------------------------


def test_processes_are_counted(fleet: Fleet) -> None:
    fleet.require("cgroup_processes")
    assert fleet.do("fork_many", 64, processes=20)["value"] < 20
    assert fleet.do("fork_many", 64, processes=200)["value"] == 64


def test_memory_is_bounded_by_the_kernel(fleet: Fleet) -> None:
    fleet.require("cgroup_memory")
    assert fleet.do("eat", 64 << 20, memory=512 << 20)["value"] == 64 << 20
    ended = fleet.do("eat", 1 << 30, memory=512 << 20)
    assert ended["out_of_memory"]
    assert ended["signal"] == 9


def test_a_daemon_ends_with_its_group(fleet: Fleet) -> None:
    fleet.require("cgroup_kill")
    assert fleet.do("leave_daemon", sealed=False)["left"] == 1
    assert fleet.do("leave_daemon")["left"] == 0


_HOLDER = """
import os, sys, time
from workers.judge.sandbox.cgroups import Groups
groups = Groups()
group = groups.group(64 << 20, 16)
reader, writer = os.pipe()
child = os.fork()
if child == 0:
    group.join()
    os.closerange(3, 100)  # the lock is the fork server's alone
    time.sleep(600)
os.close(writer)
os.read(reader, 1)  # until the child has closed its end
print(child, *[place.directory for place in groups._places], flush=True)
time.sleep(600)
"""


def test_what_a_killed_fork_server_leaves_goes_with_the_next(root_fleet: Fleet) -> None:
    root_fleet.require("cgroup_kill")
    holder = subprocess.Popen([sys.executable, "-c", _HOLDER], stdout=subprocess.PIPE, text=True)
    child = 0
    try:
        assert holder.stdout is not None
        first, *directories = holder.stdout.readline().split()
        child = int(first)
        cgroups.clean()
        assert all(any(path.is_dir() for path in Path(directory).iterdir()) for directory in directories)
        assert all(Path(directory).is_dir() for directory in root_fleet.isolation["groups"])
        holder.kill()
        holder.wait()
        cgroups.clean()
        assert not any(Path(directory).exists() for directory in directories)
        assert all(Path(directory).is_dir() for directory in root_fleet.isolation["groups"])
        until(lambda: not Path(f"/proc/{child}/exe").exists(), what="the end of what it held")
    finally:
        holder.kill()
        holder.wait()
        if child and Path(f"/proc/{child}/exe").exists():
            os.kill(child, signal.SIGKILL)


# Honest work -----------------------------------------------------------------------------------------


def test_honest_work_is_done(fleet: Fleet) -> None:
    for work in ("multiply", "use_files", "own_children", "interpret_triton"):
        assert fleet.do(work)["value"] is True, work
    # Without mounts, its semaphores would be where every process could open them.
    answer = fleet.do("pool")
    fleet.require("files")
    assert answer.get("value") == [1] if fleet.isolation["mounts"] is True else refused(answer)


@pytest.mark.skipif(shutil.which("c++") is None, reason="no compiler")
def test_programs_are_compiled(fleet: Fleet) -> None:
    assert fleet.do("compile_and_run")["value"] == "hello"
