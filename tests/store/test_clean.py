"""Cleaning of values for Postgres."""

from __future__ import annotations

import json
from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sqlalchemy import Engine, text

from kqueue.store import clean


def as_floats(value: Any) -> Any:
    """Return JSON with all numbers as floats, because Postgres keeps their values and not their types."""
    match value:
        case dict():
            return {key: as_floats(item) for key, item in value.items()}
        case list():
            return [as_floats(item) for item in value]
        case bool() | None | str():
            return value
        case _:
            return float(value)


class TestClean:
    """One function makes any value valid for Postgres."""

    @settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=60, deadline=None)
    @given(
        st.recursive(
            st.none() | st.booleans() | st.integers() | st.floats() | st.text(st.characters()) | st.binary(),
            lambda inner: st.lists(inner) | st.dictionaries(st.text(st.characters()), inner),
            max_leaves=8,
        )
    )
    def test_anything_can_be_stored(self, engine: Engine, value: object) -> None:
        """Postgres stores any cleaned value as JSON and returns an equal one."""
        fit = clean.json(value)
        with engine.connect() as connection:
            stored = connection.scalar(
                text("SELECT CAST(:value AS jsonb)"), {"value": json.dumps(fit, allow_nan=False)}
            )
        assert as_floats(stored) == as_floats(fit)
