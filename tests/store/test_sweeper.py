"""The sweeper: Postgres restores all losses of Redis, a worker or a producer."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any
from uuid import UUID, uuid4

import pytest
from celery import Celery
from redis import Redis
from sqlalchemy import Engine, text

from kqueue import broker
from kqueue.config import Config, load
from kqueue.contract import Request
from kqueue.errors import BrokerUnavailable
from kqueue.local.servers import Valkey
from kqueue.message import Message
from kqueue.store import evaluations, workers
from kqueue.store.evaluations import Recorded
from kqueue.sweeper import LOOK_EVERY_S, SweepReport, fill, fill_alone, sweep
from tests.services import starts_services
from tests.store.steps import LOST, change, count, finish


@pytest.fixture
def app(config: Config) -> Iterator[Celery]:
    """The fleet's Celery application."""
    with broker.make_app(config) as app:
        yield app


@pytest.fixture(scope="module")
@starts_services
def modules_valkey(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Valkey]:
    """A Valkey that tests can stop."""
    with Valkey(tmp_path_factory.mktemp("valkey")) as service:
        yield service


@pytest.fixture
def own_valkey(modules_valkey: Valkey) -> Valkey:
    """A Valkey that the test can stop, running, with memory, and empty."""
    modules_valkey.start()
    with Redis.from_url(modules_valkey.url.replace("redis+socket://", "unix://")) as client:
        client.config_set("maxmemory", 0)
        client.flushall()
    return modules_valkey


def submit(engine: Engine, fields, count: int, **changes: object) -> list[UUID]:
    """Submit evaluations without messages, and return their ids."""
    submitted = evaluations.submit(engine, [Request(**fields(n, **changes)) for n in range(count)])
    return [s.evaluation_id for s in submitted]


def message() -> Message:
    return Message(uuid4(), "cpu", deadlines_s=1, label="x")


def older(engine: Engine) -> None:
    """Make all evaluations a minute older."""
    change(
        engine,
        "UPDATE evaluations SET submitted_at = submitted_at - interval '1 min', "
        "expires_at = expires_at - interval '1 min'",
    )


@contextmanager
def redis(app: Celery) -> Iterator[Any]:
    """Open a client of the fleet's Redis."""
    with app.connection_for_read() as connection:
        yield connection.default_channel.client


def in_order(app: Celery, lane: str = "cpu") -> list[UUID]:
    """Return the evaluations of a lane's queue, the next one first."""
    with redis(app) as client:
        found = client.lrange(broker.queue(lane).name, 0, -1)
    return [UUID(json.loads(message)["headers"]["id"]) for message in reversed(found)]


def length(app: Celery, lane: str = "cpu") -> int:
    with redis(app) as client:
        return client.llen(broker.queue(lane).name)


def look_again(app: Celery) -> None:
    """End the interval between two searches of Redis."""
    with redis(app) as client:
        assert 0 < client.ttl("kqueue.sweeper") <= LOOK_EVERY_S
        client.delete("kqueue.sweeper")


def test_a_forged_mark_hides_no_loss(engine: Engine, app: Celery, fields) -> None:
    """A mark of a search, or of a chore's turn, that is not text or expires too late does not prevent the next one."""
    ids = submit(engine, fields, 2)
    sweep(engine, app, retry_delay_s=1)
    for forged in ({}, {"ex": 10**6}, None):
        with redis(app) as client:
            run = client.info("server")["run_id"]
            client.delete(broker.queue("cpu").name, "kqueue.sweeper", "kqueue.sweeper.probes")
            for key in ("kqueue.sweeper", "kqueue.sweeper.probes"):
                client.hset(key, "x", "x") if forged is None else client.set(key, run, **forged)
        assert broker.turn(app, "probes", every_s=60), forged
        assert not broker.turn(app, "probes", every_s=60)
        assert sweep(engine, app, retry_delay_s=1).missing == 2, forged
        assert in_order(app) == ids


@pytest.mark.parametrize("kind", ["string", pytest.param("set", marks=pytest.mark.nightly)])
def test_a_queue_that_is_no_list_is_removed(
    engine: Engine, app: Celery, fields, caplog: pytest.LogCaptureFixture, kind: str
) -> None:
    """A search, an arrangement and a sender each remove it with one warning."""
    name = broker.queue("cpu").name
    ids = submit(engine, fields, 2)
    for act in (
        lambda: broker.waiting(app, "cpu"),
        lambda: broker.arrange(app, "cpu", ids),
        lambda: broker.publish(app, evaluations.publish(engine, ids)),
    ):
        with redis(app) as client:
            client.set(name, "x") if kind == "string" else client.sadd(name, "x")
        caplog.clear()
        act()
        assert [record.getMessage() for record in caplog.records] == [
            f"a forged key was removed from Redis: 'kqueue.cpu' is a {kind} and must be a list"
        ]
    assert in_order(app) == ids


def test_unsent_messages_are_sent_once(engine: Engine, app: Celery, fields) -> None:
    """Messages that the producer did not send are sent to their lanes, and the next sweep has no work."""
    assert sweep(engine, app, retry_delay_s=1).idle
    ids, others = submit(engine, fields, 5), submit(engine, fields, 1, lane="gpu.h200")
    assert sweep(engine, app, retry_delay_s=1) == SweepReport(swept=True, published=6)
    assert (broker.waiting(app, "cpu"), broker.waiting(app, "gpu.h200")) == (set(ids), set(others))
    assert sweep(engine, app, retry_delay_s=1) == SweepReport(swept=True)
    for identity in ids + others:
        evaluations.cancel(engine, identity)
    assert sweep(engine, app, retry_delay_s=1).idle


def test_redis_holds_the_next_ones(engine: Engine, app: Celery, fields, worker_id: UUID) -> None:
    """The queue is limited to a window, and later evaluations follow in order when earlier ones are claimed or end."""
    ids = submit(engine, fields, 200)
    size = evaluations.window(1)
    assert sweep(engine, app, retry_delay_s=1).published == size
    assert in_order(app) == ids[:size]
    look_again(app)
    assert sweep(engine, app, retry_delay_s=1) == SweepReport(swept=True)
    with redis(app) as client:
        client.rpop(broker.queue("cpu").name, 2)
    assert evaluations.claim(engine, ids[0], worker_id=worker_id, lease_s=30)
    evaluations.cancel(engine, ids[1])
    evaluations.cancel(engine, ids[4])
    assert fill_alone(engine, app)
    assert in_order(app) == [ids[2], ids[3], *ids[5 : size + 3]]
    assert evaluations.published(engine) == {"cpu": set(in_order(app))}


def test_dead_messages_go(engine: Engine, app: Celery, fields, worker_id: UUID) -> None:
    """Messages of cancelled evaluations, duplicates and foreign messages are removed, even from an idle queue."""
    ids = submit(engine, fields, 5)
    sweep(engine, app, retry_delay_s=1)
    with redis(app) as client:
        client.lpush(broker.queue("cpu").name, "not json", *client.lrange(broker.queue("cpu").name, 0, 1))
    fill(engine, app)
    assert in_order(app) == ids
    for identity in ids:
        evaluations.cancel(engine, identity)
    fill(engine, app)
    assert length(app) == 0


def test_whose_turn_it_is_changes(engine: Engine, app: Celery, fields) -> None:
    """A message in Redis is replaced by one that is now ahead of it."""
    ids = submit(engine, fields, 30)
    fill(engine, app)
    change(engine, "UPDATE evaluations SET priority = 'interactive' WHERE id = :id", id=ids[-1])
    fill(engine, app)
    assert in_order(app) == [ids[-1], *ids[: evaluations.window(0) - 1]]
    assert evaluations.published(engine) == {"cpu": set(in_order(app))}


def test_a_retry_waits_for_the_sweep(engine: Engine, app: Celery, fields, worker_id: UUID) -> None:
    """A worker could just have refused it, so the fill after submissions and ends does not send it again."""
    (identity,) = submit(engine, fields, 1)
    claimed = evaluations.claim(engine, identity, worker_id=worker_id, lease_s=30)
    assert claimed is not None
    finish(engine, claimed, LOST)
    assert fill_alone(engine, app)
    assert length(app) == 0
    assert sweep(engine, app, retry_delay_s=1).published == 1


def test_submissions_and_fills_at_once(engine: Engine, app: Celery, fields) -> None:
    """Producers and sweepers together send the next evaluations to Redis, each once."""

    def act(number: int) -> None:
        if number % 2:
            fill(engine, app)
            return
        submitted = evaluations.submit(engine, [Request(**fields(n)) for n in range(5)], slots={"cpu": 8})
        if messages := [s.message for s in submitted if s.next]:
            broker.publish(app, messages)

    with ThreadPoolExecutor(6) as pool:
        list(pool.map(act, range(24)))
    fill(engine, app)
    assert in_order(app) == [one.id for one in evaluations.upcoming(engine, {})["cpu"]]


def test_lost_messages_are_sent_again(engine: Engine, app: Celery, fields) -> None:
    """Exactly the lost ones are sent, also from a queue with other messages, and foreign messages are ignored."""
    ids = submit(engine, fields, 6)
    sweep(engine, app, retry_delay_s=1)
    with redis(app) as client:
        client.rpop(broker.queue("cpu").name, 2)
        client.lpush(broker.queue("cpu").name, "not json", '{"headers": {"id": 3}}')
    assert sweep(engine, app, retry_delay_s=1).published == 0
    assert length(app) == 4
    look_again(app)
    assert sweep(engine, app, retry_delay_s=1) == SweepReport(swept=True, missing=2, published=2)
    assert broker.waiting(app, "cpu") == set(ids)
    # An emptied Redis is filled at once and in order, without a wait for the interval.
    with redis(app) as client:
        client.flushall()
    assert sweep(engine, app, retry_delay_s=1) == SweepReport(swept=True, missing=6, published=6)
    assert in_order(app) == ids


def test_a_redis_emptied_while_it_is_looked_through_is_noticed(engine: Engine, app: Celery, fields) -> None:
    """A loss between the search and its mark is found."""
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


def test_another_server_in_the_place_of_redis_is_noticed(engine: Engine, own_valkey: Valkey, fields) -> None:
    """The server's run id reveals a restart without data or with older data."""
    with broker.make_app(load(redis_url=own_valkey.url)) as app:
        ids = submit(engine, fields, 3)
        sweep(engine, app, retry_delay_s=1)
        own_valkey.stop()
        own_valkey.start()
        with redis(app) as client:
            # All data returned, including the mark, except one message.
            assert client.exists("kqueue.sweeper")
            client.rpop(broker.queue("cpu").name)
        assert sweep(engine, app, retry_delay_s=1).published == 1
        assert broker.waiting(app, "cpu") == set(ids)


def test_redis_without_memory_is_borne(engine: Engine, own_valkey: Valkey, fields) -> None:
    """Its refusal of messages is no failure of the sweep, and they are sent when it has memory again."""
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
    """The sender times out, and a message that Redis accepted nevertheless does no harm."""
    first, last = message(), message()
    with broker.make_app(load(redis_url=own_valkey.url), patience_s=0.5) as app:
        broker.publish(app, [first])
        assert own_valkey.pid is not None
        os.kill(own_valkey.pid, signal.SIGSTOP)
        try:
            # One timeout for all messages. One for each would exceed the test's time.
            with pytest.raises(BrokerUnavailable, match="KQUEUE_REDIS_URL"):
                broker.publish(app, [message() for _ in range(400)])
        finally:
            os.kill(own_valkey.pid, signal.SIGCONT)
        broker.publish(app, [last])
        assert {first.evaluation_id, last.evaluation_id} <= broker.waiting(app, "cpu")


def test_a_restart_of_redis_loses_no_message(engine: Engine, own_valkey: Valkey) -> None:
    """A connection that broke between two messages is opened again, and all sweeps share one connection."""
    with broker.make_app(load(redis_url=own_valkey.url)) as app:
        broker.publish(app, [message()])
        own_valkey.stop()
        own_valkey.start()
        broker.publish(app, [message()])
        assert len(broker.waiting(app, "cpu")) == 2
        sweep(engine, app, retry_delay_s=1)
        with redis(app) as client:
            before = client.info("stats")["total_connections_received"]
            for _ in range(3):
                assert sweep(engine, app, retry_delay_s=1).broker_error is None
            assert client.info("stats")["total_connections_received"] == before
        own_valkey.stop()
        for call in (lambda: broker.publish(app, [message()]), lambda: broker.waiting(app, "cpu")):
            with pytest.raises(BrokerUnavailable, match="KQUEUE_REDIS_URL"):
                call()


def test_silent_workers_are_given_up(engine: Engine, app: Celery, fields, worker_id: UUID) -> None:
    """A silent worker's attempt is retried, its message is sent when due, and the worker is marked as stopped."""
    (identity,) = submit(engine, fields, 1)
    assert evaluations.claim(engine, identity, worker_id=worker_id, lease_s=30) is not None
    change(engine, "UPDATE attempts SET lease_until = now() - interval '1 s'")
    change(engine, "UPDATE workers SET heartbeat_at = now() - interval '2 min'")
    report = sweep(engine, app, retry_delay_s=0)
    assert report == SweepReport(True, ((identity, Recorded.RETRY),), stopped_workers=1, published=1)
    assert workers.live(engine, within_s=3600) == []


def test_two_sweepers_do_no_harm(engine: Engine, app: Celery, fields) -> None:
    """One of the concurrent sweepers works, and no message is sent twice."""
    ids = submit(engine, fields, 200)
    with ThreadPoolExecutor(4) as pool:
        reports = list(pool.map(lambda _: sweep(engine, app, retry_delay_s=1), range(4)))
    size = evaluations.window(0)
    assert sum(report.published for report in reports) == length(app) == size
    assert in_order(app) == ids[:size]
    with engine.connect() as connection:
        query = (
            "SELECT count(*) FROM pg_locks WHERE relation = 'workers'::regclass AND mode = 'ShareUpdateExclusiveLock'"
        )
        held = connection.scalars(text(query)).one()
    assert held == 0
    assert sweep(engine, app, retry_delay_s=1).swept


def test_a_clock_that_was_set_back_delays_no_queued_evaluation(app: Celery, engine: Engine, submit, claim) -> None:
    """Evaluations that were submitted or tried in the future become due. The long delay of a retry does not end."""
    submit()
    tried, waits = submit(), submit()
    for identity in (tried, waits):
        evaluations.finish(engine, identity, claim(identity).number, LOST, written_by="judge", retry_delay_s=1000)
    ahead = "UPDATE evaluations SET available_at = available_at + interval '1 hour'"
    change(engine, f"{ahead}, submitted_at = submitted_at + interval '1 hour' WHERE attempts = 0")
    change(engine, f"{ahead} WHERE id = :id", id=tried)
    change(engine, "UPDATE attempts SET ended_at = ended_at + interval '1 hour' WHERE evaluation_id = :id", id=tried)
    assert sweep(engine, app, retry_delay_s=1).published == 2
    assert count(engine, "evaluations", "available_at > now() AND published_at IS NULL") == 1
