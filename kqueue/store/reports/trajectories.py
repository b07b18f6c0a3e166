"""Finished evaluations with all that was recorded about them, in the order of their ends, for training."""

from __future__ import annotations

import json
from collections.abc import Generator, Sequence
from datetime import datetime
from typing import Any, Final, Unpack
from uuid import UUID

from sqlalchemy import ColumnElement, Connection, Engine, literal, select, true, tuple_
from sqlalchemy.orm import aliased

from kqueue import contract
from kqueue.backends import PYTEST
from kqueue.categories import Blame, Category
from kqueue.feedback import describe
from kqueue.filters import Filters
from kqueue.store.engine import transaction
from kqueue.store.evaluations import ITS_KERNEL, ITS_PROBLEM
from kqueue.store.evaluations.queries import VERDICTS, to_verdict
from kqueue.store.models import Evaluation, Kernel, Problem, SearchProposal, SearchRun, Verdict
from kqueue.store.reports.cost import TRIED, WAITED_S
from kqueue.store.reports.listing import conditions
from kqueue.store.reports.row import EXPRESSIONS, Row, view
from kqueue.store.sql import any_text, any_uuid

#: Number of rows that are in memory at a time. Each has up to four sources of 1 MiB, and mostly has 30 KiB.
_ROWS: Final = 100


@view(
    "evaluation_id owner batch problem_label problem_hash problem kernel_label kernel_hash backend kernel run parent_id"
    " parent prompt answer settings category blame phase message facts feedback speedup speedup_low speedup_high"
    " runtime baseline device environment attempts slot_s device_s cpu_s waited_s reused_from submitted_at finished_at"
    " evidence"
)
class Trajectory(Row):
    """One finished evaluation. Times are in UTC, and durations in the units of their names."""

    settings: str
    attempts: int
    category: Category
    blame: Blame
    message: str
    finished_at: datetime


_QUERY: Final = (
    VERDICTS.add_columns(
        Evaluation.owner, Evaluation.batch, Evaluation.problem_hash, Evaluation.kernel_hash, Evaluation.settings,
        EXPRESSIONS["problem"].label("problem"), EXPRESSIONS["kernel"].label("kernel"),
        TRIED.c.seconds.label("slot_s"), WAITED_S.label("waited_s"),
    )
    .join(Problem, ITS_PROBLEM)
    .join(TRIED, true())
)  # fmt: skip
_PARENT: Final = aliased(SearchProposal)
#: Columns that are attributes of a verdict. Asking each verdict took an eighth of an export's time.
_OF_VERDICT: Final = Trajectory.__dataclass_fields__.keys() & {*contract.Verdict.model_fields, *dir(contract.Verdict)}


def trajectories(
    engine: Engine,
    *,
    since: datetime | None,
    until: datetime | None,
    after: tuple[datetime, UUID] | None,
    limit: int,
    **filters: Unpack[Filters],
) -> Generator[list[Trajectory]]:
    """Yield evaluations that finished before ``until`` in the order of their ends, through a cursor of the server.

    Memory is bounded. The rows follow ``finished_at`` and id of ``after``.
    """
    wanted: list[ColumnElement[bool]] = [*conditions(filters), Kernel.backend != PYTEST]
    if since is not None:
        wanted.append(Verdict.finished_at >= since)
    if until is not None:
        wanted.append(Verdict.finished_at < until)
    if after is not None:
        wanted.append(tuple_(Verdict.finished_at, Verdict.evaluation_id) > tuple_(*map(literal, after)))
    # The cursor has ids only, because the server sorts them. Whole rows would take gigabytes of temporary files.
    ids = (
        select(Verdict.evaluation_id)
        .join(Evaluation, Evaluation.id == Verdict.evaluation_id)
        .join(Kernel, ITS_KERNEL)
        .where(*wanted)
        .order_by(Verdict.finished_at, Verdict.evaluation_id)
        .limit(limit)
    )
    with transaction(engine) as connection:
        for some in connection.scalars(ids, execution_options={"yield_per": _ROWS}).partitions():
            query = _QUERY.where(Verdict.evaluation_id == any_uuid(some))
            rows = connection.execute(query.order_by(Verdict.finished_at, Verdict.evaluation_id)).mappings().all()
            proposed = _proposals(connection, rows)
            if rows:  # Retention can have removed them meanwhile.
                yield [_trajectory(row, proposed.get(row["evaluation_id"], {})) for row in rows]


def _proposals(connection: Connection, rows: Sequence[Any]) -> dict[UUID, dict[Any, Any]]:
    """Return the search's columns of evaluations that a search submitted. Its batch has the name of the run."""
    batches = {row["batch"] for row in rows} - {None}
    if not batches:
        return {}
    query = (
        select(
            SearchProposal.evaluation_id, SearchRun.name.label("run"), _PARENT.evaluation_id.label("parent_id"),
            _PARENT.kernel.label("parent"), SearchProposal.prompt, SearchProposal.answer,
        )
        .join(SearchRun, SearchRun.id == SearchProposal.run_id)
        .outerjoin(_PARENT, (_PARENT.run_id == SearchProposal.run_id) & (_PARENT.number == SearchProposal.parent))
        .where(SearchRun.name == any_text(batches))
        .where(SearchProposal.evaluation_id == any_uuid([row["evaluation_id"] for row in rows]))
    )  # fmt: skip
    return {row["evaluation_id"]: dict(row) for row in connection.execute(query).mappings()}


def _trajectory(row: Any, proposal: dict[Any, Any]) -> Trajectory:
    verdict = to_verdict(row)
    names = Trajectory.__dataclass_fields__
    low, high = verdict.speedup_interval or (None, None)
    judged = verdict.reused_from is None
    values: dict[str, Any] = {
        **dict.fromkeys(names),
        **row,
        **proposal,
        **{name: getattr(verdict, name) for name in _OF_VERDICT},
        "settings": json.dumps(row["settings"]),
        "facts": verdict.facts.model_dump_json(),
        "evidence": verdict.evidence.model_dump_json(),
        "feedback": describe(verdict, row["kernel"]),
        "speedup_low": low,
        "speedup_high": high,
        "device": verdict.environment and verdict.environment.device,
        "environment": verdict.environment and verdict.environment.model_dump_json(),
        "device_s": verdict.device_s if judged else 0.0,
        "cpu_s": sum((verdict.evidence.cpu_s or {}).values()) if judged else 0.0,
    }
    return Trajectory(**{name: values[name] for name in names})
