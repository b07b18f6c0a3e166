"""Compare the lines of Python in each room with its budget in `scripts/lines.txt`: `python scripts/lines.py`.

A room is a folder with its subfolders, without those that are rooms themselves. `--write` lowers all budgets to the
present numbers. A commit that raises a budget changes nothing else, and its body gives the reason.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Final

_ROOT: Final = Path(__file__).resolve().parent.parent
_TABLE: Final = Path(__file__).with_suffix(".txt")
#: The line with the sum of all rooms of the product, and the rooms that it leaves out.
_SUM: Final = "product"
_APART: Final = frozenset({"tests", "benchmarks", "examples", "scripts", "docker"})


def main() -> int:
    """Print each room that exceeds its budget, and return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="lower the budgets to the present numbers")
    budgets = {room: int(lines) for room, lines in map(str.split, _TABLE.read_text().splitlines())}
    found = count(_ROOT, budgets.keys() - {_SUM})
    found[_SUM] = sum(lines for room, lines in found.items() if room not in _APART)
    if parser.parse_args().write:
        lowered = {room: min(budget, found[room]) for room, budget in budgets.items()}
        _TABLE.write_text("".join(f"{room:<30}{lines:>7}\n" for room, lines in lowered.items()))
        return 0
    over = {room: lines for room, lines in found.items() if lines > budgets.get(room, 0)}
    for room, lines in over.items():
        print(f"{room}: {lines} lines exceed the budget of {budgets.get(room, 0)} in scripts/{_TABLE.name}")
    return int(bool(over))


def count(root: Path, rooms: set[str]) -> Counter[str]:
    """Return the lines of Python of each room in a repository. A file without a room counts for its top folder."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "*.py"]
    listed = subprocess.run(command, cwd=root, capture_output=True, text=True, check=True).stdout.splitlines()
    lines: Counter[str] = Counter()
    for name in filter(lambda name: (root / name).exists(), listed):
        folders = [str(folder) for folder in Path(name).parents]
        lines[next((folder for folder in folders if folder in rooms), Path(name).parts[0])] += len(
            (root / name).read_text().splitlines()
        )
    return lines


if __name__ == "__main__":
    sys.exit(main())
