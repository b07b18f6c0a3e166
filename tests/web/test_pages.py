"""The contents of pages, and the escaping of foreign text in them."""

from __future__ import annotations

from datetime import timedelta
from typing import Any
from uuid import UUID, uuid4

import httpx
import markupsafe
import pytest
from sqlalchemy import Engine, func, insert, text

from kqueue.categories import Category
from kqueue.contract import Outcome, Phase, Request
from kqueue.errors import DatabaseUnavailable
from kqueue.evidence import Evidence, Facts, ShapeResult, ShapeResults, WrongLocation, WrongMap
from kqueue.figures import caption
from kqueue.states import Finding, ProbeKind
from kqueue.store import evaluations, gpus, workers
from kqueue.store.models import Probe, ProbePause
from kqueue.web import now
from tests.http.standin import Served, submit
from tests.samples import examined, passed, request_fields
from tests.store.steps import change, lasting_worker
from tests.stored import EVERY
from tests.waiting import until
from tests.web.reading import HOSTILE, Elements, check, judged, shown
from tests.web.visiting import OWN_FORM, stranger


def _wrong(message: str = "output 0: 3 of 4 values differ", log: str = "") -> Outcome:
    place = WrongLocation(index=(0, 2), expected=1.0, got=float("nan"))
    places = WrongMap(rows=1, columns=4, shares=("0999",))
    facts = Facts(output=0, kind="given", wrong=3, of=4, first=(place,), map=places)
    return Outcome(
        category=Category.WRONG_VALUES,
        message=message,
        phase=Phase.CHECK,
        facts=facts,
        log=log,
        evidence=Evidence(durations_s={"load": 0.5, "check": 0.25}, cpu_s={"judge": 0.25, "candidate": 3.0}),
    )


def put(served: Served, **fields: object) -> UUID:
    """Submit an evaluation, and return its id."""
    with served.client() as api:
        answer = api.post("/v1/evaluations", json={**request_fields(uuid4().int), **fields}).raise_for_status()
    return UUID(answer.json()["evaluation_id"])


def test_every_page_keeps_to_the_policy(served: Served, browser: httpx.Client, queued: UUID, judge) -> None:
    """Only browsers get a page at the root, and every page keeps the policy."""
    judge(done := put(served))
    with stranger(served) as client:
        check(client.get("/login"))
        check(client.post("/login", data={"token": "x"}, headers=OWN_FORM))
    for address in ("/evaluations", f"/evaluations/{queued}", f"/evaluations/{done}"):
        shown(browser, address)
    assert "<h1>Now</h1>" in shown(browser, "/")
    shown(browser, f"/evaluations/{uuid4()}", 404)
    shown(browser, "/static/none.css", 404)
    for wrong in ("/zzzz", "?category=<script>", "?cursor=x", "?since=never", "?problem=%00"):
        shown(browser, f"/evaluations{wrong}", 422)
    with served.client() as api:
        assert api.get("/").json()["service"]
        assert api.get("/", headers={"Accept": "text/html"}).json()["service"]


def test_now_shows_what_probes_of_the_judge_showed(served: Served, browser: httpx.Client, engine: Engine) -> None:
    """The page has the last day's probes, the pauses and their suspect verdicts, and no such part without probes."""
    assert "Probes of the judge" not in browser.get("/").text
    day: dict[str, Any] = {"lane": "cpu", "idea": "any", "settled_at": func.now(), "judged_at": func.now()}
    reason = 'a cheat passed"><script>alert(1)</script>{{7*7}}'
    place: dict[str, Any] = {"worker": "cpu-0@here", "host": "here", "device": "cpu"}
    found: tuple[dict[str, Any], ...] = (
        {"kind": ProbeKind.CHEAT, "finding": Finding.CHEAT_ACCEPTED},
        {"kind": ProbeKind.CHEAT, "finding": Finding.AGREED},
        {"kind": ProbeKind.HONEST, "finding": Finding.HONEST_REFUSED},
        {"kind": ProbeKind.KNOWN_DURATION, "finding": Finding.AGREED, "bias": 0.025, "duration_ms": 25.0},
    )
    pause = {"host": "here", "device": "cpu", "finding": Finding.CHEAT_ACCEPTED, "reason": reason, "probes": []}
    with engine.begin() as connection:
        for one in found:
            connection.execute(insert(Probe).values(**day, **place, **one, evaluation_id=uuid4()))
        old = day | {"settled_at": func.now() - timedelta(days=2)}
        connection.execute(insert(Probe).values(**old, **place, **found[0], evaluation_id=uuid4()))
        connection.execute(insert(ProbePause).values(**pause))
    told = (
        "4 probes",
        "<strong>1</strong> of 2 cheats accepted",
        "<strong>1</strong> of 2 honest kernels refused",
        "+2.5 % off",
        str(markupsafe.escape(reason)),
        "0 verdicts are in doubt",
    )
    until(lambda: all(one in shown(browser, "/") for one in told), what="the record")
    with served.client() as api:
        probes = api.get("/v1/fleet").json()["probes"]
    assert (probes["judged"], probes["findings"]["cheat_accepted"], probes["pauses"][0]["reason"]) == (4, 1, reason)


def test_now_shows_lanes_gpus_and_the_last_hour(served: Served, browser: httpx.Client, engine: Engine, judge) -> None:
    uuid = "GPU-00000000-0000-0000-0000-000000000001"
    gpus.register(engine, host="here", index=0, uuid=uuid, name=HOSTILE)
    slot = uuid4()
    workers.register(engine, id=slot, name="gpu-0@here", host="here", pid=2, lanes=["gpu"], device=uuid)
    gpus.see(
        engine, {uuid: {"temperature_c": 61, "sm_mhz": 1980, "memory_used_bytes": 1 << 30, "memory_bytes": 4 << 30}}
    )
    gpus.see_memory(engine, uuid, booked_bytes=1 << 30, capacity_bytes=2 << 30, waiting=[])
    judge(put(served))
    judge(put(served), _wrong())
    runs, waits = put(served), put(served)
    assert evaluations.claim(engine, runs, worker_id=slot, lease_s=60) is not None
    workers.note_steps(engine, {(runs, 1): "alone_measure"})
    assert "at the step “alone measure”" in browser.get(f"/evaluations/{runs}").text

    def shows_all() -> bool:
        told = ("61 °C", "1980 MHz", "1.0 of 2.0 GiB", str(waits)[:8], "wrong_values", "the tests")
        page = shown(browser, "/")
        # Once on the GPU's card and once in the table of workers.
        return all(one in page for one in told) and page.count("alone measure") == 2

    # The page is one or two seconds old.
    until(shows_all, 60, "the GPU on the page")


def test_a_failure_is_told_to_all_who_look(browser: httpx.Client, monkeypatch: pytest.MonkeyPatch) -> None:
    """Visitors share one failed query, and a later visit repeats it."""
    asked: list[str] = []

    def fail(_: Engine, *, within_s: float) -> None:
        asked.append(f"within {within_s} s")
        raise DatabaseUnavailable("Postgres is away")

    with monkeypatch.context() as patched:
        patched.setattr(now, "_read", fail)
        patched.setattr(now, "_FRESH_S", 3600.0)
        answers = [browser.get("/") for _ in range(3)]
    assert [answer.status_code for answer in answers] == [503] * 3
    assert all(int(answer.headers["retry-after"]) > 0 for answer in answers)
    assert len(asked) == 1
    monkeypatch.setattr(now, "_FRESH_S", -1.0)
    assert browser.get("/").status_code == 200


def test_the_list_is_filtered_and_paged(served: Served, browser: httpx.Client, judge) -> None:
    """The queue is listed by submission, and hides no verdict. Labels match by a part, and batches by the beginning."""
    oldest = put(served, batch="many", kernel_label="Softmax", problem_label="Level 1/soft")
    with served.client() as api:
        entries = [request_fields(number, batch="many") for number in range(50)]
        api.post("/v1/evaluations/batch", json={"entries": entries}).raise_for_status()
    newest, other = put(served, batch="many"), put(served, batch="other")
    judge(oldest)

    def of(address: str) -> list[bool]:
        page = shown(browser, address)
        return [f"/evaluations/{identity}" in page for identity in (oldest, newest, other)]

    assert of("/evaluations") == [True, False, False]
    page = shown(browser, "/evaluations?batch=many")
    assert "51 wait" in page
    assert Elements(page).all("div", "data-live") == ["/live/evaluations?batch=many"]
    assert of("/evaluations?batch=many&state=queued") == [False, True, False]
    page = shown(browser, "/evaluations?batch=many&state=queued")
    [more] = [a["href"] for name, a in Elements(page).found if name == "a" and a.get("rel") == "next"]
    assert of(more) == [False, False, False]
    assert "data-live=" not in shown(browser, more)
    for matching in (
        "state=done&since=1h&category=passed&blame=none",
        "kernel=soft",
        "problem=level",
        "producer=token",
    ):
        assert of(f"/evaluations?{matching}") == [True, False, False], matching
    for missing in ("kernel=gelu", "problem=%25", "batch=x", "batch=any", "producer=oken"):
        assert of(f"/evaluations?{missing}") == [False, False, False], missing
    assert of("/evaluations?batch=ot&state=queued") == [False, False, True]


def test_verdicts_are_paged_by_their_time(served: Served, browser: httpx.Client, judge) -> None:
    """The next page continues after the last verdict."""
    ids = [put(served) for _ in range(52)]
    for identity in ids:
        judge(identity)
    page = shown(browser, "/evaluations")
    [more] = [a["href"] for name, a in Elements(page).found if name == "a" and a.get("rel") == "next"]
    pages = page, shown(browser, more)
    assert [[f"/evaluations/{one}" in text for one in (ids[0], ids[1], ids[2], ids[-1])] for text in pages] == [
        [False, False, True, True],
        [True, True, False, False],
    ]


def test_a_failure_is_told_with_its_places(served: Served, browser: httpx.Client, judge) -> None:
    """A queued evaluation has the reason of its wait, and an ended one can be judged again."""
    identity = put(served, kernel_label="mine")
    judge(identity, _wrong(log="hello\n"))
    page = shown(browser, f"/evaluations/{identity}")
    cpu = "CPU time: 3.2 s, of which judge 0.25 s, candidate 3.0 s."
    for told in ("[0, 2]", "NaN", "3 of 4 values", "hello", "recorded by judge", "test device", "ModelNew", cpu):
        assert told in page, told
    assert "3 of 4 cells have wrong values: within rows 0 and columns 1 to 3." in page
    assert [page.count(f'class="share-{digit}"') for digit in (0, 9)] == [1, 3]
    assert browser.get(f"/evaluations/{str(identity)[:8]}").headers["location"] == f"/evaluations/{identity}"
    log = browser.get(f"/evaluations/{identity}/files/log.txt")
    assert (log.text, log.headers["content-type"]) == ("hello\n", "text/plain; charset=utf-8")
    assert log.headers["content-disposition"].startswith("attachment")
    waits = put(served)
    assert "It waits: " in shown(browser, f"/evaluations/{waits}")
    assert browser.get(f"/evaluations/{waits}/files/log.txt").status_code == 404
    again = browser.post(f"/evaluations/{identity}/rerun", headers=OWN_FORM).headers["location"]
    assert again != f"/evaluations/{identity}"
    assert all(told in shown(browser, again) for told in ("queued", "mine"))


def test_held_out_shapes_are_shown_by_their_results_only(served: Served, browser: httpx.Client, judge) -> None:
    """No page, file or search shows their arguments, and the evaluation's page has a row for each shape."""
    problem = 'SHAPES = [{"args": {"n": 8}}, {"args": {"n": 40970001}, "held_out": True}]\ndef get_inputs(n): ...\n'
    rows = (
        ShapeResult(name="n=8", held_out=False, weight=2, category=Category.PASSED, speedup=3.25, checks=7),
        ShapeResult(name="held out 1", held_out=True, weight=1, category=Category.PASSED, speedup=1.25),
    )
    shapes = ShapeResults(rows=rows, worst="held out 1", worst_speedup=1.25, spread=2.6)
    found = judged(served, judge, passed(evidence=Evidence(shapes=shapes)), problem=problem)
    problem_hash = Request(problem=problem, kernel="k", backend="torch").problem_hash
    page = shown(browser, f"/evaluations/{found}")
    for told in ("n=8", "3.25x", "7 input sets", "The worst is 1.25x (held out 1), and the best is 2.60 times that."):
        assert told in page, told
    texts = [page, *(shown(browser, f"/{path}") for path in (f"problems/{problem_hash}", "search?q=get_inputs"))]
    with served.client() as api:
        texts.append(api.get(f"/v1/evaluations/{found}/artifacts/problem.py").raise_for_status().text)
        texts.append(api.get(f"/v1/problems/{problem_hash}").raise_for_status().text)
    for shown_text in texts:
        assert "get_inputs" in shown_text
        assert "40970001" not in shown_text
    assert "None." in shown(browser, "/search?q=40970001")


def test_a_kernel_is_examined(served: Served, browser: httpx.Client, judge, engine: Engine) -> None:
    """All evidence is listed, the tools' findings are shown and escaped, and buttons offer more if there is a GPU."""
    identity = put(served)
    outcome = examined(HOSTILE)
    rows = [{"name": "robust-kbench", "passed": None, "why": HOSTILE}]
    evidence = EVERY | outcome.evidence.model_dump(mode="json") | {"profiles": rows}
    judge(identity, outcome.model_copy(update={"evidence": evidence}))
    page = shown(browser, f"/evaluations/{identity}")
    for name in Evidence.model_fields:
        assert f"<dt>{caption(name)[0]}</dt>" in page, name
    for told in ("unknown: ", "Under compute-sanitizer", "122, 0, 0", "Kernels of one call", "roofline.svg", "3 %"):
        assert told in page, told
    assert "<button>Sanitize" not in page
    [before, drawn] = page.split('<svg class="histogram"')
    assert "calls of the kernel" in before
    assert drawn.split("</svg>")[0].count('<rect class="box"') == 3
    assert browser.post(f"/evaluations/{identity}/sanitize", headers=OWN_FORM).status_code == 422
    assert browser.get(f"/evaluations/{identity}/roofline.svg").headers["content-type"].startswith("image/svg+xml")
    lasting_worker(engine, "gpu", "GPU-0")
    on_gpu = put(served, lane="gpu")
    judge(on_gpu, passed())
    assert "<button>Sanitize" in browser.get(f"/evaluations/{on_gpu}").text
    for tool in ("sanitize", "profile"):
        asked = browser.post(f"/evaluations/{on_gpu}/{tool}", headers=OWN_FORM).headers["location"]
        assert "queued" in browser.get(asked).text
    with engine.connect() as connection:
        asked = connection.scalars(text("SELECT settings->'examine' FROM evaluations ORDER BY submitted_at")).all()
    assert [(len(one["sanitize"]), one["profile"]) for one in asked[-2:]] == [(4, False), (0, True)]


def test_what_others_wrote_is_shown_and_does_nothing(served: Served, browser: httpx.Client, judge, engine) -> None:
    named = {"problem_label": HOSTILE, "kernel_label": HOSTILE, "batch": HOSTILE, "producer": HOSTILE}
    source = f"class ModelNew:\n    x = '''{HOSTILE}'''\n# </pre></div></main>{HOSTILE}\n# {'y' * 900_000}\n"
    identity = put(served, **named, kernel=source)
    waits = put(served, **named)
    judge(identity, _wrong(message=HOSTILE, log=HOSTILE + "z" * 1_000_000))
    change(engine, "UPDATE workers SET name = :name, paused = :name", name=HOSTILE)
    until(lambda: "egnp" in browser.get("/").text, 60, "the worker's name on the page")
    for address in ("/", "/evaluations", f"/evaluations/{identity}", f"/evaluations/{waits}"):
        page = shown(browser, address)
        assert "\\u202egnp" in page
        assert "{{7*7}}" in page
        assert len(page.encode()) < 1_500_000
    whole = browser.get(f"/evaluations/{identity}/files/kernel.py")
    assert whole.text == source
    assert whole.headers["content-type"].startswith("text/plain")


def test_news_come_by_themselves(browser: httpx.Client, queued: UUID, judge) -> None:
    with browser.stream("GET", "/live/now") as now, browser.stream("GET", f"/live/evaluations/{queued}") as own:
        streams = [answer.iter_lines() for answer in (now, own)]
        for answer, lines in zip((now, own), streams, strict=True):
            assert answer.headers["content-type"].startswith("text/event-stream")
            assert next(line for line in lines if line == "event: html")
        judge(queued)
        # The list of the last hour contains it, or its own page sends the end.
        for lines in streams:
            assert next(line for line in lines if "passed" in line or line == "event: over")


def test_news_end_with_the_session(browser: httpx.Client, engine: Engine, served: Served) -> None:
    with browser.stream("GET", "/live/now") as answer:
        lines = answer.iter_lines()
        assert next(line for line in lines if line == "event: html")
        change(engine, "DELETE FROM sessions")
        with served.client() as api:
            submit(api, 7)
        assert not any("event: html" in line for line in lines), "it ends, and says nothing of what came after"
