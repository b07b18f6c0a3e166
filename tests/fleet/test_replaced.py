"""Workers that cannot work end or are killed, and the supervisor starts new ones."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.fleet.told import HERE


def test_a_handler_that_fails_ends_the_worker(services: Any, fleet: Any) -> None:
    """Celery would go on, but the worker is replaced until one can work."""
    [worker] = fleet.live()
    for where, handler, status in (
        ("start", "_prepare", 1),
        ("child", "_prepare_child", 0),
        ("ready", "_report_ready", 1),
    ):
        told = len(fleet.log.read_text())
        fails = services.directory / f"fail-at-{where}"
        fails.touch()
        if where == "start":
            os.kill(worker.pid, signal.SIGKILL)
        for words in (f"exited with status {status}", f"at={handler}", f"told to fail at {where}"):
            services.until(lambda told=told, words=words: words in fleet.log.read_text()[told:], what=words)
        fails.unlink()
    assert services.verdict(services.submit("ok")).passed


@pytest.mark.nightly
def test_a_worker_without_a_directory_is_started_later(services: Any, fleet: Any) -> None:
    """The supervisor keeps running although it cannot create the directory."""
    told = len(fleet.log.read_text())
    place = services.config().scratch / "fleet-0"
    aside = place.rename(place.with_name("aside"))
    place.touch()
    os.kill(fleet.live()[0].pid, signal.SIGKILL)
    services.until(lambda: "cannot be started now" in fleet.log.read_text()[told:], what="a failed start")
    place.unlink()
    aside.rename(place)
    assert services.verdict(services.submit("ok")).passed
    assert fleet.process.poll() is None


def test_a_worker_that_is_not_ready_in_time_is_replaced(services: Any, fleet: Any, tmp_path: Path) -> None:
    hangs, log = services.directory / "hang-at-start", tmp_path / "log"
    hangs.touch()
    environment = fleet.environment | {"JUDGES_PATIENCE_S": "1"}
    with log.open("wb") as out:
        process = subprocess.Popen(
            [sys.executable, str(HERE / "run_fleet.py")], env=environment, stdout=out, stderr=out
        )
    try:
        services.until(lambda: log.read_text().count("has not become ready") == 2, what="the end of patience, twice")
        killed = re.findall("has not become ready.* pid=([0-9]+)", log.read_text())
        assert len(set(killed)) == 2
        assert "was killed by SIGKILL" in log.read_text()
    finally:
        process.send_signal(signal.SIGINT)
        process.wait(60)
        hangs.unlink()


def test_a_worker_that_fails_every_evaluation_is_replaced(services: Any, fleet: Any) -> None:
    """Successive failures of the fleet count, whether a judge reports them or dies."""
    [before] = fleet.live()
    failures = ["raise", "exit 1"] * 5
    for kernel in ["ok", *failures[1:], "ok", *failures]:
        assert [worker.id for worker in fleet.live()] == [before.id]
        assert services.verdict(services.submit(kernel)).category == ("passed" if kernel == "ok" else "judge_error")
    services.until(lambda: [worker.id for worker in fleet.live()] not in ([], [before.id]), what="another worker")
    assert services.verdict(services.submit("ok")).passed
