"""Charts as SVG or PNG, drawn with matplotlib's objects instead of its global state, which threads would share."""

from __future__ import annotations

import threading
import warnings
from enum import StrEnum
from io import BytesIO
from typing import Any, Final

from kqueue.charts import draw
from kqueue.charts.data import Chart
from kqueue.charts.themes import Theme, settings_of
from kqueue.errors import ConfigError
from kqueue.text import one_line

_DOTS_PER_INCH: Final = 144
#: Lock for matplotlib's settings and the warning filters, which are global.
_GLOBALS: Final = threading.Lock()


class Form(StrEnum):
    """The formats of pictures, named by their file endings."""

    SVG = "svg"
    PNG = "png"


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
    settings: Any = settings_of(theme)
    held = BytesIO()
    with _GLOBALS, mpl.rc_context(settings), warnings.catch_warnings():
        # A label can have characters that no installed font has. They are drawn as boxes.
        warnings.filterwarnings("ignore", message="Glyph .* missing from font")
        figure = Figure(layout="constrained")
        draw.draw(figure, chart)
        figure.savefig(held, format=form.value, dpi=_DOTS_PER_INCH, metadata=none | {"Title": one_line(chart.title)})
    return held.getvalue()
