"""The cache of baselines."""

from __future__ import annotations

from sqlalchemy import Engine

from kqueue.store import baselines, evaluations
from tests.store.steps import ENVIRONMENT, measured


def test_the_first_baseline_stays(engine: Engine, submit, claim) -> None:
    """All speedups in an environment share one base."""
    claimed = claim(submit())
    environment = evaluations.set_environment(engine, claimed.attempt_id, ENVIRONMENT, conditions="")
    key = (claimed.request.problem_hash, environment, "fp32")
    assert baselines.get(engine, *key) is None
    baselines.put(engine, *key, measured(1.0))
    baselines.put(engine, *key, measured(2.0))
    assert baselines.get(engine, *key) == measured(1.0)
