"""`kqueue search`: records, resumption, refusals and output. The tests define each kernel's verdict."""

from __future__ import annotations

import json
import shlex
import signal
import sys
import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Engine, text
from sqlalchemy.exc import IntegrityError

from kqueue import charts
from kqueue.categories import Category
from kqueue.charts import render
from kqueue.contract import Outcome
from tests.cli.command import PROBLEM, Cli, Done, Judgement
from tests.samples import ended, measurement
from tests.store.steps import change
from tests.waiting import until

pytestmark = pytest.mark.usefixtures("undrawn")

Judging = Callable[[Judgement], None]
SEARCH = ("search", "--problem", "relu.py", "--backend", "torch", "--gpu", "cpu")


def number(label: str) -> int:
    return int(label.rpartition("-")[2])


def timed(runtime_ms: float) -> Outcome:
    """Return a right kernel's outcome with this time in ms. The reference takes 8 ms."""
    return ended(Category.PASSED, runtime=measurement(runtime_ms), baseline=measurement(8.0))


def as_told(*runtimes_ms: float) -> Judgement:
    """Judge proposal N by the Nth number: its time in ms, or 0 for a wrong one. Best kernels tested again take 1 ms."""

    def judge(label: str) -> Outcome:
        if "-test-" in label:
            return timed(1.0)
        runtime_ms = runtimes_ms[number(label)]
        return timed(runtime_ms) if runtime_ms else ended(Category.WRONG_VALUES)

    return judge


def recorded(cli: Cli, count: int) -> tuple[str, str]:
    for n in range(1, count + 1):
        cli.write(f"kernels/{n:02}.py", f"class ModelNew: number = {n}\n")
    return "--recorded", "kernels"


def asker(cli: Cli) -> tuple[str, str]:
    """Return a command that records each question in asked.jsonl and answers with a kernel that holds its number."""
    cli.write(
        "ask.py",
        "import json, sys\nq = json.load(sys.stdin)\n"
        "open('asked.jsonl', 'a').write(json.dumps(q) + '\\n')\n"
        "print(f\"class ModelNew: number = {q['number']}\")\n",
    )
    return "--proposer", f"{sys.executable} ask.py"


def questions(cli: Cli) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (cli.directory / "asked.jsonl").read_text().splitlines()]


def search(cli: Cli, *arguments: str) -> Done:
    done = cli(*SEARCH, "--run-name", "a", *arguments)
    assert done.returncode == 0, done.stderr
    return done


def resume(cli: Cli, *arguments: str) -> dict[str, Any]:
    [result] = cli.told("search", "resume", "a", *arguments)
    return result


def shown(cli: Cli, name: str = "a") -> dict[str, Any]:
    [run] = cli.told("search", "show", name)
    return run


def held(judge: Judgement, since: Callable[[str], bool]) -> tuple[Judgement, threading.Event, threading.Event]:
    """Return a judgement that blocks on some kernels, with the events that report and release it."""
    go_on, waits = threading.Event(), threading.Event()

    def judgement(label: str) -> Outcome:
        if since(label):
            waits.set()
            assert go_on.wait(100)
        return judge(label)

    return judgement, waits, go_on


def rows(engine: Engine, query: str) -> list[Any]:
    with engine.connect() as connection:
        return list(connection.execute(text(query)).all())


def test_each_step_starts_from_the_best_so_far(cli: Cli, judging: Judging) -> None:
    """PS asks for a kernel better than the best, passes its score and feedback, and the best is written to a file."""
    judging(as_told(8.0, 4.0, 0, 2.0, 3.0))
    result = json.loads(search(cli, *asker(cli), "--num-steps", "4", "--json").stdout)
    asked = questions(cli)
    assert [one["kernel"].strip()[-1] for one in asked] == [".", "1", "1", "3"]  # the start is `class ModelNew: ...`
    assert [one["scores"]["inverse_runtime"] for one in asked] == pytest.approx([125, 250, 250, 500])
    assert all(one["problem"] == PROBLEM and one["feedback"].startswith("CORRECT") for one in asked)
    assert all(one["kernel"] in one["prompt"] and one["summary"] is None for one in asked)
    assert (result["best"][0]["number"], result["best"][0]["speedup"]) == (3, 4.0)
    assert (result["proposals"], result["judged"], result["passed"]) == (4, 5, 4)
    assert Path(cli.directory, "search-a", "best.py").read_text() == "class ModelNew: number = 3\n"
    assert result["files"][0] == "search-a/best.py"


def test_a_summariser_says_what_failed_and_what_helped(cli: Cli, judging: Judging) -> None:
    """Each step's summary is recorded and passed to the proposer."""
    judging(as_told(8.0, 4.0, 0, 5.0))
    search(cli, *asker(cli), "--num-steps", "3", "--algorithm", "PS_Summarizer")
    last = questions(cli)[-1]
    assert last["summary"].splitlines() == [
        "Failed:",
        "- wrong_values: ended as wrong_values (proposal 2)",
        "Better than their parents:",
        "- proposal 1: inverse_runtime 125 -> inverse_runtime 250",
    ]
    assert last["summary"] in last["prompt"]
    assert [step["summary"] for step in shown(cli, "a")["steps"]][0::3] == [None, last["summary"]]


def test_candidates_proposals_and_threads(cli: Cli, judging: Judging) -> None:
    """A step makes several proposals for each of several kernels, and ends early if too few were judged."""
    judging(as_told(8.0, 4.0, 5.0, 6.0, 0, 7.0, 3.0))
    many = ("--num_candidates", "2", "--num_proposals", "2", "--num_threads", "3")
    search(cli, *recorded(cli, 6), "--num_steps=9", *many)
    run = shown(cli)
    assert [(one["step"], one["parent"]) for one in run["proposals"]] == [
        *((0, None), (1, 0), (1, 0), (2, 1), (2, 1), (2, 2), (2, 2))
    ]
    assert (run["state"], [step["best"] for step in run["steps"]]) == ("done", [0, 1, 6])


def test_several_metrics_make_a_front(cli: Cli, judging: Judging) -> None:
    """Kernels that are each better in one metric are both on the front, and both are written."""
    cli.write("mine.py", "def odd(verdict):\n    return float(int(verdict.kernel_label.split('-')[-1]) % 2)\n")
    judging(as_told(8.0, 4.0, 2.0, 3.0))
    metrics = ("--metric", "speedup", "--metric", "mine:odd")
    best = json.loads(search(cli, *recorded(cli, 3), *metrics, "--num-steps", "5", "--json").stdout)["best"]
    assert [(one["number"], one["scores"]["mine:odd"]) for one in best] == [(2, 0.0), (3, 1.0)]
    assert Path(cli.directory, "search-a", "best-2.py").read_text() == "class ModelNew: number = 3\n"


def test_the_best_is_judged_once_more(cli: Cli, judging: Judging, engine: Engine) -> None:
    """Every few steps the best kernel is judged again in a separate evaluation."""
    judging(as_told(8.0, 4.0, 5.0, 6.0, 7.0))
    done = search(cli, *recorded(cli, 4), "--num-steps", "4", "--test-frequency", "2")
    tests = [(step["number"], step["test"]["scores"]) for step in shown(cli)["steps"] if step["test"]]
    assert tests == [(2, {"inverse_runtime": 1000.0}), (4, {"inverse_runtime": 1000.0})]
    assert "step 2/4: best is proposal 1 (step 1, from 0): passed, 4 ms 2.00x, inverse_runtime 250" in done.stderr
    assert rows(engine, "SELECT count(*) FROM evaluations WHERE batch = 'a'") == [(7,)]


def test_a_lucky_kernel_does_not_win(cli: Cli, judging: Judging, engine: Engine) -> None:
    """Kernels rank by the median of their measurements, and the best of them must win a duel with the start."""
    tried = Counter[str]()

    def lucky(label: str) -> Outcome:
        tried[label] += 1
        slower = label == "a-test-1" or (number(label) == 2 and tried[label] > 1)
        return timed(9.0 if slower else (8.0, 1.0, 4.0)[number(label)])

    judging(lucky)
    done = search(cli, *recorded(cli, 2), "--num-steps", "2", "--test-frequency", "1")
    assert "not confirmed, so the start wins. A is faster, certainty 99.02 %: B has 0.88" in done.stdout
    run = shown(cli)
    # The first proposal is out after its test.
    assert [step["best"] for step in run["steps"]] == [0, 1, 0]
    duel = run["steps"][-1]["test"]["duel"]
    assert (run["steps"][-1]["test"]["number"], duel["winner"], duel["rounds"]) == (2, "a", 10)
    assert Path(cli.directory, "search-a", "best.py").read_text() == run["proposals"][0]["kernel"]
    before = rows(engine, "SELECT count(*) FROM evaluations")
    assert resume(cli, *recorded(cli, 2))["duel"] == duel
    assert rows(engine, "SELECT count(*) FROM evaluations") == before


@pytest.mark.parametrize(
    ("number_of_signal", "state"),
    [(signal.SIGKILL, "interrupted"), pytest.param(signal.SIGINT, "stopped", marks=pytest.mark.nightly)],
)
def test_a_search_goes_on_where_it_ended(
    cli: Cli, judging: Judging, engine: Engine, number_of_signal: signal.Signals, state: str
) -> None:
    """Another process can only watch a running search. After its end no question and no submission is repeated."""
    judgement, waits, go_on = held(as_told(8.0, 4.0, 2.0, 3.0, 5.0), lambda label: number(label) == 2)
    judging(judgement)
    with cli.start(*SEARCH, *asker(cli), "--num-steps", "3", "--run-name", "a") as process:
        assert waits.wait(100)
        before = shown(cli)
        refused = cli("search", "resume", "a", *asker(cli), "--num-steps", "9")
        assert (refused.returncode, "another process" in refused.stderr) == (2, True)
        assert (before["state"], shown(cli)) == ("running", before)
        threading.Timer(0.5, process.send_signal, [number_of_signal]).start()
        watched = cli("search", "show", "a", "--watch").stdout
        assert "proposal 1 (step 1, from 0): passed, 4 ms 2.00x, inverse_runtime 250" in watched
        _, errors = process.communicate(timeout=60)
    assert process.returncode == (130 if number_of_signal is signal.SIGINT else -signal.SIGKILL)
    lines = [line for line in errors.splitlines() if "Resume it with: kqueue search resume a" in line]
    assert len(lines) == (number_of_signal is signal.SIGINT)
    again = shlex.split(lines[0].partition("resume a ")[2]) if lines else asker(cli)
    until(lambda: shown(cli)["state"] == state, what="the state")
    go_on.set()
    assert resume(cli, *again)["best"][0]["number"] == 2
    assert [one["number"] for one in questions(cli)] == [1, 2, 3]
    assert rows(engine, "SELECT count(*) FROM evaluations WHERE batch = 'a'") == [(4,)]
    assert shown(cli)["state"] == "done"
    assert resume(cli, *again, "--num-steps", "4")["proposals"] == 4  # a completed search can have more steps


def test_a_changed_record_is_not_obeyed(cli: Cli, judging: Judging, engine: Engine) -> None:
    """Recorded commands, imports, files and URLs are refused unless the resuming user repeats the options."""
    judging(as_told(8.0, 4.0, 2.0))
    search(cli, *recorded(cli, 2), "--num-steps", "1")
    cli.write("evil.py", "open('bad', 'w')\n")
    [(plan,)] = rows(engine, "SELECT plan FROM search_runs")
    for other, says in (
        ({"proposer": "command", "given": "touch bad"}, "--proposer 'touch bad'"),
        ({"proposer": "model", "given": "hf/https://evil.example"}, "--model hf/https://evil.example"),
        ({"given": "/secret"}, "--recorded /secret"),
        ({"url": "https://evil.example"}, "--url https://evil.example"),
        ({"metrics": ["evil:score"]}, "--metric evil:score"),
    ):
        change(engine, "UPDATE search_runs SET plan = :new", new=json.dumps(plan | other))
        for given in ((), recorded(cli, 2)):
            done = cli("search", "resume", "a", *given, "--num-steps", "2", KQUEUE_TOKEN="secret")
            assert done.returncode == 2, done.stderr
            refused = "repeat the options of the search, because other users can change its record. The record has "
            assert refused in done.stderr
            assert says in done.stderr
    assert not Path(cli.directory, "bad").exists()
    assert len(shown(cli)["proposals"]) == 2


def test_a_proposer_without_an_answer(cli: Cli, judging: Judging) -> None:
    """One failed answer is recorded. A step without any answer ends the search, which can be resumed."""
    cli.write(
        "ask.py",
        "import json, sys, pathlib\nn = json.load(sys.stdin)['number']\n"
        "if n == 1 or (n > 2 and not pathlib.Path('well').exists()): sys.exit('no idea')\n"
        "print(f'class ModelNew: number = {n}')\n",
    )
    judging(as_told(8.0, 9.0, 4.0, 2.0, 2.0, 3.0))
    one = ("--proposer", f"{sys.executable} ask.py")
    failed = cli(*SEARCH, *one, "--num-steps", "2", "--num-proposals", "2", "--run-name", "a")
    assert failed.returncode == 3
    assert all(words in failed.stderr for words in ("ended with 1: no idea", "kqueue search resume a"))
    first = shown(cli)["proposals"][1]
    assert (first["scores"], first["error"]) == (None, f"{sys.executable} ended with 1: no idea")
    cli.write("well", "")
    assert resume(cli, *one)["best"][0]["number"] == 3


def test_a_kernel_is_taken_from_an_answer(cli: Cli, judging: Judging) -> None:
    """A proposal's feedback has the kernel's position in the answer, except when the answer is only source."""
    kernel = "class ModelNew: number = 1\n"
    cli.write("kernels/1.py", f"<think>```python\nclass ModelNew: 1\n```</think>Here: ```python\n{kernel}```")
    cli.write("kernels/2.py", kernel)
    judging(as_told(8.0, 4.0, 4.0))
    search(cli, "--recorded", "kernels", "--num-steps", "1", "--num-proposals", "2")
    _, first, second = shown(cli)["proposals"]
    assert first["kernel"] == second["kernel"] == kernel
    assert "Taken from the answer: block 1 of 1 (python), lines 4-" in first["feedback"]
    assert "Taken from the answer" not in second["feedback"]


def test_an_answer_that_is_no_kernel_scores_nothing(cli: Cli, judging: Judging, engine: Engine) -> None:
    """The answer is not submitted, and the next prompt gives the reason."""
    judging(as_told(0))
    cli.write("empty.py", "print('<think>no idea</think>')\n")
    done = cli(*SEARCH, "--proposer", f"{sys.executable} empty.py", "--num-steps", "1", "--run-name", "a")
    assert done.returncode == 1  # no right kernel
    only = shown(cli)["proposals"][1]
    assert (only["scores"], only["category"]) == ({"inverse_runtime": 0.0}, None)
    taken = "Taken from the answer: nothing, reasoning dropped."
    assert only["feedback"] == f"FAILED: kernel: the kernel's source is empty\n{taken}"
    assert len(rows(engine, "SELECT 1 FROM evaluations")) == 1


def test_the_fleet_s_failures_are_no_bad_kernels(cli: Cli, judging: Judging) -> None:
    """Such a proposal has no score. If it is the start kernel, the search ends and can be resumed."""
    wrong = {0: 1}

    def judgement(label: str) -> Outcome:
        if wrong.pop(number(label), 0) or number(label) == 1:
            return ended(Category.WORKER_LOST)
        return timed(8.0 / (1 + number(label)))

    judging(judgement)
    failed = cli(*SEARCH, *recorded(cli, 2), "--set", "max_attempts=1", "--run-name", "a")
    assert (failed.returncode, "worker_lost" in failed.stderr) == (3, True)
    result = resume(cli, *recorded(cli, 2))
    assert (result["unknown"], result["best"][0]["number"]) == (1, 2)


GIVEN = ("--problem", "relu.py", "--recorded", "kernels")
REFUSED = [
    ((), "--problem: give a file, or --task-idx"),
    (("--problem", "none.py", "--recorded", "kernels"), "none.py: No such file"),
    (("--problem", "relu.py"), "--model, --proposer, --recorded: give one of them"),
    (("--problem", "relu.py", "--recorded", "k", "--model", "m"), "give one of them"),
    (("--problem", "relu.py", "--recorded", "nowhere"), "--recorded: "),
    (("--problem", "relu.py", "--proposer", "'"), "--proposer: No closing quotation"),
    ((*GIVEN, "--algorithm", "BFS"), "--algorithm: Input should be 'PS'"),
    ((*GIVEN, "--num-steps", "0"), "--num-steps: Input should be"),
    ((*GIVEN, "--num-candidates", "101", "--num-proposals", "100"), "times it is 10100, and a step has at most 10000"),
    ((*GIVEN, "--metric", "fast"), "--metric: score: unknown policy"),
    ((*GIVEN, "--metric", "no:way"), "No module named 'no'"),
    ((*GIVEN, "--no-timing"), "--metric inverse_runtime: needs times"),
    ((*GIVEN, "--backend", "rust"), "backend"),
    ((*GIVEN, "--gpu", "H100:8"), "asks for 8 GPUs"),
    ((*GIVEN, "--run-name", "a/b"), "--run-name 'a/b'"),
    (("--problem", "bad.py", "--recorded", "kernels"), "the initial kernel: not valid Python"),
    (("--task-idx", "7", "--kernelbench", "bench", "--recorded", "kernels"), "level 1 in bench has 2 problems"),
    (("show", "nobody"), "no search has the name or id 'nobody'"),
]


def test_bad_input_is_refused_before_anything_is_recorded(cli: Cli, engine: Engine) -> None:
    recorded(cli, 1)
    cli.write("bad.py", "class Model(")
    for name in ("2_two.py", "10_ten.py"):
        cli.write(f"bench/KernelBench/level1/{name}", PROBLEM)
    for arguments, says in REFUSED:
        done = cli("search", *arguments)
        assert (done.returncode, says in done.stderr) == (2, True), done.stderr
    assert rows(engine, "SELECT 1 FROM search_runs") == []


def test_a_metric_s_own_fault(cli: Cli, judging: Judging) -> None:
    """A metric that raises ends the search. After its repair no kernel is judged again."""
    cli.write("mine.py", "def score(verdict):\n    return 1 / 0\n")
    judging(as_told(8.0, 4.0))
    done = cli(*SEARCH, *recorded(cli, 1), "--metric", "mine:score", "--run-name", "a")
    assert (done.returncode, "mine:score: raised ZeroDivisionError" in done.stderr) == (2, True)
    cli.write("mine.py", "def score(verdict):\n    return 8 / verdict.runtime_ms\n")
    assert resume(cli, *recorded(cli, 1), "--metric", "mine:score")["best"][0]["scores"] == {"mine:score": 2.0}


def test_searches_are_listed_compared_and_shown(cli: Cli, judging: Judging) -> None:
    """Searches are listed latest first as tables and JSON, two share one picture, and a proposal is shown whole."""
    for name in ("2_two.py", "10_ten.py"):
        cli.write(f"bench/KernelBench/level1/{name}", PROBLEM)
    judging(as_told(8.0, 4.0, 2.0))
    search(cli, *recorded(cli, 1))
    done = cli("search", "--task_idx", "1", "--level", "1", "--kernelbench", "bench", *SEARCH[3:], *recorded(cli, 2))
    assert done.returncode == 0, done.stderr
    again = cli(*SEARCH, *recorded(cli, 2), "--run-name", "a")
    assert (again.returncode, "'a' is another search" in again.stderr) == (2, True)
    listed = cli.told("search", "list")
    assert [one["plan"]["problem_label"] for one in listed] == ["10_ten", "relu"]
    assert [one["best"][0]["number"] for one in listed] == [2, 1]
    assert listed[0]["name"].startswith("10_ten-PS-")
    both = cli("search", "compare", "a", listed[0]["id"], "--out", "both")
    assert all(words in both.stdout for words in ("inverse_runtime 250", "inverse_runtime 500")), both.stderr
    assert Path(cli.directory, "both", "curve.png").read_bytes() == b"png"
    assert "inverse_runtime 250" in cli("search", "show", "a", "--out", "again").stdout
    assert Path(cli.directory, "again", "best.py").exists()
    one = cli("search", "show", "a", "--proposal", "1")
    assert all(words in one.stdout for words in ("--- prompt ---", "class ModelNew: number = 1"))
    missing = cli("search", "show", "a", "--proposal", "5")
    assert (missing.returncode, "has 2 proposals" in missing.stderr) == (2, True)


def test_records_that_cannot_be_read(cli: Cli, judging: Judging, engine: Engine) -> None:
    """A list marks unreadable searches, and a command on one of them is refused."""
    judging(as_told(8.0, 4.0))
    for name in ("a", "b", "c"):
        search(cli, *recorded(cli, 1), "--run-name", name)
    scores = "UPDATE search_proposals SET scores = '[1]' FROM search_runs WHERE run_id = id AND name = 'c'"
    change(engine, """UPDATE search_runs SET plan = '{"problem": 1}' WHERE name = 'a'""")
    change(engine, scores)
    for command in (("list",), ("compare", "c", "b", "a", "--out", "all")):
        states = [(one["name"], one["state"]) for one in cli.told("search", *command)]
        assert states == [("c", "unreadable"), ("b", "done"), ("a", "unreadable")]
        table = cli("search", *command)
        assert (table.stdout.count("unreadable"), "inverse_runtime 250" in table.stdout) == (2, True), table.stderr
    change(engine, scores.replace("'[1]'", """'{"x": "y"}'"""))
    for name in ("a", "c"):
        refused = cli("search", "show", name)
        assert (refused.returncode, f"the record of the search {name} cannot be read" in refused.stderr) == (2, True)


def test_the_database_refuses_names_that_are_none(engine: Engine) -> None:
    for name in ("x/../../evil", "", "a\n", ".a", "a" * 101, "\x1b[2J"):
        with pytest.raises(IntegrityError, match="ck_search_runs_name"):
            change(engine, "INSERT INTO search_runs (id, name, plan) VALUES (gen_random_uuid(), :n, '{}')", n=name)


def test_what_is_not_installed_is_named(
    cli: Cli, engine: Engine, judging: Judging, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The message names the extra. Only a missing plot package is no error."""
    recorded(cli, 1)
    judging(as_told(8.0, 4.0))
    tune = ("tune", "mine.py", "--problem", "relu.py", "--gpu", "cpu", "--grid", "BLOCK=8")
    cli.write("mine.py", "BLOCK = 4\nclass ModelNew: ...\n")
    monkeypatch.setattr(charts, "render", render)
    for missing, words, extra, status in (
        ("optuna", tune, "tune", 3),
        ("litellm", (*SEARCH, "--model", "openai/x"), "search", 3),
        ("matplotlib", (*SEARCH, "--recorded", "kernels", "--run-name", "a"), "plots", 0),
    ):
        assert rows(engine, "SELECT 1 FROM search_runs") == []
        monkeypatch.setitem(sys.modules, missing, None)
        done = cli(*words)
        assert (done.returncode, f"pip install 'kqueue[{extra}]'" in done.stderr) == (status, True), done.stderr
    assert Path(cli.directory, "search-a", "best.py").exists()
