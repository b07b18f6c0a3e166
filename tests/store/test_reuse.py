"""Reused verdicts: of equal evaluations, in an equal environment, and marked as reused."""

from __future__ import annotations

from collections.abc import Callable
from uuid import UUID, uuid4

import pytest
from sqlalchemy import Engine

from kqueue.categories import CATEGORIES, Blame, Category
from kqueue.contract import Outcome, Request
from kqueue.errors import IdempotencyConflict
from kqueue.evidence import Drift, Evidence, ForeignGpuProcess
from kqueue.figures import speedup
from kqueue.states import Writer
from kqueue.store import evaluations, gpus, retention, workers
from kqueue.store.evaluations import Submitted
from kqueue.store.evaluations.reuse import reusable
from kqueue.store.listener import Listener
from tests.samples import ended, measurement, passed, timed
from tests.store.steps import ENVIRONMENT, change, count, finish, together

#: Seconds for which a silent worker counts as serving. No test takes so long.
LIVE_S = 3600.0


class Fleet:
    """Submits evaluations, and judges them like a worker with a known environment."""

    def __init__(self, engine: Engine, fields: Callable[..., dict[str, object]]) -> None:
        self.engine = engine
        self._fields = fields

    def worker(self, lanes: tuple[str, ...] = ("cpu",), device: str = "cpu") -> UUID:
        identity = uuid4()
        name = f"{identity.hex[:4]}@here"
        workers.register(self.engine, id=identity, name=name, host="here", pid=1, lanes=lanes, device=device)
        return identity

    def submit(self, number: int = 0, **changes: object) -> Submitted:
        request = Request(**self._fields(number, **changes))
        [submitted] = evaluations.submit(self.engine, [request], slots={"cpu": 1}, reuse_s=LIVE_S)
        return submitted

    def judge(
        self, worker: UUID, identity: UUID, outcome: Outcome, *, conditions: str | None = "seal", **facts: object
    ) -> UUID:
        """Judge it by a worker, or by static checks only if `conditions` is None."""
        claimed = evaluations.claim(self.engine, identity, worker_id=worker, lease_s=LIVE_S)
        if conditions is not None:
            evaluations.set_environment(self.engine, claimed.attempt_id, ENVIRONMENT | facts, conditions=conditions)
        finish(self.engine, claimed, outcome)
        return identity

    def judged(self, worker: UUID, outcome: Outcome | None = None, number: int = 0, **changes: object) -> UUID:
        """Submit an evaluation without reuse, and judge it by a worker."""
        identity = self.submit(number, **{"reuse": False, **changes}).evaluation_id
        return self.judge(worker, identity, outcome or passed(log="hello"))

    def reuses(self, number: int = 0, **changes: object) -> bool:
        """Submit one evaluation, and return whether its verdict is reused."""
        return self.submit(number, **changes).reused

    def origin(self) -> UUID | None:
        """Submit one evaluation, and return the origin of its verdict."""
        return evaluations.verdict(self.engine, self.submit().evaluation_id).reused_from

    def age(self, identity: UUID) -> None:
        statement = "UPDATE verdicts SET finished_at = now() - interval '9 days' WHERE evaluation_id = :id"
        change(self.engine, statement, id=identity)


@pytest.fixture
def fleet(engine: Engine, fields: Callable[..., dict[str, object]]) -> Fleet:
    """A fleet without workers."""
    return Fleet(engine, fields)


class TestAnswer:
    """The verdict of an equal evaluation, at once and without an attempt."""

    def test_an_equal_evaluation_has_the_verdict_at_once(self, engine: Engine, fleet: Fleet) -> None:
        """It is done when accepted, has no attempt, and names its verdict's origin and the time of the judgement."""
        first = fleet.judged(fleet.worker())
        again = fleet.submit(batch="b", kernel_label="l")
        assert (again.created, again.reused, again.next) == (True, True, False)
        original, verdict = evaluations.verdict(engine, first), evaluations.verdict(engine, again.evaluation_id)
        assert (verdict.reused_from, verdict.judged_at) == (first, original.finished_at)
        assert (original.reused_from, original.judged_at) == (None, None)
        assert (verdict.attempts, verdict.written_by, verdict.kernel_label) == (0, Writer.DATABASE, "l")
        same = {"category", "runtime", "baseline", "facts", "evidence", "log", "environment", "message", "phase"}
        assert verdict.model_dump(include=same) == original.model_dump(include=same)
        assert verdict.environment is not None
        assert count(engine, "attempts") == count(engine, "verdicts", "reused_from IS NULL") == 1

    def test_which_are_equal(self, fleet: Fleet) -> None:
        """Kernel, problem and settings decide, but not labels, batch, priority, producer or queue limit."""
        worker = fleet.worker()
        first = fleet.judged(worker, batch="a", producer="x")
        assert fleet.reuses(batch="b", producer="y", priority="interactive", queue_wait_s=9, problem_label="p")
        assert [fleet.origin() for _ in range(2)] == [first] * 2
        others = [{"checks": 2}, *({"timing": {"purpose": purpose}} for purpose in ("check", "train", "publish"))]
        more = ({"number": 1}, {"problem": "class Model: other"}, {"reuse": False})
        for other in (*more, *({"settings": settings} for settings in others)):
            assert not fleet.reuses(**other), other
        second = fleet.judged(worker)
        assert fleet.origin() == second

    def test_a_worker_may_have_nothing_reused(self, engine: Engine, fleet: Fleet) -> None:
        """Without reported conditions every evaluation is judged, both at submission and at the claim."""
        worker = fleet.worker()
        claimed = evaluations.claim(engine, fleet.submit().evaluation_id, worker_id=worker, lease_s=LIVE_S)
        evaluations.set_environment(engine, claimed.attempt_id, ENVIRONMENT, conditions=None)
        finish(engine, claimed, passed())
        submitted = fleet.submit()
        assert not submitted.reused
        assert evaluations.claim(engine, submitted.evaluation_id, worker_id=worker, lease_s=LIVE_S) is not None

    def test_what_waits_is_answered_when_its_turn_comes(self, engine: Engine, fleet: Fleet, config) -> None:
        """Equal queued evaluations get the first one's verdict with a notification and without an attempt."""
        worker = fleet.worker()
        first, second = fleet.submit().evaluation_id, fleet.submit().evaluation_id
        late = fleet.submit(queue_wait_s=60).evaluation_id
        listener = Listener(config.require_database(), engine, application="tests")
        try:
            future = listener.watch(second)
            fleet.judge(worker, first, passed())
            change(engine, "UPDATE evaluations SET expires_at = now() - interval '1 s' WHERE id = :id", id=late)
            for identity in (second, late):
                assert evaluations.claim(engine, identity, worker_id=worker, lease_s=LIVE_S) is None
            verdict = future.result(timeout=60)
        finally:
            listener.close()
        assert (verdict.reused_from, verdict.attempts) == (first, 0)
        assert evaluations.verdict(engine, late).category is Category.EXPIRED

    def test_what_was_tried_is_tried_again(self, engine: Engine, fleet: Fleet) -> None:
        """A retry keeps its attempts and is judged, even if an equal one has a verdict."""
        worker = fleet.worker()
        mine = fleet.submit().evaluation_id
        fleet.judge(worker, mine, ended(Category.WORKER_LOST))
        fleet.judged(worker)
        assert evaluations.claim(engine, mine, worker_id=worker, lease_s=LIVE_S).number == 2

    def test_a_batch_is_answered_as_far_as_it_is_known(self, engine: Engine, fleet: Fleet, fields) -> None:
        """Known entries end and the rest is queued, in one transaction and in their order."""
        worker = fleet.worker()
        for number in (0, 2):
            fleet.judged(worker, number=number)
        requests = [Request(**fields(number)) for number in (0, 1, 2, 3, 1)]
        submitted = evaluations.submit(engine, requests, slots={"cpu": 1}, reuse_s=LIVE_S)
        assert [one.reused for one in submitted] == [True, False, True, False, False]
        assert [one.next for one in submitted] == [False, True, False, True, True]

    def test_together_each_has_one_verdict(self, engine: Engine, fleet: Fleet) -> None:
        """Concurrent submissions, claims and cancellations leave one verdict each."""
        worker = fleet.worker()
        first = fleet.submit().evaluation_id
        waiting = [fleet.submit().evaluation_id for _ in range(4)]
        fleet.judge(worker, first, passed())

        def act(number: int) -> None:
            match number % 3:
                case 0:
                    assert fleet.reuses()
                case 1:
                    evaluations.claim(engine, waiting[number // 3], worker_id=worker, lease_s=LIVE_S)
                case _:
                    evaluations.cancel(engine, waiting[number // 3])

        together(12, act)
        assert count(engine, "verdicts") == count(engine, "evaluations") == 9
        assert count(engine, "evaluations", "state <> 'done'") == count(engine, "attempts") - 1 == 0


class TestEnvironment:
    """Reuse only of verdicts from the lane's current environments."""

    def test_another_environment_is_judged_anew(self, fleet: Fleet) -> None:
        """A verdict from before an upgrade, from a removed host or by another judge is not reused."""
        worker = fleet.worker()
        fleet.judged(worker)
        others = [{"torch": "3.0"}, {"host": "there"}, {"driver": "999"}, {"conditions": "another judge"}]
        for number, facts in enumerate(others, start=1):
            workers.stop(fleet.engine, worker)
            worker = fleet.worker()
            fleet.judge(worker, fleet.submit(number).evaluation_id, passed(), **facts)
            waiting = fleet.submit()
            assert not waiting.reused, facts
            fleet.judge(worker, waiting.evaluation_id, passed(), **facts)
            assert fleet.origin() == waiting.evaluation_id

    def test_a_restarted_worker_is_the_same_again(self, fleet: Fleet) -> None:
        """After its first kernel a restarted worker has its environment, and the earlier verdicts are reused."""
        old = fleet.worker()
        first = fleet.judged(old)
        workers.stop(fleet.engine, old)
        new = fleet.worker()
        assert not fleet.reuses()
        fleet.judge(new, fleet.submit(1).evaluation_id, passed())
        assert fleet.origin() == first

    def test_a_worker_that_does_not_serve_counts_for_nothing(self, engine: Engine, fleet: Fleet) -> None:
        """The environment of a stopped, silent, paused or other lane's worker could be gone."""
        for number, gone in enumerate(
            ("stopped_at = now()", "heartbeat_at = now() - interval '3601 s'", "paused = 'x'", "lanes = '{gpu}'")
        ):
            worker = fleet.worker()
            fleet.judged(worker, number=number)
            assert fleet.reuses(number)
            change(engine, f"UPDATE workers SET {gone} WHERE id = :id", id=worker)
            assert not fleet.reuses(number), gone

    def test_any_environment_that_serves_will_do(self, fleet: Fleet) -> None:
        """Of two environments on one lane, either one's verdicts are reused."""
        one, other = fleet.worker(("cpu", "cpu.fast")), fleet.worker()
        first = fleet.judged(one)
        fleet.judge(other, fleet.submit(1).evaluation_id, passed(), host="there")
        assert fleet.origin() == first

    def test_what_a_bad_gpu_said_is_not_reused(self, engine: Engine, fleet: Fleet) -> None:
        """After a quarantine of its GPU an evaluation is judged again, also when that GPU serves again."""
        gpus.register(engine, host="here", index=0, uuid="GPU-1", name="H200")
        bad, good = fleet.worker(device="GPU-1"), fleet.worker(device="GPU-2")
        fleet.judged(bad)
        fleet.judge(good, fleet.submit(1).evaluation_id, passed())
        assert fleet.reuses()
        for state in ("'quarantined'", "'serving', since = now()"):
            change(engine, f"UPDATE gpus SET state = {state}")
            assert not fleet.reuses(), state
        fleet.judged(bad)
        assert fleet.reuses()

    def test_what_an_operator_has_forgotten_is_judged_anew(self, engine: Engine, fleet: Fleet) -> None:
        """The statement of docs/operations.md works, for changes without a fingerprint."""
        fleet.judged(fleet.worker())
        change(engine, "UPDATE verdicts SET content = NULL WHERE content IS NOT NULL")
        assert not fleet.reuses()

    def test_what_was_read_is_known_with_the_worker(self, fleet: Fleet) -> None:
        """A verdict of static checks is reused once its worker has a fingerprint."""
        worker = fleet.worker()
        fleet.judge(worker, fleet.submit().evaluation_id, ended(Category.SYNTAX_ERROR), conditions=None)
        assert not fleet.reuses()
        fleet.judge(worker, fleet.submit(1).evaluation_id, passed())
        verdict = evaluations.verdict(fleet.engine, fleet.submit().evaluation_id)
        assert (verdict.category, verdict.environment) == (Category.SYNTAX_ERROR, None)


class TestHonesty:
    """Results that can change are judged again."""

    def test_only_what_comes_out_the_same(self, fleet: Fleet) -> None:
        """The table of categories decides, and excludes failures of fleet and problem, and luck."""
        worker, settings = fleet.worker(), {"max_attempts": 1}
        for number, category in enumerate(Category):
            fleet.judge(worker, fleet.submit(number, settings=settings).evaluation_id, ended(category))
            assert fleet.reuses(number, settings=settings) is category.info.reusable, category
            assert not category.info.reusable or category.blame in {Blame.NONE, Blame.CANDIDATE}
        # Categories that time, memory, races or a process's death can cause.
        lucky = {"timeout", "compile_timeout", "gpu_out_of_memory", "host_out_of_memory", "crashed", "nondeterministic"}
        lucky |= {"illegal_memory_access", "cuda_error", "output_limit", "sandbox_violation", "reward_hack"}
        assert not any(CATEGORIES[Category(name)].reusable for name in lucky)

    def test_a_pass_that_is_disputed_is_worth_nothing(self, fleet: Fleet) -> None:
        """A kernel that passes once and fails once, in either order, is judged each time, so luck does not spread."""
        worker = fleet.worker()
        for number, failure in enumerate((Category.WRONG_VALUES, Category.CRASHED)):
            fleet.judged(worker, ended(failure), number)
            for _ in range(2):
                fleet.judged(worker, number=number)
                assert not fleet.reuses(number)
        fleet.judged(worker, number=2)
        assert fleet.reuses(2)
        fleet.judged(worker, ended(Category.WRONG_VALUES), 2)
        assert not fleet.reuses(2)

    def test_a_disturbed_time_is_not_reused(self) -> None:
        """Neither is a noisy one, which is shown with one digit, or a result of a suspected kernel."""
        assert all(reusable(passed(evidence=Evidence(foreign_processes=seen))) for seen in (None, (), "unknown"))
        stranger = ForeignGpuProcess(pid=1, name=None, memory_bytes=None, active=True)
        for disturbed in (
            {"alone": True},
            {"baseline_drift": Drift(was_ms=1, is_ms=2)},
            {"foreign_processes": (stranger,)},
        ):
            assert not reusable(passed(evidence=Evidence(**disturbed))), disturbed
        ends = {"low_ms": 0.3, "high_ms": 0.7}
        noisy = passed(runtime=measurement(0.5).model_copy(update=ends), baseline=timed(1.0).runtime)
        assert (reusable(timed(0.5)), reusable(noisy)) == (True, False)
        assert speedup(timed(0.5).speedup, timed(0.5).speedup_interval) == "2.00x (1.75x to 2.28x)"
        assert speedup(noisy.speedup, noisy.speedup_interval) == "about 2x, too noisy (1.42x to 2.82x)"

    def test_what_took_several_tries_is_not_reused(self, engine: Engine, fleet: Fleet) -> None:
        """It can pass by luck. An attempt that was handed back does not count."""
        for handed_back, again in ((True, True), (False, False)):
            worker, number = fleet.worker(), int(handed_back)
            identity = fleet.submit(number, reuse=False).evaluation_id
            claimed = evaluations.claim(engine, identity, worker_id=worker, lease_s=LIVE_S)
            lost = ended(Category.WORKER_LOST)
            how = {"written_by": Writer.WORKER, "retry_delay_s": 0, "handed_back": handed_back}
            evaluations.finish(engine, identity, claimed.number, lost, **how)
            workers.stop(engine, worker)
            fleet.judge(fleet.worker(), identity, passed())
            assert fleet.reuses(number) is again

    def test_a_suspicion_takes_a_pass_back(self, fleet: Fleet) -> None:
        """A kernel that killed its workers is judged each time, in spite of an earlier pass."""
        worker, settings = fleet.worker(), {"max_attempts": 1}
        fleet.judged(worker, settings=settings)
        assert fleet.reuses(settings=settings)
        lost = ended(Category.WORKER_LOST)
        suspected = lost.model_copy(update={"facts": lost.facts.model_copy(update={"suspected": True})})
        fleet.judged(worker, suspected, settings=settings)
        assert not fleet.reuses(settings=settings)

    def test_a_verdict_that_was_emptied_is_not_copied(self, engine: Engine, fleet: Fleet) -> None:
        """A copy would lack the log, and be marked as emptied before its end."""
        fleet.age(fleet.judged(fleet.worker()))
        assert retention.prune(engine, retention_days=None, log_retention_days=8).logs == 1
        assert not fleet.reuses()


class TestOthers:
    """Evaluations without attempts are read, kept and removed like ones with attempts."""

    def test_copies_stand_by_themselves(self, engine: Engine, fleet: Fleet) -> None:
        """They are complete without the original, and are emptied and removed by their own age."""
        first = fleet.judged(fleet.worker())
        again = fleet.submit().evaluation_id
        before = evaluations.verdict(engine, again)
        fleet.age(first)
        pruned = retention.prune(engine, retention_days=8, log_retention_days=None)
        assert (pruned.evaluations, pruned.kernels) == (1, 0)
        assert evaluations.verdict(engine, again) == before
        assert not fleet.reuses()  # a copy does not replace the original as a source of reuse
        fleet.age(again)
        assert retention.prune(engine, retention_days=None, log_retention_days=8).logs == 1
        assert evaluations.verdict(engine, again).log == ""
        assert retention.prune(engine, retention_days=8, log_retention_days=None).evaluations == 1

    def test_a_key_gives_the_same_evaluation(self, fleet: Fleet) -> None:
        """Reused or not, a key keeps its evaluation, but not with another value of `reuse`."""
        fleet.judged(fleet.worker())
        first, second = fleet.submit(idempotency_key="k"), fleet.submit(idempotency_key="k")
        assert (first.evaluation_id, second.created, first.reused) == (second.evaluation_id, False, True)
        with pytest.raises(IdempotencyConflict):
            fleet.submit(idempotency_key="k", reuse=False)
        third = fleet.submit(idempotency_key="l", reuse=False)
        assert fleet.submit(idempotency_key="l").evaluation_id == third.evaluation_id
