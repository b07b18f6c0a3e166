"""The environment of processes that run foreign code, and its folders.

A user can set anything in variables, so unusable folders are skipped.
"""

from __future__ import annotations

import errno
import os
import stat
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from kqueue.backends import registered

#: Variables with a folder or a list of folders, in which programs and libraries are searched.
VARIABLES: Final = ("PATH", "LD_LIBRARY_PATH", "CUDA_HOME", "CUDA_PATH")

#: Variables that workers, fork servers, and so all sealed processes inherit.
_PASSED: Final = (
    *("CUDA_DEVICE_ORDER", "CUDA_VISIBLE_DEVICES", "NVIDIA_VISIBLE_DEVICES"),
    *("CUDA_HOME", "CUDA_PATH", "CC", "CXX", "MAX_JOBS", "TORCH_CUDA_ARCH_LIST", "TRITON_INTERPRET"),
    *("MKL_NUM_THREADS", "OMP_NUM_THREADS", "OMP_WAIT_POLICY"),
    *("LD_LIBRARY_PATH", "PATH", "PYTHONPATH", "LANG", "LC_ALL", "TMPDIR", "TZ", "KQUEUE_PRELOAD"),
)
_SET: Final = {
    # Makes torch query NVML instead of CUDA for a GPU. A process that has initialised CUDA cannot fork.
    "PYTORCH_NVML_BASED_CUDA_CHECK": "1",
    # Expandable segments can be shared by descriptor (workers.judge.channel.gpu_memory). Segments of the default size,
    # 20 MiB, would be hundreds for some gigabytes, and each must be mapped in both processes.
    "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True,large_segment_size_mb:64",
    # A pool of compiler processes would outlive the forward that started it.
    "TORCHINDUCTOR_COMPILE_THREADS": "1",
    # A candidate's uid has no entry in the list of users, and torch's compiler needs a user name.
    "USER": "candidate",
    "PYTHONDONTWRITEBYTECODE": "1",
    "PYTHONUNBUFFERED": "1",
}


def fault(entry: str | Path) -> str:
    """Return the reason why nothing can be found in a folder, or an empty string."""
    if not Path(entry).is_absolute():
        return "not an absolute path"
    try:
        is_folder = stat.S_ISDIR(Path(entry).stat().st_mode)
    except OSError as error:
        return os.strerror(error.errno or errno.EIO)
    if not is_folder:
        return os.strerror(errno.ENOTDIR)
    return "" if os.access(entry, os.X_OK) else os.strerror(errno.EACCES)


def usable(entries: str) -> str:
    """Return a variable's list with each usable folder once."""
    return os.pathsep.join(dict.fromkeys(entry for entry in entries.split(os.pathsep) if not fault(entry)))


def clean_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of a process that forks sealed processes, or starts one that does. It has no secrets."""
    # The interpreter's directory comes first, because tools such as ninja are installed there.
    path = os.pathsep.join([str(Path(sys.executable).parent), environment.get("PATH", os.defpath)])
    passed = {name: environment[name] for name in _PASSED if name in environment} | {"PATH": path}
    found = {name: usable(passed.pop(name)) for name in VARIABLES if name in passed}
    of_backends = dict(pair for backend in registered().values() for pair in backend.environment)
    return of_backends | passed | {name: value for name, value in found.items() if value} | _SET
