"""Hostile problems: each harms only its own evaluation, and the next one is unaffected."""

from __future__ import annotations

import shutil
import socket
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from kqueue.categories import Blame, Category
from kqueue.contract import Outcome
from tests.integrity.hostile_problems import HERE, HONEST, SECRET, SUCCEEDED, Hostile, Outside, problems, request
from tests.judge.rig import Rig
from tests.sandbox.fleets import greet
from tests.waiting import until, waits
from workers.judge.host import linux, uids
from workers.judge.sandbox.seal import Role

pytestmark = pytest.mark.slow("judges programs of a corpus")

ALL = {problem.name: problem for problem in problems()}
#: Programs of each folder that are judged in the gate, each followed by an honest problem. The other ones run nightly.
GATE = {
    "reach/sockets",
    "resources/memory_of_children",
    "overruns/initial_holds_the_interpreter",
    "deaths/looks_killed",
    "answers/structure_changes",
    "words/sheet_tensors",
    "kept/speaks_ahead",
}


@pytest.fixture(scope="module")
def outside() -> Iterator[Outside]:
    """Targets of hostile problems on the host: a readable file, and listeners on a port, a path and a name."""
    directory = Path(tempfile.mkdtemp(prefix="kqueue-outside-"))
    directory.chmod(0o777)
    (directory / "secret").write_text(SECRET)
    (directory / "secret").chmod(0o644)
    slots = [
        (socket.AF_INET, ("127.0.0.1", 0)),
        (socket.AF_UNIX, str(directory / "socket")),
        (socket.AF_UNIX, f"\0{directory}"),
    ]
    listeners = [socket.socket(family) for family, _ in slots]
    for listener, (_, address) in zip(listeners, slots, strict=True):
        listener.bind(address)
        greet(listener, SECRET.encode())
    (directory / "socket").chmod(0o777)
    yield Outside(directory, listeners[0].getsockname()[1])
    for listener in listeners:
        listener.close()
    shutil.rmtree(directory)


def sealed_processes(rig: Rig) -> list[int]:
    """Return the processes of the slot's uids, or the fork server's children if the fleet is not root."""
    if rig.slot.uid is None:
        return [pid for pid in linux.children(rig.forkserver.pid) if not linux.is_zombie(pid)]
    return [pid for uid in uids.all_of(rig.slot.uid) for pid in linux.living_of_uid(uid)]


def assert_contained(outside: Outside, outcome: Outcome) -> None:
    """Assert that no attack succeeded, no secret is revealed, the fleet is not blamed and the host has no new file."""
    told = outcome.model_dump_json()
    assert SUCCEEDED not in told, told
    assert SECRET not in told
    assert outcome.blame is not Blame.FLEET, told
    assert sorted(path.name for path in outside.directory.iterdir()) == ["secret", "socket"]


@pytest.mark.parametrize(
    "problem", [pytest.param(p, id=name, marks=() if name in GATE else pytest.mark.nightly) for name, p in ALL.items()]
)
def test_a_hostile_problem_spoils_its_own_evaluation_at_most(keeping: Rig, outside: Outside, problem: Hostile) -> None:
    """Its category is as expected, also with a kept reference, and no secret, file or process remains."""
    outcome = keeping.judge(problem.request(outside))
    assert outcome.category in problem.expected, outcome
    assert_contained(outside, outcome)
    if outcome.blame is Blame.PROBLEM:
        # A candidate that was prewarmed for the next evaluation can remain.
        until(lambda: all(waits(pid) for pid in sealed_processes(keeping)), what="the end of all that had a source")
    else:
        if problem.name.startswith("kept/"):
            time.sleep(0.3)  # some problems attack while they are kept
        again = keeping.judge(problem.request(outside))
        assert again.category in (problem.again or problem.expected), again
        assert_contained(outside, again)
        told = again.evidence.reference
        assert not problem.replaced or (told is not None and told.replaced), told
    if problem.name.startswith("kept/") or problem.name in GATE:
        honest = keeping.judge(request(HONEST))
        assert honest.category is Category.PASSED, honest
    keeping.end_kept()
    until(lambda: not [*sealed_processes(keeping), *keeping.slot.scratch.iterdir()], what="the end of all processes")


@pytest.mark.nightly
def test_a_reference_that_works_while_it_is_kept_is_ended(keeping: Rig, outside: Outside) -> None:
    """A kept reference is ended after 4 s of CPU time plus a tenth of the time since, and an idle one is kept."""
    assert keeping.judge(ALL["kept/busy_thread"].request(outside)).category is Category.PASSED
    [busy] = keeping.sealed(Role.REFERENCE)
    begun, before = time.monotonic(), linux.cpu_seconds(busy)
    resting: list[int] = []
    # A busy machine gives it little CPU time, so it can live for long. The idle one is used meanwhile.
    while busy in keeping.sealed(Role.REFERENCE):
        assert linux.cpu_seconds(busy) - before < 4 + 0.1 * (time.monotonic() - begun) + 10
        assert keeping.judge(request(HONEST)).category is Category.PASSED
        resting = resting or [pid for pid in keeping.sealed(Role.REFERENCE) if pid != busy]
        assert len(resting) == 1
        time.sleep(1)
    # A dying process can still be listed once.
    until(lambda: keeping.sealed(Role.REFERENCE) == resting, what="the end of the one that works")
    keeping.end_kept()


def test_the_corpus_is_whole() -> None:
    assert {problem.path for problem in ALL.values()} == set(HERE.rglob("*.py"))
    assert {name.partition("/")[0] for name in GATE} == {name.partition("/")[0] for name in ALL}
