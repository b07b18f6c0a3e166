"""The handle on the fork server. It starts the fork server and requests sealed processes from it."""

from __future__ import annotations

import contextlib
import gc
import json
import os
import signal
import socket
import subprocess
import time
from collections.abc import Generator, Sequence
from multiprocessing.connection import wait
from typing import Any, Final

from kqueue.folders import clean_environment
from kqueue.program import PYTHON
from workers.judge.channel.packets import receive_with_fds, send_with_fds
from workers.judge.forkserver import builds, control
from workers.judge.forkserver.control import Keep, Spawn, Take
from workers.judge.host.artifacts import InMemoryStore, Store
from workers.judge.sandbox import level
from workers.judge.sandbox.seal import Profile
from workers.judge.slot_config import SlotConfig

#: Time limit in seconds for the fork server's start.
_START_S: Final = 120.0
#: Seconds after which a fork server that does not exit is killed.
_STOP_S: Final = 5.0
#: Time limit in seconds for the fork server's answer about a kept process.
_TAKE_S: Final = 30.0


class ForkServerError(RuntimeError):
    """Raised where the fork server did not start, has exited, or does not answer."""


class ForkServer:
    """A handle on the fork server. The parent creates it, and judges inherit it.

    Attributes:
        about: fields for the fork server's log that identify the current evaluation.
        caches: part of the keys under which processes are kept, which differs for the owners of evaluations.
    """

    def __init__(self, slot: SlotConfig, pid: int, requests: socket.socket) -> None:
        """Manage a fork server that this process has just started. ``requests`` is this end of its request socket."""
        self.slot = slot
        self.pid = pid
        self.isolation: dict[str, Any] = {}
        self.builds: Store | None = None
        self.about: dict[str, str | int] = {}
        self.caches = ""
        self._requests = requests
        self._ended = False

    def wait_ready(self, minimum: str = "none") -> None:
        """Wait until the fork server accepts requests.

        ``minimum`` is the required level of isolation (:class:`workers.judge.sandbox.level.Level`).

        Raises:
            ForkServerError: it exited, took longer than two minutes, cannot give candidates their uid, or this
                host does not support the isolation level ``minimum``.
        """
        data = self._requests.recv(65536) if wait([self._requests], _START_S) else b""
        if not data:
            raise ForkServerError("the fork server did not start (the worker's log has its last messages)")
        self.isolation = json.loads(data)
        if "failed" in self.isolation:
            raise ForkServerError(f"the fork server did not start: {self.isolation['failed']}")
        if self.slot.uid is not None and self.isolation["own_uid"] is not True:
            self.stop()
            raise ForkServerError(
                f"candidates would run as root: {self.isolation['own_uid']}: install kqueue elsewhere, allow mounting,"
                " or run it as an ordinary user"
            )
        if lacking := level.lacking(self.isolation, level.Level(minimum)):
            self.stop()
            raise ForkServerError(
                f"KQUEUE_ISOLATION={minimum} is not supported here, only {self.isolation['level']}. Missing: "
                + ". ".join(f"{name} ({why})" for name, why in lacking.items())
            )
        self.builds = builds.open_store(self.slot, self.isolation, clean_environment(os.environ))

    @contextlib.contextmanager
    def one_build(self) -> Generator[None]:
        """Keep builds during the block even without a store, so that a kernel is compiled once for all shapes."""
        builds, self.builds = self.builds, self.builds or InMemoryStore()
        try:
            yield
        finally:
            self.builds = builds

    def alive(self) -> bool:
        """Return True if the fork server runs. Only for its parent."""
        if not self._ended:
            self._ended = os.waitpid(self.pid, os.WNOHANG)[0] == self.pid
        return not self._ended

    def stop(self) -> None:
        """End the fork server and its sealed processes within a bounded time. Only for its parent."""
        self._requests.close()
        if not self.isolation:  # It still imports, does not see the end, and has started nothing.
            self.kill()
        deadline = time.monotonic() + _STOP_S
        while self.alive() and time.monotonic() < deadline + _STOP_S:
            if time.monotonic() > deadline:
                self.kill()
            time.sleep(0.01)

    def kill(self) -> None:
        """Kill a fork server that does not answer. Its sealed processes die too, and its parent starts another one."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)

    def spawn(self, profile: Profile, channel: int, control_end: int, page: int) -> None:
        """Request a new sealed process. The caller closes the three descriptors afterwards.

        Raises:
            ForkServerError: the fork server is gone.
        """
        self._send(Spawn(profile, self.about), [channel, control_end, page])

    def keep(self, request: Keep, descriptors: Sequence[int]) -> None:
        """Keep a process for a later evaluation. The caller closes the descriptors afterwards.

        Raises:
            ForkServerError: the fork server is gone.
        """
        self._send(request, descriptors)

    def take(self, key: str) -> tuple[Keep, list[int]] | None:
        """Return the process that is kept under a key, and its descriptors. Return None if there is none.

        Raises:
            ForkServerError: the fork server is gone.
        """
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with ours, theirs:
            self._send(Take(key, self.about), [theirs.fileno()])
            theirs.close()
            ours.settimeout(_TAKE_S)
            try:
                data, descriptors = receive_with_fds(ours, 65536)
            except TimeoutError:
                self.kill()
                raise ForkServerError("the fork server did not answer a request for a kept process") from None
        return (control.unpack(data, Keep), descriptors) if data else None

    def _send(self, request: control.Request, descriptors: Sequence[int]) -> None:
        try:
            send_with_fds(self._requests, control.pack(request), descriptors)
        except OSError as error:
            raise ForkServerError(f"the fork server is gone: {error}") from error


def start(slot: SlotConfig) -> ForkServer:
    """Start a fork server in a new interpreter, because this process can hold secrets. See :func:`fork`."""
    prepare_scratch(slot)
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs:
        process = subprocess.Popen(
            [*PYTHON, "workers.judge.forkserver", str(theirs.fileno()), str(os.getpid()), str(slot.uid or 0)],
            env=clean_environment(os.environ),
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
        )
    process.returncode = 0  # the handle reaps it
    return ForkServer(slot, process.pid, ours)


def fork(slot: SlotConfig) -> ForkServer:
    """Fork a fork server from this process, without waiting until it is ready. It dies with this process.

    This process has imported the libraries (:func:`.harness.preload`), started with a clean environment, and read no
    secret. The child closes all other descriptors.
    """
    from workers.judge.forkserver import server  # imports torch

    prepare_scratch(slot)
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    gc.freeze()  # Loaded modules stay, in this process and in all forks.
    parent, own = os.getpid(), theirs.fileno()
    if (pid := os.fork()) == 0:
        gc.enable()
        for number in (signal.SIGALRM, signal.SIGUSR1):
            signal.signal(number, signal.SIG_DFL)
        os.closerange(3, own)
        os.closerange(own + 1, 1 << 20)
        server.main(theirs, parent, slot.uid)
    theirs.close()
    return ForkServer(slot, pid, ours)


def prepare_scratch(slot: SlotConfig) -> None:
    """Create the slot's directory. Sealed processes can only traverse it."""
    slot.scratch.mkdir(parents=True, exist_ok=True)
    slot.scratch.parent.chmod(0o711)
    slot.scratch.chmod(0o711)
