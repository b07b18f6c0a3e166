"""Which processes of a real worker have credentials in their memory."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from kqueue.client import Client
from tests.fleet.told import fleets
from tests.judge.linear import PROBLEM, right
from tests.memory import held
from tests.security.house import House
from workers.judge.host import linux


@pytest.mark.slow("searches the memory of a worker's processes")
def test_neither_a_judge_nor_what_forks_it_holds_a_credential(house: House) -> None:
    """Nor does the fork server; the worker's parent, which is searched in the same way, does."""
    pattern = re.escape(house.guarded.passwords["worker"].encode())
    with fleets(house.services) as start:
        fleet = start(true=True, slots=1, **house.settings("worker"))
        with Client(house.services.config(**house.settings("producer"))) as client:
            ticket = client.submit(problem=PROBLEM, kernel=right(), backend="torch", lane="cpu")
            assert ticket.wait(160).passed
        [worker] = fleet.live()
        found = {"kq-worker": held(worker.pid, pattern)}
        for pid in linux.children(worker.pid):
            for process in (pid, *linux.children(pid)):
                name = Path(f"/proc/{process}/comm").read_text().strip()
                if name in ("kq-seat", "kq-judge", "kq-forkserver", "kq-reference"):
                    found[name] = held(process, pattern)
    found.pop("kq-reference", None)  # it may be kept, or not
    assert found == {"kq-worker": True, "kq-seat": False, "kq-judge": False, "kq-forkserver": False}
