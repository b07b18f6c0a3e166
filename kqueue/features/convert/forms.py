"""The forms. A file of kernelbot, of Hugging Face's kernels or of nvbench is one result with shapes.

Where a form has means only, they take the place of medians.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any, Final

from pydantic import ValidationError

from kqueue import formats
from kqueue.categories import Blame, Category
from kqueue.contract import Verdict
from kqueue.errors import InvalidRequest
from kqueue.features.convert.records import Form, Kind, Record, from_verdict, get
from kqueue.kernelbench import error_code, result_of

_Fields = list[tuple[str, str, Kind]]
#: flashinfer-bench's status for our categories. All other failures of a kernel are runtime errors.
_NAMES: Final = {
    "PASSED": "passed", "INCORRECT_SHAPE": "wrong_shape wrong_output_structure", "INCORRECT_DTYPE": "wrong_dtype",
    "INCORRECT_NUMERICAL": "wrong_values not_finite nondeterministic", "TIMEOUT": "timeout compile_timeout",
    "COMPILE_ERROR": "compile_error syntax_error import_error", "RUNTIME_ERROR": "runtime_error",
}  # fmt: skip
_STATUS: Final = {Category(name): code for code, names in _NAMES.items() for name in names.split()}
_JUDGED: Final = (Blame.NONE, Blame.CANDIDATE)


def _a(*kinds: type) -> Kind:
    return (lambda value: value if type(value) in kinds else None), lambda value: value


def _read(there: Callable[[Any], Any]) -> Kind:
    """Values that the form's own function writes."""
    return (lambda value: None if value is None else there(value)), lambda _: None


_TEXT, _FLAG, _NUMBER, _TREE = _a(str), _a(bool), _a(int, float), _a(dict)
_FOUND, _FIGURE = _read(lambda text: text or None), _read(_a(int, float, str)[0])
#: Numbers that are not above zero if they are unknown.
_TIME: Final[Kind] = ((lambda value: value if type(value) in (int, float) and value > 0 else None), _NUMBER[1])
_SPENT, _SAID = _read(_TIME[0]), _read(_FLAG[0])
_CATEGORY: Final[Kind] = (lambda name: name if name in {*Category} else None), str
_CODE: Final[Kind] = (lambda code: _NAMES[code].split()[0]), lambda category: _STATUS.get(category, "RUNTIME_ERROR")
_ISSUE: Final = _read(lambda text: "wrong_shape" if "shape" in text else "wrong_values")


def _pairs(kind: Kind, names: str, ours: str = "", theirs: str = "") -> _Fields:
    """Return fields from pairs of names below two paths. A name stands for a pair of the same."""
    pairs = (pair.partition("=") for pair in names.split())
    return [(f"{ours}{mine}", f"{theirs}{name or mine}", kind) for mine, _, name in pairs]


def _metadata(at: str) -> _Fields:
    """Return the fields of KernelBench's metadata."""
    texts = "message phase lane evaluation_id reused_from timing_basis problem_label kernel_label"
    return [
        *_pairs(_TEXT, f"{texts} environment.device=hardware", theirs=at),
        *_pairs(_FOUND, "message=compilation_error message=runtime_error message=correctness_issue", theirs=at),
        *_pairs(_CATEGORY, "category", theirs=at), *_pairs(_ISSUE, "category=correctness_issue", theirs=at),
        *_pairs(_NUMBER, "attempts", theirs=at), *_pairs(_TREE, "facts", theirs=at),
    ]  # fmt: skip


def _shifted(number: object, places: int) -> float:
    """Return a number, or the number in a text, in another power of ten."""
    return float(Decimal(str(number)).scaleb(places))


def _category(verdict: Record, *, needed: bool = False) -> Category | None:
    """Return the category. If it is needed, raise InvalidRequest if nothing is known about the kernel."""
    category = Category(verdict["category"]) if verdict.get("category") else None
    known = verdict.get("correctness") is not None if category is None else category.blame in _JUDGED
    if needed and not known:
        raise InvalidRequest(f"{verdict.get('kernel_label')}: {category or 'it'} says nothing about the kernel")
    return category


def _cases(verdict: Record) -> Iterator[Record]:
    """Yield name, category and times of each shape that was judged, or else of the verdict."""
    rows = get(verdict, "evidence.shapes.rows") or [{**verdict, "name": verdict.get("problem_label") or ""}]
    times = (verdict.get("runtime") or {}) if len(rows) == 1 else {}
    for row in rows:
        if row.get("category") or row.get("runtime_ms"):
            known = {"mean_ms": row.get("runtime_ms"), **times, "name": row["name"], "category": row.get("category")}
            yield {name: value for name, value in known.items() if value is not None}


def _whole(*names: str) -> Callable[[Any], list[Record] | None]:
    return lambda content: [content] if isinstance(content, dict) and content.keys() >= {*names} else None


def _split(content: Any) -> list[Record] | None:
    """Split KernelBench's results. Early files have one row for each problem, without a list."""
    tables = content.items() if isinstance(content, dict) else ()
    listed = [(name, rows if isinstance(rows, list) else [rows], isinstance(rows, dict)) for name, rows in tables]
    records = [{"problem": name, "alone": alone, "row": row} for name, rows, alone in listed for row in rows]
    return records if records and all(_whole("compiled", "correctness")(one["row"]) for one in records) else None


def _join(records: list[Record]) -> list[Any]:
    """Return one file. Problems without a number get the next one."""
    found: Record = {}
    numbers: dict[str, str] = {}
    for record in records:
        row, label = record["row"], str(get(record, "row.metadata.problem_label"))
        table = found.setdefault(record.get("problem") or numbers.setdefault(label, str(len(numbers) + 1)), [])
        table.append(row if "problem" in record else {"sample_id": len(table), **row})
    alone = {one["problem"] for one in records if one.get("alone")}
    return [{problem: table[0] if problem in alone else table for problem, table in found.items()}]


def _kernelbench(verdict: Record) -> Record:
    try:
        return {"row": result_of(Verdict.load(verdict))}
    except ValidationError:
        _category(verdict, needed=True)
        return {"row": {"compiled": False, "correctness": False, "runtime": -1.0, "runtime_stats": {}, "metadata": {}}}


def _kernelgym(verdict: Record) -> Record:
    category = _category(verdict)
    fault = None if category is Category.PASSED else category
    done = fault is None or (fault.blame is Blame.CANDIDATE and fault.info.compiled)
    decoy = get(verdict, "facts.hack") == "decoy" or bool(get(verdict, "evidence.provenance.decoy"))
    status = "completed" if done else "cancelled" if fault is not None and fault.blame is Blame.NOBODY else "failed"
    values = {"task_id": "", "status": status, "compiled": None, "correctness": None, "decoy_kernel": decoy}
    values |= {"error_message": fault and verdict.get("message"), "error_code": fault and error_code(fault)}
    return values | {"kernel_runtime": -1.0, "reference_runtime": -1.0, "speedup": 0.0, "metadata": {}}


def traces_of(folder: Path, verdict: Record) -> Iterator[Record]:
    """Yield the traces of a verdict on a definition of a set: one for each workload that was judged."""
    problem = formats.one(folder, str(verdict.get("problem_label")))
    workloads = [shape.name for shape in problem.shapes]
    known = dict(zip(workloads, formats.origin(problem.source)["workloads"], strict=True))
    rows: list[Record] = get(verdict, _SHAPES) or [{"name": workloads[0], "category": verdict.get("category")}]
    for row in rows:
        if row["name"] not in known:
            raise InvalidRequest(f"{folder}: has no workload {row['name']}")
        if row["category"] is not None:
            other = {"flashinfer-bench": {"workload": known[row["name"]]}}
            yield from_verdict(FORMS["flashinfer-bench"], {**verdict, **row, "other": other})


def _flashinfer(verdict: Record) -> Record:
    workload = get(verdict, "other.flashinfer-bench.workload")
    category = _category(verdict, needed="category" in verdict)
    if workload is None:
        raise InvalidRequest("a trace has a workload of its set: give lines of `judge --json`, and --problems SET")
    if category is None:
        return {"workload": workload}
    correctness = performance = None
    if (status := _CODE[1](category)) in ("PASSED", "INCORRECT_NUMERICAL"):
        compared = get(verdict, "evidence.comparison") or {}
        errors = compared if status == "PASSED" else get(verdict, "facts.errors") or compared
        kinds = ("relative", "absolute")
        correctness = {f"max_{kind}_error": errors.get(f"max_{kind[:3]}_error") or 0.0 for kind in kinds}
    if status == "PASSED":
        ms, reference_ms = verdict.get("runtime_ms"), verdict.get("baseline_ms")
        if not ms or not reference_ms:
            raise InvalidRequest("a trace of a kernel that passed needs times: judge it without --no-timing")
        performance = {"latency_ms": ms, "reference_latency_ms": reference_ms, "speedup_factor": reference_ms / ms}
    more = {"timestamp": datetime.now(UTC).isoformat(), "log": verdict.get("log") or verdict.get("message") or ""}
    return {"workload": workload, "evaluation": {**more, "correctness": correctness, "performance": performance}}


def _kernelbot(verdict: Record) -> Record:
    passed, message = _category(verdict, needed=True) is Category.PASSED, verdict.get("message", "")
    result = {"check": "pass" if passed else "fail"}
    for number, one in enumerate(_cases(verdict)):
        names = {"mean": "mean_ms", "std": "std_ms", "best": "min_ms", "worst": "max_ms"}
        values = {name: repr(_shifted(one[mine], 6)) for name, mine in names.items() if mine in one}
        values |= {"spec": one["name"], **({"runs": str(one["count"])} if "count" in one else {})}
        values |= {} if one.get("category") == Category.PASSED else {"status": "fail", "error": message}
        result |= {f"benchmark.{number}.{name}": value for name, value in values.items()}
        result["benchmark-count"] = str(number + 1)
    texts = dict.fromkeys(("command", "stdout", "stderr"), "")
    run = {"success": True, "passed": passed, **texts, "exit_code": int(not passed), "duration": 0.0, "result": result}
    times = {"start": verdict.get("submitted_at"), "end": verdict.get("finished_at")}
    runs = {"leaderboard": {**times, "compilation": None, "run": run, "profile": None}}
    return {"success": True, "error": "", "system": {}, "runs": runs}


def _submitted(runs: Record) -> Iterator[Record]:
    known = [get(runs, f"{mode}.run.result") for mode in _MODES]
    result: Record = next(filter(None, known), {})
    for place in [name.removesuffix(".spec") for name in result if name.endswith(".spec")]:
        mean = result.get(f"{place}.mean")
        passed = result.get(f"{place}.status", "pass" if mean else "") == "pass"
        times = {"category": "passed" if passed else None, "runtime_ms": _shifted(mean, -6) if mean else None}
        yield {"name": result[f"{place}.spec"], **times}


def _hugging_face(verdict: Record) -> Record:
    _category(verdict, needed="category" in verdict)
    names = ("mean_ms", "std_ms", "min_ms", "max_ms", "q1_ms", "q3_ms", "count")
    results = [
        {"workload": one["name"], **({"verified": one["category"] == Category.PASSED} if "category" in one else {})}
        | {"timingResults": {name.replace("count", "iterations"): one[name] for name in names if name in one}}
        for one in _cases(verdict)
    ]
    return {"results": results, "machineInfo": {}}


def _benchmarked(results: list[Record]) -> Iterator[Record]:
    for one in results:
        category = {True: "passed", False: "wrong_values"}.get(one.get("verified", ...))
        yield {"name": one["workload"], "category": category, "runtime_ms": one["timingResults"].get("mean_ms")}


def _nvbench(verdict: Record) -> Record:
    clock = "cpu" if verdict.get("timing_basis") == "cpu_clock" else "gpu"
    names = {"mean": "mean_ms", "median": "median_ms", "min": "min_ms", "max": "max_ms", "stdev/absolute": "std_ms"}
    states: list[Record] = []
    for one in _cases(verdict):
        known = {f"time/{clock}/{tag}": repr(_shifted(one[mine], -3)) for tag, mine in names.items() if mine in one}
        known |= {"sample_size": str(one["count"])} if "count" in one else {}
        values = {tag: {"type": "int64" if tag == "sample_size" else "float64", "value": known[tag]} for tag in known}
        data = [{"tag": f"nv/cold/{tag}", "data": [{"name": "value", **values[tag]}]} for tag in values]
        skipped = {"is_skipped": not data, **({} if data else {"skip_reason": verdict.get("message", "")})}
        states.append({"name": one["name"], "device": 0, "axis_values": None, "summaries": data, **skipped})
    version = {"json": {"major": 1, "minor": 0, "patch": 0, "string": "1.0.0"}}
    devices = [{"id": 0, "name": get(verdict, "environment.device")}]
    bench = {"name": verdict.get("kernel_label") or "", "index": 0, "devices": [0], "axes": None, "states": states}
    return {"meta": {"argv": [], "version": version}, "devices": devices, "benchmarks": [bench]}


def _measured(benches: list[Record]) -> Iterator[Record]:
    tags = [f"nv/cold/time/{tag}" for tag in ("gpu/median", "gpu/mean", "cpu/median", "cpu/mean")]
    for bench in benches:
        for state in bench["states"] or ():
            data = {one["tag"]: one["data"][0]["value"] for one in state["summaries"] or () if one.get("data")}
            found = next((data[tag] for tag in tags if tag in data), None)
            name = state["name"] if len(benches) == 1 else f"{bench['name']} {state['name']}"
            yield {"name": name, "runtime_ms": None if found is None else _shifted(found, 3)}


_STATS: Final = "mean_ms=mean median_ms=median std_ms=std min_ms=min max_ms=max count=num_trials"
_MODES: Final = ("leaderboard", "benchmark", "test")
_SHAPES: Final = "evidence.shapes.rows"
_ALL: Final = [
    Form("kernelbench", _split, [
        *_pairs(_FLAG, "compiled correctness", theirs="row."), *_metadata("row.metadata."),
        *_pairs(_FOUND, "problem_label=problem"), *_pairs(_read(str), "kernel_label=row.sample_id"),
        *_pairs(_TIME, "speedup=metadata.speedup runtime.mean_ms=runtime baseline.mean_ms=ref_runtime", theirs="row."),
        *_pairs(_NUMBER, _STATS, "runtime.", "row.runtime_stats."),
        *_pairs(_NUMBER, _STATS, "baseline.", "row.ref_runtime_stats."),
    ], _kernelbench, _join),
    Form("flashinfer-bench", _whole("definition", "workload"), [
        *_pairs(_TEXT, "problem_label=definition kernel_label=solution"), *_pairs(_CODE, "category=evaluation.status"),
        *_pairs(_TEXT, "environment.device=environment.hardware finished_at=timestamp log", theirs="evaluation."),
        *_pairs(_TEXT, "cuda torch triton kqueue", "environment.", "evaluation.environment.libs."),
        *_pairs(_FIGURE, "max_rel_error=max_relative_error", "evidence.comparison.", "evaluation.correctness."),
        *_pairs(_FIGURE, "max_abs_error=max_absolute_error", "evidence.comparison.", "evaluation.correctness."),
        *_pairs(_read(lambda name: [{"name": name}]), f"{_SHAPES}=workload.uuid"),
        *_pairs(_SPENT, "runtime_ms=latency_ms baseline_ms=reference_latency_ms", theirs="evaluation.performance."),
        *_pairs(_SPENT, "speedup=evaluation.performance.speedup_factor"),
    ], _flashinfer),
    Form("kernelbot", _whole("success", "system", "runs"), [
        *_pairs(_TEXT, "device=gpu torch host=hostname os=platform", "environment.", "system."),
        *_pairs(_FOUND, "message=error"), *_pairs(_read(lambda value: [*_submitted(value)]), f"{_SHAPES}=runs"),
        *(row for at in _MODES for row in _pairs(_FOUND, "submitted_at=start finished_at=end", theirs=f"runs.{at}.")),
        *(row for at in _MODES for row in _pairs(_SAID, "correctness=run.passed", theirs=f"runs.{at}.")),
        *(row for at in _MODES for row in _pairs(_SAID, "compiled=compilation.success", theirs=f"runs.{at}.")),
    ], _kernelbot),
    Form("kernelgym", _whole("task_id", "status", "compiled"), [
        *_pairs(_TEXT, "kernel_label=task_id submitted_at finished_at=completed_at"),
        *_pairs(_FLAG, "compiled correctness"), *_metadata("metadata."), *_pairs(_FOUND, "message=error_message"),
        *_pairs(_TIME, "runtime_ms=kernel_runtime baseline_ms=reference_runtime speedup"),
    ], _kernelgym),
    Form("hf-kernels", _whole("results", "machineInfo"), [
        *_pairs(_TEXT, "device=gpu torch=pytorchVersion os", "environment.", "machineInfo."),
        *_pairs(_TEXT, "kernel_label=kernelCommitSha problem_label=benchmarkScriptPath"),
        *_pairs(_read(lambda value: [*_benchmarked(value)]), f"{_SHAPES}=results"),
    ], _hugging_face),
    Form("nvbench", _whole("devices", "benchmarks"), [
        *_pairs(_read(lambda listed: listed[0]["name"]), "kernel_label=benchmarks environment.device=devices"),
        *_pairs(_read(lambda value: [*_measured(value)]), f"{_SHAPES}=benchmarks"),
    ], _nvbench),
]  # fmt: skip
#: All forms by name.
FORMS: Final = {form.name: form for form in _ALL}
