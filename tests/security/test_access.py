"""Redis in the compose stack: each user has the rights that its service needs, and no more."""

from __future__ import annotations

import json
import re
import shlex
import urllib.error
from collections.abc import Iterator
from typing import Any

import pytest
import redis
from typer.testing import CliRunner

from kqueue import broker, sweeper
from kqueue.cli import app
from kqueue.client import Client
from kqueue.errors import BrokerUnavailable
from tests.fleet.told import fleets
from tests.security.house import House, command_lines, running_flower, tables
from tests.waiting import until

pytest.importorskip("flower")

LANE = broker.queue("cpu").name
EVERYBODY = {"producer", "worker", "flower"}
#: Commands of Redis and their users. All other users are refused, except the operator.
COMMANDS = {
    "producer worker flower": "PING; PUBLISH /0.celery.pidbox x; PUBLISH /0.celeryev/task.sent x",
    "producer worker": f"INFO; LPUSH {LANE} x; LPUSH kqueue.gpu.h200 x",
    "worker flower": f"LLEN {LANE}; BRPOP x.reply.celery.pidbox 1; PUBLISH /0.celeryev/worker.heartbeat x",
    "worker": f"LRANGE {LANE} 0 -1; BRPOP {LANE} 1; DEL {LANE}; TYPE {LANE}; GET kqueue.sweeper; "
    "SET kqueue.sweeper x; LPUSH x.reply.celery.pidbox x",
    "": f"LPUSH kqueue.sweeper x; LPUSH mine x; RPOP {LANE}; EXPIRE {LANE} 1; SET {LANE} x; HGET unacked x; "
    "SADD _kombu.binding.celeryev x; "
    """PUBLISH mine x; EVAL "return redis.call('flushall')" 0; FLUSHALL; FLUSHDB; KEYS *; SCAN 0; CONFIG GET *; """
    "CONFIG SET dir /tmp; ACL LIST; ACL SETUSER mine on nopass +@all; CLIENT LIST; CLIENT KILL TYPE normal; MONITOR; "
    "SHUTDOWN NOSAVE; REPLICAOF 127.0.0.1 1; MODULE LIST; SCRIPT FLUSH; FUNCTION LIST; SAVE; SWAPDB 0 1; "
    f"RENAME {LANE} mine; RESTORE mine 0 x; MIGRATE 127.0.0.1 1 {LANE} 0 1",
}


def test_a_user_may_do_what_it_needs_and_nothing_else(house: House) -> None:
    for user in sorted(EVERYBODY):
        with redis.Redis.from_url(house.guarded.url_of(user)) as client:
            for command, who in ((one, who) for who, several in COMMANDS.items() for one in several.split("; ")):
                refused = False
                try:
                    client.execute_command(*shlex.split(command))
                except redis.exceptions.NoPermissionError:
                    refused = True
                except redis.exceptions.ResponseError as error:
                    refused = "ACL failure" in str(error) or "can't run this command" in str(error)
                assert refused is (user not in who.split()), (user, command)
    with redis.Redis.from_url(house.guarded.url_of("operator")) as client:
        client.flushall()
    house.refusals()


def test_nobody_gets_in_without_a_name(house: House) -> None:
    """A login without a password, or with another user's, is refused."""
    place = f"127.0.0.1:{house.guarded.port}/0"
    for who in ("", f":{house.guarded.passwords['operator']}@", f"producer:{house.guarded.passwords['worker']}@"):
        with redis.Redis.from_url(f"redis://{who}{place}") as client, pytest.raises(redis.exceptions.ConnectionError):
            client.ping()
    house.refusals()


@pytest.fixture(scope="module")
def lived(house: House) -> Iterator[Any]:
    """Start a fleet with the worker's rights, and Flower with Flower's."""
    with (
        fleets(house.services) as start,
        running_flower(house.services.config(redis_url=house.guarded.url_of("flower")), _log(house)) as flower,
    ):
        yield start(**house.settings("worker")), flower


def _log(house: House) -> Any:
    return house.services.directory / "flower.log"


def _kqueue(house: House, *arguments: str) -> Any:
    """Run a command as a producer in this process."""
    settings = house.services.config(**house.settings("producer")).environment()
    return CliRunner().invoke(app, arguments, env=settings, catch_exceptions=False)


def _sent(client: Client, kernel: str) -> Any:
    return client.submit(problem="p", kernel=kernel, backend="torch", lane="cpu")


def test_a_whole_life_with_no_more_rights_than_these(house: House, lived: Any) -> None:
    """Submitting, judging, cancelling, listing, sweeping and Flower need no command that Redis refuses."""
    fleet, flower = lived
    house.refusals()
    with Client(**house.settings("producer")) as client:
        assert _sent(client, "ok").wait(60).category == "passed"
        running = _sent(client, "sleep 60")
        house.services.started(running.evaluation_id)
        queued = _sent(client, "ok # queued")
        assert queued.cancel()
        assert running.cancel()
        until(lambda: not [w for w in fleet.live() if w.busy_with], what="the worker's freedom")
        assert _sent(client, "ok # after").wait(60).category == "passed"
        for command in (["status"], ["doctor", "--json"], ["show", str(running.evaluation_id)], ["results"]):
            done = _kqueue(house, *command)
            assert "NOPERM" not in done.output
            assert command[0] == "doctor" or done.exit_code == 0, done.output
        # A message that Redis lost is sent again.
        waiting = _sent(client, "sleep 1")
        lost = _sent(client, "ok # lost")
        with redis.Redis.from_url(house.guarded.url_of("operator")) as operator:
            operator.flushall()
        house.services.age()
        assert [v.category for v in client.wait_all([waiting, lost], 90)] == ["passed", "passed"]

        # Flower shows, counts and cancels.
        until(lambda: flower.get("/api/tasks"), what="a task in Flower")
        assert flower.get("/api/workers?refresh=true")
        assert {queue["name"] for queue in flower.get("/api/queues/length")["active_queues"]} == {LANE}
        for page in ("/", "/tasks", "/broker", f"/task/{lost.evaluation_id}", f"/worker/{fleet.live()[0].name}"):
            assert flower.text(page)
        revoked = _sent(client, "sleep 60 # by Flower")
        house.services.started(revoked.evaluation_id)
        flower.text(f"/api/task/revoke/{revoked.evaluation_id}?terminate=true&signal=SIGKILL", post=True)
        assert revoked.wait(30).category == "cancelled"
    assert house.refusals() == []
    assert "NOPERM" not in fleet.log.read_text() + _log(house).read_text()


def test_labels_are_shown_as_text(house: House, lived: Any) -> None:
    """Markup, escapes and reversed text in a label have no effect in Flower's pages or a terminal."""
    _, flower = lived
    evil = "<script>alert(1)</script>\"'><img src=x onerror=alert(2)>\x1b]0;title\x07\x1b[2J\u202egnp.exe\u2066"
    with Client(**house.settings("producer")) as client:
        ticket = client.submit(
            problem="p",
            kernel="ok # evil",
            backend="torch",
            lane="cpu",
            kernel_label=evil,
            problem_label=evil,
            batch=evil,
        )
        assert ticket.wait(60).category == "passed"
    identity = ticket.evaluation_id
    until(lambda: str(identity) in flower.text("/api/tasks"), what="the task in Flower")
    pages = {page: flower.text(page) for page in (f"/task/{identity}", "/tasks", "/workers")}
    assert "&lt;script&gt;alert(1)" in pages[f"/task/{identity}"]
    known = json.dumps(flower.get(f"/api/task/info/{identity}"), ensure_ascii=False)
    for what in (*pages.values(), known):
        assert "<img src=x" not in what or what is known
        assert "<script>alert" not in what or what is known
        assert not re.search("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]", what)
    for command in (["show", str(identity), "--source", "--log"], ["results"], ["show", str(identity), "--json"]):
        done = _kqueue(house, *command)
        assert done.exit_code == 0, done.output
        assert "alert(1)" in done.stdout
        assert not re.search("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]", done.output)
        if "--json" in command:
            assert done.stdout.isascii()
            assert json.loads(done.stdout)["kernel_label"] == evil


def test_such_a_life_says_no_password(house: House, lived: Any) -> None:
    """Logs, command lines, Flower's pages and all tables hold no password. test_secrets.py covers failures."""
    fleet, flower = lived
    with Client(**house.settings("producer")) as client:
        failed = _sent(client, "raise")
        assert failed.wait(60).category == "judge_error"
    until(lambda: str(failed.evaluation_id) in flower.text("/api/tasks"), what="the task in Flower")
    pages = ("/", "/tasks", "/broker", "/api/tasks", "/api/workers", f"/task/{failed.evaluation_id}")
    said = {page: flower.text(page) for page in pages} | tables(house.services.engine)
    said |= {log.name: log.read_text() for log in (fleet.log, _log(house))} | {"processes": command_lines()}
    assert all(said[where] for where in (*pages, "verdicts", fleet.log.name, "processes"))
    assert [where for where, what in said.items() if "marked" in what] == []  # the prefix of all passwords


def test_flower_sends_no_task(house: House, lived: Any) -> None:
    """Flower's API offers to send tasks, but Redis refuses them."""
    _, flower = lived
    with pytest.raises(urllib.error.HTTPError):
        flower.text(f"/api/task/send-task/{broker.EVALUATE}", post=True)
    house.refusals()


def test_a_sweeper_is_a_worker(house: House) -> None:
    """`kqueue sweep` and the supervisor need a worker's rights, and a producer that sweeps gets an error."""
    settings = house.services.config(**house.settings("worker"))
    engine = house.services.engine
    assert sweeper.sweep(engine, broker.make_app(settings), retry_delay_s=1.0).broker_error is None
    with pytest.raises(BrokerUnavailable, match="permissions"):
        broker.waiting(broker.make_app(house.services.config(**house.settings("producer"))), "cpu")
    house.refusals()
