"""`kqueue tournament`. The tests define each kernel's verdict."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from uuid import UUID

import pytest
from sqlalchemy import Engine

from kqueue import receipts
from kqueue.categories import Category
from kqueue.contract import Outcome, Request
from kqueue.errors import InvalidRequest
from kqueue.evidence import Evidence
from kqueue.features.search.plan import make_plan
from kqueue.features.tournament import command
from kqueue.features.tournament.tournament import TournamentPlan
from kqueue.store import reports
from tests.cli.command import PROBLEM, Cli, Judgement
from tests.samples import ended, measurement
from tests.store.steps import count


def judged(label: str) -> Outcome:
    """Return the outcome of a kernel whose label ends with its time in ms. The device is used for half a second."""
    runtime_ms = float(re.sub(r"\D", "", label))
    evidence = Evidence(durations_s={"alone_measure": 0.5, "check": 1.0})
    if not runtime_ms:
        return ended(Category.WRONG_VALUES, evidence=evidence)
    times = {"runtime": measurement(runtime_ms), "baseline": measurement(8.0)}
    return ended(Category.PASSED, evidence=evidence, **times)


def test_a_tournament_on_a_fleet(cli: Cli, judging: Callable[[Judgement], None], engine: Engine) -> None:
    """The best three are written with their certainty, and the run is recorded as a search is."""
    for runtime_ms in (0, 1, 2, 3, 4, 5):
        cli.write(f"kernels/k{runtime_ms}.py", f"class ModelNew: number = {runtime_ms}\n")
    cli.write("kernels/z1.py", "class ModelNew: number = 1\n")
    judging(judged)
    given = ("tournament", "relu.py", "kernels", "--fleet", "--gpu", "cpu", "--backend", "torch", "--run-name", "a")
    done = cli(*given, "--gpu-seconds", "5")
    assert (done.returncode, "--gpu-seconds 5: give at least " in done.stderr) == (2, True), done.stderr
    done = cli(*given, "--quote")
    assert "z1.py: left out, because it is equal to kernels/k1.py" in done.stderr
    assert "price: 0.5 device seconds for the first time of a kernel" in done.stderr
    assert "The budget of 60 is enough for all 6 kernels" in done.stderr
    assert count(engine, "search_runs") == 0
    [record] = cli.told(*given)
    assert [(one["kernel"], one["score"], one["full"]) for one in record["best"]] == [
        ("k1", 8.0, True), ("k2", 4.0, True), ("k3", pytest.approx(8 / 3), True),
    ]  # fmt: skip
    lead = record["best"][0]["lead"]
    assert (lead["winner"], lead["ratio"], lead["certainty"]) == (
        "b",
        pytest.approx(2),
        pytest.approx(0.9902, abs=1e-4),
    )
    assert Path(cli.directory, "tournament-a", "best-2.py").read_text() == "class ModelNew: number = 2\n"
    evaluations = count(engine, "evaluations")
    assert "2.00x (2.00x to 2.00x)" in cli("search", "resume", "a", "--out", "again").stdout
    assert count(engine, "evaluations") == evaluations
    assert re.search(r"a +done .* tournament +files", cli("search", "list").stdout)
    assert "6 of 6 kernels were judged" in cli("search", "show", "a").stdout
    [one, *_] = cli.told("results", "--where", "batch=a")
    assert receipts.purpose_of(reports.show(engine, UUID(one["evaluation_id"]))) == "tournament"


def test_a_tournament_on_this_machine_goes_on_where_it_ended(tmp_path: Path) -> None:
    """Recorded results are not judged again, and a folder has one tournament."""
    candidates = [(f"k{number}", "torch", f"class ModelNew: number = {number}") for number in range(5)]
    fields = {"problem": PROBLEM, "kernel": candidates[0][2], "backend": "torch", "candidates": candidates}
    plan = make_plan(TournamentPlan, fields)
    asked: list[str] = []

    def judge(requests: list[Request]) -> Iterator[Outcome]:
        for request in requests:
            if len(asked) == 7:
                raise KeyboardInterrupt
            asked.append(request.kernel_label or "")
            yield judged(asked[-1])

    def play(*, only_quote: bool = False) -> int:
        return len(command._play(plan, judge, command._Journal(tmp_path, plan), only_quote=only_quote))

    assert play(only_quote=True) == len(asked) < 7
    with pytest.raises(KeyboardInterrupt):
        play()
    assert len(asked) == 7
    asked.append("")
    assert play() == len(asked) - 1
    with (tmp_path / "results.jsonl").open("a") as file:
        file.write('{"kernel": 1')
    assert play() == len(asked) - 1
    with pytest.raises(InvalidRequest, match="has another tournament"):
        command._Journal(tmp_path, plan.model_copy(update={"candidates": plan.candidates[:2]}))
