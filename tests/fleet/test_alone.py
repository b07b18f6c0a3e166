"""A device's lock: shared by ordinary evaluations, exclusive for a suspect."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from workers.judge.host.exclusive import NoRoom, room


def test_a_suspect_shuts_everybody_out(tmp_path: Path) -> None:
    """A suspect excludes ordinary evaluations and other suspects on its device, but not on another device."""
    lock = tmp_path / "cpu.lock"
    with room(lock, alone=True):
        for alone, message in ((False, "an exclusive evaluation"), (True, "other evaluations")):
            with pytest.raises(NoRoom, match=message), room(lock, alone=alone, patience_s=0.1):
                pass
        with room(tmp_path / "GPU-1.lock", alone=True, patience_s=0):
            pass
    with room(lock, alone=False, patience_s=0):
        pass


def test_a_suspect_is_not_kept_waiting_by_those_who_come_later(tmp_path: Path) -> None:
    """In an endless stream of ordinary evaluations a suspect starts when the earlier ones have ended."""
    lock = tmp_path / "cpu.lock"
    over = threading.Event()

    def stream(number: int) -> None:
        time.sleep(number * 0.02)
        while not over.is_set():
            with room(lock, alone=False):
                assert not inside.is_set()
                time.sleep(0.1)

    inside = threading.Event()
    with ThreadPoolExecutor(4) as pool:
        streams = [pool.submit(stream, number) for number in range(4)]
        try:
            time.sleep(0.2)
            with room(lock, alone=True, patience_s=30):
                inside.set()
                time.sleep(0.3)
                inside.clear()
        finally:
            over.set()
        for running in streams:
            running.result()
