"""Services with a standby: Valkey with a replica and a Sentinel, and Postgres with a streaming standby."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final
from urllib.parse import quote

import psycopg
import redis

from kqueue.local import servers
from kqueue.local.servers import Postgres, Valkey
from kqueue.store.engine import parse
from tests.services import free_port, with_schema
from tests.waiting import until

#: The name by which the Sentinel knows the primary.
NAME: Final = "kqueue-test"
PASSWORD: Final = "marked-of-valkey"
SENTINELS_PASSWORD: Final = "marked-of-sentinels"
#: The Sentinel's settings. A primary counts as lost after 5 s without an answer.
_SENTINEL: Final = f"""
port {{port}}
bind 127.0.0.1
dir {{here}}
requirepass {SENTINELS_PASSWORD}
sentinel monitor {NAME} 127.0.0.1 {{primary}} 1
sentinel auth-pass {NAME} {PASSWORD}
sentinel down-after-milliseconds {NAME} 5000
sentinel failover-timeout {NAME} 20000
"""


class Node(Valkey):
    """A Valkey on a loopback port with a password: a primary, or a replica of another node."""

    password = PASSWORD

    def __init__(self, directory: Path, of: Node | None = None) -> None:
        super().__init__(directory)
        self.port = free_port()
        self._primary = of

    def client(self) -> redis.Redis:
        """Return a client of this node."""
        return redis.Redis(port=self.port, password=self.password, socket_timeout=5, decode_responses=True)

    def ready(self) -> bool:
        try:
            with self.client() as client:
                return client.ping()
        except redis.RedisError:
            return False

    def _command(self, program: Path, sockets: Path) -> list[str]:
        command = super()._command(program, sockets)
        command[command.index("--port") + 1] = str(self.port)
        command += ["--bind", "127.0.0.1", "--requirepass", PASSWORD, "--masterauth", PASSWORD]
        return [*command, "--replicaof", f"127.0.0.1 {self._primary.port}"] if self._primary else command


class Sentinel(Node):
    """A Sentinel, which promotes the replica of a lost primary."""

    password = SENTINELS_PASSWORD

    def _command(self, program: Path, sockets: Path) -> list[str]:
        assert self._primary is not None
        settings = self._directory / "sentinel.conf"
        settings.write_text(_SENTINEL.format(port=self.port, here=self._data, primary=self._primary.port))
        return [str(program), str(settings), "--sentinel"]

    @property
    def fleets_url(self) -> str:
        """Return the URL for a fleet. Its first address is of a Sentinel that is gone."""
        gone = f"sentinel://:{PASSWORD}@127.0.0.1:{free_port()}"
        query = f"master_name={NAME}&sentinel_password={SENTINELS_PASSWORD}"
        return f"{gone};sentinel://127.0.0.1:{self.port}/0?{query}"

    def state(self) -> dict[str, Any]:
        """Return what the Sentinel knows of the primary."""
        with self.client() as client:
            return client.sentinel_masters()[NAME]


@contextmanager
def sentinel(directory: Path) -> Iterator[tuple[Node, Node, Sentinel]]:
    """Run a primary, its replica, and a Sentinel that knows both."""
    with (
        Node(directory / "a") as primary,
        Node(directory / "b", primary) as replica,
        Sentinel(directory / "sentinel", primary) as watching,
    ):
        until(lambda: watching.state()["num-slaves"] == 1, what="the Sentinel's replica")
        until(lambda: replica.client().info()["master_link_status"] == "up", what="replication")
        yield primary, replica, watching


@contextmanager
def streaming(directory: Path, *, synchronous: bool) -> Iterator[tuple[Postgres, Postgres, str]]:
    """Run a primary and a standby that streams from it. Yield both, and libpq's URL, in which the standby is first."""
    directory.mkdir()
    with Postgres(with_schema(directory / "a"), durable=False) as primary:
        data = directory / "b" / "data"
        data.parent.mkdir(mode=0o700)
        copy = [str(primary._program() / "pg_basebackup"), "-h", str(primary._sockets), "-U", "postgres"]
        copy += ["-D", str(data), "-R", "-X", "stream", "-c", "fast"]
        subprocess.run(copy, check=True, env=servers.clean_environment())
        with Postgres(directory / "b", durable=False) as standby:
            if synchronous:
                execute(primary.url, "ALTER SYSTEM SET synchronous_standby_names = '*'", "SELECT pg_reload_conf()")
            wanted = "sync" if synchronous else "async"
            streams = "SELECT 1 FROM pg_stat_replication WHERE state = 'streaming' AND sync_state = %s"
            until(lambda: execute(primary.url, (streams, wanted)), what="replication")
            hosts = ",".join(f"{quote(str(server._sockets), safe='')}:5432" for server in (standby, primary))
            yield primary, standby, f"postgresql+psycopg://postgres@{hosts}/kqueue"


def execute(url: str, *statements: str | tuple[Any, ...]) -> list[Any]:
    """Run statements, each with its values if it is a tuple. Return the last one's rows."""
    with psycopg.connect(parse(url).set(drivername="postgresql").render_as_string(), autocommit=True) as connection:
        for statement in statements:
            text, *values = (statement,) if isinstance(statement, str) else statement
            cursor = connection.execute(text, values)
        return cursor.fetchall() if cursor.description else []
