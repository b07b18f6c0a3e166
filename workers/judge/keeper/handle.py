"""The fork server as its parent and the judges see it: what it is started with, and asking it for candidates."""

from __future__ import annotations

import array
import contextlib
import json
import os
import select
import signal
import socket
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

from workers.judge.sandbox import level
from workers.judge.sandbox.seal import Profile
from workers.slot import Slot

#: What of the worker's environment a fork server, and so every candidate, may see.
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
    # A pool of compiler processes would outlive the forward that started it.
    "TORCHINDUCTOR_COMPILE_THREADS": "1",
    # A uid of its own is in no list of users, and torch's compiler asks for the user's name.
    "USER": "candidate",
    "PYTHONDONTWRITEBYTECODE": "1",
    "PYTHONUNBUFFERED": "1",
}
_START_S: Final = 120.0
_STOP_S: Final = 5.0


class ForkServerError(RuntimeError):
    """The fork server did not start, or is gone."""


class ForkServer:
    """The worker's parent's handle on its slot's fork server; inherited by the judges that it forks."""

    def __init__(self, slot: Slot, pid: int, requests: socket.socket) -> None:
        """Hold on to a fork server that this process has just started.

        Args:
            slot: whose it is.
            pid: its process, a child of this one.
            requests: this side of the socket that it serves.
        """
        self.slot = slot
        self.pid = pid
        self.isolation: dict[str, Any] = {}
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

    def alive(self) -> bool:
        """Whether it runs. Only its parent may ask."""
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

    def spawn(self, profile: Profile, channel: int, control: int, page: int) -> None:
        """Have a candidate forked. The three descriptors are the candidate's; close them afterwards.

        Raises:
            ForkServerError: the fork server is gone.
        """
        fds = array.array("i", [channel, control, page])
        try:
            self._requests.sendmsg(
                [json.dumps(asdict(profile)).encode()], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, fds)]
            )
        except OSError as error:
            raise ForkServerError(f"the fork server is gone: {error}") from error


#: The fork server that this process started, if it is a slot's worker.
started: ForkServer | None = None


def clean_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """What of a worker's environment its fork server, and so every candidate, may see."""
    # The interpreter's own directory first: ninja and other tools installed beside it must be found.
    path = os.pathsep.join([str(Path(sys.executable).parent), environment.get("PATH", os.defpath)])
    return {name: environment[name] for name in _PASSED if name in environment} | _SET | {"PATH": path}


def prepare_scratch(slot: Slot) -> None:
    """Make the slot's directory, which candidates may traverse and no more."""
    slot.scratch.mkdir(parents=True, exist_ok=True)
    slot.scratch.parent.chmod(0o711)
    slot.scratch.chmod(0o711)
