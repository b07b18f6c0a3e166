"""The reason of an evaluation's wait."""

from __future__ import annotations

from functools import partial
from uuid import UUID, uuid4

import pytest
from sqlalchemy import Engine, event, text

from kqueue.errors import UnknownEvaluation
from kqueue.store import evaluations, reports, workers
from kqueue.store.engine import Viewer, acting
from kqueue.store.reports import Why
from tests.store.steps import LOST, change, finish, used


@pytest.fixture
def why(engine: Engine):
    """Return a function that reports why an evaluation waits."""
    return lambda identity: reports.waiting(engine, identity, within_s=90)


def test_what_is_in_the_way(engine: Engine, enqueue, claim, why, worker_id: UUID) -> None:
    """The reason is no worker, paused workers or a delayed retry, and a done evaluation has none."""
    [identity] = enqueue(1, lane="gpu")
    assert why(identity).why is Why.NO_WORKER
    [first, done] = enqueue(2)
    assert (why(first).why, why(first).ahead, why(first).starts_in_s) == (Why.NEXT, 0, None)
    change(engine, "UPDATE workers SET paused = 'the host is short of memory'")
    assert why(first).why is Why.PAUSED
    assert "short of memory" in why(first).message
    change(engine, "UPDATE workers SET paused = NULL")
    finish(engine, claim(first), LOST)
    change(engine, "UPDATE evaluations SET available_at = now() + interval '20 s' WHERE id = :id", id=first)
    assert why(first).why is Why.RETRY
    evaluations.cancel(engine, done)
    assert why(done) is None
    with pytest.raises(UnknownEvaluation):
        why(uuid4())


def test_place_and_estimate(engine: Engine, enqueue, why, worker_id: UUID) -> None:
    """A producer's evaluations are in the order of submission, and are expected to take their past average."""
    used(engine, "a", 200, 100)
    found = why(enqueue(31, producer="a")[30])
    assert (found.why, found.ahead) == (Why.TURN, 30)
    assert found.starts_in_s == pytest.approx(60)
    assert found.error_s == pytest.approx(0, abs=1e-3)
    assert "30 come before it" in found.message


def test_what_runs_is_waited_for(engine: Engine, enqueue, claim, why, worker_id: UUID) -> None:
    """Its expected rest is added to the estimate, and a running evaluation itself has no reason to wait."""
    used(engine, "a", 200, 100)
    running, queued = enqueue(2, producer="a")
    assert why(queued).starts_in_s == pytest.approx(2)
    claim(running)
    found = why(queued)
    assert (found.why, found.ahead) == (Why.NEXT, 0)
    assert 0 < found.starts_in_s <= 2
    assert why(running) is None


def test_one_that_is_claimed_meanwhile_waits_no_more(engine: Engine, enqueue, claim, why, worker_id: UUID) -> None:
    """The last queued evaluation can begin between two queries of the same report."""
    [queued] = enqueue(1)
    looks: list[str] = []

    def begin(_connection, _cursor, statement: str, *_: object) -> None:
        if "WITH RECURSIVE groups" in statement and not looks:
            looks.append(statement)
            claim(queued)

    event.listen(engine, "before_cursor_execute", begin)
    assert why(queued).ahead == 0
    assert len(looks) == 1
    assert why(queued) is None


def test_the_place_agrees_with_the_order(engine: Engine, enqueue, why, worker_id: UUID) -> None:
    """Among several producers and priorities, each place is near the actual one."""
    used(engine, "a", 300, 100)
    used(engine, "b", 240, 60)
    used(engine, "c", 20, 10)
    enqueue(40, producer="a")
    enqueue(40, producer="b")
    enqueue(15, producer="c")
    enqueue(5, producer="a", priority="interactive")
    order = [one.id for one in evaluations.upcoming(engine, {"cpu": 20})["cpu"]]
    places = [why(identity).ahead for identity in order]
    assert all(abs(place - number) <= 2 for number, place in enumerate(places)), places


def test_of_very_many_it_counts_a_part(engine: Engine, enqueue, worker_id: UUID) -> None:
    """Place and begin are then lower bounds and marked so, and an evaluation before them has an exact place."""
    why = partial(reports.waiting, engine, within_s=90, counted=60)
    used(engine, "a", 200, 100)
    used(engine, "b", 200, 100)
    ids = enqueue(40, producer="a")
    enqueue(40, producer="b")
    used(engine, "c", 500, 100)
    third = enqueue(1, producer="c")[0]
    near, far, last = why(ids[5]), why(ids[39]), why(third)
    assert not near.more
    assert near.error_s is not None
    assert abs(near.ahead - 10) <= 1
    assert (far.more, last.more) == (True, True)
    assert (far.error_s, last.error_s) == (None, None)
    assert 20 <= far.ahead <= 79
    assert last.ahead == 40
    assert last.starts_in_s == pytest.approx(80)
    assert "at least 40 come before it" in last.message
    assert "in 80 s at the earliest" in last.message


def test_a_label_chooses_no_strangers_problems(engine: Engine, enqueue) -> None:
    """A label equal to the start of a hash selects that label only. A long prefix selects a problem."""
    [mine] = enqueue(1, problem_label="mine")
    with engine.connect() as connection:
        [digest] = connection.scalars(text("SELECT problem_hash FROM evaluations"))
    label = digest[:2]
    [labelled] = enqueue(1, problem_label=label)
    assert reports.unfinished(engine, problem=label) == [labelled]
    assert {mine, labelled} >= set(reports.unfinished(engine, problem=digest[:12])) != set()
    assert reports.unfinished(engine, problem=digest[:11]) == []


def test_what_holds_the_slots_is_named(engine: Engine, enqueue, claim, why, worker_id: UUID) -> None:
    """If attempts that run for long hold all slots, the reason has their begin and latest end, and no estimate."""
    used(engine, "a", 200, 100)
    [queued] = enqueue(1, producer="a")
    with acting(Viewer("bob")):
        [running] = enqueue(1, producer="a", settings={"deadlines": {"check_s": 30}})
    claim(running)
    assert why(queued).why is Why.NEXT
    change(engine, "UPDATE attempts SET started_at = '2026-01-02 03:04:05Z'")
    found = why(queued)
    assert (found.why, found.starts_in_s) == (Why.HELD, None)
    # 990 s of deadlines, 900 s for the device, 15 s for the end.
    span = "since 2026-01-02 03:04:05Z, until 2026-01-02 03:35:50Z at the latest"
    assert found.message == f"all slots of the lane cpu are held, longer than expected: by {running} {span}"
    with acting(Viewer("local", held=True)):
        theirs = why(queued).message
    assert str(running) not in theirs
    assert f"one that you cannot read {span}" in theirs
    workers.register(engine, id=uuid4(), name="w2", host="here", pid=2, lanes=["cpu"], device="cpu")
    beside = why(queued)
    assert (beside.why, beside.starts_in_s) == (Why.NEXT, 0)
    assert f"Other slots are held: by {running} {span}" in beside.message


def test_work_of_another_lane_fills_the_slots(engine: Engine, enqueue, claim, why) -> None:
    """A running evaluation counts for each lane of its worker."""
    workers.register(engine, id=(slot := uuid4()), name="g", host="here", pid=2, lanes=["gpu", "gpu.h200"], device="G")
    used(engine, "a", 2000, 100)
    change(engine, "UPDATE shares SET resource = 'gpu'")
    [running], [queued] = enqueue(1, lane="gpu", producer="a"), enqueue(1, lane="gpu.h200", producer="a")
    assert why(queued).starts_in_s == pytest.approx(0, abs=1)
    evaluations.claim(engine, running, worker_id=slot, lease_s=3600)
    assert why(queued).starts_in_s == pytest.approx(20, abs=1)
