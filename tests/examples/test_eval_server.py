"""The clients of docs/eval-server.md and docs/http.md, as they are, before a whole fleet with the true judge."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from kqueue.config import load
from kqueue.local.fleet import LocalFleet
from tests.services import starts_services
from tests.waiting import until

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"

pytestmark = pytest.mark.timeout(900)


@pytest.fixture(scope="module")
@starts_services
def fleet() -> Iterator[LocalFleet]:
    """A fleet of one CPU slot as `kqueue up` runs it, HTTP included."""
    with tempfile.TemporaryDirectory(prefix="kqueue-served-") as name:
        directory = Path(name)
        directory.chmod(0o711)  # pytest's own folders are closed to candidates
        config = load(
            home=directory / "home",
            scratch=directory / "scratch",
            gpus="none",
            cpu_slots=1,
            http_port=0,
            gpu_fallback="cpu",
        )
        with LocalFleet(config, http=True, durable=False) as fleet:
            # What it says of its workers is a second old.
            until(lambda: httpx.get(f"{fleet.http_url}/health").json()["status"] == "healthy", what="the service")
            yield fleet


def run(name: str, fleet: LocalFleet) -> str:
    """What an example prints; it ends well only if each kernel came to what it must. It finds its token by itself."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("KQUEUE_")}
    kept["KQUEUE_HOME"] = str(fleet.config.home)
    command = [sys.executable, str(EXAMPLES / name), *([] if name == "remote_client.py" else [str(fleet.http_url)])]
    done = subprocess.run(command, env=kept, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_the_client_that_waits(fleet: LocalFleet) -> None:
    """A right kernel has a time, a wrong one and one that crashes have a reason."""
    said = run("eval_client.py", fleet)
    assert "healthy, 0 GPUs" in said
    assert "right: compiled True, correct True" in said
    assert "passed:" in said
    assert "wrong_values:" in said
    assert "crashed:" in said
    assert "correct False, -1.0000 ms" in said


def test_the_client_that_asks_again(fleet: LocalFleet) -> None:
    """The same kernels as jobs."""
    said = run("job_client.py", fleet)
    assert "right: passed on cpu" in said
    assert "crashes: crashed on cpu" in said


def test_the_remote_client(fleet: LocalFleet) -> None:
    """The example of docs/http.md: a batch, one entry of which is refused."""
    said = run("remote_client.py", fleet)
    assert "right: passed, " in said
    assert "wrong: wrong_values" in said
    assert "breaks: runtime_error" in said
    assert "refused: kernel: " in said
    assert "3 evaluations in the batch" in said


def test_every_door(fleet: LocalFleet) -> None:
    """The clients of other servers, each in its own way. They learn the fleet's fallback for GPUs from the fleet."""
    said = run("doors.py", fleet)
    assert "WRONG" not in said
    assert "asked gpu.a100, judged on cpu: compiled=True correct=True" in said
    assert "(5 / 5) and 4 hidden: right on 9 input sets, 4 of them hidden variants" in said
    assert "KernelGYM: crashes kernel" in said
    assert "send the header Content-Type: application/json" in said
