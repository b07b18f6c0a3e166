"""Charts as pictures: SVG and PNG, both themes, hostile text and empty charts."""

from __future__ import annotations

import struct
import subprocess
import sys
from datetime import UTC, datetime, timedelta
from pathlib import Path
from uuid import UUID
from xml.etree import ElementTree

import pytest

from kqueue import charts
from kqueue.categories import Blame, Category

#: Markup, a malformed formula, control characters, reversed text, and text longer than the space for it.
HOSTILE = "</text><script>alert(1)</script> $\\frac{$ & \x1b[2J\u202e\x00\n" + "x" * 500
START = datetime(2026, 1, 2, 8, tzinfo=UTC)


def points(*speedups: float | None, blame: Blame = Blame.NONE) -> list[charts.Point]:
    return [
        charts.Point(START + timedelta(minutes=place), speedup, blame, UUID(int=place))
        for place, speedup in enumerate(speedups)
    ]


def full(text: str) -> list[charts.Chart]:
    """One chart of each kind, with a text wherever one is possible."""
    failed = [one for blame in Blame for one in points(None, None, blame=blame)]
    return [
        charts.BestSoFar(text, [*points(1.0, 0.5, 2.25, 2.0), *failed]),
        charts.Leaderboard(text, [charts.Bar(text, 3.0, 2.5, 3.25, text), charts.Bar("plain", 0.5)]),
        charts.Categories(text, [charts.Stack(text, dict.fromkeys(Category, 3))]),
        charts.FastP(text, [0.0, 0.5, 1.5, 3.0], 8),
        charts.Times(text, [charts.Spread(text, 0.5, 0.75, 1, 1.25, 2, 100), charts.Spread("it", 1, 1, 1, 1, 1, 1)]),
        charts.SearchCurve(text, text, [charts.Curve(text, [(0, 1.0), (1, 3.0), (2, 2.0)], [(2, 2.5)])]),
        charts.Importances(text, {text: 0.75, "BLOCK": 0.25}),
        charts.Roofline(text, 4000.0, 60_000.0, [charts.Spot(text, 0.25, 500.0), charts.Spot("k", 100.0, 9000.0)]),
        charts.History(text, [text, "b"], [charts.Line(text, [(0, 1, 0.5, 1)]), charts.Line("b", [], [1], 0.5, text)]),
    ]


def empty(text: str) -> list[charts.Chart]:
    return [
        charts.BestSoFar(text, []),
        charts.Leaderboard(text, []),
        charts.Categories(text, [charts.Stack(text, {})]),
        charts.FastP(text, [], 0),
        charts.Times(text, []),
        charts.SearchCurve(text, text, [charts.Curve(text, [])]),
        charts.Importances(text, {}),
        charts.Roofline(text, 4000.0, 60_000.0, [charts.Spot("no operations", 0.0, 0.0)]),
        charts.History(text, [], []),
    ]


def words(picture: bytes) -> str:
    root = ElementTree.fromstring(picture)
    assert root.tag == "{http://www.w3.org/2000/svg}svg"
    assert not list(root.iter("{http://www.w3.org/2000/svg}script"))
    return "\n".join("".join(found.itertext()) for found in root.iter("{http://www.w3.org/2000/svg}text"))


def test_a_chart_has_two_themes_and_two_forms() -> None:
    """Files have no date, a PNG is equal byte by byte each time, and light and dark differ."""
    chart = full("Ada's kernels")[0]
    light, dark = (charts.render(chart, theme=theme) for theme in (charts.Theme.LIGHT, charts.Theme.DARK))
    assert "Ada's kernels" in words(light)
    assert "Ada's kernels" in words(dark)
    assert b"<dc:date>" not in light
    assert dark != light
    png = charts.render(chart, form=charts.Form.PNG)
    assert charts.render(chart, form=charts.Form.PNG) == png
    assert png.startswith(b"\x89PNG\r\n\x1a\n")
    width, height = struct.unpack(">II", png[16:24])
    assert width == 8 * 144
    assert 144 < height < 20 * 144


@pytest.mark.parametrize("chart", full(HOSTILE), ids=lambda chart: type(chart).__name__)
def test_hostile_text_is_shown_and_does_nothing(chart: charts.Chart) -> None:
    """A picture has no markup, formula or control character of a label, no line that is too long, and no chance."""
    svg = charts.render(chart)
    assert charts.render(chart) == svg
    shown = words(svg)
    assert "</text><script>" in shown
    assert "x" * 100 not in shown
    assert not set(shown) & set("\x1b\u202e\x00")


@pytest.mark.parametrize("chart", empty("Nobody's"), ids=lambda chart: type(chart).__name__)
def test_what_holds_nothing_says_so(chart: charts.Chart) -> None:
    """An empty chart is drawn with a note."""
    assert "nothing to show yet" in words(charts.render(chart))


def test_what_the_pictures_say() -> None:
    """Text states the best result so far, the share of problems at p, the counts by category and the medians."""
    best, board, categories, fast_p, times = (words(charts.render(chart)) for chart in full("it")[:5])
    assert "best so far: 2.25x" in best
    assert "the kernel failed (2)" in best
    assert "3.00x" in board
    assert all(f"{category} (3)" in categories for category in Category)
    # Four of eight problems have a correct kernel, two of them faster than 1, and one faster than 2.
    assert all(said in fast_p for said in ("correct: 4 of 8", "fast_1: 25%", "fast_2: 12%"))
    assert "1 ms, 100 calls" in times
    # A kernel exactly as fast as p is not faster.
    assert "fast_1: 0%" in words(charts.render(charts.FastP("it", [1.0, 1.0], 2)))


def test_many_points_are_one_image() -> None:
    """An SVG with one mark per point would take megabytes."""
    assert len(charts.render(charts.BestSoFar("it", points(*[1.0, 0.5] * 5000)))) < 400_000


def test_without_matplotlib_the_extra_is_named(tmp_path: Path) -> None:
    """The message names the package to install. Importing the charts needs no package."""
    (tmp_path / "matplotlib.py").write_text("raise ImportError('hidden')\n")
    code = """
from kqueue import charts
from kqueue.errors import ConfigError
try:
    charts.render(charts.Importances("it", {"a": 1.0}))
except ConfigError as error:
    print(error)
"""
    done = subprocess.run(
        [sys.executable, "-c", code], env={"PYTHONPATH": str(tmp_path)}, capture_output=True, text=True, check=True,
        cwd=Path(__file__).parents[2],
    )  # fmt: skip
    assert done.stdout == "a picture needs matplotlib (hidden): pip install 'kqueue[plots]'\n"
