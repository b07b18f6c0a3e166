"""``python -m workers.judge``: judge requests of the parent process, which arrive over pipes.

:class:`kqueue.judging.LocalJudge` is the parent's side. Each message is one line with a JSON object. The first line of
input is a :class:`~kqueue.judging.Start`. The first line of output is ``{"ready": ...}`` with a
:class:`~kqueue.judging.Machine`. Each further line of input is a :class:`~kqueue.contract.Request`, and each is
answered in turn by ``{"outcome": ..., "doubts": [...]}``. If this machine cannot judge, the answer is
``{"error": ...}``, and the process exits with status 1.

The process exits when its input ends, on SIGTERM and SIGINT, and when its parent dies. It ends all its child processes
and removes all its files.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import signal
import sys
import time
from collections.abc import Generator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Final, Self

from kqueue.contract import Outcome, Request
from kqueue.errors import ConfigError, JudgeUnavailable, KqueueError
from kqueue.evidence import Environment
from kqueue.judging import Machine, Start
from workers.judge import api, deaths
from workers.judge.backend import InMemoryBackend
from workers.judge.forkserver import handle
from workers.judge.forkserver.orphans import kill_leftovers
from workers.judge.gpu.devices import choose, devices
from workers.judge.host import linux, scratch, uids
from workers.judge.sandbox import cgroups
from workers.judge.slot_config import SlotConfig, set_environment

if TYPE_CHECKING:
    from workers.judge.api import Judges

#: Time limit in seconds at the end for killed processes to exit, and for the removal of files.
_CLEANUP_S: Final = 10.0
#: Seconds between two checks for a request to exit.
_CHECK_S: Final = 0.5


def main() -> int:
    """Serve the parent process, and return the exit status."""
    requests, answers = _take_pipes()
    line = requests.readline()
    if not line:
        return 0
    start = Start.model_validate_json(line)
    ending = _Ending(start.parent)
    try:
        if importlib.util.find_spec("torch") is None:
            raise JudgeUnavailable(f"torch is not installed for {sys.executable}: pip install 'kqueue[worker]'")
        with _Service(start, ending) as service, ending:
            _send(answers, {"ready": service.machine.model_dump(mode="json")})
            for line in requests:
                _send(answers, service.judge(Request.model_validate_json(line)))
    except (KqueueError, handle.ForkServerError, OSError) as error:
        with contextlib.suppress(OSError):  # the parent is gone
            _send(answers, {"error": str(error)})
        return 1
    return 0


class _Service:
    """A judge in a new slot, with its fork server. Use it as a context manager."""

    def __init__(self, start: Start, ending: _Ending) -> None:
        self._start = start
        self._ending = ending
        self._stack = ExitStack()
        self._backend = InMemoryBackend()
        self._slot: SlotConfig
        self._judges: Judges
        self.machine: Machine

    def __enter__(self) -> Self:
        """Import the judge, and fork the fork server.

        Raises:
            ConfigError: there is no such device, or the scratch directory belongs to another user.
            KqueueError: this machine does not meet a judge's requirements.
            ForkServerError: the fork server does not start, or candidates cannot be isolated to the required level.
        """
        with ExitStack() as stack:
            # Orphaned descendants become children of this process, so that it can end them.
            linux.prctl(linux.PR_SET_CHILD_SUBREAPER, 1)
            self._slot = stack.enter_context(_open_slot(self._start))
            stack.callback(_kill_children)
            set_environment(os.environ, self._slot, len(os.sched_getaffinity(0)))
            kill_leftovers(self._slot.uid)
            stack.callback(self._ending.hold)  # is called first, so that no signal interrupts the other callbacks
            with self._ending:
                self._load()
            forkserver = handle.fork(self._slot)
            stack.callback(forkserver.stop)
            stack.callback(self._ending.hold)
            self._judges = api.Judges(forkserver)
            stack.callback(lambda: self._judges.stop())
            stack.callback(self._ending.hold)
            with self._ending:
                self._judges.wait_ready(self._start.isolation)
            self.machine = self._describe()
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        """End all processes that this one started, and remove their files."""
        self._stack.close()

    def judge(self, request: Request) -> dict[str, Any]:
        """Judge a request, with further attempts if the machine fails, and return the answer to the parent."""
        outcome = self._attempt(request)
        for _ in range(1, request.settings.max_attempts):
            if not outcome.category.info.retried:
                break
            outcome = self._attempt(request)
        doubts = [reason for _, reason in self._backend.doubts]
        self._backend.doubts.clear()
        return {"outcome": outcome.model_dump(mode="json"), "doubts": doubts}

    def _attempt(self, request: Request) -> Outcome:
        if not self._judges.alive():
            self._judges.stop()
            linux.sweep(set())  # the children of a killed judge supervisor are now this process's children
            self._judges = api.Judges(handle.start(self._slot))
            self._judges.wait_ready(self._start.isolation)
        try:
            return self._judges.judge(request, self._slot, self._backend)
        except deaths.JudgeDied as died:
            return died.outcome

    def _load(self) -> None:
        """Import the judge and torch before any fork. Raise ConfigError for a GPU if torch is built without CUDA."""
        import torch

        from workers.judge.candidate import harness

        importlib.import_module("workers.judge.supervisor")
        harness.preload()
        if self._slot.on_gpu and torch.version.cuda is None:
            raise ConfigError(
                f"this torch ({torch.__version__}) is built without CUDA, so it cannot judge on {self._slot.device}:"
                " install a torch with CUDA, or choose the device cpu"
            )

    def _describe(self) -> Machine:
        from workers.judge.gpu import environment

        return Machine(
            device=self._slot.device,
            isolation=self._judges.forkserver.isolation["level"],
            environment=Environment.model_validate(environment.facts(self._slot)),
        )


@contextmanager
def _open_slot(start: Start) -> Generator[SlotConfig]:
    """Reserve a device, a private directory and a uid for candidates during the block."""
    device, peers = _devices(start)
    root = Path(start.scratch)
    scratch.prepare(root)
    directory, lock = scratch.reserve(root, "judge")
    uid = uids.hold(start.candidate_uid) if os.geteuid() == 0 else None
    try:
        _empty(directory)  # an earlier judge that was killed can have left files
        yield SlotConfig(
            name=directory.name,
            number=0,
            device=device,
            siblings=1,
            scratch=directory / "place",
            lock=scratch.device_lock(root, device),
            uid=None if uid is None else uid.uid,
            gpu_shared=start.gpu_shared,
            build_store=start.build_store,
            build_store_bytes=start.build_store_bytes,
            peers=peers,
        )
    finally:
        _empty(directory)
        with contextlib.suppress(OSError):
            directory.rmdir()
        os.close(lock)
        if uid is not None:
            uid.release()


def _devices(start: Start) -> tuple[str, tuple[str, ...]]:
    """Return the device, a UUID or ``cpu``, and other GPUs' UUIDs. Raise ConfigError if there is no such device."""
    if start.device == "cpu":
        return "cpu", ()
    available = devices()
    gpus = [gpu.uuid for gpu in choose(start.gpus, available, os.environ.get("CUDA_VISIBLE_DEVICES"))]
    if start.device is not None:
        gpus = [choose(start.device, available, setting="device")[0].uuid, *gpus]
    return (gpus[0], tuple(uuid for uuid in gpus[1:] if uuid != gpus[0])) if gpus else ("cpu", ())


def _empty(directory: Path) -> None:
    for path in directory.iterdir():
        linux.start_removal(path).wait(_CLEANUP_S)


def _take_pipes() -> tuple[IO[bytes], IO[bytes]]:
    """Move the parent's pipes away from standard input and output, because child processes inherit these."""
    requests, answers = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    with open(os.devnull, "rb") as nothing:  # noqa: PTH123
        os.dup2(nothing.fileno(), 0)
    os.dup2(2, 1)
    return requests, answers


def _send(answers: IO[bytes], message: dict[str, Any]) -> None:
    answers.write(json.dumps(message).encode() + b"\n")
    answers.flush()


class _Ending:
    """Exits this process on SIGTERM and SIGINT and when its parent dies, but only in ``with`` blocks.

    In a block it raises :class:`SystemExit` at once, and repeatedly until the block ends, because Python discards
    exceptions in some places, such as a fork's callbacks. Outside a block the exit is delayed until the next block, so
    that cleanup is complete.

    In a block a timer interrupts every system call twice a second. A signal that comes just before a call blocks does
    not wake it, and Python runs no handler until the call returns.
    """

    def __init__(self, parent: int) -> None:
        """Install the signal handlers, and request a signal for the death of ``parent``."""
        self._parent = parent
        self._interruptible = False
        self._status: int | None = None
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._request)
        signal.signal(signal.SIGUSR1, self._check_parent)
        signal.signal(signal.SIGALRM, self._repeat)
        linux.prctl(linux.PR_SET_PDEATHSIG, signal.SIGUSR1)
        self._check_parent(signal.SIGUSR1, None)  # the parent can have died before

    def __enter__(self) -> None:
        self._interruptible = True
        signal.setitimer(signal.ITIMER_REAL, _CHECK_S, _CHECK_S)
        self._end()

    def __exit__(self, *_: object) -> None:
        self.hold()

    def hold(self) -> None:
        """Raise nothing until the next block. Call this also after a block whose entry raised."""
        self._interruptible = False
        signal.setitimer(signal.ITIMER_REAL, 0)

    def _request(self, number: int, _frame: object) -> None:
        if self._status is None:
            self._status = 128 + number
            self._end()

    def _check_parent(self, number: int, frame: object) -> None:
        # Linux also sends this signal when only the parent's thread that started this process ends.
        if os.getppid() != self._parent:
            self._request(number, frame)

    def _repeat(self, _number: int, _frame: object) -> None:
        self._end()

    def _end(self) -> None:
        if self._interruptible and self._status is not None:
            sys.exit(self._status)


def _kill_children() -> None:
    """Kill remaining child processes within a bounded time, and remove the control groups of a killed fork server."""
    deadline = time.monotonic() + _CLEANUP_S
    while not linux.sweep(set()) and time.monotonic() < deadline:
        time.sleep(0.01)
    cgroups.clean()


if __name__ == "__main__":
    sys.exit(main())
