"""What pages show, and that nothing that others wrote becomes a part of them."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from html.parser import HTMLParser
from typing import Any
from uuid import UUID, uuid4

import httpx
import markupsafe
import pytest
from sqlalchemy import Engine, delete, func, insert, text

from kqueue.categories import Category
from kqueue.contract import Outcome, Phase
from kqueue.errors import DatabaseUnavailable
from kqueue.evidence import Evidence, Facts, WrongMap, WrongPlace
from kqueue.states import Finding, ProbeKind
from kqueue.store import evaluations, gpus, workers
from kqueue.store.models import Probe, ProbePause
from kqueue.web import now
from tests.http.standin import Served, submit
from tests.samples import examined, passed, request_fields
from tests.waiting import until
from tests.web.visiting import OWN_FORM, stranger

HOSTILE = '"><script>alert(1)</script><img src=x onerror=alert(1)>{{7*7}}\x1b[31m\u202egnp\u2066'


class _Elements(HTMLParser):
    """The names and attributes of a page's elements."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))


def _check(answer: httpx.Response) -> None:
    """The headers of a page, and that it has no script or style but the server's files."""
    policy = answer.headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "frame-ancestors 'none'" in policy
    assert "unsafe" not in policy
    assert answer.headers["x-content-type-options"] == "nosniff"
    assert answer.headers["cache-control"] == "no-store"
    assert answer.headers["referrer-policy"] in {"no-referrer", "same-origin"}
    for name, attributes in _Elements(answer.text).found:
        assert name not in {"style", "iframe", "object", "base"}
        assert not any(key.startswith("on") or key == "style" for key in attributes), (name, attributes)
        for key in ("src", "href", "action"):
            if key in attributes:
                assert (attributes[key] or "").startswith(("/", "#")), (name, attributes)
        if name == "script":
            assert (attributes["src"] or "").startswith("/static/")
        if name == "img":
            assert (attributes["src"] or "").startswith("/static/") or ".svg?theme=" in (attributes["src"] or "")


def _wrong(message: str = "output 0: 3 of 4 values differ", log: str = "") -> Outcome:
    place = WrongPlace(index=(0, 2), expected=1.0, got=float("nan"))
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


def _submit(served: Served, **fields: object) -> UUID:
    with served.client() as api:
        answer = api.post("/v1/evaluations", json={**request_fields(uuid4().int), **fields}).raise_for_status()
    return UUID(answer.json()["evaluation_id"])


def test_every_page_keeps_to_the_policy(
    served: Served, browser: httpx.Client, queued: UUID, judge: Callable[..., None]
) -> None:
    done = _submit(served)
    judge(done)
    with stranger(served) as client:
        _check(client.get("/login"))
        _check(client.post("/login", data={"token": "x"}, headers=OWN_FORM))
    for address in ("/", "/evaluations", f"/evaluations/{queued}", f"/evaluations/{done}"):
        answer = browser.get(address)
        assert answer.status_code == 200, address
        _check(answer)
    for address, status in {
        f"/evaluations/{uuid4()}": 404,
        "/evaluations/zzzz": 422,
        "/evaluations?category=<script>": 422,
        "/evaluations?cursor=x": 422,
        "/evaluations?since=never": 422,
        "/evaluations?problem=%00": 422,
        "/static/none.css": 404,
    }.items():
        answer = browser.get(address)
        assert answer.status_code == status, address
        _check(answer)


def test_the_root_is_a_page_for_browsers_alone(served: Served, browser: httpx.Client) -> None:
    assert "<h1>Now</h1>" in browser.get("/").text
    with served.client() as api:
        assert api.get("/").json()["service"]
        assert api.get("/", headers={"Accept": "text/html"}).json()["service"]


def test_now_shows_what_probes_of_the_judge_showed(served: Served, browser: httpx.Client, engine: Engine) -> None:
    """The last day's record, and what is paused with the verdicts in doubt; nothing while no probe was judged."""
    assert "probed" not in browser.get("/").text
    day: dict[str, Any] = {"lane": "cpu", "idea": "any", "settled_at": func.now(), "judged_at": func.now()}
    reason = 'a cheat passed"><script>alert(1)</script>{{7*7}}'
    place: dict[str, Any] = {"worker": "cpu-0@here", "host": "here", "device": "cpu"}
    found: tuple[dict[str, Any], ...] = (
        {"kind": ProbeKind.CHEAT, "finding": Finding.CHEAT_ACCEPTED},
        {"kind": ProbeKind.CHEAT, "finding": Finding.AGREED},
        {"kind": ProbeKind.HONEST, "finding": Finding.HONEST_REFUSED},
        {"kind": ProbeKind.SPIN, "finding": Finding.AGREED, "bias": 0.025, "spin_ms": 25.0},
    )
    pause = {"host": "here", "device": "cpu", "finding": Finding.CHEAT_ACCEPTED, "reason": reason, "probes": []}
    with engine.begin() as connection:
        for one in found:
            connection.execute(insert(Probe).values(**day, **place, **one, evaluation_id=uuid4()))
        old = day | {"settled_at": func.now() - timedelta(days=2)}
        connection.execute(insert(Probe).values(**old, **place, **found[0], evaluation_id=uuid4()))
        connection.execute(insert(ProbePause).values(**pause))
    shown = (
        "4 probes",
        "<strong>1</strong> of 2 cheats accepted",
        "<strong>1</strong> of 2 honest kernels refused",
        "+2.5 % off",
        str(markupsafe.escape(reason)),
        "0 verdicts are in doubt",
    )
    until(lambda: all(one in browser.get("/").text for one in shown), what="the record")
    _check(browser.get("/"))
    with served.client() as api:
        probes = api.get("/v1/fleet").json()["probes"]
    assert (probes["judged"], probes["findings"]["cheat_accepted"], probes["pauses"][0]["reason"]) == (4, 1, reason)
    with engine.begin() as connection:
        connection.execute(delete(Probe))
        connection.execute(delete(ProbePause))


def test_now_shows_lanes_gpus_and_the_last_hour(
    served: Served, browser: httpx.Client, engine: Engine, judge: Callable[..., None]
) -> None:
    uuid = "GPU-00000000-0000-0000-0000-000000000001"
    gpus.register(engine, host="here", index=0, uuid=uuid, name=HOSTILE)
    slot = uuid4()
    workers.register(engine, id=slot, name="gpu-0@here", host="here", pid=2, lanes=["gpu"], device=uuid)
    gpus.see(
        engine, {uuid: {"temperature_c": 61, "sm_mhz": 1980, "memory_used_bytes": 1 << 30, "memory_bytes": 4 << 30}}
    )
    gpus.see_memory(engine, uuid, booked_bytes=1 << 30, capacity_bytes=2 << 30, waiting=[])
    judge(_submit(served))
    judge(_submit(served), _wrong())
    runs, waits = _submit(served), _submit(served)
    assert evaluations.claim(engine, runs, worker_id=slot, lease_s=60) is not None
    workers.note_steps(engine, {(runs, 1): "alone_measure"})
    assert "at the step “alone measure”" in browser.get(f"/evaluations/{runs}").text

    def shows_all() -> bool:
        shown = ("61 °C", "1980 MHz", "1.0 of 2.0 GiB", str(waits)[:8], "wrong_values", "the tests")
        page = browser.get("/").text
        # On the GPU's card and in the table of workers.
        return all(one in page for one in shown) and page.count("alone measure") == 2

    # What is shown is a second old, or two.
    until(shows_all, 60, "the GPU on the page")
    answer = browser.get("/")
    _check(answer)
    assert "\u202e" not in answer.text


def test_a_failure_is_told_to_all_who_look(browser: httpx.Client, monkeypatch: pytest.MonkeyPatch) -> None:
    """The database is not asked again for each of them; later it is."""
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


def test_the_list_is_filtered_and_paged(served: Served, browser: httpx.Client, judge: Callable[..., None]) -> None:
    ids = [_submit(served, batch="many", kernel_label=f"k{number}") for number in range(52)]
    other = _submit(served, batch="other")
    judge(ids[0])
    first = browser.get("/evaluations", params={"batch": "many"})
    assert f"/evaluations/{other}" not in first.text
    assert f"/evaluations/{ids[-1]}" in first.text
    assert f"/evaluations/{ids[0]}" not in first.text
    [more] = [a["href"] for name, a in _Elements(first.text).found if name == "a" and a.get("rel") == "next"]
    second = browser.get(str(more))
    assert f"/evaluations/{ids[0]}" in second.text
    assert f"/evaluations/{ids[-1]}" not in second.text
    shown = browser.get("/evaluations", params={"state": "done", "since": "1h", "category": "passed", "blame": "none"})
    assert f"/evaluations/{ids[0]}" in shown.text
    assert f"/evaluations/{other}" not in shown.text


def test_a_failure_is_told_with_its_places(served: Served, browser: httpx.Client, judge: Callable[..., None]) -> None:
    identity = _submit(served)
    judge(identity, _wrong(log="hello\n"))
    answer = browser.get(f"/evaluations/{identity}")
    cpu = "CPU time: 3.2 s, of which judge 0.25 s, candidate 3.0 s."
    for shown in ("[0, 2]", "NaN", "3 of 4 values", "hello", "recorded by judge", "test device", "ModelNew", cpu):
        assert shown in answer.text, shown
    assert "3 of 4 cells have wrong values: within rows 0 and columns 1 to 3." in answer.text
    assert [answer.text.count(f'class="share-{digit}"') for digit in (0, 9)] == [1, 3]
    assert browser.get(f"/evaluations/{str(identity)[:8]}").headers["location"] == f"/evaluations/{identity}"
    log = browser.get(f"/evaluations/{identity}/files/log.txt")
    assert log.text == "hello\n"
    assert log.headers["content-type"] == "text/plain; charset=utf-8"
    assert log.headers["content-disposition"].startswith("attachment")


def test_a_waiting_one_says_why(browser: httpx.Client, queued: UUID) -> None:
    answer = browser.get(f"/evaluations/{queued}")
    assert "It waits: " in answer.text
    assert browser.get(f"/evaluations/{queued}/files/log.txt").status_code == 404


def test_a_kernel_is_judged_again(served: Served, browser: httpx.Client, judge: Callable[..., None]) -> None:
    identity = _submit(served, kernel_label="mine")
    judge(identity, passed())
    again = browser.post(f"/evaluations/{identity}/rerun", headers=OWN_FORM).headers["location"]
    assert again != f"/evaluations/{identity}"
    answer = browser.get(again)
    assert "queued" in answer.text
    assert "mine" in answer.text


def test_calls_are_drawn_beside_those_of_the_reference(
    served: Served, browser: httpx.Client, judge: Callable[..., None]
) -> None:
    """A histogram each, where there is one: an older judge took none."""
    identity = _submit(served)
    judge(identity, examined("k"))
    answer = browser.get(f"/evaluations/{identity}")
    drawn = answer.text.split('<svg class="histogram"')
    assert len(drawn) == 2
    assert "calls of the kernel" in drawn[0]
    assert drawn[1].split("</svg>")[0].count('<rect class="box"') == 3


def test_a_kernel_is_examined(
    served: Served, browser: httpx.Client, judge: Callable[..., None], engine: Engine
) -> None:
    """What tools said is shown, and does nothing; buttons ask for more where there is a GPU."""
    identity = _submit(served)
    judge(identity, examined(HOSTILE))
    answer = browser.get(f"/evaluations/{identity}")
    _check(answer)
    for shown in ("Under compute-sanitizer", "122, 0, 0", "Kernels of one call", "roofline.svg", "3 %"):
        assert shown in answer.text, shown
    assert "<button>Sanitize" not in answer.text
    assert browser.post(f"/evaluations/{identity}/sanitize", headers=OWN_FORM).status_code == 422
    picture = browser.get(f"/evaluations/{identity}/roofline.svg")
    assert picture.headers["content-type"].startswith("image/svg+xml")
    workers.register(engine, id=uuid4(), name="gpu-0@here", host="here", pid=1, lanes=["gpu"], device="GPU-0")
    on_gpu = _submit(served, lane="gpu")
    judge(on_gpu, passed())
    assert "<button>Sanitize" in browser.get(f"/evaluations/{on_gpu}").text
    for tool in ("sanitize", "profile"):
        asked = browser.post(f"/evaluations/{on_gpu}/{tool}", headers=OWN_FORM).headers["location"]
        assert "queued" in browser.get(asked).text
    with engine.connect() as connection:
        asked = connection.scalars(text("SELECT settings->'examine' FROM evaluations ORDER BY submitted_at")).all()
    assert [(len(one["sanitize"]), one["profile"]) for one in asked[-2:]] == [(4, False), (0, True)]


def test_two_kernels_are_compared(served: Served, browser: httpx.Client) -> None:
    problem = "class Model: number = 1"
    one = _submit(served, problem=problem, kernel="class ModelNew: a = 1\n", kernel_label="one")
    other = _submit(served, problem=problem, kernel="class ModelNew: a = '<b>'\n", kernel_label="other")
    stranger_s = _submit(served, problem="class Model: number = 2")
    answer = browser.get(f"/evaluations/{one}", params={"against": str(other)})
    assert '<span class="removed">-class ModelNew: a = 1</span>' in answer.text
    assert "<b>" not in answer.text
    assert browser.get(f"/evaluations/{one}", params={"against": str(stranger_s)}).status_code == 422


def test_what_others_wrote_is_shown_and_does_nothing(
    served: Served, browser: httpx.Client, judge: Callable[..., None], engine: Engine
) -> None:
    named = {"problem_label": HOSTILE, "kernel_label": HOSTILE, "batch": HOSTILE, "producer": HOSTILE}
    source = f"class ModelNew:\n    x = '''{HOSTILE}'''\n# </pre></div></main>{HOSTILE}\n# {'y' * 900_000}\n"
    identity = _submit(served, **named, kernel=source)
    waits = _submit(served, **named)
    judge(identity, _wrong(message=HOSTILE, log=HOSTILE + "z" * 1_000_000))
    with engine.begin() as connection:
        connection.execute(text("UPDATE workers SET name = :name, paused = :name"), {"name": HOSTILE})
    until(lambda: "egnp" in browser.get("/").text, 60, "the worker's name on the page")
    for address in ("/", "/evaluations", f"/evaluations/{identity}", f"/evaluations/{waits}"):
        answer = browser.get(address)
        assert answer.status_code == 200
        _check(answer)
        assert not {"\x1b", "\u202e", "\u2066", "\x00"} & set(answer.text), address
        assert "\\u202egnp" in answer.text
        assert "{{7*7}}" in answer.text
        assert len(answer.content) < 1_500_000
    whole = browser.get(f"/evaluations/{identity}/files/kernel.py")
    assert whole.text == source
    assert whole.headers["content-type"].startswith("text/plain")


@pytest.mark.parametrize("address", ["/live/now", "/live/evaluations/{id}"])
def test_news_come_by_themselves(
    served: Served, browser: httpx.Client, queued: UUID, judge: Callable[..., None], address: str
) -> None:
    with browser.stream("GET", address.format(id=queued)) as answer:
        assert answer.headers["content-type"].startswith("text/event-stream")
        lines = answer.iter_lines()
        assert next(line for line in lines if line == "event: html")
        judge(queued)
        # The list of the last hour has it, or its own page is at its end.
        assert next(line for line in lines if "passed" in line or line == "event: over")


def test_news_end_with_the_session(browser: httpx.Client, engine: Engine, served: Served) -> None:
    with browser.stream("GET", "/live/now") as answer:
        lines = answer.iter_lines()
        assert next(line for line in lines if line == "event: html")
        with engine.begin() as connection:
            connection.execute(text("DELETE FROM sessions"))
        with served.client() as api:
            submit(api, 7)
        assert not any("event: html" in line for line in lines), "it ends, and says nothing of what came after"
