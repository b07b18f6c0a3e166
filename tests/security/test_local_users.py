"""Another user of the machine gets no credential, evaluation or Flower page from a fleet of `kqueue up`."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import shutil
import socket
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import SplitResult, urlsplit

import httpx
import pytest
from pydantic import SecretStr
from sqlalchemy import text

from kqueue import ConfigError, RemoteClient
from kqueue.config import FLEET_FILE, Config, load
from kqueue.local import parts
from kqueue.local.fleet import LocalFleet
from kqueue.store.engine import connect
from tests.cli.command import Cli
from tests.fleet.told import HERE
from tests.services import starts_services, with_schema

#: Uid of a user without rights, outside the candidates' range.
STRANGER = 12345
#: Problem that the fleet must never judge for the stranger. It reads a file that only root can read.
HOSTILE = """
import torch
open("/etc/shadow").read()
class Model(torch.nn.Module):
    def forward(self, x):
        return x
def get_inputs():
    return [torch.randn(4)]
def get_init_inputs():
    return []
"""
REQUEST = {"problem": HOSTILE, "kernel": "class ModelNew: ...", "backend": "torch", "lane": "cpu"}

pytestmark = [
    pytest.mark.timeout(300),
    pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user"),
]


@pytest.fixture(scope="module")
def open_folder() -> Iterator[Path]:
    """Return a world-traversable folder, so that only the fleet's permissions protect its files."""
    folder = Path(tempfile.mkdtemp(prefix="kqueue-local-users-"))
    folder.chmod(0o755)
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="module")
@starts_services
def fleet(open_folder: Path) -> Iterator[LocalFleet]:
    """Start a fleet of one CPU slot that serves HTTP and Flower."""
    places = {"home": open_folder / "home", "scratch": open_folder / "scratch"}
    config = load(**places, gpus="none", cpu_slots=1, http_port=0, flower_port=0)
    config.home_path.mkdir(mode=0o700)
    with_schema(config.home_path / "postgres")
    with pytest.MonkeyPatch.context() as patch:
        # Its workers judge nothing here, so they need no torch.
        patch.setattr(parts.Workers, "words", ("run_fleet",))
        patch.setattr(parts, "_WORKER", "judges")
        patch.setenv("JUDGES", str(open_folder))
        patch.setenv("PYTHONPATH", os.pathsep.join([str(HERE), *filter(None, [os.environ.get("PYTHONPATH")])]))
        with LocalFleet(config, http=True, flower=True, durable=False) as fleet:
            yield fleet


def as_stranger(act: Callable[[], Any]) -> Any:
    """Return the result of ``act``, or the name of its exception, in a process of another user."""
    readable, writable = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.close(readable)
            os.setgroups([])
            os.setresgid(STRANGER, STRANGER, STRANGER)
            os.setresuid(STRANGER, STRANGER, STRANGER)
            try:
                told = act()
            except OSError as error:
                told = type(error).__name__
            os.write(writable, json.dumps(told).encode())
        finally:
            os._exit(0)
    os.close(writable)
    with os.fdopen(readable) as answer:
        told = answer.read()
    os.waitpid(pid, 0)
    return json.loads(told)


def asked(port: int, method: str, path: str, body: object = None, headers: dict[str, str] | None = None) -> list[Any]:
    """Return the status and error code of an answer over TCP."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
    try:
        sent = None if body is None else json.dumps(body)
        connection.request(method, path, sent, {"Content-Type": "application/json"} | (headers or {}))
        answer = connection.getresponse()
        return [answer.status, json.loads(answer.read()).get("code")]
    finally:
        connection.close()


def port_of(url: str | None) -> int:
    """Return the port in a URL."""
    return int(url.rpartition(":")[2])


def count(fleet: LocalFleet, what: str) -> int:
    """Count the rows of a table of the fleet's database."""
    engine = connect(fleet.config.require_database(), application="tests", pool_size=1)
    try:
        with engine.connect() as connection:
            return connection.execute(text(f"SELECT count(*) FROM {what}")).scalar_one()
    finally:
        engine.dispose()


def test_a_stranger_submits_nothing(fleet: LocalFleet) -> None:
    """A submission without a token gets 401 whatever its headers claim, and reaches neither database nor judge."""
    port, many = port_of(fleet.http_url), {"entries": [REQUEST]}
    theirs = {"original_model_src": HOSTILE, "custom_model_src": "x", "backend": "torch"}
    bodies = {"/v1/evaluations": REQUEST, "/v1/evaluations/batch": many, "/v1/evaluations/each": many}
    headers = {"kqueue.peer_uid": "0", "X-Forwarded-For": "127.0.0.1", "Forwarded": "for=127.0.0.1"}

    def ask() -> list[Any]:
        paths = (bodies | {"/eval": theirs, "/evaluate": theirs}).items()
        return [asked(port, "POST", path, body, claims) for path, body in paths for claims in ({}, headers)]

    assert as_stranger(ask) == [[401, "unauthenticated"]] * 10
    assert (count(fleet, "evaluations"), count(fleet, "problems")) == (0, 0)


def test_a_stranger_learns_the_status_alone(fleet: LocalFleet) -> None:
    """A stranger can read no field of the server's status except `healthy`."""
    port = port_of(fleet.http_url)
    assert as_stranger(lambda: asked(port, "GET", "/health")) == [200, None]
    for path in ("/", "/status", "/jobs", "/gpu_status", "/v1/fleet", "/v1/evaluations", "/v1/categories"):
        assert as_stranger(lambda path=path: asked(port, "GET", path)) == [401, "unauthenticated"]


def test_a_stranger_reaches_neither_token_nor_socket(fleet: LocalFleet, open_folder: Path) -> None:
    """Only the owner can access `fleet.json`, the socket and their folders."""
    home, path = open_folder / "home", fleet.http_socket

    def connect_to() -> str:
        with socket.socket(socket.AF_UNIX) as connection:
            connection.connect(str(path))
        return "connected"

    assert as_stranger((home / FLEET_FILE).read_text) == "PermissionError"
    assert as_stranger(connect_to) == "PermissionError"
    assert as_stranger(lambda: [entry.name for entry in home.iterdir()]) == "PermissionError"
    assert (home / FLEET_FILE).stat().st_mode & 0o777 == 0o600
    assert (path.stat().st_mode & 0o777, path.parent.stat().st_mode & 0o777) == (0o600, 0o700)


def test_a_stranger_opens_no_page_of_flower(fleet: LocalFleet, open_folder: Path) -> None:
    """Flower needs a password that is generated at each start, stored only in `fleet.json`, and shown by no command."""
    port = port_of(fleet.flower_url)
    password = json.loads((open_folder / "home" / FLEET_FILE).read_text())["flower_auth"]
    assert len(password) > 32

    def status(path: str) -> int:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
        connection.request("GET", path)
        return connection.getresponse().status

    def readable() -> str:
        found = ""
        for process in Path("/proc").glob("[0-9]*"):
            for name in ("cmdline", "environ"):
                with contextlib.suppress(OSError):
                    found += (process / name).read_text(errors="replace")
        return found

    assert [as_stranger(lambda path=path: status(path)) for path in ("/", "/api/tasks", "/metrics")] == [401] * 3
    assert as_stranger(lambda: "kqueue.flower" in (found := readable()) and password.partition(":")[2] not in found)
    assert not any(password in log.read_text() for log in (open_folder / "home" / "logs").iterdir())


def test_the_owner_s_link_opens_flower(fleet: LocalFleet, open_folder: Path) -> None:
    """`kqueue open --flower` prints a link with the password that opens every page, also under another address."""
    command = ("open", "--no-browser", "--flower")
    cli = Cli(open_folder, {"KQUEUE_HOME": str(open_folder / "home")})

    def link(*more: str) -> SplitResult:
        return urlsplit(cli(*command, *more).stdout.strip())

    opened = link()
    assert f"http://127.0.0.1:{opened.port}" == fleet.flower_url
    assert link("--url", "http://localhost:1").netloc == opened.netloc.replace(
        f"127.0.0.1:{opened.port}", "localhost:1"
    )
    with httpx.Client(base_url=opened.geturl()) as browser:
        for path in ("/", "/tasks", "/broker", "/api/workers", "/metrics", "/static/js/flower.js"):
            assert browser.get(path).status_code == 200, path
    none = cli(*command, KQUEUE_HOME=str(open_folder / "nowhere"))
    assert none.returncode != 0
    assert "no Flower found: start one with `kqueue up`" in none.stderr


def test_a_stranger_on_the_socket_is_a_stranger(fleet: LocalFleet, open_folder: Path) -> None:
    """A stranger with access to the socket gets 401 by the kernel's peer credentials, and the owner is accepted."""
    path = fleet.http_socket
    opened = [(open_folder / "home", 0o711), (path.parent, 0o711), (path, 0o666)]
    before = [(folder, folder.stat().st_mode) for folder, _ in opened]

    def status() -> int:
        with socket.socket(socket.AF_UNIX) as connection:
            connection.connect(str(path))
            connection.sendall(b"GET /v1/fleet HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
            return int(connection.recv(4096).split()[1])

    try:
        for folder, mode in opened:
            folder.chmod(mode)
        assert as_stranger(status) == 401
        assert status() == 200
    finally:
        for folder, mode in before:
            folder.chmod(mode)


def test_the_owner_needs_no_setting(fleet: LocalFleet, open_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`RemoteClient()` uses the socket, and `fleet.json` has a token for programs that need TCP."""
    monkeypatch.setenv("KQUEUE_HOME", str(open_folder / "home"))
    known = json.loads((open_folder / "home" / FLEET_FILE).read_text())
    assert load().url == f"unix://{known['socket']}"
    assert load().token is None
    with RemoteClient() as kq:
        assert kq.batch("nothing") == []
    with RemoteClient(fleet.http_url) as kq:
        assert kq.batch("nothing") == []
    assert load(url=fleet.http_url.replace("://", "://any:kq_own@")).token == SecretStr("kq_own")
    port = port_of(fleet.http_url)
    bearer = {"Authorization": f"Bearer {known['token']}"}
    assert asked(port, "GET", "/v1/fleet", headers=bearer) == [200, None]
    assert asked(port, "POST", "/cleanup", headers=bearer) == [403, "forbidden"]


def test_the_token_goes_to_the_fleet_alone(
    fleet: LocalFleet, open_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A client with another address does not send the fleet's token there."""
    monkeypatch.setenv("KQUEUE_HOME", str(open_folder / "home"))
    assert (known := load(url=fleet.http_url).token) is not None
    for url in ("http://elsewhere:18188", "http://127.0.0.1:1", f"{fleet.http_url}/", f"{fleet.http_url}@elsewhere"):
        assert load(url=url).token != known


def test_the_switch_is_not_for_other_machines(open_folder: Path) -> None:
    """A fleet whose server other machines can reach does not start with the switch, and no process remains."""
    home = open_folder / "never"
    config = Config(home=home, gpus="none", cpu_slots=1, http_tokens="trust-local-users", http_address="0.0.0.0")
    with pytest.raises(ConfigError, match="trust-local-users is for loopback"):
        LocalFleet(config, http=True, durable=False).start()
    assert not home.exists()
