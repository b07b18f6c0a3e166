"""`kqueue export`: contents and types, filters, files, owners, and exports that are interrupted."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest
import yaml
from sqlalchemy import Engine, text

from kqueue.categories import Category
from kqueue.contract import Outcome, Request
from kqueue.evidence import Histogram
from kqueue.store import evaluations, reports, searches
from kqueue.store.engine import Viewer, acting
from tests.cli.command import Cli
from tests.samples import ended, measurement, passed, request_fields

pyarrow_parquet: Any = pytest.importorskip("pyarrow.parquet", reason="pyarrow is not installed")
ENVIRONMENT = {"device": "test device", "torch": "2.13", "python": "3.11", "host": "host"}
Judged = Callable[..., UUID]


@pytest.fixture
def judged(engine: Engine, worker: UUID) -> Judged:
    """Return a function that submits an evaluation and ends it with an outcome."""
    numbers = iter(range(1000))

    def judge(outcome: Outcome | None = None, owner: str = "local", **fields: object) -> UUID:
        request = Request.model_validate(request_fields(next(numbers), **fields))
        with acting(Viewer(owner)):
            [done] = evaluations.submit(engine, [request])
        claimed = evaluations.claim(engine, done.evaluation_id, worker_id=worker, lease_s=30)
        assert claimed is not None
        evaluations.set_environment(engine, claimed.attempt_id, ENVIRONMENT, conditions="")
        evaluations.finish(engine, done.evaluation_id, 1, outcome or passed(), written_by="judge", retry_delay_s=0)
        return done.evaluation_id

    return judge


def rows(folder: Path) -> list[dict[str, Any]]:
    return pyarrow_parquet.read_table(folder / "data").to_pylist()


def test_what_is_known_of_an_evaluation(cli: Cli, engine: Engine, judged: Judged, tmp_path: Path) -> None:
    """A row has sources unchanged, the search's parent and prompt, times with intervals and samples, cost and words."""
    run = searches.create(engine, "search", {"algorithm": "PS"})
    searches.begin_step(engine, run.id, 0, [{"number": 0, "kernel": "class ModelNew: first"}], None)
    searches.begin_step(engine, run.id, 1, [{"number": 1, "parent": 0, "prompt": "faster"}], None)
    timed = measurement(0.5).model_copy(update={"low_ms": 0.45, "high_ms": 0.55})
    timed = timed.model_copy(update={"histogram": Histogram(low_ms=0.4, high_ms=0.6, counts=(1, 8, 1))})
    baseline = measurement(1.0).model_copy(update={"low_ms": 0.9, "high_ms": 1.1})
    source = "class ModelNew: 'a\u202eb'"
    first = judged(ended(Category.WRONG_VALUES), batch="search")
    second = judged(passed(runtime=timed, baseline=baseline), batch="search", kernel=source, kernel_label="Second")
    searches.ended(engine, run.id, 0, evaluation_id=first)
    searches.ended(engine, run.id, 1, evaluation_id=second, answer="```python```")
    done = cli("export", "set")
    assert (done.returncode, done.stdout) == (0, "set: 2 evaluations in 1 file\n"), done.stderr
    wrong, right = rows(tmp_path / "set")
    assert (wrong["evaluation_id"], wrong["category"], wrong["blame"]) == (str(first), "wrong_values", "candidate")
    assert (wrong["runtime"], wrong["speedup"], wrong["parent_id"], wrong["run"]) == (None, None, None, "search")
    assert '"wrong"' in wrong["facts"]
    assert wrong["feedback"].startswith("FAILED: wrong_values")
    assert (right["kernel"], right["problem"]) == (source, request_fields()["problem"])
    assert (right["parent_id"], right["parent"]) == (str(first), "class ModelNew: first")
    assert (right["prompt"], right["answer"], right["owner"]) == ("faster", "```python```", "local")
    assert right["runtime"]["histogram"]["counts"] == [1, 8, 1]
    assert right["speedup_low"] < right["speedup"] == 2.0 < right["speedup_high"]
    assert (right["device"], right["attempts"], right["slot_s"] > 0) == ("test device", 1, True)
    assert right["finished_at"] > right["submitted_at"]
    file = "set/data/train-00000.parquet"
    [table] = json.loads(cli("convert", file, "--to", "kernelbench").stdout).values()
    results = [(one["compiled"], one["correctness"], one["runtime"]) for one in table]
    assert results == [(True, False, -1.0), (True, True, right["runtime"]["mean_ms"])]
    lines = cli("convert", file, "--to", "kernelgym").stdout.splitlines()
    tasks = [(one["correctness"], one["kernel_runtime"], one["reference_runtime"]) for one in map(json.loads, lines)]
    assert tasks == [(False, -1.0, -1.0), (True, 0.5, 1.0)]
    assert '"nv/cold/time/cpu/median"' in cli("convert", file, "--to", "nvbench").stdout


def test_the_folder_is_a_dataset(cli: Cli, judged: Judged, tmp_path: Path) -> None:
    """The card's front matter names the files, and its table all columns of the files, with their types."""
    ids = [judged() for _ in range(5)]
    done = cli("export", "set", "--rows", "2")
    assert done.stdout == "set: 5 evaluations in 3 files\n", done.stderr
    assert [row["evaluation_id"] for row in rows(tmp_path / "set")] == [str(one) for one in ids]
    card = (tmp_path / "set" / "README.md").read_text()
    [config] = yaml.safe_load(card.split("---")[1])["configs"]
    [split] = config["data_files"]
    files = sorted((tmp_path / "set").glob(split["path"]))
    assert [file.name for file in files] == [f"train-0000{number}.parquet" for number in range(3)]
    names = pyarrow_parquet.read_schema(files[0]).names
    assert [line.split("`")[1] for line in card.splitlines() if line.startswith("| `")] == names


def test_filters(cli: Cli, judged: Judged, engine: Engine, tmp_path: Path) -> None:
    """Batch, category, problem, label, dates and the owner choose the rows. Open evaluations are left out."""
    one = judged(batch="b", kernel_label="Relu v1")
    two = judged(ended(Category.CRASHED), batch="b", problem="class Model: other", problem_label="gelu")
    three = judged(owner="ada")
    evaluations.submit(engine, [Request.model_validate(request_fields(999))])
    with engine.begin() as connection:
        connection.execute(
            text("UPDATE verdicts SET finished_at = '2020-06-01' WHERE evaluation_id = :id"), {"id": one}
        )
    for number, (arguments, expected) in enumerate(
        (
            ("", {one, two, three}),
            ("--batch b", {one, two}),
            ("--where category=crashed", {two}),
            ("--problem gelu", {two}),
            ("--label RELU", {one}),
            ("--until 2021-01-01", {one}),
            ("--since 2021-01-01 --batch b", {two}),
            ("--owner ada", {three}),
            ("--owner local", {one, two}),
        )
    ):
        done = cli("export", f"set-{number}", *arguments.split())
        assert done.returncode == 0, done.stderr
        assert {UUID(row["evaluation_id"]) for row in rows(tmp_path / f"set-{number}")} == expected, arguments
    done = cli("export", "none", "--owner", "eve")
    assert (done.returncode, "no finished evaluation matches" in done.stderr) == (2, True)
    assert not (tmp_path / "none").exists()


def test_the_database_separates_owners(engine: Engine, judged: Judged) -> None:
    """A transaction that acts for an owner reads no other owner's rows, whatever the query asks for."""
    mine = judged(owner="ada")
    judged(owner="bob")
    with acting(Viewer("ada", held=True)):
        pages = reports.trajectories(engine, since=None, until=reports.now(engine), after=None, limit=10)
        assert [row.evaluation_id for page in pages for row in page] == [mine]


def test_an_interrupted_export_continues(
    cli: Cli, judged: Judged, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After an end at any row, the same command adds each missing row once, and no later evaluation."""
    ids = [judged() for _ in range(6)]
    whole = reports.trajectories
    left = 0

    def some(*arguments: Any, **named: Any) -> Iterator[Any]:
        nonlocal left
        for page in whole(*arguments, **named):
            yield page
            left -= 1
            if left == 0:
                raise KeyboardInterrupt

    monkeypatch.setattr(sys.modules[f"{reports.__name__}.trajectories"], "_ROWS", 1)
    monkeypatch.setattr(reports, "trajectories", some)
    for number in (1, 2, 3, 2, 1):
        left = number
        assert cli("export", "set", "--rows", "2").returncode == 130
    later = judged()
    for _ in range(2):
        assert cli("export", "set", "--rows", "2").stdout == "set: 6 evaluations in 3 files\n"
        assert [row["evaluation_id"] for row in rows(tmp_path / "set")] == [str(one) for one in ids]
    assert str(later) not in (tmp_path / "set" / "export.json").read_text()
    assert {path.name for path in (tmp_path / "set").iterdir()} == {"README.md", "data", "export.json"}


def test_folders_that_are_refused(cli: Cli, judged: Judged, tmp_path: Path) -> None:
    """Another folder's files and an export with other conditions are not touched, and the owner's name is checked."""
    judged(batch="b")
    cli.write("full/file", "x")
    assert cli("export", "set", "--batch", "b").returncode == 0
    for arguments, message in (
        (("full",), "holds something else than an export"),
        (("set",), "holds an export with batch b"),
        (("new", "--owner", "A B"), "--owner"),
        (("new", "--where", "color=red"), "no field 'color'"),
    ):
        done = cli("export", *arguments)
        assert (done.returncode, message in done.stderr) == (2, True), done.stderr
    assert not (tmp_path / "new").exists()
