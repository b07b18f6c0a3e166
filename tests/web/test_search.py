"""Search for words."""

from __future__ import annotations

import csv
import io
from collections.abc import Callable

import httpx

from kqueue.categories import Category
from tests.http.standin import Served
from tests.samples import ended
from tests.web.reading import HOSTILE, judged, shown

Judge = Callable[..., None]


def test_words_in_sources_and_logs(served: Served, browser: httpx.Client, judge: Judge) -> None:
    """Each hit has its matching lines, also as CSV."""
    kernel = "class ModelNew:\n    pass\n    y = tl.dot(a, b)\n"
    found = judged(served, judge, kernel=kernel, kernel_label="mine", problem="class Model: dot = 1")
    failed = judged(served, judge, ended(Category.CRASHED, log="first\nno dot here\n"))
    page = shown(browser, "/search?q=dot")
    for told in (f"/evaluations/{found}", "mine", "y = tl.dot(a, b)", f"/evaluations/{failed}", "no dot here"):
        assert told in page, told
    assert "class Model: dot = 1" in page
    assert "first" not in page
    assert "None." in shown(browser, "/search?q=tl.store")
    rows = list(csv.DictReader(io.StringIO(browser.get("/search?q=tl.dot&format=csv").text)))
    assert [(row["where"], row["label"], row["line"], row["text"]) for row in rows] == [
        ("kernels", "mine", "3", "y = tl.dot(a, b)")
    ]


def test_what_cannot_be_looked_for(browser: httpx.Client) -> None:
    """An empty search shows the form, and one without a word is refused and keeps its text in the form."""
    assert 'role="alert"' not in shown(browser, "/search")
    assert 'role="alert"' not in shown(browser, "/search?q=")
    for q in ("()", "a*", "a " * 20):
        assert 'role="alert"' in shown(browser, f"/search?q={q}", 422)
    shown(browser, "/search?q=%00", 422)
    shown(browser, f"/search?q={'x' * 201}", 422)


def test_hits_are_text(served: Served, browser: httpx.Client, judge: Judge) -> None:
    """The hits and the query are escaped."""
    judged(served, judge, ended(Category.CRASHED, log=f"script {HOSTILE}"), kernel=f"class ModelNew: x # {HOSTILE}")
    assert shown(browser, "/search?q=<script>alert").count("&lt;script&gt;alert") >= 3
