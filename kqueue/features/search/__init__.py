"""The search for a fast kernel (`docs/search.md`). Kernels are proposed and judged, and new ones made from the best.

The rows in Postgres are the record of a run, from which any process can resume it. Other features add kinds of runs.
"""

from kqueue.registry import Command, Feature

SEARCH = Feature(
    name="search",
    commands=(Command("search", f"{__name__}.command:group", "doctor"),),
    pages=f"{__name__}.pages:router",
    templates=__name__,
    navigation=(("/runs", "Searches"),),
    charts=f"{__name__}.command:charts_of",
)
