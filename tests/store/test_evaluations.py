"""An evaluation's life in the database: submitted once, claimed by one, ended once, whoever races."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from uuid import UUID, uuid4

import psycopg
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sqlalchemy import Engine, text

from kqueue.categories import Blame, Category
from kqueue.contract import Outcome, Request
from kqueue.errors import DatabaseUnavailable, IdempotencyConflict, SchemaMismatch, UnknownEvaluation, UnknownProblem
from kqueue.evidence import Evidence, Facts, Measurement
from kqueue.store import baselines, clean, evaluations, workers
from kqueue.store.engine import connect
from kqueue.store.evaluations import Claim, Recorded
from tests.conftest import ended

PASSED = Outcome(category=Category.PASSED, message="fine")
LOST = Outcome(category=Category.JUDGE_ERROR, message="the judge failed")
ENVIRONMENT = {"device": "cpu", "torch": "2.13", "python": "3.11", "host": "here", "cores": 2}


def measured(median_ms: float) -> Measurement:
    """A time taken with this median."""
    return Measurement(
        basis="cpu_clock",
        count=5,
        median_ms=median_ms,
        q1_ms=1,
        q3_ms=1,
        mean_ms=1,
        std_ms=0,
        min_ms=1,
        max_ms=1,
        null_ms=0.1,
        cold_l2=False,
    )


def as_floats(value: Any) -> Any:
    """JSON with every number a float: Postgres keeps a number's value, not whether it was an integer."""
    match value:
        case dict():
            return {key: as_floats(item) for key, item in value.items()}
        case list():
            return [as_floats(item) for item in value]
        case bool() | None | str():
            return value
        case _:
            return float(value)


def together(count: int, act: Callable[[int], Any]) -> list[Any]:
    """Call ``act(0..count-1)`` in as many threads, let go at the same moment."""
    barrier = threading.Barrier(count)

    def run(number: int) -> Any:
        barrier.wait()
        return act(number)

    with ThreadPoolExecutor(count) as pool:
        return list(pool.map(run, range(count)))


def count(engine: Engine, table: str, where: str = "true") -> int:
    """Rows of a table."""
    with engine.connect() as connection:
        return connection.scalars(text(f"SELECT count(*) FROM {table} WHERE {where}")).one()


def change(engine: Engine, statement: str, **values: object) -> None:
    """Change the database behind kqueue's back, above all its moments in time."""
    with engine.begin() as connection:
        connection.execute(text(statement), values)


@pytest.fixture
def submit(engine: Engine, fields) -> Callable[..., UUID]:
    """Submits one evaluation and returns its id."""

    def one(**changes: object) -> UUID:
        return evaluations.submit(engine, [Request(**fields(**changes))])[0].evaluation_id

    return one


@pytest.fixture
def claim(engine: Engine, worker_id: UUID) -> Callable[[UUID], Claim]:
    """Claims an evaluation that can be claimed."""

    def one(identity: UUID) -> Claim:
        claimed = evaluations.claim(engine, identity, worker_id=worker_id, lease_s=30)
        assert claimed is not None
        return claimed

    return one


def finish(engine: Engine, claimed: Claim, outcome: Outcome, by: str = "judge") -> Recorded:
    """End a claimed attempt, a retry being due at once."""
    return evaluations.finish(engine, claimed.evaluation_id, claimed.number, outcome, written_by=by, retry_delay_s=0)


class TestSubmit:
    """Submission: one transaction, sources by content, keys once."""

    def test_sources_are_stored_once(self, engine: Engine, fields) -> None:
        """Equal problems and kernels share a row; the order of the answers is the requests'."""
        requests = [Request(**fields(n % 2, problem_label=f"p{n}")) for n in range(6)]
        submitted = evaluations.submit(engine, requests)
        assert (count(engine, "problems"), count(engine, "kernels"), count(engine, "evaluations")) == (1, 2, 6)
        assert [s.message.label.split()[0] for s in submitted] == [f"problem=p{n}" for n in range(6)]
        assert all(s.created and s.message.lane == "cpu" for s in submitted)

    def test_the_label_is_one_line_without_the_source(self, engine: Engine, fields) -> None:
        """What Flower shows names problem, kernel, backend and lane, and never a source."""
        request = Request(**fields(kernel_label="my\nkernel"))
        label = evaluations.submit(engine, [request])[0].message.label
        assert label == f"problem={request.problem_hash[:12]} kernel=my kernel backend=torch lane=cpu"

    def test_nothing_is_submitted_for_nothing(self, engine: Engine) -> None:
        """An empty list is no error."""
        assert evaluations.submit(engine, []) == []

    def test_a_known_key_gives_the_same_evaluation(self, engine: Engine, fields) -> None:
        """Before and within one batch, only the first submission under a key creates."""
        request = Request(**fields(idempotency_key="k"))
        first = evaluations.submit(engine, [request, request])
        again = evaluations.submit(engine, [request])
        assert [s.created for s in first + again] == [True, False, False]
        assert len({s.evaluation_id for s in first + again}) == 1

    def test_a_key_for_another_kernel_is_refused_whole(self, engine: Engine, fields) -> None:
        """The verdict of another kernel is never passed off as this one's; nothing of the batch is written."""
        evaluations.submit(engine, [Request(**fields(1, idempotency_key="k"))])
        with pytest.raises(IdempotencyConflict, match="'k'") as caught:
            evaluations.submit(engine, [Request(**fields(2)), Request(**fields(3, idempotency_key="k"))])
        assert caught.value.keys == {"k"}
        assert (count(engine, "evaluations"), count(engine, "kernels")) == (1, 1)

    def test_a_stored_problem_is_named_by_its_hash(self, engine: Engine, fields) -> None:
        """The name stands for the source wherever that was given before; the judge is given the source."""
        source = Request(**fields(1))
        evaluations.submit(engine, [source])
        named = Request(**fields(2, problem=f"sha256:{source.problem_hash}"))
        assert (named.names_problem, named.problem_hash) == (True, source.problem_hash)
        [submitted] = evaluations.submit(engine, [named])
        worker = uuid4()
        workers.register(engine, id=worker, name="w", host="h", pid=1, lanes=["cpu"], device="cpu")
        claimed = evaluations.claim(engine, submitted.evaluation_id, worker_id=worker, lease_s=30)
        assert claimed is not None
        assert claimed.request.problem == source.problem
        assert count(engine, "problems") == 1

    def test_a_problem_that_nobody_stored_is_unknown(self, engine: Engine, fields) -> None:
        """Nothing of the batch is written; a source in the same batch counts as stored."""
        unknown = fields(1, problem=f"sha256:{'a' * 64}")
        with pytest.raises(UnknownProblem, match="unknown problem sha256:aaa") as caught:
            evaluations.submit(engine, [Request(**fields(2)), Request(**unknown)])
        assert caught.value.hashes == {"a" * 64}
        assert (count(engine, "evaluations"), count(engine, "problems"), count(engine, "kernels")) == (0, 0, 0)
        source = Request(**fields(3))
        named = Request(**fields(4, problem=f"sha256:{source.problem_hash}"))
        assert len(evaluations.submit(engine, [named, source])) == 2
        assert count(engine, "problems") == 1

    def test_one_key_from_many_at_once(self, engine: Engine, fields) -> None:
        """Eight processes submit the same keys in different orders: each key is created once, nobody fails."""
        requests = [Request(**fields(n, idempotency_key=f"k{n}")) for n in range(10)]
        answers = together(8, lambda n: evaluations.submit(engine, requests[:: 1 if n % 2 else -1]))
        assert sum(s.created for answer in answers for s in answer) == 10
        assert len({s.evaluation_id for answer in answers for s in answer}) == 10


class TestClaim:
    """Claiming: compare-and-set."""

    def test_the_claim_carries_the_request(self, engine: Engine, fields, worker_id: UUID) -> None:
        """Sources, settings and labels come back as they were submitted."""
        request = Request(**fields(settings={"precision": "bf16", "checks": 2}, problem_label="p", batch="b"))
        identity = evaluations.submit(engine, [request])[0].evaluation_id
        claimed = evaluations.claim(engine, identity, worker_id=worker_id, lease_s=30)
        assert claimed is not None
        assert (claimed.request, claimed.number, claimed.lane) == (request, 1, "cpu")

    def test_one_of_many_wins(self, engine: Engine, submit, worker_id: UUID) -> None:
        """Eight threads claim the same evaluation: one gets it, one attempt exists."""
        identity = submit()
        won = together(8, lambda _: evaluations.claim(engine, identity, worker_id=worker_id, lease_s=30))
        assert len([w for w in won if w is not None]) == 1
        assert count(engine, "attempts") == 1

    def test_what_cannot_be_claimed(self, engine: Engine, submit, claim, worker_id: UUID) -> None:
        """Unknown, running, done and not yet due evaluations are nobody's."""
        running, done, later = submit(), submit(), submit()
        claim(running)
        finish(engine, claim(done), PASSED)
        change(engine, "UPDATE evaluations SET available_at = now() + interval '1 min' WHERE id = :id", id=later)
        for identity in (uuid4(), running, done, later):
            assert evaluations.claim(engine, identity, worker_id=worker_id, lease_s=30) is None
        assert count(engine, "attempts") == 2

    def test_a_paused_worker_gets_nothing(self, engine: Engine, submit, claim, worker_id: UUID) -> None:
        """The evaluation stays queued, and its message, which is used up, is sent again at once."""
        identity = submit()
        evaluations.mark_published(engine, [identity])
        change(engine, "UPDATE workers SET paused = 'the GPU is drained'")
        assert evaluations.claim(engine, identity, worker_id=worker_id, lease_s=30) is None
        assert count(engine, "attempts") == 0
        assert count(engine, "evaluations", "published_at IS NULL AND state = 'queued'") == 1
        change(engine, "UPDATE workers SET paused = NULL")
        assert claim(identity).number == 1

    def test_an_expired_one_gets_its_verdict(self, engine: Engine, submit, worker_id: UUID) -> None:
        """A claim past the producer's patience ends the evaluation instead of running it."""
        identity = submit(queue_wait_s=60)
        change(engine, "UPDATE evaluations SET expires_at = now() - interval '1 s'")
        assert evaluations.claim(engine, identity, worker_id=worker_id, lease_s=30) is None
        verdict = evaluations.verdict(engine, identity)
        assert verdict is not None
        assert (verdict.category, verdict.attempts, verdict.environment) == (Category.EXPIRED, 0, None)

    def test_an_unreadable_request_can_be_claimed(self, engine: Engine, submit, claim) -> None:
        """Whoever claims settings of another version learns of it when it looks, and has an attempt to end."""
        identity = submit()
        change(engine, """UPDATE evaluations SET settings = settings || '{"speculative_checks": 3}'""")
        claimed = claim(identity)
        with pytest.raises(SchemaMismatch, match=r"settings\.speculative_checks"):
            _ = claimed.request
        assert finish(engine, claimed, LOST) is Recorded.RETRY


class TestElsewhere:
    """A retry is done far from where the last try failed, where there is such a place."""

    @pytest.fixture
    def slots(self, engine: Engine) -> dict[str, UUID]:
        """Two slots of one GPU and one of another."""
        known = {"gpu0-0": "GPU-0", "gpu0-1": "GPU-0", "gpu1-0": "GPU-1"}
        ids = {name: uuid4() for name in known}
        for name, device in known.items():
            workers.register(
                engine, id=ids[name], name=f"{name}@here", host="here", pid=1, lanes=["gpu"], device=device
            )
        return ids

    @pytest.fixture
    def retried(self, engine: Engine, submit, slots: dict[str, UUID]) -> UUID:
        """An evaluation that failed on the first slot and is due again."""
        identity = submit(lane="gpu")
        claimed = evaluations.claim(engine, identity, worker_id=slots["gpu0-0"], lease_s=30)
        assert claimed is not None
        assert finish(engine, claimed, LOST) is Recorded.RETRY
        evaluations.mark_published(engine, [identity])
        return identity

    def test_another_device_before_another_slot(self, engine: Engine, slots: dict[str, UUID], retried: UUID) -> None:
        """Those nearer are refused, and the message that they used up is sent again."""
        for name in ("gpu0-0", "gpu0-1"):
            assert evaluations.claim(engine, retried, worker_id=slots[name], lease_s=30) is None
            assert [s.evaluation_id for s in evaluations.due_for_publishing(engine, limit=9)] == [retried]
        assert evaluations.claim(engine, retried, worker_id=slots["gpu1-0"], lease_s=30) is not None

    @pytest.mark.parametrize(
        "gone",
        [
            "stopped_at = now()",
            "heartbeat_at = now() - interval '31 s'",
            "paused = 'GPU 1 is drained'",
            "lanes = '{gpu.b200}'",
        ],
    )
    def test_the_next_best_where_nobody_is_farther(
        self, engine: Engine, slots: dict[str, UUID], retried: UUID, gone: str
    ) -> None:
        """Only workers that live, take work and serve the lane are waited for: then another slot of the device."""
        change(engine, f"UPDATE workers SET {gone} WHERE name = 'gpu1-0@here'")
        assert evaluations.claim(engine, retried, worker_id=slots["gpu0-0"], lease_s=30) is None
        assert evaluations.claim(engine, retried, worker_id=slots["gpu0-1"], lease_s=30) is not None

    def test_the_slots_next_worker_is_the_same_slot(
        self, engine: Engine, slots: dict[str, UUID], retried: UUID
    ) -> None:
        """The worker that took the place of one that died is no other slot."""
        successor = uuid4()
        workers.stop(engine, slots["gpu0-0"])
        workers.register(engine, id=successor, name="gpu0-0@here", host="here", pid=2, lanes=["gpu"], device="GPU-0")
        assert evaluations.claim(engine, retried, worker_id=successor, lease_s=30) is None

    def test_nobody_is_waited_for_long(self, engine: Engine, slots: dict[str, UUID], retried: UUID) -> None:
        """After some seconds anybody may, and where there is nobody else at once."""
        change(engine, "UPDATE evaluations SET available_at = now() - interval '11 s'")
        assert evaluations.claim(engine, retried, worker_id=slots["gpu0-0"], lease_s=30) is not None

    def test_who_is_alone_need_not_wait(self, engine: Engine, slots: dict[str, UUID], retried: UUID) -> None:
        """A fleet of one slot retries on it."""
        change(engine, "DELETE FROM workers WHERE name <> 'gpu0-0@here'")
        assert evaluations.claim(engine, retried, worker_id=slots["gpu0-0"], lease_s=30) is not None

    def test_what_was_handed_back_may_go_anywhere(self, engine: Engine, submit, slots: dict[str, UUID]) -> None:
        """A worker that was told to stop did nothing wrong."""
        identity = submit(lane="gpu")
        assert evaluations.claim(engine, identity, worker_id=slots["gpu0-0"], lease_s=30) is not None
        evaluations.lose_worker(engine, slots["gpu0-0"], retry_delay_s=9, message="stopped", handed_back=True)
        assert evaluations.claim(engine, identity, worker_id=slots["gpu0-0"], lease_s=30) is not None


class TestSuspicion:
    """A kernel that takes workers with it is tried a third time, alone, and then never again."""

    UNHEALTHY = Outcome(category=Category.GPU_UNHEALTHY, message="the canary failed")

    def fail(self, engine: Engine, claim, identity: UUID, outcome: Outcome, by: str) -> Recorded:
        """One more try, which ends so."""
        return finish(engine, claim(identity), outcome, by=by)

    @pytest.mark.parametrize(
        ("outcome", "by"),
        [
            (Outcome(category=Category.WORKER_LOST, message="the judge was killed by SIGKILL"), "worker"),
            (Outcome(category=Category.WORKER_LOST, message="the worker fell silent"), "sweeper"),
            (UNHEALTHY, "judge"),
            (Outcome(category=Category.JUDGE_ERROR, message="the judge was killed by SIGSEGV"), "worker"),
        ],
    )
    def test_the_third_try_is_alone_and_the_last(
        self, engine: Engine, submit, claim, outcome: Outcome, by: str
    ) -> None:
        """Whatever the producer allowed; the verdict says why, with all that was tried."""
        identity = submit(settings={"max_attempts": 10})
        for number in (1, 2):
            claimed = claim(identity)
            assert (claimed.number, claimed.alone) == (number, False)
            assert finish(engine, claimed, outcome, by=by) is Recorded.RETRY
        claimed = claim(identity)
        assert claimed.alone
        assert finish(engine, claimed, outcome, by=by) is Recorded.FINAL
        verdict = evaluations.verdict(engine, identity)
        assert verdict is not None
        assert (verdict.category, verdict.attempts, verdict.facts.suspected) == (outcome.category, 3, True)
        assert verdict.message.startswith(outcome.message)
        assert "3 tries took their worker or GPU with them, the last of them alone on its device" in verdict.message
        assert [
            (told.number, told.worker, told.device, told.category, told.message)
            for told in verdict.evidence.attempts or ()
        ] == [(number, "cpu-0@here", "cpu", outcome.category, outcome.message) for number in (1, 2)]
        assert all(told.seconds >= 0 for told in verdict.evidence.attempts or ())

    def test_whoever_survives_alone_gets_its_own_verdict(self, engine: Engine, submit, claim) -> None:
        """A kernel that was in bad company is judged like any other, and its history is told."""
        identity = submit()
        for _ in range(2):
            self.fail(engine, claim, identity, self.UNHEALTHY, "judge")
        claimed = claim(identity)
        assert claimed.alone
        assert finish(engine, claimed, PASSED) is Recorded.FINAL
        verdict = evaluations.verdict(engine, identity)
        assert verdict is not None
        assert verdict.passed
        assert [told.category for told in verdict.evidence.attempts or ()] == [Category.GPU_UNHEALTHY] * 2
        assert verdict.facts.suspected is None

    def test_the_judges_own_failures_are_no_suspicion(self, engine: Engine, submit, claim) -> None:
        """A judge that told of its failure lived; the message counts the tries."""
        identity = submit(settings={"max_attempts": 3})
        for _ in range(3):
            claimed = claim(identity)
            assert not claimed.alone
            finish(engine, claimed, LOST)
        verdict = evaluations.verdict(engine, identity)
        assert verdict is not None
        assert (verdict.message, verdict.facts) == ("the judge failed (the last of 3 tries)", Facts())

    def test_what_was_handed_back_is_no_suspicion(self, engine: Engine, submit, claim, worker_id: UUID) -> None:
        """However often; and who is alone stays alone after it."""
        identity = submit()
        for _ in range(3):
            assert not claim(identity).alone
            evaluations.lose_worker(engine, worker_id, retry_delay_s=0, message="stopped", handed_back=True)
        for _ in range(2):
            assert self.fail(engine, claim, identity, self.UNHEALTHY, "judge") is Recorded.RETRY
        assert claim(identity).alone
        evaluations.lose_worker(engine, worker_id, retry_delay_s=0, message="stopped", handed_back=True)
        claimed = claim(identity)
        assert (claimed.number, claimed.alone) == (7, True)
        assert finish(engine, claimed, self.UNHEALTHY) is Recorded.FINAL
        verdict = evaluations.verdict(engine, identity)
        assert verdict is not None
        handed_back = [told.handed_back for told in verdict.evidence.attempts or ()]
        assert handed_back == [True] * 3 + [False] * 2 + [True]

    def test_fewer_tries_end_sooner(self, engine: Engine, submit, claim) -> None:
        """The producer's limit holds; two deaths are enough to suspect the kernel."""
        identity = submit(settings={"max_attempts": 2})
        assert self.fail(engine, claim, identity, self.UNHEALTHY, "judge") is Recorded.RETRY
        assert self.fail(engine, claim, identity, self.UNHEALTHY, "judge") is Recorded.FINAL
        verdict = evaluations.verdict(engine, identity)
        assert verdict is not None
        assert verdict.message.endswith("2 tries took their worker or GPU with them: the kernel is suspected")


class TestFinish:
    """Ending: the first writer wins, the fleet's failures are tried again."""

    def test_a_verdict_in_full(self, engine: Engine, submit, claim) -> None:
        """What the judge handed in comes back, with environment, labels and derived facts."""
        claimed = claim(submit(problem_label="p", kernel_label="k"))
        evaluations.set_environment(engine, claimed.attempt_id, ENVIRONMENT)
        outcome = Outcome(
            category=Category.PASSED,
            message="fine",
            phase="time",
            facts=Facts(median_ms=2.0),
            runtime=measured(2.0),
            baseline=measured(5.0),
            log="hello",
            evidence=Evidence(checks=5, durations_s={"check": 0.1}),
        )
        assert finish(engine, claimed, outcome) is Recorded.FINAL
        verdict = evaluations.verdict(engine, claimed.evaluation_id)
        assert verdict is not None
        assert Outcome(**{name: getattr(verdict, name) for name in Outcome.model_fields}) == outcome
        assert (verdict.speedup, verdict.attempts, verdict.written_by) == (2.5, 1, "judge")
        assert verdict.environment is not None
        assert verdict.environment.model_dump(exclude_unset=True).items() <= ENVIRONMENT.items()
        assert (verdict.problem_label, verdict.kernel_label) == ("p", "k")
        assert verdict.submitted_at <= verdict.finished_at
        assert count(engine, "verdicts", "speedup = 2.5 AND runtime_ms = 2 AND blame = 'none' AND correctness") == 1

    def test_a_verdict_of_another_version_is_read(self, engine: Engine, submit, claim) -> None:
        """What a row holds that this version does not know is left out, and the row keeps it."""
        claimed = claim(submit())
        finish(engine, claimed, ended(Category.CRASHED, evidence=Evidence(checks=5)))
        change(
            engine,
            """UPDATE verdicts SET facts = facts || '{"line": "x", "new": 1}',
            evidence = evidence || '{"isolation": "strong", "new": {"a": 1}}'""",
        )
        verdict = evaluations.verdict(engine, claimed.evaluation_id)
        assert verdict is not None
        assert (verdict.facts, verdict.evidence) == (ended(Category.CRASHED).facts, Evidence(checks=5))
        assert count(engine, "verdicts", "evidence ? 'new' AND facts ? 'new'") == 1

    def test_one_of_many_writers_wins(self, engine: Engine, submit, claim) -> None:
        """Judge, worker and sweeper end the attempt at once: one verdict, the others are late."""
        claimed = claim(submit())
        crashed = ended(Category.CRASHED)
        answers = together(6, lambda n: finish(engine, claimed, crashed, by=f"writer-{n}"))
        assert sorted(a.value for a in answers) == ["final"] + ["late"] * 5
        assert count(engine, "verdicts") == 1

    def test_cancelling_races_with_finishing(self, engine: Engine, submit, claim) -> None:
        """Either the producer's cancellation or the judge's verdict stands, and both sides know which."""
        for _ in range(5):
            claimed = claim(submit())
            cancelled, recorded = together(
                2,
                lambda n, c=claimed: finish(engine, c, PASSED) if n else evaluations.cancel(engine, c.evaluation_id),
            )
            verdict = evaluations.verdict(engine, claimed.evaluation_id)
            assert verdict is not None
            assert verdict.category is (Category.CANCELLED if cancelled else Category.PASSED)
            assert recorded is (Recorded.LATE if cancelled else Recorded.FINAL)
        assert count(engine, "attempts", "ended_at IS NULL") == 0

    def test_the_fleets_failure_is_tried_again(self, engine: Engine, submit, claim) -> None:
        """Queued again, with a growing delay, until the attempts are used up; then it is the verdict."""
        identity = submit(settings={"max_attempts": 3})
        for number, recorded in ((1, Recorded.RETRY), (2, Recorded.RETRY), (3, Recorded.FINAL)):
            claimed = claim(identity)
            assert claimed.number == number
            assert evaluations.finish(engine, identity, number, LOST, written_by="judge", retry_delay_s=100) is recorded
            if recorded is Recorded.RETRY:
                with engine.connect() as connection:
                    delay = connection.scalars(
                        text("SELECT extract(epoch FROM available_at - now()) FROM evaluations")
                    ).one()
                assert 90 * 2 ** (number - 1) < delay <= 100 * 2 ** (number - 1)
                change(engine, "UPDATE evaluations SET available_at = now()")
        verdict = evaluations.verdict(engine, identity)
        assert verdict is not None
        assert (verdict.category, verdict.attempts) == (Category.JUDGE_ERROR, 3)

    def test_an_attempt_that_was_handed_back_is_no_try(self, engine: Engine, submit, claim, worker_id: UUID) -> None:
        """A worker that was told to stop uses up nothing, however often, and the evaluation is due at once."""
        identity = submit(settings={"max_attempts": 1})
        for number in (1, 2, 3):
            assert claim(identity).number == number
            ended = evaluations.lose_worker(engine, worker_id, retry_delay_s=100, message="stopped", handed_back=True)
            assert ended == [(identity, Recorded.RETRY)]
        claimed = claim(identity)
        assert finish(engine, claimed, LOST) is Recorded.FINAL
        assert count(engine, "attempts", "handed_back") == 3
        # The delay grows with the tries, not with the attempts.
        identity = submit(settings={"max_attempts": 3})
        claim(identity)
        evaluations.lose_worker(engine, worker_id, retry_delay_s=100, message="stopped", handed_back=True)
        claim(identity)
        evaluations.finish(engine, identity, 2, LOST, written_by="judge", retry_delay_s=100)
        assert count(engine, "evaluations", "available_at <= now() + interval '100 s' AND available_at > now()") == 1

    def test_a_candidates_failure_is_final(self, engine: Engine, submit, claim) -> None:
        """Only the fleet's failures are retried."""
        for category in Category:
            if category.blame in {Blame.CANDIDATE, Blame.PROBLEM}:
                assert finish(engine, claim(submit()), ended(category)) is Recorded.FINAL

    def test_an_earlier_attempt_is_late(self, engine: Engine, submit, claim) -> None:
        """A judge that comes back after its attempt was given up changes nothing of the next one."""
        first = claim(submit())
        finish(engine, first, LOST)
        second = claim(first.evaluation_id)
        assert finish(engine, first, PASSED) is Recorded.LATE
        assert evaluations.verdict(engine, first.evaluation_id) is None
        assert finish(engine, second, PASSED) is Recorded.FINAL

    def test_the_loser_is_logged(
        self, engine: Engine, submit, claim, worker_id: UUID, caplog: pytest.LogCaptureFixture
    ) -> None:
        """Who came too late, what it would have said, and whose word stands; those who agree are not news."""
        claimed = claim(submit())
        finish(engine, claimed, ended(Category.CRASHED))
        finish(engine, claimed, ended(Category.CRASHED), by="worker")
        assert caplog.messages == []
        finish(engine, claimed, Outcome(category=Category.WORKER_LOST, message="killed\nby SIGKILL"), by="worker")
        [line] = caplog.messages
        assert line == (
            f"too late for a verdict: evaluation {claimed.evaluation_id}, attempt 1, worker_lost by worker "
            "('killed\\nby SIGKILL'); crashed by judge stands"
        )
        cancelled = claim(submit())
        evaluations.cancel(engine, cancelled.evaluation_id)
        finish(engine, cancelled, PASSED)
        assert "passed by judge ('fine'); cancelled by client stands" in caplog.messages[1]

    def test_nothing_is_known_of_a_stranger(self, engine: Engine) -> None:
        """An outcome for an evaluation that does not exist is late."""
        answer = evaluations.finish(engine, uuid4(), 1, PASSED, written_by="judge", retry_delay_s=0)
        assert answer is Recorded.LATE

    @pytest.mark.parametrize(
        "outcome",
        [
            ended(Category.RUNTIME_ERROR, message="a\0b", log="\0", facts={"exception": "\0\ud800"}),
            Outcome(category=Category.PASSED, runtime=measured(float("nan")), baseline=measured(float("inf"))),
            ended(Category.WRONG_VALUES).model_copy(
                update={
                    "facts": ended(Category.WRONG_VALUES).facts.model_copy(
                        update={"max_abs_error": float("-inf"), "max_rel_error": float("nan"), "wrong": 2**64 - 1}
                    )
                }
            ),
        ],
    )
    def test_what_postgres_refuses_does_not_lose_a_verdict(self, engine: Engine, submit, claim, outcome) -> None:
        """NUL, half surrogates, NaN and infinities are replaced, and the verdict is readable."""
        claimed = claim(submit())
        assert finish(engine, claimed, outcome) is Recorded.FINAL
        verdict = evaluations.verdict(engine, claimed.evaluation_id)
        assert verdict is not None
        json.dumps(verdict.facts.model_dump(mode="json"), allow_nan=False)
        assert "\0" not in verdict.message + verdict.log


class TestClean:
    """One helper makes anything fit for Postgres."""

    @settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=60, deadline=None)
    @given(
        st.recursive(
            st.none() | st.booleans() | st.integers() | st.floats() | st.text(st.characters()) | st.binary(),
            lambda inner: st.lists(inner) | st.dictionaries(st.text(st.characters()), inner),
            max_leaves=8,
        )
    )
    def test_anything_can_be_stored(self, engine: Engine, value: object) -> None:
        """Whatever it is, Postgres takes it as JSON and gives the same back."""
        fit = clean.json(value)
        with engine.connect() as connection:
            stored = connection.scalar(
                text("SELECT CAST(:value AS jsonb)"), {"value": json.dumps(fit, allow_nan=False)}
            )
        assert as_floats(stored) == as_floats(fit)

    def test_what_is_fit_is_left_alone(self) -> None:
        """Ordinary JSON and text come out as they went in."""
        value = {"a": [1, 2.5, None, True, "ü€😀\n\t"], "b": {"c": -(2**63)}}
        assert clean.json(value) == value
        assert clean.text("ü€😀\n\x1b[0m") == "ü€😀\n\x1b[0m"


class TestCancel:
    """The producer's own end."""

    def test_cancelled_once(self, engine: Engine, submit) -> None:
        """The first cancellation ends it, the second says that it was over."""
        identity = submit()
        assert evaluations.cancel(engine, identity) is True
        assert evaluations.cancel(engine, identity) is False
        verdict = evaluations.verdict(engine, identity)
        assert verdict is not None
        assert (verdict.category, verdict.written_by) == (Category.CANCELLED, "client")

    def test_the_running_attempt_is_closed_by_its_worker(self, engine: Engine, submit, claim) -> None:
        """The worker's outcome is late, and its attempt does not stay open."""
        claimed = claim(submit())
        evaluations.cancel(engine, claimed.evaluation_id)
        assert count(engine, "attempts", "ended_at IS NULL") == 1
        assert finish(engine, claimed, LOST) is Recorded.LATE
        assert count(engine, "attempts", "ended_at IS NULL") == 0

    def test_unknown(self, engine: Engine) -> None:
        """There is nothing to cancel, and no verdict to read."""
        with pytest.raises(UnknownEvaluation):
            evaluations.cancel(engine, uuid4())
        with pytest.raises(UnknownEvaluation):
            evaluations.verdict(engine, uuid4())


class TestLeases:
    """Workers that fall silent."""

    def test_a_silent_workers_attempt_is_lost(self, engine: Engine, submit, claim) -> None:
        """Past its lease an attempt ends as worker_lost and the evaluation is queued again."""
        claimed, alive = claim(submit()), claim(submit())
        change(engine, "UPDATE attempts SET lease_until = now() - interval '1 s' WHERE id = :id", id=claimed.attempt_id)
        assert evaluations.expire_leases(engine, retry_delay_s=0) == [(claimed.evaluation_id, Recorded.RETRY)]
        assert claim(claimed.evaluation_id).number == 2
        assert finish(engine, alive, PASSED) is Recorded.FINAL

    def test_two_sweepers_end_an_attempt_once(self, engine: Engine, submit, claim) -> None:
        """Racing sweepers and the judge itself spend one attempt, not several."""
        for _ in range(10):
            claim(submit())
        change(engine, "UPDATE attempts SET lease_until = now() - interval '1 s'")
        answers = together(4, lambda _: evaluations.expire_leases(engine, retry_delay_s=0))
        retried = [identity for answer in answers for identity, recorded in answer if recorded is Recorded.RETRY]
        assert len(retried) == len(set(retried)) == 10

    def test_a_frozen_writer_holds_nobody_up(self, engine: Engine, submit, claim) -> None:
        """An evaluation whose row a stopped process holds is passed over, the others are ended."""
        frozen, other = claim(submit()), claim(submit())
        change(engine, "UPDATE attempts SET lease_until = now() - interval '1 s'")
        with engine.connect() as holder:
            holder.execute(text("SELECT 1 FROM evaluations WHERE id = :id FOR UPDATE"), {"id": frozen.evaluation_id})
            assert evaluations.expire_leases(engine, retry_delay_s=0) == [(other.evaluation_id, Recorded.RETRY)]

    def test_a_cancelled_attempt_of_a_dead_worker_is_closed(self, engine: Engine, submit, claim) -> None:
        """No attempt stays open for ever."""
        claimed = claim(submit())
        evaluations.cancel(engine, claimed.evaluation_id)
        change(engine, "UPDATE attempts SET lease_until = now() - interval '1 s'")
        assert evaluations.expire_leases(engine, retry_delay_s=0) == [(claimed.evaluation_id, Recorded.LATE)]
        assert count(engine, "attempts", "ended_at IS NULL") == 0

    def test_a_lost_worker_loses_its_attempt_at_once(self, engine: Engine, submit, claim, worker_id: UUID) -> None:
        """Whoever saw it die need not wait for the lease."""
        claimed = claim(submit(settings={"max_attempts": 1}))
        lost = evaluations.lose_worker(engine, worker_id, retry_delay_s=0, message="exit code 1")
        assert lost == [(claimed.evaluation_id, Recorded.FINAL)]
        verdict = evaluations.verdict(engine, claimed.evaluation_id)
        assert verdict is not None
        assert (verdict.category, verdict.message, verdict.written_by) == (
            Category.WORKER_LOST,
            "exit code 1",
            "worker",
        )

    def test_queued_too_long(self, engine: Engine, submit, claim) -> None:
        """Only what was never started expires, and only past its time."""
        patient, impatient, retried = submit(), submit(queue_wait_s=60), submit(queue_wait_s=60)
        finish(engine, claim(retried), LOST)
        change(engine, "UPDATE evaluations SET expires_at = now() - interval '1 s' WHERE expires_at IS NOT NULL")
        assert evaluations.expire_queued(engine) == 1
        assert set(evaluations.verdicts(engine, [patient, impatient, retried])) == {impatient}


class TestWorkers:
    """Who lives."""

    def test_live_workers_and_lanes(self, engine: Engine, submit, claim, worker_id: UUID) -> None:
        """A worker counts for all its lanes while it beats; it says what it is busy with."""
        gpu = uuid4()
        workers.register(
            engine, id=gpu, name="gpu0-0@here", host="here", pid=2, lanes=["gpu", "gpu.h200"], device="GPU-1"
        )
        claimed = claim(submit())
        assert workers.live_lanes(engine, within_s=30) == {"cpu": 1, "gpu": 1, "gpu.h200": 1}
        busy = {w.name: w.busy_with for w in workers.live(engine, within_s=30)}
        assert busy == {"cpu-0@here": claimed.evaluation_id, "gpu0-0@here": None}
        workers.stop(engine, gpu)
        assert workers.live_lanes(engine, within_s=30) == {"cpu": 1}

    def test_silence_and_return(self, engine: Engine, worker_id: UUID) -> None:
        """A silent worker is not alive and then given up; its next heartbeat brings it back."""
        change(engine, "UPDATE workers SET heartbeat_at = now() - interval '100 s'")
        assert workers.live(engine, within_s=30) == []
        assert workers.stop_silent(engine, older_than_s=90) == 1
        assert workers.stop_silent(engine, older_than_s=90) == 0
        workers.heartbeat(engine, [worker_id], lease_s=30)
        assert [w.id for w in workers.live(engine, within_s=30)] == [worker_id]

    def test_a_heartbeat_renews_the_lease(self, engine: Engine, submit, claim, worker_id: UUID) -> None:
        """What its worker executes is not lost while the worker beats."""
        claim(submit())
        change(engine, "UPDATE attempts SET lease_until = now() - interval '1 s'")
        workers.heartbeat(engine, [worker_id], lease_s=30)
        assert evaluations.expire_leases(engine, retry_delay_s=0) == []

    def test_a_heartbeat_does_not_keep_the_dead_alive(self, engine: Engine, submit, claim, worker_id: UUID) -> None:
        """An attempt that its worker has left behind, or past the hard limit, is not renewed."""
        left, overdue = claim(submit()), claim(submit())
        change(engine, "UPDATE attempts SET lease_until = now() - interval '1 s', started_at = now() - interval '9 h'")
        workers.heartbeat(engine, [worker_id], lease_s=30)
        ended = {identity for identity, _ in evaluations.expire_leases(engine, retry_delay_s=0)}
        assert ended == {left.evaluation_id, overdue.evaluation_id}

    def test_a_frozen_judge_does_not_silence_its_neighbours(
        self, engine: Engine, submit, claim, worker_id: UUID
    ) -> None:
        """A process that stopped while it held its attempt's row keeps no other lease from being renewed."""
        frozen = claim(submit())
        neighbour = uuid4()
        workers.register(engine, id=neighbour, name="cpu-1@here", host="here", pid=2, lanes=["cpu"], device="cpu")
        other = submit()
        assert evaluations.claim(engine, other, worker_id=neighbour, lease_s=30) is not None
        change(engine, "UPDATE attempts SET lease_until = now() - interval '1 s'")
        with engine.connect() as holder:
            holder.execute(text("SELECT 1 FROM attempts WHERE id = :id FOR UPDATE"), {"id": frozen.attempt_id})
            workers.heartbeat(engine, [worker_id, neighbour], lease_s=30)
        lost = evaluations.expire_leases(engine, retry_delay_s=0)
        assert [identity for identity, _ in lost] == [frozen.evaluation_id]

    def test_what_has_ended_is_not_renewed(self, engine: Engine, submit, claim, worker_id: UUID) -> None:
        """Ended attempts of a worker are neither renewed nor changed."""
        claimed = claim(submit())
        finish(engine, claimed, PASSED)
        before = count(engine, "attempts", "lease_until > now() + interval '1 h'")
        workers.heartbeat(engine, [worker_id], lease_s=7200)
        assert count(engine, "attempts", "lease_until > now() + interval '1 h'") == before == 0


class TestPublishing:
    """Which messages may be missing."""

    def test_due(self, engine: Engine, submit, claim) -> None:
        """Queued and due ones that were never published, or are lost; nothing that runs, waits or is done."""
        never, lost, sent, running, later = (submit() for _ in range(5))
        claim(running)
        evaluations.mark_published(engine, [lost, sent])
        evaluations.mark_published(engine, [lost, running], lost=True)
        change(engine, "UPDATE evaluations SET available_at = now() + interval '1 min' WHERE id = :id", id=later)
        change(engine, "UPDATE evaluations SET submitted_at = now() - interval '11 s'")
        due = evaluations.due_for_publishing(engine, limit=10)
        assert {s.evaluation_id for s in due} == {never, lost}
        assert evaluations.published(engine) == {"cpu": {sent}}
        assert len(evaluations.due_for_publishing(engine, limit=1)) == 1

    def test_noting_waits_for_nobody(self, engine: Engine, submit) -> None:
        """What another process holds at this moment is left out, the rest is noted."""
        held, free = submit(), submit()
        with engine.connect() as holder:
            holder.execute(text("SELECT 1 FROM evaluations WHERE id = :id FOR UPDATE"), {"id": held})
            evaluations.mark_published(engine, [held, free])
        due = evaluations.due_for_publishing(engine, patience_s=0, limit=10)
        assert count(engine, "evaluations", "published_at IS NOT NULL") == 1
        assert held in {s.evaluation_id for s in due}

    def test_what_is_being_submitted_is_left_to_its_producer(self, engine: Engine, submit, claim) -> None:
        """A moment old and unpublished: its producer is at it. A retry has no producer and is due at once."""
        submit()
        retried = submit()
        finish(engine, claim(retried), LOST)
        due = evaluations.due_for_publishing(engine, limit=10)
        assert [s.evaluation_id for s in due] == [retried]


def test_equal_environments_are_one_row(engine: Engine, submit, claim) -> None:
    """The hash is of the facts, whatever their order."""
    first, second = claim(submit()), claim(submit())
    hashes = {
        evaluations.set_environment(engine, first.attempt_id, ENVIRONMENT),
        evaluations.set_environment(engine, second.attempt_id, dict(reversed(ENVIRONMENT.items()))),
    }
    assert len(hashes) == count(engine, "environments") == 1


def test_the_first_baseline_stays(engine: Engine, submit, claim) -> None:
    """All speedups in an environment share one base."""
    claimed = claim(submit())
    key = (claimed.request.problem_hash, evaluations.set_environment(engine, claimed.attempt_id, ENVIRONMENT), "fp32")
    assert baselines.get(engine, *key) is None
    baselines.put(engine, *key, measured(1.0))
    baselines.put(engine, *key, measured(2.0))
    assert baselines.get(engine, *key) == measured(1.0)


def calls(identity: UUID) -> Sequence[Callable[[Engine], object]]:
    """Every function of the store, called somehow."""
    request = Request(problem="p", kernel="k", backend="torch", lane="cpu")
    return [
        lambda e: evaluations.submit(e, [request]),
        lambda e: evaluations.claim(e, identity, worker_id=identity, lease_s=1),
        lambda e: evaluations.finish(e, identity, 1, PASSED, written_by="judge", retry_delay_s=0),
        lambda e: evaluations.cancel(e, identity),
        lambda e: evaluations.verdict(e, identity),
        lambda e: evaluations.verdicts(e, [identity]),
        lambda e: evaluations.set_environment(e, 1, ENVIRONMENT),
        lambda e: evaluations.due_for_publishing(e, limit=1),
        lambda e: evaluations.mark_published(e, [identity]),
        lambda e: evaluations.expire_queued(e),
        lambda e: evaluations.expire_leases(e, retry_delay_s=0),
        lambda e: evaluations.lose_worker(e, identity, retry_delay_s=0, message=""),
        lambda e: workers.register(e, id=identity, name="", host="", pid=1, lanes=[], device="cpu"),
        lambda e: workers.heartbeat(e, [identity], lease_s=1),
        lambda e: workers.stop(e, identity),
        lambda e: workers.live(e, within_s=1),
        lambda e: baselines.get(e, "", "", ""),
        lambda e: baselines.put(e, "", "", "", measured(1.0)),
    ]


class TestUnavailable:
    """Postgres may go away at any time: one typed error, never the driver's."""

    def test_nobody_listens(self, tmp_path) -> None:
        """Every function says that the database cannot be used, and where it is configured."""
        engine = connect(f"postgresql+psycopg://postgres@/kqueue?host={tmp_path}", application="tests")
        for call in calls(uuid4()):
            with pytest.raises(DatabaseUnavailable, match="KQUEUE_DATABASE_URL"):
                call(engine)

    def test_no_schema(self, server) -> None:
        """A database without the tables asks for the migration."""
        url = server.empty_database(f"empty_{uuid4().hex}")
        engine = connect(url, application="tests")
        for call in calls(uuid4()):
            with pytest.raises(SchemaMismatch, match="kqueue db upgrade"):
                call(engine)
        engine.dispose()
        server.drop(url)

    def test_a_cut_in_the_middle_of_a_transaction(self, server, database_url: str, engine: Engine, submit) -> None:
        """The connection breaks under a claim: a typed error, nothing half done, and the next call works."""
        identity = submit()
        worker = uuid4()
        workers.register(engine, id=worker, name="w", host="h", pid=1, lanes=["cpu"], device="cpu")
        with psycopg.connect(database_url.replace("+psycopg", "")) as holder:
            holder.execute("SELECT 1 FROM evaluations WHERE id = %s FOR UPDATE", [identity])
            with ThreadPoolExecutor(1) as pool:
                claiming = pool.submit(evaluations.claim, engine, identity, worker_id=worker, lease_s=30)
                while holder.execute("SELECT count(*) FROM pg_locks WHERE NOT granted").fetchone() == (0,):
                    pass
                server.cut(database_url)
                with pytest.raises(DatabaseUnavailable):
                    claiming.result(timeout=10)
            holder.close()
        claimed = evaluations.claim(engine, identity, worker_id=worker, lease_s=30)
        assert claimed is not None
        assert claimed.number == 1

    def test_idle_connections_are_replaced(self, server, database_url: str, engine: Engine, submit) -> None:
        """A restart of the server between two calls is not noticed."""
        submit()
        server.cut(database_url)
        submit()
