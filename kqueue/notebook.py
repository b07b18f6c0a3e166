"""Verdicts, duels and profiles as HTML for notebooks. Kernels control some of the text, so all of it is escaped."""

from __future__ import annotations

import base64
import html
from collections.abc import Mapping
from typing import Final

from kqueue import charts, examinations
from kqueue.categories import Blame
from kqueue.contract import Outcome, Verdict
from kqueue.duels import Duel
from kqueue.errors import ConfigError
from kqueue.evidence import Evidence, Profile
from kqueue.feedback import describe
from kqueue.figures import milliseconds, ratio
from kqueue.text import clean

_COLOURS: Final = {Blame.NONE: "#1a7f37", Blame.CANDIDATE: "#cf222e"}


def to_html(value: Outcome | Verdict | Duel | Profile) -> str:
    """Return a table with the words, and a picture if matplotlib is installed and there are times or counters."""
    if isinstance(value, Duel):
        rows = {"A": value.a_label, "B": value.b_label, "winner": value.winner and value.winner.upper()}
        return _table(rows | {"state": value.reason or "running"}) + _text(value.message)
    if isinstance(value, Profile):
        words = "\n".join(examinations.lines(Evidence(profile=value)))
        return _text(words) + _picture(examinations.roofline("roofline", {"kernel": value}))
    rows = {
        "category": value.category,
        "runtime": value.runtime_ms and milliseconds(value.runtime_ms),
        "reference": value.baseline_ms and milliseconds(value.baseline_ms),
        "speedup": value.speedup and ratio(value.speedup),
    }
    if isinstance(value, Verdict):
        rows |= {"problem": value.problem_label, "kernel": value.kernel_label, "evaluation": value.evaluation_id}
    times = {"kernel": value.runtime, "reference": value.baseline}
    spreads = [
        charts.Spread(name, one.min_ms, one.q1_ms, one.median_ms, one.q3_ms, one.max_ms, one.count)
        for name, one in times.items()
        if one is not None
    ]
    picture = _picture(charts.Times("times of one call", spreads)) if spreads else ""
    return _table(rows, _COLOURS.get(value.blame, "#9a6700")) + _text(describe(value, "")) + picture


def _table(rows: Mapping[str, object], colour: str = "inherit") -> str:
    cells = (
        f"<tr><th>{name}</th><td>{_escaped(value)}</td></tr>" for name, value in rows.items() if value not in (None, "")
    )
    return f'<table style="border-left: 4px solid {colour}">{"".join(cells)}</table>'


def _text(words: str) -> str:
    return f"<pre>{_escaped(words)}</pre>"


def _escaped(value: object) -> str:
    return html.escape(clean(value))


def _picture(chart: charts.Chart) -> str:
    try:
        image = charts.render(chart)
    except ConfigError:
        return ""
    # As an image the SVG cannot run anything, whatever its texts are.
    return f'<img alt="" src="data:image/svg+xml;base64,{base64.b64encode(image).decode()}">'
