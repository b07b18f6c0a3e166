"""`kqueue status`, `show`, `results`, `compare` and `cancel`."""

from __future__ import annotations

import re
import sys
from uuid import UUID

import pytest
from sqlalchemy import Engine

from kqueue.categories import Category
from kqueue.cli.render import print_table
from kqueue.contract import Outcome, Phase
from kqueue.evidence import Evidence, Facts
from kqueue.figures import brief, caption
from kqueue.store import evaluations, reports
from tests.cli.command import PROBLEM, Cli, judge, submit
from tests.samples import ended, measurement, passed, timed
from tests.store.steps import change
from tests.stored import EVERY

#: Hostile output of a candidate: colours, a title, a bell, reversed text, markup.
HOSTILE = "\x1b[2J\x1b]0;pwned\x07 [bold red]passed[/] \u202eevil\u202c \x9b31m"


def hostile(_: str) -> Outcome:
    facts = Facts(signal="SIGSEGV", exception=HOSTILE)
    log = "".join(f"{number} {HOSTILE}\n" for number in range(100))
    told = {"facts": facts, "log": log, "evidence": Evidence(peak_bytes=61000)}
    return Outcome(category=Category.CRASHED, message=HOSTILE, phase=Phase.CHECK, **told)


def assert_harmless(output: str) -> None:
    """Assert that ``output`` can neither move a cursor nor reverse text."""
    assert not set(output) & set("\x1b\x07\x9b\u202e\u202c\x00\x08\r")


def test_status_shows_queue_workers_and_outcomes(cli: Cli, engine: Engine, worker: UUID) -> None:
    """The status has counts by lane and state, live workers and their work, and the last hour by blame and category."""
    submit(engine, "a", "b")
    judge(engine, worker, lambda label: passed() if label == "a" else hostile(label))
    running, _ = submit(engine, "c", "d")
    assert evaluations.claim(engine, running, worker_id=worker, lease_s=30) is not None
    [record] = cli.told("status")
    assert record["lanes"] == {"cpu": {"queued": 1, "running": 1, "done": 2, "workers": 1}}
    (live,) = record["workers"]
    assert (live["id"], live["device"], live["busy_with"]) == (str(worker), "cpu", str(running))
    assert live["busy_since"] is not None
    assert record["last_hour"]["by_blame"] == {"none": 1, "candidate": 1}
    assert record["last_hour"]["by_category"] == {"passed": 1, "crashed": 1}
    assert record["broker"] == {"reachable": True, "error": None}
    for_people = cli("status").stdout
    assert all(word in for_people for word in ("cpu-0@here", str(running), "crashed", "redis: reachable"))


def test_status_without_redis_says_so(cli: Cli) -> None:
    """The database's part is still shown, the status is 3, and no password is printed."""
    done = cli("status", KQUEUE_REDIS_URL="redis://:secret@127.0.0.1:1/0")
    assert (done.returncode, "redis: Redis cannot be used" in done.stdout) == (3, True)
    assert "secret" not in done.stdout + done.stderr


def test_show_tells_all_of_one_evaluation(cli: Cli, engine: Engine, worker: UUID) -> None:
    """An id's prefix selects the evaluation, and attempts, verdict and times are shown, with sources on demand."""
    (identity,) = submit(engine, "mine", batch="b")
    judge(engine, worker, lambda _: passed())
    done = cli("show", str(identity)[:8], "--source")
    assert done.returncode == 0, done.stderr
    for words in (str(identity), "relu", "cpu-0@here", "test device", "passed", "0.5 ms (median of "):
        assert words in done.stdout
    assert PROBLEM in done.stdout
    [record] = cli.told("show", str(identity))
    assert {"problem", "kernel"}.isdisjoint(record)
    assert (record["evaluation_id"], record["state"]) == (str(identity), "done")
    assert record["attempts"][0]["category"] == "passed"
    assert record["verdict"]["speedup"] == 2.0
    assert record["verdict"]["runtime"]["q1_ms"] == pytest.approx(0.45)


def test_findings_and_provenance_are_one_line_each(cli: Cli, engine: Engine, worker: UUID) -> None:
    """`show` has a line for each finding, for kernels by owner, and for each field of the evidence."""
    found = {"rule": "patched_clock", "severity": "cheat", "line": 7, "by": "kqueue", "meaning": "replaces a clock"}
    found["evidence"] = "torch.cuda.Event = Quick"
    origin = {
        "own_share": 0.25, "own": ["add_kernel"], "unclear_share": 0.0, "unclear": [], "copies_share": 0.0,
        "library": [{"name": f"nvjet_{number}" + "x" * 200, "share": 0.15} for number in range(5)], "decoy": True,
        "why": "25.0% kernels of its own source, 75.0% kernels of libraries", "basis": "the candidate's own profile",
    }  # fmt: skip
    told = EVERY | {"profiles": [{"name": "robust-kbench", "passed": False, "why": "too far"}]}
    (identity,) = submit(engine, "a")
    judge(engine, worker, lambda _: passed(evidence=told | {"findings": [found], "provenance": origin}))
    lines = cli("show", str(identity)).stdout.splitlines()
    assert {
        "cheat: patched_clock, line 7: replaces a clock: torch.cuda.Event = Quick",
        "Profile robust-kbench: failed: too far",
    } <= {*lines}
    assert {caption(name)[0] for name in Evidence.model_fields} <= {line[:22].rstrip() for line in lines}
    [line] = [line for line in lines if line.startswith("GPU time by source: ")]
    for words in ("decoy: 25.0% kernels of its own source", "; own: add_kernel; library: nvjet_0", "and 2 more"):
        assert words in line
    assert len(line) < 400
    [record] = cli.told("show", str(identity))
    assert record["verdict"]["evidence"]["provenance"] == origin
    assert record["verdict"]["evidence"]["findings"] == [found]


def test_what_a_candidate_printed_cannot_touch_the_terminal(cli: Cli, engine: Engine, worker: UUID) -> None:
    """Control characters are escaped, markup is printed unchanged, and only the log's end is shown by default."""
    (identity,) = submit(engine, HOSTILE[:40])
    judge(engine, worker, hostile)
    done = cli("show", str(identity))
    assert_harmless(done.stdout)
    assert r"\x1b[2J\x1b]0;pwned\x07 [bold red]passed[/] \u202eevil" in done.stdout
    assert "99 \\x1b" in done.stdout
    assert "\n1 \\x1b" not in done.stdout
    whole = cli("show", str(identity), "--log")
    assert_harmless(whole.stdout)
    assert "\n1 \\x1b" in whole.stdout
    for command in (("results",), ("show", str(identity), "--json", "--source")):
        assert_harmless(cli(*command).stdout)


def test_what_names_no_evaluation(cli: Cli) -> None:
    """An invalid id exits with 2, an unknown id with 5."""
    for identity, status, says in (
        ("abc", 2, "abc is no evaluation's id: give an id, or at least its first 4 digits"),
        ("zzzz", 2, "zzzz is no evaluation's id"),
        ("00000000-0000-4000-8000-000000000000", 5, "0000: see `kqueue results` for those that exist\n"),
        ("abcd", 5, "no evaluation has the id abcd: see `kqueue results` for those that exist\n"),
    ):
        done = cli("show", identity)
        assert (done.returncode, says in done.stderr) == (status, True), done.stderr


def test_results_are_chosen_by_what_is_asked(cli: Cli, engine: Engine, worker: UUID) -> None:
    """Category, blame, backend, problem, batch, time and number filter the results."""
    submit(engine, "a", "t", batch="one")
    submit(engine, "b", batch="two")
    judge(engine, worker, lambda label: hostile(label) if label == "b" else passed())

    def labels(*arguments: str) -> set[str]:
        return {one["kernel_label"] for one in cli.told("results", *arguments)}

    assert labels("--since", "2h") == {"a", "t", "b"}
    assert labels("--where", "blame=none", "--where", "backend=triton", "--problem", "relu") == {"t"}
    assert labels("--where", "batch=two", "--where", "category=crashed", "--since", "2020-01-31") == {"b"}
    assert labels("--since", "2199-01-01") == set()
    assert len(labels("--limit", "2")) == 2
    for arguments in (("results",), ("results", "--best"), ("results", "--json"), ("cost", "--by", "batch", "--json")):
        assert "there are more than these 1: see --limit" in cli(*arguments, "--limit", "1").stderr
        assert cli(*arguments, "--limit", "3").stderr == ""
    shown = cli("results").stdout
    assert all(word in shown for word in ("relu", "crashed", "2.00x", "test device"))


@pytest.mark.parametrize(
    ("width", "head"),
    [
        (200, "id kernel category runtime ms speedup device message"),
        (90, "id kernel category runtime ms speedup message"),
        (80, "id kernel category speedup message"),
        (60, "id kernel category speedup"),
        (28, "id kernel"),
    ],
)
def test_a_narrow_table_has_fewer_columns(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, width: int, head: str
) -> None:
    """A table never exceeds the terminal, breaks no name, and says what it leaves out."""
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", str(width))
    columns = ("id", "kernel", "category", "runtime ms", "speedup", "device", "message")
    row = ["01234567", "softmax_online", "wrong_values", "0.25", "1.5x (1.4x to 1.6x)", "NVIDIA H100 80GB HBM3"]
    print_table(columns, [[*row, "output 0: 3 of 4 values differ, and_a_very_long_word_that_nobody_needs"]])
    lines = re.sub(r"\x1b\[[0-9;]*m", "", capsys.readouterr().out).splitlines()
    assert max(map(len, lines)) <= width
    assert lines[1].split() == head.split()
    assert "softmax_online" in lines[3]
    assert any(line.startswith("(too narrow for: ") for line in lines) is (width < 200)


def test_a_message_in_a_row_is_short() -> None:
    """It is cut after a word with a mark, and the words that all right kernels share are left out."""
    usual = "right on 12 input sets, 9 of them hidden variants, random each time"
    number = "output 0: 117835 of 524288 values differ by more than 0.0001 + 0.0001·|reference|, at most by 0.000473499"
    for message, cell in (
        (usual, ""),
        (f"{usual}; but a constant is right", "but a constant is right"),
        (number, number.removesuffix(" 0.000473499") + "…"),
        (number.removesuffix("0473499"), number.removesuffix("0473499")),
        ("7" * 101, "7" * 99 + "…"),
    ):
        assert brief(message, most=100) == cell


def test_a_question_that_cannot_be_meant_is_refused(cli: Cli) -> None:
    """An unknown field or value exits with 2 and an error that names the valid ones."""
    for arguments, message in (
        (("--where", "colour=red"), "no field 'colour'. The fields are category, blame, backend, problem, batch"),
        (("--where", "category"), "write category=VALUE"),
        (("--where", "category=fine"), "unknown category 'fine': see `kqueue categories`"),
        (("--where", "blame=me"), "use one of none, candidate, problem, fleet, nobody"),
        (("--where", "batch=a", "--batch", "b"), "batch is given twice"),
        (("--since", "yesterday"), "write an age such as 30m"),
        (("--since", "99999999999999999999d"), "write an age such as 30m"),
        (("--since", "0001-01-01T00:00:00+23:59"), "write an age such as 30m"),
    ):
        done = cli("results", *arguments)
        assert (done.returncode, message in done.stderr) == (2, True)


def test_cancel_ends_what_has_no_verdict(cli: Cli, engine: Engine, worker: UUID) -> None:
    """Cancelling works by id or batch. It changes no verdict, and one wrong id cancels nothing."""
    (finished,) = submit(engine, "a", batch="b")
    judge(engine, worker, lambda _: passed())
    first, second, third = submit(engine, "b", "c", "d", batch="b")
    assert cli("cancel", str(first), "ffff0000").returncode == 5
    assert evaluations.verdict(engine, first) is None
    assert cli("cancel", str(first)[:13], str(finished)).stdout == "cancelled 1, 1 had a verdict already\n"
    assert cli("cancel", "--batch", "b").stdout == "cancelled 2\n"
    assert cli("cancel", "--batch", "b").returncode == 0
    unknown = cli("cancel", "--batch", "c")
    assert (unknown.returncode, "no evaluation has the batch c" in unknown.stderr) == (5, True)
    found = evaluations.verdicts(engine, [finished, first, second, third])
    ends = [str(found[identity].category) for identity in (finished, first, second, third)]
    assert ends == ["passed", *["cancelled"] * 3]
    assert cli("cancel").returncode == 2
    both = cli("cancel", str(first), "--batch", "b")
    assert (both.returncode, "ids or conditions, not both" in both.stderr) == (2, True)


def test_conditions_choose_what_is_cancelled(cli: Cli, engine: Engine, worker: UUID) -> None:
    """Only evaluations that match all conditions are cancelled. An invalid field or value cancels nothing."""
    ids = submit(engine, "a", "b", "t", batch="b")
    for condition in ("category=passed", "priority=high", "backend"):
        assert cli("cancel", "--where", condition).returncode == 2
    for one in (("backend=torch", "--older-than", "1h"), (f"kernel={reports.show(engine, ids[0]).kernel_hash[:11]}",)):
        assert cli("cancel", "--where", *one).stdout == "cancelled 0: no evaluation without a verdict matches\n"
    assert cli("cancel", "--where", "backend=torch", "--where", "lane=cpu").stdout == "cancelled 2\n"
    assert set(evaluations.verdicts(engine, ids)) == set(ids[:2])


def test_what_waits_is_listed_and_explained(cli: Cli, engine: Engine, worker: UUID) -> None:
    """`results --state`, `status` and `show` list queued evaluations with producer, position and reason."""
    first, second = submit(engine, "a", "b")
    listed = [(one["evaluation_id"], one["priority"]) for one in cli.told("results", "--state", "queued")]
    assert listed == [(str(second), "batch"), (str(first), "batch")]
    assert "b" in cli("results", "--state", "queued", "--where", "lane=cpu").stdout
    assert cli("results", "--state", "running").stdout == "no running evaluation matches\n"
    [crowd] = cli.told("status")[0]["queued"]
    assert (crowd["lane"], crowd["priority"], crowd["queued"]) == ("cpu", "batch", 2)
    waiting = cli.told("show", str(second))[0]["waiting"]
    assert (waiting["why"], waiting["ahead"]) == ("turn", 1)
    assert "1 comes before it" in cli("show", str(second)).stdout


def test_costs_are_added_up(cli: Cli, engine: Engine, worker: UUID) -> None:
    """Attempts, seconds of slots and devices, and waiting time are summed by batch, problem, lane, day or producer."""
    submit(engine, "a", "b", batch="night")
    submit(engine, "c")
    evidence = Evidence(
        durations_s={"alone_measure": 0.5, "alone_verify": 0.25, "check": 9.0},
        cpu_s={"judge": 0.25, "reference": 1.0, "candidate": 2.0},
    )
    judge(engine, worker, lambda label: ended(Category.WRONG_VALUES) if label == "c" else passed(evidence=evidence))
    change(engine, "UPDATE attempts SET started_at = started_at - interval '2 s'")
    change(engine, "UPDATE evaluations SET submitted_at = submitted_at - interval '10 s'")
    night, unknown = (row for key in ("night", "") for row in cli.told("cost", "--by", "batch") if row["key"] == key)
    assert (night["evaluations"], night["passed"], night["attempts"], night["reused"]) == (2, 2, 2, 0)
    assert (night["alone_s"], night["cpu_s"]) == (pytest.approx(1.5), pytest.approx(6.5))
    assert 4 <= night["slot_s"] < 60
    assert 16 <= night["waited_s"] < 120
    assert (unknown["evaluations"], unknown["cpu_s"]) == (1, 0)
    for by, keys in (("problem", ["relu"]), ("lane", ["cpu"]), ("producer", [""])):
        assert [row["key"] for row in cli.told("cost", "--by", by)] == keys
    assert "no evaluation" in cli("cost", "--by", "day", "--since", "2100-01-01").stdout
    assert cli("cost", "--by", "colour").returncode == 2


def test_two_evaluations_are_compared(cli: Cli, engine: Engine, worker: UUID) -> None:
    """The comparison has verdicts, the faster kernel with its confidence, and a diff with hostile text escaped."""
    slow, fast, near, wrong = submit(engine, "slow", f"fast {HOSTILE}", "near", "wrong")
    times = {"slow": 4.0, "fast": 2.0, "near": 3.95}

    def judgement(label: str) -> Outcome:
        runtime_ms = times.get(label.split()[0])
        return passed(runtime=measurement(runtime_ms)) if runtime_ms else hostile("")

    judge(engine, worker, judgement)
    done = cli("diff", str(slow), str(fast))
    assert done.returncode == 0, done.stderr
    assert all(words in done.stdout for words in ("the second is 2x as fast as the first", "-# slow", "+# fast"))
    assert "\x1b" not in done.stdout
    assert "overlapping quartiles" in cli("diff", str(slow), str(near)).stdout
    assert "\x1b" not in cli("diff", str(slow), str(wrong)).stdout
    [record] = cli.told("diff", str(slow), str(fast))
    assert record["first"]["verdict"]["category"] == "passed"
    assert "+# fast" in record["diff"]
    assert "the sources are the same" in cli("diff", str(slow), str(slow)).stdout
    assert cli("diff", str(slow), "ffffffff").returncode == 5


def test_two_batches_are_compared(cli: Cli, engine: Engine, worker: UUID) -> None:
    """Changed kernels are listed, the broken ones first, and the status is 1 then. No kernel differs from itself."""
    times = {"slower": (1.0, 2.0), "same": (1.0, 3.0), "fixed": (None, 1.0), "broken": (1.0, None)}
    for number, batch in enumerate(("monday", "tuesday", "wednesday")):
        submit(engine, "same", batch=batch)
        submit(engine, *(times.keys() - {"same"}), batch=batch, version=batch)
        ms = {label: both[min(number, 1)] for label, both in times.items()}
        judge(engine, worker, lambda label, ms=ms: timed(ms[label]) if ms[label] else hostile(label))
    done = cli("compare", "monday", "tuesday")
    assert done.returncode == 1, done.stderr
    assert [line.split()[:3] for line in done.stdout.splitlines() if "relu" in line] == [
        ["broke", "relu", "broken"],
        ["slower", "relu", "slower"],
        ["fixed", "relu", "fixed"],
    ]
    assert "1 broke, 1 fixed, 1 slower, 1 same\ngeometric mean of the ratios: 0.50x\n" in done.stdout
    assert_harmless(done.stdout)
    [record] = cli.told("compare", "monday", "tuesday", status=1)
    assert {pair["label"]: pair["change"] for pair in record["pairs"]} == {
        "slower": "slower", "same": "same", "fixed": "fixed", "broken": "broke",
    }  # fmt: skip
    assert "no kernel broke" in cli("compare", "tuesday", "wednesday").stdout
    assert cli("compare", "monday", "none").returncode == 5
