"""Verdicts and profiles as HTML for notebooks. Kernels control some of the text, so all of it is escaped."""

from __future__ import annotations

import base64
import html
from contextlib import suppress
from typing import Final

from kqueue import charts, examinations
from kqueue.categories import Blame
from kqueue.contract import Outcome, Verdict
from kqueue.errors import ConfigError
from kqueue.evidence import Evidence, Profile
from kqueue.feedback import describe
from kqueue.text import clean

_COLOURS: Final = {Blame.NONE: "#1a7f37", Blame.CANDIDATE: "#cf222e"}


def to_html(value: Outcome | Verdict | Profile | str) -> str:
    """Return the words or the given text, and a picture if matplotlib is installed and there are times or counters."""
    colour, chart = "inherit", None
    if isinstance(value, str):
        words = value
    elif isinstance(value, Profile):
        words = "\n".join(examinations.lines(Evidence(profile=value)))
        chart = examinations.roofline("roofline", {"kernel": value})
    else:
        words, colour = describe(value, ""), _COLOURS.get(value.blame, "#9a6700")
        if isinstance(value, Verdict):
            labels = f"{value.kernel_label or 'kernel'} for {value.problem_label or 'a problem'}"
            words = f"{labels}, evaluation {value.evaluation_id}\n{words}"
        if value.runtime is not None:
            times = (("kernel", value.runtime), ("reference", value.baseline))
            chart = charts.Times.of("times of one call", times)
    page = f'<pre style="border-left: 4px solid {colour}">{html.escape(clean(words))}</pre>'
    if chart is not None:
        # As an image the SVG cannot run anything, whatever its texts are.
        with suppress(ConfigError):
            page += f'<img alt="" src="data:image/svg+xml;base64,{base64.b64encode(charts.render(chart)).decode()}">'
    return page
