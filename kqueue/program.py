"""Run a module of this installation: ``python -P program.py MODULE ARGUMENTS``.

``kqueue`` and ``workers`` are imported by path. So no folder of these names in PYTHONPATH takes their place, and a
sealed process, which cannot list the folder that contains them, finds them. A wheel has ``workers`` and ``migrations``
within ``kqueue``, because packages of such names could be another project's. A checkout has them next to it.
"""

from __future__ import annotations

import runpy
import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Final

#: Command prefix that runs a module.
PYTHON: Final = (sys.executable, "-P", __file__)


def folder(package: str) -> Path:
    """Return the folder of the package ``workers`` or ``migrations``."""
    here = Path(__file__).parent
    return inside if (inside := here / package).is_dir() else here.with_name(package)


def load(package: str, place: Path) -> None:
    """Import a package from its folder. Raise an ImportError if another package has its name."""
    if (found := sys.modules.get(package)) is None:
        file = place / "__init__.py"
        spec = spec_from_file_location(package, file, submodule_search_locations=[str(place)])
        assert spec is not None
        assert spec.loader is not None
        sys.modules[package] = found = module_from_spec(spec)
        spec.loader.exec_module(found)
    if not place.samefile(Path(found.__file__ or "/").parent):
        raise ImportError(f"{found.__file__} is loaded as `{package}`, which is a package of kqueue: rename it")


if __name__ == "__main__":
    load("kqueue", Path(__file__).parent)
    load("workers", folder("workers"))
    del sys.argv[0]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
