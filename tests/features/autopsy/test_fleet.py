"""`kqueue autopsy` and the tool of that name, with a whole fleet and the real judge."""

from __future__ import annotations

import asyncio
import signal
from pathlib import Path

import pytest

from kqueue.local.fleet import LocalFleet
from tests.cli.command import Cli
from tests.features.autopsy.tail import TAIL, TAIL_KERNEL, fails
from tests.mcp.agents import over_stdio, told
from tests.waiting import until

#: Fails on inputs of any size.
OFF = TAIL_KERNEL.replace("out = x * 2", "out = x * 2 + 1")

# The gate has test_command.py and test_pages.py with a stand-in for the workers.
pytestmark = [pytest.mark.nightly, pytest.mark.timeout(900)]


@pytest.fixture
def cli(live: LocalFleet, tmp_path: Path) -> Cli:
    """Return the command in a folder with a problem and a kernel."""
    ready = Cli(tmp_path, {"KQUEUE_HOME": str(live.config.home)})
    ready.write("tail.py", TAIL)
    return ready


def submitted(live: LocalFleet, kernel: str) -> str:
    """Have a kernel judged, and return its evaluation's id."""
    with live.client() as client:
        settings = {"checks": 2, "timing": {"purpose": "check"}}
        ticket = client.submit(problem=TAIL, kernel=kernel, backend="torch", lane="cpu", settings=settings)
        ticket.wait(300)
    return str(ticket.evaluation_id)


def test_an_evaluation_of_the_fleet(live: LocalFleet, cli: Cli, tmp_path: Path) -> None:
    """An evaluation's id is enough, several problems are judged at once, and none runs on."""
    identity = submitted(live, OFF)
    done = cli("autopsy", identity[:13], "--out", "found", "--budget", "300")
    assert done.returncode == 0, done.stderr
    assert "inputs: [4, 3001] float32 -> [1, 1] float32" in done.stdout, done.stdout
    assert "index [0, 0]: expected" in done.stdout
    fails((tmp_path / "found" / "repro.py").read_text(), tmp_path)
    with live.client() as client:
        made = client.batch(f"autopsy-{identity}")
        assert made
        assert all(ticket.done() for ticket in made)


def test_ctrl_c_tells_the_best_so_far_and_leaves_nothing(live: LocalFleet, cli: Cli) -> None:
    """Ctrl-C prints the best result so far and cancels running evaluations."""
    identity = submitted(live, TAIL_KERNEL.replace("out = x * 2", "import time; time.sleep(3); out = x * 2"))
    with cli.start("autopsy", identity, "--budget", "600") as process, live.client() as client:
        assert process.stderr is not None
        while "fails on" not in (line := process.stderr.readline()):
            assert line, "it ended by itself"
        # Several are judged at once, for seconds each.
        until(lambda: any(not ticket.done() for ticket in client.batch(f"autopsy-{identity}")), 60, "one that runs")
        process.send_signal(signal.SIGINT)
        said, complained = process.communicate(timeout=120)
        assert process.returncode == 130, complained
        assert all(words in said for words in ("wrong_values: ", "it was ended before the smallest problem was found"))
        made = client.batch(f"autopsy-{identity}")
        assert made
        until(lambda: all(ticket.done() for ticket in made), 60, "the evaluations' end")


def test_an_agent_has_one(live: LocalFleet) -> None:
    """An agent gets progress, repro.py on request, and the reason why a passed kernel has none."""
    identity = submitted(live, OFF)
    passed = submitted(live, TAIL_KERNEL.replace("] = 0", "] += 0"))
    heard: list[str] = []

    async def progress(_seconds: float, _of: float | None, message: str | None) -> None:
        heard.append(message or "")

    async def main() -> None:
        async with over_stdio({"KQUEUE_HOME": str(live.config.home)}, "--sees", "all") as client:
            asked = {"evaluation_id": identity, "budget_s": 300, "repro": True}
            found = told(await client.call_tool("autopsy", asked, progress_callback=progress, read_timeout_seconds=400))
            assert (found["category"], found["ended"]) == ("wrong_values", "smallest")
            assert (found["elements_before"], found["elements_after"]) == (4 * 3001, 1)
            assert "_fixed_inputs(get_inputs" in found["report"]
            assert any("fails on" in message for message in heard)
            refused = told(await client.call_tool("autopsy", {"evaluation_id": passed}))
            assert refused["ended"] == "refused"
            assert "the kernel passed" in refused["report"]

    asyncio.run(main())
