"""An agent before a whole fleet with the true judge: on stdio, over HTTP, and without `kqueue serve`."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from kqueue.config import load
from kqueue.local.fleet import LocalFleet
from kqueue.store import tokens
from kqueue.store.engine import connect
from tests.mcp.agents import Http
from tests.services import starts_services

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "agent.py"

pytestmark = pytest.mark.timeout(900)


@pytest.fixture(scope="module")
@starts_services
def fleet() -> Iterator[LocalFleet]:
    """A fleet of one CPU slot as `kqueue up` runs it, HTTP included."""
    with tempfile.TemporaryDirectory(prefix="kqueue-agents-") as name:
        directory = Path(name)
        directory.chmod(0o711)  # pytest's own folders are closed to candidates
        config = load(home=directory / "home", scratch=directory / "scratch", gpus="none", cpu_slots=1, http_port=0)
        with LocalFleet(config, http=True, durable=False) as fleet:
            yield fleet


def services(fleet: LocalFleet) -> dict[str, str]:
    """The settings of a client of the fleet's own Postgres and Redis."""
    config = load(home=fleet.config.home)
    assert config.database_url is not None
    assert config.redis_url is not None
    return {
        "KQUEUE_DATABASE_URL": config.database_url.get_secret_value(),
        "KQUEUE_REDIS_URL": config.redis_url.get_secret_value(),
    }


def run(*arguments: str | Path, **environment: str) -> tuple[int, str]:
    """What the example's exit status is, and what it prints."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("KQUEUE_")}
    done = subprocess.run(
        [sys.executable, str(EXAMPLE), *map(str, arguments)],
        env=kept | environment,
        capture_output=True,
        text=True,
        timeout=600,
    )
    return done.returncode, done.stdout + done.stderr


def steps(said: str) -> list[str]:
    return re.findall(r"^step \d+: (\w+)", said, re.MULTILINE)


WHOLE = ["syntax_error", "runtime_error", "wrong_values", "passed"]


@pytest.mark.nightly
def test_an_agent_repairs_a_kernel_on_stdio(fleet: LocalFleet) -> None:
    """The example finds the fleet of this machine, and each report tells what to change next."""
    status, said = run(KQUEUE_HOME=str(fleet.config.home))
    assert (status, steps(said)) == (0, WHOLE), said
    assert "+    def forward(self, x):" in said
    assert "+        y = x.relu()" in said
    assert "+        return y * 2" in said
    assert "0 of 1 done." in said


@pytest.mark.nightly
def test_an_agent_repairs_a_kernel_over_http(fleet: LocalFleet, tmp_path: Path) -> None:
    """A token and a URL are all that an agent elsewhere needs; only the mistake that is there is repaired."""
    engine = connect(services(fleet)["KQUEUE_DATABASE_URL"], application="tests", pool_size=1)
    token = tokens.create(engine, "an agent", [tokens.Scope.PROBLEMS])[1]
    engine.dispose()
    broken = tmp_path / "broken.py"
    broken.write_text(
        "import torch\n\n\nclass ModelNew(torch.nn.Module):\n    def forward(self, x):\n        return x.relu() * 7.0\n"
    )
    with Http({"KQUEUE_URL": str(fleet.http_url)}) as server:
        status, said = run(server.url, "--kernel", broken, KQUEUE_TOKEN=token)
        assert (status, steps(said)) == (0, ["wrong_values", "passed"]), said
        assert token not in server.log


@pytest.mark.nightly
def test_an_agent_repairs_a_kernel_without_kqueue_serve(fleet: LocalFleet, tmp_path: Path) -> None:
    """Postgres and Redis are enough, and a mistake that the agent knows no repair for ends it with the report."""
    broken = tmp_path / "broken.py"
    broken.write_text(
        "import torch\n\n\nclass ModelNew(torch.nn.Module):\n    def forward(self, x):\n        return x[0]\n"
    )
    home = str(tmp_path / "nowhere")
    status, said = run("--kernel", broken, **services(fleet), KQUEUE_HOME=home)
    assert (status, steps(said)) == (1, ["wrong_shape"]), said
    assert "this agent knows no repair for:" in said
    broken.write_text(broken.read_text().replace("x[0]", "x.rleu() * 2.0"))
    status, said = run("--kernel", broken, **services(fleet), KQUEUE_HOME=home)
    assert (status, steps(said)) == (0, ["runtime_error", "passed"]), said
