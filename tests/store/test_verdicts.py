"""The one function of the database that writes verdicts."""

from __future__ import annotations

from uuid import UUID

import pytest
from sqlalchemy import Engine, text
from sqlalchemy.exc import DBAPIError

from kqueue.categories import Category
from kqueue.contract import Outcome, Request
from kqueue.states import EvaluationState, Writer
from kqueue.store import evaluations


@pytest.fixture
def submitted(engine: Engine, fields) -> UUID:
    """A queued evaluation."""
    return evaluations.submit(engine, [Request(**fields())])[0].evaluation_id


def conclude(engine: Engine, record: str) -> None:
    """Write a verdict past everything else."""
    with engine.begin() as connection:
        connection.execute(text("SELECT kqueue_conclude(CAST(:record AS jsonb))"), {"record": record})


def test_a_cancelled_evaluation_has_the_verdict_of_its_category(engine: Engine, submitted: UUID) -> None:
    """The database writes for `cancelled` what any other writer would."""
    assert evaluations.cancel(engine, submitted)
    cancelled = Outcome(category=Category.CANCELLED, message="the producer cancelled the evaluation")
    verdict = evaluations.verdict(engine, submitted)
    assert verdict is not None
    for name in Outcome.model_fields:
        assert getattr(verdict, name) == getattr(cancelled, name), name
    assert verdict.written_by is Writer.CLIENT
    with engine.connect() as connection:
        row = connection.execute(text("SELECT * FROM verdicts")).mappings().one()
    assert (row["blame"], row["compiled"], row["correctness"]) == (cancelled.blame, None, None)
    # A value that is not there is null, and not JSON's null.
    assert (row["attempt_id"], row["runtime"], row["baseline"], row["runtime_ms"]) == (None, None, None, None)


def test_the_first_verdict_stands(engine: Engine, submitted: UUID) -> None:
    """A second one changes nothing, whoever writes it."""
    evaluations.cancel(engine, submitted)
    conclude(
        engine,
        f'{{"evaluation_id": "{submitted}", "category": "passed", "blame": "none", "message": "", "facts": {{}}, '
        '"evidence": {}, "log": "", "written_by": "judge"}',
    )
    verdict = evaluations.verdict(engine, submitted)
    assert verdict is not None
    assert (verdict.category, verdict.written_by) == (Category.CANCELLED, Writer.CLIENT)


@pytest.mark.parametrize("record", ["{}", "[]", "null", '{"evaluation_id": "00000000-0000-0000-0000-000000000007"}'])
def test_what_is_no_verdict_is_refused(engine: Engine, submitted: UUID, record: str) -> None:
    """Nothing is written, and no evaluation is done without a verdict."""
    with pytest.raises(DBAPIError):
        conclude(engine, record)
    assert evaluations.verdict(engine, submitted) is None
    with engine.connect() as connection:
        assert connection.execute(text("SELECT state FROM evaluations")).scalar_one() == EvaluationState.QUEUED
