"""The sweeper: whatever Redis, a worker or a producer lost, Postgres knows."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from uuid import UUID, uuid4

import pytest
from celery import Celery
from sqlalchemy import Engine, text

from kqueue import broker
from kqueue.config import Config, load
from kqueue.contract import Request
from kqueue.errors import BrokerUnavailable
from kqueue.local.valkey import Valkey
from kqueue.message import Message
from kqueue.store import evaluations, workers
from kqueue.store.evaluations import Recorded
from kqueue.sweeper import LOOK_EVERY_S, SweepReport, sweep
from tests.services import starts_services


@pytest.fixture
def app(config: Config) -> Iterator[Celery]:
    """The fleet's Celery application."""
    with broker.make_app(config) as app:
        yield app


@pytest.fixture
@starts_services
def own_valkey(tmp_path: Path) -> Iterator[Valkey]:
    """A Valkey that the test may stop."""
    with Valkey(tmp_path / "valkey") as service:
        yield service


def submit(engine: Engine, fields, count: int, **changes: object) -> list[UUID]:
    """Accepted evaluations whose producer died before it sent the messages, a while ago."""
    submitted = evaluations.submit(engine, [Request(**fields(n, **changes)) for n in range(count)])
    older(engine)
    return [s.evaluation_id for s in submitted]


def sweep_all(engine: Engine, app: Celery) -> int:
    """Sweep until nothing is left to send; how many messages were sent."""
    published = 0
    while True:
        report = sweep(engine, app, retry_delay_s=1)
        published += report.published
        if not report.more:
            return published


def message() -> Message:
    """A message like any other."""
    return Message(uuid4(), "cpu", deadlines_s=1, label="x")


def older(engine: Engine) -> None:
    """Let a minute pass for all evaluations."""
    with engine.begin() as connection:
        connection.execute(
            text(
                "UPDATE evaluations SET submitted_at = submitted_at - interval '1 min', "
                "expires_at = expires_at - interval '1 min'"
            )
        )


@contextmanager
def redis(app: Celery) -> Iterator[Any]:
    """A client of the fleet's Redis."""
    with app.connection_for_read() as connection:
        yield connection.default_channel.client


def length(app: Celery, lane: str = "cpu") -> int:
    """Messages in a lane's queue."""
    with redis(app) as client:
        return client.llen(broker.queue(lane).name)


def look_again(app: Celery) -> None:
    """Let the time pass after which Redis is looked through again."""
    with redis(app) as client:
        assert 0 < client.ttl("kqueue.sweeper") <= LOOK_EVERY_S
        client.delete("kqueue.sweeper")


def test_unsent_messages_are_sent_once(engine: Engine, app: Celery, fields) -> None:
    """What its producer did not send is sent; the next sweep finds nothing to do."""
    ids = submit(engine, fields, 5)
    assert sweep(engine, app, retry_delay_s=1) == SweepReport(swept=True, published=5)
    assert broker.waiting(app, "cpu") == set(ids)
    assert sweep(engine, app, retry_delay_s=1).published == 0


def test_a_long_queue_is_not_sent_again(engine: Engine, app: Celery, fields) -> None:
    """However long evaluations wait in Redis, no second message joins them, more than a page of them included."""
    ids = submit(engine, fields, 1100)
    sweep_all(engine, app)
    assert length(app) == 1100
    look_again(app)
    assert sweep(engine, app, retry_delay_s=1) == SweepReport(swept=True)
    assert length(app) == 1100
    assert broker.waiting(app, "cpu") == set(ids)


def test_lost_messages_are_sent_again(engine: Engine, app: Celery, fields) -> None:
    """Exactly those that Redis lost, also when others still wait there; strangers' messages do not disturb."""
    ids = submit(engine, fields, 6)
    sweep(engine, app, retry_delay_s=1)
    with redis(app) as client:
        client.rpop(broker.queue("cpu").name, 2)
        client.lpush(broker.queue("cpu").name, "not json", '{"headers": {"id": 3}}')
    assert sweep(engine, app, retry_delay_s=1).published == 0
    look_again(app)
    assert sweep(engine, app, retry_delay_s=1) == SweepReport(swept=True, missing=2, published=2)
    assert broker.waiting(app, "cpu") == set(ids)


def test_an_emptied_redis_is_filled_at_once(engine: Engine, app: Celery, fields) -> None:
    """By hand, as by whatever else: no interval passes before everything queued is there again, in order."""
    ids = submit(engine, fields, 700)
    sweep_all(engine, app)
    with redis(app) as client:
        client.flushall()
    assert sweep(engine, app, retry_delay_s=1).missing == 700
    sweep_all(engine, app)
    assert broker.waiting(app, "cpu") == set(ids)
    assert length(app) == 700


def test_a_redis_emptied_while_it_is_looked_through_is_noticed(engine: Engine, app: Celery, fields) -> None:
    """What is lost between the look and its note is not taken for seen."""
    ids = submit(engine, fields, 5)
    sweep(engine, app, retry_delay_s=1)
    look_again(app)
    with broker.unseen(app, every_s=60) as unseen:
        assert unseen
        assert broker.waiting(app, "cpu") == set(ids)
        with redis(app) as client:
            client.flushall()
    assert sweep(engine, app, retry_delay_s=1).published == 5
    assert broker.waiting(app, "cpu") == set(ids)


def test_another_server_in_the_place_of_redis_is_noticed(engine: Engine, fields, tmp_path: Path) -> None:
    """A restart without its data, and one with data that are older: the server's run id tells."""
    with Valkey(tmp_path / "valkey") as service, broker.make_app(load(redis_url=service.url)) as app:
        ids = submit(engine, fields, 3)
        sweep(engine, app, retry_delay_s=1)
        service.stop()
        service.start()
        with redis(app) as client:
            # Its data came back, the marker among them, but for one message.
            assert client.exists("kqueue.sweeper")
            client.rpop(broker.queue("cpu").name)
        assert sweep(engine, app, retry_delay_s=1).published == 1
        assert broker.waiting(app, "cpu") == set(ids)


def test_redis_without_memory_is_borne(engine: Engine, own_valkey: Valkey, fields) -> None:
    """It refuses to take messages, which is no failure of the sweep; when it has room again they are sent."""
    with broker.make_app(load(redis_url=own_valkey.url)) as app:
        broker.check(app)
        ids = submit(engine, fields, 3)
        with redis(app) as client:
            client.config_set("maxmemory", 1)
        report = sweep(engine, app, retry_delay_s=1)
        assert (report.published, report.swept) == (0, True)
        assert report.broker_error is not None
        assert "maxmemory" in report.broker_error
        with pytest.raises(BrokerUnavailable, match="maxmemory"):
            broker.publish(app, [message()])
        with redis(app) as client:
            client.config_set("maxmemory", 0)
        assert sweep(engine, app, retry_delay_s=1).published == 3
        assert broker.waiting(app, "cpu") == set(ids)


def test_a_redis_that_hangs_is_given_up(own_valkey: Valkey) -> None:
    """Whoever sends goes on; the message that it may have taken nevertheless harms nobody."""
    first, last = message(), message()
    with broker.make_app(load(redis_url=own_valkey.url), patience_s=0.5) as app:
        broker.publish(app, [first])
        assert own_valkey.pid is not None
        os.kill(own_valkey.pid, signal.SIGSTOP)
        try:
            # Once, and not for each message, which would take longer than this test may.
            with pytest.raises(BrokerUnavailable, match="KQUEUE_REDIS_URL"):
                broker.publish(app, [message() for _ in range(400)])
        finally:
            os.kill(own_valkey.pid, signal.SIGCONT)
        broker.publish(app, [last])
        assert {first.evaluation_id, last.evaluation_id} <= broker.waiting(app, "cpu")


def test_every_lane_has_its_queue(engine: Engine, app: Celery, fields) -> None:
    """A message goes to the lane that its evaluation was accepted for."""
    ids = submit(engine, fields, 1, lane="gpu.h200")
    sweep(engine, app, retry_delay_s=1)
    assert broker.waiting(app, "gpu.h200") == set(ids)
    assert length(app, "cpu") == 0


def test_redis_down_is_borne(engine: Engine, own_valkey: Valkey, fields, tmp_path: Path) -> None:
    """Without Redis everything else is done; when it is back, the messages are sent."""
    with broker.make_app(load(redis_url=own_valkey.url)) as app:
        own_valkey.stop()
        submit(engine, fields, 3)
        expired = submit(engine, fields, 1, queue_wait_s=1)
        report = sweep(engine, app, retry_delay_s=1)
        assert (report.swept, report.published, report.expired) == (True, 0, 1)
        assert report.broker_error is not None
        assert "KQUEUE_REDIS_URL" in report.broker_error
        with pytest.raises(BrokerUnavailable, match="KQUEUE_REDIS_URL"):
            broker.publish(app, [message()])
        with pytest.raises(BrokerUnavailable, match="KQUEUE_REDIS_URL"):
            broker.waiting(app, "cpu")
        own_valkey.start()
        assert sweep(engine, app, retry_delay_s=1).published == 3
        assert expired[0] not in broker.waiting(app, "cpu")


def test_a_restart_of_redis_loses_no_message(engine: Engine, own_valkey: Valkey, fields) -> None:
    """A connection that broke between two messages is opened again."""
    with broker.make_app(load(redis_url=own_valkey.url)) as app:
        broker.publish(app, [message()])
        own_valkey.stop()
        own_valkey.start()
        broker.publish(app, [message()])
        assert len(broker.waiting(app, "cpu")) == 2


def test_sweeps_use_one_connection(engine: Engine, own_valkey: Valkey) -> None:
    """However many there are: a fleet sweeps as long as it lives."""
    with broker.make_app(load(redis_url=own_valkey.url)) as app, redis(app) as client:
        sweep(engine, app, retry_delay_s=1)
        before = client.info("stats")["total_connections_received"]
        for _ in range(3):
            assert sweep(engine, app, retry_delay_s=1).broker_error is None
        assert client.info("stats")["total_connections_received"] == before


def test_a_fleet_is_idle_when_all_have_their_verdicts(engine: Engine, app: Celery, fields) -> None:
    """While any evaluation is queued or runs there is something to lose."""
    assert sweep(engine, app, retry_delay_s=1).idle
    [identity] = submit(engine, fields, 1)
    assert not sweep(engine, app, retry_delay_s=1).idle
    evaluations.cancel(engine, identity)
    assert sweep(engine, app, retry_delay_s=1).idle


def test_silent_workers_are_given_up(engine: Engine, app: Celery, fields, worker_id: UUID) -> None:
    """The attempt of a silent worker is retried, its message sent when due, and the worker marked as stopped."""
    (identity,) = submit(engine, fields, 1)
    assert evaluations.claim(engine, identity, worker_id=worker_id, lease_s=30) is not None
    with engine.begin() as connection:
        connection.execute(text("UPDATE attempts SET lease_until = now() - interval '1 s'"))
        connection.execute(text("UPDATE workers SET heartbeat_at = now() - interval '2 min'"))
    report = sweep(engine, app, retry_delay_s=0)
    assert report == SweepReport(True, ((identity, Recorded.RETRY),), stopped_workers=1, published=1)
    assert workers.live(engine, within_s=3600) == []


def test_two_sweepers_do_no_harm(engine: Engine, app: Celery, fields) -> None:
    """Of sweepers at the same moment one works; nothing is sent twice."""
    ids = submit(engine, fields, 200)
    with ThreadPoolExecutor(4) as pool:
        reports = list(pool.map(lambda _: sweep(engine, app, retry_delay_s=1), range(4)))
    assert sum(report.published for report in reports) == length(app) == 200
    assert broker.waiting(app, "cpu") == set(ids)
    with engine.connect() as connection:
        held = connection.scalars(text("SELECT count(*) FROM pg_locks WHERE locktype = 'advisory'")).one()
    assert held == 0
    assert sweep(engine, app, retry_delay_s=1).swept
