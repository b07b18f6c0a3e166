"""Triton's library for the driver: compiled once for a fork server, and found by candidates. The driver is made up."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from triton.backends import nvidia

from workers.judge.keeper import stubs

#: Has Triton load its library, without a compiler to make another. Its argument: the cache.
_PROGRAM = """
import os, sys
import triton.language
from workers.judge.keeper import stubs
os.environ["TRITON_CACHE_DIR"] = sys.argv[1]
stubs.put(stubs.build())
os.environ["CC"] = "/bin/false"
from triton.backends.nvidia.driver import CudaUtils
print(callable(CudaUtils().load_binary))
"""


def _make_driver(folder: Path) -> dict[str, str]:
    """Make a driver that has all functions and does nothing; return the variables by which it is found."""
    source = Path(nvidia.__file__).with_name("driver.c").read_text()
    functions = "".join(f"void {name}(void) {{}}\n" for name in sorted(set(re.findall(r"\bcu[A-Z]\w+", source))))
    command = ["gcc", "-shared", "-fPIC", "-w", "-o", str(folder / "libcuda.so.1"), "-x", "c", "-"]
    subprocess.run(command, input=functions, text=True, check=True)
    return {"CUDA_VISIBLE_DEVICES": "0", "TRITON_LIBCUDA_PATH": str(folder), "LD_LIBRARY_PATH": str(folder)}


def test_a_candidate_compiles_nothing_to_talk_to_the_driver(tmp_path: Path) -> None:
    """What the fork server had compiled is what Triton looks for there."""
    done = subprocess.run(
        [sys.executable, "-c", _PROGRAM, str(tmp_path / "cache")],
        env=os.environ | _make_driver(tmp_path),
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.stdout, done.returncode) == ("True\n", 0), done.stderr


def test_without_a_gpu_or_a_compiler_there_is_nothing_to_put(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels are judged all the same."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert stubs.build() == {}
    program = "import triton.language; from workers.judge.keeper import stubs; print(stubs.build())"
    done = subprocess.run(
        [sys.executable, "-c", program],
        env=os.environ | _make_driver(tmp_path) | {"CC": "/bin/false"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout == "{}\n"
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    stubs.put({})
    assert not list(tmp_path.rglob("*.so"))
