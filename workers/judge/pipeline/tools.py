"""The tools that each backend needs. A missing tool is the fleet's failure, never the kernel's."""

from __future__ import annotations

import importlib.util
import os
import shutil
import sysconfig
from pathlib import Path

import torch

from kqueue import backends
from kqueue.backends import Backend, installed
from kqueue.categories import Category
from kqueue.contract import Phase
from workers.judge.ending import EvaluationEnded


def require(backend: str) -> None:
    """Check that this worker has the tools for a backend.

    Raises:
        EvaluationEnded: ``judge_error``, with the missing tools and how to install them.
    """
    lacks = missing(backend)
    if lacks:
        raise EvaluationEnded(
            Category.JUDGE_ERROR,
            f"this worker cannot judge {backend}: {'; '.join(lacks)}",
            Phase.PREPARE,
            missing=lacks,
        )


def missing(name: str) -> list[str]:
    """Return the tools that a backend lacks here, each with a remedy."""
    backend = backends.find(name)
    lacks = [f"the package {module} is not installed" for module in backend.modules if not _is_there(backend, module)]
    if "c++" in backend.compilers and shutil.which(os.environ.get("CXX", "c++")) is None:
        lacks.append("there is no C++ compiler: install g++, or set CXX")
    if backend.extensions:
        if importlib.util.find_spec("ninja") is None and shutil.which("ninja") is None:
            lacks.append("ninja is not installed")
        if not Path(sysconfig.get_path("include"), "Python.h").exists():
            lacks.append("Python's headers are not installed (on Debian and Ubuntu: python3-dev)")
    if "nvcc" in backend.compilers:
        if torch.version.cuda is None:
            lacks.append("torch is a build without CUDA")
        if not _is_in_toolkit("nvcc"):
            lacks.append("there is no nvcc: install the CUDA toolkit, or set CUDA_HOME to its directory")
    if "tileiras" in backend.compilers and not (_is_in_toolkit("tileiras") or installed("nvidia-cuda-tileiras")):
        lacks.append("there is no tileiras: install cuda-tile[tileiras], or the CUDA toolkit 13.1 or newer")
    return lacks


def _is_in_toolkit(program: str) -> bool:
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    return shutil.which(program) is not None or bool(home and shutil.which(f"{home}/bin/{program}"))


def _is_there(backend: Backend, module: str) -> bool:
    """Return whether a module can be imported, without an import of the packages that contain it."""
    top, dot, _ = module.partition(".")
    return importlib.util.find_spec(top) is not None and (not dot or any(map(installed, backend.distributions)))
