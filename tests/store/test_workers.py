"""Heartbeats of workers, and the leases of their attempts."""

from __future__ import annotations

from uuid import UUID, uuid4

import pytest
from sqlalchemy import Engine, text

from kqueue.contract import Settings
from kqueue.store import evaluations, reports, workers
from tests.store.steps import PASSED, change, count, finish, unchecked


class TestWorkers:
    def test_live_workers_and_lanes(self, engine: Engine, submit, claim, worker_id: UUID) -> None:
        """A live worker counts for all its lanes, and has its current evaluation."""
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
        """A silent worker is first not live and then stopped, and its next heartbeat revives it."""
        change(engine, "UPDATE workers SET heartbeat_at = now() - interval '100 s'")
        assert workers.live(engine, within_s=30) == []
        assert workers.stop_silent(engine, older_than_s=90) == 1
        assert workers.stop_silent(engine, older_than_s=90) == 0
        workers.heartbeat(engine, [worker_id], lease_s=30)
        assert [w.id for w in workers.live(engine, within_s=30)] == [worker_id]

    def test_one_that_is_being_heard_of_is_passed_over(self, engine: Engine, worker_id: UUID) -> None:
        """A worker whose heartbeat is being written is neither waited for nor stopped."""
        change(engine, "UPDATE workers SET heartbeat_at = now() - interval '100 s'")
        with engine.begin() as heartbeat:
            heartbeat.execute(text("UPDATE workers SET heartbeat_at = now()"))
            assert workers.stop_silent(engine, older_than_s=90) == 0
        assert [w.id for w in workers.live(engine, within_s=30)] == [worker_id]

    def test_a_heartbeat_renews_the_lease(self, engine: Engine, submit, claim, worker_id: UUID) -> None:
        """A worker with heartbeats does not lose its attempt, which can last hours if a problem has many shapes."""
        claim(submit())
        change(engine, "UPDATE attempts SET started_at = now() - interval '6 h', lease_until = now() - interval '1 s'")
        workers.heartbeat(engine, [worker_id], lease_s=30)
        assert evaluations.expire_leases(engine, retry_delay_s=0) == []

    def test_settings_that_cannot_be_read_stop_no_host(self, engine: Engine, submit, claim, worker_id: UUID) -> None:
        """A host renews all its leases and sends all messages in one statement, whatever a login wrote to a row."""
        unchecked(engine, "evaluations")
        claimed, queued = claim(submit()), submit(number=1)
        for settings in (
            "null",
            "[]",
            '"x"',
            '{"deadlines": 7}',
            '{"deadlines": {"a": "x", "b": 1e400}, "backward": 2}',
        ):
            change(engine, "UPDATE evaluations SET published_at = NULL, settings = cast(:s AS jsonb)", s=settings)
            change(engine, "UPDATE attempts SET lease_until = now()")
            workers.heartbeat(engine, [worker_id], lease_s=30)
            assert count(engine, "attempts", "lease_until > now() + interval '20 s'") == 1
            [message] = evaluations.publish(engine, [queued, claimed.evaluation_id])
            assert message.deadlines_s == pytest.approx(Settings().total_s * (2 if "backward" in settings else 1))

    def test_steps_are_of_attempts_that_run(self, engine: Engine, submit, claim, worker_id: UUID) -> None:
        """Worker and evaluation have the step, but an attempt that has ended or is about to end is not updated."""
        done = claim(submit())
        finish(engine, done, PASSED)
        running = claim(submit())
        told = {(one.evaluation_id, one.number): "wait_for_device" for one in (done, running)}
        workers.note_steps(engine, told | {(uuid4(), 1): None})
        [worker] = workers.live(engine, within_s=30)
        assert (worker.busy_with, worker.step) == (running.evaluation_id, "wait_for_device")
        [attempt] = reports.show(engine, running.evaluation_id).attempts
        assert attempt.step == "wait_for_device"
        with engine.begin() as ending:
            ending.execute(text("SELECT 1 FROM attempts FOR UPDATE"))
            workers.note_steps(engine, dict.fromkeys(told, "check"))
        assert workers.live(engine, within_s=30)[0].step == "wait_for_device"
        finish(engine, running, PASSED)
        assert [one.step for one in reports.show(engine, running.evaluation_id).attempts] == [None]
        assert workers.live(engine, within_s=30)[0].step is None
        assert count(engine, "attempts", "step IS NOT NULL") == 1

    def test_a_heartbeat_does_not_keep_the_dead_alive(self, engine: Engine, submit, claim, worker_id: UUID) -> None:
        """An attempt that its worker abandoned, or past the hard limit, is not renewed."""
        left, overdue = claim(submit()), claim(submit())
        change(engine, "UPDATE attempts SET lease_until = now() - interval '1 s', started_at = now() - interval '9 h'")
        workers.heartbeat(engine, [worker_id], lease_s=30)
        ended = {identity for identity, _ in evaluations.expire_leases(engine, retry_delay_s=0)}
        assert ended == {left.evaluation_id, overdue.evaluation_id}

    def test_a_frozen_judge_does_not_silence_its_neighbours(
        self, engine: Engine, submit, claim, worker_id: UUID
    ) -> None:
        """A stopped process that locks its attempt's row does not prevent the renewal of other leases."""
        frozen = claim(submit())
        neighbour = uuid4()
        workers.register(engine, id=neighbour, name="cpu-1@here", host="here", pid=2, lanes=["cpu"], device="cpu")
        assert evaluations.claim(engine, submit(), worker_id=neighbour, lease_s=30) is not None
        change(engine, "UPDATE attempts SET lease_until = now() - interval '1 s'")
        with engine.connect() as holder:
            holder.execute(text("SELECT 1 FROM attempts WHERE id = :id FOR UPDATE"), {"id": frozen.attempt_id})
            workers.heartbeat(engine, [worker_id, neighbour], lease_s=30)
        lost = evaluations.expire_leases(engine, retry_delay_s=0)
        assert [identity for identity, _ in lost] == [frozen.evaluation_id]

    def test_what_has_ended_is_not_renewed(self, engine: Engine, submit, claim, worker_id: UUID) -> None:
        finish(engine, claim(submit()), PASSED)
        before = count(engine, "attempts", "lease_until > now() + interval '1 h'")
        workers.heartbeat(engine, [worker_id], lease_s=7200)
        assert count(engine, "attempts", "lease_until > now() + interval '1 h'") == before == 0
