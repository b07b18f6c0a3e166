"""What runs on a host of a fleet: :mod:`~workers.testing.child`, with the sender's folders put in the place of its own.

:mod:`workers.judge.candidate.tester` starts it in the sealed process, where the repository's files lie in a folder.
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

#: The names of what an order holds beside the fields of :class:`Order`: the repository's folder there, the folder in
#: it that pytest was started in, and variables of the environment.
ROOT, STARTED_IN, ENVIRONMENT = "root", "started_in", "environment"


def main(file: str, repository: str, said: str) -> int:
    """Run the tests of an order, and return pytest's exit status.

    Args:
        file: the order's.
        repository: the folder of the repository's files.
        said: the number of the socket on which is said what happens.
    """
    linux.set_name("kq-tests")
    asked = json.loads(Path(file).read_text(encoding="utf-8"))
    root = asked.pop(ROOT)
    asked = moved(asked, root, repository)
    os.environ.update(asked.pop(ENVIRONMENT))
    # Git keeps no empty folder.
    started_in = Path(repository, asked.pop(STARTED_IN))
    started_in.mkdir(parents=True, exist_ok=True)
    os.chdir(started_in)
    asked["searched"] = [path for path in asked["searched"] if Path(path).is_dir()] + sys.path
    asked["paths"] = (repository, root)
    return child.main(Order(**asked, basetemp=str(Path(file).with_name("pytest")), locks=[]), int(said))


def moved(value: Any, there: str, here: str) -> Any:
    """Return a value with a folder in the place of another, wherever a text names it or what lies in it.

    It may stand within an option or a test's name. A path of other folders may hold the same words: ``/app`` is not
    meant by ``backend/app``.
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
