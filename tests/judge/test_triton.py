"""Triton without a GPU: its compiler and its autotuner are real, and the driver is a fake."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
from triton.backends import nvidia

from workers.judge.candidate import warm_up
from workers.judge.candidate.failures import shortage_of
from workers.judge.forkserver import prewarm

pytestmark = pytest.mark.slow("it compiles Triton kernels and a driver")

#: Start of a program that launches kernels of the file in its first argument on a fake H200.
_DRIVER = """
import dataclasses, importlib.util, json, sys
import torch, triton
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.driver import CudaDriver, CudaUtils
from triton.compiler import ASTSource
from triton.runtime.driver import driver
from workers.judge.candidate import failures, warm_up

spec = importlib.util.spec_from_file_location("kernels", sys.argv[1])
kernels = importlib.util.module_from_spec(spec)
spec.loader.exec_module(kernels)
CudaDriver.__init__ = lambda self: None
made = CudaDriver()
made.utils, made.get_current_device, made.get_current_stream = CudaUtils(), lambda: 0, lambda device: 0
made.get_current_target = lambda: GPUTarget("cuda", 90, 32)
made.launcher_cls = lambda *_: None
driver.set_active(made)
"""


def run(folder: Path, program: str, *arguments: str) -> str:
    """Return the output of a program. Its CUDA driver does nothing but report 32 KiB of shared memory."""
    source = Path(nvidia.__file__).with_name("driver.c").read_text()
    names = set(re.findall(r"\bcu[A-Z]\w+", source)) - {"cuDeviceGetAttribute"}
    text = "".join(f"void {name}(void) {{}}\n" for name in sorted(names))
    text += "int cuDeviceGetAttribute(int *value, int what, int device) { *value = 32768; return 0; }\n"
    command = ["gcc", "-shared", "-fPIC", "-w", "-o", str(folder / "libcuda.so.1"), "-x", "c", "-"]
    subprocess.run(command, input=text, text=True, check=True)
    found = dict.fromkeys(("TRITON_LIBCUDA_PATH", "LD_LIBRARY_PATH"), str(folder)) | {"CUDA_VISIBLE_DEVICES": "0"}
    done = subprocess.run(
        [sys.executable, "-c", program, *arguments],
        env=os.environ | found | {"TRITON_CACHE_DIR": str(folder / "cache")},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


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
#: Program that runs series of launches, and prints the exceptions and the types of skipped launches of each.
_REHEARSE = """
made.utils.load_binary = lambda *_: (1, 1, 32, 0, 1024)
a = torch.zeros(256, 256)
for launches in json.loads(sys.argv[2]):
    launched, raised = [], []
    with warm_up.launching_nothing(launched, kernels, None):
        for name, options in launches:
            try:
                getattr(kernels, name)[(1,)](a, a, **options)
            except Exception as error:
                raised.append(type(error).__name__)
    print(json.dumps([raised, launched]))
"""


#: Program that compiles the gallery's matmul, loads it like a launch, and prints the error.
_LACK = """
types = {"a_ptr": "*fp32", "b_ptr": "*fp32", "c_ptr": "*fp32", "M": "i32", "N": "i32", "K": "i32"}
tiles = {"BM": 128, "BN": 128, "BK": 128}
source = ASTSource(kernels.matmul_kernel, types | dict.fromkeys(tiles, "constexpr"), constexprs=tiles)
built = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_stages": 4, "num_warps": 8})
try:
    built._init_handles()
except Exception as error:
    print(json.dumps([repr(error), dataclasses.asdict(failures.shortage_of(error) or failures.Shortage())]))
"""


def test_a_launch_is_compiled_and_left_out_and_tells_what_it_lacks(tmp_path: Path) -> None:
    """Its types are recorded. An impossible launch raises the real exception, except in a choice of an autotuner."""
    gallery = Path(__file__).parents[2] / "examples" / "kernels" / "bad" / "too_much_shared_memory_triton.py"
    kernels = tmp_path / "kernels.py"
    kernels.write_text(gallery.read_text() + _KERNELS)
    types = ["*fp32", "*fp32", "constexpr", "constexpr"]
    tiles = [("tile", {"SIZE": size, "STEP": 1}) for size in (32, 128, 16)]
    said = run(tmp_path, _DRIVER + _REHEARSE + _LACK, str(kernels), json.dumps([tiles, [("some", {})], [("none", {})]]))
    *rehearsed, (error, lacked) = map(json.loads, said.splitlines())
    assert rehearsed == [[["OutOfResources", "CompileTimeAssertionFailure"], [types]], [[], [types]], [[], []]]
    assert "OutOfResources" in error
    assert lacked.pop("required") > 232448
    assert lacked == {
        "resource": "shared memory",
        "limit": 32768,
        "kernel": "matmul_kernel",
        "settings": "BM=128, BN=128, BK=128, num_warps=8, num_stages=4, num_ctas=1",
    }
    for fields in ({}, {"name": "x", "required": "many", "limit": 1}, {"name": 1, "required": -1, "limit": 2**70}):
        other = ValueError()
        other.__dict__.update(fields)
        assert shortage_of(other) is None


#: Program that loads Triton's library without a compiler to build another one.
_ENQUEUED = """
import os, sys
import triton.language
from workers.judge.forkserver import prewarm
prewarm.put(prewarm.prepare())
os.environ["CC"] = "/bin/false"
from triton.backends.nvidia.driver import CudaUtils
from triton.runtime.cache import triton_key
print(callable(CudaUtils().load_binary), triton_key.cache_info().currsize, len(os.listdir("/proc/self/task")))
"""


def test_a_candidate_finds_done_what_each_process_does_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton's library is loaded, its files are hashed, and no thread remains. Without a GPU nothing is prepared."""
    assert run(tmp_path, _ENQUEUED) == "True 1 1\n"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert prewarm.prepare() == {}


#: Module whose model keeps what a first call makes, in each place where one can keep it.
_KEEPING = """
import functools, torch
TABLE, CACHE, ORDER, NUMBERS = None, {}, [], set()
class Helper:
    kept = None
@functools.cache
def cached(x): return x
def default(x, cache={}): cache[x] = x
def memo(cache): return lambda x: cache.setdefault(x, x)
get = memo({})
class Slotted:
    __slots__ = ("kept",)
class ModelNew(torch.nn.Module):
    SHARED = {}
    def __init__(self):
        super().__init__()
        self.helper, self.graphs, self.slotted, self.slotted.kept = Helper(), {"inner": {}}, Slotted(), 0
        self.register_buffer("grown", torch.empty(0))
    def forward(self):
        global TABLE
        TABLE = CACHE["a"] = self.packed = ModelNew.LATE = self.helper.kept = default.count = cached(1)
        self.graphs["inner"]["b"] = self.SHARED["c"] = ORDER.append(NUMBERS.add(default(1)))
        self.register_buffer("late", torch.ones(1))
        self.grown, self.slotted.kept = torch.ones(2), get(1)
    def state(self):
        kept = TABLE, CACHE, ORDER, NUMBERS, cached.cache_info().currsize, default.__defaults__, vars(default)
        own = vars(self), vars(self.helper), self.slotted.kept, self.SHARED, hasattr(ModelNew, "LATE")
        return repr((kept, own, get.__closure__[0].cell_contents))
"""


def test_a_call_that_launches_nothing_leaves_no_state() -> None:
    """A packed weight or a CUDA graph of such a call lacks the work of its launches."""
    module = ModuleType("keeping")
    exec(_KEEPING, vars(module))
    model = module.ModelNew()
    before = model.state()
    with warm_up.launching_nothing([], module, model):
        model()
        assert model.state() != before
    assert model.state() == before
    model()
    assert model.late == model.packed == 1
