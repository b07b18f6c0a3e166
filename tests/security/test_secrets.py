"""Runs a whole fleet with Flower through many failures, and searches all output for its marked passwords."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import threading
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import redis
from sqlalchemy.engine import make_url

from kqueue.client import Client
from tests.fleet.told import fleets
from tests.security.house import House, command_lines, running_flower, tables
from tests.services import free_port
from tests.waiting import until
from workers.judge.host import linux

pytest.importorskip("flower")
pytestmark = [pytest.mark.nightly, pytest.mark.timeout(900)]

#: Prefix of every password of the house.
MARK = "marked"

LOOKING = """
import os, sys
import torch

def look():
    print("ENVIRONMENT", dict(os.environ))
    for process in ("self", str(os.getppid())):
        for file in ("environ", "cmdline"):
            try:
                print(process, file, open(f"/proc/{process}/{file}", "rb").read())
            except OSError as error:
                print(process, file, "refused")

class ModelNew(torch.nn.Module):
    def forward(self, x):
        look()
        raise RuntimeError(repr(dict(os.environ)))
"""
PROBLEM = """
import torch

class Model(torch.nn.Module):
    def forward(self, x):
        return x + 1

def get_inputs():
    return [torch.ones(8)]

def get_init_inputs():
    return []
"""


@dataclass
class Said:
    """All texts that were written, shown, sent or stored, by place."""

    by: dict[str, str] = field(default_factory=dict[str, str])

    def add(self, where: str, what: str) -> None:
        """Add a text."""
        self.by[where] = self.by.get(where, "") + what


def command(house: House, said: Said, *arguments: str, **settings: str) -> None:
    """Run a command with settings, whatever its status, and collect its output."""
    environment = os.environ | house.services.config(**settings).environment()
    done = subprocess.run(
        [sys.executable, "-P", *arguments], env=environment, capture_output=True, text=True, timeout=170
    )
    said.add(f"{arguments[-1]} with {sorted(settings)}", done.stdout + done.stderr)


BROKEN = """
from kqueue.config import load
from kqueue import broker
from kqueue.store.engine import connect, transaction
import sys, traceback
config = load()
print(config, repr(config), vars(config))
engine = connect(config.require_database(), application="tests")
print(engine, repr(engine), engine.url)
app = broker.make_app(config)
print(app, app.conf.humanize(), app.connection())
for act in (lambda: broker.check(app), lambda: transaction(engine).__enter__()):
    try:
        act()
    except Exception:
        traceback.print_exc()
transaction(engine).__enter__()
"""


@pytest.fixture(scope="module")
def said(house: House) -> Said:
    """Run a fleet through many failures and return the collected texts."""
    said = Said()
    services, directory = house.services, house.services.directory
    heard: list[bytes] = []
    with redis.Redis.from_url(house.guarded.url_of("operator")) as operator, operator.pubsub() as events:
        events.psubscribe("*")
        stop = threading.Event()
        listener = threading.Thread(target=_listen, args=(events, heard, stop), daemon=True)
        listener.start()
        flower_config = services.config(
            redis_url=house.guarded.url_of("flower"), flower_auth=f"ann:{house.guarded.passwords['operator']}"
        )
        with (
            running_flower(flower_config, directory / "flower.log") as flower,
            Client(**house.settings("producer")) as client,
        ):
            looked = _judge_for_real(house, client, said)
            with fleets(services) as start:
                fleet = start(**house.settings("worker"), log_level="DEBUG")
                raised = client.submit(problem="p", kernel="raise", backend="torch", lane="cpu")
                assert raised.wait(90).category == "judge_error"
                operator.lpush("kqueue.cpu", b"no JSON", json.dumps({"headers": {}}))
                said.add("processes", command_lines())
                for kind in ("status", "doctor", "results"):
                    command(house, said, "-m", "kqueue", kind, **house.settings("producer"))
                until(lambda: flower.get("/api/tasks"), what="a task in Flower")
                until(lambda: flower.get("/api/workers?refresh=true"), what="a worker in Flower")
                worker = fleet.live()[0].name
                pages = ["/", "/tasks", "/workers", "/broker", "/metrics", f"/worker/{worker}", f"/task/{looked}"]
                for page in [*pages, "/api/tasks", "/api/workers", f"/api/task/info/{raised.evaluation_id}"]:
                    said.add("Flower's pages", flower.text(page))
                _go_wrong(house, said)
                # Both services stop and return while the fleet and Flower run.
                stop.set()
                listener.join()
                services.postgres.stop()
                house.guarded.stop()
                until(lambda: "Postgres is away" in fleet.log.read_text(), what="the outage")
                command(house, said, "-m", "kqueue", "status", **house.settings("producer"))
                services.postgres.start()
                house.guarded.start()
                assert client.submit(problem="p", kernel="ok", backend="torch", lane="cpu").wait(120).passed
    said.add("events", b"\n".join(heard).decode(errors="replace"))
    for log in directory.rglob("*.log"):
        said.add(f"log {log.name}", log.read_text(errors="replace"))
    for table, rows in tables(services.engine).items():
        said.add(f"table {table}", rows)
    return said


def _listen(events: Any, heard: list[bytes], stop: threading.Event) -> None:
    while not stop.is_set():
        message = events.get_message(timeout=0.2)
        if message and message["type"] == "pmessage":
            heard.append(message["data"])


def _judge_for_real(house: House, client: Client, said: Said) -> Any:
    """Have a real worker judge a kernel that searches its environment."""
    with fleets(house.services) as start:
        [worker] = start(true=True, slots=1, **house.settings("worker")).live()
        for pid in (worker.pid, *linux.children(worker.pid)):
            said.add("environments of workers", Path(f"/proc/{pid}/environ").read_text(errors="replace"))
        ticket = client.submit(problem=PROBLEM, kernel=LOOKING, backend="torch", lane="cpu")
        verdict = ticket.wait(160)
        assert verdict.category == "runtime_error", verdict
        said.add("what a candidate saw", verdict.log + verdict.message + verdict.facts.model_dump_json())
    return ticket.evaluation_id


def _go_wrong(house: House, said: Said) -> None:
    """Use wrong passwords and addresses without a server."""
    right = house.settings("producer")
    database = make_url(right["database_url"])
    away = database.set(host="127.0.0.1", port=free_port(), query={})
    wrong = {
        "database_url": database.set(password=f"{MARK}wrong").render_as_string(hide_password=False),
        "redis_url": right["redis_url"].replace(MARK, f"{MARK}wrong"),
    }
    gone = {
        "database_url": away.render_as_string(hide_password=False),
        "redis_url": re.sub(r":\d+/0", f":{free_port()}/0", right["redis_url"]),
    }
    for other in (wrong, gone):
        for service in ("database_url", "redis_url"):
            settings = right | {service: other[service]}
            command(house, said, "-m", "kqueue", "status", **settings)
            command(house, said, "-c", BROKEN, **settings)
            command(house, said, "-m", "workers.fleet", **settings)
        command(house, said, "-m", "kqueue", "doctor", **other)
    refused = [what for what in said.by.values() if "password authentication failed" in what]
    assert refused, "the wrong password was not even tried"


def test_no_secret_is_said_anywhere(said: Said) -> None:
    """No secret is in logs, arguments, environments of workers and candidates, Flower, tables, output or tracebacks."""
    expected = {
        "processes",
        "environments of workers",
        "what a candidate saw",
        "Flower's pages",
        "events",
        "table verdicts",
    }
    assert expected <= set(said.by)
    assert all(said.by[where] for where in expected)
    assert "ENVIRONMENT" in said.by["what a candidate saw"]
    assert any("Traceback" in what for what in said.by.values())
    leaks = {where: what[max(0, at - 200) : at + 60] for where, what in said.by.items() if (at := what.find(MARK)) >= 0}
    assert leaks == {}
