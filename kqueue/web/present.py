"""Templates and their filters.

Every value in ``{{ }}`` is cleaned (:mod:`kqueue.text`), capped and escaped, so that templates are safe with untrusted
text. Only :func:`source` returns HTML, from a source that it cleans first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from datetime import UTC, datetime
from typing import Any, Final, cast
from urllib.parse import quote, urlencode

from jinja2 import ChoiceLoader, Environment, PackageLoader, PrefixLoader, StrictUndefined
from markupsafe import Markup
from pygments import highlight as colour
from pygments.formatters.html import HtmlFormatter
from pygments.lexers.python import PythonLexer

from kqueue import figures
from kqueue.categories import Blame, Category
from kqueue.registry import each_of, features
from kqueue.text import clean, short
from kqueue.web import export, files

#: The main pages in the order of the navigation: path and name.
NAVIGATION: Final = (
    ("/", "Now"),
    ("/evaluations", "Evaluations"),
    ("/problems", "Problems"),
    ("/batches", "Batches"),
    *each_of("navigation"),
    ("/days", "Days"),
    ("/cost", "Cost"),
    ("/search", "Search"),
)

#: Maximum characters of a value.
_LONGEST: Final = 100_000
#: Maximum characters of a source with syntax highlighting.
_COLOURED: Final = 200_000
#: Signs by blame, so that colour is never the only mark of a failure.
_MARKS: Final = {Blame.NONE: "✓", Blame.CANDIDATE: "✗", Blame.PROBLEM: "◆", Blame.FLEET: "▲", Blame.NOBODY: "–"}


def render(template: str, **fields: Any) -> str:
    """Return a rendered template."""
    return _templates.get_template(template).render(**fields)


def source(text: str) -> Markup:
    """Return a Python source with line numbers and syntax highlighting by classes of the style sheet.

    A source that is too long is returned without highlighting, and cut.
    """
    shown = "\n".join(map(str.rstrip, clean(text).split("\n")))  # Pygments is quadratic in white space.
    if len(shown) > _COLOURED:
        return Markup("<pre>{}</pre>").format(_capped(shown, _COLOURED))
    return Markup(colour(shown, PythonLexer(stripnl=False), _FORMATTER))  # noqa: S704 Pygments escapes


def changes(lines: Iterable[str]) -> list[tuple[str, str]]:
    """Return the lines of a unified diff, each with its CSS class."""
    kinds = {"+": "added", "-": "removed", "@": "place"}
    return [(kinds.get(line[:1], "same"), line) for line in lines]


def _finalize(value: object) -> object:
    if value is None:
        return ""
    return value if isinstance(value, Markup) else _capped(clean(value), _LONGEST)


def _capped(text: str, most: int) -> str:
    return text if len(text) <= most else f"{text[:most]} … ({len(text) - most} more characters)"


def _seconds(value: float | None) -> str:
    """Return a duration: ``0.42 s``, ``12 s``, ``3 min 4 s``, ``2 h 5 min``."""
    if value is None:
        return ""
    if value < 10:
        return f"{value:.2g} s" if value < 1 else f"{value:.1f} s"
    whole = round(value)
    if whole < 60:
        return f"{whole} s"
    return f"{whole // 60} min {whole % 60} s" if whole < 3600 else f"{whole // 3600} h {whole % 3600 // 60} min"


def _size(value: float | None) -> str:
    """Return a number of bytes: ``512 B``, ``1.5 KiB``, ``3.2 GiB``."""
    if value is None:
        return ""
    for unit in ("B", "KiB", "MiB"):
        if value < 1024:
            return f"{value:.0f} B" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} GiB"


_FORMATTER: Final = HtmlFormatter(cssclass="source", linenos="inline", wrapcode=True)
_OF_FEATURES: Final = {name: PackageLoader(one.templates) for name, one in features().items() if one.templates}
_templates: Final = Environment(
    loader=ChoiceLoader([PackageLoader("kqueue.web"), PrefixLoader(_OF_FEATURES)]),
    autoescape=True,
    undefined=StrictUndefined,
    finalize=_finalize,
    trim_blocks=True,
    lstrip_blocks=True,
)
_FILTERS: Final[dict[str, Callable[..., Any]]] = {
    "brief": figures.brief,
    "budget": figures.budget,
    "gib": figures.gib,
    "milliseconds": figures.milliseconds,
    "moment": figures.moment,
    "ratio": figures.ratio,
    "speedup": figures.speedup,
    "seconds": _seconds,
    "short": short,
    "size": _size,
    "step": figures.step,
}
_OWN: Final[dict[str, Callable[[Any], object]]] = {
    "ago": lambda moment: f"{figures.age(moment)} ago",
    "blame_of": lambda category: Category(category).blame,
    "count": lambda number: f"{number:,.0f}".replace(",", "\u2009"),  # thin spaces
    "mark": lambda blame: _MARKS[Blame(blame)],
    "path": lambda value: quote(str(value), safe=""),
    "percent": lambda share: "" if share is None else f"{share:.0%}",
    "query": lambda fields: urlencode({name: value for name, value in fields.items() if value not in (None, "")}),
    "seconds_since": lambda moment: max(0.0, (datetime.now(UTC) - moment).total_seconds()),
}
_GLOBALS: Final[dict[str, Any]] = {"address": files.address, "navigation": NAVIGATION, "offered": export.offered}
cast("dict[str, Any]", _templates.filters).update(_FILTERS | _OWN)
cast("dict[str, Any]", _templates.globals).update(_GLOBALS)
