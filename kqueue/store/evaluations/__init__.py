"""The life of an evaluation in Postgres: submitted, claimed, ended once.

Two rules apply. First, an attempt begins by compare-and-set on a queued evaluation, so repeated messages for one
evaluation are harmless. Second, an evaluation ends under a lock on its row, and the first writer wins. Judge, worker,
sweeper and producer can all try, and exactly one verdict results. A transaction that holds an evaluation's row can then
lock the row of its attempt, never the other way round.

Each function is one transaction unless its docstring says otherwise. Each raises
:class:`~kqueue.errors.DatabaseUnavailable` if Postgres is unreachable, refuses, or does not answer in time. Nothing is
written partially in that case.
"""

from kqueue.store.evaluations.claims import Claim, claim, set_environment, warm_up
from kqueue.store.evaluations.conditions import (
    ANY_EARLY,
    ANY_EXPIRED,
    ANY_OVERDUE,
    ANY_UNFINISHED,
    ITS_KERNEL,
    ITS_PROBLEM,
    OPEN,
    QUEUED,
    REAL,
    REAL_KERNEL,
    REAL_PROBLEM,
    no_trial,
)
from kqueue.store.evaluations.order import Next, tally, upcoming, window
from kqueue.store.evaluations.publishing import make_due, publish, published, unpublish
from kqueue.store.evaluations.queries import VERDICTS, existing, in_batch, to_verdict, verdict, verdicts
from kqueue.store.evaluations.submission import SUBMISSIONS_CHANNEL, Submitted, asks_for, submit
from kqueue.store.evaluations.verdicts import (
    VERDICTS_CHANNEL,
    Recorded,
    cancel,
    cancel_all,
    expire_leases,
    expire_queued,
    finish,
    lose_worker,
)

__all__ = [
    "ANY_EARLY", "ANY_EXPIRED", "ANY_OVERDUE", "ANY_UNFINISHED", "ITS_KERNEL", "ITS_PROBLEM", "OPEN", "QUEUED",
    "REAL", "REAL_KERNEL", "REAL_PROBLEM", "SUBMISSIONS_CHANNEL", "VERDICTS", "VERDICTS_CHANNEL", "Claim", "Next",
    "Recorded", "Submitted", "asks_for", "cancel", "cancel_all", "claim", "existing", "expire_leases",
    "expire_queued", "finish", "in_batch", "lose_worker", "make_due", "no_trial", "publish", "published",
    "set_environment", "submit", "tally", "to_verdict", "unpublish", "upcoming", "verdict", "verdicts", "warm_up",
    "window",
]  # fmt: skip
