"""Problems, and comparisons of two kernels."""

from __future__ import annotations

import csv
import hashlib
import io
from collections.abc import Callable
from threading import BoundedSemaphore
from uuid import UUID, uuid4

import httpx
import pytest

from kqueue import charts, differences
from kqueue.categories import Category
from kqueue.charts import Theme
from kqueue.contract import Outcome, Request
from kqueue.evidence import Evidence, Profile
from kqueue.store import sharing
from kqueue.text import cell
from kqueue.web import export, pictures, present, problems
from tests.http.standin import Served, end
from tests.samples import ended, examined, passed, request_fields, timed
from tests.store.steps import lasting_worker
from tests.web.reading import HOSTILE, Elements, drawn, found_wrong, judged, shown, took
from tests.web.visiting import OWN_FORM

Judge = Callable[..., None]


@pytest.fixture
def problem_hash() -> str:
    """The hash of the problem in all requests of this module."""
    return Request.model_validate(request_fields()).problem_hash


def test_a_problem_with_its_leaderboard(
    served: Served, browser: httpx.Client, judge: Judge, engine, problem_hash
) -> None:
    """The fastest kernel is first, with spread, backend and producer, next to charts, counts and the owners' board."""
    judged(served, judge, timed(0.5), kernel_label="slow one", problem_label="relu")
    fast = judged(served, judge, took(0.25), kernel_label="fast one", problem_label="relu", producer="ada")
    judged(served, judge, ended(Category.CRASHED), problem_label="relu")
    sharing.share(engine, problem_hash, leaderboard=True)
    page = shown(browser, f"/problems/{problem_hash}")
    assert "2.00x (1.72x to 2.33x)" in page.split('id="owners"')[1]
    assert page.index("fast one") < page.index("slow one")
    for told in ("4.00x", "2.00x", "0.225 to 0.275", f"/evaluations/{fast}", "crashed", "relu", "Model"):
        assert told in page, told
    assert drawn(browser, page) == 2
    assert "No matching kernel" in shown(browser, f"/problems/{problem_hash}?precision=bf16")
    assert "No matching kernel" not in shown(browser, f"/problems/{problem_hash}?precision=&device=&backend=torch")
    assert "No matching kernel" in shown(browser, f"/problems/{problem_hash}?device=another")


def test_a_kernel_is_entered_on_its_problem_page(served: Served, browser: httpx.Client, judge: Judge) -> None:
    """The form submits it with backend, lane and name. A form of another site and a wrong field are refused."""
    judged(served, judge, took(0.5))
    address = f"/problems/{Request.model_validate(request_fields()).problem_hash}"
    assert f"{address}/kernels" in Elements(shown(browser, address)).all("form", "action")
    entered = {"kernel": "class ModelNew:\r\n    é = 1 + 1", "backend": "torch", "lane": "", "kernel_label": "pasted"}
    made = browser.post(f"{address}/kernels", data=entered, headers=OWN_FORM)
    assert all(told in shown(browser, made.headers["location"]) for told in ("pasted", "queued", "é"))
    assert browser.post(f"{address}/kernels", data=entered, headers={"Sec-Fetch-Site": "cross-site"}).status_code == 403
    wrong = browser.post(f"{address}/kernels", data=entered | {"backend": "fortran"}, headers=OWN_FORM)
    assert (wrong.status_code, "fortran" in wrong.text) == (422, True)


def test_a_problem_in_words(served: Served, browser: httpx.Client, judge: Judge) -> None:
    """A problem has its docstrings, signature and inputs. Its name on an evaluation's page leads to it."""
    source = f"class Model:\n    {f'Adds {HOSTILE}'!r}\n    def forward(self, x: int, y=2) -> int: ..."
    one = judged(served, judge, found_wrong(), problem=source)
    address = f"/problems/{hashlib.sha256(source.encode()).hexdigest()}"
    page = shown(browser, f"/evaluations/{one}")
    assert "The problem: Adds " in page
    assert address in Elements(page).all("a", "href")
    page = shown(browser, address)
    for told in ("Adds ", "forward(x: int, y=2) -&gt; int", "float32[4, 3001]"):
        assert told in page, told
    plain = "x = 1"
    judged(served, judge, problem=plain)
    page = shown(browser, f"/problems/{hashlib.sha256(plain.encode()).hexdigest()}")
    assert "The source has no description" in page


def test_the_roofline_of_a_problem(served, browser, judge, engine, worker_id, problem_hash) -> None:
    """Each kernel's last profile on the newest one's device is drawn and listed, and the outcomes are drawn once."""
    judged(served, judge, examined("nobody asked"))
    page = shown(browser, f"/problems/{problem_hash}")
    assert "Roofline" not in page
    assert page.split('id="counts"')[1].split("</section>")[0].count("<svg") == 1
    lasting_worker(engine, "gpu", "GPU-0")

    def profiled(label: str, device: str, outcome: Outcome) -> UUID:
        fields = {"kernel_label": label, "kernel": f"class ModelNew: {label!r}\n", "lane": "gpu"}
        identity = judged(served, lambda *_: None, **fields, settings={"examine": {"profile": True}})
        assert end(engine, worker_id, identity, outcome, device=device)
        return identity

    profiled("elsewhere", "another device", examined("elsewhere"))
    old = profiled(HOSTILE, "test device", examined("old"))
    new = profiled(HOSTILE, "test device", examined(HOSTILE))
    other = profiled("plain", "test device", examined("of plain"))
    profiled("told nothing", "a third device", passed(evidence=Evidence(profile=Profile(by="cupti", seconds=1.0))))
    page = shown(browser, f"/problems/{problem_hash}")
    [section] = [part for part in page.split("<section") if 'id="roofline"' in part]
    assert section.index(f"/evaluations/{other}") < section.index(f"/evaluations/{new}")
    assert "of plain" in section
    assert "50" in section
    for absent in (str(old), "elsewhere", "told nothing", "nobody asked"):
        assert absent not in section
    assert drawn(browser, section) == 1


def test_problems_are_listed_and_found(served, browser, judge, monkeypatch, problem_hash) -> None:
    """The list is paged, and filtered by a part of the name or by the beginning of the hash."""
    monkeypatch.setattr(problems, "_PAGE", 2)
    for number in range(3):
        judged(served, judge, problem=f"class Model: {number} = ...", problem_label=f"softmax-{number}")
    first = shown(browser, "/problems")
    assert "softmax-2" in first
    assert "softmax-0" not in first
    [more] = [a["href"] for name, a in Elements(first).found if name == "a" and a.get("rel") == "next"]
    second = shown(browser, more)
    assert "softmax-0" in second
    assert "softmax-2" not in second
    assert "softmax-0" in shown(browser, "/problems?name=MAX-0")
    assert "No problem matches" in shown(browser, "/problems?name=m%25x")
    shown(browser, f"/problems/{problem_hash}", 404)
    for wrong in ("/problems/zz", "/problems?cursor=x", "/problems?name=%00", f"/problems/{problem_hash}?precision=x"):
        shown(browser, wrong, 422)


def test_lists_as_csv(served: Served, browser: httpx.Client, judge: Judge, problem_hash: str) -> None:
    """A file has all rows and a header, and spreadsheet formulas are text."""
    judged(served, judge, took(0.5), kernel_label="=HYPERLINK(1)", problem_label='@sum, "quoted"')
    answer = browser.get(f"/problems/{problem_hash}?format=csv")
    assert answer.headers["content-type"] == "text/csv; charset=utf-8"
    assert "attachment" in answer.headers["content-disposition"]
    [row] = csv.DictReader(io.StringIO(answer.text))
    assert (row["kernel_label"], row["speedup"], row["runtime_ms"]) == ("'=HYPERLINK(1)", "2.0", "0.5")
    [known] = csv.DictReader(io.StringIO(browser.get("/problems?format=csv").text))
    assert (known["problem_label"], known["kernels"]) == ('\'@sum, "quoted"', "1")
    assert browser.get(f"/problems/{'0' * 64}?format=csv").status_code == 404


def test_a_long_list_as_csv(served, browser, judge, monkeypatch, problem_hash) -> None:
    """Each row is present once and in order, up to the limit of rows."""
    for number in range(5):
        judged(served, judge, took(0.1 * (number + 1)), kernel_label=f"number {number}")
    monkeypatch.setattr(export, "_CHUNK", 2)
    address = f"/problems/{problem_hash}?format=csv"
    rows = [f"number {number}" for number in range(5)]
    for most, expected in ((100, rows), (4, rows[:4]), (3, rows[:3])):
        monkeypatch.setattr(export, "MOST_ROWS", most)
        assert [row["kernel_label"] for row in csv.DictReader(io.StringIO(browser.get(address).text))] == expected
    monkeypatch.setattr(problems, "_FILE_BOARD", 1)
    assert [row["kernel_label"] for row in csv.DictReader(io.StringIO(browser.get(address).text))] == rows[:1]


def test_formulas_are_defused() -> None:
    """Numbers are unchanged, texts that begin a formula are quoted, also after semicolons, tabs and line ends."""
    for text in ("=1+1", "+1", "-1", "@x", "  =1", "\t=1", "\n=1", "\u00a0=1", "\uff1d1", '"=1', "\tx"):
        assert cell(text).startswith("'")
    assert "\x1b" not in cell("\x1b[31m")
    for given, expected in {
        -1.5: "-1.5",
        "a=1": "a=1",
        "a;=1;b": "a;'=1;b",
        "a; \u00a0@x": "a;' \u00a0@x",
        "a\t-1": "a\t'-1",
        "a\n\n +1": "a\n\n' +1",
        'a;"=1"': 'a;\'"=1"',
        "a;b=1": "a;b=1",
        "a, =1": "a, =1",
    }.items():
        assert cell(given) == expected


def test_two_kernels_side_by_side(served: Served, browser: httpx.Client, judge: Judge) -> None:
    """The page has difference, verdicts and times, by evaluations or by the kernels' hashes."""
    one = judged(served, judge, timed(0.5), kernel="class ModelNew: a = 1\n")
    other = judged(served, judge, took(0.25), kernel="class ModelNew: b = 2\n")
    page = shown(browser, f"/compare/{one}/{other}")
    for told in ("4.00x", "2.00x (1.75x to 2.28x)", "the second is 2x as fast as the first", "-class ModelNew: a = 1"):
        assert told in page, told
    assert drawn(browser, page) == 1
    sources = ("class ModelNew: a = 1\n", "class ModelNew: b = 2\n")
    hashes = [Request.model_validate(request_fields(kernel=kernel)).kernel_hash for kernel in sources]
    assert f"/evaluations/{other}" in shown(browser, f"/compare/{hashes[0]}/{hashes[1]}")
    assert "The sources are the same" in shown(browser, f"/compare/{one}/{one.hex[:12]}")
    shown(browser, f"/compare/{one}/{uuid4()}", 404)
    shown(browser, f"/compare/{one}/{'0' * 64}", 404)
    shown(browser, f"/compare/{one}/zz", 422)


def test_white_space_at_the_ends_of_lines_is_not_coloured() -> None:
    """Pygments would take quadratic time for many lines of it."""
    assert present.source("if x:\n" + "    \n" * 3 + "    y = 1") == present.source("if x:\n\n\n\n    y = 1")


def test_sources_of_too_many_lines_are_not_compared_here(served, browser, judge, monkeypatch) -> None:
    """The pages have all other parts, and name the command for the comparison."""
    monkeypatch.setattr(differences, "_LINES", 20)
    empty = "\n" * 20
    one, other = (judged(served, judge, took(0.5), kernel=f"class ModelNew: {name}\n{empty}") for name in "ab")
    told = f"<code>kqueue diff {one} {other}</code>"
    for address in (f"/compare/{one}/{other}", f"/evaluations/{one}?against={other}"):
        page = shown(browser, address)
        assert told in page
        assert "The sources are the same" not in page
        assert 'class="added"' not in page


def test_a_chart_waits_for_few_others(served, browser, judge, monkeypatch, problem_hash) -> None:
    """Above the limit of drawings the answer is a 503 with Retry-After, and a finished drawing frees its slot."""
    judged(served, judge, took(0.5))
    places = BoundedSemaphore(1)
    monkeypatch.setattr(pictures, "_places", places)
    address = f"/problems/{problem_hash}/board.svg"
    assert [browser.get(address).status_code for _ in range(3)] == [200] * 3
    with places:
        refused = browser.get(address)
    assert (refused.status_code, refused.headers["retry-after"].isdecimal()) == (503, True)
    assert browser.get(address).status_code == 200


def test_a_chart_is_drawn_once_for_what_it_shows(served, browser, judge, monkeypatch, problem_hash) -> None:
    """Each theme has a cached chart, a new verdict makes a new one, and the cache keeps the latest ones."""
    drawings: list[object] = []

    def counted(chart: charts.Chart, theme: Theme) -> bytes:
        drawings.append(chart)
        return f"{theme} {chart.title.ljust(50)} {len(drawings)}".encode()

    monkeypatch.setattr(pictures, "render", counted)
    address = f"/problems/{problem_hash}/board.svg"
    judged(served, judge, took(0.5))
    first = [browser.get(address, params={"theme": theme}).content for theme in ("light", "dark", "light", "dark")]
    assert (first[0], first[1], len(drawings)) == (first[2], first[3], 2)
    judged(served, judge, took(0.25), kernel="class ModelNew: faster")
    assert browser.get(address).content not in first
    assert len(drawings) == 3

    few = pictures.Drawn(len(first[0]))
    some = [charts.Leaderboard(title, [charts.Bar("fast", 2.0)]) for title in ("one", "another")]
    for chart, number in zip([*some, *some[::-1]], (4, 5, 5, 6), strict=True):
        few.picture(chart, Theme.LIGHT)
        assert len(drawings) == number


def test_what_others_wrote_is_text(served: Served, browser: httpx.Client, judge: Judge) -> None:
    """Hostile labels, sources, producers and messages are escaped on every page and chart."""
    fields = {
        "problem": f"class Model: {HOSTILE!r} # {HOSTILE}",
        "kernel": f"class ModelNew: pass # {HOSTILE}",
        "problem_label": HOSTILE,
        "kernel_label": HOSTILE,
        "producer": "<b>$\\frac{1}{0}$",
    }
    one = judged(served, judge, took(0.5), **fields)
    other = judged(served, judge, ended(Category.CRASHED, message=HOSTILE, log=HOSTILE), **fields)
    problem_hash = Request.model_validate(request_fields(problem=fields["problem"])).problem_hash
    assert "&lt;script&gt;" in shown(browser, "/problems")
    assert drawn(browser, shown(browser, f"/problems/{problem_hash}")) == 2
    assert drawn(browser, shown(browser, f"/compare/{one}/{other}")) == 1


def test_without_matplotlib(served, browser, judge, monkeypatch, problem_hash) -> None:
    """The page has its tables and names the package to install, like the chart's address."""
    judged(served, judge, took(0.5))
    monkeypatch.setattr(problems, "can_draw", lambda: False)
    page = shown(browser, f"/problems/{problem_hash}")
    assert drawn(browser, page) == 0
    assert "pip install &#39;kqueue[plots]&#39;" in page or "pip install 'kqueue[plots]'" in page
    monkeypatch.setitem(__import__("sys").modules, "matplotlib", None)
    assert "kqueue[plots]" in shown(browser, f"/problems/{problem_hash}/best.svg", 404).replace("&#39;", "'")
    assert pictures.can_draw()
