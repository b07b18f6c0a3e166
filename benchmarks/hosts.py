"""Measure one Postgres and one Valkey: `python benchmarks/hosts.py [--hosts N,...] [--pooler] [--out FILE]`.

It starts both, and simulates hosts with one process each. The process makes the requests of a supervisor, its workers
and their task processes with the fleet's functions. The supervisor's part is the real one (`workers/bookkeeping.py`):
heartbeats and leases, sweeps, filling Redis, notifications. A slot takes messages from Celery's transport, claims,
records its environment, waits instead of judging, and records a verdict with a log. As in a fleet, each evaluation has
a separate connection, which is opened while the previous evaluation is judged. No candidate runs and no Python process
starts, so the cost of judging is not measured.

For each number of hosts it measures for `--seconds` each

- `idle`: nothing is queued. The load is heartbeats, sweeps and polls.
- `paced`: all hosts together end `--rate` evaluations per second, regardless of their number. Each evaluation takes up
  to two seconds.
- `saturated`: judging takes no time, so all slots wait only for the services. At most `--busy` slots run, because more
  would measure the scheduling of this machine's cores.

Services and hosts share this machine's cores, so rates and latencies include all of them. The CPU time of one
evaluation in Postgres and in Valkey (`*_cpu_ms_each`) depends less on that: a core has 1000 ms per second. Connections
and Postgres' memory are measured at the end of `paced`. With `--pooler` the hosts reach Postgres through PgBouncer, in
session mode. The figures are printed as JSON and, with `--out FILE`, written to FILE.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import random
import selectors
import signal
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Final
from uuid import UUID, uuid4

import queueing
from sqlalchemy import Engine, text

from kqueue import Category, broker
from kqueue.config import Config, load
from kqueue.contract import Outcome
from kqueue.errors import DatabaseUnavailable
from kqueue.evidence import Evidence
from kqueue.local.servers import Postgres, Valkey
from kqueue.states import Writer
from kqueue.store import evaluations, schema
from kqueue.store import workers as registry
from kqueue.store.engine import connect
from tests.chaos.pooler import Pooler
from workers.bookkeeping import Bookkeeping
from workers.judge.host import linux
from workers.plan import plan
from workers.slot import Slot

#: Log of a verdict. With sources and evidence a verdict has about 10 KB.
_LOG: Final = "a line of a compiler's or of a kernel's own\n" * 100
_EVIDENCE: Final = Evidence(checks=5, durations_s={"reference": 0.4, "load": 0.2, "check": 0.1, "time": 0.1})
_FACTS: Final = {"device": "simulated", "torch": "none", "python": "none"}
#: Longest simulated judging time in seconds.
_JUDGING_S: Final = 2.0
#: Number of queued evaluations, more than the hosts can end during a measurement.
_CROWD: Final = 50_000
#: Seconds between a change of the load and the start of a measurement.
_SETTLE_S: Final = 6.0
#: Deadline in seconds for the start of all hosts.
_BEGIN_S: Final = 300.0
#: Number of hosts that start at once. An operator does not start all of them in the same second either.
_AT_ONCE: Final = 4
#: Seconds until a task process repeats a request to Postgres, as in :mod:`workers.app`.
_RETRY_S: Final = 0.5
#: Seconds between two polls of a supervisor, as in :mod:`workers.fleet`.
_LOOK_EVERY_S: Final = 1.0


class _Roomy(Postgres):
    """An embedded Postgres that accepts 3,000 connections."""

    def _command(self, program: Path, sockets: Path) -> list[str]:
        return [*super()._command(program, sockets), "-c", "max_connections=3000"]


@dataclass
class _Slot:
    """A slot: a thread that makes the service requests of a worker and its task processes."""

    config: Config
    slot: Slot
    #: Shared value: seconds between two evaluations of a slot.
    pace_s: Any
    stopping: threading.Event
    #: Delay of the first evaluation after a change of the pace, in units of the pace. It spreads the slots over time.
    phase: float = field(default_factory=random.random)
    paced_s: float = 0.0
    next_at: float = 0.0
    ready: threading.Event = field(default_factory=threading.Event)
    claims_ms: list[float] = field(default_factory=list)
    ends_ms: list[float] = field(default_factory=list)
    #: Number of repeated requests after Postgres was unavailable.
    again: int = 0

    def run(self) -> None:
        """Take messages until `stopping` is set."""
        app = broker.make_app(self.config, lanes=self.slot.lanes, patience_s=broker.CONSUMER_PATIENCE_S)
        task_processes = [
            connect(self.config.require_database(), application=f"kqueue judge {self.slot.name}", pool_size=1)
            for _ in range(2)
        ]
        self._warm_up(task_processes[0])

        def take(_body: object, message: Any) -> None:
            self._judge(UUID(message.headers["id"]), *task_processes)
            # The connection ends with its task process. The spare one takes the next evaluation.
            task_processes[0].dispose()
            task_processes.reverse()
            message.ack()

        with app.connection_for_read() as connection:
            channel = connection.default_channel
            channel.basic_qos(0, 1, False)
            queues = [broker.queue(lane) for lane in self.slot.lanes]
            with connection.Consumer(queues, channel=channel, on_message=None, callbacks=[take], accept=["json"]):
                self.ready.set()
                while not self.stopping.is_set():
                    with suppress(TimeoutError):
                        connection.drain_events(timeout=0.5)
        for task_process in task_processes:
            task_process.dispose()
        app.close()

    def _judge(self, evaluation_id: UUID, task_process: Engine, spare: Engine) -> None:
        now = time.monotonic()
        if self.paced_s != self.pace_s.value:
            self.paced_s = self.pace_s.value
            self.next_at = now + self.phase * self.paced_s
        self._wait(self.next_at - now)
        self.next_at = max(self.next_at + self.paced_s, now)
        begun = time.perf_counter()
        claim = self._ask(
            lambda: evaluations.claim(
                task_process, evaluation_id, worker_id=self.slot.worker_id, lease_s=self.config.lease_s
            )
        )
        self.claims_ms.append(1000 * (time.perf_counter() - begun))
        self._warm_up(spare)
        if claim is None:
            return
        facts = _FACTS | {"host": self.slot.name}
        self._ask(lambda: evaluations.set_environment(task_process, claim.attempt_id, facts, conditions=None))
        self._wait(begun + min(self.paced_s, _JUDGING_S) - time.perf_counter())
        begun = time.perf_counter()
        outcome = Outcome(category=Category.PASSED, message="simulated", log=_LOG, evidence=_EVIDENCE)
        self._ask(
            lambda: evaluations.finish(
                task_process, claim.evaluation_id, claim.number, outcome, written_by=Writer.JUDGE, retry_delay_s=1.0
            )
        )
        self.ends_ms.append(1000 * (time.perf_counter() - begun))

    def _wait(self, seconds: float) -> None:
        """Wait this long, or until the pace changes or the slot stops."""
        until = time.monotonic() + seconds
        while (left := until - time.monotonic()) > 0 and self.paced_s == self.pace_s.value:
            if self.stopping.wait(min(_LOOK_EVERY_S, left)):
                return

    def _warm_up(self, task_process: Engine) -> None:
        self._ask(lambda: evaluations.warm_up(task_process, worker_id=self.slot.worker_id))

    def _ask(self, act: Callable[[], Any]) -> Any:
        """Call a function on Postgres, and repeat it while Postgres is unavailable, like a task process."""
        while True:
            try:
                return act()
            except DatabaseUnavailable:
                self.again += 1
                time.sleep(_RETRY_S)


def _host(config: Config, number: int, pace_s: Any, commands: Connection) -> None:
    """Run a host. Answer a true command with the slots' figures since the previous one, and exit at a false one."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    linux.prctl(linux.PR_SET_PDEATHSIG, signal.SIGKILL)
    slots = [replace(slot, worker_id=uuid4()) for slot in plan(config, [], 1)]
    ids = [slot.worker_id for slot in slots]
    stopping = threading.Event()
    simulated = [_Slot(config, slot, pace_s, stopping) for slot in slots]
    with selectors.DefaultSelector() as selector:
        books = Bookkeeping(config, f"host-{number}", selector)
        for slot in slots:
            while not books.register(slot, os.getpid(), None):
                time.sleep(0.1)
        threads = [threading.Thread(target=one.run, daemon=True) for one in simulated]
        for thread in threads:
            thread.start()
        selector.register(commands.fileno(), selectors.EVENT_READ)
        commands.send(all(one.ready.wait(_BEGIN_S) for one in simulated))
        look_at = 0.0
        while True:
            now = time.monotonic()
            if now >= look_at:
                look_at = now + _LOOK_EVERY_S
                books.held()
                books.pause(dict.fromkeys(ids))
            books.step(ids)
            pause_s = min(1.0, max(0.01, min(books.due_at, look_at) - time.monotonic()))
            for key, _ in selector.select(pause_s):
                if key.data is not None:
                    key.data.hear()
            if commands.poll():
                if not commands.recv():
                    break
                commands.send([(one.claims_ms, one.ends_ms, one.again) for one in simulated])
                for one in simulated:
                    one.claims_ms, one.ends_ms, one.again = [], [], 0
        stopping.set()
        for thread in threads:
            thread.join()
        for identity in ids:
            registry.stop(books.engine, identity)
        books.close()
    os._exit(0)


class Hosts:
    """Simulated hosts, which exit at the end of the `with` block."""

    def __init__(self, config: Config, number: int) -> None:
        context = multiprocessing.get_context("fork")
        self.pace_s: Any = context.Value("d", 0.0, lock=False)
        self._lines: list[Connection] = []
        self._processes: list[Any] = []
        for host in range(number):
            ours, theirs = context.Pipe()
            process = context.Process(target=_host, args=(config, host, self.pace_s, theirs))
            process.start()
            theirs.close()
            self._lines.append(ours)
            self._processes.append(process)
            if len(self._lines) % _AT_ONCE == 0:
                self._wait_for(self._lines[-_AT_ONCE:])
        self._wait_for(self._lines[number - number % _AT_ONCE :])

    @staticmethod
    def _wait_for(lines: Sequence[Connection]) -> None:
        for line in lines:
            if not line.poll(_BEGIN_S) or not line.recv():
                raise TimeoutError(f"a host did not start within {_BEGIN_S:.0f} s")

    def __enter__(self) -> Hosts:
        return self

    def __exit__(self, *_: object) -> None:
        for line in self._lines:
            with suppress(OSError):
                line.send(False)
        for process in self._processes:
            process.join()

    def taken(self) -> tuple[list[float], list[float], int]:
        """Return the durations of claims and ends in milliseconds, and the repeated requests, since the last call."""
        for line in self._lines:
            line.send(True)
        slots = [slot for line in self._lines for slot in line.recv()]
        claims, ends = ([ms for slot in slots for ms in slot[which]] for which in (0, 1))
        return claims, ends, sum(slot[2] for slot in slots)

    def cpu_s(self) -> float:
        """Return the CPU time of the hosts in seconds."""
        return sum(_cpu_s(process.pid) for process in self._processes)


def _below(pid: int) -> Generator[int]:
    yield pid
    for child in linux.children(pid):
        yield from _below(child)


def _cpu_s(pid: int) -> float:
    """Return the CPU time in seconds of a process and its descendants, including reaped ones."""
    ticks = 0
    for one in _below(pid):
        with suppress(OSError):
            numbers = Path(f"/proc/{one}/stat").read_text().rpartition(")")[2].split()
            ticks += sum(int(number) for number in numbers[11:15])
    return ticks / os.sysconf("SC_CLK_TCK")


def _memory_mib(pid: int) -> int:
    """Return the memory in MiB of a process and its descendants. Shared memory counts once."""
    kib = 0
    for one in _below(pid):
        with suppress(OSError):
            for line in Path(f"/proc/{one}/smaps_rollup").read_text().splitlines():
                kib += int(line.split()[1]) if line.startswith("Pss:") else 0
    return kib >> 10


def _connections(engine: Engine, app: Any) -> dict[str, int]:
    with engine.connect() as connection:
        names = connection.scalars(
            text("SELECT application_name FROM pg_stat_activity WHERE backend_type LIKE 'client%'")
        )
        kinds = Counter(" ".join(word for word in name.split() if "-" not in word) for name in names)
    del kinds["benchmark"]
    return {**dict(sorted(kinds.items())), "valkey": int(broker.info(app)["connected_clients"])}


@contextmanager
def _services(home: Path, *, pooled: bool) -> Generator[tuple[dict[str, int], Config, Engine, Any]]:
    """Yield the services' pids, the hosts' settings, and an engine and a Celery application for the benchmark."""
    with _Roomy(home / "postgres") as postgres, Valkey(home / "valkey") as valkey, ExitStack() as more:
        schema.upgrade(postgres.url)
        url, pids = postgres.url, {"postgres": postgres.pid or 0, "valkey": valkey.pid or 0}
        if pooled:
            pooler = more.enter_context(Pooler(postgres, home / "pooler", size=2000))
            url, pids["pooler"] = pooler.url, pooler.pid
        config = load(
            database_url=url,
            redis_url=valkey.url,
            home=home / "home",
            scratch=home / "scratch",
            gpus="none",
            probe_share=0,
        )
        engine = connect(postgres.url, application="benchmark", pool_size=2)
        app = broker.make_app(config)
        try:
            yield pids, config, engine, app
        finally:
            engine.dispose()
            app.close()


def measure(arguments: argparse.Namespace, number: int, home: Path) -> dict[str, Any]:
    with _services(home, pooled=arguments.pooler) as (pids, config, engine, app):
        config = config.model_copy(update={"cpu_slots": arguments.slots})
        figures: dict[str, Any] = {"hosts": number, "slots": number * arguments.slots}
        with Hosts(config, number) as hosts:

            def used_s() -> dict[str, float]:
                return {name: _cpu_s(pid) for name, pid in pids.items()} | {"hosts": hosts.cpu_s()}

            def watch(name: str) -> None:
                time.sleep(_SETTLE_S)
                hosts.taken()
                ended, before, begun = _ended(engine), used_s(), time.perf_counter()
                time.sleep(arguments.seconds)
                ended, after, took = _ended(engine) - ended, used_s(), time.perf_counter() - begun
                cpu_s = {part: after[part] - before[part] for part in after}
                figures[name] = _figures(took, ended, cpu_s, *hosts.taken())

            watch("idle")
            hosts.pace_s.value = figures["slots"] / arguments.rate
            queueing.crowd(engine, _CROWD)
            watch("paced")
            figures["connections"] = _connections(engine, app)
            figures["postgres_mib"] = _memory_mib(pids["postgres"])
            if figures["slots"] <= arguments.busy:
                hosts.pace_s.value = 0.0
                watch("saturated")
            figures["tried_twice"] = queueing.scalar(engine, "SELECT count(*) FROM evaluations WHERE attempts > 1")
            figures["on"] = queueing.circumstances(engine, app)
    return figures


def _figures(
    took_s: float,
    ended: int,
    cpu_s: Mapping[str, float],
    claims_ms: Sequence[float],
    ends_ms: Sequence[float],
    again: int,
) -> dict[str, Any]:
    figures: dict[str, Any] = {f"{part}_cores": round(used / took_s, 3) for part, used in cpu_s.items()}
    if ended:
        figures["per_s"] = round(ended / took_s, 1)
        figures |= {f"{part}_cpu_ms_each": round(1000 * used / ended, 2) for part, used in cpu_s.items()}
        figures |= queueing.percentiles("claim", claims_ms) | queueing.percentiles("end", ends_ms)
    return figures | {"asked_again": again}


def _ended(engine: Engine) -> int:
    return queueing.scalar(engine, "SELECT count(*) FROM verdicts")


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure the capacity of one Postgres and one Valkey.")
    parser.add_argument("--hosts", default="1,10,100", help="numbers of hosts, separated by commas")
    parser.add_argument("--slots", type=int, default=4, help="slots of each host")
    parser.add_argument("--rate", type=float, default=4.0, help="evaluations per second of all hosts in `paced`")
    parser.add_argument("--busy", type=int, default=40, help="largest number of slots for `saturated`")
    parser.add_argument("--pooler", action="store_true", help="reach Postgres through PgBouncer")
    parser.add_argument("--seconds", type=float, default=20.0, help="duration of each measurement")
    parser.add_argument("--out", type=Path, help="file for the figures, as JSON")
    arguments = parser.parse_args()
    figures: dict[str, Any] = {"pooler": arguments.pooler, "rate": arguments.rate, "figures": []}
    for number in map(int, arguments.hosts.split(",")):
        with tempfile.TemporaryDirectory(prefix="kqueue-") as home:
            figures["figures"].append(measure(arguments, number, Path(home)))
        print(json.dumps(figures["figures"][-1]), flush=True)
    report = json.dumps(figures, indent=2)
    print(report)
    if arguments.out is not None:
        arguments.out.write_text(report + "\n")


if __name__ == "__main__":
    main()
