"""The states of GPUs in the database: their causes, the restrictions, the return to service, and resets."""

from __future__ import annotations

from collections.abc import Callable
from uuid import UUID, uuid4

import pytest
from sqlalchemy import Engine, text

from kqueue.categories import Category
from kqueue.contract import Request
from kqueue.errors import InvalidRequest
from kqueue.store import evaluations, gpus, workers
from tests.samples import ended
from tests.store.steps import finish

GPU = "GPU-11111111-aaaa"


@pytest.fixture
def gpu(engine: Engine) -> str:
    """Register a GPU in service and another GPU of the same host, and return the first one's UUID."""
    gpus.register(engine, host="here", index=0, uuid=GPU, name="NVIDIA H200")
    gpus.register(engine, host="here", index=1, uuid="GPU-22222222-bbbb", name="NVIDIA H200")
    return GPU


@pytest.fixture
def worker(engine: Engine, gpu: str) -> UUID:
    identity = uuid4()
    workers.register(engine, id=identity, name="gpu0-0@here", host="here", pid=1, lanes=["cpu"], device=gpu)
    return identity


def _state(engine: Engine, uuid: str = GPU) -> gpus.GpuStatus:
    [known] = gpus.find(engine, uuids=[uuid])
    return known


def _paused(engine: Engine, worker: UUID) -> str | None:
    return next(w.paused for w in workers.live(engine, within_s=30) if w.id == worker)


def _seconds_to_test(engine: Engine) -> float:
    with engine.connect() as connection:
        return float(
            connection.scalar(text(f"SELECT extract(epoch FROM check_at - now()) FROM gpus WHERE uuid = '{GPU}'"))
        )


def test_a_drained_gpu_stays_drained_until_resumed(engine: Engine, gpu: str, worker: UUID) -> None:
    """The GPU stays drained after a restart of its fleet, and its workers claim nothing."""
    gpus.drain(engine, gpu, reason="new thermal paste")
    gpus.register(engine, host="here", index=0, uuid=gpu, name="NVIDIA H200")
    known = _state(engine)
    assert (known.state, known.reason) == ("drained", "new thermal paste")
    assert known.paused == _paused(engine, worker) == "GPU 0 is drained: new thermal paste"
    since = known.since
    gpus.drain(engine, gpu, reason="still")
    assert _state(engine).since == since
    gpus.resume(engine, gpu)
    assert (_state(engine).state, _state(engine).paused) == ("serving", None)
    assert _state(engine, "GPU-22222222-bbbb").state == "serving"


def test_the_second_failed_test_takes_a_gpu_out_of_service_and_a_passed_one_brings_it_back(
    engine: Engine, gpu: str, worker: UUID
) -> None:
    """A quarantined GPU is tested at growing intervals."""
    gpus.ask_for_test(engine, gpu, reason="Xid 48")
    known = _state(engine)
    assert (known.state, known.due, known.paused) == ("serving", True, "GPU 0 is being tested: Xid 48")
    first = gpus.record_failure(engine, gpu, reason="wrong sum")
    assert (first.state, first.due, first.failures) == ("serving", True, 1)
    second = gpus.record_failure(engine, gpu, reason="wrong sum")
    assert (second.state, second.due) == ("quarantined", False)
    assert _paused(engine, worker) == "GPU 0 is quarantined: wrong sum"
    intervals = [_seconds_to_test(engine)]
    for _ in range(9):
        gpus.record_failure(engine, gpu, reason="wrong sum")
        intervals.append(_seconds_to_test(engine))
    assert intervals == pytest.approx([10, 20, 40, 80, 160, 320, 600, 600, 600, 600], abs=2)
    gpus.record_pass(engine, gpu)
    known = _state(engine)
    assert (known.state, known.failures, known.check_at, known.paused) == ("serving", 0, None, None)


def test_what_a_test_does_not_change(engine: Engine, gpu: str) -> None:
    """Only an operator returns a GPU that an operator drained, and it is tested before it serves again."""
    gpus.drain(engine, gpu, reason=None)
    gpus.record_pass(engine, gpu)
    gpus.record_failure(engine, gpu, reason="wrong sum")
    assert (_state(engine).state, _state(engine).reason) == ("drained", None)
    gpus.resume(engine, gpu)
    assert (_state(engine).state, _state(engine).due) == ("quarantined", True)
    for _ in range(5):
        gpus.record_failure(engine, gpu, reason="wrong sum")
    assert not _state(engine).due
    gpus.resume(engine, gpu)
    assert (_state(engine).state, _state(engine).reason, _state(engine).due) == ("quarantined", "wrong sum", True)
    gpus.record_pass(engine, gpu)
    gpus.ask_for_test(engine, gpu, reason="Xid 48")
    gpus.postpone(engine, gpu, reason="no memory is free", seconds=7)
    known = _state(engine)
    assert (known.state, known.failures, known.due) == ("serving", 0, False)
    assert known.paused == "GPU 0 is being tested: no memory is free"


def test_an_evaluation_that_ends_as_gpu_unhealthy_has_its_gpu_tested(
    engine: Engine, gpu: str, worker: UUID, fields: Callable[..., dict[str, object]]
) -> None:
    """The verdict counts as one failed test. Other outcomes start no test."""
    for category, due in ((Category.WORKER_LOST, False), (Category.GPU_UNHEALTHY, True)):
        [submitted] = evaluations.submit(engine, [Request.model_validate(fields())])
        claim = evaluations.claim(engine, submitted.evaluation_id, worker_id=worker, lease_s=30)
        assert _state(engine).running == (submitted.evaluation_id,)
        finish(engine, claim, ended(category, message="the self-test answered 7"))
        assert _state(engine).due is due
    known = _state(engine)
    assert (known.failures, known.reason, known.running) == (1, "the self-test answered 7", ())


def test_gpus_are_named_by_index_and_host_or_by_uuid(engine: Engine, gpu: str) -> None:
    """An unknown or ambiguous name is refused with a list of the known GPUs."""
    gpus.register(engine, host="there", index=0, uuid="GPU-33333333-cccc", name="NVIDIA A100")

    def named(name: str, host: str = "here") -> str:
        return gpus.resolve(engine, name, host=host).uuid

    assert named("0") == gpu
    assert named("0", "there") == "GPU-33333333-cccc"
    assert named("gpu-2222") == "GPU-22222222-bbbb"
    for unknown in ("7", "GPU-4", "GPU-"):
        with pytest.raises(InvalidRequest, match="GPU-11111111-aaaa"):
            named(unknown)


def test_memory_is_as_it_was_last_seen_booked(engine: Engine, gpu: str) -> None:
    """Waiting times start at a time of the database's clock, and a GPU without bookings has no memory entry."""
    assert _state(engine).memory is None
    waiting = [("first\x00", 70, 60.0), ("second", 20, 0.5)]
    gpus.see_memory(engine, gpu, booked_bytes=40, capacity_bytes=100, waiting=waiting)
    memory = _state(engine).memory
    assert (memory.booked_bytes, memory.capacity_bytes) == (40, 100)
    assert [(one.label, one.wanted_bytes) for one in memory.waiting] == [("first\ufffd", 70), ("second", 20)]
    first, second = memory.waiting
    assert (second.since - first.since).total_seconds() == 59.5
    with engine.connect() as connection:
        assert 60 <= (connection.execute(text("SELECT now()")).scalar_one() - first.since).total_seconds() < 90
    assert _state(engine, "GPU-22222222-bbbb").memory is None
    gpus.see_memory(engine, gpu, booked_bytes=0, capacity_bytes=None, waiting=())
    assert _state(engine).memory is None


# During a reset the workers end and the GPU is tested. It serves again only if it passes.


def test_a_reset_takes_a_gpu_away_until_it_has_passed_a_test(engine: Engine, worker: UUID) -> None:
    """Its workers pause at once. Without a running evaluation they can be ended immediately, and then a test is due."""
    gpus.reset(engine, GPU, reason="somebody asked", grace_s=600)
    assert "somebody asked" in (_state(engine).paused or "")
    assert workers.live(engine, within_s=30)[0].paused == _state(engine).paused
    assert (_state(engine).reset_due, _state(engine).due) == (True, False)
    gpus.test_after_reset(engine, GPU)
    assert (_state(engine).reset_due, _state(engine).due) == (False, True)
    gpus.record_pass(engine, GPU)
    assert (_state(engine).state, _state(engine).paused) == ("serving", None)


def test_what_runs_is_waited_for_as_long_as_was_said(
    engine: Engine, worker: UUID, fields: Callable[..., dict[str, object]]
) -> None:
    """During an evaluation the reset is due only after its grace period."""
    [submitted] = evaluations.submit(engine, [Request.model_validate(fields())])
    assert evaluations.claim(engine, submitted.evaluation_id, worker_id=worker, lease_s=30) is not None
    gpus.reset(engine, GPU, reason="somebody asked", grace_s=600)
    assert not _state(engine).reset_due
    gpus.reset(engine, GPU, reason="somebody is in a hurry", grace_s=0)
    assert _state(engine).reset_due


def test_a_test_that_was_under_way_does_not_bring_it_back(engine: Engine, worker: UUID) -> None:
    """That test used the old workers, so neither its pass nor its failure ends the reset."""
    gpus.reset(engine, GPU, reason="somebody asked", grace_s=600)
    gpus.record_pass(engine, GPU)
    gpus.record_failure(engine, GPU, reason="wrong")
    assert _state(engine).state == "quarantined"
    assert _state(engine).reset_due
    gpus.test_after_reset(engine, GPU)
    gpus.record_failure(engine, GPU, reason="wrong again")
    assert (_state(engine).state, _state(engine).reset_at) == ("quarantined", None)
    assert _state(engine).check_at is not None


def test_a_drained_gpu_is_tested_and_stays_drained(engine: Engine, worker: UUID) -> None:
    """The workers are ended and the GPU is tested once, but only a resume returns it."""
    for passes in (False, True):
        gpus.drain(engine, GPU, reason="a new fan")
        gpus.reset(engine, GPU, reason="somebody asked", grace_s=600)
        assert (_state(engine).state, _state(engine).reason, _state(engine).reset_due) == ("drained", "a new fan", True)
        gpus.test_after_reset(engine, GPU)
        assert (_state(engine).state, _state(engine).due) == ("drained", True)
        gpus.postpone(engine, GPU, reason="no memory was free", seconds=0)
        assert (_state(engine).reason, _state(engine).due) == ("a new fan", True)
        if passes:
            gpus.record_pass(engine, GPU)
        else:
            gpus.record_failure(engine, GPU, reason="wrong")
        assert (_state(engine).state, _state(engine).reason, _state(engine).check_at) == ("drained", "a new fan", None)
        gpus.postpone(engine, GPU, reason="no memory was free", seconds=0)
        assert _state(engine).check_at is None
        gpus.resume(engine, GPU)
        assert (_state(engine).state, _state(engine).due) == (("serving", False) if passes else ("quarantined", True))


def test_a_reset_does_not_return_what_probes_took_out_of_service(engine: Engine, worker: UUID) -> None:
    """Passed tests do not return it. After a resume a reset works normally."""
    with engine.begin() as connection:
        gpus.quarantine(connection, GPU, reason="a cheat passed")
    assert _state(engine).is_left_alone
    assert gpus.reset(engine, GPU, reason="somebody asked", grace_s=0) is False
    assert (_state(engine).state, _state(engine).reason, _state(engine).reset_at) == (
        "quarantined",
        "a cheat passed",
        None,
    )
    gpus.test_after_reset(engine, GPU)
    gpus.record_pass(engine, GPU)
    assert _state(engine).state == "quarantined"
    gpus.resume(engine, GPU)
    assert gpus.reset(engine, GPU, reason="somebody asked", grace_s=0) is True
    assert not _state(engine).is_left_alone


def test_an_operator_s_later_word_counts(engine: Engine, worker: UUID) -> None:
    """A GPU that is drained during a reset stays drained, and no worker is ended."""
    gpus.reset(engine, GPU, reason="somebody asked", grace_s=600)
    gpus.drain(engine, GPU, reason="no, leave it")
    assert not _state(engine).reset_due
    gpus.test_after_reset(engine, GPU)
    assert (_state(engine).state, _state(engine).check_at) == ("drained", None)
