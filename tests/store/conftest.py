"""Evaluations in the database, submitted and claimed."""

from __future__ import annotations

from collections.abc import Callable
from uuid import UUID

import pytest
from sqlalchemy import Engine

from kqueue.contract import Request
from kqueue.store import evaluations
from kqueue.store.evaluations import Claim


@pytest.fixture
def submit(engine: Engine, fields) -> Callable[..., UUID]:
    """Submits one evaluation and returns its id."""

    def one(**changes: object) -> UUID:
        return evaluations.submit(engine, [Request(**fields(**changes))])[0].evaluation_id

    return one


@pytest.fixture
def claim(engine: Engine, worker_id: UUID) -> Callable[[UUID], Claim]:
    """Claims an evaluation that can be claimed."""

    def one(identity: UUID) -> Claim:
        claimed = evaluations.claim(engine, identity, worker_id=worker_id, lease_s=30)
        assert claimed is not None
        return claimed

    return one
