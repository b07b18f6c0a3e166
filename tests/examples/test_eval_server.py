"""The unchanged examples that need a fleet, with a whole fleet and the real judge."""

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

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
@starts_services
def fleet() -> Iterator[LocalFleet]:
    """Start a fleet of one CPU slot like `kqueue up`, including HTTP."""
    with tempfile.TemporaryDirectory(prefix="kqueue-served-") as name:
        directory = Path(name)
        directory.chmod(0o711)  # pytest's folders are closed to candidates
        folders = {"home": directory / "home", "scratch": directory / "scratch"}
        config = load(**folders, gpus="none", cpu_slots=1, http_port=0, gpu_fallback="cpu")
        with LocalFleet(config, http=True, durable=False) as fleet:
            # The status of its workers is up to a second old.
            until(lambda: httpx.get(f"{fleet.http_url}/health").json()["status"] == "healthy", what="the service")
            yield fleet


#: Output of each example in any order. An example succeeds only if each of its kernels has the expected result.
SAID = {
    "first_script": ["passed: "],
    "eval_client": [
        "healthy, 0 GPUs", "right: compiled True, correct True", "passed:", "wrong_values:", "crashed:",
        "correct False, -1.0000 ms",
    ],
    "job_client": ["right: passed on cpu", "crashes: crashed on cpu"],
    "remote_client": [
        "right: passed, ",
        "wrong: wrong_values",
        "breaks: runtime_error",
        "refused: kernel: ",
        "3 evaluations in the batch",
    ],
    # The clients of other servers learn the fallback for GPUs from the fleet.
    "doors": [
        "asked gpu.a100, judged on cpu: compiled=True correct=True",
        "requested and completed checks          (5 / 5) and ",
        "of them hidden variants, random each time",
        "KernelGYM: crashes kernel",
        "send the header Content-Type: application/json",
    ],
}  # fmt: skip


@pytest.mark.parametrize("name", SAID)
def test_an_example_judges_its_kernels(fleet: LocalFleet, name: str) -> None:
    """An example finds the fleet and its token by itself, and prints its kernels' results."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("KQUEUE_")}
    kept["KQUEUE_HOME"] = str(fleet.config.home)
    command = [sys.executable, str(EXAMPLES / f"{name}.py")]
    done = subprocess.run(command, env=kept, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    assert [said for said in SAID[name] if said not in done.stdout] == [], done.stdout
    assert "WRONG" not in done.stdout
