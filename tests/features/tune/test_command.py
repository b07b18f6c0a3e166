"""`kqueue tune`: records, resumption, refusals and output. The tests define each kernel's verdict."""

from __future__ import annotations

import contextlib
import json
import re
import signal
import subprocess
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Engine, text

from kqueue.categories import Category
from kqueue.contract import Outcome
from kqueue.errors import InvalidRequest
from kqueue.features.search.plan import make_plan
from kqueue.features.search.run import recorded
from kqueue.features.tune.run import TunePlan
from kqueue.states import SearchState
from kqueue.store import searches
from tests.cli.command import Cli, Done, Judgement
from tests.samples import ended, measurement
from tests.store.steps import change, count
from tests.waiting import until

pytestmark = pytest.mark.usefixtures("undrawn")

Judging = Callable[[Judgement], None]
KERNEL = "# tuned\nBLOCK = 4\nWARPS = 1\n\n\nclass ModelNew: ...\n"
TUNE = ("tune", "kernel.py", "--problem", "relu.py", "--gpu", "cpu", "--repeats", "2", "--finalists", "2")


@pytest.fixture
def by_block(engine: Engine) -> Callable[..., Judgement]:
    """Judge a run's kernels by their BLOCK: its time in ms, 0 for a wrong one, None for a failure of the fleet."""

    def make(**times: float | None) -> Judgement:
        def judge(label: str) -> Outcome:
            run, _, number = label.rpartition("-")
            query = (
                "SELECT kernel FROM search_proposals JOIN search_runs ON id = run_id WHERE name = :r AND number = :n"
            )
            with engine.connect() as connection:
                kernel = connection.scalar(text(query), {"r": run, "n": int(number)})
            found = re.search(r"BLOCK = (\d+)", kernel)
            assert found
            runtime_ms = times[f"b{found[1]}"]
            if runtime_ms is None:
                return ended(Category.REFERENCE_ERROR)
            if not runtime_ms:
                return ended(Category.WRONG_VALUES)
            return ended(Category.PASSED, runtime=measurement(runtime_ms), baseline=measurement(8.0))

        return judge

    return make


def tune(cli: Cli, *grid: str, status: int = 0, name: str = "a") -> Done:
    cli.write("kernel.py", KERNEL)
    done = cli(*TUNE, *(word for values in grid for word in ("--grid", values)), "--run-name", name)
    assert done.returncode == status, done.stderr
    return done


def resume(cli: Cli) -> dict[str, Any]:
    [result] = cli.told("search", "resume", "a")
    return result


def known(engine: Engine, what: str) -> int:
    return count(engine, "evaluations LEFT JOIN verdicts ON id = evaluation_id", what)


def test_the_fastest_values_win(cli: Cli, judging: Judging, by_block: Callable[..., Judgement]) -> None:
    """Wrong kernels drop out, the best are judged again with more calls, and the winner is written with pictures."""
    judging(by_block(b4=8.0, b8=4.0, b16=0, b32=2.0))
    done = tune(cli, "BLOCK=4..32..x2", "WARPS=1,2")
    for words in ("winner: BLOCK=32", "4x, compared with 8 (8 to 8) ms of the original kernel", "importance: BLOCK"):
        assert words in done.stdout
    assert "of the start (A) with the best (B): the best is confirmed. B is faster, certainty 99.02 %: " in done.stdout
    folder = cli.directory / "tune-a"
    best = (folder / "best.py").read_text()
    assert best in {KERNEL.replace("BLOCK = 4", "BLOCK = 32").replace("WARPS = 1", f"WARPS = {n}") for n in (1, 2)}
    for name in ("curve", "importance"):
        assert [(folder / f"{name}.{form}").read_text() for form in ("png", "svg")] == ["png", "svg"]
    rows = json.loads(cli("search", "show", "a", "--json").stdout)["proposals"]
    told = [json.loads(one["answer"]) for one in rows]
    steps = [[one for one, row in zip(told, rows, strict=True) if row["step"] == n] for n in range(3)]
    assert [(len(some), {one["calls"] for one in some}) for some in steps] == [(8, {11}), (2, {33}), (6, {100})]
    assert [told[0]["given"], told[0]["values"]] == [True, {"BLOCK": "4", "WARPS": "1"}]
    assert all(one["values"]["BLOCK"] != "16" for one in (*steps[1], *steps[2]))
    assert "winner: BLOCK=32" in cli("search", "show", "a", "--out", "again").stdout
    assert (cli.directory / "again" / "best.py").read_text() == best
    wrong = next(n for n, one in enumerate(told) if one["values"]["BLOCK"] == "16")
    assert "11 calls: wrong_values" in cli("search", "show", "a", "--proposal", str(wrong)).stdout


def test_nothing_beats_the_original(cli: Cli, judging: Judging, by_block: Callable[..., Judgement]) -> None:
    """The original wins unchanged, and the output says so, even if the best was faster each time before the duel."""
    tried = Counter[str]()

    def lucky(label: str) -> Outcome:
        tried[label] += 1
        return by_block(b4=2.0, b8=1.0 if tried[label] == 1 else 2.0, b16=3.0)(label)

    judging(lucky)
    done = tune(cli, "BLOCK=8,16")
    assert "no configuration beats the original kernel (BLOCK=4, 2 (2 to 2) ms) reliably" in done.stdout
    assert "not confirmed, so the start wins. no decision: B " in done.stdout
    assert (cli.directory / "tune-a" / "best.py").read_text() == KERNEL
    record = resume(cli)
    assert record["winner"] == {"values": {"BLOCK": "4"}, "beats_original": False, "compared": True, "gain": 1.0}
    assert (record["duel"]["winner"], record["duel"]["rounds"]) == (None, 40)
    assert record["configurations"][0]["original"]
    assert record["files"][0] == "tune-a/best.py"


def test_a_fleet_that_failed_is_asked_again(
    cli: Cli, judging: Judging, by_block: Callable[..., Judgement], engine: Engine
) -> None:
    """Without a verdict on the original the status is 3, and `resume` judges it again."""
    times: dict[str, float | None] = {"b4": None, "b8": 1.0}
    judging(lambda label: by_block(**times)(label))
    assert "Resume it with: kqueue search resume a" in tune(cli, "BLOCK=8", status=3).stderr
    assert searches.find(engine, "a").state == SearchState.STOPPED
    times["b4"] = 8.0
    assert resume(cli)["winner"]["gain"] == 8.0


def test_an_interrupted_run_leaves_nothing_and_goes_on(
    cli: Cli, judging: Judging, by_block: Callable[..., Judgement], engine: Engine
) -> None:
    """Ctrl-C cancels queued evaluations, and recorded ones are not judged again."""
    cli.write("kernel.py", KERNEL)
    with cli.start(*TUNE, "--grid", "BLOCK=8,16", "--run-name", "a") as process:
        until(lambda: known(engine, "state = 'queued'") == 3, what="the first batch")
        process.send_signal(signal.SIGINT)
        with contextlib.suppress(subprocess.TimeoutExpired):  # Python can discard an exception, so also an interrupt.
            process.wait(60)
        process.send_signal(signal.SIGINT)
        _, said = process.communicate(timeout=120)
    assert "Resume it with: kqueue search resume a" in said
    assert (known(engine, "state <> 'done'"), known(engine, "category = 'cancelled'")) == (0, 3)
    judging(by_block(b4=8.0, b8=4.0, b16=2.0))
    refused = cli("search", "resume", "a", "--num-steps", "3")
    assert (refused.returncode, "only a search has them" in refused.stderr) == (2, True)
    done = cli("search", "resume", "a", "--out", "found")
    assert done.returncode == 0, done.stderr
    assert Path(cli.directory, "found", "best.py").read_text() == KERNEL.replace("BLOCK = 4", "BLOCK = 16")
    judged = known(engine, "category = 'passed'")
    assert cli("search", "resume", "a", "--out", "found").returncode == 0
    assert known(engine, "category = 'passed'") == judged
    assert re.search(r"a +done .* tune +Optuna", cli("search", "list").stdout)


@pytest.mark.nightly
def test_what_was_accepted_is_cancelled_if_the_rest_is_refused(cli: Cli, worker: object, engine: Engine) -> None:
    """If a run's second kernel is refused, its first one is cancelled."""
    cli.write("kernel.py", KERNEL)
    with cli.start(*TUNE, "--grid", "BLOCK=8", "--run-name", "a") as process:
        until(lambda: known(engine, "state = 'queued'") == 2, what="the first batch")
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=120)
    with engine.begin() as connection:
        # The first is submitted again, and the second's key has another kernel.
        connection.execute(text("UPDATE evaluations SET idempotency_key = 'x' WHERE idempotency_key LIKE '%/0/0'"))
        connection.execute(text("UPDATE search_proposals SET kernel = kernel || '# x' WHERE number = 1"))
    done = cli("search", "resume", "a")
    assert (done.returncode, "idempotency_key" in done.stderr) == (2, True), done.stderr
    assert (known(engine, "true"), known(engine, "state <> 'done'")) == (3, 0)


def test_a_plan_that_changed_is_not_gone_on_with(engine: Engine) -> None:
    """A plan that another process changed after it was read is refused."""
    fields = {"problem": "class Model: ...\n", "kernel": KERNEL, "backend": "torch", "grid": [["BLOCK", ["8"]]]}
    plan = make_plan(TunePlan, fields)
    run = searches.create(engine, "a", plan.model_dump(mode="json"))
    other = make_plan(TunePlan, fields | {"repeats": 2})
    with recorded(engine, run, other):
        pass
    with pytest.raises(InvalidRequest, match="the plan of the search a has just changed"), recorded(engine, run, plan):
        pytest.fail("it has the run")
    found = searches.find(engine, "a")
    assert (found.state, found.plan["repeats"]) == (SearchState.DONE, 2)
    with recorded(engine, found, other):
        pass


def test_a_changed_record_is_not_obeyed(
    cli: Cli, judging: Judging, by_block: Callable[..., Judgement], engine: Engine
) -> None:
    """A fleet or function that only the record names is not used, and an invalid record is refused."""
    judging(by_block(b4=8.0, b8=4.0))
    tune(cli, "BLOCK=8")
    deep = {"metrics": ["speedup"], "kernel": f"{KERNEL}X = {'-' * 1500}1\n"}
    for other, says in (
        ({"url": "https://evil.example"}, "The record has --url https://evil.example"),
        ({"url": None} | deep, "cannot be read: the kernel cannot be tuned"),
        ({"kernel": KERNEL, "grid": [["OTHER", ["1"]]]}, "cannot be read: grid: OTHER is not in the kernel"),
    ):
        change(engine, "UPDATE search_runs SET plan = plan || CAST(:new AS jsonb)", new=json.dumps(other))
        done = cli("search", "resume", "a", KQUEUE_TOKEN="secret")
        assert (done.returncode, says in done.stderr) == (2, True), done.stderr
        assert cli("search", "list").returncode == 0
