"""The order of evaluations."""

from __future__ import annotations

import re
from uuid import UUID

import pytest
from sqlalchemy import Engine, event, text

from kqueue.contract import Request
from kqueue.states import Priority
from kqueue.store import evaluations, reports, tokens
from kqueue.store.evaluations import order
from tests.store.steps import LOST, PASSED, change, count, finish, used


def nexts(engine: Engine, slots: int = 0, lane: str = "cpu") -> list[UUID]:
    """Return the ids of a lane's next evaluations."""
    return [one.id for one in evaluations.upcoming(engine, {lane: slots}).get(lane, [])]


def test_the_oldest_first(engine: Engine, enqueue) -> None:
    """A producer's evaluations are in the order of submission, up to a window, and each lane has its own window."""
    first, second = enqueue(3), enqueue(40)
    other = enqueue(1, lane="gpu")
    assert nexts(engine) == [*first, *second][: evaluations.window(0)]
    assert nexts(engine, 10) == [*first, *second][: evaluations.window(10)]
    assert nexts(engine, lane="gpu") == other
    assert evaluations.window(10) > evaluations.window(0)


def test_what_cannot_begin_is_passed_over(engine: Engine, enqueue, claim) -> None:
    """Running, done, delayed and expired evaluations are skipped. A retry keeps the order of its submission."""
    running, done, later, expired, retried, queued = enqueue(6, queue_wait_s=60)
    claim(running)
    evaluations.cancel(engine, done)
    finish(engine, claim(retried), LOST)
    change(engine, "UPDATE evaluations SET available_at = now() + interval '1 min' WHERE id = :id", id=later)
    change(
        engine, "UPDATE evaluations SET expires_at = now() - interval '1 s' WHERE id IN (:a, :b)", a=expired, b=retried
    )
    assert nexts(engine) == [retried, queued]


def test_seconds_count_and_not_numbers(engine: Engine, enqueue) -> None:
    """Attempts of ten times the length get a tenth of the number, and the producer with fewer used seconds is first."""
    slow, quick = enqueue(50, "slow"), enqueue(50, "quick")
    used(engine, "slow", 100, ended=10)
    used(engine, "quick", 100, ended=100)
    window = nexts(engine, 11)
    assert len(set(window) & set(slow)) == 3
    assert [one for one in window if one in quick] == quick[:30]
    [one] = enqueue(1, "modest")
    assert nexts(engine)[0] == one


def test_what_runs_counts(engine: Engine, enqueue, claim) -> None:
    """A producer with a running evaluation is after the other one, although none of its evaluations has ended."""
    first = enqueue(3, "a")
    second = enqueue(3, "b")
    claim(first[0])
    assert nexts(engine)[:2] == [second[0], first[1]]


def test_what_ends_meanwhile_counts(engine: Engine, enqueue, claim) -> None:
    """An attempt that ends during the query of the shares is counted as running or as ended, but never missed."""
    claimed = claim(enqueue(1, "many", "interactive")[0])
    many = enqueue(3, "many", "interactive")
    one = enqueue(1, "one")

    reads: list[str] = []

    def end(_conn: object, _cursor: object, statement: str, *_: object) -> None:
        if "FROM shares" in statement:
            reads.append(statement)
            finish(engine, claimed, PASSED)

    event.listen(engine, "after_cursor_execute", end)
    assert nexts(engine) == [*one, *many]
    assert reads


def test_ended_attempts_are_charged_and_fade(engine: Engine, enqueue, claim) -> None:
    """Each attempt is counted once, with its seconds and their square, and earlier ones decay."""
    one, two = enqueue(2, "a")
    for identity in (one, two):
        claimed = claim(identity)
        change(engine, "UPDATE attempts SET started_at = now() - interval '1000 s' WHERE ended_at IS NULL")
        finish(engine, claimed, PASSED)
        finish(engine, claimed, PASSED)
        change(engine, "UPDATE shares SET at = at - interval '300 s'")
    evaluations.tally(engine)
    with engine.connect() as connection:
        [row] = connection.execute(text("SELECT * FROM shares"))
    assert (row.producer, row.resource, row.priority) == ("a", "cpu", "batch")
    assert (row.seconds, row.squares, row.ended) == pytest.approx((750, 750_000, 0.75), rel=0.05)
    change(engine, "UPDATE shares SET at = at - interval '10 years'")
    evaluations.tally(engine)
    assert count(engine, "shares") == 0
    first, second = enqueue(1, "a"), enqueue(1, "b")
    assert nexts(engine) == [*first, *second]


def test_a_weight_is_a_larger_share(engine: Engine, enqueue) -> None:
    """A token of weight 3 gets three times the seconds of other producers."""
    token = "00000000-0000-0000-0000-000000000001"
    change(engine, f"INSERT INTO tokens (id, name, digest, scopes, weight) VALUES ('{token}', 'x', 'x', '{{}}', 3)")
    heavy, light = enqueue(50, f"token:{token}"), enqueue(50, "other")
    window = nexts(engine, 8)
    assert (len(set(window) & set(heavy)), len(set(window) & set(light))) == (18, 6)


def test_interactive_comes_first_and_batch_moves(engine: Engine, enqueue) -> None:
    """Interactive evaluations precede batch ones of any producer, but batch keeps a tenth of the time."""
    batch = enqueue(50, "a")
    interactive = enqueue(50, "a", Priority.INTERACTIVE)
    used(engine, "a", 100, 100, "interactive")
    used(engine, "a", 20, 20)
    assert nexts(engine)[:5] == interactive[:5]
    change(engine, "UPDATE shares SET seconds = 5, ended = 5 WHERE priority = 'batch'")
    window = nexts(engine, 20)
    assert set(window[:6]) == set(batch[:6])
    assert len(set(window) & set(batch)) < len(set(window) & set(interactive))


def test_a_token_runs_no_more_than_its_upper_limit(engine: Engine, enqueue, claim, worker_id: UUID) -> None:
    """Its further evaluations are neither next nor claimed, and say why they wait, until an attempt ends."""
    token = tokens.create(engine, "t", [tokens.Scope.SUBMIT], limits={"running": 2})[0].id
    high, *low = enqueue(1, f"token:{token}", "interactive") + enqueue(3, f"token:{token}")
    other = enqueue(2, "b")
    assert set(nexts(engine)) == {high, low[0], *other}
    first = claim(high)
    claim(low[0])
    assert nexts(engine) == other
    assert evaluations.claim(engine, low[1], worker_id=worker_id, lease_s=30) is None
    assert reports.waiting(engine, low[1], within_s=90).why is reports.Why.LIMIT
    finish(engine, first, PASSED)
    assert set(nexts(engine)) == {low[1], *other}
    assert claim(low[1]) is not None


def test_a_lane_without_workers_takes_no_room_of_others(engine: Engine, enqueue) -> None:
    """A token's evaluations on a lane that nothing serves do not count before they run."""
    token = tokens.create(engine, "t", [tokens.Scope.SUBMIT], limits={"running": 1})[0].id
    [first, _], [wanted] = (enqueue(n, f"token:{token}", lane=lane) for n, lane in ((2, "cpu"), (1, "gpu")))
    assert (nexts(engine), nexts(engine, lane="gpu")) == ([first], [wanted])


def test_many_producers_share_a_window(engine: Engine, enqueue) -> None:
    """The window has the producers with the fewest used seconds."""
    firsts = {}
    for number in range(30):
        firsts[number] = enqueue(1, f"p{number:02}")[0]
        used(engine, f"p{number:02}", 30 - number, ended=1000)
    assert nexts(engine) == [firsts[number] for number in range(29, 29 - evaluations.window(0), -1)]


def test_retries_take_no_place_of_others(engine: Engine, enqueue, claim) -> None:
    """A free worker can have to refuse all retries, so a whole window of other evaluations follows them."""
    retried = enqueue(12)
    for identity in retried:
        finish(engine, claim(identity), LOST)
    change(engine, "UPDATE evaluations SET available_at = now()")
    fresh = enqueue(12)
    places = evaluations.window(0)
    assert nexts(engine) == [*retried[:places], *fresh[:places]]


def test_an_interactive_retry_does_not_precede_the_batch_work_of_others(engine: Engine, enqueue, claim) -> None:
    """It precedes batch work of its own producer, and of one that has used more."""
    retried = enqueue(2, "many", Priority.INTERACTIVE)
    for identity in retried:
        finish(engine, claim(identity), LOST)
    own, batch = enqueue(2, "many", Priority.INTERACTIVE), enqueue(1, "many")
    change(engine, "UPDATE evaluations SET available_at = now()")
    used(engine, "many", 100, 100, "interactive")
    used(engine, "many", 20, 20)
    assert nexts(engine) == [*retried, *own, *batch]
    others = enqueue(3, "one")
    assert nexts(engine) == [*others, *retried, *own, *batch]
    used(engine, "one", 200, 200)
    assert nexts(engine) == [*retried, *own, *batch, *others]


def test_many_producers_of_one_lane_take_no_place_of_anothers(engine: Engine, enqueue) -> None:
    """The window of a lane is full, whatever is queued on other lanes."""
    for number in range(60):
        enqueue(1, f"p{number:02}", lane="gpu")
    mine = enqueue(40)
    assert nexts(engine, 10) == mine[: evaluations.window(10)]


def test_one_producers_long_queue_is_not_read_for_the_next_ones(engine: Engine, fields) -> None:
    """Each head is found by one step in the queue's index, and the planner uses this index."""
    evaluations.submit(engine, [Request(**fields(0, producer="many"))])
    change(
        engine,
        "INSERT INTO evaluations (id, problem_hash, kernel_hash, lane, settings, producer, submitted_at) "
        "SELECT gen_random_uuid(), problem_hash, kernel_hash, lane, settings, producer, now() - nr * interval '1 s' "
        "FROM evaluations CROSS JOIN generate_series(1, 5000) AS nr",
    )
    change(engine, "ANALYZE evaluations")
    evaluations.submit(engine, [Request(**fields(1, producer="one"))])
    with engine.connect() as connection:
        plan = connection.scalars(text("EXPLAIN " + order._HEADS.text), {"most": 8}).all()
    assert {index for line in plan for index in re.findall(r"using (\w+)", line)} == {"ix_evaluations_queue"}
    assert not any("Seq Scan" in line for line in plan)
