"""A database that is or becomes unavailable."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from urllib.parse import quote
from uuid import UUID, uuid4

import psycopg
import pytest
from sqlalchemy import Engine

from kqueue.contract import Request
from kqueue.errors import DatabaseUnavailable, SchemaMismatch
from kqueue.store import baselines, evaluations, workers
from kqueue.store.engine import connect, connect_listener
from tests.samples import measurement
from tests.store.steps import ENVIRONMENT, PASSED, change


def calls(identity: UUID) -> Sequence[Callable[[Engine], object]]:
    """Return a call of every function of the store."""
    request = Request(problem="p", kernel="k", backend="torch", lane="cpu")
    return [
        lambda e: evaluations.submit(e, [request]),
        lambda e: evaluations.claim(e, identity, worker_id=identity, lease_s=1),
        lambda e: evaluations.finish(e, identity, 1, PASSED, written_by="judge", retry_delay_s=0),
        lambda e: evaluations.cancel(e, identity),
        lambda e: evaluations.verdict(e, identity),
        lambda e: evaluations.verdicts(e, [identity]),
        lambda e: evaluations.set_environment(e, 1, ENVIRONMENT, conditions=""),
        lambda e: evaluations.upcoming(e, {}),
        lambda e: evaluations.publish(e, [identity]),
        lambda e: evaluations.expire_queued(e),
        lambda e: evaluations.expire_leases(e, retry_delay_s=0),
        lambda e: evaluations.lose_worker(e, identity, retry_delay_s=0, message=""),
        lambda e: workers.register(e, id=identity, name="", host="", pid=1, lanes=[], device="cpu"),
        lambda e: workers.heartbeat(e, [identity], lease_s=1),
        lambda e: workers.stop(e, identity),
        lambda e: workers.live(e, within_s=1),
        lambda e: baselines.get(e, "", "", ""),
        lambda e: baselines.put(e, "", "", "", measurement(1.0)),
    ]


class TestUnavailable:
    """An unavailable Postgres is one typed error, never the driver's."""

    def test_nobody_listens(self, tmp_path) -> None:
        """Every function raises the error with the setting of the database's address."""
        engine = connect(f"postgresql+psycopg://postgres@/kqueue?host={tmp_path}", application="tests")
        for call in calls(uuid4()):
            with pytest.raises(DatabaseUnavailable, match="KQUEUE_DATABASE_URL"):
                call(engine)

    @pytest.mark.parametrize(
        "form",
        [
            "postgres@{0}:1,{1}:5432/{2}?keepalives_idle=20",
            "postgres@/{2}?host={0},{1}&port=1,5432",
            "postgres@/{2}?host={0}:1&host={1}:5432",
        ],
    )
    def test_the_first_of_several_hosts_is_down(self, engine: Engine, tmp_path: Path, form: str) -> None:
        """Engines and listeners connect to the next host, in libpq's forms of a list and in SQLAlchemy's."""
        hosts = (quote(str(place), safe="") for place in (tmp_path, engine.url.query["host"]))
        url = "postgresql://" + form.format(*hosts, engine.url.database)
        connect(url, application="tests").connect().close()
        connect_listener(url, application="tests").close()

    def test_a_prepared_statement_is_out_of_date(self, engine: Engine) -> None:
        """A changed column type is the database's error once, and the next call succeeds."""
        one = connect(engine.url.render_as_string(hide_password=False), application="tests", pool_size=1)
        workers.register(one, id=uuid4(), name="n", host="h", pid=1, lanes=[], device="cpu")
        for _ in range(8):  # the driver prepares a statement after five executions
            assert [worker.pid for worker in workers.live(one, within_s=60)] == [1]
        change(engine, "ALTER TABLE workers ALTER COLUMN pid TYPE bigint")
        with pytest.raises(DatabaseUnavailable, match="has just changed"):
            workers.live(one, within_s=60)
        assert [worker.pid for worker in workers.live(one, within_s=60)] == [1]
        one.dispose()

    def test_no_schema(self, server) -> None:
        """A database without tables asks for the migration."""
        url = server.empty_database(f"empty_{uuid4().hex}")
        engine = connect(url, application="tests")
        for call in calls(uuid4()):
            with pytest.raises(SchemaMismatch, match="kqueue db upgrade"):
                call(engine)
        engine.dispose()
        server.drop(url)

    def test_a_cut_in_the_middle_of_a_transaction(self, database_url: str, engine: Engine, submit) -> None:
        """A connection that breaks during a claim is a typed error without a partial write, and the next call works."""
        identity = submit()
        worker = uuid4()
        workers.register(engine, id=worker, name="w", host="h", pid=1, lanes=["cpu"], device="cpu")
        with psycopg.connect(database_url.replace("+psycopg", "")) as holder:
            holder.execute("SELECT 1 FROM evaluations WHERE id = %s FOR UPDATE", [identity])
            with ThreadPoolExecutor(1) as pool:
                claiming = pool.submit(evaluations.claim, engine, identity, worker_id=worker, lease_s=30)
                while holder.execute("SELECT count(*) FROM pg_locks WHERE NOT granted").fetchone() == (0,):
                    pass
                # The holder's connection stays, because its end would release the claim first.
                holder.execute(
                    "SELECT pg_terminate_backend(pid) FROM pg_stat_activity "
                    "WHERE datname = current_database() AND pid <> pg_backend_pid()"
                )
                with pytest.raises(DatabaseUnavailable):
                    claiming.result(timeout=60)
            holder.close()
        assert evaluations.claim(engine, identity, worker_id=worker, lease_s=30).number == 1

    def test_idle_connections_are_replaced(self, server, database_url: str, engine: Engine, submit) -> None:
        """A restart of the server between two calls causes no error."""
        submit()
        server.cut(database_url)
        submit()
