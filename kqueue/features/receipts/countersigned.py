"""Compare several receipts: how often and by whom each kernel was judged, and what differs."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final
from uuid import UUID

from kqueue import files
from kqueue.features.receipts import checks
from kqueue.figures import flat
from kqueue.receipts import Receipt, key_id

#: A part of each receipt's file, in both forms.
_MARKS: Final = (b'"payload"', b'"kqueue.receipt/1"')
#: Members of environments that are expected to differ.
_PLACE: Final = frozenset({"device", "host", "memory_bytes"})


@dataclass(frozen=True, slots=True)
class Kernel:
    """A kernel, and how often receipts say that it was judged. ``spread`` is of the times on one device and clock."""

    kernel_hash: str
    problem_hash: str
    label: str
    judged: int
    keys: int
    categories: Mapping[str, int]
    devices: Mapping[str, int]
    kind: str
    spread: float | None
    times_agree: bool
    differs: tuple[str, ...]

    @property
    def agrees(self) -> bool:
        """True if all receipts have one category, and times that agree."""
        return self.times_agree and len(self.categories) == 1

    def __str__(self) -> str:
        """Return how often it was judged."""
        words = "agree within" if self.times_agree else "differ by"
        times = "" if self.spread is None else f", times {words} {100 * self.spread:.1f} %"
        judged = f"judged {_count(self.judged, 'time')} by {_count(self.keys, 'key')}"
        return f"{judged} on {_count(len(self.devices), 'model')} of {self.kind}{times}"


def read(folder: Path, known: Collection[str] | None) -> tuple[list[Kernel], dict[str, str]]:
    """Return the kernels of a folder's receipts, and the faults of the files that show nothing.

    ``known`` has the keys that count, or is None if any key does. Other files in the folder are ignored.
    """
    found, faults = defaultdict[tuple[str, str], dict[tuple[UUID, str], Receipt]](dict), dict[str, str]()
    for file in sorted(folder.rglob("*.json")):
        if not file.is_file() or file.stat().st_size > checks.MAX_BYTES:
            continue
        content = files.read_bytes(file, checks.MAX_BYTES, "a receipt")
        if not any(mark in content for mark in _MARKS):
            continue
        held, receipt = checks.verify(content, known)
        wrong = [f"{one.name}: {one.detail}" for one in held if one.holds is False]
        if wrong or receipt is None:
            faults[str(file.relative_to(folder))] = "; ".join(wrong)
            continue
        one = _judged(receipt), receipt.public_key
        found[receipt.problem_hash, receipt.kernel_hash].setdefault(one, receipt)
    return [_kernel([*receipts.values()]) for receipts in found.values()], faults


def _kernel(receipts: list[Receipt]) -> Kernel:
    first, verdicts = receipts[0], [one.verdict for one in receipts]
    label = f"{first.verdict.kernel_label or first.kernel_hash[:8]} for {first.verdict.problem_label or 'a problem'}"
    environments = [one.environment.model_dump(mode="json") if one.environment else {} for one in verdicts]
    devices = [str(one["device"]) for one in environments if one]
    categories = Counter(str(one.category) for one in verdicts)
    spread, apart, differs = None, False, [*_several("category", (one.category for one in verdicts))]
    settings = [dict(flat(one.settings)) for one in receipts]
    for name in sorted({name for one in settings for name in one}):
        differs += _several(f"settings {name}", (json.dumps(one.get(name)) for one in settings))
    for name in sorted({name for one in environments for name in one} - _PLACE):
        differs += _several(name, (one.get(name) for one in environments if one))
    alike = defaultdict[tuple[str, str | None], list[Receipt]](list)
    for one in receipts:
        if one.verdict.runtime is not None and one.verdict.runtime_ms is not None and one.verdict.environment:
            alike[one.verdict.environment.device, one.verdict.timing_basis].append(one)
    for (device, basis), timed in sorted(alike.items(), key=str):
        times = [one.verdict.runtime_ms or 0.0 for one in timed]
        if len(times) > 1 and min(times) > 0:
            spread = max(spread or 0.0, max(times) / min(times) - 1)
        ranges = [(one.low_ms, one.high_ms) for each in timed if (one := each.verdict.runtime) is not None]
        known = [(low, high) for low, high in ranges if low is not None and high is not None]
        if known and max(low for low, _ in known) > min(high for _, high in known):
            apart = True
            shown = (f"{time:.4g} ms by {key_id(one.public_key)[:8]}" for time, one in zip(times, timed, strict=True))
            differs.append(f"times on {device} by the {basis}: {', '.join(shown)}")
    return Kernel(
        first.kernel_hash,
        first.problem_hash,
        label,
        len({*map(_judged, receipts)}),
        len({one.public_key for one in receipts}),
        dict(categories),
        dict(Counter(devices)),
        " or ".join(sorted({"CPU" if one.lane == "cpu" else "GPU" for one in verdicts})),
        spread,
        not apart,
        tuple(differs),
    )


def _judged(receipt: Receipt) -> UUID:
    """Return the evaluation that was judged. It can have several receipts, and reused verdicts."""
    return receipt.verdict.reused_from or receipt.verdict.evaluation_id


def _several(name: str, values: Iterable[object]) -> Iterator[str]:
    """Yield a line if the values differ."""
    counts = Counter(map(str, values))
    if len(counts) > 1:
        yield f"{name}: " + ", ".join(f"{value} ({number})" for value, number in counts.most_common())


def _count(number: int, name: str) -> str:
    return f"{number} {name}{'s' * (number != 1)}"
