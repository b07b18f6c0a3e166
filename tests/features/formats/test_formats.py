"""Other projects' problems: translation, kernels in their own form, and verdicts on both."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from pyarrow import Table, parquet

from kqueue import formats
from kqueue.cli import main, sources
from kqueue.contract import Outcome
from kqueue.errors import InvalidRequest
from kqueue.features.convert.forms import traces_of
from kqueue.features.kernelbench import command
from kqueue.judging import LocalJudge
from tests.features.formats import sets

QUICK: dict[str, Any] = {"checks": 1, "timing": {"calls": 5, "warmup": 1}}


def judged(judge: LocalJudge, problem: formats.Problem, kernel: str) -> Outcome:
    return judge(problem=problem.source, kernel=formats.kernel(problem.source, kernel), settings=QUICK)


def traces(judge: LocalJudge, root: Path, outcome: Outcome) -> list[dict[str, Any]]:
    verdict = {**outcome.model_dump(mode="json"), "environment": judge.machine.environment.model_dump(mode="json")}
    return list(traces_of(root, {"problem_label": "pick", "kernel_label": "into", **verdict}))


def refused(path: Path) -> dict[str, str]:
    return {one.name: one.reason for one in formats.read(path) if isinstance(one, formats.Refused)}


@pytest.mark.slow("judges kernels")
def test_each_format_is_judged(local: LocalJudge, tmp_path: Path) -> None:
    """The set's own kernel passes on all shapes of its problem, and a wrong one fails."""
    scale = formats.one(sets.gpumode(tmp_path / "gpumode"), "scale")
    outcome = judged(local, scale, scale.solutions["submission.py"])
    assert outcome.passed, outcome.message
    assert outcome.evidence.shapes is not None
    assert [row.name for row in outcome.evidence.shapes.rows] == ["1: size=8", "2: size=4"]
    returned = "def custom_kernel(data):\n    return data[0] * data[1] + 0.1\n"
    assert judged(local, scale, returned).category == "wrong_values"
    (tmp_path / "rows.json").write_text(json.dumps([sets.ROW]))
    adder = formats.one(tmp_path / "rows.json", None)
    outcome = judged(local, adder, adder.solutions["triton_code"])
    assert outcome.passed, outcome.message
    root = sets.flashinfer(tmp_path / "flashinfer")
    pick = formats.one(root, "pick")
    outcome = judged(local, pick, pick.solutions["into"])
    assert outcome.passed, outcome.message
    first, second = traces(local, root, outcome)
    assert (first["workload"]["uuid"], second["workload"]["uuid"]) == ("w0", "w3")
    assert first["evaluation"]["status"] == "PASSED"
    assert first["evaluation"]["performance"]["latency_ms"] > 0
    assert first["evaluation"]["correctness"]["max_absolute_error"] == 0
    [trace] = traces(local, root, judged(local, pick, "def run(x, at, eps):\n    return x * 2\n"))
    assert trace["evaluation"]["status"] == "INCORRECT_NUMERICAL"
    assert trace["evaluation"]["performance"] is None
    assert trace["evaluation"]["correctness"]["max_absolute_error"] > 0
    task = formats.one(sets.write(tmp_path / "robust", sets.ROBUST), None)
    outcome = judged(local, task, "def forward_fn(x, weight):\n    return weight * x\n")
    assert outcome.passed, outcome.message
    assert judged(local, task, "def forward_fn(x, weight):\n    return x + weight\n").category == "wrong_values"


def test_malformed_entries(tmp_path: Path) -> None:
    """A malformed entry gets a reason. All further entries are translated."""
    root = sets.gpumode(tmp_path / "gpumode")
    (tmp_path / "utils.py").write_text("secret = 1\n")
    reasons = refused(root)
    assert reasons.keys() == sets.BROKEN.keys()
    expected = {"property": "tests properties", "distributed": "several GPUs", "outside": "is outside"}
    expected |= {"nothing": "does not define ref_kernel", "text": "is not YAML"}
    assert all(words in reasons[name] for name, words in expected.items()), reasons
    root = sets.flashinfer(tmp_path / "flashinfer")
    assert refused(root) == {"odd": "reference does not define run"}
    assert [note.partition(": ")[2] for note in formats.one(root, "pick").notes] == [
        "a safetensors file is not there, or outside the set's folder",
        "a file is no safetensors file, or has no such tensor",
    ]
    other = json.dumps({**sets.SOLUTION, "definition": "other"})
    with pytest.raises(InvalidRequest, match="is for other, not for pick"):
        formats.kernel(formats.one(root, "pick").source, other)
    rows = [
        sets.ROW,
        {**sets.ROW, "entry_point": "Gone"},
        {**sets.ROW, "python_code": "class Adder(:"},
        {"python_code": 1},
    ]
    (tmp_path / "rows.jsonl").write_text("\n".join([*map(json.dumps, rows), "{", "[]"]))
    assert [*refused(tmp_path / "rows.jsonl").values()][:1] == ["python_code does not define Gone"]
    assert "Adder_7" in {one.name for one in formats.read(tmp_path / "rows.jsonl")}
    assert len(refused(tmp_path / "rows.jsonl")) == 5
    parquet.write_table(Table.from_pylist([sets.ROW]), tmp_path / "rows.parquet")
    assert formats.one(tmp_path / "rows.parquet", "Adder_7") == formats.one(tmp_path / "rows.jsonl", "Adder_7")
    files = {**sets.ROBUST, "config_forward.json": '{"multi_init_configs": [{"depth": 1}]}'}
    [reason] = refused(sets.write(tmp_path / "robust", files)).values()
    assert "'depth', which neither" in reason
    with pytest.raises(InvalidRequest, match="no problem in a known format"):
        formats.read(tmp_path / "utils.py")
    with pytest.raises(InvalidRequest, match="choose one as"):
        formats.one(tmp_path / "gpumode", None)


def test_kernels_of_other_forms() -> None:
    """Our own form stays unchanged, the judge gets a malformed kernel, and CUDA source becomes a kernel."""
    problem = "TRANSLATED_FROM = {'format': 'gpumode', 'buffers': [], 'modules': ['task', 'utils']}\n"
    for source in ("class ModelNew: ...\n", "def custom_kernel(:\n", "x = 1\n"):
        assert formats.kernel(problem, source) == source
    with pytest.raises(InvalidRequest, match="imports utils"):
        formats.kernel(problem, "from utils import f\ndef custom_kernel(data): ...\n")
    with pytest.raises(InvalidRequest, match="malformed"):
        formats.kernel("TRANSLATED_FROM = {'format': 'gpumode'}\n", "def custom_kernel(data): ...\n")
    robust = "class Model: ...\n\nTRANSLATED_FROM = {'format': 'robust-kbench', 'name': 'x'}\n"
    assert "cuda_sources='PYBIND11" in formats.kernel(robust, sets.ROBUST["forward.cu"])


def test_the_command_lists_and_writes(tmp_path: Path, monkeypatch: Any, capsys: pytest.CaptureFixture[str]) -> None:
    """`kqueue problems import` exits with 1 if an entry was refused, and writes all translated problems."""
    root = sets.gpumode(tmp_path / "gpumode")
    monkeypatch.setattr(
        "sys.argv", ["kqueue", "problems", "import", str(root), "--out", str(tmp_path / "out"), "--json"]
    )
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 1
    rows = {row["name"]: row for row in map(json.loads, capsys.readouterr().out.splitlines())}
    assert rows["scale"]["shapes"] == ["1: size=8", "2: size=4"]
    source = formats.one(root, "scale").source
    assert (tmp_path / "out" / "scale.py").read_text() == source
    generations = sets.write(tmp_path / "run", {f"level_1_problem_{rows['scale']['number']}_sample_0_kernel.py": "x"})
    _, samples, _ = command._find(generations, root, None)
    assert [sample.problem["problem"] for sample in samples] == [source]
    assert sources.read_problem(f"{root}#scale") == {"problem": source, "problem_label": "scale"}
    [entry] = sources.from_kernels([root / "scale" / "submission.py"], {"problem": source})
    assert "class ModelNew" in entry.fields["kernel"]
