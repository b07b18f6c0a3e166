"""The ledger of a GPU's memory, with processes that book, wait, resize and are killed."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.waiting import until
from workers.judge.gpu.booking import Entry, Ledger, NotInTime, TooLarge

if TYPE_CHECKING:
    pass

#: Program that books memory, prints `booked`, and obeys orders, one a line, until its input ends.
_JUDGE = """
import os, sys, time
from pathlib import Path
from workers.judge.gpu.booking import Ledger
folder, capacity, nbytes, label = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
with Ledger(folder, capacity, patience_s=float(sys.argv[5])).book(nbytes, label=label, wait_s=120) as booking:
    print("booked", flush=True)
    for line in sys.stdin:
        word, *rest = line.split()
        if word == "resize":
            print(booking.resize(int(rest[0])), booking.nbytes, flush=True)
"""
#: Program that books, resizes and releases at random, with the sum over all processes in a file. Prints the maximum.
_BUSY = """
import fcntl, os, random, sys, time
from pathlib import Path
from workers.judge.gpu.booking import Ledger
folder, capacity, seed = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
draw = random.Random(seed)
ledger = Ledger(folder, capacity)
most = 0
def count(change):
    global most
    with open(folder.with_suffix(".sum"), "r+") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        total = int(file.read() or 0) + change
        file.seek(0); file.truncate(); file.write(str(total))
    most = max(most, total)
for _ in range(30):
    with ledger.book(draw.randrange(1, capacity + 1), label=str(seed), wait_s=120) as booking:
        count(booking.nbytes)
        for _ in range(3):
            before, wanted = booking.nbytes, draw.randrange(capacity + 1)
            if wanted < before:
                count(wanted - before)
                assert booking.resize(wanted)
            elif booking.resize(wanted):
                count(wanted - before)
            assert booking.nbytes in (before, wanted)
        count(-booking.nbytes)
with ledger.book(1, label=str(seed), wait_s=120) as booking:
    for _ in range(200):
        if booking.resize(capacity * 2 // 3):
            count(booking.nbytes)
            count(-booking.nbytes)
            booking.resize(1)
print(most)
"""
_CAPACITY = 100


class Judge:
    def __init__(self, folder: Path, nbytes: int, label: str, patience_s: float) -> None:
        arguments = [str(folder), str(_CAPACITY), str(nbytes), label, str(patience_s)]
        self.process = subprocess.Popen(
            [sys.executable, "-c", _JUDGE, *arguments], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self._input, self._output = self.process.stdin, self.process.stdout

    def booked(self) -> None:
        assert self._output.readline() == "booked\n"

    def tell(self, words: str) -> str:
        """Send an order to the process, and return its answer."""
        print(words, file=self._input, flush=True)
        return self._output.readline().strip()

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def end(self) -> None:
        self._input.close()
        assert self.process.wait() == 0


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "GPU-1.memory"


@pytest.fixture
def ledger(folder: Path) -> Ledger:
    return Ledger(folder, _CAPACITY)


@pytest.fixture
def start(folder: Path, ledger: Ledger) -> Iterator[Callable[..., Judge]]:
    """Yield a function that starts a judge and waits for its entry in the ledger. Kill all judges at the end."""
    judges: list[Judge] = []

    def start(nbytes: int, label: str, patience_s: float = 0.0) -> Judge:
        judges.append(Judge(folder, nbytes, label, patience_s))
        until(lambda: any(entry.pid == judges[-1].process.pid for entry in ledger.holders()), what=label)
        return judges[-1]

    yield start
    for judge in judges:
        judge.kill()


def _seen(ledger: Ledger) -> list[tuple[str, bool]]:
    return [(entry.label, entry.waiting) for entry in ledger.holders()]


def test_bookings_that_fit_run_beside_each_other_and_one_that_does_not_waits(
    ledger: Ledger, start: Callable[..., Judge]
) -> None:
    assert ledger.holders() == []
    before = time.monotonic()
    large, small = start(70, "large"), start(30, "small")
    large.booked()
    small.booked()
    late = start(40, "late")
    assert _seen(ledger) == [("large", False), ("small", False), ("late", True)]
    first = ledger.holders()[0]
    assert first == Entry(large.process.pid, 70, "large", False, first.since, _CAPACITY)
    assert before < first.since < ledger.holders()[-1].since < time.monotonic()
    large.end()
    late.booked()
    assert _seen(ledger) == [("small", False), ("late", False)]


def test_a_large_booking_that_has_waited_for_long_is_not_overtaken(
    folder: Path, ledger: Ledger, start: Callable[..., Judge]
) -> None:
    holder = start(60, "holder")
    holder.booked()
    large, small = start(80, "large"), start(20, "small")
    with pytest.raises(NotInTime, match=r"20 bytes of GPU memory did not become free .* 60 of 100 are booked"):
        Ledger(folder, _CAPACITY, patience_s=0).book(20, label="later", wait_s=0.3)
    assert _seen(ledger) == [("holder", False), ("large", True), ("small", True)]
    holder.end()
    large.booked()
    small.booked()
    assert _seen(ledger) == [("large", False), ("small", False)]


def test_what_fits_passes_one_that_waits_for_more(ledger: Ledger, start: Callable[..., Judge]) -> None:
    holder = start(60, "holder")
    holder.booked()
    start(80, "large")
    small = start(20, "small", patience_s=60)
    small.booked()
    assert holder.tell("resize 70") == "False 60"  # it does not wait itself
    assert small.tell("resize 40") == "True 40"
    assert small.tell("resize 20") == "True 20"
    blocked = start(15, "blocked")  # it would fit, but it does not overtake the large one
    with pytest.raises(NotInTime):
        ledger.book(10, label="later", wait_s=0.3)
    ledger.book(5, label="later", wait_s=0.3).release()
    assert small.tell("resize 26") == "False 20"
    blocked.kill()
    assert small.tell("resize 26") == "True 26"


def test_a_killed_holder_holds_nothing(ledger: Ledger, start: Callable[..., Judge], folder: Path) -> None:
    holder = start(_CAPACITY, "holder")
    holder.booked()
    waiter = start(50, "waiter")
    holder.kill()
    waiter.booked()
    assert _seen(ledger) == [("waiter", False)]
    waiter.end()
    ledger.book(_CAPACITY, label="mine", wait_s=0).release()
    assert [path.name for path in folder.iterdir()] == ["lock"]


def test_a_killed_waiter_keeps_nobody_waiting(ledger: Ledger, start: Callable[..., Judge]) -> None:
    start(60, "holder").booked()
    first, second = start(90, "first"), start(40, "second")
    assert _seen(ledger) == [("holder", False), ("first", True), ("second", True)]
    first.kill()
    second.booked()
    assert _seen(ledger) == [("holder", False), ("second", False)]


def test_a_booking_shrinks_at_once_and_grows_where_that_delays_nobody(
    ledger: Ledger, start: Callable[..., Judge]
) -> None:
    judge, other = start(50, "judge"), start(30, "other")
    judge.booked()
    other.booked()
    assert judge.tell("resize 70") == "True 70"
    assert judge.tell("resize 71") == "False 70"
    assert judge.tell("resize 10") == "True 10"
    waiter = start(80, "waiter")
    assert judge.tell("resize 11") == "False 10"
    assert judge.tell("resize 5") == "True 5"
    assert [entry.nbytes for entry in ledger.holders()] == [5, 30, 80]
    other.end()
    waiter.booked()
    assert judge.tell("resize 20") == "True 20"
    assert judge.tell("resize 21") == "False 20"


def test_more_than_the_capacity_is_refused_at_once(ledger: Ledger) -> None:
    with pytest.raises(TooLarge, match=r"101 bytes .* 100$"):
        ledger.book(_CAPACITY + 1, label="giant", wait_s=60)
    assert ledger.holders() == []
    with ledger.book(_CAPACITY, label="all", wait_s=0) as booking:
        assert not booking.resize(_CAPACITY + 1)
        for wrong in (ledger.book, lambda nbytes, **_: booking.resize(nbytes)):
            with pytest.raises(ValueError, match="-1 bytes"):
                wrong(-1, label="wrong", wait_s=0)


def test_a_wait_in_vain_costs_little_and_leaves_nothing(ledger: Ledger, folder: Path) -> None:
    with ledger.book(60, label="holder", wait_s=0) as booking:
        before = time.process_time()
        with pytest.raises(TimeoutError):
            ledger.book(50, label="waiter", wait_s=1)
        assert time.process_time() - before < 0.05
        assert _seen(ledger) == [("holder", False)]
        assert booking.resize(_CAPACITY)
    booking.release()
    assert [path.name for path in folder.iterdir()] == ["lock"]


def test_what_is_held_never_exceeds_the_capacity(folder: Path) -> None:
    folder.with_suffix(".sum").touch()
    busy = [
        subprocess.Popen(
            [sys.executable, "-c", _BUSY, str(folder), str(_CAPACITY), str(seed)], stdout=subprocess.PIPE, text=True
        )
        for seed in range(3)
    ]
    most = [int(process.communicate()[0]) for process in busy]
    assert [process.returncode for process in busy] == [0] * 3
    assert max(most) <= _CAPACITY
    assert folder.with_suffix(".sum").read_text() == "0"
