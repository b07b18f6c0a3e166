"""Searches and tuning runs."""

from __future__ import annotations

import csv
import io
from itertools import product

import httpx
from sqlalchemy import Engine

from kqueue.store import searches
from tests.web.fixtures import *  # noqa: F403
from tests.web.reading import HOSTILE, drawn, search, shown

FORMS = ("{}", "{}/x", "x/{}", "{}/curve.svg", "x/{}/curve.svg", "{}?format=csv")


def test_a_search_with_its_tree(engine: Engine, browser: httpx.Client) -> None:
    """The page has steps, ancestry and scores, and the best proposal or the requested one in full."""
    run = search(engine, "one", problem_label="relu")
    page = shown(browser, f"/runs/{run.id}")
    for told in ("The best: proposal 3", "ModelNew", "relu", "again", "of the start (A) with the best (B): B is fine"):
        assert told in page, told
    places = [
        page.index(f'class="depth-{depth}"><a href="/runs/{run.id}?proposal={number}#')
        for number, depth in ((0, 0), (1, 1), (3, 2), (2, 1))
    ]
    assert places == sorted(places)
    assert drawn(browser, page) == 1
    asked = shown(browser, "/runs/one?proposal=1")
    assert "prompt fine" in asked
    assert "feedback fine" in asked
    assert "has no proposal 9" in shown(browser, f"/runs/{run.id}?proposal=9")
    rows = list(csv.DictReader(io.StringIO(browser.get(f"/runs/{run.id}?format=csv").text)))
    assert [row["parent"] for row in rows] == ["", "0", "1", "0"]
    shown(browser, "/runs/nobody", 404)
    shown(browser, f"/runs/{run.id}?proposal=x", 422)


def test_what_can_be_no_run(browser: httpx.Client) -> None:
    """Invalid names are a 422 for pages and charts of one run and of two."""
    for name, form in product(("%00", "a%00b", "x" * 101), FORMS):
        shown(browser, f"/runs/{form.format(name)}", 422)


def test_runs_are_listed(engine: Engine, browser: httpx.Client) -> None:
    """The latest is first, names are filtered by a part, and CSV is offered."""
    search(engine, "alpha")
    search(engine, "beta", problem_label=f"={HOSTILE}")
    page = shown(browser, "/runs")
    assert page.index("beta") < page.index("alpha")
    assert "alpha" not in shown(browser, "/runs?name=ET")
    assert "No run matches" in shown(browser, "/runs?name=%25")
    rows = list(csv.DictReader(io.StringIO(browser.get("/runs?format=csv").text)))
    assert [(row["name"], row["proposals"], row["problem_label"][:2]) for row in rows] == [
        ("beta", "4", "'="),
        ("alpha", "4", ""),
    ]


def test_two_runs_side_by_side(engine: Engine, browser: httpx.Client) -> None:
    """Both runs and one chart are shown, with a note if their metrics differ."""
    one, other = search(engine, "alpha"), search(engine, "beta", metrics=["memory"])
    page = shown(browser, f"/runs/{one.id}/{other.id}")
    assert "alpha" in page
    assert "beta" in page
    assert "different metrics" in page
    assert drawn(browser, page) == 1
    assert "different metrics" not in shown(browser, "/runs/alpha/alpha")
    shown(browser, "/runs/alpha/nobody", 404)


def test_what_models_wrote_is_text(engine: Engine, browser: httpx.Client) -> None:
    """Prompts, answers, kernels, messages and plans are escaped."""
    search(engine, "hostile", HOSTILE, problem_label=HOSTILE, given=HOSTILE)
    for number in (1, 2, 3):
        assert "&lt;script&gt;" in shown(browser, f"/runs/hostile?proposal={number}")
    assert drawn(browser, shown(browser, "/runs/hostile/hostile")) == 1


def test_a_record_of_another_version(engine: Engine, browser: httpx.Client) -> None:
    """A run with an incomplete plan and an inconsistent tree is shown without an error."""
    plans: list[dict[str, object]] = [{"metrics": []}, {"metrics": "x"}, {"metrics": [3]}, {}]
    for number, plan in enumerate(plans):
        run = searches.create(engine, f"odd-{number}", plan)
        searches.begin_step(engine, run.id, 0, [{"number": 0, "parent": 1}, {"number": 1, "parent": 0}], None)
        searches.ended(engine, run.id, 0, category="of_another_version")
        page = shown(browser, f"/runs/{run.id}")
        assert "of_another_version" in page
        assert drawn(browser, page) == 1
