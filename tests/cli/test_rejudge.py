"""`kqueue rejudge`: published claims on a real judge and on a stand-in for the fleet, resuming, and the formats."""

from __future__ import annotations

import csv
import json
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kqueue import judging
from kqueue.categories import Category
from kqueue.claims import read
from kqueue.config import load
from kqueue.contract import Outcome
from kqueue.errors import InvalidRequest
from kqueue.judging import LocalJudge
from kqueue.profiles import Protocol
from tests.cli.command import Cli, Judgement
from tests.samples import RELU, RELU_KERNEL, ended, measurement, passed

BODY = "return torch.relu(x)"
NORM = RELU.replace(
    "    def forward", "    def __init__(self):\n        super().__init__()\n        self.norm = N\n    def forward"
)
NORM = NORM.replace("N\n", "torch.nn.BatchNorm1d(64)\n").replace("torch.relu(x)", "self.norm(x)")
FOLDED = NORM.replace("class Model(", "class ModelNew(").replace(
    "self.norm(x)",
    "(x - self.norm.running_mean) / torch.sqrt(self.norm.running_var + 1e-5) * self.norm.weight + self.norm.bias",
)
LAZY = "return torch.where(x.abs().max() < 20, torch.relu(x), x)"
#: Kernels by name: the reference, the kernel, the claim, and the beginning of the expected result.
SET: dict[str, tuple[str, str, float, tuple[str, str]]] = {
    "right": (RELU, RELU_KERNEL.format(BODY), 0.001, ("holds", "")),
    "slower": (RELU, RELU_KERNEL.format(BODY), 1e6, ("slower than claimed", "")),
    "wrong": (RELU, RELU_KERNEL.format(f"{BODY} + 1"), 2, ("wrong under its own protocol", "")),
    "broken": (RELU, RELU_KERNEL.format("raise ValueError('|<b>')"), 2, ("wrong under its own protocol", "")),
    "loose": (RELU, RELU_KERNEL.format(f"{BODY} + 5e-3"), 2, ("wrong under strict only", "")),
    "hidden": (RELU, RELU_KERNEL.format(LAZY), 2, ("wrong under strict only", "hidden inputs")),
    "in place": (RELU, RELU_KERNEL.format("return torch.relu_(x)"), 2, ("wrong under strict only", "works in place")),
    "folded": (NORM, FOLDED, 2, ("wrong under strict only", "training mode")),
    "cheat": (RELU, f"import torch\ntorch.allclose = print\n{RELU_KERNEL.format(BODY)}", 2, ("cheat", "")),
    "lacking": (RELU, f"import no_such_package\n{RELU_KERNEL.format(BODY)}", 2, ("cannot be judged", "")),
    "cuda": (RELU, f"import cupy\n{RELU_KERNEL.format(BODY)}", 2, ("cannot be judged", "")),
}


def cuda_l1(**claims: Any) -> str:
    """Return kernels in the form of CUDA-L1's release, which has entries without a kernel."""
    entries = [
        {"level_id": 1, "task_id": name, "ref_code": problem, "custom_code": kernel, "score_default": claim}
        for name, (problem, kernel, claim, _) in claims.items()
    ]
    entries.append({"level_id": 1, "task_id": "none", "ref_code": RELU, "custom_code": None, "score_default": None})
    return "".join(f"{json.dumps(one)}\n" for one in entries)


def table(folder: Path) -> dict[str, dict[str, str]]:
    with (folder / "claims.csv").open(newline="") as file:
        return {row["name"]: row for row in csv.DictReader(file)}


@pytest.fixture
def local(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Judge on one CPU, and return a list that collects the judged problems' labels."""
    judged: list[str] = []
    whole = LocalJudge.__call__

    def call(judge: LocalJudge, request: Any) -> Outcome:
        judged.append(request.problem_label)
        return whole(judge, request)

    with tempfile.TemporaryDirectory(prefix="kqueue-test-") as name:
        Path(name).chmod(0o711)
        config = load(scratch=Path(name))
        monkeypatch.setattr(LocalJudge, "__call__", call)
        monkeypatch.setattr(judging, "load", lambda: config)
        yield judged


@pytest.mark.slow("starts a judge")
def test_each_result(local: list[str], tmp_path: Path) -> None:
    """Each kernel of a set gets its result with the rule, in the table, the picture and the report. A rerun resumes."""
    cli = Cli(tmp_path)
    cli.write("set.json", cuda_l1(**SET))
    command = ("rejudge", "set.json", "--local", "--device", "cpu", "--checks", "2", "--out", "out")
    done = cli(*command)
    assert done.returncode == 0, done.stderr
    out = tmp_path / "out"
    rows = table(out)
    found = {name.removeprefix("1/"): (row["ruling"], row["rule"]) for name, row in rows.items()}
    for name, (_, _, _, (ruling, rule)) in SET.items():
        assert (found[name][0], found[name][1].startswith(rule)) == (ruling, True), (name, rows[f"1/{name}"])
    assert float(rows["1/right"]["low"]) <= float(rows["1/right"]["speedup"]) <= float(rows["1/right"]["high"])
    assert "needs a GPU" in rows["1/cuda"]["why"]
    report = (out / "report.md").read_text()
    assert "| holds | 1 |" in report
    assert "no kernel is published" in report
    assert "ValueError: \\|\\<b\\>" in report
    assert "cuda-l1" in report
    assert b"claimed speedup" in (out / "claims.svg").read_bytes()
    assert len((out / "claims.md").read_text().splitlines()) == 4 + len(SET)
    # A line that a killed run left incomplete is judged again, and nothing else.
    log = out / "verdicts.jsonl"
    lines = log.read_bytes().splitlines(keepends=True)
    log.write_bytes(b"".join(lines[:-1]) + lines[-1][:40])
    local.clear()
    assert cli(*command).returncode == 0
    assert sorted(local) == ["1/cuda", "1/lacking"]
    assert table(out) == rows
    log.write_text("{}\n")
    refused = cli(*command)
    assert (refused.returncode, "use another --out" in refused.stderr) == (2, True)


def test_on_the_fleet(cli: Cli, judging: Callable[[Judgement], None], tmp_path: Path) -> None:
    """The fleet's verdicts decide, and a claim without a verdict is judged again by the next run."""
    outcomes = iter([ended(Category.JUDGE_ERROR), passed(runtime=measurement(0.5))])
    asked: list[str] = []

    def outcome(label: str) -> Outcome:
        asked.append(label)
        return next(outcomes)

    judging(outcome)
    cli.write("set.jsonl", json.dumps({"name": "one", "reference": RELU, "kernel": RELU_KERNEL, "speedup": 3}))
    command = ("rejudge", "set.jsonl", "--out", "out", "--set", "max_attempts=1")
    done = cli(*command)
    assert (done.returncode, "run the same command again" in done.stderr) == (3, True)
    assert table(tmp_path / "out")["one"]["ruling"] == "cannot be judged"
    [row] = cli.told(*command)
    assert (row["ruling"], row["speedup"], row["claimed"]) == ("slower than claimed", 2.0, 3.0)
    [listed] = cli.told("results", "--batch", "out", "--where", "category=passed")
    assert listed["evaluation_id"] == row["evaluation_id"]
    assert len(cli.told(*command)) == 1
    assert len(asked) == 2


def test_formats(tmp_path: Path) -> None:
    """CUDA-L1's two forms, JSON lines and a run of KernelBench give claims, with the profile of their authors."""
    lines = tmp_path / "l1.json"
    lines.write_text(cuda_l1(a=(RELU, "kernel", 2.5, ("", ""))))
    levels = tmp_path / "levels.json"
    entry = {"task_id": 7, "ref_code": RELU, "custom_code": "kernel", "score": "1.500"}
    levels.write_text(json.dumps({"1": [entry, {**entry, "task_id": 8, "custom_code": ""}]}, indent=2))
    plain = tmp_path / "plain" / "a.jsonl"
    plain.parent.mkdir()
    plain.write_text(json.dumps({"reference": RELU, "kernel": "kernel", "backend": "triton"}) + "\n\n")
    for path, name, speedup, profile, skipped in (
        (lines, "1/a", 2.5, Protocol.CUDA_L1, 1),
        (levels, "1/7", 1.5, Protocol.CUDA_L1, 1),
        (plain.parent, "a.jsonl line 1", None, Protocol.KERNELBENCH, 0),
    ):
        found = read(path)
        [claim] = found.claims
        assert (claim.name, claim.kernel, claim.speedup, found.profile) == (name, "kernel", speedup, profile)
        assert len(found.skipped) == skipped
    run, problems = tmp_path / "run", tmp_path / "problems"
    for folder, names in ((run, ("1_problem_2_sample_0", "1_problem_2_sample_1")), (problems, ())):
        folder.mkdir()
        for name in names:
            (folder / f"level_{name}_kernel.py").write_text("kernel")
    (problems / "2_relu.py").write_text(RELU)
    row = {"correctness": True, "sample_id": 0, "runtime": 2.0, "ref_runtime": 5.0, "metadata": {}}
    (run / "eval_results.json").write_text(json.dumps({"2": [row, {**row, "sample_id": 1, "correctness": False}]}))
    found = read(run, problems)
    assert [(one.name, one.speedup) for one in found.claims] == [("1/2/0", 2.5)]
    assert [name for name, _ in found.skipped] == ["1/2/1"]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "no kernel with a claim"),
        ("no json", "line 1: not JSON"),
        ("[1]", "an object is needed"),
        ('{"reference": "x"}', "'kernel' must be a source"),
        ('{"reference": "x", "kernel": "y", "speedup": "2x"}', "must be a number above 0, not '2x'"),
        ('{"reference": "x", "kernel": "y", "code": 1}', "no field 'code': the fields are"),
        ('{"name": "a", "reference": "x", "kernel": "y"}\n' * 2, "a: two entries have this name"),
        ('{"ref_code": "x", "custom_code": null}', "no kernel with a claim"),
    ],
)
def test_bad_sets(tmp_path: Path, content: str, message: str) -> None:
    """A set that cannot be read is refused with its place and the remedy."""
    file = tmp_path / "set.jsonl"
    file.write_text(content)
    with pytest.raises(InvalidRequest, match=message):
        read(file)


def test_bad_runs(tmp_path: Path) -> None:
    """A run of KernelBench needs its problems and results, and another set needs none."""
    (tmp_path / "level_1_problem_2_sample_0_kernel.py").write_text("kernel")
    with pytest.raises(InvalidRequest, match="give --problems DIR"):
        read(tmp_path)
    with pytest.raises(InvalidRequest, match=r"eval_results\.json: the claims of a run"):
        read(tmp_path, tmp_path)
    with pytest.raises(InvalidRequest, match="only a run of KernelBench"):
        read(tmp_path / "level_1_problem_2_sample_0_kernel.py", tmp_path)
    with pytest.raises(InvalidRequest, match="No such file"):
        read(tmp_path / "none")


def test_bad_options(tmp_path: Path) -> None:
    """An unknown profile, and a device for the fleet, are refused before the set is read."""
    cli = Cli(tmp_path)
    for arguments, message in (
        (("--profile", "none"), "use one of kernelbench"),
        (("--device", "cpu"), "give --local too"),
    ):
        done = cli("rejudge", "missing", *arguments)
        assert (done.returncode, message in done.stderr) == (2, True)
