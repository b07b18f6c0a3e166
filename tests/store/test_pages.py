"""Queries of the pages: problems, batches, searches, and words."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from typing import Any
from uuid import UUID

import pytest
from sqlalchemy import Engine, text

from kqueue.categories import Category
from kqueue.contract import Request
from kqueue.errors import UnknownProblem
from kqueue.states import Trials
from kqueue.store import evaluations, reports, retention, searches
from kqueue.store.engine import connect, together, transaction
from kqueue.store.reports import batches, boards, curves, texts
from kqueue.store.reports.texts import Where
from tests.samples import ended
from tests.store.steps import change

Judge = Callable[..., UUID]


@pytest.fixture
def problem_hash(fields) -> str:
    """The hash of the problem in all requests of this module."""
    return Request(**fields()).problem_hash


def test_a_kernel_has_one_line_with_its_median_time(engine: Engine, judged: Judge, problem_hash: str) -> None:
    """The largest speedup is first. Failed, untimed, reused and other problems' kernels are left out."""
    judged(Category.PASSED, 1, 5, kernel_label="slow", producer="ada")
    judged(Category.PASSED, 2, 0.1, kernel_label="fast", producer="bob")
    judged(Category.PASSED, 2, 4, kernel_label="fast", producer="bob")
    middle = judged(Category.PASSED, 2, 2, kernel_label="fast", producer="eve")
    judged(Category.PASSED, 3)
    judged(Category.CRASHED, 4)
    judged(Category.PASSED, 5, 1, problem="class Model: other")
    copy = judged(Category.PASSED, 2, 1)
    change(engine, "UPDATE verdicts SET reused_from = :best WHERE evaluation_id = :copy", best=middle, copy=copy)
    first, second = boards.leaderboard(engine, problem_hash)
    assert (first.kernel_label, first.runtime_ms, first.speedup, first.evaluation_id) == ("fast", 2, 5, middle)
    assert (first.measured, first.producer, first.backend, first.device) == (3, "eve", "torch", "cpu")
    assert (first.slowest, first.fastest) == (2.5, 100)
    assert (first.q1_ms, first.q3_ms, first.baseline_ms, first.compiled_ms) == (1.8, 2.2, 10, None)
    assert (second.kernel_label, second.measured) == ("slow", 1)
    assert [line.kernel_label for line in boards.leaderboard(engine, problem_hash, limit=1)] == ["fast"]


def test_records_are_what_was_faster_than_all_before(engine: Engine, judged: Judge, problem_hash: str) -> None:
    """The first of equal medians is a record. Failed, reused, lucky and other problems' results are left out."""
    assert boards.records(engine, problem_hash) == []
    given = [judged(Category.PASSED, number, runtime_ms) for number, runtime_ms in enumerate((5, 8, 4, 4, 2, 2.5, 2))]
    judged(Category.PASSED, 8)
    judged(Category.CRASHED, 9)
    judged(Category.PASSED, 10, 1, problem="class Model: other")
    copy = judged(Category.PASSED, 11, 1)
    change(engine, "UPDATE verdicts SET reused_from = :best WHERE evaluation_id = :copy", best=given[0], copy=copy)
    given += [judged(Category.PASSED, 12, runtime_ms) for runtime_ms in (0.1, 9)]
    expected = [(given[4], 5.0), (given[2], 2.5), (given[0], 2.0)]
    assert [(record.evaluation_id, record.speedup) for record in boards.records(engine, problem_hash)] == expected
    assert [record.evaluation_id for record in boards.records(engine, problem_hash, limit=2)] == [given[4], given[2]]
    assert [point.speedup for point in curves.best_so_far(engine, problem_hash)][-2:] == [pytest.approx(10 / 9)] * 2
    slowest = boards.leaderboard(engine, problem_hash)[-1]
    assert slowest.evaluation_id == boards.evaluation_of(engine, slowest.kernel_hash) == given[-1]
    # Ids decide at equal times, for example within one transaction.
    timed = "reused_from IS NULL AND speedup IS NOT NULL"
    change(engine, f"UPDATE verdicts SET finished_at = '2026-01-01', speedup = 1 WHERE {timed}")
    [record] = boards.records(engine, problem_hash)
    assert record.evaluation_id == min(given)


def test_of_many_batches_the_latest_are_found(engine: Engine, fields) -> None:
    """A row's delay of a second hides no batch, and the order of names has no effect."""
    evaluations.submit(engine, [Request(**fields(0, batch="zz"))])
    evaluations.submit(engine, [Request(**fields(number, batch=f"b{number:03d}")) for number in range(1, 130)])
    change(engine, "UPDATE evaluations SET submitted_at = now() - interval '1 h' WHERE batch <> 'zz'")
    change(engine, "UPDATE batches SET last_at = now() - interval '1 h' WHERE name <> 'zz'")
    assert [one.name for one in batches.known_batches(engine, limit=1)] == ["zz"]
    evaluations.submit(engine, [Request(**fields(1, batch="b007"))])
    found = batches.known_batches(engine, limit=3)
    assert [(one.name, one.evaluations) for one in found] == [("b007", 2), ("zz", 1), ("b001", 1)]


def test_a_batch_is_forgotten_with_its_last_evaluation(engine: Engine, judged: Judge) -> None:
    """Its row is removed after its last evaluation, unless a new evaluation could still follow."""
    judged(Category.PASSED, 1, batch="b")
    judged(Category.PASSED, 2, batch="b")
    some = "evaluation_id = (SELECT id FROM evaluations LIMIT 1)"
    change(engine, f"UPDATE verdicts SET finished_at = now() - interval '1 day' WHERE {some}")
    change(engine, "UPDATE batches SET last_at = now() - interval '2 h'")
    retention.prune(engine, retention_days=0.5, log_retention_days=None)
    assert [one.evaluations for one in batches.known_batches(engine)] == [1]
    change(engine, "UPDATE verdicts SET finished_at = now() - interval '1 day'")
    change(engine, "UPDATE batches SET last_at = now()")
    retention.prune(engine, retention_days=0.5, log_retention_days=None)
    assert batches.known_batches(engine) == []
    assert _rows(engine, "SELECT name FROM batches") == [("b",)]
    judged(Category.PASSED, 3, batch="b")
    change(engine, "UPDATE verdicts SET finished_at = now() - interval '1 day'")
    change(engine, "UPDATE batches SET last_at = now() - interval '2 h'")
    retention.prune(engine, retention_days=0.5, log_retention_days=None)
    assert _rows(engine, "SELECT name FROM batches") == []


def test_summaries_tell_what_verdicts_do(engine: Engine, judged: Judge, worker_id: UUID, fields) -> None:
    """Every way to end an evaluation or to change its verdict updates the summary. Queued ones and probes have none."""
    judged(Category.PASSED, 1, 5, batch="b")
    failed = judged(Category.CRASHED, 2, log="it died")
    [waits, cancelled, late] = evaluations.submit(
        engine, [Request(**fields(3)), Request(**fields(4, batch="b")), Request(**fields(5, queue_wait_s=1))]
    )
    evaluations.cancel(engine, cancelled.evaluation_id)
    change(engine, "UPDATE evaluations SET expires_at = now() WHERE id = :id", id=late.evaluation_id)
    assert evaluations.expire_queued(engine) == 1
    assert _apart(engine) == []
    assert len(_rows(engine, "SELECT FROM summaries")) == 4
    change(engine, "UPDATE verdicts SET speedup = 7, finished_at = now() - interval '1 day' WHERE speedup IS NOT NULL")
    assert _rows(engine, "SELECT speedup FROM summaries WHERE batch = 'b' AND category = 'passed'") == [(7.0,)]
    change(engine, "UPDATE evaluations SET probe = true WHERE id = :id", id=waits.evaluation_id)
    assert evaluations.claim(engine, waits.evaluation_id, worker_id=worker_id, lease_s=30) is not None
    evaluations.finish(engine, waits.evaluation_id, 1, ended(Category.CRASHED), written_by="judge", retry_delay_s=0)
    assert _apart(engine) == []
    assert retention.prune(engine, retention_days=0.5, log_retention_days=0).logs == 4
    assert _apart(engine) == []
    assert sorted(_rows(engine, "SELECT category FROM summaries")) == [("cancelled",), ("crashed",), ("expired",)]
    change(engine, "DELETE FROM verdicts WHERE evaluation_id = :id", id=failed)
    assert _apart(engine) == []


_TOLD = """
SELECT v.evaluation_id, e.problem_hash, e.kernel_hash, e.batch, v.category, v.runtime_ms, v.speedup,
       v.reused_from IS NOT NULL, v.finished_at, e.owner
FROM verdicts AS v JOIN evaluations AS e ON e.id = v.evaluation_id WHERE NOT e.probe
"""


def _rows(engine: Engine, query: str) -> list[tuple[Any, ...]]:
    with engine.connect() as connection:
        return [tuple(row) for row in connection.execute(text(query))]


def _apart(engine: Engine) -> list[tuple[Any, ...]]:
    """Return the differences between the summaries and their verdicts."""
    return _rows(engine, f"(TABLE summaries EXCEPT ({_TOLD})) UNION ALL (({_TOLD}) EXCEPT TABLE summaries)")


def test_what_is_read_together_is_one_transaction(engine: Engine, database_url: str) -> None:
    """A group of reads is one transaction per thread and database, and an error in it ends the group."""
    other = connect(database_url, application="tests", pool_size=1)

    def number(of: Engine = engine) -> int:
        with transaction(of) as connection:
            return connection.scalars(text("SELECT pg_current_xact_id()::text::bigint")).one()

    try:
        with ThreadPoolExecutor(1) as pool:
            with together(engine):
                one = number()
                assert number() == one
                assert one not in {number(other), pool.submit(number).result()}
            assert number() != one
            with pytest.raises(UnknownProblem), together(engine):
                reports.problem(engine, "0" * 64)
            assert number() != number()
    finally:
        other.dispose()


class TestWords:
    def names(self, engine: Engine, asked: str, where: Where = Where.KERNELS) -> list[str]:
        return [hit.name for hit in texts.search(engine, asked, where)]

    def test_identifiers_are_split_by_what_is_no_letter(self, engine: Engine, judged: Judge, fields) -> None:
        """A call is found by its parts in any order and case, but not by other words."""
        kernel = "class ModelNew:\n  y = tl.load(x_ptr + 1e-5)  # <b>bold</b> https://example.org/a/b"
        identity = judged(Category.PASSED, kernel=kernel, kernel_label="mine")
        judged(Category.PASSED, 7)
        mine = Request(**fields(kernel=kernel)).kernel_hash
        for asked in ("tl.load", "LOAD tl", "x_ptr", "ptr", "loa*", "bold", "example.org/a", "1e", "class load("):
            assert self.names(engine, asked) == [mine], asked
        for asked in ("tl.store", "loa", "loads", "oad", "relu*"):
            assert self.names(engine, asked) == [], asked
        [hit] = texts.search(engine, "tl.load", Where.KERNELS)
        assert (hit.label, hit.evaluation_id, hit.text) == ("mine", identity, kernel)

    def test_a_source_may_be_of_any_kind(self, engine: Engine, judged: Judge, fields) -> None:
        """A source of many different or very long words can be submitted, and its beginning is found."""
        many = "class ModelNew: first\n" + " ".join(f"w{number:x}é漢" for number in range(90_000))
        long = "class ModelNew: second\n" + "x" * 500_000
        for kernel, word in ((many, "first"), (long, "second")):
            judged(Category.PASSED, kernel=kernel)
            assert self.names(engine, word) == [Request(**fields(kernel=kernel)).kernel_hash]


def test_indexes_on_words_are_used(engine: Engine) -> None:
    """The search's expression equals the indexes'. With another one Postgres would read every source."""
    with engine.connect() as connection:
        connection.execute(text("SET enable_seqscan = off"))
        connection.execute(text("SET enable_indexscan = off"))
        for table, of in (("problems", "source"), ("verdicts", "log")):
            more = " AND log <> ''" if of == "log" else ""
            query = f"EXPLAIN SELECT 1 FROM {table} WHERE {texts._fits(f'{table}.{of}').text}{more}"
            plan = "\n".join(connection.scalars(text(query), {"wanted": "'x'"}))
            assert f"ix_{table}_words" in plan, plan


def test_leaderboards_have_no_times_for_rewards(engine: Engine, judged: Judge, problem_hash: str) -> None:
    ranked, coarse = judged(Category.PASSED, 1, 5), judged(Category.PASSED, 2, 0.1)
    with engine.begin() as connection:
        coarser = text("UPDATE verdicts SET runtime = runtime || cast(:new AS jsonb) WHERE evaluation_id = :id")
        connection.execute(coarser, {"id": coarse, "new": '{"purpose": "train"}'})
    for lines in (boards.leaderboard(engine, problem_hash), reports.best(engine)):
        assert [one.evaluation_id for one in lines] == [ranked]


def test_trials_are_left_out_unless_asked_for(engine: Engine, judged: Judge, problem_hash: str) -> None:
    """Lists, rates, exports, searches and rankings have no autopsies, duels and tunings. A batch has its own times."""
    mine = judged(Category.PASSED, 1, 5, batch="mine")
    searches.create(engine, "my-run", {"algorithm": "tune"})
    trials = {judged(Category.PASSED, 1, 0.1, batch=name) for name in ("autopsy-1", "duel-2", "tune-3", "my-run")}
    trials.add(judged(Category.CRASHED, 2, problem="class Model: smaller", batch="autopsy-1"))
    every = {mine, judged(Category.PASSED, 1, 4, batch="other")}
    for asked, wanted in {None: every, Trials.WITH: every | trials, Trials.ONLY: trials}.items():
        assert {row.evaluation_id for row in reports.listing(engine, trials=asked)} == wanted
        assert {row.evaluation_id for row in reports.results(engine, trials=asked)} == wanted
    spans: dict[str, Any] = dict.fromkeys(("since", "until", "after"))
    exported = [row.evaluation_id for some in reports.trajectories(engine, **spans, limit=9) for row in some]
    assert {UUID(str(one)) for one in exported} == every
    assert len(reports.listing(engine, batch="duel-2")) == 1
    assert reports.outcomes(engine) == {Category.PASSED: 2}
    assert sum(day.total for day in reports.days(engine, since=datetime(2026, 1, 1, tzinfo=UTC))) == 2
    assert {one.name for one in batches.known_batches(engine)} == {"mine", "other"}
    assert [one.name for one in batches.known_batches(engine, beginning="duel")] == ["duel-2"]
    assert [one.problem_hash for one in boards.used_problems(engine)] == [problem_hash]
    assert not texts.search(engine, "smaller", Where.PROBLEMS)
    for ranked in (boards.ranking(engine), boards.leaderboard(engine, problem_hash), reports.best(engine)):
        assert [(one.speedup, one.measured) for one in ranked] == [(2.0, 2)]
    assert {point.evaluation_id for point in curves.best_so_far(engine, problem_hash)} == every
    for ranked in (boards.best_of_batch(engine, "mine"), boards.ranking(engine, batch="mine")):
        assert [(one.evaluation_id, one.measured) for one in ranked] == [(mine, 1)]
