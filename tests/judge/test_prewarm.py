"""What Triton does once in every process, done ahead. The driver is made up."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.judge.driver import make_driver
from workers.judge.forkserver import prewarm

#: Has Triton load its library, without a compiler to make another. Its argument: the cache.
_PROGRAM = """
import os, sys
import triton.language
from workers.judge.forkserver import prewarm
os.environ["TRITON_CACHE_DIR"] = sys.argv[1]
prewarm.put(prewarm.prepare())
os.environ["CC"] = "/bin/false"
from triton.backends.nvidia.driver import CudaUtils
from triton.runtime.cache import triton_key
print(callable(CudaUtils().load_binary), triton_key.cache_info().currsize, len(os.listdir("/proc/self/task")))
"""


def test_a_candidate_finds_done_what_each_process_does_once(tmp_path: Path) -> None:
    """The library that Triton looks for is there, its own files are hashed, and no thread is left."""
    done = subprocess.run(
        [sys.executable, "-c", _PROGRAM, str(tmp_path / "cache")],
        env=os.environ | make_driver(tmp_path),
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.stdout, done.returncode) == ("True 1 1\n", 0), done.stderr


def test_without_a_gpu_or_a_compiler_there_is_nothing_to_put(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels are judged all the same."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert prewarm.prepare() == {}
    program = "import triton.language; from workers.judge.forkserver import prewarm; print(prewarm.prepare())"
    done = subprocess.run(
        [sys.executable, "-c", program],
        env=os.environ | make_driver(tmp_path) | {"CC": "/bin/false"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout == "{}\n"
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    prewarm.put({})
    assert not list(tmp_path.rglob("*.so"))
