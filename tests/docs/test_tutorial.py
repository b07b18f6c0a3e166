"""docs/tutorial.md is followed: its blocks are run in their order, and end as the page says."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from tests.waiting import until

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "tutorial.md").read_text()
#: A block, with the reason before it why it is not run, if there is one.
BLOCK = re.compile(r"(?:<!-- not run: ([^>]+) -->\n)?^```(\w*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
BLOCKS = [(reason, language, text) for reason, language, text in BLOCK.findall(PAGE)]
#: What the page says of a block's last command.
STATUS = re.compile(r"# ends with status (\d+)$", re.MULTILINE)


def test_the_page_counts_what_is_not_run() -> None:
    """All blocks are commands or Python, and the page says how many of them are not run."""
    assert {language for _, language, _ in BLOCKS} == {"sh", "python"}
    assert len(BLOCKS) == PAGE.count("\n```") // 2
    [said] = re.findall(r"but for (\d+) of them", PAGE)
    assert len([reason for reason, _, _ in BLOCKS if reason]) == int(said)


def start(log: Path, environment: dict[str, str]) -> subprocess.Popen[bytes]:
    """What the page has in a second terminal."""
    with log.open("wb") as out:
        return subprocess.Popen(["kqueue", "up"], env=environment, cwd=ROOT, stdout=out, stderr=out)


def answers(fleet: subprocess.Popen[bytes], environment: dict[str, str], log: Path) -> None:
    """Wait until a worker of the fleet is there."""

    def ready() -> bool:
        shown = subprocess.run(["kqueue", "status"], env=environment, capture_output=True).stdout
        return fleet.poll() is not None or b"cpu-0" in shown

    until(ready, 300, "the fleet")
    assert fleet.poll() is None, log.read_text()


@pytest.mark.services
@pytest.mark.timeout(900)
def test_the_page_can_be_followed() -> None:
    """Each block ends with the status that the page names, and says what the page tells of it."""
    with tempfile.TemporaryDirectory(prefix="kqueue-tutorial-") as name:
        folder = Path(name)
        folder.chmod(0o711)  # candidates' directories lie below it
        environment = os.environ | {
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
            "KQUEUE_HOME": str(folder / "home"),
            "KQUEUE_SCRATCH": str(folder / "scratch"),
            "KQUEUE_GPUS": "none",
            "KQUEUE_CPU_SLOTS": "1",
            "KQUEUE_FLOWER_PORT": "0",
            "PYTHONPATH": str(ROOT),
        }
        said: list[str] = []
        fleet: subprocess.Popen[bytes] | None = None
        try:
            for reason, language, shown in BLOCKS:
                if reason:
                    continue
                text = shown.replace("/tmp/mine.py", str(folder / "mine.py"))
                if "kqueue up" in text:
                    fleet = start(folder / "log", environment)
                    answers(fleet, environment, folder / "log")
                    continue
                command = ["bash", "-euc", text] if language == "sh" else [sys.executable, "-c", text]
                done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True)
                said.append(done.stdout)
                expected = int(STATUS.findall(text)[-1]) if STATUS.search(text) else 0
                assert done.returncode == expected, text + done.stdout + done.stderr
        finally:
            if fleet is not None:
                fleet.send_signal(signal.SIGINT)
                fleet.wait(120)
    told = ("passed", "wrong_values", "passed", "cpu-0", "crashed", "crashed", "passed")
    assert [word for word, text in zip(told, said, strict=True) if word not in text] == [], said
    assert "blame: candidate" in said[1]
