"""What a launch lacked, of Triton's own error: its compiler is real, and the driver is made up."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.judge.driver import make_driver
from workers.judge.candidate import shortage

pytestmark = pytest.mark.slow("compiles C++")

#: Compiles the gallery's matmul for an H200, loads it as a launch does, and prints what the error says.
_PROGRAM = """
import dataclasses, importlib.util, json, sys
import triton
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.driver import CudaDriver
from triton.compiler import ASTSource
from triton.runtime.driver import driver
from workers.judge.candidate import shortage

spec = importlib.util.spec_from_file_location("kernel", sys.argv[1])
module = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)
CudaDriver.__init__ = lambda self: None
made = CudaDriver()
from triton.backends.nvidia.driver import CudaUtils
made.utils, made.get_current_device = CudaUtils(), lambda: 0
from triton.backends.nvidia.driver import CudaLauncher
made.launcher_cls = lambda *_: None
driver.set_active(made)
types = {"a_ptr": "*fp32", "b_ptr": "*fp32", "c_ptr": "*fp32", "M": "i32", "N": "i32", "K": "i32"}
tiles = {"BM": 128, "BN": 128, "BK": 128}
source = ASTSource(module.matmul_kernel, types | dict.fromkeys(tiles, "constexpr"), constexprs=tiles)
built = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_stages": 4, "num_warps": 8})
try:
    built._init_handles()
except Exception as error:
    print(json.dumps([repr(error), dataclasses.asdict(shortage.of(error) or shortage.Shortage())]))
"""
_LIMIT = "int cuDeviceGetAttribute(int *value, int what, int device) { *value = 232448; return 0; }\n"


def test_numbers_name_and_constants_come_from_the_launch(tmp_path: Path) -> None:
    """How much is asked for and there is, of which kernel, with which tiles, stages and warps."""
    kernel = Path(__file__).parents[2] / "examples" / "kernels" / "bad" / "too_much_shared_memory_triton.py"
    done = subprocess.run(
        [sys.executable, "-c", _PROGRAM, str(kernel)],
        env=os.environ
        | make_driver(tmp_path, cuDeviceGetAttribute=_LIMIT)
        | {"TRITON_CACHE_DIR": str(tmp_path / "cache")},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    error, said = json.loads(done.stdout)
    assert "OutOfResources" in error
    assert said.pop("required") > 232448
    assert said == {
        "resource": "shared memory",
        "limit": 232448,
        "kernel": "matmul_kernel",
        "settings": "BM=128, BN=128, BK=128, num_warps=8, num_stages=4, num_ctas=1",
    }


@pytest.mark.parametrize(
    "fields", [{}, {"name": "x", "required": "many", "limit": 1}, {"name": 1, "required": -1, "limit": 2**70}]
)
def test_what_is_no_such_error_says_nothing(fields: dict[str, object]) -> None:
    """A kernel may raise what it likes under that name."""
    error = ValueError()
    error.__dict__.update(fields)
    assert shortage.of(error) is None
