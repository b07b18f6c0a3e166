"""The record of a judge's death and its writer: each row of the table in workers/delivery.py."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import text

from kqueue import broker
from kqueue.store import evaluations
from tests.chaos.rig import Whole
from tests.store.steps import change, unchecked

_ID = "00000000-0000-4000-8000-000000000000"
#: Settings that no version of kqueue writes.
_SETTINGS = (
    "[]",
    '"x"',
    "null",
    '{"max_attempts": "many"}',
    '{"max_attempts": 1e300}',
    '{"max_attempts": null}',
    '{"timing": {"max_error": 1e-300}}',
    '{"timing": {"max_error": 1e400}}',
    '{"checks": -1}',
    '{"seed": 99999999999999999999999999}',
    '{"limits": {"host_memory_bytes": 1}}',
    '{"deadlines": {"time_s": 0}}',
    '{"deadlines": 7}',
    '{"deadlines": {"time_s": "x", "load_s": 1e400}}',
    '{"profiles": {}}',
)

DEATHS = [
    # (what the judge does, Celery's limit, category, facts, who recorded)
    ("ok", None, "passed", {}, "judge"),
    ("wrong", None, "wrong_values", {}, "judge"),
    ("raise", None, "judge_error", {"exception": "ZeroDivisionError"}, "judge"),
    ("signal SIGSEGV", None, "judge_error", {"signal": "SIGSEGV"}, "worker"),
    ("exit 0", None, "judge_error", {"exit_status": 0}, "worker"),
    ("sysexit 3", None, "judge_error", {"exit_status": 3}, "worker"),
    ("signal SIGALRM", None, "judge_error", {"signal": "SIGALRM"}, "worker"),
    ("signal SIGKILL", None, "worker_lost", {"signal": "SIGKILL"}, "worker"),
    ("gil", 1, "judge_error", {"hard_limit": True}, "worker"),
    ("closefds", 1, "judge_error", {"hard_limit": True}, "worker"),
]


def test_a_death_is_recorded_once_with_its_facts(services: Any, fleet: Any) -> None:
    """Each end of a judge gives one verdict with category, facts and writer, and the next evaluation is judged."""
    ids = [services.submit(kernel, time_limit=limit) for kernel, limit, *_ in DEATHS]
    for identity, (kernel, _, category, facts, written_by) in zip(ids, DEATHS, strict=True):
        verdict = services.verdict(identity)
        assert (verdict.category, verdict.written_by, verdict.attempts) == (category, written_by, 1), kernel
        assert facts.items() <= verdict.facts.model_dump().items(), kernel
    assert len(Whole(services)(*ids, category=None, attempts=1)) == len(DEATHS)


def test_a_judge_that_dies_before_it_claims_leaves_the_evaluation_queued(services: Any, fleet: Any) -> None:
    """No attempt was begun, so none is recorded, and the next message starts the evaluation."""
    (services.directory / "die-before-claim").touch()
    evaluation = services.submit("ok")
    services.until(lambda: not (services.directory / "die-before-claim").exists())
    services.send(evaluation)
    Whole(services)(evaluation, attempts=1)


def test_a_judge_that_dies_right_after_its_claim_leaves_no_open_attempt(services: Any, fleet: Any) -> None:
    """The status page is still empty, but the attempt ends and is retried."""
    (services.directory / "die-after-claim").touch()
    attempts = Whole(services)(services.submit("ok", attempts=2), attempts=2)
    assert [a.category for a in attempts] == ["worker_lost", "passed"]


def test_a_kernel_that_kills_its_judges_is_tried_three_times(services: Any, fleet: Any) -> None:
    """An evaluation whose judge was killed is tried again, the third time exclusively, and then ends as suspected."""
    verdict = services.verdict(services.submit("signal SIGKILL", attempts=10))
    assert (verdict.category, verdict.attempts, verdict.facts.suspected) == ("worker_lost", 3, True)
    assert [told.category for told in verdict.evidence.attempts] == ["worker_lost"] * 2
    assert services.verdict(services.submit("ok")).passed


@pytest.mark.nightly
def test_a_suspect_is_judged_while_nobody_else_is(
    services: Any, fleet: Any, start_fleet: Callable[..., Any], tmp_path: Path
) -> None:
    """During a suspect's third try the second slot waits, and its evaluations are judged afterwards."""
    mine = start_fleet()
    suspect = services.submit(f"suspect {tmp_path / 'alone'} 1", attempts=3)
    others = [services.submit(f"span {tmp_path / 'others'} 0.2") for _ in range(6)]
    services.until(lambda: len(services.attempts(suspect)) == 3)
    others += [services.submit(f"span {tmp_path / 'others'} 0.2") for _ in range(4)]  # the other slot has work now
    verdict = services.verdict(suspect)
    assert (verdict.category, verdict.attempts, verdict.evidence.alone) == ("passed", 3, True)
    assert all(services.verdict(other).passed for other in others)
    mine.stop()
    [(begun, ended)] = _spans(tmp_path / "alone")
    spans = _spans(tmp_path / "others")
    assert len(spans) == 10
    assert [span for span in spans if span[0] < ended and span[1] > begun] == []


def _spans(file: Path) -> list[tuple[float, ...]]:
    return [tuple(map(float, line.split())) for line in file.read_text().splitlines()]


def test_a_claim_whose_answer_was_lost_is_handed_back(services: Any, fleet: Any) -> None:
    """The connection broke at the commit, so the worker hands back the attempt that it does not know."""
    (services.directory / "lose-the-claims-answer").touch()
    first, second = Whole(services)(services.submit("ok", attempts=1))
    assert (first.category, first.handed_back, second.category) == ("worker_lost", True, "passed")


def test_another_versions_schema_is_waited_out(services: Any, fleet: Any) -> None:
    """During a migration or a downgrade no evaluation begins or is lost, and no process ends."""
    worker, told = fleet.live()[0].id, len(fleet.log.read_text())
    change(services.engine, "ALTER TABLE evaluations RENAME COLUMN settings TO configuration")
    change(services.engine, "ALTER TABLE workers RENAME COLUMN heartbeat_at TO beaten_at")
    try:
        services.app.send_task("kqueue.evaluate", args=[_ID], task_id=_ID, queue=broker.queue("cpu"))
        # The reason is logged only once, because a short change of the tables looks the same at first.
        for line in (f"an evaluation waits for Postgres *.*evaluation={_ID}", "Postgres is away"):
            services.until(lambda line=line: re.search(line, fleet.log.read_text()[told:]), what=line)
        assert "lacks an object that this kqueue needs" in fleet.log.read_text()[told:]
    finally:
        change(services.engine, "ALTER TABLE evaluations RENAME COLUMN configuration TO settings")
        change(services.engine, "ALTER TABLE workers RENAME COLUMN beaten_at TO heartbeat_at")
    Whole(services)(services.submit("ok"), attempts=1)
    assert [w.id for w in fleet.live()] == [worker]


def test_a_request_of_another_version_is_the_fleets_failure(services: Any, fleet: Any) -> None:
    """The request is tried again, because another host can be newer, and the last error gives the reason."""
    evaluation = services.submit("ok", attempts=2, send=False)
    change(
        services.engine,
        """UPDATE evaluations SET settings = settings || '{"rounds": 3}' WHERE id = :id""",
        id=evaluation,
    )
    services.send(evaluation)
    verdict = services.verdict(evaluation)
    assert (verdict.category, verdict.attempts, verdict.written_by) == ("judge_error", 2, "judge")
    assert "settings.rounds" in verdict.message
    assert "different versions" in verdict.message
    Whole(services)(evaluation, category="judge_error")


def test_an_invalid_request_ends_once(services: Any, fleet: Any) -> None:
    """Rows that a producer's login wrote are never tried again, and no number of them ends a worker."""
    unchecked(services.engine, "kernels", "problems", "evaluations")
    worker = fleet.live()[0].id
    settings = [f"settings = cast('{value}' AS jsonb)" for value in _SETTINGS]
    rows = [*settings, "lane = 'cpu', problem_label = repeat('x', 300)", "batch = ''"]
    changes = [f"UPDATE evaluations SET {row} WHERE id = :id" for row in rows]
    wrong = "UPDATE {0}s SET source = source || ' ' WHERE hash = (SELECT {0}_hash FROM evaluations WHERE id = :id)"
    changes += [wrong.format(table) for table in ("kernel", "problem")]
    ids = [services.submit(f"ok {row}", problem=f"{row}", attempts=3, send=False) for row in changes]
    for statement, identity in zip(changes, ids, strict=True):
        change(services.engine, statement, id=identity)
        services.send(identity)
    for statement, identity in zip(changes, ids, strict=True):
        verdict = services.verdict(identity)
        assert (verdict.category, verdict.attempts) == ("invalid_request", 1), (statement, verdict)
    assert "source" in verdict.message
    Whole(services)(*ids, category="invalid_request", attempts=1)
    assert fleet.live()[0].id == worker


def test_a_slow_database_delays_no_kill_and_loses_no_verdict(services: Any, fleet: Any, tmp_path: Path) -> None:
    """At the hard limit the judge is killed first. A worker that cannot record it ends and hands the attempt back."""
    worker = fleet.live()[0].pid
    evaluation = services.submit(f"write {tmp_path / 'pid'} 600", time_limit=3)
    pid = int(services.until(lambda: _read(tmp_path / "pid")))
    with services.engine.begin() as connection:
        connection.execute(text("SELECT 1 FROM evaluations WHERE id = :id FOR UPDATE"), {"id": evaluation})
        services.until(lambda: not services.alive(pid))
        services.until(lambda: not services.alive(worker), what="the worker's end")
    Whole(services)(evaluation, category="worker_lost")


def test_nothing_that_a_task_left_behind_lives_on(services: Any, fleet: Any, tmp_path: Path) -> None:
    """A grandchild outside group and session dies with the task, but the worker's own children do not."""
    worker = fleet.live()[0].id
    assert services.verdict(services.submit(f"orphan {tmp_path / 'pid'}")).passed
    orphan = int((tmp_path / "pid").read_text())
    services.until(lambda: not services.alive(orphan))
    assert services.verdict(services.submit("ok")).passed
    assert fleet.live()[0].id == worker


def _read(path: Path) -> str:
    return path.read_text() if path.exists() else ""


def test_a_cancelled_evaluation_stops_at_once(services: Any, fleet: Any, tmp_path: Path) -> None:
    """Cancelling kills the judge, closes the attempt and leaves the slot free."""
    evaluation = services.submit(f"write {tmp_path / 'pid'} 600")
    pid = int(services.until(lambda: _read(tmp_path / "pid")))
    assert evaluations.cancel(services.engine, evaluation)
    broker.revoke(services.app, evaluation)
    services.until(lambda: not services.alive(pid))
    services.until(lambda: services.attempts(evaluation)[0].ended_at is not None)
    [attempt] = Whole(services)(evaluation, category="cancelled")
    assert attempt.category == "cancelled"


def test_a_revoked_queued_task_is_a_cancelled_evaluation(services: Any, fleet: Any, tmp_path: Path) -> None:
    """Flower's revoke button cancels a queued evaluation, which is not sent again."""
    running = services.submit(f"gate {tmp_path / 'gate'}")
    services.started(running)
    queued = services.submit("ok")
    broker.revoke(services.app, queued)
    # The worker takes orders in turn, so it has the first one when it answers the second.
    assert services.app.control.inspect(timeout=60, limit=1).ping()
    (tmp_path / "gate").touch()
    Whole(services)(queued, category="cancelled", attempts=0)
    Whole(services)(running, attempts=1)
