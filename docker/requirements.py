"""Print the requirements of kqueue with some extras, one per line: `requirements.py PYPROJECT EXTRA,EXTRA`.

It exits with a message if an extra does not exist.
"""

from __future__ import annotations

import re
import sys
import tomllib
from pathlib import Path


def requirements(pyproject: Path, extras: list[str]) -> list[str]:
    """Return the requirements, including extras that other extras include."""
    project = tomllib.loads(pyproject.read_text())["project"]
    wanted: list[str] = list(project["dependencies"])
    seen: set[str] = set()
    while extras:
        extra, *extras = extras
        if extra in seen:
            continue
        seen.add(extra)
        if extra not in project["optional-dependencies"]:
            sys.exit(f"kqueue has no extra {extra!r}")
        for requirement in project["optional-dependencies"][extra]:
            included = re.match(rf"{project['name']}\[([^]]*)\]", requirement)
            if included:
                extras += included[1].replace(" ", "").split(",")
            else:
                wanted.append(requirement)
    return wanted


if __name__ == "__main__":
    print(*requirements(Path(sys.argv[1]), sys.argv[2].split(",")), sep="\n")  # noqa: T201
