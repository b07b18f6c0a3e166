"""The program of tests on a fleet's host: :mod:`~workers.testing.child`, with the sender's paths translated.

:mod:`workers.judge.candidate.tester` starts it in the sealed process, which has the repository's files in a folder.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

from kqueue import folders
from workers.judge.host import linux
from workers.testing import child
from workers.testing.groups import ENVIRONMENT, ROOT, STARTED_IN, Order, moved


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
    order["searched"] = [path for path in order["searched"] if not folders.fault(path)] + sys.path
    order["paths"] = (repository, root)
    return child.main(Order(**order, basetemp=str(Path(file).with_name("pytest")), locks=[]), int(said))


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
