"""Reconciles the evaluations in Postgres with the submissions and the log of chaos."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final
from uuid import UUID

from sqlalchemy import Engine, text

from kqueue.categories import Blame, Category
from tests.chaos.monkey import Event

_EVALUATIONS: Final = text("""
    SELECT e.id, e.kernel_label, e.state, e.attempts, v.category, v.message, v.written_by, v.attempt_id,
           (SELECT count(*) FROM verdicts AS w WHERE w.evaluation_id = e.id) AS verdicts
    FROM evaluations AS e LEFT JOIN verdicts AS v ON v.evaluation_id = e.id
    WHERE e.batch = :batch
""")
_ATTEMPTS: Final = text("""
    SELECT a.id, a.evaluation_id, a.number, a.category, a.message, a.written_by, a.handed_back, e.kernel_label,
           w.name, w.pid,
           extract(epoch FROM a.started_at)::float AS started, extract(epoch FROM a.ended_at)::float AS ended
    FROM attempts AS a
    JOIN evaluations AS e ON e.id = a.evaluation_id
    JOIN workers AS w ON w.id = a.worker_id
    WHERE e.batch = :batch
    ORDER BY w.name, a.started_at
""")


@dataclass
class Reconciliation:
    """Figures for the table, a line for each fault, and the number of attempts that each act of chaos cost."""

    counts: dict[str, int] = field(default_factory=dict)
    faults: list[str] = field(default_factory=list)
    struck: Counter[str] = field(default_factory=Counter)


def reconcile(
    engine: Engine, batch: str, accepted: Mapping[UUID, str], expected: Mapping[str, Category], events: Iterable[Event]
) -> Reconciliation:
    """Compare all submissions of `batch` with the producers' records and each entry's expected category.

    An attempt that ended by the fleet's fault is explained by an act of chaos, other than on Redis, that struck its
    worker, or all workers, while it ran. An attempt that could not be timed is explained by an act on any worker,
    because leftovers of that worker die on the same device. A verdict other than the expected one is explained if it
    blames the fleet and each attempt of its evaluation is explained.
    """
    acts = [act for act in events if not act.harmless]
    with engine.connect() as connection:
        rows = connection.execute(_EVALUATIONS, {"batch": batch}).all()
        attempts = connection.execute(_ATTEMPTS, {"batch": batch}).all()
    found = Reconciliation()
    causes = {attempt.id: _cause(attempt, acts) for attempt in attempts}
    of: dict[UUID, list[Any]] = {}
    for attempt in attempts:
        of.setdefault(attempt.evaluation_id, []).append(attempt)

    _count_attempts(found, attempts, causes)
    stored = {row.id: row.kernel_label for row in rows}
    for evaluation in accepted.keys() - stored.keys():
        found.faults.append(f"lost: {evaluation} ({accepted[evaluation]}) was accepted and is not stored")
    tally = Counter[str]()
    for row in rows:
        what = f"{row.id} ({row.kernel_label})"
        tally["verdicts"] += row.verdicts
        if row.id not in accepted:
            found.faults.append(f"surplus: {what} is stored, and no producer was told of it")
        if row.state != "done" or row.verdicts != 1:
            found.faults.append(f"not ended once: {what} is {row.state} and has {row.verdicts} verdicts")
            continue
        mine = of.get(row.id, [])
        [told] = [a for a in mine if a.id == row.attempt_id] or [None]
        if told is None or told.category != row.category:
            found.faults.append(f"verdict and attempt differ: {what} is {row.category}")
        if row.category == expected[row.kernel_label]:
            tally["as expected"] += 1
        elif Category(row.category).blame is Blame.FLEET and mine and all(causes[a.id] for a in mine):
            tally["fleet's fault, explained by chaos"] += 1
        else:
            found.faults.append(
                f"wrong verdict: {what} is {row.category} by {row.written_by} after {len(mine)} attempts, not "
                f"{expected[row.kernel_label]}: {row.message}"
            )
    found.counts = {"accepted": len(accepted), "stored": len(rows)} | dict(tally) | found.counts
    return found


def _cause(attempt: Any, acts: list[Event]) -> str | None:
    """Return the likeliest of the acts that struck an attempt's worker while it ran.

    Acts on this worker alone precede acts on all. A dead supervisor's attempts end late, with their leases.
    """
    ended = attempt.ended if attempt.ended is not None else float("inf")
    struck = [
        act
        for act in acts
        if act.at <= ended
        and attempt.started <= act.until
        and (act.worker in {None, attempt.pid} or attempt.category == Category.TIMING_UNSTABLE)
    ]
    likeliest = max(
        struck, key=lambda act: (act.worker == attempt.pid, "supervisor" in act.action, act.at), default=None
    )
    return likeliest.action if likeliest else None


def _count_attempts(found: Reconciliation, attempts: list[Any], causes: Mapping[int, str | None]) -> None:
    lost = unexplained = 0
    for attempt in attempts:
        what = f"attempt {attempt.number} of {attempt.evaluation_id} ({attempt.kernel_label})"
        if attempt.ended is None:
            found.faults.append(f"left open: {what}")
            continue
        by_fleet = Category(attempt.category).blame is Blame.FLEET
        cause = causes[attempt.id]
        if by_fleet:
            lost += 1
            if cause is None:
                unexplained += 1
                found.faults.append(f"no act of chaos explains: {what}: {attempt.category}: {attempt.message}")
            else:
                found.struck[cause] += 1
    found.counts |= {
        "attempts": len(attempts),
        "attempts ended by the fleet's fault": lost,
        "of these explained by chaos": lost - unexplained,
        "handed back": sum(attempt.handed_back for attempt in attempts),
    }
