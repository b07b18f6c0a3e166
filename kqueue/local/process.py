"""Child processes that never outlive their owner, and the lock that keeps owners of a directory apart.

A child is tied to the *thread* that started it: start children from the main thread, or from one that
lives as long as they should.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import hashlib
import os
import re
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Final, Self

from kqueue.errors import HomeInUse, LocalFleetError

_PR_SET_PDEATHSIG: Final = 1
#: What a log may hold, in bytes; what was before is kept in ``<name>.1``, once.
_LOG_BYTES: Final = 8 << 20
#: How long a killed child may take to go; one that hangs in the kernel is left behind.
_KILLED_S: Final = 10.0
#: The longest path that a unix socket can be bound to, in bytes.
_SOCKET_PATH_BYTES: Final = 107
#: How long the servers of an owner that was killed may take to end, in seconds.
_RELEASE_S: Final = 20.0
_libc = ctypes.CDLL(None, use_errno=True)


class Child:
    """A running child process in a session of its own, its output in a log.

    It gets ``death_signal`` when the thread that started it ends, however that happens.
    """

    def __init__(
        self,
        argv: Sequence[str],
        *,
        log: Path,
        environment: Mapping[str, str],
        death_signal: signal.Signals = signal.SIGKILL,
        keep: Sequence[int] = (),
    ) -> None:
        """Start ``argv``.

        Args:
            argv: program and arguments; no shell.
            log: where stdout and stderr are appended, mode 0600.
            environment: the child's whole environment.
            death_signal: sent when the owner dies.
            keep: descriptors that the child inherits.

        Raises:
            LocalFleetError: the program cannot be started.
        """
        self.log = log
        owner = os.getpid()

        def in_child() -> None:
            # A job in the background of a shell has SIGINT and SIGQUIT ignored, and children would inherit that.
            for signum in (signal.SIGINT, signal.SIGQUIT, signal.SIGTERM):
                signal.signal(signum, signal.SIG_DFL)
            signal.pthread_sigmask(signal.SIG_SETMASK, ())
            _libc.prctl(_PR_SET_PDEATHSIG, int(death_signal), 0, 0, 0)
            if os.getppid() != owner:
                os._exit(1)

        output = _open_log(log)
        try:
            self._process = subprocess.Popen(
                argv,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env=dict(environment),
                start_new_session=True,
                pass_fds=tuple(keep),
                preexec_fn=in_child,
            )
        except OSError as error:
            raise LocalFleetError(f"cannot start {argv[0]}: {error}") from error
        finally:
            os.close(output)

    @property
    def pid(self) -> int:
        """The process's id."""
        return self._process.pid

    @property
    def status(self) -> int | None:
        """Exit status, negative for a signal; None while it runs."""
        return self._process.poll()

    def alive(self) -> bool:
        """Whether it runs."""
        return self.status is None

    def children(self) -> set[int]:
        """The ids of the processes that it started itself and that run."""
        found: set[int] = set()
        for task in Path(f"/proc/{self.pid}/task").glob("*/children"):
            with contextlib.suppress(OSError):
                found.update(int(pid) for pid in task.read_text().split())
        return {pid for pid in found if running(pid)}

    def wait(self, timeout_s: float) -> bool:
        """Wait until it has ended, at most ``timeout_s`` seconds; whether it has."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout_s)
        return not self.alive()

    def send(self, signum: signal.Signals) -> None:
        """Send it a signal; nothing happens where it has ended."""
        self._process.send_signal(signum)

    def stop(self, *steps: tuple[signal.Signals, float]) -> None:
        """End it: each step's signal and its grace in seconds, then SIGKILL to its process group.

        An interruption (Ctrl-C) cuts the graces short, and the process is gone all the same, unless it hangs in the
        kernel: then it is left behind.
        """
        try:
            for signum, grace_s in steps:
                self.send(signum)
                if self.wait(grace_s):
                    return
        finally:
            if self.alive():
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(self.pid, signal.SIGKILL)
                self.wait(_KILLED_S)

    def tail(self, lines: int = 20) -> str:
        """The last lines of its log."""
        return log_tail(self.log, lines)


def log_tail(log: Path, lines: int = 20) -> str:
    """The last lines of a log; empty where there is none."""
    try:
        with log.open("rb") as file:
            file.seek(max(0, log.stat().st_size - (32 << 10)))
            text = file.read().decode(errors="replace")
    except OSError:
        return ""
    return "\n".join(text.splitlines()[-lines:])


def bound_log(log: Path) -> None:
    """Copy a log that has become large to ``<name>.1`` and empty it; who writes it appends and goes on.

    What is written between the copy and its end is lost.
    """
    with contextlib.suppress(OSError):
        if log.stat().st_size > _LOG_BYTES:
            before = log.with_name(log.name + ".1")
            shutil.copyfile(log, before)
            before.chmod(0o600)
            os.truncate(log, 0)


def command_line(pid: int) -> list[str]:
    """A process's program and arguments; empty if it is gone."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_text().split("\0")
    except OSError:
        return []


def _open_log(log: Path) -> int:
    log.parent.mkdir(parents=True, exist_ok=True)
    bound_log(log)
    return os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)


def running(pid: int) -> bool:
    """Whether a process with this id runs; one that has ended and was not waited for does not."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return stat.rpartition(")")[2].split()[0] not in "ZX"


class Lock:
    """An exclusive hold on a directory, released when every process that inherited it has ended.

    A server inherits its owner's hold: while the server of a killed owner is still shutting down, a new
    owner waits for it instead of starting a second server on the same files.
    """

    def __init__(self, directory: Path, what: str) -> None:
        """Take the hold on ``directory``, which is made (0700) where it is missing.

        Raises:
            HomeInUse: another owner holds it.
            LocalFleetError: it cannot be used.
        """
        try:
            directory.mkdir(parents=True, exist_ok=True, mode=0o700)
            directory.chmod(0o700)
            self.descriptor = os.open(directory / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise LocalFleetError(
                f"cannot use {directory} for {what}: {error.strerror}. Choose another home with KQUEUE_HOME"
            ) from error
        try:
            self._acquire(directory, what)
        except BaseException:
            os.close(self.descriptor)
            raise
        os.ftruncate(self.descriptor, 0)
        os.pwrite(self.descriptor, str(os.getpid()).encode(), 0)

    def _acquire(self, directory: Path, what: str) -> None:
        deadline = time.monotonic() + _RELEASE_S
        while True:
            try:
                fcntl.flock(self.descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                text = os.pread(self.descriptor, 20, 0)
                owner = int(text) if text.isdigit() else 0
                if running(owner) or time.monotonic() > deadline:
                    raise HomeInUse(
                        f"{what} in {directory} is in use by process {owner or 'unknown'}: "
                        "stop that one first, or choose another home with KQUEUE_HOME"
                    ) from None
                time.sleep(0.05)
            else:
                return

    def release(self) -> None:
        """Let go; doing so twice is no error."""
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


def socket_directory(directory: Path, socket: str) -> Path:
    """A directory (0700) for the unix socket named ``socket``: ``directory/run`` where the path serves.

    A path that is too long for a socket, or that holds characters with a meaning in URLs or in a server's
    settings, is replaced by a short one that is the same at every start.

    Raises:
        LocalFleetError: that short directory belongs to somebody else.
    """
    path = directory / "run"
    if len(os.fsencode(path / socket)) > _SOCKET_PATH_BYTES or not re.fullmatch(r"/[A-Za-z0-9_./+-]*", str(path)):
        digest = hashlib.sha256(os.fsencode(directory)).hexdigest()[:16]
        base = Path(tempfile.gettempdir())
        if len(os.fsencode(base)) > 40 or not re.fullmatch(r"/[A-Za-z0-9_./+-]*", str(base)):
            base = Path("/tmp")  # noqa: S108 the directory made in it is checked below
        path = base / f"kqueue-{os.getuid()}-{digest}"
    path.mkdir(mode=0o700, exist_ok=True)
    found = path.lstat()
    if path.is_symlink() or not path.is_dir() or found.st_uid != os.getuid():
        raise LocalFleetError(f"{path} belongs to somebody else: remove it, or choose a home with a shorter path")
    path.chmod(0o700)
    return path


def drop_socket_directory(path: Path, directory: Path) -> None:
    """Remove what :func:`socket_directory` made outside ``directory``."""
    if path != directory / "run":
        shutil.rmtree(path, ignore_errors=True)


def wait_until_ready(
    child: Child, what: str, ready: Callable[[], bool], timeout_s: float, *, every_s: float = 0.01
) -> None:
    """Ask ``ready`` every ``every_s`` seconds until it says yes.

    Raises:
        LocalFleetError: the child ended, or ``timeout_s`` seconds passed; the message shows its log.
    """
    deadline = time.monotonic() + timeout_s
    while not ready():
        if not child.alive():
            raise LocalFleetError(f"{what} ended with status {child.status}. The end of {child.log}:\n{child.tail()}")
        if time.monotonic() > deadline:
            raise LocalFleetError(
                f"{what} did not become ready in {timeout_s:.0f} s. The end of {child.log}:\n{child.tail()}"
            )
        time.sleep(every_s)
