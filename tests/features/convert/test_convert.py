"""`kqueue convert`: small results of each form, written by hand, there and back, and verdicts in each form."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final
from uuid import UUID

import pytest
from pyarrow import Table, parquet

from kqueue import formats
from kqueue.categories import Category
from kqueue.contract import Outcome, Verdict
from kqueue.evidence import Environment, ShapeResult, ShapeResults
from kqueue.features.convert.forms import FORMS
from kqueue.features.rejudge.claims import read
from kqueue.kernelbench import result_of
from tests.cli.command import Cli
from tests.features.formats import sets
from tests.samples import RELU, RELU_KERNEL, ended, passed

HOST: Final = {"device": "NVIDIA H100", "torch": "2.9", "python": "3.12", "host": "one", "os": "Linux"}
#: Results of a form as a file has them, what a verdict's fields say about each, and a path that has no place there.
FILES: Final[dict[str, tuple[list[Any], list[dict[str, Any]], str]]] = json.loads("""{
"kernelbench": [[{
  "1": [{"sample_id": 3, "compiled": true, "correctness": true, "runtime": 0.5, "metadata": {"hardware": "H100"},
         "runtime_stats": {"mean": 0.5, "std": 0.01, "min": 0.4, "max": 0.7, "num_trials": 100, "device": "cuda:0"}},
        {"sample_id": 4, "compiled": false, "correctness": false, "metadata": {"compilation_error": "no brace"}}],
  "7": {"compiled": true, "correctness": false, "runtime": -1.0, "metadata": {"correctness_issue": "shape (2, 3)"}}}],
  [{"problem_label": "1", "kernel_label": "3", "category": "passed", "runtime": {"mean_ms": 0.5, "count": 100}},
   {"category": "compile_error", "blame": "candidate", "message": "no brace"},
   {"problem_label": "7", "category": "wrong_shape"}], "row.runtime_stats.device"],
"flashinfer-bench": [[
  {"definition": "pick", "workload": {"axes": {"N": 2}, "inputs": {}, "uuid": "w0"}, "solution": "into", "evaluation": {
    "status": "PASSED", "environment": {"hardware": "B200", "libs": {"torch": "2.9", "cudnn": "9"}}, "log": "",
    "timestamp": "2026-01-02T03:04:05", "correctness": {"max_relative_error": 1e-3, "max_absolute_error": 0.0},
    "performance": {"latency_ms": 0.25, "reference_latency_ms": 1.0, "speedup_factor": 4.0}}},
  {"definition": "pick", "workload": {"axes": {"N": 3}, "inputs": {}, "uuid": "w3"}, "solution": "odd", "evaluation": {
    "status": "RUNTIME_ERROR", "environment": {"hardware": "B200", "libs": {}}, "timestamp": "then", "log": "trap",
    "correctness": null, "performance": null}},
  {"definition": "pick", "workload": {"axes": {"N": 5}, "inputs": {}, "uuid": "w5"}}],
  [{"category": "passed", "kernel_label": "into", "runtime_ms": 0.25, "speedup": 4.0},
   {"category": "runtime_error", "environment": {"device": "B200"}, "log": "trap"}, {"problem_label": "pick"}],
  "evaluation.environment.libs.cudnn"],
"kernelbot": [[
  {"success": true, "error": "", "system": {"gpu": "MI300", "hostname": "two"}, "runs": {
    "test": {"start": "t0", "end": "t1", "compilation": null, "run": {"passed": true, "result": {"check": "pass",
      "test-count": "1", "test.0.spec": "n: 2", "test.0.status": "pass"}}},
    "leaderboard": {"start": "t1", "end": "t2", "compilation": null, "run": {"passed": true, "result": {"check": "pass",
      "benchmark-count": "2", "benchmark.0.spec": "n: 8", "benchmark.0.mean": "1250.5", "benchmark.0.err": "1.5",
      "benchmark.1.spec": "n: 9", "benchmark.1.mean": "2e6"}}}}},
  {"success": true, "error": "", "system": {"gpu": "MI300"}, "runs": {
    "test": {"start": "t0", "end": "t1", "compilation": {"success": false, "stderr": "x"}, "run": null}}},
  {"success": false, "error": "no runner", "system": {}, "runs": {}}],
  [{"category": "passed", "environment": {"device": "MI300", "host": "two"}, "submitted_at": "t1",
    "evidence": {"shapes": {"rows": [{"name": "n: 8", "category": "passed", "runtime_ms": 0.0012505},
                                     {"name": "n: 9", "category": "passed", "runtime_ms": 2.0}]}}},
   {"category": "compile_error"}, {"message": "no runner"}], "runs.test"],
"kernelgym": [[
  {"task_id": "a", "status": "completed", "compiled": true, "correctness": true, "decoy_kernel": false, "speedup": 2.0,
   "reference_runtime": 1.0, "kernel_runtime": 0.5, "metadata": {"num_custom_kernels": 2}, "error_message": null},
  {"task_id": "b", "status": "failed", "compiled": false, "correctness": null, "decoy_kernel": false, "speedup": 0.0,
   "reference_runtime": -1.0, "kernel_runtime": -1.0, "error_message": "no brace", "error_code": "COMPILATION_ERROR"}],
  [{"kernel_label": "a", "category": "passed", "runtime_ms": 0.5, "baseline_ms": 1.0, "speedup": 2.0},
   {"kernel_label": "b", "category": "compile_error", "message": "no brace"}], "metadata.num_custom_kernels"],
"hf-kernels": [[
  {"results": [{"workload": "A.small", "verified": true, "timingResults": {"mean_ms": 0.5, "min_ms": 0.4}},
               {"workload": "A.large", "timingResults": {"mean_ms": 5, "iqr_ms": 0.1}}],
   "machineInfo": {"gpu": "L4", "backend": "cuda", "pytorchVersion": "2.9", "os": "Linux", "cpu": "x"},
   "kernelCommitSha": "2385e44", "benchmarkScriptPath": "benchmark.py"}],
  [{"kernel_label": "2385e44", "environment": {"device": "L4", "torch": "2.9"}, "evidence": {"shapes": {"rows": [
    {"name": "A.small", "category": "passed", "runtime_ms": 0.5},
    {"name": "A.large", "category": null, "runtime_ms": 5}]}}}],
  "machineInfo.cpu"],
"nvbench": [[
  {"meta": {"argv": ["bench"]}, "devices": [{"id": 0, "name": "GV100", "sm_version": 700}], "benchmarks": [
    {"name": "copy", "index": 0, "axes": null, "states": [
      {"name": "N=1", "device": 0, "is_skipped": false, "summaries": [{"tag": "nv/cold/time/gpu/mean", "name": "Time",
        "data": [{"name": "value", "type": "float64", "value": "0.0010034715849794225"}]}]},
      {"name": "N=2", "device": 0, "summaries": null, "is_skipped": true, "skip_reason": "too large"}]}]}],
  [{"kernel_label": "copy", "environment": {"device": "GV100"}, "evidence": {"shapes": {"rows": [
    {"name": "N=1", "runtime_ms": 1.0034715849794225}, {"name": "N=2", "runtime_ms": null}]}}}], "meta.argv"]
}""")


def within(part: Any, whole: Any) -> bool:
    if isinstance(part, dict):
        return all(within(value, whole.get(name)) for name, value in part.items())
    return part == whole


def lines(text: str) -> list[Any]:
    return [json.loads(line) for line in text.splitlines()]


@pytest.fixture
def cli(tmp_path: Path) -> Cli:
    """Return the command in an empty folder."""
    return Cli(tmp_path)


def verdict(outcome: Outcome) -> Verdict:
    times = dict.fromkeys(("submitted_at", "finished_at"), "2026-01-02T03:04:05Z")
    labels = {"problem_label": "pick", "kernel_label": "into", "backend": "triton", "lane": "gpu", "attempts": 1}
    fields = {**outcome.model_dump(), **labels, **times, "environment": Environment(**HOST)}
    return Verdict.model_validate({**fields, "evaluation_id": UUID(int=1), "written_by": "judge"})


@pytest.mark.parametrize("form", FILES)
def test_results_go_there_and_back(cli: Cli, form: str) -> None:
    """A file becomes fields of verdicts and the same file again. What no field holds is said. A change is written."""
    content, expected, listed = FILES[form]
    cli.write("given.jsonl", "\n".join(map(json.dumps, content)))
    done = cli("convert", "given.jsonl", "--to", "verdict")
    assert done.returncode == 0, done.stderr
    assert f"{form}: {listed}" in done.stderr
    for known, one in zip(expected, found := lines(done.stdout), strict=True):
        assert within(known, one), one
    cli.write("verdicts.jsonl", done.stdout)
    done = cli("convert", "verdicts.jsonl", "--to", form)
    assert (done.returncode, lines(done.stdout)) == (0, content), done.stderr
    changed = {**found[0], "environment": {**found[0].get("environment", {}), "device": "another"}}
    cli.write("changed.jsonl", json.dumps(changed))
    if form != "kernelgym":
        assert '"another"' in cli("convert", "changed.jsonl", "--to", form).stdout


def test_fields_of_verdicts_exist() -> None:
    """Each path in a table is a field of the verdict's JSON form."""
    schema = Verdict.model_json_schema(mode="serialization")

    def properties(node: dict[str, Any]) -> dict[str, Any]:
        node = {**node, **(schema["$defs"][node["$ref"].rpartition("/")[2]] if "$ref" in node else {})}
        parts = [properties(one) for one in node.get("anyOf", ())]
        return {name: value for one in (*parts, node.get("properties", {})) for name, value in one.items()}

    for path in {path for form in FORMS.values() for path, _, _ in form.fields}:
        node = schema
        for name in path.split("."):
            assert name in properties(node), path
            node = properties(node)[name]


@pytest.mark.parametrize("form", sorted(FORMS.keys() - {"flashinfer-bench"}))
def test_verdicts_take_each_form(cli: Cli, form: str) -> None:
    """Fields that a form can hold return unchanged from it. The command lists the other fields."""
    given = [verdict(one) for one in (passed(), ended(Category.WRONG_VALUES), ended(Category.WORKER_LOST))]
    left_out = form in ("hf-kernels", "kernelbot")
    told = [one.model_dump_json() for one in given]
    cli.write("verdicts.jsonl", "\n".join(told))
    done = cli("convert", "verdicts.jsonl", "--to", form)
    cli.write("shown.jsonl", "\n".join(f'{{"id": "a", "verdict": {one}}}' for one in (*told, "null")))
    shown = cli("convert", "shown.jsonl", "--to", form)
    assert (shown.returncode, "1 left out: the kernel has no verdict" in shown.stderr) == (1, True), shown.stderr
    assert shown.stdout == done.stdout
    assert (done.returncode, "into: worker_lost says nothing" in done.stderr) == (left_out, left_out), done.stderr
    assert f"has no place in {form}: attempts" in done.stderr or "backend" in done.stderr
    cli.write("results.jsonl", done.stdout)
    back = lines(cli("convert", "results.jsonl", "--to", "verdict").stdout)
    assert [one.get("category") == "passed" for one in back] == [form != "nvbench", False, False][: 3 - left_out]
    first = back[0]
    assert 0.5 in (first.get("runtime_ms"), first.get("runtime", {}).get("mean_ms"))
    if form == "kernelbench":
        rows = [row for table in lines(done.stdout)[0].values() for row in table]
        assert all(within(json.loads(json.dumps(result_of(one))), row) for one, row in zip(given, rows, strict=True))


def test_traces_and_claims_of_a_set(cli: Cli, tmp_path: Path) -> None:
    """Verdicts on a set become traces, one for each workload, and right ones claims that `kqueue rejudge` takes."""
    names = [shape.name for shape in formats.one(sets.flashinfer(tmp_path / "set"), "pick").shapes]
    times = {"runtime_ms": 0.5, "held_out": False, "weight": 1, "category": Category.PASSED}
    pairs = zip(names, (1.0, 4.0), strict=True)
    rows = [ShapeResult(name=name, baseline_ms=ms, speedup=2 * ms, **times) for name, ms in pairs]
    right = verdict(passed(evidence={"shapes": ShapeResults(rows=tuple(rows))}))
    cli.write("verdicts.jsonl", "\n".join(one.model_dump_json() for one in (right, verdict(ended(Category.EXPIRED)))))
    done = cli("convert", "verdicts.jsonl", "--to", "flashinfer-bench", "--problems", "set")
    assert (done.returncode, "1 left out: into: expired says nothing" in done.stderr) == (1, True), done.stderr
    traces = lines(done.stdout)
    assert [one["evaluation"]["performance"]["speedup_factor"] for one in traces] == [2.0, 8.0]
    wrong = {**traces[0], "solution": "odd", "evaluation": {**traces[0]["evaluation"], "status": "TIMEOUT"}}
    cli.write("traces.jsonl", "\n".join(map(json.dumps, [*traces, wrong])))
    done = cli("convert", "traces.jsonl", "--to", "claims", "--problems", "set")
    assert (done.returncode, "the kernel was not right" in done.stderr) == (1, True), done.stderr
    cli.write("claims.jsonl", done.stdout)
    [claim] = read(tmp_path / "claims.jsonl").claims
    assert (claim.name, claim.speedup, "class ModelNew" in claim.kernel) == ("pick/into", 4.0, True)


def test_an_export_becomes_claims(cli: Cli, tmp_path: Path) -> None:
    """Rows of an export have the sources of their claims. A file without results, and an unknown form, are refused."""
    row = {**json.loads(verdict(passed()).model_dump_json()), "problem": RELU, "kernel": RELU_KERNEL}
    row |= {name: json.dumps(row[name]) for name in ("facts", "evidence", "environment")}
    row |= {"runtime": None, "baseline": None, "finished_at": datetime.now(UTC)}
    parquet.write_table(Table.from_pylist([row]), tmp_path / "rows.parquet")
    cli.write("claims.jsonl", cli("convert", "rows.parquet", "--to", "claims").stdout)
    assert [one.speedup for one in read(tmp_path / "claims.jsonl").claims] == [2.0]
    assert "finished_at" not in cli("convert", "rows.parquet", "--to", "kernelgym").stderr
    cli.write("nothing.jsonl", '{"a": 1}\n')
    assert "has no verdict, and no result of kernelbench" in cli("convert", "nothing.jsonl", "--to", "claims").stderr
    assert cli("convert", "rows.parquet", "--to", "csv").returncode == 2
