"""The corpus with a separate fleet: `python tests/integrity/run.py --lane gpu|cpu`.

Starts Postgres, Valkey and the workers of this machine in a temporary home, then judges

1. all programs in one batch, several slots per GPU at once.
2. on a GPU, the programs with compared times once more, one after another with nothing else running, each
   next to its honest program.

Prints unexpected outcomes and exits with 1 if there are any. With ``--out`` the outcomes are written as JSON, from
which ``report.py`` makes ``docs/integrity.md``. With ``--only`` they replace the same programs' outcomes in that file.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import tempfile
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from kqueue import Client, Verdict
from kqueue.categories import Category
from kqueue.config import load
from kqueue.local.fleet import LocalFleet
from tests.integrity.corpus import Facts, Judgement, Program, judge, programs

#: Time limit in seconds of any verdict, from the submission of all.
PATIENCE_S = 3600.0


def main() -> int:
    """Run everything and return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lane", choices=["cpu", "gpu"], required=True)
    parser.add_argument("--only", nargs="+", metavar="NAME", help="programs by name, or all below one, such as timing")
    parser.add_argument("--out", type=Path, metavar="FILE", help="write the outcomes there, as JSON")
    parser.add_argument("--slots", type=int, default=4, help="slots per GPU (default 4)")
    parser.add_argument("--logs", type=Path, metavar="DIR", help="copy the fleet's logs there")
    options = parser.parse_args()
    chosen = _chosen(options.lane, options.only)
    root = Path(tempfile.mkdtemp(prefix="kqueue-integrity-"))
    root.chmod(0o711)  # candidates with separate uids must reach their scratch directories
    slots = {"slots_per_gpu": options.slots, "cpu_slots": 0} if options.lane == "gpu" else {"gpus": "none"}
    config = load(home=root / "home", scratch=root / "scratch", **slots)
    try:
        with LocalFleet(config, durable=False) as fleet, fleet.client() as kq:
            record = judge_programs(kq, options.lane, chosen, options.out, merge=bool(options.only))
    finally:
        if options.logs:
            shutil.copytree(root / "home" / "logs", options.logs, dirs_exist_ok=True)
        shutil.rmtree(root, ignore_errors=True)
    return report_unexpected(chosen, record["programs"])


def _chosen(lane: str, only: list[str] | None) -> list[Program]:
    """Return the requested programs with the honest ones that they are compared with."""
    everything = {program.name: program for program in programs(lane)}
    if not only:
        return list(everything.values())
    found = {
        name: program
        for name, program in everything.items()
        if any(name == wanted or name.startswith(wanted.rstrip("/") + "/") for wanted in only)
    }
    if not found:
        raise SystemExit(f"--only: no program of the lane {lane} has such a name; see tests/integrity/table_*.py")
    for program in list(found.values()):
        if program.honest:
            found.setdefault(program.honest, everything[program.honest])
    return list(found.values())


def judge_programs(kq: Client, lane: str, chosen: list[Program], out: Path | None, *, merge: bool) -> dict[str, Any]:
    """Judge programs, on a GPU those with compared times once more. Return the record, which ``out`` gets too."""
    record: dict[str, Any] = {"lane": lane, "date": datetime.now(UTC).date().isoformat(), "environment": None}
    record["isolation"] = {}
    record["programs"] = json.loads(out.read_text())["programs"] if merge and out is not None and out.exists() else {}
    verdicts: dict[str, Verdict] = {}
    begun = time.monotonic()
    tickets = kq.submit_batch([program.request(lane) for program in chosen])
    for i, (program, ticket) in enumerate(zip(chosen, tickets, strict=True)):
        verdict = verdicts[program.name] = ticket.wait(timeout=PATIENCE_S)
        record["environment"] = record["environment"] or (verdict.environment and verdict.environment.model_dump())
        isolation = verdict.evidence.isolation
        record["isolation"] = record["isolation"] or (isolation.model_dump() if isolation else {})
        if i % 20 == 19:  # an interrupted run keeps its results
            print(f"{i + 1} of {len(chosen)} after {time.monotonic() - begun:.0f} s", flush=True)
            _judge_all(record, lane, chosen, verdicts, {}, out)
    print(f"{len(chosen)} programs in {time.monotonic() - begun:.0f} s", flush=True)
    _judge_all(record, lane, chosen, verdicts, {}, out)
    if lane == "gpu":
        begun = time.monotonic()
        alone = _alone(kq, lane, chosen, verdicts)
        print(f"{len(alone)} of them alone in {time.monotonic() - begun:.0f} s", flush=True)
        _judge_all(record, lane, chosen, verdicts, alone, out)
    return record


def _alone(kq: Client, lane: str, chosen: list[Program], verdicts: dict[str, Verdict]) -> dict[str, Verdict]:
    """Judge programs with compared times, and their honest ones, in turn. A control with another time has two tries."""
    passed = [p for p in chosen if p.honest and verdicts[p.name].category is Category.PASSED]
    wanted = {program.honest for program in passed} | {program.name for program in passed}
    alone = {program.name: program for program in chosen if program.name in wanted}
    found, names = dict[str, Verdict](), [*alone]
    for _ in range(2):
        found |= {name: kq.submit(alone[name].request(lane)).wait(timeout=PATIENCE_S) for name in names}
        facts = {name: Facts.of(verdict) for name, verdict in found.items()}
        changed = [p for p in passed if judge(p, facts[p.name], lane, facts[p.honest or ""]) is Judgement.CHANGED_TIME]
        names = [name for p in changed for name in (p.honest or "", p.name)]
    return found


def _judge_all(
    record: dict[str, Any],
    lane: str,
    chosen: list[Program],
    verdicts: dict[str, Verdict],
    alone: dict[str, Verdict],
    out: Path | None,
) -> None:
    for program in chosen:
        if program.name not in verdicts:
            continue
        row = _row(program, verdicts[program.name])
        found = judge(program, Facts.of(verdicts[program.name]), lane)
        quiet = alone.get(program.name)
        if found.good and quiet is not None:
            honest = alone.get(program.honest or "")
            found = judge(program, Facts.of(quiet), lane, Facts.of(honest) if honest else None)
            row["alone"] = {"category": str(quiet.category), "runtime": _runtime(quiet)}
            if honest and honest.runtime_ms and quiet.runtime_ms is not None:
                row["alone"] |= {"honest_ms": honest.runtime_ms, "ratio": quiet.runtime_ms / honest.runtime_ms}
        record["programs"][program.name] = row | {"judgement": str(found)}
    if out is not None:
        record["programs"] = dict(sorted(record["programs"].items()))
        out.write_text(json.dumps(record, indent=1, default=str) + "\n")


def _row(program: Program, verdict: Verdict) -> dict[str, Any]:
    provenance, isolation = verdict.evidence.provenance, verdict.evidence.isolation
    return {
        "category": str(verdict.category),
        "expected": sorted(program.expected),
        "message": verdict.message[:300],
        "phase": verdict.phase,
        "runtime": _runtime(verdict),
        "baseline_ms": verdict.baseline_ms,
        "attempts": verdict.attempts,
        "precision_downgrade": Facts.of(verdict).precision_downgrade,
        "findings": sorted({finding.rule for finding in verdict.evidence.findings or ()}),
        "own_share": provenance and provenance.own_share,
        "isolation": isolation and isolation.level,
        "log": verdict.log[-600:] if judge(program, Facts.of(verdict), verdict.lane) is not Judgement.OK else "",
    }


def _runtime(verdict: Verdict) -> dict[str, Any] | None:
    shown = {"basis", "count", "median_ms", "q1_ms", "q3_ms", "min_ms", "overhead_ms"}
    return verdict.runtime and verdict.runtime.model_dump(include=shown)


def report_unexpected(chosen: list[Program], rows: dict[str, dict[str, Any]]) -> int:
    """Print the outcomes that are not as expected. Return the exit status."""
    bad = 0
    for program in chosen:
        row = rows[program.name]
        if Judgement(row["judgement"]).good:
            continue
        bad += 1
        print(f"{row['judgement']}: {program.name} -> {row['category']} (expected {', '.join(row['expected'])})")
        print(f"    {row['message']}\n    {row['runtime']} alone {row.get('alone')}")
        print("".join(f"    | {line}\n" for line in row["log"].splitlines()[-8:]), end="")
    print(f"{len(chosen) - bad} of {len(chosen)} as expected")
    return 1 if bad else 0


if __name__ == "__main__":
    os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
    sys.exit(main())
