"""Pictures of a fleet's results, drawn from plain data.

A chart is a dataclass of :mod:`kqueue.charts.data`, independent of the database. :func:`render` draws it as SVG or PNG,
in a light or a dark theme. The same chart gives the same bytes.
"""

from kqueue.charts.data import (
    Bar,
    BestSoFar,
    Categories,
    Chart,
    Curve,
    FastP,
    Importances,
    Leaderboard,
    Point,
    Roofline,
    SearchCurve,
    Spot,
    Spread,
    Stack,
    Times,
)
from kqueue.charts.render import Form, Theme, render

__all__ = [
    "Bar",
    "BestSoFar",
    "Categories",
    "Chart",
    "Curve",
    "FastP",
    "Form",
    "Importances",
    "Leaderboard",
    "Point",
    "Roofline",
    "SearchCurve",
    "Spot",
    "Spread",
    "Stack",
    "Theme",
    "Times",
    "render",
]
