"""`kqueue plot`: the object that a name selects, its pictures, and their files."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import Any
from uuid import UUID
from xml.etree import ElementTree

import pytest
from sqlalchemy import Engine, event

from kqueue.categories import Category
from kqueue.contract import Outcome, Request
from kqueue.store import reports, searches
from tests.cli.command import COMMAND, PROBLEM, Cli, judge, submit
from tests.samples import ended, measurement, passed
from tests.store.steps import change

OTHER = "class Model: ...  # another\n"


def by_label(label: str) -> Outcome:
    if label.startswith("bad"):
        return ended(Category.WRONG_VALUES)
    return passed(runtime=measurement(float(label.rpartition("-")[2])), baseline=measurement(8.0))


@pytest.fixture
def known(engine: Engine, worker: UUID) -> list[UUID]:
    """Record two problems in the batch `b`: one with kernels at 4x, at 2x and wrong, the other with a wrong one."""
    ids = submit(engine, "k-2", "k-4", "bad", batch="b", problem_label="<relu>")
    ids += submit(engine, "bad-other", batch="b", problem=OTHER)
    judge(engine, worker, by_label)
    return ids


def words(picture: bytes) -> str:
    root = ElementTree.fromstring(picture)
    return "\n".join("".join(found.itertext()) for found in root.iter("{http://www.w3.org/2000/svg}text"))


def test_every_kind_that_fits_is_drawn(cli: Cli, engine: Engine, known: list[UUID]) -> None:
    """A problem, a batch and an evaluation have pictures, and the output names written and replaced files."""
    problem_hash = Request(problem=PROBLEM, kernel="k", backend="torch", lane="cpu").problem_hash
    done = cli("plot", problem_hash[:12])
    assert (done.returncode, done.stderr) == (0, "")
    files = done.stdout.split()
    assert files == [f"relu--{problem_hash[:8]}-{kind}.svg" for kind in ("best", "leaderboard", "categories")]
    best, board, categories = (words(Path(cli.directory, name).read_bytes()) for name in files)
    assert "best so far: 4.00x" in best
    assert "<relu>" in best
    assert [line for line in board.splitlines() if line.startswith("k-")] == ["k-2", "k-4"]
    assert "4.00x  torch, fp32, test device" in board
    assert "passed (2)" in categories
    assert "wrong_values (1), the kernel failed" in categories
    assert cli("plot", "<relu>").stdout.split() == files
    again = cli("plot", f"sha256:{problem_hash}", "--kind", "best")
    assert again.stderr == f"kqueue: {files[0]} existed and was replaced\n"

    assert cli("plot", "b").stdout.split() == ["b-categories.svg", "b-fast-p.svg"]
    # Only one of the two problems has a right kernel, so its best kernel counts.
    assert "correct: 1 of 2" in words(Path(cli.directory, "b-fast-p.svg").read_bytes())
    assert "fast_2: 50%" in words(Path(cli.directory, "b-fast-p.svg").read_bytes())

    assert cli("plot", str(known[0])[:8], "--out", "times.png", "--theme", "dark").stdout == "times.png\n"
    assert Path(cli.directory, "times.png").read_bytes().startswith(b"\x89PNG")
    shown = words(cli("plot", str(known[0]), "--out", "-").stdout.encode())
    assert "2 ms, 100 calls" in shown
    assert "8 ms, 100 calls" in shown


def test_a_run_is_drawn(cli: Cli, engine: Engine) -> None:
    """The picture of a search equals the one that the search itself writes."""
    plan = {"problem": PROBLEM, "kernel": "class ModelNew: ...", "backend": "torch", "proposer": "recorded"}
    plan |= {"given": "x", "metrics": ["speedup"], "algorithm": "PS"}
    run = searches.create(engine, "mine", plan)
    searches.begin_step(engine, run.id, 0, [{"number": 0, "parent": None, "kernel": "k"}], None)
    searches.ended(engine, run.id, 0, category="passed", scores={"speedup": 1.5})
    done = cli("plot", "mine")
    assert (done.returncode, done.stdout) == (0, "mine-curve.svg\n"), done.stderr
    assert "mine: best so far" in words(Path(cli.directory, "mine-curve.svg").read_bytes())
    submit(engine, "k-2", batch="mine")  # a search's evaluations are the batch of its name
    assert cli("plot", "mine").stdout.split() == ["mine-curve.svg", "mine-categories.svg", "mine-fast-p.svg"]
    assert cli("plot", str(run.id), "--out", "x.svg").returncode == 0


def test_what_cannot_be_drawn_is_said(cli: Cli, engine: Engine, known: list[UUID]) -> None:
    """Unknown and ambiguous names, kinds that do not fit, endings, themes and missing folders are refused."""
    double = str(known[0])[:8]
    problem = double.ljust(64, "0")
    change(engine, "ALTER TABLE problems DROP CONSTRAINT ck_problems_hash")
    change(engine, "INSERT INTO problems (hash, source) VALUES (:hash, '')", hash=problem)
    for arguments, status, said in (
        (("nothing",), 2, "nothing is no problem, batch, run or evaluation"),
        ((double,), 2, f"{double} could be problem {problem}, evaluation {known[0]}: give more of it"),
        ((str(known[2]),), 2, f"the evaluation {known[2]} has nothing to draw: no time was measured"),
        (("b", "--kind", "times"), 2, "--kind times: for a batch use one of categories, fast-p"),
        (("b", "--kind", "pie"), 2, "--kind pie: use one of best, leaderboard"),
        (("b", "--out", "b.pdf"), 2, "--out b.pdf: the name must end in .svg or .png"),
        (("b", "--theme", "pink"), 2, "--theme pink: use one of light, dark"),
        (("b", "--out", "no/where.svg"), 3, "--out: no/where.svg cannot be written: No such file or directory"),
    ):
        done = cli("plot", *arguments)
        assert (done.returncode, said in done.stderr, done.stdout) == (status, True, ""), done.stderr
    with Path("/dev/full").open("wb") as full:
        command, given = [*COMMAND, "plot", "b", "--out=-"], {**os.environ, **cli.environment, "PYTHONUNBUFFERED": ""}
        done = subprocess.run(command, env=given, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert (done.returncode, done.stderr.count("\n")) == (3, 1), done.stderr
    unset = cli("plot", "b", KQUEUE_DATABASE_URL="")
    assert (unset.returncode, "KQUEUE_DATABASE_URL" in unset.stderr) == (3, True)


def test_curves_and_counts_ask_an_index(engine: Engine, known: list[UUID]) -> None:
    """Selecting one problem or batch among many does not scan all evaluations."""
    mine = Request(problem=PROBLEM, kernel="k", backend="torch", lane="cpu").problem_hash
    change(
        engine,
        "INSERT INTO evaluations (id, problem_hash, kernel_hash, lane, settings, batch, state)"
        " SELECT gen_random_uuid(), p.hash, k.hash, 'cpu', '{}', 'many' || n % 500, 'done' FROM"
        " generate_series(1, 20000) AS n, (SELECT hash FROM kernels LIMIT 1) AS k,"
        " (SELECT hash FROM problems WHERE hash <> :mine) AS p",
        mine=mine,
    )
    change(engine, "ANALYZE evaluations")
    plans: list[str] = []

    def explain(connection: Any, cursor: Any, statement: str, parameters: Any, *_: Any) -> None:
        if statement.startswith("SELECT"):
            plans.append("\n".join(row[0] for row in cursor.execute(f"EXPLAIN {statement}", parameters).fetchall()))

    event.listen(engine, "before_cursor_execute", explain)
    assert len(reports.best_so_far(engine, mine)) == 3
    assert sum(reports.outcomes(engine, problem_hash=mine).values()) == 3
    assert sum(reports.outcomes(engine, batch="b").values()) == 4
    assert reports.fast_p(engine, "b") == reports.FastP([4.0], 2)
    change(
        engine,
        """UPDATE verdicts SET runtime = runtime || '{"low_ms": 0, "high_ms": 2, "median_ms": 1}',
        baseline = baseline || '{"low_ms": 1, "high_ms": 1, "median_ms": 1}'""",
    )
    assert reports.fast_p(engine, "b") == reports.FastP([2.0], 2)
    state = reports.state_of(engine, batches=["b"], ids=known)
    assert state
    assert state.total == 4
    assert reports.last_queued(engine, batches=["b"], ids=known) is None
    assert reports.named(engine, "b").kind is reports.Kind.BATCH
    event.remove(engine, "before_cursor_execute", explain)
    assert len(plans) >= 7
    assert not [plan for plan in plans if "Seq Scan on evaluations" in plan]
