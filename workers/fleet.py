"""``python -m workers.fleet``: one worker process for each slot of this host, kept alive.

The supervisor judges nothing. It finds the GPUs, starts a Celery worker for each slot pinned to its GPU's
UUID, lets it in once its row is in the database, keeps its leases, hands back what it held when it dies,
and starts another. It also sweeps: overdue leases, waits that ended, messages that Redis lost.

It has workers pause while their GPU may not be used (:mod:`workers.monitor`), while the host is short of
room (:mod:`workers.pressure`), and while something that was killed in their slot does not die. A paused worker
ends what it runs, and its row says why it takes no more.

SIGTERM: workers finish what they run, then all end. SIGTERM again, or SIGINT: workers are killed and what
they ran is queued again. Without the supervisor no worker lives on.
"""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import json
import os
import selectors
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Final
from uuid import UUID, uuid4

import structlog

from kqueue import broker, logs, sweeper
from kqueue.config import Config, load
from kqueue.errors import BrokerUnavailable, ConfigError, DatabaseUnavailable, KqueueError, SchemaMismatch
from kqueue.store import engine as store_engine
from kqueue.store import evaluations, schema
from kqueue.store import workers as registry
from workers.judge.deaths import describe
from workers.judge.gpu.devices import Device, choose, devices
from workers.judge.host import linux, uids
from workers.judge.keeper import handle as launch
from workers.judge.sandbox import cgroups
from workers.monitor import Monitor
from workers.pool import STUCK_S, kill_group, sweep
from workers.pressure import Pressure
from workers.slot import GO, PAUSE, READY, READY_VARIABLE, SETTINGS_VARIABLE, STUCK, VARIABLE, Slot

_log: Any = structlog.get_logger(__name__)

#: CPU slots where none are asked for and there is no GPU: one a core, at most these.
_MOST_CPU_SLOTS: Final = 8
_SWEEP_EVERY_S: Final = 1.0
#: While every evaluation has its verdict.
_SWEEP_IDLE_S: Final = 3.0
#: After a service was found away.
_SWEEP_AGAIN_S: Final = 3.0
#: Between looks at the host's room, and at rows of workers that somebody else may have paused.
_LOOK_EVERY_S: Final = 1.0
_FIRST_BACKOFF_S: Final = 1.0
_LAST_BACKOFF_S: Final = 30.0
#: A worker that lived as long starts again without delay.
_HEALTHY_S: Final = 60.0
#: How long a quick stop tries to hand evaluations back.
_HAND_BACK_S: Final = 5.0
#: How directories are named that are only to be removed.
_TRASH: Final = "trash-"
#: How long services may take to answer at the start.
_SERVICES_S: Final = 10.0


def plan(config: Config, gpus: list[Device], cores: int) -> list[Slot]:
    """The slots of this host, numbered from 0; their ``worker_id`` is set at each start.

    Raises:
        ConfigError: there would be none.
    """
    scratch = config.scratch.absolute()
    slots: list[Slot] = []

    def add(name: str, device: str, lanes: tuple[str, ...], siblings: int) -> None:
        number = len(slots)
        slots.append(
            Slot(
                worker_id=UUID(int=0),
                name=name,
                number=number,
                device=device,
                lanes=lanes,
                siblings=siblings,
                scratch=scratch / name,
                lock=scratch / "locks" / f"{device}.lock",
                uid=config.candidate_uid + number if os.geteuid() == 0 else None,
            )
        )

    for gpu in gpus:
        for i in range(config.slots_per_gpu):
            add(f"gpu{gpu.index}-{i}", gpu.uuid, ("gpu", f"gpu.{gpu.model}"), config.slots_per_gpu)
    cpu_slots = config.cpu_slots
    if cpu_slots is None:
        cpu_slots = 0 if gpus else min(cores, _MOST_CPU_SLOTS)
    for i in range(cpu_slots):
        add(f"cpu-{i}", "cpu", ("cpu",), cpu_slots)
    if not slots:
        raise ConfigError(
            f"nothing to do: KQUEUE_GPUS={config.gpus} finds no GPU and KQUEUE_CPU_SLOTS is 0; set one of them"
        )
    return slots


def environment(slot: Slot, config: Config, cores: int, base: Mapping[str, str]) -> dict[str, str]:
    """A worker process's environment. Holds secrets."""
    env = dict(base) | config.environment() | {VARIABLE: slot.to_json(), "PYTORCH_NVML_BASED_CUDA_CHECK": "1"}
    if slot.on_gpu:
        env["CUDA_VISIBLE_DEVICES"] = slot.device
        # For judges alone, which use one stream: candidates have the driver's default. The driver makes contexts one
        # after the other, and most of what one takes is its queues (docs/timing.md#what-contexts-cost).
        env |= {"CUDA_DEVICE_MAX_CONNECTIONS": "1", "CUDA_DEVICE_MAX_COPY_CONNECTIONS": "1"}
        env.pop("TRITON_INTERPRET", None)
    else:
        env |= {"CUDA_VISIBLE_DEVICES": "", "TRITON_INTERPRET": "1"}
        threads = str(max(1, cores // slot.siblings))
        env |= {"OMP_NUM_THREADS": threads, "MKL_NUM_THREADS": threads}
    return env


@dataclass(slots=True)
class _Life:
    """A slot, and the present life of its worker process."""

    slot: Slot
    process: subprocess.Popen[bytes] | None = None
    #: Ours of the pair on which the worker knocks, is let in and told to pause and to go on, and tells whether a
    #: process of it does not die; None when it has ended, or was told to.
    door: socket.socket | None = None
    knocked: bool = False
    registered: bool = False
    #: The last word said to it.
    said: bytes = b""
    #: When it was killed; 0 if it was not.
    killed_at: float = 0.0
    #: Processes that its last life left and that do not die, and since when.
    survivors: set[int] = field(default_factory=set[int])
    survived_at: float = 0.0
    #: The process, also of a worker that has ended.
    pid: int = 0
    #: What of it does not die; its row says so.
    stuck: str | None = None
    started_at: float = 0.0
    start_at: float = 0.0
    backoff_s: float = _FIRST_BACKOFF_S


@dataclass(slots=True)
class _Debt:
    """A dead worker's row, still to be closed in the database."""

    worker_id: UUID
    message: str
    handed_back: bool
    since: float = field(default_factory=time.monotonic)


@dataclass(slots=True)
class _Clock:
    """Something to be done every so often."""

    every_s: float
    due_at: float = 0.0

    def due(self, now: float) -> bool:
        if now < self.due_at:
            return False
        self.due_at = now + self.every_s
        return True


@dataclass(slots=True)
class _Stop:
    """How often, and how urgently, the supervisor was told to stop."""

    warm: bool = False
    quick: bool = False
    told: bool = False

    def on_signal(self, number: int, _frame: object) -> None:
        self.quick = self.quick or self.warm or number == signal.SIGINT
        self.warm = True


class Supervisor:
    """A host's workers. :meth:`run` returns when all of them have ended."""

    def __init__(
        self,
        config: Config,
        slots: list[Slot],
        gpus: Sequence[Device] = (),
        *,
        program: str = "workers.start",
        canary: str = "workers.judge.gpu.canary",
    ) -> None:
        """Make ready; nothing is started yet.

        Args:
            config: the fleet's settings.
            slots: from :func:`plan`.
            gpus: those that the slots are on.
            program: the module that a worker process runs.
            canary: the module that tests a GPU.
        """
        self._config = config
        self._program = program
        self._host = socket.gethostname()
        self._cores = len(os.sched_getaffinity(0))
        self._engine = store_engine.connect(config.require_database(), application="kqueue supervisor", pool_size=2)
        self._app = broker.make_app(config)
        # A Redis that hangs must not keep the supervisor from its heartbeats.
        self._app.conf.broker_transport_options |= {"socket_timeout": 3, "socket_connect_timeout": 2}
        self._lives = [_Life(slot) for slot in slots]
        locks = {slot.device: slot.lock for slot in slots}
        self._monitor = Monitor(self._engine, self._host, gpus, locks, canary=canary)
        self._pressure = Pressure(config)
        self._look = _Clock(_LOOK_EVERY_S)
        #: Why workers pause, as it was last written.
        self._written: dict[UUID, str | None] = {}
        #: Directories that are being removed.
        self._removals: list[subprocess.Popen[bytes]] = []
        self._debts: list[_Debt] = []
        #: Descriptors whose locks say that a directory and uids are this fleet's.
        self._held: list[int] = []
        self._heartbeat = _Clock(config.lease_s / 4)
        self._sweep = _Clock(_SWEEP_EVERY_S)
        self._database_away = False
        self._stop = _Stop()
        self._selector = selectors.DefaultSelector()

    def check_services(self) -> None:
        """Wait a moment for Postgres, its schema (whoever starts us may still be migrating) and Redis.

        Raises:
            DatabaseUnavailable, BrokerUnavailable: one of them does not answer.
            SchemaMismatch: the database's schema is not this version's.
        """
        deadline = time.monotonic() + _SERVICES_S
        while True:
            try:
                schema.check(self._engine)
                broker.check(self._app)
                return
            except (DatabaseUnavailable, BrokerUnavailable, SchemaMismatch):
                if time.monotonic() >= deadline:
                    raise
                time.sleep(0.1)

    def run(self) -> None:
        """Keep the workers alive until told to stop."""
        linux.prctl(linux.PR_SET_CHILD_SUBREAPER, 1)
        wake, waker = socket.socketpair()
        wake.setblocking(False)
        waker.setblocking(False)
        self._selector.register(wake, selectors.EVENT_READ, None)
        before = signal.set_wakeup_fd(waker.fileno(), warn_on_full_buffer=False)
        handlers = {s: signal.signal(s, self._stop.on_signal) for s in (signal.SIGTERM, signal.SIGINT)}
        handlers[signal.SIGCHLD] = signal.signal(signal.SIGCHLD, _wake_up)
        try:
            self._prepare_scratch()
            while not self._done():
                self._step()
                for key, _ in self._selector.select(self._pause_s()):
                    if key.data is None:
                        wake.recv(4096)
                    else:
                        self._hear(key.data)
        finally:
            self._kill_all()
            cgroups.clean()
            for number, handler in handlers.items():
                signal.signal(number, handler)
            signal.set_wakeup_fd(before)
            self._selector.close()
            for descriptor in self._held:
                os.close(descriptor)
            wake.close()
            waker.close()
            self._engine.dispose()

    def _done(self) -> bool:
        return self._stop.warm and all(life.process is None for life in self._lives) and not self._debts

    def _pause_s(self) -> float:
        """Until the next thing is due; signals, deaths and knocks cut it short."""
        now = time.monotonic()
        due = [self._heartbeat.due_at, self._sweep.due_at, self._look.due_at]
        due += [life.start_at for life in self._lives if life.process is None and not self._stop.warm]
        return min(1.0, max(0.01, min(due) - now))

    def _step(self) -> None:
        now = time.monotonic()
        self._removals = [removal for removal in self._removals if removal.poll() is None]
        for life in self._lives:
            if life.process is not None and life.process.poll() is not None:
                self._bury(life, life.process.returncode)
            elif life.process is not None and life.killed_at and now - life.killed_at > STUCK_S:
                self._bury(life, -signal.SIGKILL)
            self._look_after_survivors(life, now)
        resets = self._monitor.resets()
        if self._stop.warm:
            self._end_workers()
        else:
            for uuid in resets:
                self._reset(uuid)
            for life in self._lives:
                idle = life.process is None and not life.survivors and now >= life.start_at
                if idle and life.slot.device not in resets:
                    self._start(life)
        self._pay_debts()
        looking = self._look.due(now)
        if looking:
            self._pressure.look()
            self._monitor.step(self._in_database)
        self._let_in()
        self._write_pauses(anew=looking)
        if self._heartbeat.due(now):
            self._beat()
        # No lease is called overdue by one who could not renew its own.
        if self._sweep.due(now) and not self._database_away:
            self._clean()

    def _start(self, life: _Life) -> None:
        life.slot = slot = replace(life.slot, worker_id=uuid4())
        self._empty(slot.scratch)
        ours, theirs = socket.socketpair()
        node = f"{slot.name}@{self._host}"
        command = [sys.executable, "-P", "-m", self._program, "worker"]
        command += ["-n", node, "-Q", ",".join(broker.queue(lane).name for lane in slot.lanes)]
        command += ["--concurrency", "1", "--without-gossip", "--without-mingle", "-E"]
        command += ["--loglevel", self._config.log_level.upper()]
        # What a killed worker leaves in its temporary directory goes when the next one starts.
        full = environment(slot, self._config, self._cores, os.environ) | {"TMPDIR": str(slot.scratch)}
        settings = _in_memory(full)
        env = launch.clean_environment(full) | {
            VARIABLE: full[VARIABLE],
            READY_VARIABLE: str(theirs.fileno()),
            SETTINGS_VARIABLE: str(settings),
        }
        with theirs:
            # Its own session: a terminal's Ctrl-C is for the supervisor to act on. One thread only runs here.
            life.process = subprocess.Popen(
                command,
                # Celery imports from where it is started: never from a directory that others write to.
                cwd="/",
                env=env,
                pass_fds=[theirs.fileno(), settings],
                stdin=subprocess.DEVNULL,
                start_new_session=True,
                preexec_fn=linux.die_with(os.getpid()),
            )
        os.close(settings)
        ours.setblocking(False)
        life.door, life.knocked, life.registered, life.said = ours, False, False, b""
        life.killed_at, life.stuck = 0.0, None
        life.started_at = time.monotonic()
        self._selector.register(ours, selectors.EVENT_READ, life)
        life.pid = life.process.pid
        _log.info("worker started", slot=slot.name, device=slot.device, pid=life.pid)

    def _hear(self, life: _Life) -> None:
        if life.door is None:
            return
        words = b""
        with contextlib.suppress(BlockingIOError, ConnectionResetError):
            words = life.door.recv(64)
        if not words:
            # It died, and its end is noticed elsewhere.
            self._selector.unregister(life.door)
        for word in words:
            if word == READY[0]:
                life.knocked = True
            else:
                life.stuck = "a process that it killed does not die" if word == STUCK[0] else None
                _log.warning("a slot is stuck" if life.stuck else "a slot is free again", slot=life.slot.name)

    def _reason(self, life: _Life) -> str | None:
        """Why a slot is given nothing; None if it may be."""
        return life.stuck or self._pressure.reason or self._monitor.pauses(life.slot.device)

    def _let_in(self) -> None:
        """Register the workers that are ready, then let them take messages, or have them wait for that."""
        for life in self._lives:
            if not life.knocked or life.registered or life.process is None or life.door is None:
                continue
            reason = self._reason(life)
            if self._in_database(lambda life=life, reason=reason: self._register(life, reason)):
                life.registered = True
                self._say(life, reason)
                _log.info("worker ready", slot=life.slot.name, lanes=",".join(life.slot.lanes), paused=reason)

    def _register(self, life: _Life, reason: str | None) -> None:
        slot = life.slot
        registry.register(
            self._engine,
            id=slot.worker_id,
            name=f"{slot.name}@{self._host}",
            host=self._host,
            pid=life.pid,
            lanes=slot.lanes,
            device=slot.device,
            paused=reason,
        )

    def _write_pauses(self, *, anew: bool) -> None:
        """Write why workers pause, where that has changed or ``anew``; then tell them.

        In this order: a message that a worker still takes before it has heard is refused by its claim.
        """
        present = [life for life in self._lives if life.registered or (life.stuck and life.process is None)]
        wanted = {life.slot.worker_id: self._reason(life) for life in present}
        if not wanted or (wanted == self._written and not anew):
            return
        if not self._in_database(lambda: registry.pause(self._engine, wanted)):
            return
        for life in present:
            was, reason = self._written.get(life.slot.worker_id), wanted[life.slot.worker_id]
            if was != reason and life.process is not None:
                _log.info("worker pauses" if reason else "worker goes on", slot=life.slot.name, reason=reason or was)
            self._say(life, reason)
        self._written = wanted

    def _say(self, life: _Life, reason: str | None) -> None:
        word = GO if reason is None else PAUSE
        if life.door is not None and life.said != word:
            life.said = word
            with contextlib.suppress(OSError):  # it has died since: that is noticed elsewhere
                life.door.sendall(word)

    def _close_door(self, life: _Life) -> None:
        if life.door is not None:
            if life.door in self._selector.get_map():
                self._selector.unregister(life.door)
            life.door.close()
            life.door = None

    def _bury(self, life: _Life, returncode: int) -> None:
        """A worker process has ended: its leftovers go, its evaluation goes back, its successor is due."""
        lived = time.monotonic() - life.started_at
        how = describe(returncode)
        (_log.info if self._stop.warm else _log.warning)("worker ended", slot=life.slot.name, how=how)
        self._close_door(life)
        if life.registered:
            message = f"the worker {life.slot.name} {how}"
            self._debts.append(_Debt(life.slot.worker_id, message, handed_back=life.killed_at > 0))
        life.process, life.registered, life.stuck = None, False, None
        spared = self._spared()
        if not sweep(spared):
            life.survivors, life.survived_at = {*linux.children(os.getpid())} - spared, time.monotonic()
        if lived >= _HEALTHY_S:
            life.backoff_s = _FIRST_BACKOFF_S
        life.start_at = time.monotonic() + life.backoff_s
        life.backoff_s = min(2 * life.backoff_s, _LAST_BACKOFF_S)

    def _reset(self, uuid: str) -> None:
        """End a GPU's workers, and with them all that they started. What they ran is handed back."""
        mine = [life for life in self._lives if life.slot.device == uuid]
        for life in mine:
            if life.process is not None and not life.killed_at:
                _log.info("worker ended for a reset of its GPU", slot=life.slot.name)
                life.killed_at = time.monotonic()
                kill_group(life.process.pid)
        if not any(life.process is not None for life in mine):
            self._monitor.ended(uuid, self._in_database)

    def _spared(self) -> set[int]:
        """The children that are somebody's: no sweep may end them, or wait for those that do not die."""
        known = {life.process.pid for life in self._lives if life.process is not None}
        known |= {removal.pid for removal in self._removals} | self._monitor.pids()
        return known.union(*(life.survivors for life in self._lives))

    def _look_after_survivors(self, life: _Life, now: float) -> None:
        """A slot is not used again while what was killed in it is there: it may hold its GPU, and has its uid."""
        if not life.survivors:
            return
        life.survivors = {pid for pid in life.survivors if not _reaped(pid)}
        if not life.survivors and life.stuck:
            _log.info("a slot is free again", slot=life.slot.name)
            self._debts.append(_Debt(life.slot.worker_id, "the slot is free again", handed_back=False))
            life.stuck, life.start_at = None, now
        elif life.survivors and not life.stuck and now - life.survived_at > STUCK_S:
            reason = f"killed processes do not die: {', '.join(map(str, sorted(life.survivors)))}"
            if self._in_database(lambda: self._register(life, reason)):
                life.stuck = reason
                _log.error("a slot is stuck", slot=life.slot.name, reason=reason)

    def _pay_debts(self) -> None:
        while self._debts:
            debt = self._debts[0]

            def settle(debt: _Debt = debt) -> None:
                evaluations.lose_worker(
                    self._engine,
                    debt.worker_id,
                    retry_delay_s=self._config.retry_delay_s,
                    message=debt.message,
                    handed_back=debt.handed_back,
                )
                registry.stop(self._engine, debt.worker_id)

            if not self._in_database(settle):
                late = time.monotonic() - debt.since > self._config.lease_s
                if self._stop.quick or (self._stop.warm and late):
                    # A sweeper hands them back when their leases have run out.
                    self._debts.clear()
                return
            self._debts.pop(0)
            # What it ran is queued again.
            self._sweep.due_at = time.monotonic()

    def _beat(self) -> None:
        ids = [life.slot.worker_id for life in self._lives if life.registered or life.stuck]
        self._in_database(lambda: registry.heartbeat(self._engine, ids, lease_s=self._config.lease_s))

    def _clean(self) -> None:
        report: sweeper.SweepReport | None = None

        def clean() -> None:
            nonlocal report
            report = sweeper.sweep(
                self._engine,
                self._app,
                retry_delay_s=self._config.retry_delay_s,
                retention_days=self._config.retention_days,
                log_retention_days=self._config.log_retention_days,
            )

        if not self._in_database(clean) or report is None or report.broker_error:
            self._sweep.due_at = time.monotonic() + _SWEEP_AGAIN_S
            return
        for evaluation_id, recorded in report.lost:
            _log.warning("a lease ran out", evaluation=str(evaluation_id), recorded=recorded.value)
        if report.published:
            _log.info("messages sent that Redis lacked", count=report.published)
        if report.pruned:
            _log.info("what was old enough is removed", **asdict(report.pruned))
        if report.more:
            self._sweep.due_at = time.monotonic()
        elif report.idle:
            self._sweep.due_at = time.monotonic() + _SWEEP_IDLE_S

    def _in_database(self, work: Callable[[], object]) -> bool:
        """Do something in Postgres; False if it is away, which is logged once for each outage."""
        try:
            work()
        except (DatabaseUnavailable, SchemaMismatch) as error:
            # Another version's schema too: it is being upgraded, or put back.
            if not self._database_away:
                _log.error("Postgres is away: what needs it waits", reason=str(error))
            self._database_away = True
            return False
        if self._database_away:
            _log.info("Postgres is back")
        self._database_away = False
        return True

    def _end_workers(self) -> None:
        for life in self._lives:
            if life.process is None:
                continue
            if self._stop.quick:
                life.killed_at = life.killed_at or time.monotonic()
                kill_group(life.process.pid)
            elif not self._stop.told:
                _log.info("worker told to finish and end", slot=life.slot.name)
                self._close_door(life)
                life.process.terminate()
        self._stop.told = True

    def _kill_all(self) -> None:
        """Kill what is left, and wait for it, but not for what does not die."""
        self._monitor.stop()
        for life in self._lives:
            if life.process is not None:
                kill_group(life.process.pid)
        deadline = time.monotonic() + STUCK_S
        while not sweep(set()) and time.monotonic() < deadline:
            time.sleep(0.02)
        if left := linux.children(os.getpid()):
            _log.error("processes do not die and are left behind", pids=left)

    def _empty(self, scratch: Path) -> None:
        """Make a slot's directory, as a worker's life begins: nothing is in it. What was goes in its own time."""
        with contextlib.suppress(FileNotFoundError):
            self._removals.append(linux.start_removal(scratch.rename(scratch.with_name(_TRASH + uuid4().hex))))
        scratch.mkdir(mode=0o711, parents=True)

    def _prepare_scratch(self) -> None:
        """Make the directories that all slots share; others may traverse them and no more.

        Raises:
            ConfigError: somebody else owns them.
        """
        root = self._config.scratch.absolute()
        for directory in (root, root / "locks"):
            directory.mkdir(mode=0o711, parents=True, exist_ok=True)
            if directory.is_symlink() or directory.stat().st_uid != os.geteuid():
                raise ConfigError(f"{directory} belongs to somebody else: set KQUEUE_SCRATCH to a directory of yours")
        root.chmod(0o711)
        (root / "locks").chmod(0o700)
        place = _hold_place(root, self._held)
        self._removals += [linux.start_removal(old) for old in place.glob(_TRASH + "*")]
        for life in self._lives:
            slot = life.slot
            uid = None
            if slot.uid is not None:
                held = uids.hold(slot.uid)
                self._held.append(held.descriptor)
                uid = held.uid
            life.slot = replace(slot, scratch=place / slot.name, uid=uid)


def _in_memory(settings: Mapping[str, str]) -> int:
    """A descriptor from which settings can be read: unlike an environment, nobody else can look at it."""
    descriptor = os.memfd_create("kqueue-settings", os.MFD_CLOEXEC)
    with os.fdopen(os.dup(descriptor), "w") as stream:
        json.dump(dict(settings), stream)
    os.lseek(descriptor, 0, os.SEEK_SET)
    return descriptor


def _hold_place(root: Path, held: list[int]) -> Path:
    """A directory that no other fleet of this host uses: the first whose lock is free. ``held`` keeps the lock."""
    for number in itertools.count():
        place = root / f"fleet-{number}"
        place.mkdir(mode=0o711, exist_ok=True)
        descriptor = os.open(place, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(descriptor)
            continue
        held.append(descriptor)
        return place
    raise AssertionError("counting does not end")


def _reaped(pid: int) -> bool:
    """Whether a child is gone, which may not have been ours any more."""
    with contextlib.suppress(ChildProcessError):
        return os.waitpid(pid, os.WNOHANG)[0] == pid
    return True


def _wake_up(_number: int, _frame: object) -> None:
    """With a handler of its own a child's death reaches the wake-up descriptor."""


def main() -> int:
    """Run this host's fleet as the environment says; the exit status is 2 where it cannot start."""
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
        return 2
    return 0


def _cores() -> int:
    return len(os.sched_getaffinity(0))


if __name__ == "__main__":
    sys.exit(main())
