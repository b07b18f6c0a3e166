"""Postgres, Redis and Flower with the logins of strangers and roles."""

from __future__ import annotations

import base64
import json
import os
import re
import secrets
import socket
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import redis
from sqlalchemy import Engine, text

from kqueue.config import Config
from kqueue.local.servers import Valkey
from kqueue.store.models import Base
from tests.chaos.family import words
from tests.fleet.told import Services
from tests.services import free_port
from tests.waiting import below, until

ROOT = Path(__file__).parents[2]


def answers(port: int) -> bool:
    """Return whether the port accepts connections."""
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def user_lines() -> dict[str, str]:
    """Return the ACL of each Redis user in docker-compose.yml, by name, with ``{password}`` for the password."""
    found = re.findall(r"^ +user (\w+) (.*)$", (ROOT / "docker-compose.yml").read_text(), re.MULTILINE)
    return {name: re.sub(r">\$\{\w+\}", ">{password}", rules) for name, rules in found}


class Guarded(Valkey):
    """A Valkey on a loopback port, with the users of the compose stack and new passwords."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        self.port = free_port()
        self.passwords = {name: f"marked{secrets.token_hex(16)}" for name in user_lines() if name != "default"}

    def _command(self, program: Path, sockets: Path) -> list[str]:
        command = super()._command(program, sockets)
        command[command.index("--port") + 1] = str(self.port)
        return [*command, "--bind", "127.0.0.1"]

    def start(self) -> Any:
        super().start()
        # Through the socket, while the default user still exists.
        with redis.Redis.from_url(self.url.replace("redis+socket://", "unix://")) as client:
            for name, rules in sorted(user_lines().items(), key=lambda user: user[0] == "default"):
                client.execute_command("ACL", "SETUSER", name, *rules.format(password=self.passwords.get(name)).split())
        return self

    def url_of(self, name: str) -> str:
        """Return the URL for one of the users."""
        return f"redis://{name}:{self.passwords[name]}@127.0.0.1:{self.port}/0"


@dataclass
class House:
    """Postgres and Redis with the roles' logins and users, and the owner's view of them."""

    services: Services
    guarded: Guarded
    logins: dict[str, str] = field(default_factory=dict[str, str])

    def settings(self, role: str) -> dict[str, str]:
        """Return the addresses for ``producer`` or ``worker``."""
        return {"database_url": self.logins[role], "redis_url": self.guarded.url_of(role)}

    def refusals(self) -> list[Any]:
        """Return Redis's refusals since the last call."""
        with redis.Redis.from_url(self.guarded.url_of("operator"), decode_responses=True) as client:
            found = [(e["username"], e["reason"], e["object"], e["context"]) for e in client.acl_log()]
            client.acl_log_reset()
        return found


def command_lines() -> str:
    """Return the command lines of all processes below this one, which every user of the machine can read."""
    return "\n".join(" ".join(words(pid)) for pid in below(os.getpid()))


def tables(engine: Engine) -> dict[str, str]:
    """Return the content of each table of the database."""
    with engine.connect() as connection:
        rows = {name: f'SELECT row_to_json(t)::text FROM "{name}" AS t' for name in Base.metadata.tables}
        return {name: "\n".join(connection.scalars(text(query))) for name, query in rows.items()}


@contextmanager
def running_flower(config: Config, log: Path) -> Iterator[Flower]:
    """Run Flower on a free loopback port, in its log's folder, by the command of `kqueue up` and the compose file."""
    port, auth = free_port(), f"ann:marked{secrets.token_hex(8)}"
    environment = os.environ | config.environment()
    environment |= {"FLOWER_ADDRESS": "127.0.0.1", "FLOWER_PORT": str(port), "FLOWER_BASIC_AUTH": auth}
    command = [sys.executable, "-P", "-m", "kqueue.flower"]
    with log.open("ab") as out:
        process = subprocess.Popen(command, env=environment, cwd=log.parent, stdout=out, stderr=out)
    try:
        until(lambda: answers(port), 150, "Flower")
        yield Flower(f"http://127.0.0.1:{port}", auth, process.pid)
    finally:
        process.terminate()
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


@dataclass
class Flower:
    """A running Flower."""

    url: str
    auth: str
    pid: int

    def text(self, path: str, *, post: bool = False) -> str:
        """Return its answer as text."""
        encoded = base64.b64encode(self.auth.encode()).decode()
        request = urllib.request.Request(
            self.url + path, headers={"Authorization": f"Basic {encoded}"}, method="POST" if post else "GET"
        )
        with urllib.request.urlopen(request, timeout=30) as answer:
            return answer.read().decode()

    def get(self, path: str) -> Any:
        """Return its API's answer."""
        return json.loads(self.text(path))
