"""Budgets of tokens: a number of slot seconds in a moving window, and the consequence when they are used up.

Slot seconds are the durations of attempts on all lanes, as `kqueue cost` counts them: of ended attempts, the part that
lies in the window, and of running attempts, the time until now. They count for the token that is the evaluation's
producer.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from datetime import datetime
from typing import Final
from uuid import UUID

from sqlalchemy import Connection, Engine, text

from kqueue.errors import AccessRefused, BudgetSpent
from kqueue.states import Spent
from kqueue.store.engine import Viewer, transaction

#: Prefix of a producer that is a token.
PRODUCER: Final = "token:"
#: Seconds of one attempt in the window. An attempt whose worker fell silent counts until its lease ended.
_SECONDS: Final = """
    greatest(0, extract(epoch FROM coalesce(a.ended_at, least(now(), a.lease_until))
        - greatest(a.started_at, now() - make_interval(secs => t.budget_window_s))))::float8
"""
_IN_WINDOW: Final = """
    a.payer = 'token:' || t.id
    AND (a.ended_at IS NULL OR a.ended_at > now() - make_interval(secs => t.budget_window_s))
"""
#: Query for the database's time and, in the same round trip, for the existing budgets of tokens.
_USED: Final = text(f"""
    SELECT now() AS now, used.* FROM (SELECT 1) AS one LEFT JOIN (
        SELECT t.id, t.budget_s AS seconds, t.budget_window_s AS window_s, t.budget_then AS then,
               (SELECT coalesce(sum({_SECONDS}), 0) FROM attempts AS a WHERE {_IN_WINDOW}) AS used_s
        FROM tokens AS t WHERE t.id = ANY(CAST(:ids AS uuid[])) AND t.budget_s IS NOT NULL
    ) AS used ON true
""")  # noqa: S608 -- of constants
#: Query for the seconds until enough attempts have left the window, if no more is used.
_UNTIL: Final = text(f"""
    SELECT extract(epoch FROM min(ended_at) - now()) + max(window_s) FROM (
        SELECT a.ended_at, t.budget_window_s AS window_s, sum({_SECONDS}) OVER (ORDER BY a.ended_at, a.id) AS left_s
        FROM tokens AS t JOIN attempts AS a ON {_IN_WINDOW}
        WHERE t.id = :id
    ) AS leaving WHERE left_s > :too_many AND ended_at IS NOT NULL
""")  # noqa: S608 -- of constants

#: Query for the evaluations of the agent's session, and the seconds of their attempts.
_OF_SESSION: Final = text("""
    SELECT count(DISTINCT e.id) AS evaluations,
           coalesce(sum(
               extract(epoch FROM coalesce(a.ended_at, least(now(), a.lease_until)) - a.started_at)
           ), 0)::float8 AS seconds
    FROM evaluations AS e LEFT JOIN attempts AS a ON a.evaluation_id = e.id WHERE e.session = kqueue_session()
""")


@dataclass(frozen=True, slots=True)
class Budget:
    """The budget of a token.

    Attributes:
        seconds: slot seconds available in any window.
        window_s: the length in seconds of the window, which ends now.
        then: the consequence for submissions when they are used up.
        used_s: slot seconds used in the current window.
        token_id: the token. None before the budget is assigned.
    """

    seconds: float
    window_s: float
    then: Spent
    used_s: float = 0.0
    token_id: UUID | None = None

    @property
    def left_s(self) -> float:
        """Remaining slot seconds, at least 0. Evaluations that were accepted earlier can exceed the budget."""
        return max(0.0, self.seconds - self.used_s)

    @property
    def spent(self) -> bool:
        """True if nothing is left."""
        return self.used_s >= self.seconds


def token_of(producer: str | None) -> UUID | None:
    """Return the id of the token that a producer is, or None if it is not a token."""
    if producer is None or not producer.startswith(PRODUCER):
        return None
    try:
        return UUID(producer.removeprefix(PRODUCER))
    except ValueError:
        return None


def look(connection: Connection, token_ids: Collection[UUID]) -> tuple[datetime, dict[UUID, Budget]]:
    """Within the caller's transaction, return the database's time and the existing budgets of these tokens."""
    rows = connection.execute(_USED, {"ids": [str(one) for one in token_ids]}).all()
    return rows[0].now, {
        row.id: Budget(row.seconds, row.window_s, Spent(row.then), row.used_s, row.id)
        for row in rows
        if row.id is not None
    }


def of(engine: Engine, token_ids: Collection[UUID]) -> dict[UUID, Budget]:
    """Return the existing budgets of these tokens."""
    with transaction(engine) as connection:
        return look(connection, token_ids)[1]


def refusal(connection: Connection, budget: Budget) -> BudgetSpent:
    """Within the caller's transaction, return the error for a submission of a token whose budget is used up."""
    wait_s = connection.scalar(_UNTIL, {"id": budget.token_id, "too_many": budget.used_s - budget.seconds})
    # A running attempt does not leave the window before a whole window has passed.
    return BudgetSpent(budget.seconds, budget.window_s, float(wait_s) if wait_s is not None else budget.window_s)


def check_session(connection: Connection, viewer: Viewer) -> None:
    """Within the transaction of a submission, raise AccessRefused if it exceeds the limits of its agent's session."""
    if viewer.most is None and viewer.seconds is None:
        return
    used = connection.execute(_OF_SESSION).one()
    if viewer.most is not None and used.evaluations > viewer.most:
        raise AccessRefused(f"this session can submit {viewer.most} evaluations in all, and this would exceed it")
    if viewer.seconds is not None and used.seconds >= viewer.seconds:
        raise AccessRefused(f"this session's {viewer.seconds:g} s of slots are used up")
