"""Hostile problems: each spoils its own evaluation at most, and the next one finds all as it was."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from kqueue.categories import Blame, Category
from kqueue.contract import Outcome
from tests.integrity.hostile_problems import (
    HERE,
    HONEST,
    OUTSIDE,
    PORT,
    SECRET,
    SUCCEEDED,
    Hostile,
    problems,
    request,
)
from tests.judge.rig import Rig
from workers.judge.host import linux, uids

pytestmark = pytest.mark.slow("judges each program of a corpus")

ALL = {problem.name: problem for problem in problems()}
#: Seconds after which the slot must be free again, whatever a problem does under the corpus's deadlines.
SOON_S = 60


@pytest.fixture(scope="module")
def outside() -> Iterator[None]:
    """What hostile problems look for on the host: a readable file, and listeners on a port, a path, a name."""
    shutil.rmtree(OUTSIDE, ignore_errors=True)
    OUTSIDE.mkdir()
    OUTSIDE.chmod(0o777)
    (OUTSIDE / "secret").write_text(SECRET)
    (OUTSIDE / "secret").chmod(0o644)
    places = [
        (socket.AF_INET, ("127.0.0.1", PORT)),
        (socket.AF_UNIX, str(OUTSIDE / "socket")),
        (socket.AF_UNIX, "\0kqueue-hostile"),
    ]
    listeners = [socket.socket(family) for family, _ in places]
    for listener, (_, address) in zip(listeners, places, strict=True):
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen()
        threading.Thread(target=_greet, args=(listener,), daemon=True).start()
    (OUTSIDE / "socket").chmod(0o777)
    yield
    for listener in listeners:
        listener.close()
    shutil.rmtree(OUTSIDE)


def _greet(listener: socket.socket) -> None:
    while True:
        try:
            link, _ = listener.accept()
        except OSError:
            return
        with link:
            link.send(SECRET.encode())


@pytest.fixture(scope="module")
def keeping(judge_environment: None, outside: None) -> Iterator[Rig]:
    """A place that keeps references."""
    with Rig(keeps=True) as rig:
        yield rig


def sealed_processes(rig: Rig) -> list[int]:
    """The processes of the place's uids; of an ordinary user's fleet, the fork server's children."""
    if rig.place.uid is None:
        return [pid for pid in linux.children(rig.forkserver.pid) if not linux.is_zombie(pid)]
    return [pid for uid in uids.all_of(rig.place.uid) for pid in linux.living_of_uid(uid)]


def nothing_left(rig: Rig, seconds: float = 10) -> bool:
    """True if in time no sealed process is left, and no directory of one."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if not sealed_processes(rig) and not list(rig.place.scratch.iterdir()):
            return True
        time.sleep(0.02)
    return False


def end_kept(rig: Rig) -> None:
    """End the references that are kept, as the fork server does when their time is over."""
    for pid in linux.children(rig.forkserver.pid):
        with contextlib.suppress(OSError):  # it has ended
            if Path(f"/proc/{pid}/comm").read_text() == "kq-reference\n":
                os.kill(pid, signal.SIGKILL)


def assert_contained(rig: Rig, outcome: Outcome) -> None:
    """The outcome is nobody else's failure and holds no secret; nothing that a problem wrote was carried out."""
    told = outcome.model_dump_json()
    assert SUCCEEDED not in told, told
    assert SECRET not in told
    assert outcome.blame is not Blame.FLEET, told
    assert sorted(path.name for path in OUTSIDE.iterdir()) == ["secret", "socket"]


def assert_unharmed(rig: Rig) -> None:
    """An honest problem passes beside what is kept; nothing is left when that has ended."""
    outcome = rig.judge(request(HONEST))
    assert outcome.category is Category.PASSED, outcome
    end_kept(rig)
    assert nothing_left(rig), (sealed_processes(rig), list(rig.place.scratch.iterdir()))


@pytest.mark.parametrize("problem", ALL.values(), ids=lambda problem: problem.name)
def test_a_hostile_problem_spoils_its_own_evaluation_at_most(keeping: Rig, problem: Hostile) -> None:
    """Its category is as expected, twice; nothing leaks, nothing is left, and an honest problem passes after it."""
    begun = time.monotonic()
    outcome = keeping.judge(problem.request())
    assert outcome.category in problem.expected, outcome
    assert_contained(keeping, outcome)
    assert time.monotonic() - begun < SOON_S
    if outcome.blame is Blame.PROBLEM:
        assert nothing_left(keeping), "a reference that failed was kept"
    if problem.name.startswith("kept/"):
        time.sleep(0.3)  # some do what they do while they are kept
    again = keeping.judge(problem.request())
    assert again.category in (problem.again or problem.expected), again
    assert_contained(keeping, again)
    told = again.evidence.reference
    assert not problem.replaced or (told is not None and told.replaced), told
    assert_unharmed(keeping)


def test_a_reference_that_works_while_it_is_kept_is_ended(keeping: Rig) -> None:
    """Others are timed meanwhile; one that rests stays."""
    assert keeping.judge(ALL["kept/busy_thread"].request()).category is Category.PASSED
    [busy] = sealed_processes(keeping)
    assert keeping.judge(request(HONEST)).category is Category.PASSED
    resting = [pid for pid in sealed_processes(keeping) if pid != busy]
    assert len(resting) == 1
    deadline = time.monotonic() + 45  # before the resting one's own time is over
    while busy in sealed_processes(keeping) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert sealed_processes(keeping) == resting
    end_kept(keeping)


def test_the_corpus_is_whole() -> None:
    """Every program stands in the table once, and says what it tries and what becomes of it."""
    assert {problem.path for problem in ALL.values()} == set(HERE.rglob("*.py"))
    assert len(ALL) == len(problems())
    for problem in ALL.values():
        first = problem.mechanism.partition("\n")[0]
        assert first.endswith((".", ":")), problem.name
        if len(problem.expected) == 1 and Category.PASSED not in problem.expected:
            assert f"``{next(iter(problem.expected))}``" in problem.mechanism, problem.name
    assert not any("tests/integrity" in Path(problem.path).read_text() for problem in ALL.values())
