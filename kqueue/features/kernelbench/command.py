"""`kqueue kernelbench` and `kqueue problems`: the generations and the sets of problems of other projects.

The generations and their results have KernelBench's own file formats.
"""

from __future__ import annotations

import json
import math
import re
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, TypeVar
from uuid import uuid4

import typer

from kqueue.categories import Category
from kqueue.cli import options, owners
from kqueue.cli.render import Columns, category_text, emit, print_table, progress, say, table, write_json
from kqueue.cli.sources import adapted, read_problem
from kqueue.errors import InvalidRequest
from kqueue.features.kernelbench import resuming
from kqueue.features.kernelbench.resuming import INCOMPLETE
from kqueue.figures import ratio
from kqueue.files import read_bytes

if TYPE_CHECKING:
    from kqueue.client import Client
    from kqueue.contract import Request
    from kqueue.formats import Problem

NumberT = TypeVar("NumberT", int, float)

_RESULTS: Final = "eval_results.json"
#: Quotient of the pause between two writes of the results file and the time of the last one. Each write replaces all.
_PAUSE: Final = 20


def kernelbench(
    problems: Annotated[
        Path,
        typer.Option(
            metavar="DIR",
            help="References named N_name.py, in DIR or in DIR/level1, DIR/level2 and so on, or another project's set.",
        ),
    ],
    generations: Annotated[
        Path, typer.Option(metavar="RUN_DIR", help="Kernels named level_L_problem_P_sample_S_kernel.py.")
    ],
    level: Annotated[
        int | None, typer.Option(help="The level to judge.", show_default="the only level in RUN_DIR")
    ] = None,
    backend: Annotated[str, typer.Option("--backend", "-b", help="Backend of the kernels, such as triton.")] = "cuda",
    lane: Annotated[str, typer.Option(help="auto, cpu, gpu, or gpu.<model>.")] = "auto",
    precision: Annotated[str, typer.Option(help="fp32, fp16 or bf16.")] = "fp32",
    checks: Annotated[int, typer.Option(help="Number of input sets to compare.")] = 5,
    calls: Annotated[int, typer.Option(help="Maximum number of timed calls.")] = 100,
    no_timing: Annotated[bool, typer.Option("--no-timing", help="Do not time the kernels.")] = False,
    comparison: Annotated[str, typer.Option(help="strict or kernelbench.")] = "strict",
    k: Annotated[str, typer.Option("--k", metavar="K,...", help="Values of k for pass@k.")] = "1,5,10",
    p: Annotated[
        str, typer.Option("--p", metavar="P,...", help="Speedup thresholds for fast_p.")
    ] = "0,0.5,0.8,1,1.5,2",
    out: Annotated[
        Path | None, typer.Option(metavar="FILE", help="The results file.", show_default="RUN_DIR/eval_results.json")
    ] = None,
    one_sample: Annotated[
        bool,
        typer.Option("--one-sample", help="Write an object for each problem, as older readers expect, not a list."),
    ] = False,
    as_json: options.Json = False,
) -> None:
    """Judge and score a folder of KernelBench generations. Run it again to resume an interrupted run."""
    from kqueue.client import connect
    from kqueue.features.kernelbench.runs import scores_of

    ks, ps = _numbers(k, "--k", int), _numbers(p, "--p", float)
    level, samples, bad = _find(generations, problems, level)
    asked = {
        "backend": backend,
        "lane": lane,
        "precision": precision,
        "num_correct_trials": checks,
        "num_perf_trials": calls,
        "measure_performance": not no_timing,
        "purpose": "rank",
        "comparison": comparison,
    }
    run = _Run(out or generations / _RESULTS, level, asked)
    known = {(problem, row["sample_id"]) for problem, rows in run.results.items() for row in rows}
    known |= {(str(sample.problem_id), sample.sample_id) for sample in samples}
    if one_sample and len({problem for problem, _ in known}) < len(known):
        raise InvalidRequest(f"--one-sample: a problem has several samples, here or in {run.file}: omit this option")
    todo = run.to_do(samples, batch=generations.resolve().name or None)
    with connect() as client, run:
        left_out = _judge(client, todo, run)
    if one_sample:
        _write(run.file, {problem: rows[0] for problem, rows in run.results.items() if rows})
    numbers = {*run.results, *(str(sample.problem_id) for sample in samples)}
    scores = scores_of(run.results, ks, ps, problems=len(numbers))
    # KernelBench's scripts expect this name next to their results. Results of other settings have another name.
    scores_name = "pass_at_k_results.json" if run.file.name == _RESULTS else f"{run.file.stem}.pass_at_k_results.json"
    _write(run.file.with_name(scores_name), _pass_at_k_file(run.results, scores, ks))
    for line in [*bad, *(f"{name}: no result, {why}" for name, why in left_out)]:
        say(line)
    record = {
        "level": level,
        "results": str(run.file),
        "evaluated": len(todo) - len(left_out),
        "left_out": [name for name, _ in left_out],
        "bad_files": len(bad),
        **scores,
    }
    emit(record, _print, as_json=as_json, record=dict)
    if bad or left_out:
        raise typer.Exit(INCOMPLETE if left_out else 2)


@dataclass(frozen=True, slots=True)
class _Sample:
    """One generated kernel and its problem."""

    path: Path
    #: Fields of a request: the problem and its label.
    problem: Mapping[str, str]
    problem_id: int
    sample_id: int


@dataclass(frozen=True, slots=True)
class _Work:
    """A sample to judge."""

    sample: _Sample
    #: SHA-256 of its two files, as recorded in its result.
    digests: dict[str, str]
    request: Request


class _Run:
    """The results file. Each write replaces the whole file atomically. A new run that is refused leaves no file."""

    def __init__(self, file: Path, level: int, asked: dict[str, Any]) -> None:
        """Read the file if it exists. All its results have the level ``level`` and the settings ``asked``."""
        self.file = file
        self._level = level
        self._asked = asked
        #: Prefix of this run's idempotency keys, in a file so that a resumed run finds its evaluations. Without a
        #: results file, a new run begins.
        self._token_file = file.with_name(file.name + ".run")
        resumed = file.exists() and self._token_file.exists()
        self.token = self._token_file.read_text().strip() if resumed else uuid4().hex
        self.results: dict[str, list[dict[str, Any]]] = _read(file, level, asked) if file.exists() else {}
        self._due = math.inf
        #: Files of a run without a verdict that were not there before.
        self._new: list[Path] = []

    def __enter__(self) -> None:
        self._new = [file for file in (self.file, self._token_file) if not file.exists()]
        if self.file in self._new:
            self.write()
        if self._new:
            self._token_file.write_text(self.token + "\n")
        self._due = 0.0

    def __exit__(self, _kind: object, error: object, _trace: object) -> None:
        if isinstance(error, InvalidRequest) and self._new:
            for file in self._new:
                file.unlink()
        else:
            self.write()

    def to_do(self, samples: Iterable[_Sample], *, batch: str | None) -> list[_Work]:
        """Return the samples without a result. A source that is not a kernel gets its result at once."""
        from kqueue.integrations.common import request_for

        work: list[_Work] = []
        for sample in samples:
            data, problem = read_bytes(sample.path, 16 << 20), sample.problem["problem"]
            digests = {"file_sha256": sha256(data).hexdigest(), "problem_sha256": sha256(problem.encode()).hexdigest()}
            if self._has(sample, digests):
                continue
            labels = {"problem_label": sample.problem["problem_label"][:200], "kernel_label": sample.path.stem}
            # Bytes that are not UTF-8 become surrogates, which the request's validation refuses.
            kernel = data.decode("utf-8-sig", errors="surrogateescape")
            try:
                kernel = adapted({"problem": problem, "kernel": kernel})["kernel"]
            except InvalidRequest as error:
                request = error
            else:
                request = request_for(problem, kernel, **self._asked, batch=batch, reuse=False, **labels)
            if isinstance(request, InvalidRequest):
                self.add(sample, _refused(sample, str(request)), digests)
            else:
                work.append(_Work(sample, digests, request))
        return work

    def add(self, sample: _Sample, row: dict[str, Any], digests: dict[str, str]) -> None:
        """Insert a sample's result, replacing an older one."""
        row["metadata"] |= {"level": self._level, "asked": self._asked, **digests}
        table = self.results.setdefault(str(sample.problem_id), [])
        remaining = [entry for entry in table if entry["sample_id"] != sample.sample_id]
        table[:] = sorted([*remaining, row], key=itemgetter("sample_id"))
        if time.monotonic() > self._due:
            self._new.clear()
            self.write()

    def write(self) -> None:
        begun = time.monotonic()
        _write(self.file, dict(sorted(self.results.items(), key=lambda item: int(item[0]))))
        ended = time.monotonic()
        self._due = ended + _PAUSE * (ended - begun)

    def _has(self, sample: _Sample, digests: dict[str, str]) -> bool:
        """Return True if these exact files have a result. Results of other programs have no hashes, and count too."""
        return any(
            row["sample_id"] == sample.sample_id
            and all(row["metadata"].get(name, digest) == digest for name, digest in digests.items())
            for row in self.results.get(str(sample.problem_id), ())
        )


def _judge(client: Client, todo: Sequence[_Work], run: _Run) -> list[tuple[str, str]]:
    """Judge the samples. Return the names of samples without a result, each with the reason."""
    from kqueue.features.kernelbench.runs import row_of

    left_out: list[tuple[str, str]] = []
    with progress(len(todo), quiet=False) as advance:
        works = {work.sample.path.name: work for work in todo}
        for name, verdict in resuming.judge(client, run.token, {name: work.request for name, work in works.items()}):
            if isinstance(verdict, InvalidRequest):
                raise verdict
            if verdict.judged:
                sample = works[name].sample
                run.add(sample, row_of(verdict, sample.sample_id), works[name].digests)
            else:
                left_out.append((name, f"{verdict.category}: {verdict.message}"))
            advance(str(verdict.category))
    return sorted(left_out)


def _find(generations: Path, problems: Path, level: int | None) -> tuple[int, list[_Sample], list[str]]:
    """Return the level, its generations with their problems, and messages about the remaining files."""
    for folder, option in ((generations, "--generations"), (problems, "--problems")):
        if not folder.is_dir():
            raise InvalidRequest(f"{option} {folder}: no such folder")
    from kqueue import formats
    from kqueue.features.kernelbench import runs

    named: dict[int, list[tuple[int, int, Path]]] = {}
    known = dict(runs.generations(generations))
    for path, (at, problem_id, sample_id) in known.items():
        named.setdefault(at, []).append((problem_id, sample_id, path))
    bad = [
        f"{path.name}: not judged, because its name is not level_L_problem_P_sample_S_kernel.py"
        for path in sorted(generations.glob("*.py"))
        if path not in known
    ]
    if level is None and len(named) > 1:
        levels = ", ".join(map(str, sorted(named)))
        raise InvalidRequest(f"--generations {generations}: holds levels {levels}: choose one with --level and --out")
    chosen = level if level is not None else next(iter(named), None)
    if chosen is None or chosen not in named:
        suffix = "" if level is None else f" of level {level}"
        raise InvalidRequest(f"--generations {generations}: no level_L_problem_P_sample_S_kernel.py{suffix}")
    listed = enumerate(formats.read(problems), 1) if formats.recognise(problems) else ()
    of_set = {number: [entry] for number, entry in listed if isinstance(entry, formats.Problem)}
    by_number: Mapping[int, Sequence[Path | Problem]] = of_set or runs.problems_of(problems, chosen)
    samples: list[_Sample] = []
    for problem_id, sample_id, path in sorted(named[chosen]):
        match by_number.get(problem_id, []):
            case [problem]:
                if isinstance(problem, Path):
                    fields = read_problem(str(problem))
                else:
                    fields = {"problem": problem.source, "problem_label": problem.name}
                samples.append(_Sample(path, fields, problem_id, sample_id))
            case []:
                why = f"{problems} has no problem {problem_id} for level {chosen}"
                bad.append(f"{path.name}: not judged, because {why}")
            case several:
                names = ", ".join(problem.name for problem in several)
                bad.append(f"{path.name}: not judged, because problem {problem_id} could be any of {names}")
    return chosen, samples, bad


def _read(file: Path, level: int, asked: dict[str, Any]) -> dict[str, list[dict[str, Any]]]:
    """Read the results of this command or of KernelBench's scripts."""
    from kqueue.features.kernelbench.runs import results_of

    try:
        results = results_of(file)
    except InvalidRequest as error:
        raise InvalidRequest(f"{error}: move it away or use --out") from None
    levels = {at for rows in results.values() for row in rows if (at := row["metadata"].get("level", level)) != level}
    if levels:
        raise InvalidRequest(f"{file}: holds results of level {min(levels)}: use another --out for level {level}")
    for row in (row for rows in results.values() for row in rows):
        used: dict[str, Any] = {**asked, **row["metadata"].get("asked", {})}
        if other := [f"{name} {used[name]}, not {value}" for name, value in asked.items() if used[name] != value]:
            raise InvalidRequest(
                f"{file}: holds results of kernels that were judged with {'; '.join(other)}: "
                "use another --out, or move it away"
            )
    return results


def _refused(sample: _Sample, why: str) -> dict[str, Any]:
    """Return the entry of a file that is not a kernel. It counts as a failed sample."""
    return {
        "sample_id": sample.sample_id,
        "compiled": False,
        "correctness": False,
        "metadata": {"category": "entry_point_missing", "blame": "candidate", "compilation_error": why},
        "runtime": -1.0,
        "runtime_stats": {},
        "ref_runtime": -1.0,
        "ref_runtime_stats": {},
    }


def _pass_at_k_file(results: dict[str, Any], scores: dict[str, Any], ks: Sequence[int]) -> dict[str, Any]:
    """Return pass@k in the format of KernelBench's scripts."""
    from kqueue.features.kernelbench.runs import pass_at_k

    problems = {
        problem_id: {
            "total_samples": len(rows),
            "correct_samples": (correct := sum(row["correctness"] for row in rows)),
            **{f"pass@{k}": pass_at_k(len(rows), correct, k) for k in ks if k <= len(rows)},
        }
        for problem_id, rows in results.items()
    }
    return {
        "averages": {f"avg_pass@{k}": value["value"] for k, value in scores["pass_at_k"].items()},
        "metadata": {
            "total_problems": scores["problems"],
            "problems_with_samples": scores["problems"],
            "total_evaluated_samples": scores["samples"],
            "total_correct_samples": scores["correct"],
            **{f"pass@{k}_count": value["problems"] for k, value in scores["pass_at_k"].items()},
        },
        "problems": problems,
    }


def _print(record: dict[str, Any]) -> None:
    samples, problems = record["samples"], record["problems"]
    print(
        f"level {record['level']}: {samples} samples of {problems} problems ({record['evaluated']} judged now), "
        f"{record['compiled']} compiled, {record['correct']} correct. Results: {record['results']}"
    )
    scores = [
        (f"pass@{k}", _share(value["value"]), f"{value['problems']} problems with {k} samples or more")
        for k, value in record["pass_at_k"].items()
    ]
    scores += [
        (f"fast_{p:g}", _share(value), f"problems, correct and more than {p:g}x as fast")
        for p, value in record["fast_p"].items()
    ]
    if (mean := record["geometric_mean_speedup"]) is not None:
        scores.append(("speedup", ratio(mean), f"geometric mean of {record['timed']} correct samples"))
    print_table(("score", "value", "of"), scores)
    blames = {str(category): str(category.blame) for category in Category}
    print_table(
        ("category", "n", "share"),
        (
            (category_text(name, blames.get(name, "")), number, f"{number / samples:.1%}")
            for name, number in record["categories"].items()
        ),
    )


def _share(value: float | None) -> str:
    return "" if value is None else f"{value:.1%}"


def _numbers(given: str, option: str, kind: type[NumberT]) -> list[NumberT]:
    try:
        numbers = [kind(part) for part in given.split(",")]
    except ValueError:
        numbers = []
    if not numbers or min(numbers) < (1 if kind is int else 0):
        wanted = "whole numbers from 1" if kind is int else "numbers from 0"
        raise InvalidRequest(f"{option} {given}: give {wanted}, separated by commas")
    return sorted(set(numbers))


def _write(file: Path, content: Any) -> None:
    fresh = file.with_name(file.name + ".new")
    try:
        fresh.write_text(json.dumps(content, indent=4, allow_nan=False), encoding="utf-8")
        fresh.replace(file)
    except OSError as error:
        raise InvalidRequest(f"{file}: cannot be written: {error.strerror or error}: use another --out") from None


problems = typer.Typer(no_args_is_help=True, help="Use other projects' sets of problems, and share problems.")


@problems.command("import")
def import_(
    folder: Annotated[Path, typer.Argument(metavar="SET", help="A file or folder of a known format.")],
    out: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Write the translated problems to DIR/NAME.py.")
    ] = None,
    as_json: options.Json = False,
) -> None:
    """List the problems of a set. Exit with 1 if some cannot be translated. The list has the reasons."""
    from kqueue import formats

    rows: list[dict[str, Any]] = []
    for number, entry in enumerate(formats.read(folder), 1):
        row: dict[str, Any] = {"number": number, "name": entry.name, "refused": None}
        if isinstance(entry, formats.Refused):
            row["refused"] = entry.reason
        else:
            row["shapes"] = [shape.name for shape in entry.shapes]
            row |= {"kernels": list(entry.solutions), "notes": entry.notes}
            if out is not None:
                # The name as a relative path below the folder.
                parts = [re.sub(r"[^\w.+-]", "_", part).lstrip(".") for part in entry.name.split("/")]
                place = out / f"{'/'.join(filter(None, parts)) or '_'}.py"
                place.parent.mkdir(parents=True, exist_ok=True)
                place.write_text(entry.source, encoding="utf-8")
        rows.append(row)
        if as_json:
            write_json(row)
    refused = sum(row["refused"] is not None for row in rows)
    if not as_json:
        columns: Columns[dict[str, Any]] = {
            "": lambda row: str(row["number"]),
            "problem": lambda row: row["name"],
            "shapes": lambda row: "-" if row["refused"] else str(len(row["shapes"]) or 1),
            "kernels": lambda row: "-" if row["refused"] else str(len(row["kernels"])),
            "note": lambda row: f"refused: {row['refused']}" if row["refused"] else "; ".join(row["notes"]),
        }
        table(columns)(rows)
        say(f"{len(rows) - refused} of {len(rows)} translated from {formats.recognise(folder)}")
    if refused:
        raise typer.Exit(1)


problems.command()(owners.share)
problems.command()(owners.unshare)
