"""The program of tests on a fleet's host: :mod:`~workers.testing.child`, with the sender's paths translated.

:mod:`workers.judge.candidate.tester` starts it in the sealed process, which has the repository's files in a folder.
"""

from __future__ import annotations

import json
import os
import re
import sys
from pathlib import Path
from typing import Any, cast

from workers.judge.host import linux
from workers.testing import child
from workers.testing.groups import Order

#: Keys of an order in addition to the fields of :class:`Order`: the repository's folder on the sender's host, the
#: relative folder in which pytest was started, and environment variables.
ROOT, STARTED_IN, ENVIRONMENT = "root", "started_in", "environment"


def main(file: str, repository: str, said: str) -> int:
    """Run the tests of an order's file in a repository, report on the descriptor ``said``, return the exit status."""
    linux.set_name("kq-tests")
    order = json.loads(Path(file).read_text(encoding="utf-8"))
    root = order.pop(ROOT)
    order = moved(order, root, repository)
    os.environ.update(order.pop(ENVIRONMENT))
    # The folder is missing if it has no files, because Git stores no empty folders.
    started_in = Path(repository, order.pop(STARTED_IN))
    started_in.mkdir(parents=True, exist_ok=True)
    os.chdir(started_in)
    order["searched"] = [path for path in order["searched"] if Path(path).is_dir()] + sys.path
    order["paths"] = (repository, root)
    return child.main(Order(**order, basetemp=str(Path(file).with_name("pytest")), locks=[]), int(said))


def moved(value: Any, there: str, here: str) -> Any:
    """Return a value with the folder ``there`` replaced by ``here`` in all texts, also within options and test names.

    A longer path with the same components does not match: ``/app`` is not replaced in ``backend/app``.
    """
    match value:
        case str():
            return re.sub(rf"(?<![\w./]){re.escape(there)}(?![\w.-])", lambda _: here, value)
        case dict():
            return {name: moved(inner, there, here) for name, inner in cast("dict[str, Any]", value).items()}
        case list():
            return [moved(inner, there, here) for inner in cast("list[Any]", value)]
        case _:
            return value
