"""`notes.py VERSION [--dated]`: print the notes of a version from CHANGELOG.md.

Each heading must name the readers of its entries. With `--dated` the version needs a date. Otherwise the status is 1.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

TEXT = (Path(__file__).resolve().parent.parent / "CHANGELOG.md").read_text()
READERS = ("kernel authors and agents", "operators", "integrators", "contributors")


def notes(version: str, *, dated: bool) -> str:
    """Return the section of a version."""
    heading, _, section = TEXT.partition(f"## [{version}] - ")[2].partition("\n")
    if not re.fullmatch(r"\d{4}-\d\d-\d\d" if dated else r"\d{4}-\d\d-\d\d|Unreleased", heading):
        sys.exit(f"CHANGELOG.md: `## [{version}] - YEAR-MONTH-DAY` is missing, or has no date")
    section = section.partition("\n## [")[0].strip()
    for group in re.findall(r"^### (.+)$", section, re.MULTILINE):
        if not group.startswith("Upgrading") and not group.endswith(tuple(f"for {one}" for one in READERS)):
            sys.exit(f"CHANGELOG.md: the heading {group!r} names none of {', '.join(READERS)}")
    return section


if __name__ == "__main__":
    print(notes(sys.argv[1], dated="--dated" in sys.argv))
