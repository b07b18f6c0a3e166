"""``python -m workers.judge``: judge for another process, which starts this one and talks to it over pipes.

:class:`kqueue.judging.LocalJudge` is the other side. Each message is a JSON object on a line of its own. The first line
of input is a :class:`~kqueue.judging.Start`. The first line of output is ``{"ready": ...}``, a
:class:`~kqueue.judging.Machine`. Then each line of input is a :class:`~kqueue.contract.Request`, and each is answered
in turn by ``{"outcome": ..., "doubts": [...]}``. If this machine cannot judge, the answer is ``{"error": ...}``, and
the process ends with status 1.

The process ends when its input ends, on SIGTERM and SIGINT, and when its parent dies. It leaves no process and no file.
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
from workers.judge.gpu.devices import choose, devices
from workers.judge.host import linux, scratch, uids
from workers.judge.sandbox import cgroups
from workers.judge.slot_config import SlotConfig, set_environment

if TYPE_CHECKING:
    from workers.judge.api import Judges

#: Seconds that killed processes may take to die, and files to be removed, at the end.
_CLEANUP_S: Final = 10.0
#: Seconds between two looks at whether this process was told to end.
_LOOK_S: Final = 0.5


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
            _tell(answers, {"ready": service.machine.model_dump(mode="json")})
            for line in requests:
                _tell(answers, service.judge(Request.model_validate_json(line)))
    except (KqueueError, handle.ForkServerError, OSError) as error:
        with contextlib.suppress(OSError):  # the parent is gone
            _tell(answers, {"error": str(error)})
        return 1
    return 0


class _Service:
    """A judge at a place of its own, with its fork server. Use it as a context manager."""

    def __init__(self, start: Start, ending: _Ending) -> None:
        """Configure it without starting anything."""
        self._start = start
        self._ending = ending
        self._stack = ExitStack()
        self._backend = InMemoryBackend()
        self._slot: SlotConfig
        self._judges: Judges
        self.machine: Machine

    def __enter__(self) -> Self:
        """Start the fork server, and load the judge beside it.

        Raises:
            ConfigError: there is no such device, or the scratch directory belongs to another user.
            KqueueError: this machine lacks what a judge needs.
            ForkServerError: the fork server does not start, or candidates cannot be isolated as far as required.
        """
        with ExitStack() as stack:
            # A process that outlives its parent becomes a child of this one.
            linux.prctl(linux.PR_SET_CHILD_SUBREAPER, 1)
            self._slot = stack.enter_context(_open_slot(self._start))
            stack.callback(_kill_children)
            set_environment(os.environ, self._slot, len(os.sched_getaffinity(0)))
            forkserver = handle.start(self._slot)
            stack.callback(forkserver.stop)
            stack.callback(self._ending.hold)  # the first to be called: nothing interrupts the others
            with self._ending:
                self._load()
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
        """Judge a request, again if the machine failed, and return the answer to the parent."""
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
            linux.sweep(set())  # what a seat leaves that is killed becomes this process's child
            self._judges = api.Judges(handle.start(self._slot))
            self._judges.wait_ready(self._start.isolation)
        try:
            return self._judges.judge(request, self._slot, self._backend)
        except deaths.JudgeDied as died:
            return died.outcome

    def _load(self) -> None:
        """Import the judge, and torch with it, before anything is forked.

        Raises:
            ConfigError: the device is a GPU, and torch has no CUDA.
        """
        import torch

        from workers.judge import supervisor

        assert supervisor
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
    """Give the judge a device, a private directory and a uid for candidates, until the block ends.

    Raises:
        ConfigError: there is no such device, or the scratch directory belongs to another user.
    """
    device = _device(start)
    root = Path(start.scratch)
    scratch.prepare(root)
    directory, lock = scratch.reserve(root, "judge")
    uid = uids.hold(start.candidate_uid) if os.geteuid() == 0 else None
    try:
        _empty(directory)  # an earlier judge was killed here
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
        )
    finally:
        _empty(directory)
        with contextlib.suppress(OSError):
            directory.rmdir()
        os.close(lock)
        if uid is not None:
            uid.release()


def _device(start: Start) -> str:
    """Return a GPU's UUID, or ``cpu``.

    Raises:
        ConfigError: the device that was asked for is not there.
    """
    if start.device == "cpu":
        return "cpu"
    found = devices()
    if start.device is not None:
        return choose(start.device, found, setting="device")[0].uuid
    gpus = choose(start.gpus, found, os.environ.get("CUDA_VISIBLE_DEVICES"))
    return gpus[0].uuid if gpus else "cpu"


def _empty(directory: Path) -> None:
    for path in directory.iterdir():
        linux.start_removal(path).wait(_CLEANUP_S)


def _take_pipes() -> tuple[IO[bytes], IO[bytes]]:
    """Move the pipes to the parent away from standard input and output, where child processes would inherit them."""
    requests, answers = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    with open(os.devnull, "rb") as nothing:  # noqa: PTH123
        os.dup2(nothing.fileno(), 0)
    os.dup2(2, 1)
    return requests, answers


def _tell(answers: IO[bytes], message: dict[str, Any]) -> None:
    answers.write(json.dumps(message).encode() + b"\n")
    answers.flush()


class _Ending:
    """Ends this process when it is told to, and when its parent is gone: only in ``with`` blocks, so that it cleans up.

    In a block it raises :class:`SystemExit` at once, and again until the block is left: Python discards exceptions in
    some places, such as a fork's callbacks. Outside it waits for the next block.

    In a block a timer interrupts every system call twice a second. A signal that comes just before a call blocks does
    not wake it, and Python runs no handler until something does.
    """

    def __init__(self, parent: int) -> None:
        """Listen from now on to signals and for the death of ``parent``."""
        self._parent = parent
        self._interruptible = False
        self._status: int | None = None
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._told)
        signal.signal(signal.SIGUSR1, self._look)
        signal.signal(signal.SIGALRM, self._again)
        linux.prctl(linux.PR_SET_PDEATHSIG, signal.SIGUSR1)
        self._look(signal.SIGUSR1, None)  # it may have died before

    def __enter__(self) -> None:
        self._interruptible = True
        signal.setitimer(signal.ITIMER_REAL, _LOOK_S, _LOOK_S)
        self._end()

    def __exit__(self, *_: object) -> None:
        self.hold()

    def hold(self) -> None:
        """Raise nothing until the next block. A block that could not be entered needs this."""
        self._interruptible = False
        signal.setitimer(signal.ITIMER_REAL, 0)

    def _told(self, number: int, _frame: object) -> None:
        if self._status is None:
            self._status = 128 + number
            self._end()

    def _look(self, number: int, frame: object) -> None:
        # The kernel also sends this when the thread that started this process ends, and others of the parent go on.
        if os.getppid() != self._parent:
            self._told(number, frame)

    def _again(self, _number: int, _frame: object) -> None:
        self._end()

    def _end(self) -> None:
        if self._interruptible and self._status is not None:
            sys.exit(self._status)


def _kill_children() -> None:
    """Kill what is left, within a bounded time, and remove the control groups of a fork server that was killed."""
    deadline = time.monotonic() + _CLEANUP_S
    while not linux.sweep(set()) and time.monotonic() < deadline:
        time.sleep(0.01)
    cgroups.clean()


if __name__ == "__main__":
    sys.exit(main())
