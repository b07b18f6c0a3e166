"""A Python program of ours in a sealed process, by a fresh interpreter."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Final

#: The folder that our packages lie in may not be listed, so that nothing there is found by name.
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
    """Return the words of the program that calls ``main`` of a module; what that returns is its exit status."""
    return [sys.executable, "-P", "-c", _PROGRAM, str(Path(__file__).parents[3]), module, *arguments]


def watching(sanitizer: str, log: str) -> list[str]:
    """Return the words before a program's with which compute-sanitizer watches it, and writes to a file."""
    return [sanitizer, "--tool", "memcheck", "--log-file", log]
