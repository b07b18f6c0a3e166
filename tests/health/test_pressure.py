"""A host with little free disk or memory pauses the intake of evaluations, reports it, and resumes."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kqueue.config import Config
from workers.monitor import Pressure

pytestmark = pytest.mark.timeout(300)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    place = tmp_path / "disk"
    place.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=64m,mode=711", "kqueue-test", str(place)]
    if (done := subprocess.run(command, capture_output=True, text=True, check=False)).returncode:
        pytest.skip(f"nothing can be mounted here: {done.stderr}")
    yield place
    subprocess.run(["umount", "--lazy", str(place)], check=True)


@pytest.mark.nightly
def test_a_full_disk_stops_intake_and_room_starts_it_again(
    services: Any, start_fleet: Callable[..., Any], small_disk: Path, tmp_path: Path
) -> None:
    """Running evaluations go on, and queued ones are judged when space is free."""
    fleet = start_fleet(scratch=small_disk, home=small_disk / "home", min_free_disk=0.4)
    running = services.submit(f"gate {tmp_path / 'gate'}")
    services.started(running)
    filler = small_disk / "filler"
    filler.write_bytes(bytes(45 << 20))

    def paused() -> str:
        return fleet.live()[0].paused or ""

    services.until(lambda: "less than 40.0%" in paused(), what="a worker that pauses")
    waiting = services.submit("ok")
    (tmp_path / "gate").touch()
    assert services.verdict(running).passed
    assert services.attempts(waiting) == []
    filler.unlink()
    services.until(lambda: not paused(), what="a worker that goes on")
    assert services.verdict(waiting).passed
    assert "no evaluations are taken" in fleet.log.read_text()
    fleet.stop()


@pytest.mark.nightly
def test_a_worker_that_starts_on_a_full_disk_works_when_there_is_room(
    services: Any, start_fleet: Callable[..., Any], small_disk: Path
) -> None:
    """Home, scratch and log are on the full disk, so no log line can be written, but every process goes on."""
    redirected = ["sh", "-c", f'exec "$@" >> {small_disk}/log 2>&1', "sh"]
    fleet = start_fleet(scratch=small_disk, home=small_disk / "home", prefix=redirected)
    [before] = fleet.live()
    with (small_disk / "filler").open("wb", 0) as filler, (small_disk / "log").open("ab", 0) as log:

        def works_on_a_full_disk() -> bool:
            for file, size in (filler, 4096), (log, 1):  # the log's last block has space left
                with suppress(OSError):
                    while True:
                        file.write(bytes(size))
            return [worker.id for worker in fleet.live()] not in ([], [before.id])

        works_on_a_full_disk()
        os.kill(before.pid, signal.SIGKILL)
        waiting = services.submit("ok")
        services.until(works_on_a_full_disk, what="another worker")
    (small_disk / "filler").unlink()
    assert services.verdict(waiting).passed
    fleet.stop()


def test_what_is_short_is_told(config: Config) -> None:
    """No host that runs tests has 99.99 % of its memory or disk free."""
    both = {"min_free_memory": 0.0, "min_free_disk": 0.0}
    for short, reason in (({"min_free_memory": 0.9999}, "memory"), ({"min_free_disk": 0.9999}, "disk"), ({}, None)):
        pressure = Pressure(config.model_copy(update=both | short))
        pressure.look()
        assert pressure.reason is None if reason is None else reason in pressure.reason


def test_intake_resumes_at_half_as_much_again(config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    """The gap between the limits prevents frequent changes on a host at the limit."""
    pressure = Pressure(config.model_copy(update={"min_free_memory": 0.0, "min_free_disk": 0.4}))
    for free, short in ((41, False), (39, True), (41, True), (59, True), (61, False), (41, False)):
        disk = SimpleNamespace(f_bavail=free, f_blocks=100, f_frsize=1, f_favail=1, f_files=1)
        monkeypatch.setattr(os, "statvfs", lambda _, disk=disk: disk)
        pressure.look()
        assert (pressure.reason is not None) == short, free
