"""Judge entries of the gallery on a temporary fleet: `python examples/demo.py`, with `--all` the whole gallery.

It starts Postgres, Valkey and this machine's workers in a temporary home, submits the entries that the lane can judge,
and prints each verdict when it arrives. The lane is `gpu` on a machine with a GPU, else `cpu`. The exit status is 0 only
if every entry got its expected category.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from gallery import Entry, entries

from kqueue import Client, KqueueError, Verdict
from kqueue.cli.render import category_text, print_table, text
from kqueue.figures import milliseconds, ratio, yes_no
from kqueue.config import load
from kqueue.local.fleet import LocalFleet
from kqueue.signals import raise_interrupts
from kqueue.text import clean, one_line

#: Entries that are judged without `--all` or `--only`: right kernels, and some failures of each kind.
SHORT = (
    "good/torch/gelu",
    "good/triton/softmax",
    "good/cuda/softmax",
    "bad/syntax_error",
    "bad/runtime_error",
    "bad/segfault",
    "bad/endless_loop",
    "bad/nan",
    "bad/wrong_values_triton",
    "problem/broken_reference",
)
#: Longest time in seconds from one verdict to the next. The total time is not limited.
PATIENCE_S = 600.0
#: Lines of the log to show with an unexpected verdict.
LOG_LINES = 15


def main() -> int:
    raise_interrupts()
    options = _options()
    root = Path(tempfile.mkdtemp(prefix="kqueue-demo-"))
    root.chmod(0o711)  # candidates with their own uids must reach their scratch directories
    home = root / "home"
    started = time.monotonic()
    keep = False
    try:
        _check_names(options.only or [])
        config = load(home=home, scratch=root / "scratch", gpus="none" if options.lane == "cpu" else None)
        _say("starting Postgres, Valkey and the workers of this machine")
        with LocalFleet(config, durable=False, report=_say) as fleet, fleet.client() as kq:
            lane = _lane(options.lane, fleet)
            # Entries that the user names are not filtered.
            names = options.only or ([] if options.all else SHORT)
            chosen = _chosen(lane, names, named=bool(options.only))
            _say(f"{_slots(fleet, lane)}, started in {time.monotonic() - started:.1f} s, {len(chosen)} evaluations")
            submitted = time.monotonic()
            verdicts = _judge(kq, chosen, lane)
            seconds = time.monotonic() - submitted
    except KqueueError as error:
        keep = home.exists()
        logs = f"\nThe fleet's logs are in {home / 'logs'}" if keep else ""
        print(f"demo: {error}{logs}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    finally:
        if not keep:
            shutil.rmtree(root, ignore_errors=True)
    if options.json:
        _write(options.json, chosen, verdicts)
    _show(chosen, verdicts)
    different = [(e, v) for e, v in zip(chosen, verdicts, strict=True) if v.category is not e.expected]
    for entry, verdict in different:
        _explain(entry, verdict)
    if lane == "cpu" and any(entry.backend == "triton" for entry in chosen):
        print("On the cpu lane Triton kernels run in the interpreter, so their times are not meaningful.")
    as_expected = f"{len(chosen) - len(different)} of {len(chosen)} as expected"
    print(f"lane {lane}: {as_expected}, in {seconds:.1f} s, {len(chosen) / seconds:.2f} evaluations/s")
    return 1 if different else 0


def _say(line: str) -> None:
    print(line, flush=True)  # at once, even if stdout is a file


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lane", choices=["auto", "cpu", "gpu"], default="auto", help="auto: gpu if there is one")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the full verdicts there")
    chosen = parser.add_mutually_exclusive_group()
    chosen.add_argument("--all", action="store_true", help="the whole gallery, which takes minutes")
    chosen.add_argument(
        "--only", nargs="+", metavar="NAME", help="entries by name, such as bad/segfault, or by prefix, such as bad"
    )
    return parser.parse_args()


def _lane(wanted: str, fleet: LocalFleet) -> str:
    served = {lane for slot in fleet.slots() for lane in slot.lanes}
    lane = wanted if wanted != "auto" else "gpu" if "gpu" in served else "cpu"
    if lane not in served:
        raise KqueueError(f"no worker of this machine serves the lane {lane}: see `kqueue doctor`, or use --lane auto")
    return lane


def _slots(fleet: LocalFleet, lane: str) -> str:
    slots = [slot for slot in fleet.slots() if lane in slot.lanes]
    devices = {slot.device for slot in slots}
    what = f"{len(devices)} GPU(s)" if lane == "gpu" else "no GPU"
    return f"lane {lane} ({what}), {len(slots)} slot(s)"


def _check_names(only: Sequence[str]) -> None:
    for name in only:
        if not any(_below(entry, name) for entry in entries()):
            raise KqueueError(f"--only: the gallery in examples/gallery.py has no entry {name}")


def _chosen(lane: str, names: Sequence[str], *, named: bool) -> list[Entry]:
    """Return the lane's entries with these names or prefixes, or all. Skip missing backends unless the user named them."""
    found = [entry for entry in entries(lane) if not names or any(_below(entry, name) for name in names)]
    if named and not found:
        raise KqueueError(f"--only: the lane {lane} can judge none of them")
    if not named:
        from workers.judge.pipeline.tools import missing

        for backend in sorted({entry.backend for entry in found}):
            if lacks := missing(backend):
                print(f"{backend} entries are skipped: {', '.join(lacks)}")
                found = [entry for entry in found if entry.backend != backend]
    return found


def _below(entry: Entry, name: str) -> bool:
    return entry.name == name or entry.name.startswith(name.rstrip("/") + "/")


def _judge(kq: Client, chosen: list[Entry], lane: str) -> list[Verdict]:
    """Submit everything at once. Return the verdicts in the order of ``chosen``."""
    tickets = kq.submit_batch([entry.request(lane) for entry in chosen])
    places = {ticket.evaluation_id: place for place, ticket in enumerate(tickets)}
    verdicts: dict[int, Verdict] = {}
    begun = time.monotonic()
    pending = list(tickets)
    while pending:
        ticket, verdict = next(kq.as_completed(pending, timeout=PATIENCE_S))
        pending.remove(ticket)
        place = places[ticket.evaluation_id]
        verdicts[place] = verdict
        mark = "" if verdict.category is chosen[place].expected else f" (not {chosen[place].expected})"
        came = f"{time.monotonic() - begun:6.1f} s  {len(verdicts):{len(str(len(chosen)))}}/{len(chosen)}"
        _say(f"{came}  {chosen[place].name:<32} {verdict.category}{mark}")
    return [verdicts[place] for place in range(len(chosen))]


def _show(chosen: list[Entry], verdicts: list[Verdict]) -> None:
    rows: list[list[object]] = []
    for entry, verdict in zip(chosen, verdicts, strict=True):
        category = category_text(verdict.category, verdict.blame)
        if verdict.category is not entry.expected:
            category.append_text(text(f" (not {entry.expected})", "bold red"))
        rows.append(
            [
                entry.problem.stem,
                entry.name,
                entry.backend,
                category,
                yes_no(verdict.compiled),
                yes_no(verdict.correctness),
                milliseconds(verdict.runtime_ms),
                milliseconds(verdict.baseline_ms),
                ratio(verdict.speedup),
            ]
        )
    print_table(
        ("problem", "kernel", "backend", "category", "compiled", "correct", "runtime ms", "baseline ms", "speedup"),
        rows,
    )


def _explain(entry: Entry, verdict: Verdict) -> None:
    """Print the details of an unexpected verdict."""
    phase = f" in the phase {verdict.phase}" if verdict.phase else ""
    print(f"{entry.name}: expected {entry.expected}, got {verdict.category}{phase}: {one_line(verdict.message)}")
    print(f"  {entry.note}\n  facts: {clean(verdict.facts.model_dump_json())[:2000]}")
    for line in clean(verdict.log).splitlines()[-LOG_LINES:]:
        print(f"  | {line}")
    print()


def _write(file: Path, chosen: list[Entry], verdicts: list[Verdict]) -> None:
    records = [
        {"name": entry.name, "expected": entry.expected, "verdict": verdict.model_dump(mode="json")}
        for entry, verdict in zip(chosen, verdicts, strict=True)
    ]
    file.write_text(json.dumps(records, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
