"""The one-machine fleet: its parts, its discovery by clients, and its complete end."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from kqueue.categories import Category
from kqueue.client.remote import RemoteClient
from kqueue.config import FLEET_FILE, Config, load
from kqueue.errors import LocalFleetError
from kqueue.http import OPEN_WARNING
from kqueue.local.fleet import LocalFleet
from kqueue.local.parts import Supervised
from kqueue.local.process import Lock, command_line, running
from kqueue.local.servers import Postgres
from kqueue.store import tokens
from kqueue.store.engine import connect
from tests.chaos.family import descriptors
from tests.cli.command import COMMAND, Cli
from tests.samples import RELU, RELU_KERNEL
from tests.services import with_schema
from tests.waiting import below, proc, until
from workers.judge.host import scratch

pytestmark = pytest.mark.services


def until_gone(pids: list[int]) -> None:
    until(lambda: not any(map(running, pids)), what="the end of all processes")


@pytest.fixture
def open_home() -> Iterator[Path]:
    """Return a folder that candidates can traverse to their scratch, because pytest's folders are private."""
    folder = Path(tempfile.mkdtemp(prefix="kqueue-test-"))
    folder.chmod(0o711)
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


def command(home: Path, *arguments: str) -> subprocess.Popen[str]:
    """Start `kqueue up` with one CPU slot. It ignores SIGINT, like in a shell's background, and SIGHUP."""

    def ignore() -> None:
        for signum in (signal.SIGINT, signal.SIGHUP):
            signal.signal(signum, signal.SIG_IGN)

    environment = dict(os.environ) | {"KQUEUE_HOME": str(home), "KQUEUE_SCRATCH": str(home.parent / "scratch")}
    return subprocess.Popen(
        [*COMMAND, "up", "--gpus", "none", "--cpu-slots", "1", *arguments],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        bufsize=1,
        preexec_fn=ignore,
    )


def read_until(process: subprocess.Popen[str], text: str) -> str:
    """Return the output of ``process`` up to the line that holds ``text``."""
    assert process.stdout is not None
    said = ""
    for line in process.stdout:
        said += line
        if text in line:
            return said
    raise AssertionError(f"it ended without saying {text!r}:\n{said}")


@pytest.mark.nightly
def test_fleet_judges_and_is_found_and_leaves_nothing(open_home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel is judged despite late HTTP, which is reported, clients find the fleet, and all its processes end."""
    monkeypatch.setattr("kqueue.local.parts._LATE_S", 0.5)
    home = open_home / "home"
    config = Config(home=home, scratch=open_home / "scratch", gpus="none", cpu_slots=1, http_port=0)
    before = set(below(os.getpid()))  # processes of other tests
    stopped: list[int] = []
    said: list[str] = []

    def report(line: str) -> None:
        said.append(line)
        if line.startswith("Valkey is up"):
            # From now on each HTTP server is stopped once it runs.
            threading.Thread(target=stop_http).start()

    def stop_http() -> None:
        stopped[:] = until(http_servers)
        for pid in stopped:
            os.kill(pid, signal.SIGSTOP)

    def http_servers() -> list[int]:
        return [pid for pid in below(os.getpid()) if pid not in before and "serve" in command_line(pid)]

    with LocalFleet(config, http=True, durable=False, report=report) as fleet:
        children = [pid for pid in below(os.getpid()) if pid not in before]
        assert any(line.startswith("HTTP is not up after") for line in said)
        assert any(line.startswith("the worker fleet is up") for line in said)
        assert not any("another fleet" in line for line in said)
        assert [slot.lanes for slot in fleet.slots()] == [("cpu",)]
        kernel = RELU_KERNEL.format("return torch.relu(x)")
        with fleet.client() as kq:
            settings = {"checks": 1, "timing": {"purpose": "check"}}
            verdict = kq.evaluate(problem=RELU, kernel=kernel, backend="torch", lane="cpu", settings=settings)
        assert verdict.category is Category.PASSED, f"{verdict.message}\n{verdict.log}"
        for pid in stopped:
            os.kill(pid, signal.SIGCONT)
        until(lambda: fleet.look() or [line for line in said if line.startswith("HTTP is up")])
        assert http_servers() == stopped

        assert (home / FLEET_FILE).stat().st_mode & 0o777 == 0o600
        found = load(home=home)
        assert (found.database_url, found.redis_url) == (fleet.config.database_url, fleet.config.redis_url)
        assert found.url == f"unix://{fleet.http_socket}"
        with RemoteClient(found.url) as kq:
            assert kq.verdict(verdict.evaluation_id) == verdict
        # The error names the owner of the home, but not the port, although both fleets use the same.
        second = command(home, "--no-flower", "--http-port", fleet.http_url.rpartition(":")[2])
        told, _ = second.communicate(timeout=120)
        assert (second.returncode, f"in use by process {os.getpid()}" in told) == (3, True), told
        assert load(home=home).database_url == fleet.config.database_url
    until_gone(children)
    assert not (home / FLEET_FILE).exists()
    assert load(home=home).database_url is None
    assert "SIGKILL" not in (home / "logs" / "workers.log").read_text()


@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    "lives", [[None], pytest.param([signal.SIGKILL, signal.SIGTERM, signal.SIGINT], marks=pytest.mark.nightly)], ids=len
)
def test_lives_of_up(open_home: Path, lives: list[signal.Signals | None], monkeypatch: pytest.MonkeyPatch) -> None:
    """It restarts its parts, gives only servers secrets, outlives its terminal, and `kqueue down` ends it."""
    home = open_home / "home"
    with_schema(home / "postgres")
    for name in ("KQUEUE_OIDC_CLIENT_SECRET", "KQUEUE_CALLBACK_SECRET"):
        monkeypatch.setenv(name, "only for servers")
    secrets: list[str] = []
    keys: set[str] = set()
    for number, last in enumerate(lives):
        process = command(home, "--no-flower") if number else command(home, "--flower-port", "0")
        try:
            said = read_until(process, "Ctrl-C")
            ups = [f"{part} is up, after " for part in ("Postgres", "Valkey", "the worker fleet")]
            slots = "cpu (1 slot)" if not secrets else "cpu ("  # a killed fleet is still counted for a while
            for words in (*ups, slots, str(home), f"unix://{home}/run/http.sock", "http      http://127.0."):
                assert words in said
            assert ("kqueue open --flower` logs a browser in" in said) is (number == 0)
            assert OPEN_WARNING not in said
            known = json.loads((home / FLEET_FILE).read_text())
            secrets.append(known["token"])
            assert valid_tokens(known["database_url"], secrets) == [False] * (len(secrets) - 1) + [True]
            key = home / "receipts.pem"
            keys.add(key.read_text())
            assert key.stat().st_mode & 0o777 == 0o600
            children = list(below(process.pid))
            told = [pid for pid in children if "only for" in proc(pid, "environ")]
            assert [command_line(pid)[3:5] for pid in told] == [["kqueue", "serve"]]
            own_descriptors(process.pid, [pid for pid in children if command_line(pid)[1:2] == ["-P"]])
            if last is not signal.SIGKILL:
                outlive(process, children)
                children += list(below(process.pid))
            if last is not None:
                process.send_signal(last)
            else:
                monkeypatch.setenv("KQUEUE_HOME", str(home))
                (home / "logs" / "up.log").write_text("its log")
                second = subprocess.run([*COMMAND, "up", "--detach"], capture_output=True, text=True, check=False)
                assert (second.returncode, f"in use by process {process.pid}" in second.stdout) == (3, True), second
                assert [path.read_text() for path in (home / "logs").glob("up.*")] == ["its log"]
                assert [subprocess.run([*COMMAND, "down"], check=False).returncode for _ in range(2)] == [0, 2]
            assert process.wait(60) == (-last if last is signal.SIGKILL else 0)
        finally:
            process.kill()
            process.wait()
            process.stdout.close()
        until_gone(children)
        assert load(home=home).database_url is None
        assert secrets[-1] not in said + "".join(log.read_text() for log in (home / "logs").iterdir())
    assert (len({*secrets}), len(keys)) == (len(lives), 1)
    assert not (home / FLEET_FILE).exists()
    assert not (home / "run" / "http.sock").exists()
    with Postgres(home / "postgres", durable=False) as postgres:
        assert valid_tokens(postgres.url, secrets) == [False] * len(lives)


def valid_tokens(url: str, secrets: list[str]) -> list[bool]:
    """Return each token's validity. All of them shared one row."""
    engine = connect(url, application="tests", pool_size=1)
    try:
        [token] = tokens.listing(engine)
        assert token.scopes == (tokens.Scope.PROBLEMS, *tokens.WIDE)
        return [tokens.find(engine, secret) is not None for secret in secrets]
    finally:
        engine.dispose()


def own_descriptors(up: int, parts: list[int]) -> None:
    """Check that parts have separate sessions, and no descriptor of `kqueue up` except its stdin."""
    theirs = {*descriptors(up)} - {"/dev/null"}
    assert {"workers.fleet", "workers.start"} < {command_line(pid)[3] for pid in parts}
    for pid in parts:
        assert not theirs & {*descriptors(pid)}, command_line(pid)
    assert all(os.getsid(pid) == pid for pid in parts if command_line(pid)[3] != "workers.start")


def outlive(process: subprocess.Popen[str], children: list[int]) -> None:
    """Kill parts of `kqueue up`, suspend and continue it like Ctrl-Z and `fg`, and close its terminal."""
    for part, word in (("Valkey", "valkey"), ("HTTP", "kqueueserve")):
        [server] = [pid for pid in children if word in "".join(command_line(pid)).partition(" ")[0]]
        os.kill(server, signal.SIGKILL)
        read_until(process, f"{part} runs again")
    process.send_signal(signal.SIGSTOP)
    time.sleep(0.7)
    process.send_signal(signal.SIGCONT)
    process.send_signal(signal.SIGHUP)
    assert process.stdout is not None
    process.stdout.close()  # the terminal


@pytest.mark.parametrize(("mode", "number"), [("--no-http", signal.SIGINT), ("--detach", signal.SIGTERM)])
def test_up_is_interrupted_while_it_starts(open_home: Path, mode: str, number: signal.Signals) -> None:
    """It exits with 130, and the processes that it started end."""
    home = open_home / "home"
    process = command(home, "--no-flower", mode)
    try:
        while not (home / "postgres" / "lock").exists():
            time.sleep(0.01)
        children = list(below(process.pid))
        process.send_signal(number)
        assert process.wait(60) == 130
    finally:
        process.kill()
        process.communicate()
    until_gone(children)
    assert not (home / FLEET_FILE).exists()


def test_stale_fleet_file_is_not_believed(tmp_path: Path) -> None:
    """A killed fleet's file can name the id of another process, so only the lock counts."""
    (tmp_path / "lock").write_text(str(os.getpid()))
    known = {"pid": os.getpid(), "database_url": "postgresql+psycopg://gone/", "redis_url": "redis://gone/"}
    (tmp_path / FLEET_FILE).write_text(json.dumps(known))
    assert load(home=tmp_path).database_url is None


def test_a_fleet_that_stops_is_awaited(tmp_path: Path) -> None:
    """`kqueue down` tells that it waits, and while a fleet that runs has no file, that it starts or stops."""
    down = partial(Cli(tmp_path), "down", "--home", str(tmp_path))
    slow = partial(signal.signal, signal.SIGTERM, signal.SIG_IGN)
    with Lock(tmp_path, "a test"), subprocess.Popen(["sleep", "3"], preexec_fn=slow) as process:
        assert "is starting or stopping" in down().stderr
        (tmp_path / FLEET_FILE).write_text(json.dumps({"pid": str(process.pid)}))
        done = down()
    assert (done.returncode, "waiting until the fleet has ended" in done.stderr) == (0, True)


def test_a_late_part_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    """A part that is late or has died is reported with the last line of its log, without control characters."""
    monkeypatch.setattr("kqueue.local.parts._LATE_S", 0)
    alive, said = [True], list[str]()

    class Slow:
        def start(self) -> None: ...

        def alive(self) -> bool:
            return alive[0]

        def ready(self) -> bool:
            return False

        def last_words(self) -> str:
            return "The end of a log:\nfirst\nno \x1b[2Jdisk" + "!" * 1000

    slow = Supervised("a part", Slow(), said.append)
    slow.start()
    assert not slow.came_up()
    alive[0] = False
    slow.look()
    assert [line.partition(" Its log ends with: ")[2][:17] for line in said] == [r"no \x1b[2Jdisk!!!"] * 2
    assert max(map(len, said)) < 400


def test_workers_that_cannot_start_show_their_log(tmp_path: Path) -> None:
    """The error of a fleet without slots has its supervisor's message, and its services end."""
    before = set(below(os.getpid()))
    with_schema(tmp_path / "home" / "postgres")
    (tmp_path / "scratch").mkdir()
    _, held = scratch.reserve(tmp_path / "scratch", "fleet")
    said: list[str] = []
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        places = {"home": tmp_path / "home", "scratch": tmp_path / "scratch"}
        config = Config(gpus="none", cpu_slots=0, flower_port=port, **places)
        config.model_fields_set.remove("flower_port")  # like a default value
        fleet = LocalFleet(config, flower=True, durable=False, report=said.append)
        with pytest.raises(LocalFleetError, match="KQUEUE_CPU_SLOTS is 0"):
            fleet.start()
    os.close(held)
    other = fleet.flower_url.rpartition(":")[2]
    assert other != str(port)
    assert f"Flower uses port {other} because {port} is in use. Choose another with KQUEUE_FLOWER_PORT" in said[0]
    assert said[1].startswith("another fleet of this user runs on this machine")
    until_gone([pid for pid in below(os.getpid()) if pid not in before])
