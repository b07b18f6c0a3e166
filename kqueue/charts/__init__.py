"""Pictures of what a fleet has found, from plain data.

A chart is a dataclass of :mod:`kqueue.charts.data` and knows no database. :func:`render` makes SVG or PNG of it, in a
light or a dark theme. The same chart gives the same bytes.
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
