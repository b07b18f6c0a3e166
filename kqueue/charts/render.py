"""Charts as SVG or PNG, by matplotlib's objects: no window, no state that two threads could spoil for each other."""

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
#: matplotlib's settings are the process's, and so are the filters of warnings.
_ALONE: Final = threading.Lock()


class Form(StrEnum):
    """The formats of pictures, as files are named."""

    SVG = "svg"
    PNG = "png"


def render(chart: Chart, *, theme: Theme = Theme.LIGHT, form: Form = Form.SVG) -> bytes:
    """Return a chart as a picture. The same chart gives the same bytes, under one version of matplotlib.

    Args:
        chart: what to draw. If it holds nothing, the picture says so.
        theme: light or dark.
        form: the format.

    Raises:
        ConfigError: matplotlib is not installed.
    """
    try:
        import matplotlib as mpl
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ConfigError(f"a picture needs matplotlib ({error}): pip install 'kqueue[plots]'") from None
    # Without a date, and without the version of what drew it.
    none: dict[str, Any] = {"Date": None, "Creator": None} if form is Form.SVG else {"Software": None}
    settings: Any = settings_of(theme)
    held = BytesIO()
    with _ALONE, mpl.rc_context(settings), warnings.catch_warnings():
        # A label may have characters that no font here has; they become boxes.
        warnings.filterwarnings("ignore", message="Glyph .* missing from font")
        figure = Figure(layout="constrained")
        draw.draw(figure, chart, theme)
        figure.savefig(held, format=form.value, dpi=_DOTS_PER_INCH, metadata=none | {"Title": one_line(chart.title)})
    return held.getvalue()
