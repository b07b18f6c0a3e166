"""The reports that a holder of the scope `read` calls over HTTP, limited by row-level security to the rows it can read.

The server makes a route of each. The command line calls them there, or on the database if it has one.
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
#: Long lists, which are read in pages: the field that orders them, before the id, and the number of rows of a page.
PAGES: Final[dict[Callable[..., Any], tuple[str, int]]] = {
    reports.listing: ("submitted_at", 1000), reports.results: ("finished_at", 1000),
    reports.trajectories: ("finished_at", 20),  # each has up to 4 MiB
}  # fmt: skip


def result_of(report: Callable[..., Any]) -> Any:
    """Return the type of a report's result. The result of a generator of lists is one list."""
    kind = get_type_hints(report)["return"]
    return get_args(kind)[0] if get_origin(kind) is Generator else kind
