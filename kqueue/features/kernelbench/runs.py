"""A run of KernelBench: the files of its kernels and problems, ``eval_results.json``, and the scores."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from math import comb
from pathlib import Path
from statistics import fmean, geometric_mean
from typing import Any, Final

from kqueue.contract import Verdict
from kqueue.errors import InvalidRequest
from kqueue.files import read_text
from kqueue.kernelbench import result_of

#: The content of ``eval_results.json``: entries of a problem's samples, by the problem's id.
Results = Mapping[str, Sequence[Mapping[str, Any]]]
#: Names of files: the kernels of a run, and problems.
_GENERATION: Final = re.compile(r"level_(\d+)_problem_(\d+)_sample_(\d+)_kernel\.py")
_PROBLEM: Final = re.compile(r"(\d+)_.*\.py")


def row_of(verdict: Verdict, sample_id: int) -> dict[str, Any]:
    """Return a verdict as an entry of ``eval_results.json``: :func:`result_of` with ``sample_id``."""
    return {"sample_id": sample_id, **result_of(verdict)}


def generations(folder: Path) -> Iterator[tuple[Path, tuple[int, int, int]]]:
    """Yield the kernels of a run in a folder by name, each with its level, problem and sample."""
    for path in sorted(folder.glob("*.py")):
        if match := _GENERATION.fullmatch(path.name):
            level, problem, sample = map(int, match.groups())
            yield path, (level, problem, sample)


def problems_of(folder: Path, level: int) -> dict[int, list[Path]]:
    """Return a level's problems by number, from ``folder/level<N>``, or from ``folder`` without level folders."""
    below = folder / f"level{level}"
    source = below if below.is_dir() or any(folder.glob("level*/")) else folder
    problems: dict[int, list[Path]] = {}
    for path in sorted(source.glob("*.py")):
        if match := _PROBLEM.fullmatch(path.name):
            problems.setdefault(int(match[1]), []).append(path)
    return problems


def results_of(file: Path) -> dict[str, list[dict[str, Any]]]:
    """Return the content of ``eval_results.json``, by this package or by KernelBench's scripts.

    Early results of KernelBench have one entry for each problem, without a list.
    """
    try:
        content: dict[str, Any] = json.loads(read_text(file, 256 << 20))
        return {
            str(int(problem)): [_entry(row) for row in (rows if isinstance(rows, list) else [rows])]
            for problem, rows in content.items()
        }
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise InvalidRequest(f"{file}: not a results file (an object of samples by problem id): {error}") from None


def _entry(given: Mapping[str, Any]) -> dict[str, Any]:
    """Validate the fields of a sample's entry that are used."""
    facts = {"compiled": bool(given["compiled"]), "correctness": bool(given["correctness"])}
    sample_id = int(given.get("sample_id", 0))
    return {**given, **facts, "sample_id": sample_id, "metadata": dict(given.get("metadata") or {})}


def pass_at_k(samples: int, correct: int, k: int) -> float:
    """Return the probability that at least one of ``k`` random samples is correct. ``samples`` is at least ``k``."""
    return 1.0 - comb(samples - correct, k) / comb(samples, k)


def scores_of(results: Results, ks: Iterable[int], ps: Iterable[float], *, problems: int = 0) -> dict[str, Any]:
    """Return the scores of a run.

    Args:
        results: the content of ``eval_results.json``: lists of :func:`row_of` by the problem's id.
        ks: the values of k for pass@k.
        ps: the thresholds p for fast_p, which are speedups.
        problems: the number of all problems of the run, if some have no result.

    Returns:
        A record:

        - ``problems``, ``samples``, ``compiled``, ``correct``, ``timed``: counts.
        - ``pass_at_k`` by k: ``value``, the mean over problems with at least k samples (None without one), and
          ``problems``, their number.
        - ``fast_p`` by p: the share of all problems with a sample that is correct with a speedup above p (None without
          a problem), by the lower end of its 95 % interval where that is known. A correct sample without a speedup
          counts for p = 0 only.
        - ``fast_p_estimate`` by p: the same by the speedups themselves.
        - ``geometric_mean_speedup`` of the correct samples that have a speedup (None without one).
        - ``categories``: the number of samples by category.
    """
    tables = [rows for rows in results.values() if rows]
    rows = [row for table in tables for row in table]
    speedups = [speedup for row in rows if (speedup := speedup_of(row)) is not None]
    every = max(problems, len(tables))
    return {
        "problems": len(tables),
        "samples": len(rows),
        "compiled": sum(row["compiled"] for row in rows),
        "correct": sum(row["correctness"] for row in rows),
        "timed": len(speedups),
        "pass_at_k": {k: _mean_pass(tables, k) for k in ks},
        "fast_p": {
            p: _share(tables, every, p, lambda row: row["metadata"].get("speedup_low") or speedup_of(row)) for p in ps
        },
        "fast_p_estimate": {p: _share(tables, every, p, speedup_of) for p in ps},
        "geometric_mean_speedup": geometric_mean(speedups) if speedups else None,
        "categories": dict(Counter(row["metadata"].get("category", "unknown") for row in rows).most_common()),
    }


def _mean_pass(tables: Iterable[Sequence[Mapping[str, Any]]], k: int) -> dict[str, Any]:
    enough = [table for table in tables if len(table) >= k]
    values = [pass_at_k(len(table), sum(row["correctness"] for row in table), k) for table in enough]
    return {"value": fmean(values) if values else None, "problems": len(enough)}


def _share(
    tables: Sequence[Sequence[Mapping[str, Any]]], every: int, p: float, of: Callable[[Mapping[str, Any]], float | None]
) -> float | None:
    fast = sum(any(row["correctness"] and (of(row) or 0.0 if p else 1.0) > p for row in table) for table in tables)
    return fast / every if every else None


def speedup_of(row: Mapping[str, Any]) -> float | None:
    """Return the speedup of a correct sample: the verdict's, or else the ratio of the entry's two times."""
    if not row["correctness"]:
        return None
    runtime, reference = row.get("runtime", -1.0), row.get("ref_runtime", -1.0)
    return row["metadata"].get("speedup") or (reference / runtime if runtime > 0 and reference > 0 else None)
