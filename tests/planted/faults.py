"""Faults of a few lines, each of which breaks one promise, and the tests of the gate that should find it.

`faults.txt` has a block for each: its name in lower case and the promise, the file to change, arguments for pytest (the
test most likely to fail first), and text that stands in the file once, with its replacement, as in a diff. Without a
replacement whole lines are removed.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple


class Fault(NamedTuple):
    """A fault to plant: ``before`` becomes ``after`` in a file."""

    name: str
    promise: str
    path: str
    before: str
    after: str
    tests: tuple[str, ...]


def _read(text: str) -> Iterator[Fault]:
    for block in text.split("\n\n"):
        if block.startswith("#"):
            continue
        title, path, tests, *changes = block.splitlines()
        before, after = ([line[1:] for line in changes if line[0] == sign] for sign in "-+")
        end = "" if after else "\n"
        name, _, promise = title.partition(": ")
        yield Fault(name, promise, path, "\n".join(before) + end, "\n".join(after), tuple(tests.split()))


FAULTS = tuple(_read(Path(__file__).with_suffix(".txt").read_text(encoding="utf-8")))
