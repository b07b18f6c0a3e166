"""Shared GPU memory cannot be forged: a sealed process opens only the allocations that it received.

Problems fill their memory with a pattern. A candidate opens every handle that it can forge, and searches for that.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from kqueue.categories import Category
from kqueue.contract import Deadlines, Limits, Outcome, Request, Settings, Timing
from tests.judge.rig import Rig

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(900)]

#: Word that fills the reference's answer, half of the inputs and the weights.
MARK = 0x5A17C0DE
PROBLEM = f"""
import torch
class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("mark", torch.full((1 << 20,), {MARK}, dtype=torch.int32))
    def forward(self, x):
        return self.mark[: x.numel()] + (x.to(torch.int32) * 0)
def get_inputs():
    return [torch.randint(1, 9, (1 << 18,), dtype=torch.int32)]
"""
_SEARCH = """
import ctypes, mmap, os, struct
import torch

MARK = MARK_WORD
MARK_BYTES = struct.pack("<I", MARK)
driver = ctypes.CDLL("libcuda.so.1")
runtime = next(
    ctypes.CDLL(line.split()[-1]) for line in open("/proc/self/maps") if "libcudart.so" in line
)

def holds_the_mark(pointer, nbytes):
    page = (ctypes.c_uint32 * 4096)()
    for at in range(0, nbytes, 1 << 20):
        size = min(ctypes.sizeof(page), nbytes - at)
        if runtime.cudaMemcpy(page, ctypes.c_void_p(pointer + at), ctypes.c_size_t(size), 2):
            runtime.cudaGetLastError()
            return False
        if MARK in page[: size // 4]:
            return True
    return False

def size_of(pointer):
    base, size = ctypes.c_uint64(), ctypes.c_size_t()
    if driver.cuMemGetAddressRange_v2(ctypes.byref(base), ctypes.byref(size), ctypes.c_uint64(pointer)):
        return 1 << 16
    return size.value

class Handle(ctypes.Structure):
    _fields_ = [("words", ctypes.c_uint32 * 16)]
"""
_REMAP = (
    _SEARCH
    + """
from workers.judge.channel import gpu_memory

SIZES = [2 << 20, 4 << 20, 8 << 20, 64 << 20, 1 << 30]
kept = []
_import = gpu_memory.import_handle

def remembering(descriptor):
    kept.append(os.dup(descriptor))
    return _import(descriptor)

gpu_memory.import_handle = remembering

class Access(ctypes.Structure):
    _fields_ = [("type", ctypes.c_int), ("id", ctypes.c_int), ("flags", ctypes.c_int)]

def forge():
    assert kept, "no descriptor arrived"
    many = 0
    for descriptor in kept:
        handle = ctypes.c_uint64()
        if driver.cuMemImportFromShareableHandle(ctypes.byref(handle), ctypes.c_void_p(descriptor), 1):
            continue
        for size in SIZES:
            for offset in (0, 1 << 16, 2 << 20, 4 << 20, 1 << 30, 1 << 40):
                many += mapped(handle, size, offset)
    for number in range(3, 256):
        for distance in (-2, -1, 1, 2, 1 << 16):
            handle = ctypes.c_uint64()
            if driver.cuMemImportFromShareableHandle(ctypes.byref(handle), ctypes.c_void_p(number + distance), 1) == 0:
                many += mapped(handle, 2 << 20, 0)
    return f"{many} mapped, none of them with the mark"

def mapped(handle, size, offset):
    reserved = ctypes.c_uint64()
    none = ctypes.c_uint64(0)
    if driver.cuMemAddressReserve(ctypes.byref(reserved), ctypes.c_size_t(size), ctypes.c_size_t(0), none, none):
        return False
    took = driver.cuMemMap(reserved, ctypes.c_size_t(size), ctypes.c_size_t(offset), handle, ctypes.c_uint64(0)) == 0
    if took:
        access = Access(1, 0, 1)
        if driver.cuMemSetAccess(reserved, ctypes.c_size_t(size), ctypes.byref(access), ctypes.c_size_t(1)) == 0:
            if holds_the_mark(reserved.value, size):
                raise SystemError(f"ATTACK SUCCEEDED: the mark, at {offset} in {size}")
        driver.cuMemUnmap(reserved, ctypes.c_size_t(size))
    driver.cuMemAddressFree(reserved, ctypes.c_size_t(size))
    return took
"""
)
#: Kernel that finds the mark in its own memory and answers correctly, which proves that the search works.
_FINDS_ITS_OWN = (
    _SEARCH
    + """
def forge():
    own = torch.full((1 << 20,), MARK, dtype=torch.int32, device="cuda")
    assert holds_the_mark(own.data_ptr(), own.nbytes)
    return "found in its own memory"
"""
)
_KERNEL = """
class ModelNew(torch.nn.Module):
    said = False
    def forward(self, x):
        if not ModelNew.said:
            ModelNew.said = True
            print("SEARCHED:", forge(), flush=True)
        return torch.full((x.numel(),), MARK, dtype=torch.int32, device=x.device)
"""


def judge(rig: Rig, kernel: str = "", problem: str = PROBLEM) -> Outcome:
    deadlines = Deadlines(reference_s=20, load_s=60, construct_s=60, check_s=600, time_s=20)
    settings = Settings(checks=2, timing=Timing().off(), deadlines=deadlines, limits=Limits(output_bytes=1 << 20))
    source = (kernel or "import torch\nMARK = MARK_WORD\nforge = str\n") + _KERNEL
    source = source.replace("MARK_WORD", hex(MARK))
    return rig.judge(Request(problem=problem, kernel=source, backend="torch", settings=settings))


@pytest.mark.parametrize("attack", [_REMAP, _FINDS_ITS_OWN], ids=["descriptors", "control"])
def test_nothing_that_is_not_shared_can_be_opened(gpu_rig: Rig, attack: str) -> None:
    outcome = judge(gpu_rig, attack)
    assert "ATTACK SUCCEEDED" not in outcome.model_dump_json()
    assert outcome.category is Category.PASSED, outcome
    assert "SEARCHED:" in outcome.log


HOSTILE = {
    "illegal access": (
        "torch.empty(4, device='cuda')[torch.tensor([1 << 40], device='cuda')]; torch.cuda.synchronize()",
        Category.REFERENCE_ERROR,
    ),
    "memory past torch": (
        (
            "import ctypes\n"
            "        rt = next(ctypes.CDLL(l.split()[-1]) for l in open('/proc/self/maps') if 'libcudart.so' in l)\n"
            "        while rt.cudaMalloc(ctypes.byref(ctypes.c_void_p()), ctypes.c_size_t(1 << 28)) == 0: pass\n"
            "        torch.empty(1 << 32, device='cuda')"
        ),
        Category.REFERENCE_ERROR,
    ),
    "endless kernel": ("torch.cuda._sleep(1 << 60)", Category.REFERENCE_TIMEOUT),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_problem_that_breaks_its_context_harms_nobody_else(gpu_rig: Rig, name: str) -> None:
    hostile, expected = HOSTILE[name]
    problem = PROBLEM.replace("        return self.mark", f"        {hostile}\n        return self.mark")
    outcome = judge(gpu_rig, problem=problem)
    assert outcome.category is expected, outcome
    assert gpu_rig.backend.doubts == []
    assert judge(gpu_rig).category is Category.PASSED


def test_no_process_of_an_evaluation_exports_by_ipc() -> None:
    """No code of an evaluation requests a legacy IPC handle, because that would export more than one allocation."""
    import workers

    for file in Path(workers.__path__[0]).rglob("*.py"):
        assert "cudaIpcGetMemHandle" not in file.read_text(), file
