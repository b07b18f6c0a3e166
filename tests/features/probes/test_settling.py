"""Probes in the database: their schedule, the pauses that they cause, and their absence from reports."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import Any
from uuid import UUID, uuid4

import pytest
from sqlalchemy import Engine

from kqueue.categories import Category
from kqueue.contract import Outcome, Request
from kqueue.features.probes import fleet as probes
from kqueue.states import Finding, GpuState, ProbeKind
from kqueue.store import evaluations, gpus, reports, retention, workers
from tests.samples import ended, measurement, passed
from tests.store.steps import change, count, finish, together

LIVE_S = 60.0
PAST = datetime.now(UTC) - timedelta(days=1)


@pytest.fixture
def judge(engine: Engine, worker_id: UUID) -> Callable[..., None]:
    """Return a function that ends an evaluation of a worker with an outcome."""

    def one(
        identity: UUID, outcome: Outcome, by: UUID = worker_id, meanwhile: Callable[[], object] = lambda: None
    ) -> None:
        claimed = evaluations.claim(engine, identity, worker_id=by, lease_s=30)
        assert claimed is not None
        meanwhile()
        finish(engine, claimed, outcome)

    return one


@pytest.fixture
def work(engine: Engine, fields: Callable[..., Any], judge: Callable[..., None]) -> Callable[[int], list[UUID]]:
    """Return a function that has a number of ordinary evaluations judged."""

    def some(number: int) -> list[UUID]:
        requests = [Request(**fields(uuid4().int)) for _ in range(number)]
        ids = [one.evaluation_id for one in evaluations.submit(engine, requests)]
        for identity in ids:
            judge(identity, passed())
        return ids

    return some


def step(engine: Engine, share: float = 0.5) -> probes.Step:
    return probes.step(engine, share=share, live_s=LIVE_S)


def judged(engine: Engine, judge: Callable[..., None], kind: ProbeKind, outcome: Outcome, **by: Any) -> probes.Step:
    """Submit a probe of this kind, record its outcome, and settle it."""
    judge(probes.submit(engine, "cpu", kind), outcome, **by)
    return step(engine, share=0)


def test_they_come_among_the_work(engine: Engine, worker_id: UUID, work: Callable[[int], list[UUID]]) -> None:
    """One probe follows a number of evaluations on their lane, never two at once, and none when probes are off."""
    assert step(engine).submitted == ()
    work(3)  # with a share of a half, one is due after three at the latest
    assert step(engine, share=0).submitted == ()
    [identity] = step(engine).submitted
    work(6)
    assert step(engine).submitted == ()
    assert count(engine, "evaluations", f"probe AND id = '{identity}' AND lane = 'cpu'") == 1


def test_two_sweepers_submit_one(engine: Engine, worker_id: UUID, work: Callable[[int], list[UUID]]) -> None:
    step(engine)
    work(3)
    assert sum(len(one.submitted) for one in together(8, lambda _: step(engine))) == 1
    assert count(engine, "probes") == 1


def test_a_cheat_that_passes_pauses_at_once(
    engine: Engine, worker_id: UUID, judge: Callable[..., None], work: Callable[[int], list[UUID]]
) -> None:
    """Verdicts since the last good probe are suspect, and the slot's workers claim nothing until the resume."""
    before, since = work(1), []
    assert judged(engine, judge, ProbeKind.CHEAT, ended(Category.WRONG_VALUES)).paused == ()
    since = work(2)
    [pause] = judged(engine, judge, ProbeKind.CHEAT, passed()).paused
    assert (pause.host, pause.device, pause.finding, pause.doubted) == ("here", "cpu", Finding.CHEAT_ACCEPTED, 2)
    assert probes.suspect_verdicts(engine, pause.id) == since
    assert not set(before) & set(since)
    assert probes.held(engine, "here") == pause.reason
    assert workers.live(engine, within_s=LIVE_S)[0].paused == pause.reason
    assert step(engine).paused == ()
    assert probes.resume(engine, "here") == 1
    assert probes.held(engine, "here") is None
    workers.pause(engine, {worker_id: None})  # as its supervisor does
    assert judged(engine, judge, ProbeKind.CHEAT, ended(Category.WRONG_VALUES)).paused == ()


def test_other_findings_are_confirmed_first(engine: Engine, worker_id: UUID, judge: Callable[..., None]) -> None:
    """Two of three must agree. Each finding starts another probe at once, even without work, until it is decided."""
    refused = ended(Category.WRONG_VALUES)
    assert judged(engine, judge, ProbeKind.HONEST, refused).paused == ()
    for _ in range(2):
        [confirming] = step(engine).submitted
        assert count(engine, "probes", f"evaluation_id = '{confirming}' AND confirms AND kind = 'honest'") == 1
        judge(confirming, passed())
    assert step(engine).submitted == ()
    assert judged(engine, judge, ProbeKind.HONEST, refused).paused == ()
    [confirming] = step(engine).submitted
    judge(confirming, refused)
    [pause] = step(engine, share=0).paused
    assert (pause.finding, len(pause.probes)) == (Finding.HONEST_REFUSED, 2)


def test_a_judge_that_is_broken_now_and_then_is_doubted_since_before(
    engine: Engine, worker_id: UUID, judge: Callable[..., None], work: Callable[[int], list[UUID]]
) -> None:
    """Verdicts are suspect since the last good probe before the first wrong one, despite a good one between them."""
    refused = ended(Category.WRONG_VALUES)
    judged(engine, judge, ProbeKind.HONEST, passed())
    since = work(2)
    judged(engine, judge, ProbeKind.HONEST, refused)
    since += work(1)
    judged(engine, judge, ProbeKind.HONEST, passed())
    [pause] = judged(engine, judge, ProbeKind.HONEST, refused).paused
    assert probes.suspect_verdicts(engine, pause.id) == since


def test_there_is_an_end_to_confirming(engine: Engine, worker_id: UUID, judge: Callable[..., None]) -> None:
    """If another worker takes all confirming probes, only regular ones follow."""
    other = uuid4()
    workers.register(engine, id=other, name="cpu-0@there", host="there", pid=1, lanes=["cpu"], device="cpu")
    judged(engine, judge, ProbeKind.HONEST, ended(Category.WRONG_VALUES))
    submitted = 0
    while found := step(engine).submitted:
        judge(found[0], passed(), by=other)
        submitted += 1
    assert submitted == 2 * probes._CONFIRMING
    assert probes.pauses(engine) == []


def test_a_lost_worker_shows_nothing(engine: Engine, worker_id: UUID, judge: Callable[..., None]) -> None:
    """A lost worker's second try counts only by its own outcome."""
    lost = probes.submit(engine, "cpu", ProbeKind.CHEAT)
    claimed = evaluations.claim(engine, lost, worker_id=worker_id, lease_s=30)
    assert claimed is not None
    finish(engine, claimed, ended(Category.WORKER_LOST))
    assert step(engine).settled == ()
    judge(lost, ended(Category.WRONG_VALUES))
    [settled] = step(engine).settled
    assert (settled.finding, settled.worker) == (Finding.AGREED, "cpu-0@here")
    for outcome in (ended(Category.JUDGE_ERROR), ended(Category.TIMEOUT)):
        for _ in range(3):
            identity = probes.submit(engine, "cpu", ProbeKind.HONEST)
            change(
                engine,
                "UPDATE evaluations SET settings = settings || '{\"max_attempts\": 1}' WHERE id = :id",
                id=identity,
            )
            judge(identity, outcome)
            assert [one.finding for one in step(engine, share=0).settled] == [Finding.VOID]
    evaluations.cancel(engine, probes.submit(engine, "cpu", ProbeKind.HONEST))
    assert [one.finding for one in step(engine, share=0).settled] == [Finding.VOID]
    assert probes.pauses(engine) == []
    known = probes.Record.read(engine, live_s=LIVE_S)
    assert (known.judged, known.void, known.wrong) == (1, 7, 0)


def test_a_gpu_is_quarantined_until_an_operator_resumes_it(engine: Engine, judge: Callable[..., None]) -> None:
    """No self-test returns it, not even one that had already begun, and a drained GPU stays drained."""
    uuid, mine = "GPU-1", uuid4()
    gpus.register(engine, host="here", index=0, uuid=uuid, name="none")
    workers.register(engine, id=mine, name="gpu0-0@here", host="here", pid=1, lanes=["cpu"], device=uuid)
    test = partial(gpus.ask_for_test, engine, uuid, reason="a sign")
    [pause] = judged(engine, judge, ProbeKind.CHEAT, passed(), by=mine, meanwhile=test).paused
    gpus.record_pass(engine, uuid)
    gpus.postpone(engine, uuid, reason="no room", seconds=0)
    [known] = gpus.find(engine)
    assert (known.state, known.reason, known.due) == (GpuState.QUARANTINED, pause.reason, False)
    assert probes.held(engine, "here") is None
    gpus.resume(engine, uuid)
    assert gpus.find(engine)[0].state == GpuState.SERVING
    assert probes.pauses(engine) == []
    workers.pause(engine, {mine: None})
    drain = partial(gpus.drain, engine, uuid, reason="mine")
    judged(engine, judge, ProbeKind.CHEAT, passed(), by=mine, meanwhile=drain)
    assert gpus.find(engine)[0].reason == "mine"


def test_no_report_counts_them(engine: Engine, judge: Callable[..., None], worker_id: UUID) -> None:
    """No report lists or charges probes, and retention removes them and their problems but keeps their record."""
    identity = probes.submit(engine, "cpu", ProbeKind.KNOWN_DURATION)
    assert reports.crowds(engine) == []
    assert reports.backlog(engine) == {}
    assert reports.unfinished(engine) == []
    judge(identity, passed(runtime=measurement(25.0)))
    step(engine, share=0)
    assert reports.states(engine) == {}
    assert reports.outcomes(engine) == {}
    assert reports.results(engine) == reports.listing(engine) == []
    assert reports.best(engine) == []
    assert reports.cost(engine, by=reports.By.PRODUCER, since=PAST) == []
    assert reports.ended(engine, [identity]) == []
    assert reports.problems(engine, limit=10) == []
    assert reports.attempts_by_device(engine, since=PAST) == {}
    assert [count(engine, view) for view in ("evaluation_overview", "outcomes", "best_verdicts")] == [0, 0, 0]
    assert count(engine, "shares") == 0
    change(engine, "UPDATE verdicts SET finished_at = now() - interval '2 days'")
    assert retention.prune(engine, retention_days=1, log_retention_days=None).problems == 1
    assert (count(engine, "evaluations"), count(engine, "probes")) == (0, 1)


def test_what_was_removed_shows_nothing(engine: Engine, worker_id: UUID) -> None:
    change(engine, "DELETE FROM evaluations WHERE id = :id", id=probes.submit(engine, "cpu", ProbeKind.HONEST))
    assert [one.finding for one in step(engine).settled] == [Finding.VOID]


def test_the_record_tells_what_clocks_were_off_by(engine: Engine, judge: Callable[..., None], worker_id: UUID) -> None:
    """The record has the median and the worst deviation, and the workers without a probe."""
    workers.register(engine, id=uuid4(), name="cpu-1@here", host="here", pid=2, lanes=["cpu"], device="cpu")
    for shortest in (30.0, 31.0, 33.0):
        identity = probes.submit(engine, "cpu", ProbeKind.KNOWN_DURATION)
        change(engine, "UPDATE probes SET duration_ms = 30 WHERE evaluation_id = :id", id=identity)
        times = {"min_ms": shortest, "overhead_ms": 0.1}
        runtime, baseline = (measurement(shortest).model_copy(update=times | more) for more in ({}, {"min_ms": 60.0}))
        judge(identity, passed(runtime=runtime, baseline=baseline))
        step(engine, share=0)
    known = probes.Record.read(engine, live_s=LIVE_S)
    assert known.findings == {Finding.AGREED: 3}
    [clock] = known.clocks
    assert (clock.resource, clock.kernels) == ("cpu", 3)
    assert (clock.bias, clock.worst) == (pytest.approx(1 / 30), pytest.approx(0.1))
    assert known.unmet == ("cpu-1@here",)
