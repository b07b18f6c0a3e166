"""Queries of users: one evaluation, lists, counts, and the views."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import UUID, uuid4

import pytest
from sqlalchemy import Engine, text

from kqueue.categories import Blame, Category
from kqueue.contract import Request, Settings, rules_of
from kqueue.errors import InvalidRequest, UnknownEvaluation
from kqueue.store import evaluations, reports
from kqueue.store.engine import together, transaction
from kqueue.store.reports import boards
from tests.store.steps import change


def view(engine: Engine, name: str, order: str = "1") -> list[dict[str, Any]]:
    with engine.connect() as connection:
        return [dict(row) for row in connection.execute(text(f"SELECT * FROM {name} ORDER BY {order}")).mappings()]


def test_show(engine: Engine, judged) -> None:
    """It has sources, settings, attempts and the verdict, and an unknown id is an error."""
    retried = reports.show(engine, judged(Category.JUDGE_ERROR, 1))
    assert (retried.state, retried.verdict) == ("queued", None)
    assert [a.category for a in retried.attempts] == [Category.JUDGE_ERROR]
    with pytest.raises(UnknownEvaluation):
        reports.show(engine, uuid4())
    identity = judged(Category.PASSED, ms=5, problem_label="p", kernel_label="k", batch="b")
    detail = reports.show(engine, identity)
    assert (detail.state, detail.lane, detail.backend, detail.batch) == ("done", "cpu", "torch", "b")
    assert (detail.problem, detail.kernel) == ("class Model: ...", "class ModelNew: number = 0")
    assert detail.verdict == evaluations.verdict(engine, identity)
    (attempt,) = detail.attempts
    assert (attempt.number, attempt.worker, attempt.category) == (1, "cpu-0@here", Category.PASSED)
    assert attempt.environment is not None
    assert attempt.environment["device"] == "cpu"


def test_resolve_id(engine: Engine, fields) -> None:
    """A full id or a sufficient prefix is accepted, and an ambiguous one is refused."""
    identity = evaluations.submit(engine, [Request(**fields())])[0].evaluation_id
    for given in (str(identity), identity.hex[:4], str(identity)[:13], identity.hex.upper()):
        assert reports.resolve_id(engine, given) == identity
    for given in ("", identity.hex[:3], "nonsense", "%%%%", identity.hex + "0"):
        with pytest.raises(InvalidRequest, match="first 4 digits"):
            reports.resolve_id(engine, given)
    with pytest.raises(UnknownEvaluation):
        reports.resolve_id(engine, str(uuid4()))
    twin = UUID(identity.hex[:31] + ("0" if identity.hex[31] != "0" else "1"))
    change(
        engine,
        "INSERT INTO evaluations (id, problem_hash, kernel_hash, lane, settings) "
        "SELECT :twin, problem_hash, kernel_hash, lane, settings FROM evaluations",
        twin=twin,
    )
    with pytest.raises(InvalidRequest, match="several"):
        reports.resolve_id(engine, identity.hex[:8])
    assert reports.resolve_id(engine, str(identity)) == identity


def test_results_and_their_filters(engine: Engine, judged) -> None:
    """The latest is first, and each filter selects its matches."""
    slow = judged(Category.PASSED, 1, ms=5, problem_label="soft_max", batch="b")
    crash = judged(Category.CRASHED, 2, problem="class Model: other", backend="cpp")
    now = datetime.now(UTC)

    def ids(**filters: Any) -> list[UUID]:
        return [result.evaluation_id for result in reports.results(engine, **filters)]

    assert ids() == [crash, slow]
    assert ids(limit=1) == [crash]
    assert ids(category=Category.PASSED) == ids(blame=Blame.NONE) == ids(batch="b") == ids(problem="soft_max") == [slow]
    assert ids(backend="cpp") == ids(category=Category.CRASHED) == [crash]
    passed = reports.results(engine, category=Category.PASSED)[0]
    assert ids(problem=passed.problem_hash[:10]) == [slow]
    assert ids(problem="soft%") == ids(problem="s_ft_max") == ids(since=now + timedelta(hours=1)) == []
    assert ids(since=now - timedelta(hours=1)) == [crash, slow]
    assert (passed.speedup, passed.device, passed.blame, passed.correctness) == (2.0, "cpu", Blame.NONE, True)


LOOSE = {"atol": 1e9, "rtol": 0.0}


@pytest.mark.parametrize("loose", [{"tolerance": LOOSE, "policies": {"buffers": "allow"}}, {"tolerances": [LOOSE]}])
def test_rankings_set_verdicts_by_other_settings_apart(engine: Engine, judged, loose: dict[str, Any]) -> None:
    """A verdict by other settings than usual has its own line, behind the rest, and is no best verdict or record."""
    usual = {"limits": {"processes": 99}}
    for ms, settings in ((2, usual), (1, loose), (3, loose)):
        judged(Category.PASSED, 1, ms=ms, settings=settings)
    judged(Category.PASSED, 2, ms=1, settings=loose)
    assert [row["runtime_ms"] for row in view(engine, "best_verdicts")] == [2]
    assert [one.speedup for one in boards.records(engine, boards.ranking(engine)[0].problem_hash)] == [5.0]
    rules = rules_of(Settings.model_validate(loose).model_dump(mode="json"))
    assert {*rules} == {*loose, *loose.get("policies", {})} - {"policies"}
    rows = boards.ranking(engine)
    assert [(row.runtime_ms, row.measured, row.settings) for row in rows] == [(2, 1, {}), (1, 1, rules), (3, 2, rules)]
    with together(engine), transaction(engine) as connection:
        connection.execute(text("SET LOCAL track_functions = 'all'"))  # rules are found once for equal settings
        assert boards.ranking(engine) == rows
        assert connection.scalar(text("SELECT pg_stat_get_xact_function_calls('kqueue_rules'::regproc)")) == 2


class TestViews:
    """The documented views need no joins."""

    def test_outcomes_and_best_verdicts(self, engine: Engine, judged) -> None:
        """They count by lane, backend, category and blame, and list a problem's fastest passed kernel on a device."""
        judged(Category.PASSED, 1, ms=5, kernel_label="slow", batch="b")
        judged(Category.PASSED, 1, ms=0.1, kernel_label="slow")
        judged(Category.PASSED, 2, ms=2, kernel_label="fast")
        known = """runtime = runtime || '{"low_ms": 1.9, "high_ms": 2.1}',
            baseline = baseline || '{"low_ms": 9, "high_ms": 11}'"""
        change(engine, f"UPDATE verdicts SET {known} WHERE runtime_ms = 2")
        judged(Category.PASSED, 3, kernel_label="untimed")
        judged(Category.CRASHED, 4)
        columns = ("category", "blame", "backend", "lane", "evaluations")
        found = {tuple(row[column] for column in columns) for row in view(engine, "outcomes")}
        assert found == {("passed", "none", "torch", "cpu", 4), ("crashed", "candidate", "torch", "cpu", 1)}
        (best,) = view(engine, "best_verdicts")
        assert (best["kernel_label"], best["runtime_ms"], best["speedup"], best["device"]) == ("fast", 2, 5, "cpu")
        # The same median, interval and number of measurements are in rankings. A batch has its own measurements.
        fast, slow = boards.ranking(engine, blame=Blame.NONE, since=datetime.now(UTC) - timedelta(hours=1))
        names = ("kernel_label", "runtime_ms", "speedup", "speedup_low", "speedup_high", "measured")
        expected = ["fast", 2, 5, pytest.approx(4.497, abs=0.001), pytest.approx(5.559, abs=0.001), 1]
        assert [best[name] for name in names] == expected
        assert ([getattr(fast, name) for name in names], reports.best(engine, device="P")) == (expected, [fast])
        assert (slow.kernel_label, slow.speedup, slow.measured) == ("slow", 2, 2)
        [own] = boards.best_of_batch(engine, "b")
        assert [own] == boards.ranking(engine, batch="b")
        assert (own.kernel_label, own.measured) == ("slow", 1)
        assert boards.ranking(engine, problem="of nobody") == reports.best(engine, problem="g") == []

    def test_fleet_utilisation(self, engine: Engine, worker_id: UUID, judged, fields) -> None:
        """It has each worker's busy share of the last hour, up to its lease, and its current evaluation."""
        judged(Category.PASSED, 1)
        running = evaluations.submit(engine, [Request(**fields(2))])[0].evaluation_id
        evaluations.claim(engine, running, worker_id=worker_id, lease_s=30)
        change(engine, "UPDATE workers SET started_at = now() - interval '2 h'")
        change(engine, "UPDATE attempts SET started_at = now() - interval '30 min' WHERE ended_at IS NOT NULL")
        (worker,) = view(engine, "fleet_utilisation")
        assert (worker["alive"], worker["evaluations"], worker["current_evaluation"]) == (True, 1, running)
        assert worker["busy_share"] == pytest.approx(0.5, abs=0.02)
        change(engine, "UPDATE workers SET heartbeat_at = now() - interval '2 h'")
        assert view(engine, "fleet_utilisation") == []

    def test_evaluation_overview(self, engine: Engine, judged, fields) -> None:
        """Each evaluation has one wide row, done or not."""
        judged(Category.PASSED, 1, ms=5)
        evaluations.submit(engine, [Request(**fields(2))])
        done, queued = view(engine, "evaluation_overview", "submitted_at")
        names = ("category", "worker", "device", "precision")
        assert [done[name] for name in names] == ["passed", "cpu-0@here", "cpu", "fp32"]
        assert 0 <= done["queued_s"] <= done["total_s"]
        assert (queued["state"], queued["category"], queued["worker"]) == ("queued", None, None)
