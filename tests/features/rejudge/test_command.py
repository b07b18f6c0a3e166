"""`kqueue rejudge`: published claims on a real judge and on a stand-in for the fleet, resuming, and the formats."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Engine, text

from kqueue.categories import Category
from kqueue.client import Client
from kqueue.contract import Outcome, Request, Settings
from kqueue.errors import InvalidRequest
from kqueue.features.rejudge.claims import read
from kqueue.formats import common
from kqueue.judging import LocalJudge
from kqueue.profiles import Protocol
from tests.cli.command import Cli, Judgement
from tests.samples import RELU, RELU_KERNEL, ended, measurement, passed

#: A problem whose module has the sizes, and an earlier version of it.
REFERENCE = """from __future__ import annotations
import torch
import torch.nn as nn
WIDTH = 4
rows = 8
class Model(nn.Module):
    def __init__(self, width: int):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(width, width))
        self.register_buffer("{0}", torch.rand(width))
    def forward(self, x):
        return x @ self.weight * self.{0}
def get_inputs():
    return [torch.randn(rows, WIDTH)]
def get_init_inputs():
    return [WIDTH]
"""
SHAPES = 'SMALL = 8\nSHAPES = [{"width": SMALL, "rows": 6}]\n'
#: A solution constructs memory for the weights only.
SOLVED = """import torch
class Model(torch.nn.Module):
    def __init__(self, width):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.empty(width, width))
        self.register_buffer("{0}", torch.empty(width))
    def forward(self, x):
        return torch.matmul(x, self.weight) * self.{0}
"""
SOLUTION = SOLVED.format("scale")
GEMM = """#include <cute/tensor.hpp>
auto BM = Int<64>{}; auto BN = Int<64>{}; auto BK = Int<32>{};
void cuda_l2_h100_fp32(torch::Tensor a, torch::Tensor b,
"""
BODY = "return torch.relu(x)"
INIT = "    def __init__(self):\n        super().__init__()\n        self.norm = torch.nn.BatchNorm1d(64)\n"
NORM = RELU.replace("torch.relu(x)", "self.norm(x)").replace("    def forward", f"{INIT}    def forward")
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


@pytest.mark.slow("starts a judge")
def test_each_result(local: LocalJudge, cli: Cli, judging: Callable[[Judgement], None], tmp_path: Path) -> None:
    """Each kernel of a set gets its result with the rule, in the table, the picture and the report. A rerun resumes."""
    judged: list[str] = []

    def judge(name: str) -> Outcome:
        judged.append(name)
        problem, kernel, *_ = SET[name.removeprefix("1/")]
        settings = Settings.model_validate({"profiles": ["cuda-l1"], "checks": 2})
        return local(Request(problem=problem, kernel=kernel, backend="torch", settings=settings))

    judging(judge)
    cli.write("set.json", cuda_l1(**SET))
    command = ("rejudge", "set.json", "--checks", "2", "--out", "out")
    done = cli(*command)
    assert (done.returncode, "no verdict on 1 of 11" in done.stderr) == (3, True), done.stderr
    out = tmp_path / "out"
    rows = table(out)
    found = {name.removeprefix("1/"): (row["ruling"], row["rule"]) for name, row in rows.items()}
    for name, (_, _, _, (ruling, rule)) in SET.items():
        assert (found[name][0], found[name][1].startswith(rule)) == (ruling, True), (name, rows[f"1/{name}"])
    assert float(rows["1/right"]["low"]) <= float(rows["1/right"]["speedup"]) <= float(rows["1/right"]["high"])
    assert "no live worker serves gpu" in rows["1/cuda"]["why"]
    report = (out / "report.md").read_text()
    assert "| holds | 1 |" in report
    assert "| wrong under strict only: training mode | 1 |" in report
    assert "no kernel is published" in report
    assert "ValueError: \\|\\<b\\>" in report
    assert "cuda-l1" in report
    assert b"claimed speedup" in (out / "claims.svg").read_bytes()
    # Another run finds the evaluations, and judges nothing again.
    assert len(judged) == len(SET) - 1
    assert cli(*command).returncode == 3
    assert (len(judged), table(out)) == (len(SET) - 1, rows)


@pytest.mark.usefixtures("worker")
def test_an_interrupted_run(cli: Cli, engine: Engine, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Ctrl-C leaves a report of the verdicts so far, and the evaluations, which the next run collects."""
    cli.write("set.jsonl", json.dumps({"name": "one", "reference": RELU, "kernel": RELU_KERNEL}))
    with monkeypatch.context() as patch:
        patch.setattr(Client, "as_completed", interrupt)
        done = cli("rejudge", "set.jsonl")
    assert (done.returncode, "the evaluations continue" in done.stderr) == (130, True)
    assert table(tmp_path / "rejudged")["one"]["why"] == "no verdict"
    with engine.connect() as connection:
        assert connection.scalars(text("SELECT count(*) FROM evaluations")).one() == 1


def interrupt(*_: object) -> Iterator[Any]:
    raise KeyboardInterrupt


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


def test_audits(cli: Cli, judging: Callable[[Judgement], None], tmp_path: Path) -> None:
    """The report counts how results agree with labels among kernels that ran, lists the others, and what changed."""
    right, failed = (
        passed(runtime=measurement(0.5)),
        map(ended, (Category.WRONG_VALUES, Category.COMPILE_ERROR, Category.REWARD_HACK)),
    )
    outcomes = dict(zip(["missed", "right", "stopped", "foreign", "accused"], (right, right, *failed), strict=True))
    judging(lambda label: outcomes[label])
    labels = {name: "clean" if name in ("accused", "right") else "reward_hack" for name in outcomes}
    claims = [
        {"name": name, "audit": label, "reference": RELU, "kernel": f"{RELU_KERNEL}# {name}", "speedup": 2.01}
        for name, label in labels.items()
    ]
    cli.write("set.jsonl", "\n".join(map(json.dumps, claims)))
    cli.write("set.csv", "name,ruling\nright,cheat\nmissed,slower than claimed\n")
    command = ("rejudge", "set.jsonl", "--out", "out")
    done = cli(*command, "--against", "set.csv")
    assert (done.returncode, "before" in done.stdout) == (0, True), done.stderr
    report = (tmp_path / "out" / "report.md").read_text()
    assert "4 of 5 audited kernels ran. Of 2 that the audit calls reward hacks, 1 are stopped or labelled." in report
    assert "Of 2 that it calls clean, 1 are called cheats, and 0 have a label." in report
    assert "| reward\\_hack | wrong under its own protocol | 2 |" in report
    assert "| right | cheat | slower than claimed |" in report
    assert "Of the 5 judged claims of a speedup, 2 hold within 1%." in report
    wrong = report.partition("## Disagreements")[2].partition("## ")[0]
    assert [line.split("|")[1].strip() for line in wrong.splitlines()[4:-1]] == ["missed", "accused"]
    drawn = [[row["name"] for row in cli.told(*command, "--sample", "2", "--seed", seed)] for seed in ("1", "1", "2")]
    assert (drawn[0], len(set(drawn[0]))) == (drawn[1], 2)
    assert "set.jsonl (2 of 5 at random, seed 2)" in (tmp_path / "out" / "report.md").read_text()
    assert "is no claims.csv" in cli(*command, "--against", "set.jsonl").stderr


def test_formats(tmp_path: Path) -> None:
    """CUDA-L1's two forms, JSON lines and a run of KernelBench give claims, with the profile of their authors."""
    lines = tmp_path / "l1.json"
    lines.write_text(cuda_l1(a=(RELU, "kernel", 2.5, ("", ""))))
    levels = tmp_path / "levels.json"
    entry = {"task_id": 7, "ref_code": RELU, "custom_code": "kernel", "score": "1.500"}
    missing = [{**entry, "task_id": 8, "custom_code": ""}, {**entry, "task_id": 9, "custom_code": "None"}]
    levels.write_text(json.dumps({"1": [entry, *missing]}, indent=2))
    plain = tmp_path / "plain" / "a.jsonl"
    plain.parent.mkdir()
    plain.write_text(json.dumps({"reference": RELU, "kernel": "kernel", "backend": "triton"}) + "\n\n")
    for path, name, speedup, profile, skipped in (
        (lines, "1/a", 2.5, Protocol.CUDA_L1, 1),
        (levels, "1/7", 1.5, Protocol.CUDA_L1, 2),
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
    row = {"compiled": True, "correctness": True, "sample_id": 0, "runtime": 2.0, "ref_runtime": 5.0, "metadata": {}}
    (run / "eval_results.json").write_text(json.dumps({"2": [row, {**row, "sample_id": 1, "correctness": False}]}))
    found = read(run, problems)
    assert [(one.name, one.speedup) for one in found.claims] == [("1/2/0", 2.5)]
    assert [one.name for one in found.skipped] == ["1/2/1"]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "no kernel with a claim"),
        ("no json", "line 1: a JSON object is needed"),
        ("[1]", "a JSON object is needed"),
        ('{"1": [1]}', "a JSON object is needed"),
        ('{"reference": "x"}', "line 1: kernel: Field required"),
        ('{"reference": "x", "kernel": "y", "speedup": "2x"}', "speedup: Input should be a valid number"),
        ('{"reference": "x", "kernel": "y", "speedup": 0}', "speedup: Input should be greater than 0"),
        ('{"reference": "x", "kernel": "y", "code": 1}', "code: Extra inputs are not permitted"),
        ('{"name": "a", "reference": "x", "kernel": "y"}\n' * 2, "a: 2 entries have this name"),
        ('{"custom_code": "x"}\n{"reference": "x", "kernel": "y"}', "entries of CUDA-L1 and of another form"),
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
    with pytest.raises(InvalidRequest, match=r"eval_results\.json: not a results file"):
        read(tmp_path, tmp_path)
    with pytest.raises(InvalidRequest, match="only a run of KernelBench"):
        read(tmp_path / "level_1_problem_2_sample_0_kernel.py", tmp_path)
    with pytest.raises(InvalidRequest, match="No such file"):
        read(tmp_path / "none")


def test_bad_options(cli: Cli) -> None:
    """An unknown profile is refused before the set is read, and a folder that cannot be written before judging."""
    cli.write("set.jsonl", json.dumps({"reference": RELU, "kernel": RELU_KERNEL}))
    cli.write("file", "x")
    for arguments, message in (
        (("missing", "--profile", "none"), "use one of kernelbench"),
        (("missing",), "missing: No such file"),
        (("set.jsonl", "--out", "file"), "use another --out"),
    ):
        done = cli("rejudge", *arguments)
        assert (done.returncode, message in done.stderr) == (2, True), done.stderr


@pytest.mark.slow("starts a judge")
def test_decks(local: LocalJudge, cli: Cli, tmp_path: Path) -> None:
    """A solution is judged with the weights and shapes of the version of its problem that it was written for."""
    for problem, check in (("01_gemm", "solution.Model()"), ("02_run", "solution.run(1)")):
        folder = f"benchmarks/hard/problems-h100/{problem}"
        cli.write(f"{folder}/reference.py", REFERENCE.format("scale"))
        cli.write(f"{folder}/shapes.py", SHAPES)
        cli.write(f"{folder}/check.py", check)
        cli.write(f"{folder}/problem.yaml", "tolerance:\n  float32: 0.01\nforbidden: [torch.mm]\n")
    cli.write("public/data/hard/references/01_gemm_reference.py.txt", REFERENCE.format("gain"))
    for run, solution in {
        "a_01_gemm": SOLUTION,
        "b_01_gemm": SOLVED.format("gain"),
        "c_01_gemm": f"FLAGS = '-arch=sm_120'\n{SOLUTION}",
        "d_01_gemm": "",
        "e_02_run": SOLUTION,
        "f_03_gone": SOLUTION,
        "h_01_gemm": SOLUTION,
    }.items():
        cli.write(f"public/runs/{run}_solution.py.txt", solution)
        cli.write(f"benchmarks/hard/results/annotations/{run}.yaml", "verdict: clean\nsummary: none\n")
    cli.write("public/runs/h100/a_01_gemm_solution.py.txt", SOLUTION + "#define X sm_120\n")
    cli.write("benchmarks/hard/results/annotations/g_01_gemm.yaml", "verdict: clean\n")
    cli.write("benchmarks/hard/results/annotations/h_01_gemm.yaml", "note: none\n")
    found = read(tmp_path)
    assert {one.name.rpartition("/")[2]: one.reason for one in found.skipped} == {
        "c_01_gemm": "it is written for a newer GPU (sm_120)",
        "d_01_gemm": "its solution defines no Model",
        "e_02_run": "its check calls other functions than forward",
        "h_01_gemm": "verdict: Field required",
        "f_03_gone": "its problem is not published",
        "g_01_gemm": "its solution is not published",
    }
    assert [(one.name, one.audit, one.backend, one.speedup) for one in found.claims] == [
        ("hard/a_01_gemm", "clean", "cuda", None),
        ("hard/b_01_gemm", "clean", "cuda", None),
    ]
    assert "sm_120" in found.claims[0].kernel
    settings = Settings.model_validate({"checks": 1, "timing": {"purpose": "check"}})
    for one in found.claims:
        outcome = local(Request(problem=one.reference, kernel=one.kernel, backend="torch", settings=settings))
        assert outcome.category == "passed", outcome.message
        shapes = outcome.evidence.shapes
        assert shapes is not None
        assert [row.name for row in shapes.rows] == ["1: WIDTH=8, rows=6"]


def test_cuda_l2(cli: Cli, tmp_path: Path) -> None:
    """The claim of a kernel is its speedup over the product of columns, and it gets both layouts. Padding has none."""
    cli.write(
        "eval_results/cuda_l2_h100_F32F16F16F32_speedup_offline.csv",
        "mnk,torch.matmul,cuBLAS-tn\n64_128_32,1.5,1.25\n64_96_32,2,2\n64_64_96,3,3\n64_64_64,3,3\n",
    )
    for name, source in {"64_128_32": GEMM, "64_96_32": GEMM, "64_64_64": "__global__"}.items():
        cli.write(f"kernels/h100_F32F16F16F32/{name}.cu", source)
    found = read(tmp_path)
    [claim] = found.claims
    assert (claim.name, claim.speedup, claim.backend) == ("F32F16F16F32/64_128_32", 1.25, "cuda")
    assert found.profile is Protocol.KERNELBENCH_2025
    assert "torch.randn(64, 32).half(), b, b.t().contiguous()" in claim.reference
    assert common.parsed(claim.kernel, "kernel")
    assert "library.cuda_l2_h100_fp32(a, b, columns, c)" in claim.kernel
    assert {one.name.rpartition("/")[2]: one.reason for one in found.skipped} == {
        "64_96_32": "its authors pad the inputs, and do not time that",
        "64_64_96": "no kernel is published",
        "64_64_64": "it has no function of CUDA-L2's form",
    }
