"""Reports: one evaluation in full, lists of evaluations, counts.

Each function is one transaction and raises :class:`~kqueue.errors.DatabaseUnavailable` if Postgres cannot be used.
"""

from kqueue.store.reports.boards import Placed, best
from kqueue.store.reports.changes import changes
from kqueue.store.reports.cost import By, Cost, cost
from kqueue.store.reports.counts import (
    Batch,
    BatchState,
    Crowd,
    Fault,
    attempts_by_device,
    backlog,
    batch_state,
    crowds,
    faults,
    outcomes,
    state_of,
    states,
)
from kqueue.store.reports.curves import FastP, Point, best_so_far, fast_p
from kqueue.store.reports.detail import AttemptDetail, Detail, Evaluation, resolve_id, show
from kqueue.store.reports.ended import Course, Ended, Try, courses, ended, finished, now
from kqueue.store.reports.listing import Listed, finished_in, listing, queued, results, unfinished
from kqueue.store.reports.names import Kind, Named, named
from kqueue.store.reports.overview import Day, Oldest, Use, days, ended_by_minute, fleet, oldest, use
from kqueue.store.reports.problems import ProblemDetail, StoredProblem, inputs_of, problem, problems
from kqueue.store.reports.progress import Earlier, Progress, earlier, last_queued, progress, progress_of_batch
from kqueue.store.reports.row import MEANINGS
from kqueue.store.reports.trajectories import Trajectory, trajectories
from kqueue.store.reports.waiting import Waiting, Why, waiting

__all__ = [
    "MEANINGS", "AttemptDetail", "Batch", "BatchState", "By", "Cost", "Course", "Crowd", "Day", "Detail", "Earlier",
    "Ended", "Evaluation", "FastP", "Fault", "Kind", "Listed", "Named", "Oldest", "Placed", "Point", "ProblemDetail",
    "Progress", "StoredProblem", "Trajectory", "Try", "Use", "Waiting", "Why", "attempts_by_device", "backlog",
    "batch_state", "best", "best_so_far", "changes", "cost", "courses", "crowds", "days",
    "earlier", "ended", "ended_by_minute", "fast_p", "faults", "finished", "finished_in", "fleet",
    "inputs_of", "last_queued", "listing", "named", "now", "oldest", "outcomes", "problem", "problems",
    "progress", "progress_of_batch", "queued", "resolve_id", "results", "show", "state_of", "states",
    "trajectories", "unfinished", "use", "waiting",
]  # fmt: skip
