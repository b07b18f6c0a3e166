"""``python -m workers.fleet``: the supervisor, which keeps one worker process running for each slot of this host.

The supervisor judges nothing. It finds the GPUs and starts a Celery worker for each slot, pinned to its GPU's UUID. It
lets a worker take messages once the worker's row is in the database, and renews its lease. When a worker dies, it
queues the worker's evaluation again and starts another worker. It also sweeps overdue leases, expired waits, and
evaluations whose messages Redis lost.

A worker pauses while its GPU must not be used (:mod:`workers.monitor`), while the host is short of memory or disk
(:class:`workers.monitor.Pressure`), and while a killed process in its slot does not die. A CPU worker also pauses after
wrongly judged probes until an operator resumes it. A paused worker finishes its evaluation, and its row has the reason.

At SIGTERM, workers finish their evaluations, then everything ends. At a second SIGTERM, SIGINT or SIGHUP, workers that
judge are killed and their evaluations are queued again, while idle workers end by themselves. Workers die with the
supervisor.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import socket
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final
from uuid import UUID

import structlog

from kqueue import logs
from kqueue.config import Config, load
from kqueue.errors import KqueueError
from kqueue.signals import ending
from workers.bookkeeping import Bookkeeping
from workers.exporter import Exporter
from workers.judge.deaths import describe
from workers.judge.gpu.devices import Device, choose, devices
from workers.judge.host import holders, linux
from workers.judge.sandbox import cgroups
from workers.monitor import Monitor, Pressure
from workers.plan import Scratch, plan
from workers.pool import STUCK_S
from workers.process import WorkerProcess
from workers.slot import Slot

_log: Any = structlog.get_logger(__name__)

#: Seconds between checks of the host's memory and disk and of the GPUs, and between writes of the reasons for pauses,
#: which another program can have changed.
_LOOK_EVERY_S: Final = 1.0
#: Seconds that workers wait for a device of another fleet before the log mentions it.
_QUEUE_S: Final = 5.0
#: Seconds after which a worker that is not ready is replaced. On a busy host, importing torch alone takes a minute.
_READY_S: Final = 600.0
#: Number of attempts after which a supervisor ends if no worker has ever become ready.
_TRIES: Final = 3
#: Seconds for idle workers to end during a quick stop before they are killed too.
_IDLE_END_S: Final = 5.0


@dataclass(slots=True)
class _Stop:
    """The state of the requests to stop."""

    warm: bool = False
    """Workers finish their evaluations."""
    quick: bool = False
    """Workers that judge are killed."""
    sent: bool = False
    """The workers have got the request to finish."""
    asked_at: float = 0.0
    """Monotonic time of the last request."""

    def on_signal(self, number: int, _frame: object) -> None:
        self.quick = self.quick or self.warm or number != signal.SIGTERM
        self.warm = True
        self.asked_at = time.monotonic()


class Supervisor:
    """The supervisor of a host's workers. :meth:`run` returns when all of them have ended."""

    def __init__(
        self,
        config: Config,
        slots: Sequence[Slot],
        gpus: Sequence[Device] = (),
        *,
        program: str = "workers.start",
        self_test: str = "workers.judge.gpu.self_test",
        patience_s: float = _READY_S,
    ) -> None:
        """Configure a supervisor without starting anything.

        Args:
            config, slots, gpus: the settings, and the plan from :func:`workers.plan.plan`.
            program: the module that a worker process runs.
            self_test: the module that tests a GPU.
            patience_s: seconds for a worker to become ready.
        """
        self._patience_s = patience_s
        self._config = config
        self._program = program
        self._host = socket.gethostname()
        self._cores = _cores()
        self._selector = selectors.DefaultSelector()
        self._books = Bookkeeping(config, self._host, self._selector)
        self._workers = [WorkerProcess(slot, self._selector) for slot in slots]
        locks = {slot.device: slot.lock for slot in slots}
        ledgers = {slot.device: slot.ledger for slot in slots}
        self._monitor = Monitor(self._books.engine, self._host, gpus, locks, ledgers, self_test=self_test)
        self._pressure = Pressure(config)
        self._scratch = Scratch(config.scratch)
        self._exporter = Exporter(config)
        self._look_at = 0.0
        #: True once a worker was ready. Before that, nothing is known to work here.
        self._served = False
        #: Reason for a pause of the CPU slots because of wrongly judged probes, or None.
        self._held: str | None = None
        #: Devices that other fleets hold while workers wait, with the monotonic time and the last logged holder.
        self._waits: dict[str, tuple[float, str]] = {}
        #: The workers that wait for such a device, with its holder as last written.
        self._kept: dict[UUID, str] = {}
        #: The attempts that ran at the last check, and their steps as last written.
        self._running: set[tuple[UUID, int]] = set()
        self._steps: dict[tuple[UUID, int], str | None] = {}
        #: The reasons for pauses as last written.
        self._written: dict[UUID, str | None] = {}
        self._stop = _Stop()
        #: The workers that judged nothing at the request for a quick stop. None before that request.
        self._idle: set[UUID] | None = None

    def check_services(self) -> None:
        """Check Postgres, its schema and Redis (:meth:`Bookkeeping.check_services`)."""
        self._books.check_services()

    def run(self) -> None:
        """Keep the workers running until a signal requests a stop."""
        linux.prctl(linux.PR_SET_CHILD_SUBREAPER, 1)
        wake, waker = socket.socketpair()
        wake.setblocking(False)
        waker.setblocking(False)
        self._selector.register(wake, selectors.EVENT_READ, None)
        before = signal.set_wakeup_fd(waker.fileno(), warn_on_full_buffer=False)
        handlers: dict[int, Any] = {number: signal.signal(number, self._stop.on_signal) for number in ending()}
        handlers[signal.SIGCHLD] = signal.signal(signal.SIGCHLD, _wake_up)
        try:
            slots = self._scratch.assign([worker.slot for worker in self._workers])
            for worker, slot in zip(self._workers, slots, strict=True):
                worker.slot = slot
            while not (self._stop.warm and self._books.settled and all(one.process is None for one in self._workers)):
                self._step()
                for key, _ in self._selector.select(self._pause_s()):
                    if key.data is None:
                        wake.recv(4096)
                    else:
                        key.data.hear()
        finally:
            self._kill_all()
            cgroups.clean()
            for number, handler in handlers.items():
                signal.signal(number, handler)
            signal.set_wakeup_fd(before)
            self._selector.close()
            self._scratch.release()
            wake.close()
            waker.close()
            self._books.close()

    def _pause_s(self) -> float:
        """Return the seconds until something is due. Signals, deaths and workers' messages end the pause early."""
        now = time.monotonic()
        due = [self._books.due_at, self._look_at]
        due += [worker.start_at for worker in self._workers if worker.process is None and not self._stop.warm]
        return min(1.0, max(0.01, min(due) - now))

    def _step(self) -> None:
        now = time.monotonic()
        self._scratch.reap()
        self._exporter.step(now)
        for worker in self._workers:
            if (code := worker.returncode(now)) is not None:
                self._clean_up(worker, code)
            elif worker.overdue(now, self._patience_s) and not worker.killed_at:
                _log.error("a worker has not become ready: it is replaced", slot=worker.slot.name, pid=worker.pid)
                worker.kill()
            self._check_survivors(worker, now)
        resets = self._monitor.resets()
        if self._stop.warm:
            self._end_workers()
        else:
            if not self._served and all(worker.failed >= _TRIES for worker in self._workers):
                raise KqueueError(f"no worker has become ready in {_TRIES} attempts: the messages above say why")
            for uuid in resets:
                self._reset(uuid)
            for worker in self._workers:
                idle = worker.process is None and not worker.survivors and now >= worker.start_at
                if idle and worker.slot.device not in resets:
                    self._start(worker)
        self._books.settle(stopping=self._stop.warm, at_once=self._stop.quick)
        looking = now >= self._look_at
        if looking:
            self._look_at = now + _LOOK_EVERY_S
            self._pressure.look()
            self._held = self._books.held() if any(worker.slot.device == "cpu" for worker in self._workers) else None
            self._monitor.step(self._books.attempt)
            self._look_at_locks(now)
            self._look_at_steps()
        self._admit()
        self._write_pauses(again=looking)
        self._books.step([worker.slot.worker_id for worker in self._workers if worker.registered or worker.stuck])

    def _start(self, worker: WorkerProcess) -> None:
        """Start a worker. Try again later if that fails, as with a full disk or too many processes."""
        try:
            self._scratch.renew(worker.slot.scratch)
            worker.start(self._config, program=self._program, host=self._host, cores=self._cores)
        except OSError as error:
            _log.error("a worker cannot be started now", slot=worker.slot.name, reason=str(error))
            worker.postpone()

    def _reason(self, worker: WorkerProcess) -> str | None:
        """Return the reason why a slot must take no evaluations, or None."""
        held = self._held if worker.slot.device == "cpu" else self._monitor.pauses(worker.slot.device)
        return worker.stuck or self._pressure.reason or held

    def _admit(self) -> None:
        """Register the workers that are ready, and order them to take messages or to pause."""
        for worker in self._workers:
            if not worker.waits:
                continue
            reason = self._reason(worker)
            if self._books.register(worker.slot, worker.pid, reason):
                worker.registered = self._served = True
                worker.tell(reason)
                _log.info("worker ready", slot=worker.slot.name, lanes=",".join(worker.slot.lanes), paused=reason)

    def _write_pauses(self, *, again: bool) -> None:
        """Write the reasons for pauses if they have changed or ``again`` is set, then send the workers their orders."""
        present = [w for w in self._workers if w.registered or (w.stuck and w.process is None)]
        wanted = {worker.slot.worker_id: self._reason(worker) for worker in present}
        if not wanted or (wanted == self._written and not again):
            return
        # The database comes first, so that it refuses the claim of a worker that has not got its order yet.
        if not self._books.pause(wanted):
            return
        for worker in present:
            was, reason = self._written.get(worker.slot.worker_id), wanted[worker.slot.worker_id]
            if was != reason and worker.process is not None:
                event = "worker pauses" if reason else "worker goes on"
                _log.info(event, slot=worker.slot.name, reason=reason or was)
            worker.tell(reason)
        self._written = wanted

    def _look_at_locks(self, now: float) -> None:
        """Write to workers' rows which other fleet or local judge of this user holds the device they wait for."""
        kept: dict[UUID, str] = {}
        for device, lock in {worker.slot.device: worker.slot.lock for worker in self._workers}.items():
            holder = holders.stranger(lock)
            if holder is None or not holder.keeps_waiting:
                self._waits.pop(device, None)
                continue
            for worker in self._workers:
                if any(linux.descends(pid, worker.pid) for pid in holder.keeps_waiting):
                    kept[worker.slot.worker_id] = holder.words
            since, logged = self._waits.setdefault(device, (now, ""))
            if now - since >= _QUEUE_S and holder.words != logged:
                _log.warning(
                    "evaluations wait for a device that another fleet uses", device=device, used_by=holder.words
                )
                self._waits[device] = since, holder.words
        changed: dict[UUID, str | None] = {**dict.fromkeys(self._kept), **kept}
        if kept != self._kept and self._books.wait_for_device(changed):
            self._kept = kept

    def _look_at_steps(self) -> None:
        """Write the current steps of attempts that ran at the last check. Shorter attempts are not worth a write."""
        pages = [worker.status_page for worker in self._workers if worker.status_page is not None]
        steps = {(record.evaluation_id, record.number): record.step for page in pages for record in page.read()}
        changed = {
            attempt: step
            for attempt, step in steps.items()
            if attempt in self._running and step != self._steps.get(attempt)
        }
        self._running = set(steps)
        if not changed or self._books.note_steps(changed):
            self._steps = {attempt: step for attempt, step in (self._steps | changed).items() if attempt in steps}

    def _clean_up(self, worker: WorkerProcess, returncode: int) -> None:
        """Clean up after a worker that has ended: kill the processes that it left, and queue its evaluation again."""
        how = describe(returncode)
        (_log.info if self._stop.warm else _log.warning)("worker ended", slot=worker.slot.name, how=how)
        if worker.registered:
            message = f"the worker {worker.slot.name} {how}"
            self._books.lose(worker.slot.worker_id, message, handed_back=worker.killed_at > 0)
        worker.close()
        # A sweep must not kill children in use. Killed ones that do not die are left.
        spared = {worker.process.pid for worker in self._workers if worker.process is not None}
        spared |= self._scratch.pids() | self._monitor.pids() | self._exporter.pids()
        spared = spared.union(*(worker.survivors for worker in self._workers))
        if not linux.sweep(spared):
            worker.survivors, worker.survived_at = {*linux.children(os.getpid())} - spared, time.monotonic()

    def _reset(self, uuid: str) -> None:
        """Kill a GPU's workers with everything that they started. Their evaluations are handed back."""
        mine = [worker for worker in self._workers if worker.slot.device == uuid]
        for worker in mine:
            if worker.process is not None and not worker.killed_at:
                _log.info("worker ended for a reset of its GPU", slot=worker.slot.name)
                worker.kill()
        if not any(worker.process is not None for worker in mine):
            self._monitor.ended(uuid, self._books.attempt)

    def _check_survivors(self, worker: WorkerProcess, now: float) -> None:
        """Close a slot while a process that was killed in it exists, because it can hold the GPU and has the uid."""
        if not worker.survivors:
            return
        worker.survivors = {pid for pid in worker.survivors if not _reaped(pid)}
        if not worker.survivors and worker.stuck:
            _log.info("a slot is free again", slot=worker.slot.name)
            self._books.lose(worker.slot.worker_id, "the slot is free again")
            worker.stuck, worker.start_at = None, now
        elif worker.survivors and not worker.stuck and now - worker.survived_at > STUCK_S:
            reason = f"killed processes do not die: {', '.join(map(str, sorted(worker.survivors)))}"
            if self._books.register(worker.slot, worker.pid, reason):
                worker.stuck = reason
                _log.error("a slot is stuck", slot=worker.slot.name, reason=reason)

    def _end_workers(self) -> None:
        """Order all workers to finish. For a quick stop, kill those that judge, and later the idle ones."""
        if not self._stop.sent:
            for worker in self._workers:
                worker.finish()
            self._stop.sent = True
        if self._stop.quick:
            if self._idle is None:
                self._idle = self._books.idle()
            overdue = time.monotonic() > self._stop.asked_at + _IDLE_END_S
            for worker in self._workers:
                if overdue or worker.slot.worker_id not in self._idle:
                    worker.kill()

    def _kill_all(self) -> None:
        """Kill all remaining processes and wait until they have died, for at most ``STUCK_S`` seconds."""
        self._monitor.stop()
        for worker in self._workers:
            worker.kill()
        self._exporter.stop()
        deadline = time.monotonic() + STUCK_S
        while not linux.sweep(set()) and time.monotonic() < deadline:
            time.sleep(0.02)
        if left := linux.children(os.getpid()):
            _log.error("processes do not die and are left behind", pids=left)


def _reaped(pid: int) -> bool:
    """Return whether a child is gone. Another part of this process can have reaped it."""
    with contextlib.suppress(ChildProcessError):
        return os.waitpid(pid, os.WNOHANG)[0] == pid
    return True


def _wake_up(_number: int, _frame: object) -> None:
    """Do nothing: any handler of SIGCHLD makes Python write to the wake-up descriptor."""


def main() -> int:
    """Run this host's fleet with the environment's settings. Return exit status 3 if it cannot start."""
    try:
        config = load()
        logs.configure(config)
        found = devices()
        gpus = choose(config.gpus, found, os.environ.get("CUDA_VISIBLE_DEVICES"))
        slots = plan(config, gpus, _cores())
        supervisor = Supervisor(config, slots, gpus)
        supervisor.check_services()
        _log.info("fleet starts", slots=[slot.name for slot in slots], gpus=[gpu.name for gpu in found])
        supervisor.run()
    except KqueueError as error:
        print(f"kqueue: {error}", file=sys.stderr)  # noqa: T201
        return 3
    return 0


def _cores() -> int:
    return len(os.sched_getaffinity(0))


if __name__ == "__main__":
    sys.exit(main())
