"""The history of an operator: revisions that checks judged, in changing environments."""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any
from uuid import UUID, uuid4

import httpx
import pytest
from sqlalchemy import Engine

from kqueue.categories import Category
from kqueue.contract import Outcome, Request
from kqueue.features.check import operators
from kqueue.features.check.run import Check, Row, sides
from kqueue.features.duel.duels import Duel
from kqueue.trees import Clone
from tests.features.check.repositories import LIST, TAIL, Repository
from tests.http.standin import Served, end, submit
from tests.samples import ended, passed
from tests.web.browsing import NEEDS_CHROMIUM, violations
from tests.web.fixtures import *  # noqa: F403
from tests.web.reading import HOSTILE, drawn, judged, shown, took

OLD, NEW = {"driver": "570.1", "torch": "2.13"}, {"driver": "580.2", "torch": "2.14"}
LABEL = "scale m=4, n=32 fp32"
ADDRESS = f"/checks/{LABEL}".replace(" ", "%20")


@pytest.fixture
def revisions(served: Served, engine: Engine, worker_id: UUID, tmp_path: Path) -> list[str]:
    """Judge two changes by checks, the second in a new environment and wrong, and return the three revisions."""
    clone, revisions = Repository(tmp_path / "clone"), list[str]()
    for day, files in enumerate(({}, {"src/mine/note.py": "x = 1\n"}, {"src/mine/parts.py": TAIL})):
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("GIT_COMMITTER_DATE", f"2026-01-0{3 + day}T00:00:00+02:00")
            revisions.append(clone.commit(files))
    first, second, third = revisions

    def run(base: str, head: str, outcomes: list[Outcome], milliseconds: tuple[float, float], where: Any) -> Row:
        def take(request: Request, outcome: Outcome, **fields: Any) -> Outcome:
            given = request.model_dump(mode="json", exclude_unset=True) | {"reuse": False, **fields}
            given.pop("trees" if fields else "", None)
            with served.client() as api:
                identity = submit(api, 0, **given, lane="cpu")
            assert end(engine, worker_id, identity, outcome, device="GPU A", **where)
            return outcome

        def fight(*rivals: Request) -> Duel:
            for number in range(7):
                for request, ms in zip(rivals, milliseconds, strict=True):
                    take(request, took(ms * (1 + number / 100)), batch="duel-0123456789ab-40")
            return Duel(reason="equal", ratio=1.0, interval=(0.995, 1.005))

        (folder := tmp_path / f"{uuid4()}").mkdir()
        both = sides(Clone(clone.folder), (base, head), folder, "kqueue.toml", None)
        judge: Callable[[Request], Any] = lambda request: take(request, outcomes.pop(0))  # noqa: E731
        [row] = [task() for task in Check(*both, judge, fight, batch=f"check-{uuid4().hex[:12]}").tasks(None)]
        return row

    right = passed(runtime=None, baseline=None)
    assert run(first, second, [right, right], (1.0, 4.0), OLD).state == "right"
    assert run(second, third, [ended(Category.WRONG_VALUES), right], (0, 0), NEW).state == "wrong"
    assert run(first, second, [right, right], (2.0, 8.0), NEW).state == "right"
    return revisions


def test_a_history(browser: httpx.Client, revisions: list[str]) -> None:
    """Revisions follow in the order of their commits, and a change of the environment breaks the line in its words."""
    listing = shown(browser, "/checks?name=SCALE")
    assert (ADDRESS.replace(",", "%2C").replace("=", "%3D") in listing, "<td>3</td>" in listing) == (True, True)
    assert LABEL not in shown(browser, "/checks?name=none")
    page = shown(browser, ADDRESS)
    assert [page.count(revision[:12]) for revision in revisions] == [2, 2, 1]
    rows = list(csv.DictReader(io.StringIO(browser.get(f"{ADDRESS}?format=csv").text)))
    names = [revision[:12] for revision in revisions]
    numbers = {name: number for number, name in enumerate(names)}
    found = [(numbers[row["revision"]], row["driver"], row["category"], row["processes"],
              *(float(row[name] or 0) for name in ("low_ms", "runtime_ms", "high_ms"))) for row in rows]  # fmt: skip
    assert found == [
        (0, "570.1", "passed", "7", 1.0, 1.03, 1.06), (0, "580.2", "passed", "7", 2.0, 2.06, 2.12),
        (1, "570.1", "passed", "7", 4.0, 4.12, 4.24), (1, "580.2", "passed", "7", 8.0, 8.24, 8.48),
        (2, "580.2", "wrong_values", "0", 0.0, 0.0, 0.0),
    ]  # fmt: skip
    assert drawn(browser, page) == 1
    picture = browser.get(f"{ADDRESS}/history.svg").text
    for words in ("driver 570.1 to 580.2", "torch 2.13 to 2.14", "GPU A, driver 580.2, torch 2.14", *names):
        assert (words[:8] if words in names else words) in picture, words


def test_a_range(
    browser: httpx.Client, served: Served, judge: Callable[..., None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is one operator, with a line for each drawn size."""
    clone, sizes = Repository(tmp_path / "clone"), iter((3, 7))
    monkeypatch.setattr(operators, "_drawn", lambda *_: next(sizes))
    revision = clone.commit({"kqueue.toml": LIST.replace("n = 32", "n = [1, 9]")})
    both = sides(Clone(clone.folder), (revision, revision), tmp_path, "kqueue.toml", None)

    def take(request: Request) -> Outcome:
        judged(served, judge, took(1), **request.model_dump(mode="json", exclude_unset=True) | {"reuse": False})
        return took(1)

    for _ in range(2):
        plan = Check(*both, take, lambda *_: Duel(), timed=False, batch=f"check-{uuid4().hex[:12]}")
        assert [task().state for task in plan.tasks(None)] == ["right"]
    [address] = re.findall(r'href="(/checks/[^"]+)"', shown(browser, "/checks"))
    assert "n%3D1..9" in address
    rows = csv.DictReader(io.StringIO(browser.get(f"{address}?format=csv").text))
    assert [(row["sizes"], row["processes"]) for row in rows] == [("n=3", "2"), ("n=7", "2")]
    assert all(f"n={size}, " in browser.get(f"{address}/history.svg").text for size in (3, 7))


def test_what_is_no_operator(browser: httpx.Client, served: Served, judge: Callable[..., None]) -> None:
    """Unknown and malformed names are refused, and foreign labels are text."""
    assert "No operator matches" in shown(browser, "/checks")
    label = f"{HOSTILE}/.."[:200]
    judged(served, judge, took(1), batch="check-1", problem_label=label, kernel_label=f"{HOSTILE} at {'0' * 12} of x")
    assert "No operator matches" in shown(browser, "/checks")
    for name, status in (("none", 404), ("x" * 201, 422), ("%00", 422)):
        for rest in ("", "/history.svg", "?format=csv"):
            shown(browser, f"/checks/{name}{rest}", status)
    at = f"a at {'0' * 12} of 2026-99-99T99:99:99Z"
    judged(served, judge, took(1), batch="check-1", problem_label=label, kernel_label=at)
    [address] = re.findall(r'href="(/checks/[^"]+)"', shown(browser, "/checks"))
    assert drawn(browser, shown(browser, address)) == 1


@NEEDS_CHROMIUM
def test_a_history_in_a_browser(visit: Callable[..., Any], token: Callable[[str], str], revisions: list[str]) -> None:
    """The operator is reached from the navigation, and axe finds nothing."""
    tab = visit()
    tab.goto("/login")
    tab.fill("#token", token("read"))
    tab.press("#token", "Enter")
    tab.get_by_role("link", name="Checks", exact=True).click()
    assert violations(tab) == []
    tab.get_by_role("link", name=LABEL).click()
    tab.get_by_text(revisions[2][:12]).wait_for()
    assert violations(tab) == []
