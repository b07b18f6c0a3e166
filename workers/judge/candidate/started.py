"""Command lines for Python programs of the project that run in a sealed process, in a fresh interpreter."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Final

#: Bootstrap script. It imports packages by path, because the sealed process cannot list the folder that contains them.
_PROGRAM: Final = """
import sys
from importlib import import_module
from importlib.util import module_from_spec, spec_from_file_location
folder, module, *sys.argv[1:] = sys.argv[1:]
for name in ("kqueue", "workers"):
    place = f"{folder}/{name}"
    spec = spec_from_file_location(name, f"{place}/__init__.py", submodule_search_locations=[place])
    sys.modules[name] = module_from_spec(spec)
    spec.loader.exec_module(sys.modules[name])
sys.exit(import_module(module).main(*sys.argv[1:]))
"""


def words(module: str, *arguments: str) -> list[str]:
    """Return the command line of a program that runs ``main`` of a module and exits with its result."""
    return [sys.executable, "-P", "-c", _PROGRAM, str(Path(__file__).parents[3]), module, *arguments]


def watching(sanitizer: str, log: str) -> list[str]:
    """Return the prefix of a command line that runs a program under compute-sanitizer with a log file."""
    return [sanitizer, "--tool", "memcheck", "--log-file", log]
