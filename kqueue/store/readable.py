"""The operations that read, limited by row-level security to the rows that their caller can read.

Each is a function of the store, whose arguments and result are the operation's input and answer. The server makes a
route of each report, which the command line calls there, or on the database if it has one, and the API's resources.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from typing import Any, Final, get_args, get_origin, get_type_hints

from kqueue.store import budgets, reports, searches, sharing, workers
from kqueue.store.reports import boards

_SAME: Final[tuple[Callable[..., Any], ...]] = (
    reports.backlog, reports.batch_state, reports.best_so_far, reports.changes, reports.cost, reports.crowds,
    reports.fast_p, reports.fleet, reports.last_queued, reports.listing, reports.named, reports.now, reports.outcomes,
    reports.problem, reports.resolve_id, reports.results, reports.show, reports.state_of, reports.states,
    reports.trajectories, reports.unfinished, reports.waiting, boards.leaderboard, boards.profiled, boards.ranking,
    sharing.share, sharing.unshare, workers.live_lanes,
)  # fmt: skip
#: The reports, and the functions that share problems, with the names of their routes.
READABLE: Final[dict[Callable[..., Any], str]] = {report: report.__name__ for report in _SAME} | {
    budgets.of: "budgets", searches.find: "search", searches.listing: "searches", searches.steps: "search_steps",
    searches.proposals: "search_proposals", searches.held: "search_held",
}  # fmt: skip
#: Long lists, which are read in pages: the two fields that order them, and the maximum number of rows of a page.
PAGES: Final[dict[Callable[..., Any], tuple[tuple[str, str], int]]] = {
    reports.listing: (("submitted_at", "evaluation_id"), 1000),
    reports.results: (("finished_at", "evaluation_id"), 1000),
    reports.trajectories: (("finished_at", "evaluation_id"), 20),  # each has up to 4 MiB
    reports.problems: (("created_at", "problem_hash"), 1000),
    boards.used_problems: (("created_at", "problem_hash"), 200),
}
#: Functions that change something, with the methods of their resources.
CHANGES: Final[dict[Callable[..., Any], str]] = {sharing.share: "PUT", sharing.unshare: "DELETE"}
#: Resources by name: path, function, and if it is not the result, the type of the answer or a list's object and field.
RESOURCES: Final[dict[str, tuple[str, Callable[..., Any], Any]]] = {
    "listing": ("/evaluations", reports.listing, ("Page", "evaluations")),
    "get": ("/evaluations/{evaluation_id}", reports.show, reports.Evaluation),
    "batch": ("/batches/{batch:path}", reports.batch_state, reports.Batch),
    "leaderboard": ("/leaderboard", reports.best, ("Leaderboard", "best")),
    "problems": ("/problems", reports.problems, ("Problems", "problems")),
    "problem": ("/problems/{problem_hash}", reports.problem, None),
    "shared": ("/shared", sharing.listing, ("SharedProblems", "problems")),
    "share": ("/problems/{problem_hash}/shared", sharing.share, None),
    "unshare": ("/problems/{problem_hash}/shared", sharing.unshare, None),
    "board": ("/problems/{problem_hash}/board", sharing.board, ("Board", "entries")),
}


def result_of(report: Callable[..., Any]) -> Any:
    """Return the type of a report's result. The result of a generator of lists is one list."""
    kind = get_type_hints(report)["return"]
    return get_args(kind)[0] if get_origin(kind) is Generator else kind
