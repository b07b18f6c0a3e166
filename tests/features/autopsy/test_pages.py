"""Autopsies on the page, with a stand-in for the worker."""

from __future__ import annotations

from collections.abc import Callable, Generator
from uuid import UUID

import httpx
import pytest
from sqlalchemy import Engine

from kqueue.config import Config
from kqueue.features.autopsy import pages as autopsy
from tests.features.autopsy.tail import TAIL
from tests.http.standin import Served, submit
from tests.waiting import until
from tests.web.fixtures import *  # noqa: F403
from tests.web.reading import HOSTILE, end_all_wrong, found_wrong, judged, shown
from tests.web.visiting import OWN_FORM, visitor


@pytest.fixture
def served(serve: Callable[[Config], Served], config: Config, worker_id: UUID) -> Served:
    """A server with autopsies that end with the test."""
    return serve(config)


@pytest.fixture
def browser(served: Served, token: Callable[[str], str]) -> Generator[httpx.Client]:
    """A browser that is logged in with the scope `problems`."""
    with visitor(served, token("problems")) as client:
        yield client


@pytest.fixture
def wrong(served: Served, judge: Callable[..., None]) -> UUID:
    return judged(served, judge, found_wrong(HOSTILE), problem=TAIL, kernel_label=HOSTILE)


def test_a_failure_is_shrunk(
    browser: httpx.Client, served: Served, token, engine: Engine, worker_id: UUID, wrong: UUID
) -> None:
    """A button starts it, the page shows its progress and finally its program, and foreign text is escaped."""
    address = f"/evaluations/{wrong}/autopsy"
    assert "<button>Autopsy" in browser.get(f"/evaluations/{wrong}").text
    assert "has no autopsy of it" in browser.get(address).text
    assert browser.get(f"/evaluations/{str(wrong)[:8]}/autopsy").headers["location"] == address
    assert browser.get(f"{address}/repro.py").status_code == 404
    assert browser.post(address, headers=OWN_FORM).headers["location"] == address
    assert f'data-live="/live{address}"' in browser.get(address).text

    def over() -> bool:
        end_all_wrong(engine, worker_id, HOSTILE)
        return "data-live" not in shown(browser, address)

    until(over, what="the autopsy's end")
    page = shown(browser, address)
    assert "inputs: [4, 3001] float32 -&gt;" in page, page
    assert f'href="/batches/autopsy-{wrong}"' in page
    assert browser.get(f"/batches/autopsy-{wrong}").status_code == 200
    file = browser.get(f"{address}/repro.py")
    assert file.headers["content-type"].startswith("text/plain")
    compile(file.text, "repro.py", "exec")
    with visitor(served, token("problems", owner="bob")) as other:
        assert {other.get(path).status_code for path in (f"{address}/repro.py", f"/live{address}")} == {404}
    assert f'href="{address}"' in browser.get(f"/evaluations/{wrong}").text


def test_a_client_s_autopsy_is_linked(browser: httpx.Client, served: Served, judge, wrong: UUID) -> None:
    """The pages of an evaluation name the batch of an autopsy that the command line made."""
    judged(served, judge, found_wrong(), problem=TAIL, batch=f"autopsy-{wrong}")
    assert "Its autopsy" in shown(browser, f"/evaluations/{wrong}")
    assert f'href="/batches/autopsy-{wrong}"' in shown(browser, f"/evaluations/{wrong}/autopsy")


def test_one_runs_once_and_few_at_once(browser: httpx.Client, served: Served, judge, wrong, monkeypatch) -> None:
    """A repeated request joins the running autopsy, and one above the limit is a 429."""
    monkeypatch.setattr(autopsy, "_MOST_RUNNING", 1)
    for _ in range(2):
        assert browser.post(f"/evaluations/{wrong}/autopsy", headers=OWN_FORM).status_code == 303
    other = judged(served, judge, found_wrong(), problem=TAIL)
    refused = browser.post(f"/evaluations/{other}/autopsy", headers=OWN_FORM)
    assert refused.status_code == 429
    assert "try again" in refused.text


def test_who_may_and_what_for(browser: httpx.Client, served: Served, judge, token, wrong: UUID) -> None:
    """It needs the scope for new problems, and a failed evaluation with a verdict."""
    address = f"/evaluations/{wrong}/autopsy"
    assert browser.post(address, headers={"Sec-Fetch-Site": "cross-site"}).status_code == 403
    with visitor(served, token("submit")) as other:
        assert "<button>Autopsy" not in other.get(f"/evaluations/{wrong}").text
        assert "<button>Begin" not in other.get(address).text
        assert other.post(address, headers=OWN_FORM).status_code == 403
    right = judged(served, judge)
    with served.client() as api:
        waits = submit(api, 1)
    for identity, why in ((right, "the kernel passed"), (waits, "it has no verdict yet")):
        assert why in browser.get(f"/evaluations/{identity}/autopsy").text
        answer = browser.post(f"/evaluations/{identity}/autopsy", headers=OWN_FORM)
        assert answer.status_code == 422
        assert why in answer.text
