"""Child processes that never outlive their owner, and a lock that gives a directory one owner at a time.

A child is a new program, or a fork of its owner that shares the memory of the owner's imports. It dies with the
*thread* that started it. Start children from the main thread, or from a thread that lives as long as they must.
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
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NoReturn, Self

from kqueue.errors import HomeInUse, LocalFleetError

_PR_SET_PDEATHSIG: Final = 1
#: Size in bytes at which a log is rotated. One older log is kept, as ``<name>.1``.
_LOG_BYTES: Final = 8 << 20
#: Seconds to wait for a killed child. One that hangs in the kernel is left behind.
_KILLED_S: Final = 10.0
#: Longest path of a unix socket in bytes.
_SOCKET_PATH_BYTES: Final = 107
#: Seconds to wait until the servers of a killed owner have shut down.
_RELEASE_S: Final = 20.0
_libc = ctypes.CDLL(None, use_errno=True)


class Child:
    """A child process in its own session, with its output in a log.

    It receives ``death_signal`` when the thread that started it ends for any reason.
    """

    def __init__(
        self,
        argv: Sequence[str],
        *,
        log: Path,
        environment: Mapping[str, str],
        death_signal: signal.Signals = signal.SIGKILL,
        keep: Sequence[int] = (),
        run: Callable[[], Any] | None = None,
    ) -> None:
        """Start ``argv``, or fork this process and call ``run`` in the fork.

        Args:
            argv: the program and its arguments, without a shell. For a fork, its command line in the process list.
            log: file (mode 0600) to which stdout and stderr are appended.
            environment: the child's entire environment.
            keep: descriptors that the program inherits. A fork inherits none.
            run: the function of a fork, whose result is passed to :func:`sys.exit`. This process must have no other
                thread.
        """
        self.log = log
        owner = os.getpid()

        def in_child() -> None:
            # A shell starts background jobs with SIGINT and SIGQUIT ignored, which children would inherit.
            for signum in (signal.SIGINT, signal.SIGQUIT, signal.SIGTERM):
                signal.signal(signum, signal.SIG_DFL)
            signal.pthread_sigmask(signal.SIG_SETMASK, ())
            _libc.prctl(_PR_SET_PDEATHSIG, int(death_signal), 0, 0, 0)
            if os.getppid() != owner:
                os._exit(1)

        log.parent.mkdir(parents=True, exist_ok=True)
        bound_log(log)
        output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        try:
            self._process: subprocess.Popen[bytes] | _Fork
            if run is not None:
                self._process = _Fork(lambda: _become(run, argv, output, environment, in_child))
            else:
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
        return self._process.pid

    @property
    def status(self) -> int | None:
        """Exit status, negative for a signal, or None while it runs."""
        return self._process.poll()

    def alive(self) -> bool:
        """Return whether the process runs."""
        return self.status is None

    def children(self) -> set[int]:
        """Return the pids of its running direct children."""
        pids: set[int] = set()
        for task in Path(f"/proc/{self.pid}/task").glob("*/children"):
            with contextlib.suppress(OSError):
                pids.update(int(pid) for pid in task.read_text().split())
        return {pid for pid in pids if running(pid)}

    def wait(self, timeout_s: float) -> bool:
        """Wait at most ``timeout_s`` seconds for its end. Return whether it has ended."""
        deadline = time.monotonic() + timeout_s
        while (alive := self.alive()) and time.monotonic() < deadline:
            time.sleep(0.02)
        return not alive

    def send(self, signum: signal.Signals) -> None:
        """Send it a signal, unless it has ended."""
        if self.alive():
            os.kill(self.pid, signum)

    def stop(self, *steps: tuple[signal.Signals, float]) -> None:
        """Send signals in turn, each with the seconds to wait afterwards, and finally SIGKILL to the process group.

        An interruption (Ctrl-C) skips the remaining steps but still kills. A process that hangs in the kernel is left
        behind.
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

    def tail(self) -> str:
        """Return the last 20 lines of its log. Empty if there is no log."""
        try:
            with self.log.open("rb") as file:
                file.seek(max(0, self.log.stat().st_size - (32 << 10)))
                text = file.read().decode(errors="replace")
        except OSError:
            return ""
        return "\n".join(text.splitlines()[-20:])

    def last_words(self) -> str:
        """Return a message with its exit status and the end of its log."""
        return f"ended with status {self.status}. The end of {self.log}:\n{self.tail()}"


class _Fork:
    """A fork of this process, with the part of :class:`subprocess.Popen`'s interface that :class:`Child` uses."""

    def __init__(self, become: Callable[[], NoReturn]) -> None:
        """Fork, and call ``become`` in the fork with all signals blocked."""
        self._status: int | None = None
        before = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        try:
            self.pid = os.fork()
            if self.pid == 0:
                become()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)

    def poll(self) -> int | None:
        if self._status is None:
            pid, status = self.pid, 0
            with contextlib.suppress(ChildProcessError):  # it was reaped, because SIGCHLD is ignored
                pid, status = os.waitpid(self.pid, os.WNOHANG)
            self._status = os.waitstatus_to_exitcode(status) if pid else None
        return self._status


def _become(
    run: Callable[[], Any], argv: Sequence[str], log: int, environment: Mapping[str, str], set_up: Callable[[], None]
) -> NoReturn:
    """Give a fork the state of a new program, call ``run``, and exit, so that the owner's frames do not continue."""
    status = 1
    try:
        os.setsid()
        for number in signal.valid_signals():
            if callable(signal.getsignal(number)):
                signal.signal(number, signal.SIG_DFL)
        for descriptor, source in enumerate((os.open(os.devnull, os.O_RDONLY), log, log)):
            os.dup2(source, descriptor)
        for descriptor in {int(entry) for entry in os.listdir("/proc/self/fd")} - {0, 1, 2}:  # noqa: PTH208
            with contextlib.suppress(OSError):  # the descriptor of listdir itself is closed
                os.close(descriptor)
        # New streams, because the old buffers can hold output of the owner.
        sys.stdin, sys.stdout = open(0, closefd=False), open(1, "w", closefd=False)  # noqa: SIM115
        sys.stderr = open(2, "w", buffering=1, errors="backslashreplace", closefd=False)  # noqa: SIM115
        os.environ.clear()
        os.environ.update(environment)
        _show(argv)
        set_up()
        signal.signal(signal.SIGINT, signal.default_int_handler)
        sys.exit(run())
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
        if isinstance(end.code, str):
            sys.stderr.write(f"{end.code}\n")
    except BaseException:  # noqa: BLE001 -- as above
        traceback.print_exc()
    finally:
        with contextlib.suppress(OSError):
            sys.stdout.flush()
        os._exit(status)


def _show(argv: Sequence[str]) -> None:
    """Set this process's command line in the process list, cut to the length of the original one."""
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    start, room = int(fields[45]), int(fields[46]) - int(fields[45])
    line = "\0".join([Path(argv[0]).name, *argv[1:]]).encode()
    if start:
        ctypes.memmove(start, line[: room - 1].ljust(room, b"\0"), room)


def bound_log(log: Path, most_bytes: int = _LOG_BYTES) -> None:
    """Rotate a log above a size: copy it to ``<name>.1`` and truncate it, so that its writer can go on appending.

    Lines written during the copy are lost.
    """
    with contextlib.suppress(OSError):
        if log.stat().st_size > most_bytes:
            before = log.with_name(log.name + ".1")
            shutil.copyfile(log, before)
            before.chmod(0o600)
            os.truncate(log, 0)


def command_line(pid: int) -> list[str]:
    """Return a process's program and arguments. Empty if it is gone."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_text().split("\0")
    except OSError:
        return []


def running(pid: int) -> bool:
    """Return whether a process with this pid runs. Zombies do not count."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return stat.rpartition(")")[2].split()[0] not in "ZX"


class Lock:
    """An exclusive lock on a directory, released when every process that inherited it has ended.

    A server inherits its owner's lock. If the owner is killed, a new owner waits until that server has shut down,
    instead of starting a second one on the same files.
    """

    def __init__(self, directory: Path, what: str) -> None:
        """Lock a directory for the use ``what``, and create it with mode 0700 if missing. Raise HomeInUse if locked."""
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
                        "stop it first, or choose another home with KQUEUE_HOME"
                    ) from None
                time.sleep(0.05)
            else:
                return

    def release(self) -> None:
        """Release the lock. Calling it twice is allowed."""
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


def socket_directory(directory: Path, socket: str) -> Path:
    """Create a directory (mode 0700) for the unix socket named ``socket``, and return its path.

    The path is ``directory/run``. If that is too long for a socket, or has characters that are special in URLs or in a
    server's settings, the path is a short one in the temporary directory, the same at every start.
    """
    path = directory / "run"
    if len(os.fsencode(path / socket)) > _SOCKET_PATH_BYTES or not re.fullmatch(r"/[A-Za-z0-9_./+-]*", str(path)):
        digest = hashlib.sha256(os.fsencode(directory)).hexdigest()[:16]
        base = Path(tempfile.gettempdir())
        if len(os.fsencode(base)) > 40 or not re.fullmatch(r"/[A-Za-z0-9_./+-]*", str(base)):
            base = Path("/tmp")  # noqa: S108 the directory made in it is checked below
        path = base / f"kqueue-{os.getuid()}-{digest}"
    path.mkdir(mode=0o700, exist_ok=True)
    status = path.lstat()
    if path.is_symlink() or not path.is_dir() or status.st_uid != os.getuid():
        raise LocalFleetError(f"{path} belongs to another user: remove it, or choose a home with a shorter path")
    path.chmod(0o700)
    return path


def drop_socket_directory(path: Path, directory: Path) -> None:
    """Remove a path from :func:`socket_directory` if it is outside of ``directory``."""
    if path != directory / "run":
        shutil.rmtree(path, ignore_errors=True)


def wait_until_ready(child: Child, what: str, ready: Callable[[], bool], timeout_s: float) -> None:
    """Call ``ready`` every hundredth of a second until it returns True, for at most ``timeout_s`` seconds."""
    deadline = time.monotonic() + timeout_s
    while not ready():
        if not child.alive():
            raise LocalFleetError(f"{what} {child.last_words()}")
        if time.monotonic() > deadline:
            raise LocalFleetError(
                f"{what} did not become ready in {timeout_s:.0f} s. The end of {child.log}:\n{child.tail()}"
            )
        time.sleep(0.01)
