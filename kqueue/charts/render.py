"""Charts as SVG or PNG, drawn with matplotlib's objects instead of its global state, which threads would share."""

from __future__ import annotations

import threading
import warnings
from enum import StrEnum
from io import BytesIO
from typing import Any, Final

from kqueue.charts import draw
from kqueue.charts.data import Chart
from kqueue.errors import ConfigError
from kqueue.text import one_line

_DOTS_PER_INCH: Final = 144
#: Lock for matplotlib's settings and the warning filters, which are global.
_GLOBALS: Final = threading.Lock()


class Theme(StrEnum):
    """The background."""

    LIGHT = "light"
    DARK = "dark"


class Form(StrEnum):
    """The formats of pictures, named by their file endings."""

    SVG = "svg"
    PNG = "png"


#: Background, text, secondary text, grid lines.
_INKS: Final = {
    Theme.LIGHT: ("#ffffff", "#1f2933", "#5f6b7a", "#e3e7ec"),
    Theme.DARK: ("#12161c", "#e6eaf0", "#9aa7b8", "#2a313b"),
}
#: Okabe's and Ito's colours, which all people can distinguish, darker or lighter for the background.
_COLOURS: Final = {
    Theme.LIGHT: ("#0072b2", "#d55e00", "#009e73", "#b4548d", "#b8860b", "#3a9bd9", "#4d4d4d"),
    Theme.DARK: ("#56b4e9", "#f0883e", "#2fc79b", "#e08fc0", "#f0c94a", "#8ea8ff", "#b0b0b0"),
}


def render(chart: Chart, *, theme: Theme = Theme.LIGHT, form: Form = Form.SVG) -> bytes:
    """Draw a chart. The same chart gives the same bytes under one version of matplotlib.

    Args:
        chart: the chart. If it is empty, the picture says so.

    Raises:
        ConfigError: matplotlib is not installed.
    """
    try:
        import matplotlib as mpl
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ConfigError(f"a picture needs matplotlib ({error}): pip install 'kqueue[plots]'") from None
    # Omit the date and the version of matplotlib.
    none: dict[str, Any] = {"Date": None, "Creator": None} if form is Form.SVG else {"Software": None}
    settings: Any = _settings(theme)
    held = BytesIO()
    with _GLOBALS, mpl.rc_context(settings), warnings.catch_warnings():
        # A label can have characters that no installed font has. They are drawn as boxes.
        warnings.filterwarnings("ignore", message="Glyph .* missing from font")
        figure = Figure(layout="constrained")
        draw.draw(figure, chart)
        figure.savefig(held, format=form.value, dpi=_DOTS_PER_INCH, metadata=none | {"Title": one_line(chart.title)})
    return held.getvalue()


def _settings(theme: Theme) -> dict[str, Any]:
    """Return matplotlib's settings for a theme."""
    paper, text, secondary, grid = _INKS[theme]
    return {
        "axes.axisbelow": True,
        "axes.edgecolor": secondary,
        "axes.facecolor": paper,
        "axes.grid": True,
        "axes.labelcolor": secondary,
        "axes.prop_cycle": f"cycler(color={_COLOURS[theme]})",
        "axes.spines.right": False,
        "axes.spines.top": False,
        "axes.titlecolor": text,
        "axes.titlelocation": "left",
        "axes.titlepad": 14,
        "axes.titlesize": 13,
        "axes.titleweight": "bold",
        "figure.constrained_layout.h_pad": 0.14,
        "figure.constrained_layout.w_pad": 0.14,
        "figure.facecolor": paper,
        "figure.figsize": (8.0, 4.5),
        "font.family": ["DejaVu Sans"],
        "font.size": 10,
        "grid.color": grid,
        "grid.linewidth": 0.8,
        "hatch.color": paper,
        "hatch.linewidth": 1.0,
        "legend.frameon": False,
        "legend.labelcolor": text,
        "savefig.facecolor": paper,
        # Ids within an SVG would be random.
        "svg.hashsalt": "kqueue",
        # Text stays text, for search and for screen readers.
        "svg.fonttype": "none",
        "text.color": text,
        # A dollar sign in a label does not begin a formula.
        "text.parse_math": False,
        "timezone": "UTC",
        "xtick.color": secondary,
        "ytick.color": secondary,
        "xtick.labelcolor": secondary,
        "ytick.labelcolor": text,
    }
