"""The references' own times, cached for each problem, environment and way of measuring."""

from __future__ import annotations

from sqlalchemy import Engine, select
from sqlalchemy.dialects.postgresql import insert

from kqueue.contract import Measurement
from kqueue.store import clean
from kqueue.store.engine import transaction
from kqueue.store.models import Baseline


def get(engine: Engine, problem_hash: str, environment_hash: str, settings_key: str) -> Measurement | None:
    """The cached time; None where there is none.

    Raises:
        DatabaseUnavailable: Postgres cannot be used.
    """
    with transaction(engine) as connection:
        found = connection.scalar(
            select(Baseline.measurement).where(
                Baseline.problem_hash == problem_hash,
                Baseline.environment_hash == environment_hash,
                Baseline.settings_key == settings_key,
            )
        )
    return None if found is None else Measurement.model_validate(found)


def put(engine: Engine, problem_hash: str, environment_hash: str, settings_key: str, measurement: Measurement) -> None:
    """Cache a time. The first one stays, so that all speedups in an environment share one base.

    Raises:
        DatabaseUnavailable: Postgres cannot be used.
    """
    with transaction(engine) as connection:
        connection.execute(
            insert(Baseline)
            .values(
                problem_hash=problem_hash,
                environment_hash=environment_hash,
                settings_key=settings_key,
                measurement=clean.json(measurement.model_dump()),
            )
            .on_conflict_do_nothing()
        )
