"""Starting the fork server, and asking it for candidates."""

from __future__ import annotations

import array
import json
import os
import select
import socket
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

from workers.sandbox.seal import Profile
from workers.slot import Slot

#: What of the worker's environment a fork server, and so every candidate, may see.
_PASSED: Final = (
    "CUDA_DEVICE_ORDER",
    "CUDA_VISIBLE_DEVICES",
    "CUDA_HOME",
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
    "TORCH_CUDA_ARCH_LIST",
    "TRITON_INTERPRET",
    "TZ",
)
_SET: Final = {
    # Lets torch ask NVML instead of CUDA whether there is a GPU: a parent that touched CUDA cannot fork.
    "PYTORCH_NVML_BASED_CUDA_CHECK": "1",
    # A pool of compiler processes would outlive the forward that started it.
    "TORCHINDUCTOR_COMPILE_THREADS": "1",
    "PYTHONDONTWRITEBYTECODE": "1",
    "PYTHONUNBUFFERED": "1",
}
_START_S: Final = 120.0


class ForkServerError(RuntimeError):
    """The fork server did not start, or is gone."""


class ForkServer:
    """The worker's parent's handle on its slot's fork server; inherited by the judges that it forks."""

    def __init__(self, slot: Slot, process: subprocess.Popen[bytes], requests: socket.socket) -> None:
        self.slot = slot
        self.isolation: dict[str, Any] = {}
        self._process = process
        self._requests = requests

    @classmethod
    def start(cls, slot: Slot) -> ForkServer:
        """Start the slot's fork server; returns at once, :meth:`wait_ready` waits for its imports."""
        slot.scratch.mkdir(parents=True, exist_ok=True)
        slot.scratch.parent.chmod(0o711)
        slot.scratch.chmod(0o711)
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        # The interpreter's own directory first: ninja and other tools installed beside it must be found.
        path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)])
        environment = {k: os.environ[k] for k in _PASSED if k in os.environ} | _SET | {"PATH": path}
        process = subprocess.Popen(
            [sys.executable, "-m", "workers.candidate.forkserver", str(theirs.fileno()), str(os.getpid())],
            env=environment,
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )
        theirs.close()
        return cls(slot, process, ours)

    def wait_ready(self) -> None:
        """Wait until candidates can be had.

        Raises:
            ForkServerError: it ended, took longer than two minutes, or cannot give candidates their uid.
        """
        readable, _, _ = select.select([self._requests], [], [], _START_S)
        data = self._requests.recv(65536) if readable else b""
        if not data:
            raise ForkServerError(f"the fork server did not start (exit status {self._process.poll()})")
        self.isolation = json.loads(data)
        if self.slot.uid is not None and not self.isolation["own_uid"]:
            self.stop()
            raise ForkServerError(
                f"candidates would run as root: {self.isolation['view']}. The interpreter lies where other users may"
                " not go, and this process may not mount: install kqueue elsewhere, or run it as an ordinary user"
            )

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._process.pid

    def alive(self) -> bool:
        """Whether it runs. Only its parent may ask."""
        return self._process.poll() is None

    def stop(self) -> None:
        """End it and every candidate of it. Only its parent may ask."""
        self._requests.close()
        try:
            self._process.wait(5)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

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
