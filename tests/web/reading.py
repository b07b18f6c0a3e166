"""Steps of the tests of pages: requests with results, and checks of a page's safety."""

from __future__ import annotations

from collections.abc import Callable
from html.parser import HTMLParser
from typing import Any
from uuid import UUID, uuid4

import httpx
from sqlalchemy import Engine, text

from kqueue.categories import Category
from kqueue.contract import Outcome
from kqueue.evidence import Evidence, InputTensor
from kqueue.states import SearchState
from kqueue.store import searches
from kqueue.store.searches import Run
from tests.http.standin import Served, end
from tests.samples import ended, measurement, passed, request_fields

#: Markup, a template, a formula, and bidirectional control characters.
HOSTILE = '"><script>alert(1)</script><img src=x onerror=alert(1)>{{7*7}}\x1b[31m\u202egnp\u2066'


class Elements(HTMLParser):
    """The names and attributes of a page's elements."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str]]] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, {name: value or "" for name, value in attrs}))

    def all(self, tag: str, attribute: str) -> list[str]:
        """Return an attribute's values of all elements with a given name."""
        return [attributes[attribute] for name, attributes in self.found if name == tag and attribute in attributes]


def check(answer: httpx.Response) -> None:
    """Check a page's headers, that scripts and styles are the server's files only, and that foreign text is inert."""
    assert answer.headers["content-type"] == "text/html; charset=utf-8"
    policy = answer.headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "frame-ancestors 'none'" in policy
    assert "unsafe" not in policy
    assert answer.headers["x-content-type-options"] == "nosniff"
    assert answer.headers["cache-control"] == "no-store"
    assert answer.headers["referrer-policy"] in {"no-referrer", "same-origin"}
    for sign in ("\x00", "\x1b", "\u202e", "\u2066", "<script>alert", "onerror=alert(1)>{", "49\\x1b"):
        assert sign not in answer.text, (answer.url, sign)
    for name, attributes in Elements(answer.text).found:
        assert name not in {"style", "iframe", "object", "base"}
        assert not any(key.startswith("on") or key == "style" for key in attributes), (name, attributes)
        for key in ("src", "srcset", "href", "action"):
            assert attributes.get(key, "/").startswith(("/", "#")), (name, attributes)
        if name == "script":
            assert attributes["src"].startswith("/static/")
        if name == "img":
            assert attributes["src"].startswith("/static/") or ".svg?" in attributes["src"]


def shown(browser: httpx.Client, address: str, status: int = 200) -> str:
    """Return a page, after a check of its status, its policy and its escaped text."""
    answer = browser.get(address)
    assert answer.status_code == status, (address, answer.text)
    check(answer)
    return answer.text


def drawn(browser: httpx.Client, page: str) -> int:
    """Request all charts of a page in both themes, and return their number."""
    elements = Elements(page)
    sources = elements.all("source", "srcset")
    images = [address for address in elements.all("img", "src") if not address.startswith("/static/")]
    assert [one.replace("=dark", "=light") for one in sources] == images
    assert all(elements.all("img", "alt")[-len(images) :] if images else [True])
    for address in (*sources, *images):
        answer = browser.get(address)
        assert answer.status_code == 200, (address, answer.text)
        assert answer.headers["content-type"] == "image/svg+xml"
        assert answer.content.lstrip().startswith(b"<?xml")
        assert b"<script" not in answer.content
    return len(images)


def found_wrong(message: str = "") -> Outcome:
    """Return the outcome of a kernel that was wrong on the inputs of the problem `TAIL`."""
    inputs = (InputTensor(shape=(4, 3001), dtype="float32"),)
    return ended(Category.WRONG_VALUES, message=message or "wrong", evidence=Evidence(inputs=inputs))


def end_all_wrong(engine: Engine, worker_id: UUID, message: str = "") -> None:
    """End all queued evaluations as wrong in the same way."""
    with engine.connect() as connection:
        ids = connection.scalars(text("SELECT id FROM evaluations WHERE state = 'queued'")).all()
    for identity in ids:
        end(engine, worker_id, identity, found_wrong(message))


def judged(served: Served, judge: Callable[..., None], outcome: Outcome | None = None, **fields: Any) -> UUID:
    """Submit an evaluation, and end it as passed or with the outcome."""
    with served.client() as api:
        answer = api.post("/v1/evaluations", json={**request_fields(uuid4().int), "reuse": False, **fields})
    identity = UUID(answer.raise_for_status().json()["evaluation_id"])
    judge(identity, outcome)
    return identity


def took(ms: float) -> Outcome:
    """Return a passed outcome with this runtime and a reference of 1 ms."""
    return passed(runtime=measurement(ms), baseline=measurement(1.0))


def search(engine: Engine, name: str, said: str = "fine", **plan: object) -> Run:
    """Create a search of three steps: 0, then 1 and 2 from 0, then 3 from 1. The last is the best."""
    run = searches.create(engine, name, {"algorithm": "PS", "metrics": ["inverse_runtime"], **plan})
    planned = [
        [{"number": 0, "kernel": "class ModelNew: start"}],
        [{"number": 1, "parent": 0, "prompt": f"prompt {said}"}, {"number": 2, "parent": 0, "prompt": None}],
        [{"number": 3, "parent": 1, "prompt": "again"}],
    ]
    for number, proposals in enumerate(planned):
        searches.begin_step(engine, run.id, number, proposals, None)
    known = {
        0: {"category": "passed", "scores": {"inverse_runtime": 1.0}, "speedup": 1.0},
        1: {"category": "passed", "scores": {"inverse_runtime": 2.5}, "speedup": 2.5, "feedback": f"feedback {said}"},
        2: {"category": "crashed", "message": said},
        3: {"category": "passed", "scores": {"inverse_runtime": 4.0}, "kernel": f"class ModelNew: best  # {said}"},
    }
    for number, columns in known.items():
        searches.ended(engine, run.id, number, **columns)
    test = {"number": 3, "scores": None, "duel": {"message": f"B is {said}"}}
    searches.update_step(engine, run.id, 2, ended=True, best=3, test=test)
    searches.set_state(engine, run.id, SearchState.DONE)
    return run
