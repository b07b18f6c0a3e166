"""Postgres killed, silent, read-only, full and migrated: accepted evaluations survive."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psycopg
import pytest
from sqlalchemy import text

from kqueue import Client, Request
from kqueue.errors import DatabaseUnavailable
from kqueue.local import servers as embedded
from kqueue.local.servers import Postgres, Valkey
from kqueue.store import evaluations, schema
from tests.chaos.rig import Halted, Whole
from tests.chaos.version import know_later
from tests.fleet.told import Services, fleets


def _execute(url: str, *statements: str) -> None:
    with psycopg.connect(url.replace("postgresql+psycopg", "postgresql"), autocommit=True) as connection:
        for statement in statements:
            connection.execute(statement)


@pytest.mark.parametrize(
    "seconds", [1, pytest.param(40, marks=pytest.mark.nightly)], ids=["seconds", "past a judge's patience"]
)
def test_postgres_may_be_killed(services: Any, fleet: Any, whole: Any, seconds: float) -> None:
    """The judge keeps its outcome for 30 s and records it if a killed Postgres has recovered by then."""
    running, waiting = services.submit("sleep 1", attempts=3), services.submit("ok", attempts=3)
    services.started(running)
    os.kill(services.postgres.pid, signal.SIGKILL)
    services.until(lambda: not services.postgres.alive(), what="its end")
    time.sleep(seconds)
    services.until(lambda: _starts(services.postgres), what="Postgres")
    categories = [attempt.category for attempt in whole(running)]
    assert categories == (["passed"] if seconds < 30 else ["worker_lost", "passed"])
    whole(waiting, attempts=1)


def _starts(postgres: Postgres) -> bool:
    """Return whether the server started. The remains of a killed server need a moment to exit."""
    try:
        postgres.start()
    except embedded.LocalFleetError:
        return False
    return True


@pytest.mark.parametrize(
    "seconds", [2, pytest.param(60, marks=[pytest.mark.nightly, pytest.mark.timeout(300)])], ids=["seconds", "a minute"]
)
def test_postgres_may_be_silent(services: Any, fleet: Any, whole: Any, seconds: float) -> None:
    """While Postgres accepts connections without answering, nothing is lost, and failed attempts are judged again."""
    running, waiting = services.submit("sleep 1", attempts=3), services.submit("ok", attempts=3)
    services.started(running)
    with Halted(services.postgres.pid):
        time.sleep(seconds)
    whole(running, waiting)


@pytest.mark.nightly
@pytest.mark.parametrize("seconds", [2, 40], ids=["seconds", "past a judge's patience"])
def test_a_message_may_come_while_postgres_is_silent(services: Any, fleet: Any, whole: Any, seconds: float) -> None:
    """A message that no worker can claim is kept or sent again, and uses up no attempt."""
    waiting = services.submit("ok", send=False)
    with Halted(services.postgres.pid):
        services.send(waiting)
        time.sleep(seconds)
    services.age()
    whole(waiting, attempts=1)


def test_postgres_may_be_read_only(services: Any, fleet: Any, whole: Any) -> None:
    """Submissions fail with the reason, and the judge records the running evaluation once Postgres is writable."""
    running = services.submit("sleep 1", attempts=3)
    services.started(running)
    url = services.postgres.url
    _execute(url, "ALTER SYSTEM SET default_transaction_read_only = on", "SELECT pg_reload_conf()")
    try:
        with Client(services.config()) as client:
            services.until(lambda: _refused(client, "read-only"), what="the refusal")
        time.sleep(1.5)
        assert evaluations.verdict(services.engine, running) is None
    finally:
        _execute(
            url,
            "SET default_transaction_read_only = off",
            "ALTER SYSTEM RESET default_transaction_read_only",
            "SELECT pg_reload_conf()",
        )
    [attempt] = whole(running, attempts=1)
    assert attempt.written_by == "judge"


def _refused(client: Client, why: str) -> bool:
    try:
        ticket = client.submit(problem="p", kernel="ok", backend="torch", lane="cpu", allow_idle_lane=True)
    except DatabaseUnavailable as error:
        return why in str(error)
    ticket.cancel()
    return False


@pytest.mark.nightly
@pytest.mark.parametrize("seconds", [2, 15], ids=["a moment", "past every limit on locks"])
def test_a_table_may_be_locked_by_a_migration(services: Any, fleet: Any, whole: Any, seconds: float) -> None:
    """While ACCESS EXCLUSIVE locks block all statements, everything waits and nothing gives up for good."""
    running, waiting = services.submit("sleep 1", attempts=3), services.submit("ok", attempts=3)
    services.started(running)
    with services.engine.begin() as connection:
        connection.execute(text("LOCK TABLE evaluations, attempts, workers IN ACCESS EXCLUSIVE MODE"))
        time.sleep(seconds)
    whole(running, waiting)


@pytest.mark.nightly
def test_the_schema_may_go_back_and_forth(
    services: Any, fleet: Any, whole: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All queued evaluations are judged although the schema is upgraded and downgraded under running workers."""
    know_later(tmp_path, monkeypatch)
    running = services.submit("sleep 1", attempts=3)
    services.started(running)
    waiting = [services.submit("ok", attempts=3) for _ in range(5)]
    schema.upgrade(services.postgres.url)
    assert schema.current(services.postgres.url) == schema.head()
    time.sleep(2)
    schema.downgrade(services.postgres.url, "-1")
    assert fleet.process.poll() is None
    whole(running, *waiting)


@pytest.mark.nightly
def test_a_migration_may_change_a_columns_type(services: Any, fleet: Any, whole: Any) -> None:
    """Prepared statements fail once after a migration, are repeated, and no process exits."""
    [worker] = fleet.live()
    old = "SELECT 1 FROM workers WHERE id = :id AND started_at < now() - interval '8 s'"
    services.until(lambda: services.rows(old, id=worker.id), what="a supervisor that has asked the same a few times")
    running = services.submit("sleep 2", attempts=3)
    services.started(running)
    url = services.postgres.url
    try:
        _execute(
            url, "ALTER TABLE probe_pauses ALTER reason TYPE varchar", "ALTER TABLE kernels ALTER source TYPE varchar"
        )
        whole(running, attempts=1)
        services.until(lambda: "Postgres is back" in fleet.log.read_text(), what="the supervisor's second question")
    finally:
        _execute(url, "ALTER TABLE probe_pauses ALTER reason TYPE text", "ALTER TABLE kernels ALTER source TYPE text")
    assert fleet.process.poll() is None
    assert [one.id for one in fleet.live()] == [worker.id]


@contextmanager
def _small_disk(place: Path, megabytes: int) -> Iterator[Path]:
    """Mount a file system of this many MiB at `place`."""
    place.mkdir(parents=True, exist_ok=True)
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={megabytes}m,mode=755", "tmpfs", str(place)], capture_output=True
    )
    if mounted.returncode:
        pytest.skip(f"no file system of a known size can be mounted here: {mounted.stderr.decode().strip()}")
    try:
        yield place
    finally:
        subprocess.run(["umount", "-l", str(place)], check=True)


def _fill(place: Path) -> Path:
    filler = place / "filler"
    with filler.open("wb", buffering=0) as file:
        size = 1 << 20
        while size:
            try:
                file.write(b"\1" * size)
            except OSError:
                size //= 2
    return filler


@pytest.mark.nightly
@pytest.mark.timeout(300)
def test_the_databases_disk_may_be_full(tmp_path: Path) -> None:
    """A full disk rejects new evaluations and keeps accepted ones, which are judged once there is room."""
    tmp_path.chmod(0o755)
    with _small_disk(tmp_path / "disk", 256) as disk, Valkey(tmp_path / "valkey") as valkey:
        postgres = Postgres(disk / "pg", durable=False)
        with postgres:
            schema.upgrade(postgres.url)
            services = Services(postgres, valkey, tmp_path)
            with fleets(services) as start:
                fleet = start()
                running = services.submit("sleep 2", attempts=3)
                services.started(running)
                waiting = services.submit("ok", attempts=3, send=False)
                filler = _fill(disk)
                accepted = _submit_much(services)
                filler.unlink()
                if not postgres.alive():
                    services.until(lambda: _starts(postgres), what="Postgres")
                assert evaluations.existing(services.engine, accepted) == set(accepted)
                Whole(services)(running, waiting, *accepted)
                assert fleet.process.poll() is None
            services.engine.dispose()
            services.app.close()


def _submit_much(services: Services) -> list[Any]:
    """Submit until Postgres has no room for it, and return the accepted evaluations."""
    accepted: list[Any] = []
    problem_of_a_megabyte = os.urandom(400_000).hex()
    for number in range(500):
        request = Request(problem=f"{number}{problem_of_a_megabyte}", kernel="ok", backend="torch", lane="cpu")
        try:
            [submitted] = evaluations.submit(services.engine, [request])
        except DatabaseUnavailable:
            return accepted
        accepted.append(submitted.evaluation_id)
    raise AssertionError("the disk did not get full")
