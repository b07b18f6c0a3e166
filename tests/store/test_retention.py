"""Removal by age, and the data it keeps."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import replace
from typing import Any
from uuid import UUID

import pytest
from sqlalchemy import Engine, text

from kqueue import broker
from kqueue.categories import Category
from kqueue.config import Config, load
from kqueue.contract import TREE_LINE, Request
from kqueue.errors import InvalidRequest, UnknownProblem
from kqueue.evidence import Evidence
from kqueue.store import baselines, evaluations, workers
from kqueue.store.retention import Pruned, prune
from kqueue.sweeper import sweep
from tests.samples import ended, measurement
from tests.store.steps import change, count

OUTCOME = ended(
    Category.CRASHED, message="it died", log="a long story\n", evidence=Evidence(checks=5, traceback="x" * 1001)
)


@pytest.fixture
def judged(engine: Engine, conclude: Callable[..., UUID]) -> Callable[..., UUID]:
    """Return a function that makes an evaluation with a verdict of that age in days."""

    def one(days: float, number: int = 0, **changes: object) -> UUID:
        identity = conclude(OUTCOME, number, **changes)
        statement = "UPDATE verdicts SET finished_at = now() - make_interval(secs => :s) WHERE evaluation_id = :id"
        change(engine, statement, s=days * 86400, id=identity)
        return identity

    return one


def test_nothing_goes_by_default(engine: Engine, judged) -> None:
    """Without the settings all data of any age are kept."""
    judged(10_000)
    assert not prune(engine, retention_days=None, log_retention_days=None)
    tables = ("evaluations", "attempts", "verdicts", "problems", "kernels", "environments", "workers")
    assert [count(engine, table) for table in tables] == [1] * 7


def test_old_evaluations_go_with_what_nobody_else_needs(engine: Engine, judged, fields) -> None:
    """Sources are removed with their last evaluation. Environments and queued evaluations stay."""
    judged(8, 0)
    judged(8, 1)
    young = judged(6, 1)
    [waiting] = evaluations.submit(engine, [Request(**fields(2))])
    assert prune(engine, retention_days=7, log_retention_days=None) == Pruned(evaluations=2, kernels=1)
    assert evaluations.existing(engine, [young, waiting.evaluation_id]) == {young, waiting.evaluation_id}
    assert count(engine, "environments") == 1
    assert not prune(engine, retention_days=7, log_retention_days=None)


def test_a_problem_with_a_baseline_stays(engine: Engine, judged, fields) -> None:
    """All speedups in an environment share one baseline, including future ones."""
    judged(8)
    request = Request(**fields())
    with engine.connect() as connection:
        environment = connection.scalars(text("SELECT hash FROM environments")).one()
    baselines.put(engine, request.problem_hash, environment, "key", measurement(1.0))
    assert prune(engine, retention_days=7, log_retention_days=None) == Pruned(evaluations=1, kernels=1)
    assert count(engine, "problems") == count(engine, "baselines") == 1


def test_old_logs_are_emptied_once_and_the_verdict_stays(engine: Engine, judged) -> None:
    """Log and long evidence are removed, also from attempts. Category, facts, times and short evidence stay."""
    old, young = judged(2, 0), judged(0.5, 1)
    assert prune(engine, retention_days=None, log_retention_days=1) == Pruned(logs=1)
    assert not prune(engine, retention_days=None, log_retention_days=1)
    emptied, whole = evaluations.verdict(engine, old), evaluations.verdict(engine, young)
    assert (emptied.log, emptied.category, emptied.facts) == ("", OUTCOME.category, OUTCOME.facts)
    assert emptied.evidence.emptied_at is not None
    assert emptied.evidence == Evidence(checks=5, emptied_at=emptied.evidence.emptied_at)
    assert (whole.log, whole.evidence) == (OUTCOME.log, OUTCOME.evidence)
    with engine.connect() as connection:
        kept = connection.execute(
            text("SELECT evaluation_id, outcome FROM attempts WHERE NOT outcome ? 'log' AND NOT outcome ? 'evidence'")
        ).all()
    assert [(row.evaluation_id, row.outcome["message"]) for row in kept] == [(old, OUTCOME.message)]


def test_workers_that_left_nothing_behind_are_forgotten(engine: Engine, judged, worker_id: UUID) -> None:
    """A stopped worker is removed after a week if it has no attempts, and a live one never."""
    judged(8)
    change(engine, "UPDATE workers SET stopped_at = now() - interval '8 days'")
    assert not prune(engine, retention_days=None, log_retention_days=None)
    assert prune(engine, retention_days=7, log_retention_days=None).workers == 1
    workers.register(engine, id=worker_id, name="cpu-0@here", host="here", pid=1, lanes=["cpu"], device="cpu")
    assert not prune(engine, retention_days=7, log_retention_days=None)


def test_the_sweeper_prunes_in_bites(engine: Engine, config: Config, judged) -> None:
    """With the settings it removes a part every few seconds, and not at every sweep."""
    judged(8)
    with broker.make_app(config) as app:
        assert not sweep(engine, app, retry_delay_s=1).pruned
        with app.connection_for_read() as connection:
            client = connection.default_channel.client
            assert client.ttl("kqueue.sweeper.prune") > 0
            assert not sweep(engine, app, retry_delay_s=1, config=load(retention_days=7)).pruned
            client.delete("kqueue.sweeper.prune")
        assert sweep(engine, app, retry_delay_s=1, config=load(retention_days=7)).pruned.evaluations == 1


def test_a_sweeper_that_may_not_remove_does_the_rest(
    engine: Engine, database_url: str, config: Config, judged, caplog: pytest.LogCaptureFixture
) -> None:
    """A login without that right logs it once, and does all other work."""
    judged(8)
    with engine.begin() as connection:
        # The owner cannot revoke rights from itself permanently, so a trigger raises the error of a missing right.
        connection.execute(
            text(
                "CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS "
                "$$ BEGIN RAISE insufficient_privilege USING MESSAGE = 'permission denied to sweepers'; END $$"
            )
        )
        connection.execute(
            text("CREATE TRIGGER refuse BEFORE DELETE ON verdicts FOR EACH ROW EXECUTE FUNCTION refuse()")
        )
    with broker.make_app(config) as app:
        for _ in range(2):
            report = sweep(engine, app, retry_delay_s=1, config=load(retention_days=7))
            assert report.swept
            assert not report.pruned
            with app.connection_for_write() as connection:
                client: Any = connection.default_channel.client
                assert client.delete("kqueue.sweeper.prune") == 1
    assert caplog.text.count("could not be removed") == 1


TREE = TREE_LINE + "0 a.py\n\nAAAA\n"
NAME = hashlib.sha256(TREE.encode()).hexdigest()
IN_TREE = f"# kqueue tree sha256:{NAME}\nclass ModelNew: ..."


def test_a_tree_goes_with_its_last_kernel(engine: Engine, judged) -> None:
    """It is stored once, and stays while a source of its owner names it."""
    for days in (10, 8):
        judged(days, kernel=f"{IN_TREE} # {days}", trees=[TREE])
    change(engine, "UPDATE problems SET created_at = now() - interval '99 days'")
    assert count(engine, "problems") == 2
    assert prune(engine, retention_days=9, log_retention_days=None) == Pruned(evaluations=1, kernels=1)
    assert prune(engine, retention_days=7, log_retention_days=None) == Pruned(evaluations=1, problems=2, kernels=1)


def test_a_claim_has_the_trees_that_its_sources_name(engine: Engine, judged, fields) -> None:
    """A request can name a stored tree of its owner. An unknown one is refused, and the lack of one is told."""
    with pytest.raises(UnknownProblem) as unknown:
        evaluations.submit(engine, [Request(**fields(kernel=IN_TREE))])
    assert unknown.value.hashes == {NAME}
    judged(0, kernel=IN_TREE, trees=[TREE])
    [waiting] = evaluations.submit(engine, [Request(**fields(1, kernel=IN_TREE + "\n"))])
    with engine.connect() as connection:
        worker = connection.scalars(text("SELECT id FROM workers")).one()
    claimed = evaluations.claim(engine, waiting.evaluation_id, worker_id=worker, lease_s=60)
    assert claimed is not None
    assert claimed.request.tree_of(claimed.request.kernel) == TREE
    with pytest.raises(InvalidRequest, match="a tree that the sources name is not stored"):
        replace(claimed, stored={**claimed.stored, "trees": []}).request  # noqa: B018
