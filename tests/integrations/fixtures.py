"""Services with a stand-in for the workers, and a live fleet for examples."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from uuid import UUID

import pytest
from sqlalchemy import Engine, text

import tests.packages  # noqa: F401 extends the path before the adapters look for their packages
from kqueue import Client
from kqueue.categories import Category
from kqueue.config import Config
from kqueue.contract import Outcome, Phase, Request
from kqueue.evidence import Evidence, Facts, WrongLocation
from kqueue.local.fleet import LocalFleet
from tests.fleet.live import live_fleet
from tests.http.standin import end
from tests.samples import ended, measurement
from tests.services import starts_services
from tests.waiting import repeated

QUEUED = """
SELECT e.id, p.source, k.source, e.settings FROM evaluations e
JOIN problems p ON p.hash = e.problem_hash JOIN kernels k ON k.hash = e.kernel_hash
WHERE e.state = 'queued' AND e.lane = 'cpu' ORDER BY e.submitted_at
"""


@pytest.fixture(scope="session")
@starts_services
def fleet() -> Iterator[LocalFleet]:
    """Start a live fleet."""
    with live_fleet() as running:
        yield running


def judged(request: Request) -> Outcome | None:
    """Return the outcome of a kernel of sources.py, or None while it waits for a file that it names."""
    if (file := re.search(r"# until (\S+)", request.kernel)) and not Path(file[1]).exists():
        return None
    if "no such weights" in request.problem:
        return ended(Category.REFERENCE_ERROR)
    if "class ModelNew" not in request.kernel:
        return ended(Category.ENTRY_POINT_MISSING)
    if "raise " in request.kernel:
        facts = Facts(exception="builtins.ValueError")
        return ended(Category.RUNTIME_ERROR, message="ValueError: only for rows of seven", facts=facts)
    wanted, got = (re.search(r"return (x .*)", source) for source in (request.problem, request.kernel))
    if wanted and got and wanted[1] != got[1]:
        first = (WrongLocation(index=(0, 0), expected=1.0, got=0.0),)
        facts = Facts(output=0, kind="given", wrong=4096, of=4096, first=first)
        return Outcome(category=Category.WRONG_VALUES, message="values differ", phase=Phase.CHECK, facts=facts)
    timing = request.settings.timing
    of = {"count": timing.calls}
    times = {
        name: measurement(ms).model_copy(update=of)
        for name, ms in (("runtime", 0.5), ("baseline", 1.0))
        if timing.enabled
    }
    return Outcome(category=Category.PASSED, evidence=Evidence(checks=request.settings.checks), **times)


@pytest.fixture
def config(config: Config, engine: Engine, worker_id: UUID, monkeypatch: pytest.MonkeyPatch) -> Iterator[Config]:
    """Return settings of services with a stand-in for a worker, also set in the environment."""
    config = config.model_copy(update={"lease_s": 3600.0})
    for name, value in config.environment().items():
        monkeypatch.setenv(name, value)

    def work() -> None:
        with engine.connect() as connection:
            rows = connection.execute(text(QUEUED)).all()
        for identity, problem, kernel, settings in rows:
            outcome = judged(Request(problem=problem, kernel=kernel, backend="torch", settings=settings))
            if outcome is not None:
                end(engine, worker_id, identity, outcome)

    with repeated(work):
        yield config


@pytest.fixture
def kq(config: Config) -> Iterator[Client]:
    """Return a client of the fleet."""
    with Client(config) as client:
        yield client


@pytest.fixture
def run_example(fleet: LocalFleet, tmp_path: Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Run an example, or a module after `-m`, against the fleet, from a folder other than the examples'."""
    examples = Path(__file__).resolve().parents[2] / "examples"

    def run(name: str, *arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, name if name == "-m" else examples / name, *arguments],
            env=os.environ | fleet.config.environment(),
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=400,
        )

    return run
