"""`kqueue pytest` and `pytest --kqueue`: real pytest in real processes."""

from __future__ import annotations

import fcntl
import os
import re
import shlex
import shutil
import signal
import subprocess
import time
from pathlib import Path

import pytest

from kqueue.local.process import running as alive
from tests.cli.command import Cli, Done
from tests.testing.projects import ALIVE, DYING, LIMIT_S, body, dead, plain, results, running, write_two
from tests.waiting import until
from workers.judge.host.exclusive import NoRoom, room
from workers.judge.host.scratch import device_lock, prepare
from workers.judge.host.turns import opened, turn

pytestmark = [pytest.mark.timeout(2 * LIMIT_S), pytest.mark.slow("runs pytest in processes of its own")]


LEAVES = """
import subprocess
def test_leaves():
    left = subprocess.Popen(["sleep", "10000"], start_new_session=True)
    open("pid", "w").write(str(left.pid))
"""


def compare(cli: Cli, *options: str) -> Done:
    """Assert that the command and pytest print the same, and return the command's result."""
    isolated, expected = cli.process("pytest", "--slots", "1", *options), plain(cli, *options)
    assert body(isolated.stdout) == body(expected.stdout)
    assert isolated.returncode == expected.returncode
    return isolated


OPTIONS = [
    "-q -x",
    "-v -k 'named or fails'", "-m slow -p no:cacheprovider", "-k nothing_of_this_name", "not_there.py",
    "--deselect test_first.py::TestGroup::test_fails test_second.py test_first.py",
]  # fmt: skip


@pytest.mark.nightly
@pytest.mark.parametrize("options", OPTIONS)
def test_what_is_printed_is_what_pytest_prints(cli: Cli, options: str) -> None:
    """Report, selection and exit status equal pytest's, and the project's fixtures and plugins work."""
    write_two(cli)
    compare(cli, *shlex.split(options))


def test_a_process_of_tests_is_a_class_s_and_has_files_and_settings_of_its_own(cli: Cli) -> None:
    """Only the tests of a class share a process.

    It has a temporary folder, new caches except those that the user configured, and no setting of the fleet.
    """
    module = """
import os, tempfile
seen = set()
def test_one(): seen.add("one"); print("pid", os.getpid())
def test_two(): assert "one" not in seen
class TestThree:
    def test_three(self): assert not seen; seen.add("three")
    def test_four(self): assert "three" in seen
def test_own():
    assert not [name for name in os.environ if name.startswith("KQUEUE_")]
    assert os.environ["TRITON_CACHE_DIR"] == "/a/cache/of/mine"
    assert os.environ["CUPY_CACHE_DIR"] != os.environ["TORCH_EXTENSIONS_DIR"]
    assert tempfile.gettempdir() == os.environ["TMPDIR"]
    open("tmpdir", "w").write(os.environ["TMPDIR"])
"""
    cli.write("test_a.py", module)
    settings = {"TRITON_CACHE_DIR": "/a/cache/of/mine", "KQUEUE_DATABASE_URL": "postgresql://u:p@h/d"}
    done = cli.process("pytest", "-v", "--isolate=class", **settings)
    told = dict(re.findall(r"^test_a.py::(\S+) (\w+) +\[", done.stdout, re.MULTILINE))
    assert {name for name, word in told.items() if word == "FAILED"} == {"test_two"}, done.stdout
    assert len(told) == 5
    assert "1 failed, 4 passed" in done.stdout
    assert not Path((cli.directory / "tmpdir").read_text()).exists()


@pytest.mark.nightly
def test_what_failed_last_is_run_alone(cli: Cli) -> None:
    """`--lf` selects failed tests by the controlling pytest's cache, which a repaired test leaves."""
    cli.write("test_one.py", "def test_a(): pass\ndef test_b(): assert 0\n")
    cli.write("test_two.py", "def test_c(): assert 0\n")
    assert "2 failed, 1 passed" in cli.process("pytest", "--slots", "2").stdout
    cli.write("test_two.py", "def test_c(): pass\n")
    assert "1 failed, 1 passed" in cli.process("pytest", "--lf").stdout
    assert "1 failed, 1 deselected" in cli.process("pytest", "--lf", "test_one.py").stdout


@pytest.mark.nightly
def test_a_module_that_cannot_be_imported_alone_is_an_error(cli: Cli) -> None:
    """A module that relies on another module's import fails in a separate process."""
    cli.write("test_a.py", "import builtins\nbuiltins.shared = 1\ndef test_a(): pass\n")
    cli.write("test_b.py", "shared\ndef test_b(): pass\n")
    said = cli.process("pytest").stdout
    for words in ("test_b.py could not be collected in a separate process", "NameError", "1 passed, 1 error"):
        assert words in said


def test_a_test_that_ends_its_process_fails_alone(cli: Cli) -> None:
    """Deaths are named with their cause, later tests run in a new process, and leftover processes are killed."""
    cli.write("test_dying.py", DYING)
    cli.write("test_ends.py", "import atexit, os\ndef test_a(): atexit.register(os._exit, 7)\ndef test_b(): pass\n")
    cli.write("test_leaves.py", LEAVES)
    done = cli.process("pytest", "--junitxml", "out.xml", "--slots", "2")
    assert done.returncode == 1
    found = dead(cli.directory / "out.xml", "SIGKILL")
    assert {name for name, said in found.items() if not said} == {*ALIVE, "test_a", "test_leaves"}
    assert "after the last test of module test_ends.py its process ended with exit status 7" in found["test_b"]
    assert "2 failed, 7 passed, 3 errors" in done.stdout
    assert not alive(int((cli.directory / "pid").read_text()))


def test_a_test_that_takes_too_long_is_ended_by_the_plugin_alone(cli: Cli) -> None:
    """The test fails with its location. The limit is for a single test, and the imports before it can take longer.

    `pytest --kqueue` in a project's settings is equivalent to `kqueue pytest`.
    """
    cli.write("pytest.ini", "[pytest]\naddopts = -p kqueue --kqueue --kqueue-slots 2 --kqueue-timeout 2\n")
    cli.write("test_a.py", "import os\ndef test_a(): os._exit(0)\ndef test_b(): pass\n")
    cli.write(
        "test_hangs.py",
        "import os, time\n"
        "if 'KQUEUE_HOME' not in os.environ:\n    time.sleep(3)\n"
        "def test_hangs():\n    open('hangs', 'w').close()\n    time.sleep(10_000)\n",
    )
    done = plain(cli)
    assert (done.returncode, "2 failed, 1 passed" in done.stdout) == (1, True), done.stdout
    assert "took longer than 2 s (--kqueue-timeout)" in done.stdout
    if (cli.directory / "hangs").exists():  # on a busy host it possibly has not got so far
        assert "in test_hangs" in done.stdout


WAITING = """
import os, subprocess, time, pytest

@pytest.fixture
def resource():
    yield
    open("torn_down", "w").close()

def test_waits(resource):
    left = subprocess.Popen(["sleep", "10000"], start_new_session=True)
    open("new", "w").write(f"{os.getpid()} {left.pid}")
    os.rename("new", "pids")
    time.sleep(10_000)
"""


@pytest.mark.parametrize(
    "number", [pytest.param(signal.SIGINT, marks=pytest.mark.nightly), signal.SIGKILL], ids=lambda number: number.name
)
def test_nothing_outlives_the_command(cli: Cli, number: signal.Signals) -> None:
    """Ctrl-C tears fixtures down and reports, and any end of the command ends its tests and their processes."""
    cli.write("test_waits.py", WAITING)
    with running(cli) as process:
        file = cli.directory / "pids"
        until(file.exists, LIMIT_S)
        process.send_signal(number)
        out, _ = process.communicate(timeout=LIMIT_S)
        assert process.returncode == (-number if number is signal.SIGKILL else 2)
        pids = [int(word) for word in file.read_text().split()]
        until(lambda: not any(map(alive, pids)), LIMIT_S)
    assert (cli.directory / "torn_down").exists()
    if number is not signal.SIGKILL:
        assert "KeyboardInterrupt" in out


@pytest.mark.nightly
def test_a_test_can_end_the_run(cli: Cli) -> None:
    """`pytest.exit()` ends the run with its reason and status."""
    source = "import pytest\ndef test_a(): print('from the test'); pytest.exit('enough', 9)\ndef test_b(): pass\n"
    cli.write("test_a.py", source)
    done = cli.process("pytest", "-s")
    assert done.returncode == 9
    assert all(words in done.stdout for words in ("Exit: enough", "from the test"))


TURNS = """
import os, time, pytest

def done(name):
    open(name, "w").close()

def wait_for(name):
    while not os.path.exists(name):
        time.sleep(0.02)

def test_locked():
    done("locked")
    wait_for("seen")

@pytest.mark.kqueue_unlocked
def test_unlocked():
    done("unlocked")
    wait_for("judged")

def test_behind():
    done("behind")
"""


def test_tests_and_a_fleet_take_turns_on_their_device(cli: Cli, tmp_path: Path) -> None:
    """A test and a fleet's timing or suspect exclude each other on a device, except for a test with the mark."""
    cli.write("test_a.py", TURNS)
    prepare(tmp_path / "scratch")
    lock = device_lock(tmp_path / "scratch", "cpu")
    there = [(cli.directory / name).exists for name in ("locked", "unlocked", "behind")]
    with opened(lock) as held, opened(lock.with_suffix(".queue")) as queue:
        fcntl.flock(held, fcntl.LOCK_EX)

        def somebody_waits() -> bool:
            try:
                fcntl.flock(queue, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return True
            fcntl.flock(queue, fcntl.LOCK_UN)
            return False

        with running(cli, "--strict-markers") as process:
            until(somebody_waits, LIMIT_S)
            time.sleep(0.2)
            assert not there[0]()
            fcntl.flock(held, fcntl.LOCK_UN)
            until(there[0], LIMIT_S)
            with pytest.raises(BlockingIOError):
                fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
            with pytest.raises(NoRoom), room(lock, alone=True, patience_s=0):
                pass
            cli.write("seen", "")
            until(there[1], LIMIT_S)
            with room(lock, alone=True), turn(lock, fcntl.LOCK_EX):
                cli.write("judged", "")
                time.sleep(0.2)
                assert not there[2]()
            out, _ = process.communicate(timeout=LIMIT_S)
    assert "3 passed" in out


DRIVER = """
static int broken;
int cuDeviceGetCount(int *count) { *count = 1; return 0; }
int cuDevicePrimaryCtxGetState(int d, unsigned *flags, int *active) { *flags = 0; *active = 1; return 0; }
int cuDevicePrimaryCtxRetain(void **context, int d) { *context = &broken; return 0; }
int cuDevicePrimaryCtxRelease_v2(int d) { return 0; }
int cuCtxPushCurrent_v2(void *context) { return 0; }
int cuCtxPopCurrent_v2(void **context) { return 0; }
int cuCtxSynchronize(void) { return broken; }
int cuGetErrorName(int error, const char **name) { *name = "CUDA_ERROR_ILLEGAL_ADDRESS"; return 0; }
void write_out_of_bounds(void) { broken = 700; }
"""


@pytest.fixture
def driver(cli: Cli) -> None:
    """Compile a stand-in for CUDA's driver with a function that breaks the context."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("there is no C compiler")
    cli.write("driver.c", DRIVER)
    command = [compiler, "-shared", "-fPIC", "-Wl,-soname,libcuda.so.1", "-o", "libcuda.so.1", "driver.c"]
    subprocess.run(command, cwd=cli.directory, check=True)


@pytest.mark.usefixtures("driver")
def test_a_test_that_breaks_its_cuda_context_is_named(cli: Cli) -> None:
    """The tests after it run in another process, and other modules are not affected."""
    load = "import ctypes\ncuda = ctypes.CDLL('./libcuda.so.1')\n"
    cli.write(
        "test_a.py",
        load + "def test_right(): pass\n"
        "def test_overrun(): cuda.write_out_of_bounds()\n"
        "def test_behind(): assert cuda.cuCtxSynchronize() == 0\n",
    )
    cli.write("test_b.py", load + "def test_other(): assert cuda.cuCtxSynchronize() == 0\n")
    done = cli.process("pytest", "--junitxml", "out.xml")
    assert (done.returncode, "4 passed, 1 error" in done.stdout) == (1, True)
    found = results(cli.directory / "out.xml")
    assert [name for name, said in found.items() if said] == ["test_overrun"]
    assert "left the CUDA context of its process broken: CUDA_ERROR_ILLEGAL_ADDRESS (700)" in found["test_overrun"]


SANITIZER = """#!/bin/sh
while [ "$1" != --log-file ]; do shift; done
echo "========= Invalid __global__ write of size 4 bytes" > "$2"
shift 2
exec "$@"
"""


@pytest.mark.nightly
def test_what_failed_is_run_once_more_under_compute_sanitizer(cli: Cli, tmp_path: Path) -> None:
    """The failed test's report and JUnit's XML have the sanitizer's findings, and passed modules are not repeated."""
    (tmp_path / "bin").mkdir()
    program = tmp_path / "bin" / "compute-sanitizer"
    program.write_text(SANITIZER)
    program.chmod(0o755)
    count = "open(__file__ + '.runs', 'a').write('x')\n"
    cli.write("test_bad.py", f"def test_a():\n    {count}    assert 0\ndef test_b(): pass\n")
    cli.write("test_good.py", f"def test_c():\n    {count}")
    path = f"{tmp_path / 'bin'}{os.pathsep}{os.environ['PATH']}"
    done = cli.process("pytest", "--sanitize", "--junitxml", "out.xml", PATH=path)
    assert done.returncode == 1
    assert all(words in done.stdout for words in ("1 failed, 2 passed", "Invalid __global__ write of size 4 bytes"))
    assert "Invalid __global__ write" in results(cli.directory / "out.xml")["test_a"]
    assert (cli.directory / "test_bad.py.runs").read_text() == "xx"
    assert (cli.directory / "test_good.py.runs").read_text() == "x"


REFUSED = [
    (["--pdb"], "none", "--pdb needs the tests in pytest's own process"),
    (["-p", "xdist", "-n", "2"], "none", "leave out pytest-xdist's options"),
    (["--sanitize"], "none", "compute-sanitizer is neither on PATH nor below CUDA_HOME"),
    (["--kqueue-timeout", "soon"], "none", "'soon' is not a number of seconds"),
    (["--isolate", "file"], "none", "invalid choice: 'file'"),
    ([], "GPU-of-another-host", "KQUEUE_GPUS=GPU-of-another-host"),
]


@pytest.mark.nightly
@pytest.mark.parametrize(("options", "gpus", "words"), REFUSED, ids=str)
def test_what_cannot_be_is_refused(cli: Cli, options: list[str], gpus: str, words: str) -> None:
    """Usage errors and missing GPUs exit with 4 before any test runs."""
    cli.write("test_a.py", "def test_a(): open('ran', 'w').close()\n")
    done = cli.process("pytest", *options, CUDA_HOME="", CUDA_PATH="", KQUEUE_GPUS=gpus)
    assert (done.returncode, words in done.stdout + done.stderr) == (4, True)
    assert not (cli.directory / "ran").exists()


def test_without_its_option_the_plugin_does_nothing(cli: Cli) -> None:
    """The plugin imports neither the rest of kqueue nor any large package."""
    cli.write(
        "test_a.py",
        "import sys\n"
        "def test_a():\n"
        "    ours = {name for name in sys.modules if name.split('.')[0] in ('kqueue', 'workers')}\n"
        "    assert ours == {'kqueue', 'kqueue.errors', 'kqueue.pytest_plugin'}\n"
        "    assert not {'pydantic', 'torch'} & set(sys.modules)\n",
    )
    done = plain(cli, "-p", "kqueue")
    assert done.returncode == 0, done.stdout
