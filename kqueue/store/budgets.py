"""Budgets of tokens: so many seconds of slots in a moving window, and what happens when they are used up.

The seconds are those of attempts, as `kqueue cost` counts them, on all lanes: of attempts that have ended, as far as
they lie in the window, and of those that run, until now. They count for the token that is the evaluation's producer.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final
from uuid import UUID

from sqlalchemy import Connection, Engine, Row, text

from kqueue.errors import BudgetSpent
from kqueue.states import Spent
from kqueue.store.engine import transaction

#: The beginning of the producer that a token is.
PRODUCER: Final = "token:"
#: Seconds of one attempt in the window; of one whose worker fell silent until its lease ran out.
_SECONDS: Final = """
    greatest(0, extract(epoch FROM coalesce(a.ended_at, least(now(), a.lease_until))
        - greatest(a.started_at, now() - make_interval(secs => t.budget_window_s))))::float8
"""
_IN_WINDOW: Final = """
    a.payer = 'token:' || t.id
    AND (a.ended_at IS NULL OR a.ended_at > now() - make_interval(secs => t.budget_window_s))
"""
#: The time and, in the same round trip, the budgets of those tokens that have one.
_USED: Final = text(f"""
    SELECT now() AS now, used.* FROM (SELECT 1) AS one LEFT JOIN (
        SELECT t.id, t.budget_s AS seconds, t.budget_window_s AS window_s, t.budget_then AS then,
               (SELECT coalesce(sum({_SECONDS}), 0) FROM attempts AS a WHERE {_IN_WINDOW}) AS used_s
        FROM tokens AS t WHERE t.id = ANY(CAST(:ids AS uuid[])) AND t.budget_s IS NOT NULL
    ) AS used ON true
""")  # noqa: S608 -- of constants
#: Seconds until enough attempts have left the window, if nothing more is used.
_UNTIL: Final = text(f"""
    SELECT extract(epoch FROM min(ended_at) - now()) + max(window_s) FROM (
        SELECT a.ended_at, t.budget_window_s AS window_s, sum({_SECONDS}) OVER (ORDER BY a.ended_at, a.id) AS left_s
        FROM tokens AS t JOIN attempts AS a ON {_IN_WINDOW}
        WHERE t.id = :id
    ) AS leaving WHERE left_s > :too_many AND ended_at IS NOT NULL
""")  # noqa: S608 -- of constants


@dataclass(frozen=True, slots=True)
class Budget:
    """What a token may use.

    Attributes:
        seconds: of slots, in any window.
        window_s: the window's length in seconds; it ends now.
        then: what happens to what is submitted when they are used up.
        used_s: how many are used.
        token_id: whose it is; None for one that is to be given.
    """

    seconds: float
    window_s: float
    then: Spent
    used_s: float = 0.0
    token_id: UUID | None = None

    @property
    def left_s(self) -> float:
        """Seconds that are left; 0 where more was used than the budget, by what was accepted before."""
        return max(0.0, self.seconds - self.used_s)

    @property
    def spent(self) -> bool:
        """True if nothing is left."""
        return self.used_s >= self.seconds


def token_of(producer: str | None) -> UUID | None:
    """Return the token that a producer is; None if it is none."""
    if producer is None or not producer.startswith(PRODUCER):
        return None
    try:
        return UUID(producer.removeprefix(PRODUCER))
    except ValueError:
        return None


def look(connection: Connection, token_ids: Collection[UUID]) -> tuple[datetime, dict[UUID, Budget]]:
    """Return the database's time, and the budgets of those tokens that have one, within the caller's transaction."""
    rows = connection.execute(_USED, {"ids": [str(one) for one in token_ids]}).all()
    return rows[0].now, {row.id: _read(row) for row in rows if row.id is not None}


def of(engine: Engine, token_ids: Collection[UUID]) -> dict[UUID, Budget]:
    """Return the budgets of those tokens that have one."""
    with transaction(engine) as connection:
        return look(connection, token_ids)[1]


def refusal(connection: Connection, budget: Budget) -> BudgetSpent:
    """Return the error for a submission of a token whose budget is used up, within the caller's transaction."""
    too_many = budget.used_s - budget.seconds
    wait_s = connection.scalar(_UNTIL, {"id": budget.token_id, "too_many": too_many})
    # What runs has not begun to leave the window yet.
    return BudgetSpent(budget.seconds, budget.window_s, float(wait_s) if wait_s is not None else budget.window_s)


def _read(row: Row[*tuple[Any, ...]]) -> Budget:
    return Budget(row.seconds, row.window_s, Spent(row.then), row.used_s, row.id)
