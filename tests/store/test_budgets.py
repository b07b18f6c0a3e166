"""Budgets of tokens: counted seconds, refusal or lower priority, and concurrent submitters."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from uuid import UUID, uuid4

import pytest
from sqlalchemy import Engine, text

from kqueue.contract import Request
from kqueue.errors import BudgetSpent
from kqueue.states import Priority, Spent
from kqueue.store import budgets, evaluations, reports, tokens
from kqueue.store.budgets import Budget
from kqueue.store.evaluations import Submitted
from tests.samples import passed, request_fields
from tests.store.steps import change, count


def token(engine: Engine, seconds: float = 100, *, then: Spent = Spent.REFUSE) -> UUID:
    """Create a token with a budget of so many seconds per hour."""
    return tokens.create(engine, "t", [tokens.Scope.PROBLEMS], budget=Budget(seconds, 3600, then))[0].id


def request_of(token_id: UUID | None, number: int = 0, **changes: object) -> Request:
    """Return a token's request as the HTTP server submits it."""
    request = Request.model_validate(request_fields(number, **changes))
    return request if token_id is None else request.model_copy(update={"producer": f"token:{token_id}"})


def submit(engine: Engine, token_id: UUID | None, number: int = 0, **changes: object) -> Submitted:
    return evaluations.submit(engine, [request_of(token_id, number, **changes)])[0]


def use(engine: Engine, worker_id: UUID, identity: UUID, seconds: float, *, ago: float = 0, ends: bool = True) -> None:
    """Run an attempt for so many seconds until so many seconds ago, or until now without an end."""
    claim = evaluations.claim(engine, identity, worker_id=worker_id, lease_s=3600)
    if ends:
        evaluations.finish(engine, identity, claim.number, passed(), written_by="judge", retry_delay_s=0)
    times = {"id": claim.attempt_id, "begun": seconds + ago, "ended": ago, "ends": ends}
    change(
        engine,
        "UPDATE attempts SET started_at = now() - make_interval(secs => :begun), ended_at = CASE WHEN :ends "
        "THEN now() - make_interval(secs => :ended) END WHERE id = :id",
        **times,
    )


def used(engine: Engine, token_id: UUID) -> float:
    return budgets.of(engine, [token_id])[token_id].used_s


def priority_of(engine: Engine, identity: UUID) -> str:
    with engine.connect() as connection:
        return connection.scalar(text("SELECT priority FROM evaluations WHERE id = :id"), {"id": identity})


def test_what_counts(engine: Engine, worker_id: UUID) -> None:
    """The token's attempts count as far as they lie in the window, including running ones."""
    mine, other = token(engine, 5000), token(engine)
    # Half of the first lies in the hour, less with time, all of the second, none of the third. The last is not mine.
    for number, (whose, seconds, ago) in enumerate(
        [(mine, 2000, 2600), (mine, 30, 60), (mine, 50, 3700), (other, 9, 0)]
    ):
        use(engine, worker_id, submit(engine, whose, number).evaluation_id, seconds, ago=ago)
    before = used(engine, mine)
    assert 800 <= before <= 1030
    use(engine, worker_id, submit(engine, mine, 9).evaluation_id, 25, ends=False)
    assert used(engine, mine) >= 25 + 30 + 700
    change(engine, "UPDATE attempts SET lease_until = started_at WHERE ended_at IS NULL")
    assert used(engine, mine) <= before, "a worker that fell silent uses nothing after its lease"
    found = budgets.of(engine, [mine, other, uuid4()])
    assert set(found) == {mine, other}
    assert 9 <= found[other].used_s < 10
    assert 90 < found[other].left_s <= 91


def test_a_spent_budget_refuses_what_is_new(engine: Engine, worker_id: UUID) -> None:
    """No part of the submission is written. Known keys, other producers and earlier evaluations are unaffected."""
    mine = token(engine)
    early = submit(engine, mine, 1, idempotency_key="early")
    use(engine, worker_id, submit(engine, mine, 2).evaluation_id, 99, ago=600)
    use(engine, worker_id, submit(engine, mine, 3).evaluation_id, 2, ago=300)
    with pytest.raises(BudgetSpent) as refused:
        evaluations.submit(engine, [request_of(mine, 4), request_of(None, 5)])
    error = refused.value
    assert (error.budget_s, error.window_s) == (100, 3600)
    # Seconds are free when the first attempt has left the window.
    assert 2800 <= error.retry_after_s <= 3000
    assert "100 s" in str(error)
    assert count(engine, "evaluations") == 3
    again = submit(engine, mine, 1, idempotency_key="early")
    assert (again.evaluation_id, again.created) == (early.evaluation_id, False)
    assert submit(engine, None, 6).created
    assert evaluations.claim(engine, early.evaluation_id, worker_id=worker_id, lease_s=30) is not None
    tokens.set_budget(engine, str(mine), Budget(200, 3600, Spent.REFUSE))
    assert submit(engine, mine, 7).created
    tokens.set_budget(engine, str(mine), None)
    assert budgets.of(engine, [mine]) == {}


def test_a_reused_verdict_costs_nothing(engine: Engine, worker_id: UUID) -> None:
    """A reused verdict is returned although the budget is spent."""
    mine = token(engine)
    identity = submit(engine, mine, 1).evaluation_id
    claim = evaluations.claim(engine, identity, worker_id=worker_id, lease_s=3600)
    facts = {"device": "cpu", "torch": "2", "python": "3", "host": "here"}
    evaluations.set_environment(engine, claim.attempt_id, facts, conditions="c")
    evaluations.finish(engine, identity, claim.number, passed(), written_by="judge", retry_delay_s=0)
    change(engine, "UPDATE attempts SET started_at = now() - interval '600 s'")
    [same] = evaluations.submit(engine, [request_of(mine, 1)], reuse_s=3600)
    assert same.reused
    with pytest.raises(BudgetSpent):
        evaluations.submit(engine, [request_of(mine, 2)], reuse_s=3600)


def test_a_spent_budget_lowers(engine: Engine, worker_id: UUID) -> None:
    """New evaluations are last in the order, and `waiting` reports their place."""
    mine = token(engine, then=Spent.LOWER)
    use(engine, worker_id, submit(engine, mine, 1).evaluation_id, 101)
    first = submit(engine, mine, 2, priority="interactive").evaluation_id
    assert priority_of(engine, first) == Priority.IDLE
    others = [submit(engine, None, number).evaluation_id for number in (3, 4)]
    assert [one.id for one in evaluations.upcoming(engine, {"cpu": 1})["cpu"]] == [*others, first]
    assert reports.waiting(engine, first, within_s=3600).ahead == 2
    assert reports.waiting(engine, others[1], within_s=3600).ahead == 1
    tokens.set_budget(engine, str(mine), Budget(1000, 3600, Spent.LOWER))
    assert priority_of(engine, submit(engine, mine, 5).evaluation_id) == Priority.BATCH


def test_submitters_at_once(engine: Engine, worker_id: UUID) -> None:
    """Submissions that begin before the budget is spent are accepted, and all later ones are refused."""
    mine = token(engine, 10)
    with ThreadPoolExecutor(16) as pool:
        before = list(pool.map(lambda number: submit(engine, mine, number), range(40)))
        assert all(one.created for one in before)
        use(engine, worker_id, before[0].evaluation_id, 11)

        def refused(number: int) -> bool:
            try:
                submit(engine, mine, number)
            except BudgetSpent:
                return True
            return False

        assert all(pool.map(refused, range(40, 80)))
    assert count(engine, "evaluations") == 40
