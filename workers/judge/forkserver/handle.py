"""A handle on the fork server: how to start it, and how to ask it for sealed processes."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from workers.judge.channel.packets import receive_with_fds, send_with_fds
from workers.judge.forkserver import builds, control
from workers.judge.forkserver.control import Keep, Spawn, Take
from workers.judge.host.artifacts import Store
from workers.judge.sandbox import level
from workers.judge.sandbox.seal import Profile
from workers.judge.slot_config import SlotConfig

#: Variables of the worker's environment that a fork server, and so every sealed process, may see.
_PASSED: Final = (
    "CUDA_DEVICE_ORDER",
    "CUDA_VISIBLE_DEVICES",
    "CUDA_HOME",
    "CUDA_PATH",
    "CC",
    "CXX",
    "LANG",
    "LC_ALL",
    "LD_LIBRARY_PATH",
    "MAX_JOBS",
    "MKL_NUM_THREADS",
    "NVIDIA_VISIBLE_DEVICES",
    "OMP_NUM_THREADS",
    "OMP_WAIT_POLICY",
    "PATH",
    "PYTHONPATH",
    "TMPDIR",
    "TORCH_CUDA_ARCH_LIST",
    "TRITON_INTERPRET",
    "TZ",
)
_SET: Final = {
    # Lets torch ask NVML instead of CUDA whether there is a GPU: a parent that touched CUDA cannot fork.
    "PYTORCH_NVML_BASED_CUDA_CHECK": "1",
    # Memory that torch maps itself can be shared by descriptor (workers.judge.channel.gpu_memory). It does so in pieces
    # of 20 MiB if it is not told otherwise, of which some gigabytes are hundreds, each mapped, sent and mapped again.
    "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True,large_segment_size_mb:64",
    # A pool of compiler processes would outlive the forward that started it.
    "TORCHINDUCTOR_COMPILE_THREADS": "1",
    # A uid of its own is in no list of users, and torch's compiler asks for the user's name.
    "USER": "candidate",
    "PYTHONDONTWRITEBYTECODE": "1",
    "PYTHONUNBUFFERED": "1",
}
_START_S: Final = 120.0
_STOP_S: Final = 5.0
#: How long the fork server may take to hand over what it keeps, in seconds.
_TAKE_S: Final = 30.0


class ForkServerError(RuntimeError):
    """The fork server did not start, or is gone."""


class ForkServer:
    """A handle that the fork server's parent holds, and that the judges which it forks inherit.

    Attributes:
        about: whose evaluation is judged now: fields for the fork server's log.
    """

    def __init__(self, slot: SlotConfig, pid: int, requests: socket.socket) -> None:
        """Hold on to a fork server that this process has just started.

        Args:
            slot: whose it is.
            pid: its process, a child of this one.
            requests: this side of the socket that it serves.
        """
        self.slot = slot
        self.pid = pid
        self.isolation: dict[str, Any] = {}
        self.builds: Store | None = None
        self.about: dict[str, str | int] = {}
        self._requests = requests
        self._ended = False

    def wait_ready(self, minimum: str = "none") -> None:
        """Wait until candidates can be had.

        Args:
            minimum: the least of :class:`workers.judge.sandbox.level.Level` that will do.

        Raises:
            ForkServerError: it ended, took longer than two minutes, cannot give candidates their uid, or this
                host cannot shut them in as far as ``minimum``.
        """
        readable, _, _ = select.select([self._requests], [], [], _START_S)
        data = self._requests.recv(65536) if readable else b""
        if not data:
            raise ForkServerError("the fork server did not start; its last words stand in the worker's log")
        self.isolation = json.loads(data)
        if self.slot.uid is not None and self.isolation["own_uid"] is not True:
            self.stop()
            raise ForkServerError(
                f"candidates would run as root: {self.isolation['own_uid']}: install kqueue elsewhere, allow mounting,"
                " or run it as an ordinary user"
            )
        if lacking := level.lacking(self.isolation, level.Level(minimum)):
            self.stop()
            raise ForkServerError(
                f"KQUEUE_ISOLATION={minimum} cannot be had here, only {self.isolation['level']}. Missing: "
                + ". ".join(f"{name} ({why})" for name, why in lacking.items())
            )
        self.builds = builds.open_store(self.slot, self.isolation, clean_environment(os.environ))

    def alive(self) -> bool:
        """Return True if it runs. Only its parent may ask."""
        if not self._ended:
            self._ended = os.waitpid(self.pid, os.WNOHANG)[0] == self.pid
        return not self._ended

    def stop(self) -> None:
        """End it and every candidate of it, within a bounded time. Only its parent may ask."""
        self._requests.close()
        deadline = time.monotonic() + _STOP_S
        while self.alive() and time.monotonic() < deadline + _STOP_S:
            if time.monotonic() > deadline:
                self.kill()
            time.sleep(0.01)

    def kill(self) -> None:
        """End one that does not answer: its candidates die with it, and its parent sees to another."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)

    def spawn(self, profile: Profile, channel: int, control_end: int, page: int) -> None:
        """Have a sealed process forked. The three descriptors are its; close them afterwards.

        Raises:
            ForkServerError: the fork server is gone.
        """
        self._ask(Spawn(profile, self.about), [channel, control_end, page])

    def keep(self, word: Keep, descriptors: Sequence[int]) -> None:
        """Have a process kept for a later evaluation; close the descriptors afterwards.

        Raises:
            ForkServerError: the fork server is gone.
        """
        self._ask(word, descriptors)

    def take(self, key: str) -> tuple[Keep, list[int]] | None:
        """Return the process that is kept under a key, and its descriptors; None where there is none.

        Raises:
            ForkServerError: the fork server is gone.
        """
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with ours, theirs:
            self._ask(Take(key, self.about), [theirs.fileno()])
            theirs.close()
            ours.settimeout(_TAKE_S)
            try:
                data, descriptors = receive_with_fds(ours, 65536)
            except TimeoutError:
                self.kill()
                raise ForkServerError("the fork server did not say whether it keeps a process") from None
        return (control.unpack(data, Keep), descriptors) if data else None

    def _ask(self, word: control.Request, descriptors: Sequence[int]) -> None:
        try:
            send_with_fds(self._requests, control.pack(word), descriptors)
        except OSError as error:
            raise ForkServerError(f"the fork server is gone: {error}") from error


#: Becomes the fork server, in an interpreter of its own: socket, parent's pid, uid or 0.
_PROGRAM: Final = """
import socket, sys
from workers.judge.candidate import harness
from workers.judge.forkserver import server
harness.preload()
server.main(socket.socket(fileno=int(sys.argv[1])), int(sys.argv[2]), int(sys.argv[3]) or None)
"""


def start(slot: SlotConfig) -> ForkServer:
    """Start a fork server in an interpreter of its own, as this process may hold anything; it is not waited for.

    It dies with the thread that calls this.
    """
    prepare_scratch(slot)
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs:
        process = subprocess.Popen(
            [sys.executable, "-P", "-c", _PROGRAM, str(theirs.fileno()), str(os.getpid()), str(slot.uid or 0)],
            env=clean_environment(os.environ),
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
        )
    process.returncode = 0  # the handle reaps it
    return ForkServer(slot, process.pid, ours)


def clean_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the part of a worker's environment that its fork server, and so every sealed process, may see."""
    # The interpreter's own directory first: ninja and other tools installed beside it must be found.
    path = os.pathsep.join([str(Path(sys.executable).parent), environment.get("PATH", os.defpath)])
    return {name: environment[name] for name in _PASSED if name in environment} | _SET | {"PATH": path}


def prepare_scratch(slot: SlotConfig) -> None:
    """Make the place's directory, which sealed processes may only traverse."""
    slot.scratch.mkdir(parents=True, exist_ok=True)
    slot.scratch.parent.chmod(0o711)
    slot.scratch.chmod(0o711)
