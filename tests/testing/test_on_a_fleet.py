"""`kqueue pytest --fleet`: the same tests and reports, from the sealed processes of a real fleet on the lane `cpu`."""

from __future__ import annotations

import os
import re
import shutil
import signal
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from sqlalchemy import Engine, text

from kqueue.config import load
from kqueue.local.fleet import LocalFleet
from kqueue.store.engine import connect
from tests.cli.command import Cli
from tests.fleet.live import live_fleet
from tests.services import starts_services
from tests.testing.projects import CONFTEST, DYING, EXAMPLES, FIRST, LIMIT_S, SECOND, body, plain, results, running
from tests.waiting import until

pytestmark = pytest.mark.timeout(2 * LIMIT_S)


@pytest.fixture(scope="module")
@starts_services
def fleet() -> Iterator[LocalFleet]:
    """A fleet with two slots."""
    with live_fleet(http=True) as running:
        yield running


@pytest.fixture
def on_fleet(cli: Cli, fleet: LocalFleet) -> Cli:
    """The command, which finds the fleet."""
    return replace(cli, environment={**cli.environment, "KQUEUE_HOME": str(fleet.config.home_path)})


@pytest.fixture
def engine(fleet: LocalFleet) -> Iterator[Engine]:
    """The fleet's database."""
    engine = connect(load(home=fleet.config.home_path).require_database(), application="tests")
    yield engine
    engine.dispose()


def write_two(cli: Cli) -> None:
    """A project with two modules."""
    cli.write("conftest.py", CONFTEST)
    cli.write("test_first.py", FIRST)
    cli.write("test_second.py", SECOND)


@pytest.mark.parametrize("options", [["-rA"], ["-v", "-k", "named or fails"], ["-q", "-x"]], ids=" ".join)
def test_what_is_printed_is_what_pytest_prints(on_fleet: Cli, options: list[str]) -> None:
    """Report, choice of tests and exit status are pytest's own; paths are the sender's."""
    write_two(on_fleet)
    isolated, expected = on_fleet("pytest", "--fleet", "--slots", "1", *options), plain(on_fleet, *options)
    assert body(isolated.stdout) == body(expected.stdout)
    assert isolated.returncode == expected.returncode


def test_junit_s_xml_is_pytest_s_own(on_fleet: Cli) -> None:
    """Cases, properties and captured output are in it, as pytest writes them."""
    write_two(on_fleet)
    on_fleet("pytest", "--fleet", "--junitxml", "isolated.xml")
    plain(on_fleet, "--junitxml", "plain.xml")

    def read(name: str) -> list[str]:
        said = re.sub(r' (time|timestamp|hostname)="[^"]*"|0x[0-9a-f]+', "", (on_fleet.directory / name).read_text())
        return sorted(re.split(r"(?=<testcase)", said.replace("</testsuite></testsuites>", "")))

    assert read("isolated.xml") == read("plain.xml")


def test_the_examples_break_alone(on_fleet: Cli) -> None:
    """A module whose process dies is named, and no other fails for it."""
    shutil.copytree(EXAMPLES, on_fleet.directory, dirs_exist_ok=True)
    here, there = on_fleet("pytest"), on_fleet("pytest", "--fleet")
    told = [re.sub(r"kqueue-\d+|in [\d.]+s", "", out.stdout.partition("= ERRORS")[2]) for out in (here, there)]
    assert told[0] == told[1]
    assert here.returncode == there.returncode == 1
    assert "10 passed, 1 skipped, 1 error" in there.stdout
    assert "after the last test of module test_c_unloads.py its process was killed by SIGABRT" in there.stdout


def test_a_test_that_ends_its_process_fails_alone(on_fleet: Cli) -> None:
    """It is named, with the signal or status and what it printed; the tests behind it run in another process."""
    # Nothing in a sealed process can send SIGKILL.
    on_fleet.write("test_dying.py", DYING.replace("SIGKILL", "SIGTERM"))
    done = on_fleet("pytest", "--fleet", "--junitxml", "out.xml")
    found = results(on_fleet.directory / "out.xml")
    assert {name for name, said in found.items() if not said} == {"test_first", "test_between", "test_last"}
    for name, kind, words in (
        ("test_segfault", "failure", ["SIGSEGV", "reached", f"{on_fleet.directory}/test_dying.py", "in test_segfault"]),
        ("test_exit", "failure", ["exit status 0"]),
        ("test_setup", "error", ["exit status 3"]),
        ("test_teardown", "error", ["SIGTERM"]),
    ):
        assert found[name].startswith(kind)
        assert all(word in found[name] for word in words), found[name]
    assert done.returncode == 1


def test_a_test_that_takes_too_long_is_ended(on_fleet: Cli) -> None:
    """It fails, and says where it was; the others run."""
    on_fleet.write("test_hangs.py", "import time\ndef test_hangs(): time.sleep(10_000)\ndef test_behind(): pass\n")
    done = on_fleet("pytest", "--fleet", "--kqueue-timeout", "3")
    assert "1 failed, 1 passed" in done.stdout
    assert "took longer than 3 s (--kqueue-timeout)" in done.stdout
    assert "in test_hangs" in done.stdout


def test_much_output_is_shortened_and_shown(on_fleet: Cli) -> None:
    """Of many megabytes the end is kept, so that reports fit into a verdict; `-s` shows what was printed."""
    on_fleet.write(
        "test_much.py",
        "def test_much(): print('x' * 5_000_000 + 'the end'); assert 0, 'y' * 5_000_000\n"
        "def test_prints(): print('from the test')\n",
    )
    done = on_fleet("pytest", "--fleet")
    assert "1 failed, 1 passed" in done.stdout
    assert "xxxthe end" in done.stdout
    assert len(done.stdout) < 200_000
    assert "from the test" in on_fleet("pytest", "--fleet", "-s", "-k", "prints").stdout


def test_a_test_can_end_the_run(on_fleet: Cli) -> None:
    """By `pytest.exit()`, with its reason and status."""
    on_fleet.write("test_a.py", "import pytest\ndef test_a(): pytest.exit('enough', 9)\ndef test_b(): pass\n")
    done = on_fleet("pytest", "--fleet")
    assert done.returncode == 9
    assert "Exit: enough" in done.stdout


def test_what_lies_in_the_repository_travels(on_fleet: Cli) -> None:
    """All but what Git ignores, untracked files too; code is found where the sender's path has it; plugins by name."""
    os.system(f"git init -q {on_fleet.directory}")
    on_fleet.write(".gitignore", "secret\n")
    on_fleet.write("secret", "secret")
    on_fleet.write("src/mine.py", "VALUE = 3\n")
    on_fleet.write("helper.py", "import pytest\n@pytest.fixture\ndef helped(): return 4\n")
    on_fleet.write("tests/data/some.txt", "some")
    on_fleet.write("tests/pytest.ini", "[pytest]\npythonpath = ../src\n")
    on_fleet.write(
        "tests/test_a.py",
        "import os, pathlib, mine\n"
        "here = pathlib.Path(__file__).parent\n"
        "def test_a(helped):\n"
        "    assert (mine.VALUE, helped, (here / 'data/some.txt').read_text()) == (3, 4, 'some')\n"
        "    if 'repository' in str(here):\n"
        "        assert not (here.parent / 'secret').exists()\n"
        "        assert not [name for name in os.environ if name.startswith('KQUEUE_')]\n"
        "        print('on a host')\n",
    )
    inside = replace(on_fleet, directory=on_fleet.directory / "tests")
    done = inside("pytest", "--fleet", "-rP", PYTEST_PLUGINS="helper", PYTHONPATH=str(on_fleet.directory))
    assert "1 passed" in done.stdout, done.stdout
    assert "on a host" in done.stdout


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

def test_a():
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


def test_a_process_cannot_speak_for_others(on_fleet: Cli) -> None:
    """What makes no sense, or is about another's tests, is not reported; its own tests are."""
    on_fleet.write("test_hostile.py", HOSTILE)
    on_fleet.write("test_other.py", "def test_b(): pass\n")
    done = on_fleet("pytest", "--fleet", "-v")
    assert "1 failed, 2 passed" in done.stdout, done.stdout
    assert "INTERNALERROR" not in done.stdout + done.stderr


def test_the_tests_of_a_worker_that_is_killed_run_again(on_fleet: Cli, engine: Engine) -> None:
    """On another worker; each is reported once, and nobody is blamed."""
    on_fleet.write("test_slow.py", "import time\ndef test_one(): pass\ndef test_two(): time.sleep(4)\n")
    pids = text("SELECT w.pid FROM attempts a JOIN workers w ON w.id = a.worker_id WHERE a.ended_at IS NULL")

    def busy() -> list[int]:
        with engine.connect() as connection:
            return list(connection.execute(pids).scalars())

    with running(on_fleet, "--fleet") as process:
        [pid] = until(busy, LIMIT_S)
        os.kill(pid, signal.SIGKILL)
        out, _ = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 0, out
    assert "2 passed" in out
    with engine.connect() as connection:
        last = text("SELECT id FROM evaluations ORDER BY submitted_at DESC LIMIT 1")
        count = text("SELECT count(*) FROM attempts WHERE evaluation_id = :id")
        assert connection.execute(count, {"id": connection.execute(last).scalar_one()}).scalar_one() == 2


@pytest.mark.parametrize("number", [pytest.param(signal.SIGINT, marks=pytest.mark.nightly), signal.SIGTERM])
def test_a_signal_cancels_what_was_submitted(on_fleet: Cli, engine: Engine, number: signal.Signals) -> None:
    """What ran is killed, what waited does not begin, and pytest reports what there is."""
    on_fleet.write("test_waits.py", "import time\ndef test_waits(): time.sleep(10_000)\n")
    for number in range(3):
        on_fleet.write(f"test_more_{number}.py", "import time\ndef test_waits(): time.sleep(10_000)\n")

    def states() -> list[str]:
        with engine.connect() as connection:
            return list(
                connection.execute(
                    text(
                        "SELECT coalesce(v.category, e.state::text) FROM evaluations e"
                        " LEFT JOIN verdicts v ON v.evaluation_id = e.id"
                        " WHERE e.batch = (SELECT batch FROM evaluations ORDER BY submitted_at DESC LIMIT 1)"
                    )
                ).scalars()
            )

    with running(on_fleet, "--fleet") as process:
        until(lambda: sorted(states()) == ["queued", "queued", "running", "running"], LIMIT_S)
        process.send_signal(number)
        out, _ = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 2
    assert "KeyboardInterrupt" in out
    assert states() == ["cancelled"] * 4


def test_a_failure_of_the_fleet_is_nobody_s(on_fleet: Cli, engine: Engine) -> None:
    """Tests whose evaluation somebody cancels have no report; the run says so, and ends with another status."""
    on_fleet.write("test_a.py", "def test_a(): pass\n")
    on_fleet.write("test_b.py", "import time\ndef test_b(): time.sleep(10_000)\n")
    found = text("SELECT id FROM evaluations WHERE kernel_label = 'test_b.py' AND state = 'running'")

    def waiting() -> list[object]:
        with engine.connect() as connection:
            return list(connection.execute(found).scalars())

    with running(on_fleet, "--fleet") as process:
        [identity] = until(waiting, LIMIT_S)
        on_fleet("cancel", str(identity))
        out, _ = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 3
    assert "1 passed" in out
    assert "not all tests were run: 1 of module test_b.py (cancelled" in out
    assert "error" not in out


def test_what_cannot_travel_is_refused(on_fleet: Cli) -> None:
    """The files' size is said, with the largest, and what to do; likewise options that a fleet does not have."""
    on_fleet.write("test_a.py", "def test_a(): pass\n")
    on_fleet.write("large.bin", os.urandom(13 << 20))
    for options, words in (
        ([], "the largest are large.bin (13.0 MiB)"),
        (["--kqueue-timeout", "601"], "at most 600 s"),
        (["--sanitize", "--lane", "cpu"], "compute-sanitizer needs a GPU"),
    ):
        done = on_fleet("pytest", "--fleet", *options)
        assert done.returncode == 4
        assert words in done.stdout + done.stderr
    (on_fleet.directory / "large.bin").unlink()
    done = on_fleet("pytest", "--fleet", "--sanitize")
    assert done.returncode == 3
    assert "no live worker serves gpu" in done.stdout
    done = on_fleet("pytest", "--lane", "cpu")
    assert done.returncode == 4
    assert "add --kqueue-fleet" in done.stderr


def test_it_travels_by_http(on_fleet: Cli, fleet: LocalFleet, tmp_path: Path) -> None:
    """A sender needs no more than the address of `kqueue serve` and a token; a refusal is said."""
    on_fleet.write("test_a.py", "def test_a(): pass\n")
    assert fleet.http_url is not None
    token = load(home=fleet.config.home_path, url=fleet.http_url).token
    assert token is not None
    url = ["--url", fleet.http_url]
    away = {"KQUEUE_HOME": str(tmp_path / "home"), "KQUEUE_TOKEN": token.get_secret_value()}
    done = on_fleet("pytest", "--fleet", *url, **away)
    assert "1 passed" in done.stdout, done.stdout + done.stderr
    done = on_fleet("pytest", "--fleet", "--lane", "gpu.h200", *url, **away)
    assert done.returncode == 3
    assert "no live worker serves gpu.h200" in done.stdout
