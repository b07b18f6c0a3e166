"""Claims: one worker begins an attempt, retries move to other slots, and environments have baselines."""

from __future__ import annotations

from uuid import UUID, uuid4

import pytest
from sqlalchemy import Engine

from kqueue.categories import Category
from kqueue.contract import Request
from kqueue.errors import InvalidRequest, SchemaMismatch
from kqueue.store import baselines, evaluations, gpus, workers
from kqueue.store.evaluations import Recorded
from tests.samples import measurement
from tests.store.steps import ENVIRONMENT, LOST, PASSED, change, count, finish, unchecked


class TestClaim:
    """Claims by compare-and-set."""

    def test_the_claim_carries_the_request(self, engine: Engine, fields, worker_id: UUID) -> None:
        request = Request(**fields(settings={"precision": "bf16", "checks": 2}, problem_label="p", batch="b"))
        identity = evaluations.submit(engine, [request])[0].evaluation_id
        claimed = evaluations.claim(engine, identity, worker_id=worker_id, lease_s=30)
        assert (claimed.request, claimed.number, claimed.lane) == (request, 1, "cpu")

    def test_what_cannot_be_claimed(self, engine: Engine, submit, claim, worker_id: UUID) -> None:
        """Unknown, running, done and delayed evaluations cannot be claimed."""
        running, done, later = submit(), submit(), submit()
        claim(running)
        finish(engine, claim(done), PASSED)
        change(engine, "UPDATE evaluations SET available_at = now() + interval '1 min' WHERE id = :id", id=later)
        for identity in (uuid4(), running, done, later):
            assert evaluations.claim(engine, identity, worker_id=worker_id, lease_s=30) is None
        assert count(engine, "attempts") == 2

    def test_a_paused_worker_gets_nothing(self, engine: Engine, submit, claim, worker_id: UUID) -> None:
        """The evaluation stays queued, and its consumed message is due again at once."""
        identity = submit()
        evaluations.publish(engine, [identity])
        change(engine, "UPDATE workers SET paused = 'the GPU is drained'")
        assert evaluations.claim(engine, identity, worker_id=worker_id, lease_s=30) is None
        assert count(engine, "attempts") == 0
        assert count(engine, "evaluations", "published_at IS NULL AND state = 'queued'") == 1
        change(engine, "UPDATE workers SET paused = NULL")
        assert claim(identity).number == 1

    def test_a_drained_gpu_gets_nothing(self, engine: Engine, submit) -> None:
        """A drained GPU, or one with a due self-test, gets no evaluation, even after a supervisor's outdated write."""
        gpus.register(engine, host="here", index=0, uuid="GPU-0", name="a GPU")
        worker = uuid4()
        workers.register(engine, id=worker, name="gpu0-0@here", host="here", pid=2, lanes=["cpu"], device="GPU-0")
        for out_of_service in (
            lambda: gpus.drain(engine, "GPU-0", reason=None),
            lambda: gpus.ask_for_test(engine, "GPU-0", reason="an Xid"),
        ):
            identity = submit()
            out_of_service()
            workers.pause(engine, {worker: None})
            assert evaluations.claim(engine, identity, worker_id=worker, lease_s=30) is None
            gpus.resume(engine, "GPU-0")
            workers.pause(engine, {worker: None})
            assert evaluations.claim(engine, identity, worker_id=worker, lease_s=30) is not None

    def test_an_expired_one_gets_its_verdict(self, engine: Engine, submit, worker_id: UUID) -> None:
        """A claim after the producer's limit ends the evaluation instead of running it."""
        identity = submit(queue_wait_s=60)
        change(engine, "UPDATE evaluations SET expires_at = now() - interval '1 s'")
        assert evaluations.claim(engine, identity, worker_id=worker_id, lease_s=30) is None
        verdict = evaluations.verdict(engine, identity)
        assert (verdict.category, verdict.attempts, verdict.environment) == (Category.EXPIRED, 0, None)

    def test_an_unreadable_request_can_be_claimed(self, engine: Engine, submit, claim) -> None:
        """Settings of another version can be claimed. Reading them raises an error, and the attempt can be ended."""
        identity = submit()
        change(engine, """UPDATE evaluations SET settings = settings || '{"speculative_checks": 3}'""")
        claimed = claim(identity)
        with pytest.raises(SchemaMismatch, match=r"settings\.speculative_checks"):
            _ = claimed.request
        assert finish(engine, claimed, LOST) is Recorded.RETRY

    def test_what_no_version_can_read_is_an_invalid_request(self, engine: Engine, submit, claim) -> None:
        """A wrong value is the request's fault, unless another version's field or word can explain it."""
        for number, (settings, error) in enumerate(
            {
                '{"checks": 0}': InvalidRequest,
                '{"timing": {"max_error": 1e-300}}': InvalidRequest,
                '{"max_attempts": "many"}': InvalidRequest,
                "[]": InvalidRequest,
                '{"checks": 0, "speculative_checks": 3}': SchemaMismatch,
                '{"precision": "fp4"}': SchemaMismatch,
            }.items()
        ):
            identity = submit(number=number)
            change(engine, "UPDATE evaluations SET settings = cast(:s AS jsonb) WHERE id = :i", s=settings, i=identity)
            with pytest.raises(error):
                _ = claim(identity).request

    def test_sources_are_those_that_their_hashes_stand_for(self, engine: Engine, submit, claim) -> None:
        """Changed sources are detected, because any producer can write them and their hashes select reused verdicts."""
        unchecked(engine, "kernels", "problems")
        for table, identity in (("kernels", submit()), ("problems", submit(number=1))):
            change(engine, f"UPDATE {table} SET source = source || ' '")
            with pytest.raises(InvalidRequest, match="do not match their hashes"):
                _ = claim(identity).request
            change(engine, f"UPDATE {table} SET source = rtrim(source)")


class TestElsewhere:
    """A retry runs far from the failed attempt if possible."""

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

    def failed(self, engine: Engine, submit, slots: dict[str, UUID]) -> UUID:
        """Submit an evaluation that fails on the first slot and is due again."""
        identity = submit(lane="gpu")
        claimed = evaluations.claim(engine, identity, worker_id=slots["gpu0-0"], lease_s=30)
        assert claimed is not None
        assert finish(engine, claimed, LOST) is Recorded.RETRY
        evaluations.publish(engine, [identity])
        return identity

    @pytest.fixture
    def retried(self, engine: Engine, submit, slots: dict[str, UUID]) -> UUID:
        """An evaluation that failed on the first slot and is due again."""
        return self.failed(engine, submit, slots)

    def test_another_device_before_another_slot(self, engine: Engine, slots: dict[str, UUID], retried: UUID) -> None:
        """Nearer slots are refused, and their consumed messages are due again."""
        for name in ("gpu0-0", "gpu0-1"):
            assert evaluations.claim(engine, retried, worker_id=slots[name], lease_s=30) is None
            assert [one.id for one in evaluations.upcoming(engine, {})["gpu"] if not one.published] == [retried]
        assert evaluations.claim(engine, retried, worker_id=slots["gpu1-0"], lease_s=30) is not None

    def test_the_next_best_where_nobody_is_farther(
        self, engine: Engine, slots: dict[str, UUID], retried: UUID, submit
    ) -> None:
        """A retry waits only for live, active workers of its lane, and else runs on another slot of the device."""
        successor = uuid4()
        workers.stop(engine, slots["gpu0-0"])
        workers.register(engine, id=successor, name="gpu0-0@here", host="here", pid=2, lanes=["gpu"], device="GPU-0")
        for gone, here in (
            ("stopped_at = now()", "stopped_at = NULL"),
            ("heartbeat_at = now() - interval '31 s'", "heartbeat_at = now()"),
            ("paused = 'GPU 1 is drained'", "paused = NULL"),
            ("lanes = '{gpu.b200}'", "lanes = '{gpu}'"),
        ):
            assert evaluations.claim(engine, retried, worker_id=slots["gpu0-1"], lease_s=30) is None
            change(engine, f"UPDATE workers SET {gone} WHERE name = 'gpu1-0@here'")
            assert evaluations.claim(engine, retried, worker_id=successor, lease_s=30) is None
            assert evaluations.claim(engine, retried, worker_id=slots["gpu0-1"], lease_s=30) is not None, gone
            change(engine, f"UPDATE workers SET {here} WHERE name = 'gpu1-0@here'")
            retried = self.failed(engine, submit, slots)

    def test_nobody_is_waited_for_long(self, engine: Engine, slots: dict[str, UUID], retried: UUID, submit) -> None:
        """After some seconds any worker can claim it, and a sole worker at once."""
        change(engine, "UPDATE evaluations SET available_at = now() - interval '11 s'")
        assert evaluations.claim(engine, retried, worker_id=slots["gpu0-0"], lease_s=30) is not None
        other = self.failed(engine, submit, slots)
        change(engine, "UPDATE workers SET stopped_at = now() WHERE name <> 'gpu0-0@here'")
        assert evaluations.claim(engine, other, worker_id=slots["gpu0-0"], lease_s=30) is not None

    def test_what_was_handed_back_may_go_anywhere(self, engine: Engine, submit, slots: dict[str, UUID]) -> None:
        """A stopped worker is no failed one, so the same slot can claim it again."""
        identity = submit(lane="gpu")
        assert evaluations.claim(engine, identity, worker_id=slots["gpu0-0"], lease_s=30) is not None
        evaluations.lose_worker(engine, slots["gpu0-0"], retry_delay_s=9, message="stopped", handed_back=True)
        assert evaluations.claim(engine, identity, worker_id=slots["gpu0-0"], lease_s=30) is not None


def test_the_first_baseline_stays(engine: Engine, submit, claim) -> None:
    """All speedups in an environment share one baseline."""
    claimed = claim(submit())
    environment = evaluations.set_environment(engine, claimed.attempt_id, ENVIRONMENT, conditions="")
    key = (claimed.request.problem_hash, environment, "fp32")
    assert baselines.get(engine, *key) is None
    baselines.put(engine, *key, measurement(1.0))
    baselines.put(engine, *key, measurement(2.0))
    assert baselines.get(engine, *key) == measurement(1.0)


def test_equal_environments_are_one_row(engine: Engine, submit, claim) -> None:
    """The hash depends on the facts, not on their order."""
    first, second = claim(submit()), claim(submit())
    hashes = {
        evaluations.set_environment(engine, first.attempt_id, ENVIRONMENT, conditions=""),
        evaluations.set_environment(engine, second.attempt_id, dict(reversed(ENVIRONMENT.items())), conditions=""),
    }
    assert len(hashes) == count(engine, "environments") == 1
