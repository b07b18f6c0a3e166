"""A reset of a GPU: its workers end, it is tested, and it serves again or does not."""

from __future__ import annotations

from collections.abc import Callable
from uuid import UUID, uuid4

import pytest
from sqlalchemy import Engine

from kqueue.store import evaluations, gpus, workers

GPU = "GPU-11111111-2222-3333-4444-555555555555"


@pytest.fixture
def worker(engine: Engine) -> UUID:
    """A live worker of a GPU that serves."""
    gpus.register(engine, host="here", index=0, uuid=GPU, name="NVIDIA H200")
    identity = uuid4()
    workers.register(engine, id=identity, name="gpu0-0@here", host="here", pid=1, lanes=["cpu"], device=GPU)
    return identity


def state(engine: Engine) -> gpus.GpuStatus:
    [gpu] = gpus.find(engine)
    return gpu


def test_a_reset_takes_a_gpu_away_until_it_has_passed_a_test(engine: Engine, worker: UUID) -> None:
    """Its workers pause at once; nothing runs there, so they may be ended now; then it is due for a test."""
    gpus.reset(engine, GPU, reason="somebody asked", grace_s=600)
    assert "somebody asked" in (state(engine).paused or "")
    assert workers.live(engine, within_s=30)[0].paused == state(engine).paused
    assert (state(engine).reset_due, state(engine).due) == (True, False)
    gpus.test_after_reset(engine, GPU)
    assert (state(engine).reset_due, state(engine).due) == (False, True)
    gpus.record_pass(engine, GPU)
    assert (state(engine).state, state(engine).paused) == ("serving", None)


def test_what_runs_is_waited_for_as_long_as_was_said(
    engine: Engine, worker: UUID, fields: Callable[..., dict[str, object]]
) -> None:
    """While an evaluation runs the reset is not due, until its time is over."""
    from kqueue.contract import Request

    [submitted] = evaluations.submit(engine, [Request.model_validate(fields())])
    assert evaluations.claim(engine, submitted.evaluation_id, worker_id=worker, lease_s=30) is not None
    gpus.reset(engine, GPU, reason="somebody asked", grace_s=600)
    assert not state(engine).reset_due
    gpus.reset(engine, GPU, reason="somebody is in a hurry", grace_s=0)
    assert state(engine).reset_due


def test_a_test_that_was_under_way_does_not_bring_it_back(engine: Engine, worker: UUID) -> None:
    """It was made with the workers that are to go; nor does its failure forget the reset."""
    gpus.reset(engine, GPU, reason="somebody asked", grace_s=600)
    gpus.record_pass(engine, GPU)
    gpus.record_failure(engine, GPU, reason="wrong")
    assert state(engine).state == "quarantined"
    assert state(engine).reset_due
    gpus.test_after_reset(engine, GPU)
    gpus.record_failure(engine, GPU, reason="wrong again")
    assert (state(engine).state, state(engine).reset_at) == ("quarantined", None)
    assert state(engine).check_at is not None


def test_a_drained_gpu_is_tested_and_stays_drained(engine: Engine, worker: UUID) -> None:
    """An operator's word goes first: its workers are ended, it is tested once, and only a resume returns it."""
    for passes in (False, True):
        gpus.drain(engine, GPU, reason="a new fan")
        gpus.reset(engine, GPU, reason="somebody asked", grace_s=600)
        assert (state(engine).state, state(engine).reason, state(engine).reset_due) == ("drained", "a new fan", True)
        gpus.test_after_reset(engine, GPU)
        assert (state(engine).state, state(engine).due) == ("drained", True)
        gpus.postpone(engine, GPU, reason="no memory was free", seconds=0)
        assert (state(engine).reason, state(engine).due) == ("a new fan", True)
        if passes:
            gpus.record_pass(engine, GPU)
        else:
            gpus.record_failure(engine, GPU, reason="wrong")
        assert (state(engine).state, state(engine).reason, state(engine).check_at) == ("drained", "a new fan", None)
        gpus.postpone(engine, GPU, reason="no memory was free", seconds=0)
        assert state(engine).check_at is None
        gpus.resume(engine, GPU)
        assert (state(engine).state, state(engine).due) == (("serving", False) if passes else ("quarantined", True))


def test_a_reset_does_not_return_what_probes_took_out_of_service(engine: Engine, worker: UUID) -> None:
    """It may pass every test. Only a resume ends it; after that a reset is one again."""
    with engine.begin() as connection:
        gpus.quarantine(connection, GPU, reason="a cheat passed")
    assert state(engine).is_left_alone
    assert gpus.reset(engine, GPU, reason="somebody asked", grace_s=0) is False
    assert (state(engine).state, state(engine).reason, state(engine).reset_at) == (
        "quarantined",
        "a cheat passed",
        None,
    )
    gpus.test_after_reset(engine, GPU)
    gpus.record_pass(engine, GPU)
    assert state(engine).state == "quarantined"
    gpus.resume(engine, GPU)
    assert gpus.reset(engine, GPU, reason="somebody asked", grace_s=0) is True
    assert not state(engine).is_left_alone


def test_an_operator_s_later_word_counts(engine: Engine, worker: UUID) -> None:
    """Drained while a reset is under way: it stays drained, and nothing is ended."""
    gpus.reset(engine, GPU, reason="somebody asked", grace_s=600)
    gpus.drain(engine, GPU, reason="no, leave it")
    assert not state(engine).reset_due
    gpus.test_after_reset(engine, GPU)
    assert (state(engine).state, state(engine).check_at) == ("drained", None)
