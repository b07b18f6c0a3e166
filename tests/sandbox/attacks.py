"""Attacks and honest work of sealed processes, by name in ``ALL``. A refused attack raises the kernel's error."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import mmap
import multiprocessing
import os
import platform
import resource
import signal
import socket
import struct
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from tests.sandbox import triton_kernel

_libc: Any = ctypes.CDLL(None, use_errno=True)
_libc.syscall.restype = ctypes.c_long
#: System call numbers on x86-64 and aarch64, written independently of the seal's own table.
_NUMBERS = {
    "ptrace": (101, 117), "process_vm_readv": (310, 270), "pidfd_open": (434, 434), "pidfd_getfd": (438, 438),
    "pidfd_send_signal": (424, 424), "kcmp": (312, 272), "userfaultfd": (323, 282), "io_uring_setup": (425, 425),
    "bpf": (321, 280), "perf_event_open": (298, 241), "keyctl": (250, 219), "add_key": (248, 217),
    "unshare": (272, 97), "setns": (308, 268), "mount": (165, 40), "fsopen": (430, 430), "open_tree": (428, 428),
    "chroot": (161, 51), "pivot_root": (155, 41), "clone": (56, 220), "clone3": (435, 435), "shmget": (29, 194),
    "semget": (64, 190), "msgget": (68, 186), "mq_open": (240, 180), "sched_setattr": (314, 274),
    "sched_setscheduler": (144, 119), "personality": (135, 92), "name_to_handle_at": (303, 264),
    "fanotify_init": (300, 262), "prctl": (157, 167), "kexec_load": (246, 104), "init_module": (175, 105),
    "reboot": (169, 142), "ioprio_set": (251, 30),
}  # fmt: skip


def call(name: str, *arguments: Any) -> int:
    """Make a system call by name."""
    number = _NUMBERS[name][platform.machine() == "aarch64"]
    passed = [ctypes.c_long(a) if isinstance(a, int) else a for a in arguments]
    result = int(_libc.syscall(ctypes.c_long(number), *passed))
    if result < 0:
        raise OSError(ctypes.get_errno(), name)
    return result


def connect(address: str) -> str:
    """Connect to the server on a path, and return its greeting. ``@`` begins an abstract name."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as link:
        link.connect("\0" + address[1:] if address.startswith("@") else address)
        return link.recv(16).decode()


def send_by_a_pair(path: str, kind: int) -> None:
    """Send a message to another process's path by a socket pair, which is itself allowed."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, kind)
    with ours, theirs:
        ours.sendto(b"hello", path)


def read(path: str) -> str:
    with open(path, "rb") as stream:  # noqa: PTH123
        return stream.read(64).decode("utf-8", "replace")


def own_memory() -> str:
    """Read an address of the process itself through /proc."""
    mine = ctypes.create_string_buffer(b"mine")
    with open("/proc/self/mem", "rb", buffering=0) as stream:  # noqa: PTH123
        return os.pread(stream.fileno(), 4, ctypes.addressof(mine)).decode()


def read_by_symlink(path: str) -> str:
    Path("link").symlink_to(path)
    return read("link")


def hoard(place: str) -> None:
    """Write 64 MiB to deleted files."""
    held = [tempfile.TemporaryFile(dir=place, buffering=0) for _ in range(16)]  # noqa: SIM115
    for file in held:
        assert file.write(bytes(4 << 20)) == 4 << 20 or file.write(b"more")


def litter(place: str) -> None:
    for number in range(50_000):
        os.close(os.open(f"{place}/{number}", os.O_CREAT | os.O_WRONLY, 0o600))


def order_device(path: str) -> None:
    """Make the ioctl TCGETS on a device, which most devices do not support."""
    with open(path, "r+b", buffering=0) as stream:  # noqa: PTH123
        fcntl.ioctl(stream, 0x5401, bytes(64))


def order_devices(paths: list[str]) -> dict[str, str]:
    """Return the answer of each device to TCGETS."""
    answers: dict[str, str] = {}
    for path in paths:
        try:
            order_device(path)
            answers[path] = "worked"
        except OSError as error:
            answers[path] = errno.errorcode.get(error.errno or 0, str(error))
    return answers


def read_memory(pid: int) -> None:
    """Read an address of another process. It has the same contents there, because both were forked from one process."""
    buffer = ctypes.create_string_buffer(8)
    local = struct.pack("QQ", ctypes.addressof(buffer), 8)
    call("process_vm_readv", pid, local, 1, struct.pack("QQ", id(read_memory), 8), 1, 0)


def clone_with(flags: int) -> None:
    """Start a child in new namespaces."""
    if call("clone", flags | signal.SIGCHLD, 0, 0, 0, 0) == 0:
        os._exit(0)
    os.wait()


def old_system_call() -> None:
    """Call ``socket`` by the 32-bit system call interface."""
    code = bytes.fromhex("53 b867010000 bb01000000 b901000000 ba00000000 cd80 5b c3")
    page = mmap.mmap(-1, 4096, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)
    page.write(code)
    result = ctypes.CFUNCTYPE(ctypes.c_int)(ctypes.addressof(ctypes.c_char.from_buffer(page)))()
    if result < 0:
        raise OSError(-result, "int 0x80")
    os.close(result)


def x32_system_call() -> None:
    """Call ``getpid`` by its number in the x32 interface."""
    if _libc.syscall(ctypes.c_long(0x40000000 | 39)) < 0:
        raise OSError(ctypes.get_errno(), "x32")


def status() -> dict[str, str]:
    lines = Path("/proc/self/status").read_text().splitlines()
    return {name: value.strip() for name, _, value in (line.partition(":") for line in lines)}


def limits() -> dict[str, int]:
    """Return the limits of the process and the number of its descriptors."""
    names = ("CORE", "RTPRIO", "NICE", "MSGQUEUE", "NOFILE", "FSIZE")
    found = {name: resource.getrlimit(getattr(resource, f"RLIMIT_{name}"))[1] for name in names}
    return found | {"descriptors": len(os.listdir("/proc/self/fd"))}  # noqa: PTH208


def fork_many(count: int) -> int:
    """Return how many children the process can have at once, up to ``count``."""
    made = 0
    try:
        for _ in range(count):
            if os.fork() == 0:
                signal.pause()
            made += 1
    except BlockingIOError:
        pass
    return made


def eat(nbytes: int) -> int:
    """Use this number of bytes of memory."""
    block = mmap.mmap(-1, nbytes)
    for offset in range(0, nbytes, 4096):
        block[offset] = 1
    return nbytes


def leave_daemon() -> int:
    """Start a daemon in another session, and return its pid."""
    reader, writer = os.pipe()
    if os.fork() == 0:
        os.setsid()
        child = os.fork()
        if child == 0:
            signal.pause()
        os.write(writer, str(child).encode())
        os._exit(0)
    os.wait()
    return int(os.read(reader, 32))


# Honest work ---------------------------------------------------------------------------------------------


def multiply() -> bool:
    """Multiply matrices with torch on two threads."""
    torch.set_num_threads(2)
    left = torch.arange(512 * 512, dtype=torch.float32).reshape(512, 512).remainder(7)
    return bool(torch.equal(left @ torch.eye(512), left))


def use_files() -> bool:
    """Use files like a cache, with temporary files that are moved between directories, links and a FIFO."""
    with tempfile.NamedTemporaryFile("w", delete=False) as stream:
        stream.write("kept")
    Path("a/b").mkdir(parents=True)
    target = Path("a/b/moved")
    Path(stream.name).replace(target)
    os.link(target, "hard")
    Path("soft").symlink_to(target)
    os.mkfifo("fifo")
    read = [Path(name).read_text() for name in ("hard", "soft")]
    os.truncate(target, 2)
    return [*read, Path("hard").read_text()] == ["kept", "kept", "ke"]


def compile_and_run() -> str:
    Path("hello.cpp").write_text('#include <cstdio>\nint main() { std::puts("hello"); }\n')
    subprocess.run(["c++", "-o", "hello", "hello.cpp"], check=True, capture_output=True)
    return subprocess.run(["./hello"], check=True, capture_output=True, text=True).stdout.strip()


def own_children() -> bool:
    """Start two child processes, of which one sends a message and the other is ended by a signal."""
    fork = multiprocessing.get_context("fork")
    ours, theirs = fork.Pipe()
    child = fork.Process(target=lambda: theirs.send("hello"))
    child.start()
    heard = ours.recv()
    child.join()
    sleeper = subprocess.Popen(["sleep", "100"])
    sleeper.terminate()
    return heard == "hello" and sleeper.wait() == -signal.SIGTERM


def pool() -> list[int]:
    """Use a process pool, which needs semaphores in shared memory."""
    with multiprocessing.get_context("fork").Pool(1) as workers:
        return workers.map(abs, [-1])


_IDLE = os.sched_param(0)
ALL: dict[str, Callable[..., Any]] = {
    each.__name__: each
    for each in (
        call, connect, read, own_memory, read_by_symlink, hoard, litter, order_device, order_devices, read_memory,
        clone_with, old_system_call, x32_system_call, status, limits, fork_many, eat, leave_daemon, multiply, use_files,
        compile_and_run, own_children, pool,
    )
} | {
    "interpret_triton": triton_kernel.doubles,
    "wait": signal.pause,
    "make_socket": lambda family, kind: socket.socket(family, kind).close(),
    "datagrams_by_a_pair": lambda path: send_by_a_pair(path, socket.SOCK_DGRAM),
    "send_to": lambda path: send_by_a_pair(path, socket.SOCK_STREAM),
    "link_in": lambda path: os.link(path, "second-name"),
    "write": lambda path: Path(path).write_text("left behind") and None,
    "listing": os.listdir,
    "make_device": lambda: os.mknod("node", 0o666 | 0o020000, os.makedev(1, 3)),
    "type_into_terminal": lambda: fcntl.ioctl(0, 0x5412, b"x") and None,  # TIOCSTI on its input, which is no terminal
    # Attacks on another process: tracing, access to its memory, copies of its descriptors, signals by two system calls.
    "attach": lambda pid: call("ptrace", 0x4206, pid, 0, 0),
    "open_memory": lambda pid: os.close(os.open(f"/proc/{pid}/mem", os.O_RDWR)),
    "take_descriptor": lambda pid: call("pidfd_getfd", call("pidfd_open", pid, 0), 0, 0),
    "kill": lambda pid: os.kill(pid, 0),
    "queue_signal": lambda pid: call(
        "pidfd_send_signal", os.open(f"/proc/{pid}", os.O_RDONLY), signal.SIGCONT, None, 0
    ),
    # Attempts to slow another process.
    "nice": lambda pid: os.setpriority(os.PRIO_PROCESS, pid, 19),
    "nice of the user": lambda pid: os.setpriority(os.PRIO_USER, 0, 19),
    "affinity": lambda pid: os.sched_setaffinity(pid, {0}),
    "idle": lambda pid: os.sched_setscheduler(pid, os.SCHED_IDLE, _IDLE),
    "limit": lambda pid: resource.prlimit(pid, resource.RLIMIT_NOFILE, (64, 64)),
    "io": lambda pid: call("ioprio_set", 1, pid, 3 << 13),
    "real_time": lambda policy: os.sched_setscheduler(0, policy, os.sched_param(1)),
    "better_nice": lambda: os.nice(-1),
    "survive_parent": lambda: call("prctl", 1, 0, 0, 0, 0),
    "spare_from_memory_killer": lambda: Path("/proc/self/oom_score_adj").write_text("0"),
    "interfaces": lambda: [
        line.split(":")[0].strip() for line in Path("/proc/self/net/dev").read_text().splitlines()[2:]
    ],
}  # fmt: skip
