"""The primary of Valkey or Postgres is lost under a whole fleet: each accepted evaluation gets one right verdict.

The tests print how long a fleet took to judge again. `pytest -rP` shows it.
"""

from __future__ import annotations

import os
import signal
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from uuid import UUID, uuid4

import pytest

from kqueue import Client, RemoteClient, broker
from kqueue.config import load
from kqueue.contract import Request, Settings, Timing
from kqueue.errors import DatabaseUnavailable
from kqueue.local.fleet import LocalFleet
from kqueue.local.servers import Postgres, Valkey
from kqueue.store import evaluations
from kqueue.store.engine import connect
from tests.chaos.failover import NAME, PASSWORD, SENTINELS_PASSWORD, execute, sentinel, streaming
from tests.samples import RELU, RELU_KERNEL
from tests.services import with_schema
from tests.waiting import until

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(400)]

_KERNELS = {
    "passed": RELU_KERNEL.format("return x.clamp(min=0)"),
    "wrong_values": RELU_KERNEL.format("return x.clamp(min=0) + 1"),
    "slow": RELU_KERNEL.format("time.sleep(0.5)\n        return x.clamp(min=0)"),
    "endless": RELU_KERNEL.format("time.sleep(600)"),
}
#: Limit in seconds of the wait for a verdict after a fault.
_IN_SERVICE_S = 60.0


class _Run:
    """A whole fleet with one slot, its producer over HTTP, and the evaluations that were accepted."""

    def __init__(self, fleet: LocalFleet, producer: Client) -> None:
        self.fleet = fleet
        self.producer = producer
        self.engine = connect(fleet.config.require_database(), application="tests")
        self._workers = [slot.id for slot in fleet.slots()]
        self._accepted: dict[UUID, str] = {}

    def request(self, kernel: str) -> Request:
        return Request(
            problem=RELU,
            kernel=_KERNELS[kernel],
            backend="torch",
            lane="cpu",
            settings=Settings(checks=1, timing=Timing().off()),
            idempotency_key=str(uuid4()),
        )

    def submit(self, kernel: str) -> UUID:
        return self.accepted(self.producer.submit(self.request(kernel)).evaluation_id, kernel)

    def accepted(self, identity: UUID, kernel: str) -> UUID:
        self._accepted[identity] = "passed" if kernel == "slow" else kernel
        return identity

    def begin(self) -> None:
        """Submit evaluations, and wait until the first one runs."""
        running, *_ = [self.submit(kernel) for kernel in ("slow", "passed", "wrong_values", "passed")]
        self.started(running)

    def rows(self, sql: str, *values: Any) -> list[Any]:
        with self.engine.connect() as connection:
            return list(connection.exec_driver_sql(sql, values))

    def logs(self) -> str:
        return "".join(log.read_text() for log in self.fleet.config.home_path.glob("logs/*.log"))

    def started(self, identity: UUID) -> None:
        running = "SELECT 1 FROM attempts WHERE evaluation_id = %s AND ended_at IS NULL"
        until(lambda: self.rows(running, identity), what="the attempt")

    def judges_again(self, fault_at: float) -> None:
        """Check that a new evaluation is judged, and print the times since the fault."""
        print(f"{time.time() - fault_at:.1f} s from the fault to the promotion")
        identity = self.submit("passed")
        print(f"{time.time() - fault_at:.1f} s to the answer to a submission")
        assert self.producer.get(identity).wait(_IN_SERVICE_S).passed
        ended = "SELECT extract(epoch FROM min(ended_at)) FROM attempts WHERE started_at > to_timestamp(%s)"
        [[first]] = self.rows(ended, fault_at)
        print(f"{float(first) - fault_at:.1f} s to the end of the first attempt that began after the fault")

    def check(self) -> None:
        """Check that each accepted evaluation has its one right verdict, and that no process was replaced."""
        for identity, category in self._accepted.items():
            assert self.producer.get(identity).wait(_IN_SERVICE_S).category == category
        verdicts = self.rows("SELECT evaluation_id, count(*) FROM verdicts GROUP BY 1")
        assert {row[0]: row[1] for row in verdicts} == dict.fromkeys(self._accepted, 1)
        until(lambda: not self.rows("SELECT 1 FROM attempts WHERE ended_at IS NULL"), 30, "no open attempt")
        assert [slot.id for slot in self.fleet.slots()] == self._workers
        assert all(supervised.part.alive() for supervised in self.fleet._parts)


@contextmanager
def _run(database_url: str, redis_url: str) -> Iterator[_Run]:
    with tempfile.TemporaryDirectory(prefix="kqueue-failover-") as name:
        root = Path(name)
        root.chmod(0o711)  # candidates cannot enter pytest's folders
        config = load(
            home=root / "home",
            scratch=root / "scratch",
            gpus="none",
            cpu_slots=1,
            flower_port=0,
            http_port=0,
            reuse=False,
            probe_share=0,
            database_url=database_url,
            redis_url=redis_url,
        )
        with LocalFleet(config, http=True, flower=True) as fleet, RemoteClient(f"unix://{fleet.http_socket}") as remote:
            run = _Run(fleet, remote)
            try:
                yield run
                queries = broker.make_app(fleet.config).control.inspect(timeout=10, limit=1)
                shown = repr([queries.stats(), queries.conf(), run.logs()])
                assert "fleet starts" in shown
                assert "worker_max_tasks_per_child" in shown
                assert "prefetch_count" in shown
                assert PASSWORD not in shown
                assert SENTINELS_PASSWORD not in shown
            finally:
                run.engine.dispose()


@pytest.mark.parametrize("fault", ["killed", "replaced"])
def test_valkey_may_fail_over(tmp_path: Path, fault: str) -> None:
    """After a Sentinel has promoted the replica, workers take messages from it and obey cancellations."""
    tmp_path.chmod(0o755)
    with (
        Postgres(with_schema(tmp_path / "pg"), durable=False) as postgres,
        sentinel(tmp_path / "valkey") as (primary, replica, watching),
        _run(postgres.url, watching.fleets_url) as run,
    ):
        run.begin()
        fault_at = time.time()
        if fault == "killed":
            assert primary.pid is not None
            os.kill(primary.pid, signal.SIGKILL)
            run.submit("wrong_values")
        else:
            watching.client().execute_command("SENTINEL", "FAILOVER", NAME)
        until(lambda: watching.state()["port"] == replica.port, what="the promotion")
        run.judges_again(fault_at)
        run.check()
        if fault == "replaced":  # only then do workers leave it
            until(lambda: primary.client().info()["role"] == "slave", what="the former primary's new role")
        replica.client().lpush("kqueue.cpu", "not JSON")
        cancelled = run.submit("endless")
        run.started(cancelled)
        assert run.producer.cancel(cancelled)
        run.accepted(cancelled, "cancelled")
        run.check()
        assert not run.rows("SELECT 1 FROM attempts WHERE number > 1")
        assert "a message was dropped" in run.logs()


@pytest.mark.parametrize("synchronous", [True, False], ids=["synchronous", "asynchronous"])
def test_postgres_may_fail_over(tmp_path: Path, synchronous: bool) -> None:
    """With a synchronous standby no accepted evaluation is lost. With an asynchronous one, the newest can be."""
    tmp_path.chmod(0o755)
    with (
        streaming(tmp_path / "pg", synchronous=synchronous) as (primary, standby, url),
        Valkey(tmp_path / "valkey") as valkey,
        _run(url, valkey.url) as run,
        run.fleet.client() as producer,
        ThreadPoolExecutor() as threads,
    ):
        run.begin()
        newest = run.request("wrong_values")
        standby.stop()  # the primary is lost while the standby restarts
        pending = threads.submit(producer.submit, newest)
        if synchronous:
            time.sleep(2)
            assert not pending.done()
        else:
            lost = pending.result().evaluation_id
        fault_at = time.time()
        assert primary.pid is not None
        os.kill(primary.pid, signal.SIGKILL)
        if synchronous:
            with pytest.raises(DatabaseUnavailable):
                pending.result()
        waiting = threads.submit(run.submit, "passed")
        standby.start()
        execute(standby.url, "SELECT pg_promote()")
        run.judges_again(fault_at)
        if not synchronous:
            assert not evaluations.existing(run.engine, [lost])
        waiting.result()
        run.accepted(producer.submit(newest).evaluation_id, "wrong_values")
        run.check()
        assert not synchronous or not run.rows("SELECT 1 FROM attempts WHERE number > 1")
