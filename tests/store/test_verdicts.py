"""The end of attempts and evaluations: one verdict in every race."""

from __future__ import annotations

import json
from uuid import UUID, uuid4

import pytest
from sqlalchemy import Engine, text
from sqlalchemy.exc import DBAPIError

from kqueue.categories import Blame, Category
from kqueue.contract import Outcome, Request
from kqueue.errors import UnknownEvaluation
from kqueue.evidence import ErrorFigures, Evidence, Facts
from kqueue.states import Writer
from kqueue.store import evaluations
from kqueue.store.evaluations import Recorded
from tests.samples import ended, measurement
from tests.store.steps import ENVIRONMENT, LOST, PASSED, change, count, finish


class TestFinish:
    """The first verdict is final, and the fleet's failures are retried."""

    def test_a_verdict_in_full(self, engine: Engine, submit, claim) -> None:
        """A verdict has the judge's outcome with environment, labels and derived facts."""
        claimed = claim(submit(problem_label="p", kernel_label="k"))
        evaluations.set_environment(engine, claimed.attempt_id, ENVIRONMENT, conditions="")
        told = {"message": "fine", "phase": "time", "facts": Facts(median_ms=2.0), "log": "hello"}
        told |= {"runtime": measurement(2.0), "baseline": measurement(5.0)}
        told |= {"evidence": Evidence(checks=5, durations_s={"check": 0.1})}
        outcome = Outcome(category=Category.PASSED, **told)
        assert finish(engine, claimed, outcome) is Recorded.FINAL
        verdict = evaluations.verdict(engine, claimed.evaluation_id)
        assert Outcome(**{name: getattr(verdict, name) for name in Outcome.model_fields}) == outcome
        assert (verdict.speedup, verdict.attempts, verdict.written_by) == (2.5, 1, "judge")
        assert verdict.environment is not None
        assert verdict.environment.model_dump(exclude_unset=True).items() <= ENVIRONMENT.items()
        assert (verdict.problem_label, verdict.kernel_label) == ("p", "k")
        assert verdict.submitted_at <= verdict.finished_at
        assert count(engine, "verdicts", "speedup = 2.5 AND runtime_ms = 2 AND blame = 'none' AND correctness") == 1

    def test_a_verdict_of_another_version_is_read(self, engine: Engine, submit, claim) -> None:
        """Unknown values of a row are not read, and stay in the row."""
        claimed = claim(submit())
        finish(engine, claimed, ended(Category.CRASHED, evidence=Evidence(checks=5)))
        change(
            engine,
            """UPDATE verdicts SET facts = facts || '{"line": "x", "new": 1}',
            evidence = evidence || '{"isolation": "strong", "new": {"a": 1}}'""",
        )
        verdict = evaluations.verdict(engine, claimed.evaluation_id)
        assert (verdict.facts, verdict.evidence) == (ended(Category.CRASHED).facts, Evidence(checks=5))
        assert count(engine, "verdicts", "evidence ? 'new' AND facts ? 'new'") == 1

    def test_the_fleets_failure_is_tried_again(self, engine: Engine, submit, claim) -> None:
        """It is queued again with a growing delay, until the attempts are used up and it is the verdict."""
        identity = submit(settings={"max_attempts": 3})
        for number, recorded in ((1, Recorded.RETRY), (2, Recorded.RETRY), (3, Recorded.FINAL)):
            assert claim(identity).number == number
            assert evaluations.finish(engine, identity, number, LOST, written_by="judge", retry_delay_s=100) is recorded
            if recorded is Recorded.RETRY:
                with engine.connect() as connection:
                    delay = connection.scalars(
                        text("SELECT extract(epoch FROM available_at - now()) FROM evaluations")
                    ).one()
                assert 90 * 2 ** (number - 1) < delay <= 100 * 2 ** (number - 1)
                change(engine, "UPDATE evaluations SET available_at = now()")
        verdict = evaluations.verdict(engine, identity)
        assert (verdict.category, verdict.attempts) == (Category.JUDGE_ERROR, 3)

    def test_an_attempt_that_was_handed_back_is_no_try(self, engine: Engine, submit, claim, worker_id: UUID) -> None:
        """A stopped worker uses up no attempt, however often, and the evaluation is due at once."""
        identity = submit(settings={"max_attempts": 1})
        for number in (1, 2, 3):
            assert claim(identity).number == number
            ended = evaluations.lose_worker(engine, worker_id, retry_delay_s=100, message="stopped", handed_back=True)
            assert ended == [(identity, Recorded.RETRY)]
        assert finish(engine, claim(identity), LOST) is Recorded.FINAL
        assert count(engine, "attempts", "handed_back") == 3
        # The delay grows with the failed attempts, not with the ones handed back.
        identity = submit(settings={"max_attempts": 3})
        claim(identity)
        evaluations.lose_worker(engine, worker_id, retry_delay_s=100, message="stopped", handed_back=True)
        claim(identity)
        evaluations.finish(engine, identity, 2, LOST, written_by="judge", retry_delay_s=100)
        assert count(engine, "evaluations", "available_at <= now() + interval '100 s' AND available_at > now()") == 1

    def test_a_candidates_failure_is_final(self, engine: Engine, submit, claim) -> None:
        for category in Category:
            if category.blame in {Blame.CANDIDATE, Blame.PROBLEM}:
                assert finish(engine, claim(submit()), ended(category)) is Recorded.FINAL

    def test_an_earlier_attempt_is_late(self, engine: Engine, submit, claim) -> None:
        """An outcome of an attempt that was given up does not affect the next one."""
        first = claim(submit())
        finish(engine, first, LOST)
        second = claim(first.evaluation_id)
        assert finish(engine, first, PASSED) is Recorded.LATE
        assert evaluations.verdict(engine, first.evaluation_id) is None
        assert finish(engine, second, PASSED) is Recorded.FINAL

    def test_the_loser_is_logged(
        self, engine: Engine, submit, claim, worker_id: UUID, caplog: pytest.LogCaptureFixture
    ) -> None:
        """The log has the late writer, its outcome and the final verdict, unless both agree."""
        claimed = claim(submit())
        finish(engine, claimed, ended(Category.CRASHED))
        finish(engine, claimed, ended(Category.CRASHED), by="worker")
        assert caplog.messages == []
        finish(engine, claimed, Outcome(category=Category.WORKER_LOST, message="killed\nby SIGKILL"), by="worker")
        [line] = caplog.messages
        assert line == (
            f"too late for a verdict: evaluation {claimed.evaluation_id}, attempt 1, worker_lost by worker "
            "('killed\\nby SIGKILL'). crashed by judge was recorded before"
        )
        cancelled = claim(submit())
        evaluations.cancel(engine, cancelled.evaluation_id)
        finish(engine, cancelled, PASSED)
        assert "passed by judge ('fine'). cancelled by client was recorded before" in caplog.messages[1]

    def test_what_postgres_refuses_does_not_lose_a_verdict(self, engine: Engine, submit, claim) -> None:
        """NUL, half surrogates, NaN and infinities are replaced, and the verdict is readable."""
        wrong = ended(Category.WRONG_VALUES)
        errors = dict.fromkeys(ErrorFigures.model_fields, True) | {"jumps": 0, "error_ratio": float("nan")}
        far = {"errors": errors | {"max_abs_error": float("-inf")}, "wrong": 2**64 - 1}
        for outcome in (
            ended(Category.RUNTIME_ERROR, message="a\0b", log="\0", facts={"exception": "\0\ud800"}),
            Outcome(category=Category.PASSED, runtime=measurement(float("nan")), baseline=measurement(float("inf"))),
            wrong.model_copy(update={"facts": wrong.facts.model_copy(update=far)}),
        ):
            claimed = claim(submit(reuse=False))
            assert finish(engine, claimed, outcome) is Recorded.FINAL
            verdict = evaluations.verdict(engine, claimed.evaluation_id)
            json.dumps(verdict.facts.model_dump(mode="json"), allow_nan=False)
            assert "\0" not in verdict.message + verdict.log


class TestCancel:
    def test_the_running_attempt_is_closed_by_its_worker(self, engine: Engine, submit, claim) -> None:
        """The worker's outcome is late, and its attempt is closed."""
        claimed = claim(submit())
        evaluations.cancel(engine, claimed.evaluation_id)
        assert count(engine, "attempts", "ended_at IS NULL") == 1
        assert finish(engine, claimed, LOST) is Recorded.LATE
        assert count(engine, "attempts", "ended_at IS NULL") == 0

    def test_unknown(self, engine: Engine) -> None:
        """An unknown evaluation can be neither cancelled nor read."""
        with pytest.raises(UnknownEvaluation):
            evaluations.cancel(engine, uuid4())
        with pytest.raises(UnknownEvaluation):
            evaluations.verdict(engine, uuid4())


class TestLeases:
    def test_a_silent_workers_attempt_is_lost(self, engine: Engine, submit, claim) -> None:
        """After its lease an attempt ends as worker_lost, and the evaluation is queued again."""
        claimed, alive = claim(submit()), claim(submit())
        change(engine, "UPDATE attempts SET lease_until = now() - interval '1 s' WHERE id = :id", id=claimed.attempt_id)
        assert evaluations.expire_leases(engine, retry_delay_s=0) == [(claimed.evaluation_id, Recorded.RETRY)]
        assert claim(claimed.evaluation_id).number == 2
        assert finish(engine, alive, PASSED) is Recorded.FINAL

    def test_a_frozen_writer_holds_nobody_up(self, engine: Engine, submit, claim) -> None:
        """An evaluation whose row a stopped process has locked is skipped, and the rest ends."""
        frozen, other = claim(submit()), claim(submit())
        change(engine, "UPDATE attempts SET lease_until = now() - interval '1 s'")
        with engine.connect() as holder:
            holder.execute(text("SELECT 1 FROM evaluations WHERE id = :id FOR UPDATE"), {"id": frozen.evaluation_id})
            assert evaluations.expire_leases(engine, retry_delay_s=0) == [(other.evaluation_id, Recorded.RETRY)]

    def test_a_cancelled_attempt_of_a_dead_worker_is_closed(self, engine: Engine, submit, claim) -> None:
        claimed = claim(submit())
        evaluations.cancel(engine, claimed.evaluation_id)
        change(engine, "UPDATE attempts SET lease_until = now() - interval '1 s'")
        assert evaluations.expire_leases(engine, retry_delay_s=0) == [(claimed.evaluation_id, Recorded.LATE)]
        assert count(engine, "attempts", "ended_at IS NULL") == 0

    def test_a_lost_worker_loses_its_attempt_at_once(self, engine: Engine, submit, claim, worker_id: UUID) -> None:
        """A process that saw it die need not wait for the lease."""
        claimed = claim(submit(settings={"max_attempts": 1}))
        lost = evaluations.lose_worker(engine, worker_id, retry_delay_s=0, message="exit code 1")
        assert lost == [(claimed.evaluation_id, Recorded.FINAL)]
        verdict = evaluations.verdict(engine, claimed.evaluation_id)
        assert (verdict.category, verdict.message, verdict.written_by) == (
            Category.WORKER_LOST,
            "exit code 1",
            "worker",
        )

    def test_queued_too_long(self, engine: Engine, submit, claim) -> None:
        """An evaluation expires only after its time, and only if it was never started."""
        patient, impatient, retried = submit(), submit(queue_wait_s=60), submit(queue_wait_s=60)
        finish(engine, claim(retried), LOST)
        change(engine, "UPDATE evaluations SET expires_at = now() - interval '1 s' WHERE expires_at IS NOT NULL")
        assert evaluations.expire_queued(engine) == 1
        assert set(evaluations.verdicts(engine, [patient, impatient, retried])) == {impatient}


# The database function that writes verdicts.


@pytest.fixture
def submitted(engine: Engine, fields) -> UUID:
    return evaluations.submit(engine, [Request(**fields())])[0].evaluation_id


def conclude(engine: Engine, record: str) -> None:
    """Write a verdict through the database function only."""
    change(engine, "SELECT kqueue_conclude(CAST(:record AS jsonb))", record=record)


def test_a_cancelled_evaluation_has_the_verdict_of_its_category(engine: Engine, submitted: UUID) -> None:
    """The database's verdict `cancelled` equals any other writer's."""
    assert evaluations.cancel(engine, submitted)
    cancelled = Outcome(category=Category.CANCELLED, message="the producer cancelled the evaluation")
    verdict = evaluations.verdict(engine, submitted)
    for name in Outcome.model_fields:
        assert getattr(verdict, name) == getattr(cancelled, name), name
    assert verdict.written_by is Writer.CLIENT
    with engine.connect() as connection:
        row = connection.execute(text("SELECT * FROM verdicts")).mappings().one()
    assert (row["blame"], row["compiled"], row["correctness"]) == (cancelled.blame, None, None)
    # A missing value is SQL's null, not JSON's.
    assert (row["attempt_id"], row["runtime"], row["baseline"], row["runtime_ms"]) == (None, None, None, None)


def test_the_first_verdict_stands(engine: Engine, submitted: UUID) -> None:
    evaluations.cancel(engine, submitted)
    conclude(
        engine,
        f'{{"evaluation_id": "{submitted}", "category": "passed", "blame": "none", "message": "", "facts": {{}}, '
        '"evidence": {}, "log": "", "written_by": "judge"}',
    )
    verdict = evaluations.verdict(engine, submitted)
    assert (verdict.category, verdict.written_by) == (Category.CANCELLED, Writer.CLIENT)


def test_what_is_no_verdict_is_refused(engine: Engine, submitted: UUID) -> None:
    """No row is written, and no evaluation is done without a verdict."""
    for record in ("{}", "[]", "null", '{"evaluation_id": "00000000-0000-0000-0000-000000000007"}'):
        with pytest.raises(DBAPIError):
            conclude(engine, record)
        assert evaluations.verdict(engine, submitted) is None
        assert count(engine, "evaluations", "state = 'queued'") == 1
