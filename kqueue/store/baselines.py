"""Baselines: cached times of the references, by problem, environment and timing settings.

Every function is one transaction and raises :class:`~kqueue.errors.DatabaseUnavailable` if Postgres cannot be used.
"""

from __future__ import annotations

from sqlalchemy import Engine, select
from sqlalchemy.dialects.postgresql import insert

from kqueue.evidence import Measurement
from kqueue.store import clean
from kqueue.store.engine import transaction
from kqueue.store.models import LOCAL, Baseline


def get(
    engine: Engine, problem_hash: str, environment_hash: str, settings_key: str, *, owner: str = LOCAL
) -> Measurement | None:
    """Return the cached time, or None. Owners share no times, which would reveal that another one has the problem."""
    with transaction(engine) as connection:
        measurement = connection.scalar(
            select(Baseline.measurement).where(
                Baseline.problem_hash == problem_hash,
                Baseline.environment_hash == environment_hash,
                Baseline.settings_key == _key(settings_key, owner),
            )
        )
    return None if measurement is None else Measurement.model_validate(measurement)


def put(
    engine: Engine,
    problem_hash: str,
    environment_hash: str,
    settings_key: str,
    measurement: Measurement,
    *,
    owner: str = LOCAL,
    replace: bool = False,
) -> None:
    """Cache a time. An existing one is kept, so that all speedups in an environment share one baseline.

    ``replace`` overwrites an existing time, because it is no longer valid.
    """
    with transaction(engine) as connection:
        row = insert(Baseline).values(
            problem_hash=problem_hash,
            environment_hash=environment_hash,
            settings_key=_key(settings_key, owner),
            owner=owner,
            measurement=clean.json(measurement.model_dump()),
        )
        key = [Baseline.problem_hash, Baseline.environment_hash, Baseline.settings_key]
        connection.execute(
            row.on_conflict_do_update(index_elements=key, set_={"measurement": row.excluded.measurement})
            if replace
            else row.on_conflict_do_nothing()
        )


def _key(settings_key: str, owner: str) -> str:
    """Return the column's value. A part of the primary key names the owner, because older workers know its columns."""
    return settings_key if owner == LOCAL else f"{settings_key} owner={owner}"
