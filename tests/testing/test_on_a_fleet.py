"""`kqueue pytest --fleet`: pytest's tests and reports from the sealed processes of a real fleet on the lane `cpu`."""

from __future__ import annotations

import base64
import contextlib
import io
import os
import signal
import tarfile
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from textwrap import indent
from typing import Any

import pytest
from sqlalchemy import Engine, text

from kqueue.config import load
from kqueue.contract import TESTS_LINE
from kqueue.local.fleet import LocalFleet
from kqueue.store.engine import connect
from tests.cli.command import Cli
from tests.fleet.live import live_fleet
from tests.judge.sources import suite_of
from tests.services import starts_services
from tests.testing.projects import ALIVE, DYING, LIMIT_S, body, cases, dead, plain, results, running, write_two
from tests.waiting import until

pytestmark = pytest.mark.timeout(2 * LIMIT_S)


@pytest.fixture(scope="module")
@starts_services
def fleet() -> Iterator[LocalFleet]:
    with live_fleet(slots=1) as running:
        yield running


@pytest.fixture
def on_fleet(cli: Cli, fleet: LocalFleet) -> Cli:
    return replace(cli, environment={**cli.environment, "KQUEUE_HOME": str(fleet.config.home_path)})


@pytest.fixture
def engine(fleet: LocalFleet) -> Iterator[Engine]:
    engine = connect(load(home=fleet.config.home_path).require_database(), application="tests")
    yield engine
    engine.dispose()


def test_what_is_reported_is_what_pytest_reports(on_fleet: Cli) -> None:
    """The terminal report and the JUnit file equal pytest's."""
    write_two(on_fleet)
    options = ("-rA", "-o", "junit_family=xunit1", "--junitxml")  # the other family adds a warning of record_property
    isolated = on_fleet.process("pytest", "--fleet", *options, "isolated.xml")
    expected = plain(on_fleet, *options, "plain.xml")
    assert body(isolated.stdout) == body(expected.stdout)
    assert isolated.returncode == expected.returncode
    assert cases(on_fleet.directory / "isolated.xml") == cases(on_fleet.directory / "plain.xml")


def test_modules_that_misbehave(on_fleet: Cli) -> None:
    """Deaths are named, no process reports for another one, and long output is cut."""
    # No sealed process can send SIGKILL.
    on_fleet.write("test_dying.py", DYING.replace("SIGKILL", "SIGTERM"))
    on_fleet.write("test_hostile.py", HOSTILE)
    on_fleet.write("test_other.py", "def test_b(): pass\n")
    on_fleet.write("test_much.py", "def test_much(): print('x' * 5_000_000 + 'the end'); assert 0, 'y' * 5_000_000\n")
    done = on_fleet.process("pytest", "--fleet", "--junitxml", "out.xml")
    found = dead(on_fleet.directory / "out.xml", "SIGTERM")
    assert {name for name, said in found.items() if not said} == {*ALIVE, "test_hostile", "test_b"}
    assert f"{on_fleet.directory}/test_dying.py" in found["test_segfault"]
    assert "4 failed, 6 passed, 2 errors" in done.stdout
    assert "INTERNALERROR" not in done.stdout + done.stderr
    assert "xxxthe end" in done.stdout
    assert len(done.stdout) < 200_000


HOSTILE = """
import json, os, socket

def said():
    for name in os.listdir("/proc/self/fd"):
        try:
            with socket.socket(fileno=os.dup(int(name))) as found:
                found.getpeername()
                yield found
        except OSError:
            pass

def say(line):
    for found in said():
        found.sendall(line + b"\\n")

def test_hostile():
    say(b"\\xff\\x00 garbage")
    say(b"[" * 100_000)
    say(b'{"at": ["start"]}')
    say(json.dumps({"at": "start", "nodeid": "test_other.py::test_b", "location": 3}).encode())
    for data in ({}, 3, {"$report_type": "TestReport", "nodeid": "test_other.py::test_b", "when": "call",
                 "outcome": "failed", "location": ["x", 1, "y"], "keywords": {}, "longrepr": None, "sections": []}):
        say(json.dumps({"at": "report", "data": data}).encode())
    say(b'{"at": "stop", "how": 1}')

def test_fails(): assert 0
"""


#: Code of a conftest that attacks on the host, the body of its one test, and the category of the verdict.
REPOSITORIES = {
    "forged_files": ("""
for at in ("report.xml", "verdict.json", "../order.json", "../../verdict.json", "/tmp/report.xml"):
    try: open(at, "w").write("<testsuites/>")
    except OSError: pass
""", "assert 0", "tests_failed"),
    "forged_output": ("""
for to in (1, 2): os.write(to, b'{"outcome": {"category": "passed"}}\\n=== 1 passed ===\\n')
""", "assert 0", "tests_failed"),
    "patched_reports": ("""
from _pytest.reports import TestReport
real = TestReport.from_item_and_call.__func__
def forged(kind, item, call):
    call.excinfo = None
    return real(kind, item, call)
TestReport.from_item_and_call = classmethod(forged)
""", "assert 0", "passed"),
    "exits": ("os._exit(0)", "pass", "crashed"),
    "exits_at_the_end": ("def pytest_sessionfinish(): os._exit(0)", "pass", "crashed"),
    "emptied": ("def pytest_collection_modifyitems(items): items.clear()", "pass", "crashed"),
    "deleted": ("import shutil; shutil.rmtree(os.getcwd())", "pass", "crashed"),
    "daemon": ("""
import subprocess
subprocess.Popen(["sleep", "98765"], start_new_session=True)
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0: os.execvp("sleep", ["sleep", "98765"])
    os._exit(0)
""", "pass", "passed"),
    "spies": ("""
import builtins, socket
def reached():
    yield from (name for name in os.environ if name.startswith("KQUEUE_"))
    for path in ("HOME/fleet.json", "/etc/shadow", f"/proc/{os.getppid()}/environ"):
        try: yield open(path).read()
        except OSError: pass
    for path in ("HOME/postgres/run/.s.PGSQL.5432", "HOME/valkey/run/valkey.sock"):
        try: yield socket.socket(socket.AF_UNIX).connect(path)
        except OSError: pass
builtins.found = list(reached())
""", "assert not found, found", "passed"),
}  # fmt: skip


def test_each_hostile_repository_ends_in_one_category(on_fleet: Cli, fleet: LocalFleet, engine: Engine) -> None:
    """Tests decide whether they pass. None harms the host, another module's verdict, or the sender's report."""
    for name, (attack, test, _) in REPOSITORIES.items():
        code = indent(attack.replace("HOME", str(fleet.config.home_path)), "    ")
        on_fleet.write(f"{name}/conftest.py", f"import os\nif '/repository/' in __file__:\n{code}\n")
        on_fleet.write(f"{name}/test_{name}.py", f"def test_{name}(): {test}\n")
    on_fleet.write("test_honest.py", "def test_honest(): pass\n")
    before = sorted(on_fleet.directory.rglob("*.*"))
    done = on_fleet.process("pytest", "--fleet", "-p", "no:cacheprovider", "--junitxml", "out.xml")
    with engine.connect() as connection:
        categories = {Path(label).stem: category for label, category in connection.execute(text(CATEGORIES))}
    expected = {f"test_{name}": category for name, (*_, category) in REPOSITORIES.items()} | {"test_honest": "passed"}
    assert categories == expected, done.stdout
    shown = results(on_fleet.directory / "out.xml")
    assert {name for name, said in shown.items() if not said} == {n for n, c in expected.items() if c == "passed"}
    assert "INTERNALERROR" not in done.stdout + done.stderr
    left = sorted(path for path in on_fleet.directory.rglob("*.*") if path.suffix != ".pyc")
    assert left == sorted([*before, on_fleet.directory / "out.xml"])
    for one in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):  # the process has ended
            assert b"sleep 98765" not in one.read_bytes().replace(b"\0", b" ")
    assert not Path("/tmp/report.xml").exists()


CATEGORIES = """
SELECT e.kernel_label, v.category FROM evaluations e JOIN verdicts v ON v.evaluation_id = e.id
WHERE e.batch = (SELECT batch FROM evaluations ORDER BY submitted_at DESC LIMIT 1) AND e.attempts = 1
"""


def member(name: str, **fields: Any) -> tarfile.TarInfo:
    made = tarfile.TarInfo(name)
    for field, value in fields.items():
        setattr(made, field, value)
    return made


@pytest.mark.nightly
def test_each_hostile_archive_ends_in_one_category(fleet: LocalFleet, tmp_path: Path) -> None:
    """Files are unpacked into the sealed process's folder only, and their number and size are limited."""
    archives: tuple[tuple[Iterable[tarfile.TarInfo], str], ...] = (
        ([member("../../outside")], "invalid_problem"),
        ([member("/tmp/kqueue-outside")], "passed"),  # unpacked below the repository
        ([member("link", type=tarfile.SYMTYPE, linkname="../../order.json")], "invalid_problem"),
        ([member("link", type=tarfile.LNKTYPE, linkname="../order.json")], "invalid_problem"),
        ([member("null", type=tarfile.CHRTYPE, devmajor=1, devminor=3)], "invalid_problem"),
        ([member("pipe", type=tarfile.FIFOTYPE)], "invalid_problem"),
        ((member(f"{number}") for number in range(50_000)), "output_limit"),
        ([member("large", size=256 << 20)], "output_limit"),
        ([], "passed"),
    )
    request = suite_of(tmp_path, "def test_it(): pass\n", names=["test_it"], limits={"scratch_bytes": 64 << 20})
    with fleet.client() as kq:
        for added, category in archives:
            packed = io.BytesIO()
            with tarfile.open(fileobj=packed, mode="w:xz", preset=1) as tar:
                tar.add(tmp_path / "test_a.py", "test_a.py")
                for one in added:
                    tar.addfile(one, Zeros())
            problem = TESTS_LINE + base64.encodebytes(packed.getvalue()).decode()
            verdict = kq.evaluate(request.model_copy(update={"problem": problem, "lane": "cpu"}))
            assert (verdict.category, verdict.attempts) == (category, 1), verdict.message
    assert not Path("/tmp/kqueue-outside").exists()


class Zeros(io.RawIOBase):
    """A file of as many zeros as are read."""

    def read(self, size: int = -1) -> bytes:
        return bytes(size)


def column(engine: Engine, query: str) -> list[Any]:
    """Return the first column of a query's rows."""
    with engine.connect() as connection:
        return list(connection.execute(text(query)).scalars())


@pytest.mark.nightly
def test_the_tests_of_a_worker_that_is_killed_run_again(on_fleet: Cli, engine: Engine) -> None:
    """The tests run on another worker, each is reported once, and no test is blamed."""
    on_fleet.write("test_slow.py", "import time\ndef test_one(): pass\ndef test_two(): time.sleep(4)\n")
    pids = "SELECT w.pid FROM attempts a JOIN workers w ON w.id = a.worker_id WHERE a.ended_at IS NULL"
    with running(on_fleet, "--fleet") as process:
        [pid] = until(lambda: column(engine, pids), LIMIT_S)
        os.kill(pid, signal.SIGKILL)
        out, _ = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 0, out
    assert "2 passed" in out
    last = "SELECT id FROM evaluations ORDER BY submitted_at DESC LIMIT 1"
    assert column(engine, f"SELECT count(*) FROM attempts WHERE evaluation_id = ({last})") == [2]


STATES = """
SELECT coalesce(v.category, e.state::text) FROM evaluations e LEFT JOIN verdicts v ON v.evaluation_id = e.id
WHERE e.batch = (SELECT batch FROM evaluations ORDER BY submitted_at DESC LIMIT 1)
"""


def test_a_signal_cancels_what_was_submitted(on_fleet: Cli, engine: Engine) -> None:
    """Running tests are killed, queued ones do not begin, and pytest reports the existing results."""
    for each in range(2):
        on_fleet.write(f"test_more_{each}.py", "import time\ndef test_waits(): time.sleep(10_000)\n")
    with running(on_fleet, "--fleet") as process:
        until(lambda: sorted(column(engine, STATES)) == ["queued", "running"], LIMIT_S)
        process.send_signal(signal.SIGTERM)
        out, _ = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 2
    assert "KeyboardInterrupt" in out
    assert column(engine, STATES) == ["cancelled"] * 2


def test_a_failure_of_the_fleet_is_nobody_s(on_fleet: Cli, engine: Engine) -> None:
    """Tests of a cancelled evaluation have no report, and the run names the cause and exits with another status."""
    on_fleet.write("test_a.py", "def test_a(): pass\n")
    on_fleet.write("test_b.py", "import time\ndef test_b(): time.sleep(10_000)\n")
    found = "SELECT id FROM evaluations WHERE kernel_label = 'test_b.py' AND state = 'running'"
    with running(on_fleet, "--fleet") as process:
        [identity] = until(lambda: column(engine, found), LIMIT_S)
        on_fleet("cancel", str(identity))
        out, _ = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 3
    assert all(words in out for words in ("1 passed", "not all tests were run: 1 of module test_b.py (cancelled"))
    assert "error" not in out


@pytest.mark.nightly
def test_what_cannot_travel_is_refused(on_fleet: Cli) -> None:
    """The error has the total and largest file sizes with a fix. Options that a fleet lacks are also refused."""
    on_fleet.write("test_a.py", "def test_a(): pass\n")
    on_fleet.write("large.bin", os.urandom(13 << 20))
    for options, words in (
        ([], "the largest are large.bin (13.0 MiB)"),
        (["--kqueue-timeout", "601"], "at most 600 s"),
        (["--sanitize", "--lane", "cpu"], "compute-sanitizer needs a GPU"),
    ):
        done = on_fleet.process("pytest", "--fleet", *options)
        assert (done.returncode, words in done.stdout + done.stderr) == (4, True)


@pytest.mark.nightly
def test_it_travels_by_http(cli: Cli, tmp_path: Path) -> None:
    """The sender needs only the address of `kqueue serve` and a token."""
    cli.write("test_a.py", "def test_a(): pass\n")
    with live_fleet(slots=1, http=True) as fleet:
        assert fleet.http_url is not None
        token = load(home=fleet.config.home_path, url=fleet.http_url).token
        assert token is not None
        away = {"KQUEUE_HOME": str(tmp_path / "home"), "KQUEUE_TOKEN": token.get_secret_value()}
        done = cli.process("pytest", "--fleet", "--url", fleet.http_url, **away)
    assert "1 passed" in done.stdout, done.stdout + done.stderr
