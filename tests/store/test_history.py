"""The suspicion against kernels whose attempts ended with a lost worker or GPU."""

from __future__ import annotations

from uuid import UUID

from sqlalchemy import Engine

from kqueue.categories import Category
from kqueue.contract import Outcome
from kqueue.evidence import Facts
from kqueue.store import evaluations
from kqueue.store.evaluations import Recorded
from tests.store.steps import LOST, PASSED, finish


class TestSuspicion:
    """A kernel that kills workers has a third, exclusive attempt, and no fourth."""

    UNHEALTHY = Outcome(category=Category.GPU_UNHEALTHY, message="the self-test failed")

    def test_the_third_try_is_alone_and_the_last(self, engine: Engine, submit, claim) -> None:
        """The third attempt is the last one in spite of a higher limit, and the verdict lists all attempts."""
        for outcome, by in (
            (Outcome(category=Category.WORKER_LOST, message="the judge was killed by SIGKILL"), "worker"),
            (Outcome(category=Category.WORKER_LOST, message="the worker fell silent"), "sweeper"),
            (self.UNHEALTHY, "judge"),
            (Outcome(category=Category.JUDGE_ERROR, message="the judge was killed by SIGSEGV"), "worker"),
        ):
            identity = submit(settings={"max_attempts": 10})
            for number in (1, 2):
                claimed = claim(identity)
                assert (claimed.number, claimed.alone) == (number, False)
                assert finish(engine, claimed, outcome, by=by) is Recorded.RETRY
            claimed = claim(identity)
            assert claimed.alone
            assert finish(engine, claimed, outcome, by=by) is Recorded.FINAL
            verdict = evaluations.verdict(engine, identity)
            assert (verdict.category, verdict.attempts, verdict.facts.suspected) == (outcome.category, 3, True)
            assert verdict.message.startswith(outcome.message)
            assert "3 tries lost their worker or GPU, the last one with exclusive use of its device" in verdict.message
            tried = [(a.number, a.worker, a.device, a.category, a.message) for a in verdict.evidence.attempts]
            assert tried == [(n, "cpu-0@here", "cpu", outcome.category, outcome.message) for n in (1, 2)]
            assert all(told.seconds >= 0 for told in verdict.evidence.attempts)

    def test_whoever_survives_alone_gets_its_own_verdict(self, engine: Engine, submit, claim) -> None:
        """A kernel that survives its exclusive attempt has that verdict, with its earlier attempts in the evidence."""
        identity = submit()
        for _ in range(2):
            finish(engine, claim(identity), self.UNHEALTHY)
        claimed = claim(identity)
        assert claimed.alone
        assert finish(engine, claimed, PASSED) is Recorded.FINAL
        verdict = evaluations.verdict(engine, identity)
        assert verdict.passed
        assert [told.category for told in verdict.evidence.attempts or ()] == [Category.GPU_UNHEALTHY] * 2
        assert verdict.facts.suspected is None

    def test_the_judges_own_failures_are_no_suspicion(self, engine: Engine, submit, claim) -> None:
        """A failure that the judge itself reported is no sign of a crash, and the message counts the attempts."""
        identity = submit(settings={"max_attempts": 3})
        for _ in range(3):
            claimed = claim(identity)
            assert not claimed.alone
            finish(engine, claimed, LOST)
        verdict = evaluations.verdict(engine, identity)
        assert (verdict.message, verdict.facts) == ("the judge failed (the last of 3 tries)", Facts())

    def test_what_was_handed_back_is_no_suspicion(self, engine: Engine, submit, claim, worker_id: UUID) -> None:
        """Attempts that were handed back never count, and an exclusive one is exclusive again afterwards."""
        identity = submit()
        for _ in range(3):
            assert not claim(identity).alone
            evaluations.lose_worker(engine, worker_id, retry_delay_s=0, message="stopped", handed_back=True)
        for _ in range(2):
            assert finish(engine, claim(identity), self.UNHEALTHY) is Recorded.RETRY
        assert claim(identity).alone
        evaluations.lose_worker(engine, worker_id, retry_delay_s=0, message="stopped", handed_back=True)
        claimed = claim(identity)
        assert (claimed.number, claimed.alone) == (7, True)
        assert finish(engine, claimed, self.UNHEALTHY) is Recorded.FINAL
        handed_back = [told.handed_back for told in evaluations.verdict(engine, identity).evidence.attempts or ()]
        assert handed_back == [True] * 3 + [False] * 2 + [True]

    def test_fewer_tries_end_sooner(self, engine: Engine, submit, claim) -> None:
        """A lower limit of the producer is kept, and two deaths suffice for a suspicion."""
        identity = submit(settings={"max_attempts": 2})
        assert finish(engine, claim(identity), self.UNHEALTHY) is Recorded.RETRY
        assert finish(engine, claim(identity), self.UNHEALTHY) is Recorded.FINAL
        verdict = evaluations.verdict(engine, identity)
        assert verdict.message.endswith("2 tries lost their worker or GPU: the kernel is suspected")
