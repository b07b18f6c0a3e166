"""Redis in the compose stack: each user has the rights that its service needs, and no more. Access to Flower."""

from __future__ import annotations

import base64
import http.client
import itertools
import json
import re
import shlex
import socket
import urllib.error
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import redis
from typer.testing import CliRunner

from kqueue import broker, sweeper
from kqueue.cli import app
from kqueue.client import Client
from kqueue.errors import BrokerUnavailable
from kqueue.flower import GuardedFlower
from tests.fleet.told import Fleet, Services, fleets
from tests.security.house import Flower, House, command_lines, running_flower, tables
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
def services(house: House) -> Services:
    return house.services


@pytest.fixture(scope="module")
def flower(house: House) -> Iterator[Flower]:
    """Start Flower with Flower's rights, in a folder with a stranger's configuration for it."""
    directory = house.services.directory
    (directory / "flowerconfig.py").write_text("open('planted', 'w')\n")
    with running_flower(house.services.config(redis_url=house.guarded.url_of("flower")), _log(house)) as flower:
        yield flower
    assert not (directory / "planted").exists()


@pytest.fixture(scope="module")
def fleet(house: House, flower: Flower) -> Iterator[Fleet]:
    """Start a fleet with the worker's rights, whose events reach Flower."""

    def seen() -> bool:
        house.services.verdict(house.services.submit("ok"))
        return any(True for _ in flower.get("/api/tasks"))

    with fleets(house.services) as start:
        fleet = start(**house.settings("worker"))
        until(seen, what="Flower's first event")
        yield fleet


def _log(house: House) -> Any:
    return house.services.directory / "flower.log"


def _kqueue(house: House, *arguments: str) -> Any:
    """Run a command as a producer in this process."""
    settings = house.services.config(**house.settings("producer")).environment()
    return CliRunner().invoke(app, arguments, env=settings, catch_exceptions=False)


def _sent(client: Client, kernel: str) -> Any:
    return client.submit(problem="p", kernel=kernel, backend="torch", lane="cpu")


def _queues(flower: Flower) -> dict[str, list[str]]:
    """Ask the workers for their queues through Flower. Return the answers of those that answered within a second."""
    workers = flower.get("/api/workers?refresh=true").items()
    return {name: [queue["name"] for queue in one["active_queues"]] for name, one in workers if "active_queues" in one}


def test_a_whole_life_with_no_more_rights_than_these(house: House, fleet: Fleet, flower: Flower) -> None:
    """Submitting, judging, cancelling, listing, sweeping and Flower need no command that Redis refuses."""
    house.refusals()
    with Client(**house.settings("producer")) as client:
        assert _sent(client, "ok").wait(60).category == "passed"
        running = _sent(client, "sleep 60")
        house.services.started(running.evaluation_id)
        assert _sent(client, "ok # queued").cancel()
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
        until(lambda: _queues(flower), what="a worker in Flower")
        assert {queue["name"] for queue in flower.get("/api/queues/length")["active_queues"]} == {LANE}
        for page in ("/", "/tasks", "/broker", f"/task/{lost.evaluation_id}", f"/worker/{fleet.live()[0].name}"):
            assert flower.text(page)
        revoked = _sent(client, "sleep 60 # by Flower")
        house.services.started(revoked.evaluation_id)
        flower.text(f"/api/task/revoke/{revoked.evaluation_id}?terminate=true&signal=SIGKILL", post=True)
        assert revoked.wait(90).category == "cancelled"
    assert house.refusals() == []
    assert "NOPERM" not in fleet.log.read_text() + _log(house).read_text()


def test_labels_are_shown_as_text(house: House, fleet: Fleet, flower: Flower) -> None:
    """Markup, escapes and reversed text in a label have no effect in Flower's pages or a terminal."""
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


def test_such_a_life_says_no_password(house: House, fleet: Fleet, flower: Flower) -> None:
    """Logs, command lines, Flower's pages and all tables hold no password. test_secrets.py covers failures."""
    with Client(**house.settings("producer")) as client:
        failed = _sent(client, "raise")
        assert failed.wait(60).category == "judge_error"
    until(lambda: str(failed.evaluation_id) in flower.text("/api/tasks"), what="the task in Flower")
    pages = ("/", "/tasks", "/broker", "/api/tasks", "/api/workers", f"/task/{failed.evaluation_id}")
    said = {page: flower.text(page) for page in pages} | tables(house.services.engine)
    said |= {log.name: log.read_text() for log in (fleet.log, _log(house))} | {"processes": command_lines()}
    assert all(said[where] for where in (*pages, "verdicts", fleet.log.name, "processes"))
    assert [where for where, what in said.items() if "marked" in what] == []  # the prefix of all passwords


def test_flower_sends_no_task(house: House, fleet: Fleet, flower: Flower) -> None:
    """Flower's API offers to send tasks, but Redis refuses them."""
    with pytest.raises(urllib.error.HTTPError):
        flower.text(f"/api/task/send-task/{broker.EVALUATE}", post=True)
    house.refusals()


def test_a_sweeper_is_a_worker(house: House) -> None:
    """`kqueue sweep` and the supervisor need a worker's rights, and a producer that sweeps gets an error."""
    settings = house.services.config(**house.settings("worker"))
    assert sweeper.sweep(house.services.engine, broker.make_app(settings), retry_delay_s=1.0).broker_error is None
    with pytest.raises(BrokerUnavailable, match="permissions"):
        broker.waiting(broker.make_app(house.services.config(**house.settings("producer"))), "cpu")
    house.refusals()


# Flower ------------------------------------------------------------------------------------------------

SECRET = "ok # the source of a kernel that nobody else may see"


def _task(services: Services, flower: Flower, identity: Any, state: str) -> dict[str, Any]:
    def look() -> dict[str, Any] | None:
        try:
            task = flower.get(f"/api/task/info/{identity}")
        except urllib.error.HTTPError:
            return None
        return task if task["state"] == state else None

    return services.until(look, what=f"{state} in Flower")


def test_a_finished_evaluation(services: Services, flower: Flower, fleet: Fleet) -> None:
    """Name, id, labels, lane and category are shown, but not the source."""
    identity = services.submit(SECRET, problem_label="softmax", kernel_label="v7")
    task = _task(services, flower, identity, "SUCCESS")
    assert task["name"] == "kqueue.evaluate"
    assert str(identity) in task["args"]
    assert all(word in task["kwargs"] for word in ("softmax", "v7", "cpu"))
    assert "'category': 'passed'" in task["result"]
    assert "nobody else may see" not in json.dumps(flower.get("/api/tasks"))


def test_a_killed_judge(services: Services, flower: Flower, fleet: Fleet) -> None:
    """The failure is readable, not `ExceptionWithTraceback()`."""
    for kernel, limit, shown in (
        ("wrong", None, "wrong_values (blame: candidate)"),
        ("exit 3", None, "judge_error: the judge exited with status 3"),
        ("gil", 1, "judge_error: the judge overran Celery's hard limit"),
    ):
        assert _task(services, flower, services.submit(kernel, time_limit=limit), "FAILURE")["exception"] == shown


def _status(flower: Flower, path: str, *, method: str = "GET", host: str | None = None, auth: str | bytes = "") -> int:
    """Request a page of Flower by the name ``host`` with the credentials ``auth``."""
    port = int(flower.url.rpartition(":")[2])
    encoded = base64.b64encode(auth.encode() if isinstance(auth, str) else auth).decode()
    headers = ({"Authorization": f"Basic {encoded}"} if auth else {}) | ({"Host": host} if host is not None else {})
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    try:
        connection.request(method, path, headers=headers)
        return connection.getresponse().status
    finally:
        connection.close()


def test_forged_tables_do_not_blind_flower(house: House, flower: Flower, fleet: Fleet) -> None:
    """Values of any type under keys that stock kombu would read do not stop Flower."""
    with redis.Redis.from_url(house.guarded.url_of("operator")) as client:
        for key in ("_kombu.binding.reply.celery.pidbox", "_kombu.binding_permanent.celeryev", "flower.unacked"):
            client.set(key, "x")
    [live] = fleet.live()
    until(lambda: _queues(flower) == {live.name: ["kqueue.cpu"]}, what="the worker's queue in Flower")


#: Paths of pages, the API, metrics, files, and a missing page.
PATHS = ("/", "/tasks", "/task/x/healthcheck", "/broker", "/api/tasks", "/metrics", "/static/js/flower.js", "/nothing")


def test_only_the_password_opens_a_page(flower: Flower) -> None:
    """Without the password only the health check answers, without any data."""
    for auth in ("", "ann", "ann:", "ann:wrong", "\xe4nn:pass", b"\xff\xfe:\x00"):
        assert {path: _status(flower, path, auth=auth) for path in PATHS} == dict.fromkeys(PATHS, 401), auth
        assert _status(flower, "/api/task/revoke/x", method="POST", auth=auth) == 401
        assert _status(flower, "/api/tasks", method="OPTIONS", auth=auth) == 401
        assert _status(flower, "/healthcheck", auth=auth) == 200
    found = {path: _status(flower, path, auth=flower.auth) for path in PATHS}
    assert found == dict.fromkeys(PATHS, 200) | {"/task/x/healthcheck": 404, "/nothing": 404}


def test_only_names_of_this_machine_are_accepted(flower: Flower) -> None:
    """A page that points its own name to Flower's address reaches nothing, even with the password."""
    evil = ("evil.example", "127.0.0.1.evil.example:5555", "localhost.evil.example", "[::1", "evil", "127.0.0.1:x@evil")
    for host, path in itertools.product(evil, ("/", "/api/tasks", "/healthcheck")):
        assert _status(flower, path, host=host, auth=flower.auth) in {400, 403}, (host, path)
    for host in ("127.0.0.1:80", "localhost:5555", "LOCALHOST", "[::1]:5555", "10.1.2.3:5555", socket.gethostname()):
        assert _status(flower, "/api/tasks", host=host, auth=flower.auth) == 200, host


def test_flower_does_not_start_without_a_password() -> None:
    """Missing credentials, or ones that Flower would misread, end the start with a message."""
    for known in (None, [], [""], ["ann"], ["ann:"], [":pass"], ["ann:pa", "ss"], ["ann:p\xe4ss"]):
        with pytest.raises(SystemExit, match="user:password"):
            GuardedFlower(options=SimpleNamespace(basic_auth=known))
