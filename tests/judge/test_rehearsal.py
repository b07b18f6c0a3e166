"""Triton's launches turned into compilation: its compiler and its autotuner are real, and the driver is made up."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.judge.driver import make_driver

pytestmark = pytest.mark.slow("it compiles Triton kernels")

_KERNELS = """
import triton
import triton.language as tl

@triton.jit
def tile(a_ptr, out_ptr, SIZE: tl.constexpr, STEP: tl.constexpr):
    tl.static_assert(SIZE > 16)
    at = tl.arange(0, SIZE)
    total = tl.dot(tl.load(a_ptr + at[:, None] * SIZE + at[None, :]), tl.load(a_ptr + at[:, None] + at[None, :] * SIZE))
    tl.store(out_ptr + at[:, None] * SIZE + at[None, :], total)

def configs(*sizes):
    return triton.autotune([triton.Config({"SIZE": size, "STEP": 1}) for size in sizes], key=[])

some = configs(16, 128, 32)(tile)
none = configs(16, 128)(tile)
"""
#: Makes series of launches without a GPU, and prints what each raised and the types of launches that were left out.
_PROGRAM = """
import importlib.util, json, sys
import torch
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.driver import CudaDriver, CudaUtils
from triton.runtime.driver import driver
from workers.judge.candidate import warm_up

spec = importlib.util.spec_from_file_location("kernels", sys.argv[1])
kernels = importlib.util.module_from_spec(spec)
spec.loader.exec_module(kernels)
CudaDriver.__init__ = lambda self: None
made = CudaDriver()
made.utils, made.get_current_device, made.get_current_stream = CudaUtils(), lambda: 0, lambda device: 0
made.utils.load_binary = lambda *_: (1, 1, 32, 0, 1024)
made.get_current_target = lambda: GPUTarget("cuda", 90, 32)
made.launcher_cls = lambda *_: None
driver.set_active(made)
a = torch.zeros(256, 256)
for launches in json.loads(sys.argv[2]):
    launched, raised = [], []
    with warm_up.launching_nothing(launched):
        for name, options in launches:
            try:
                getattr(kernels, name)[(1,)](a, a, **options)
            except Exception as error:
                raised.append(type(error).__name__)
    print(json.dumps([raised, launched]))
"""
_LIMIT = "int cuDeviceGetAttribute(int *value, int what, int device) { *value = 32768; return 0; }\n"


def test_a_launch_is_compiled_and_left_out(tmp_path: Path) -> None:
    """Its types are noted. One that cannot be made raises what the real one would.

    An autotuner may have choices that fail, as in its real search: the code after it is compiled.
    """
    kernels = tmp_path / "kernels.py"
    kernels.write_text(_KERNELS)
    types = ["*fp32", "*fp32", "constexpr", "constexpr"]
    tiles = [("tile", {"SIZE": size, "STEP": 1}) for size in (32, 128, 16)]
    done = subprocess.run(
        [sys.executable, "-c", _PROGRAM, str(kernels), json.dumps([tiles, [("some", {})], [("none", {})]])],
        env=os.environ
        | make_driver(tmp_path, cuDeviceGetAttribute=_LIMIT)
        | {"TRITON_CACHE_DIR": str(tmp_path / "cache")},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert list(map(json.loads, done.stdout.splitlines())) == [
        [["OutOfResources", "CompileTimeAssertionFailure"], [types]],
        [[], [types]],
        [[], []],
    ]
