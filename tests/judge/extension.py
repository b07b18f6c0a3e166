"""Kernels that compile an extension when they are imported."""

from __future__ import annotations

from kqueue.contract import Outcome, Request, Settings, Timing
from tests.judge.rig import Rig
from tests.judge.sources import problem

PROBLEM = problem("x: x * 2") + "def get_init_inputs():\n    return []\n"
#: Kernel that compiles a library in a second, because it needs none of torch's headers. The library returns a number.
KERNEL = '''
import os, sys, time
from pathlib import Path
import torch
from torch.utils import cpp_extension

WHO = Path("/proc/self/comm").read_text().strip().removeprefix("kq-")
SOURCE = """
#include <Python.h>
static PyObject* number(PyObject*, PyObject*) {{ return PyLong_FromLong({number}); }}
static PyMethodDef methods[] = {{{{"number", number, METH_NOARGS, ""}}, {{nullptr, nullptr, 0, nullptr}}}};
static PyModuleDef definition = {{PyModuleDef_HEAD_INIT, "numbers", "", -1, methods}};
extern "C" PyObject* PyInit_numbers() {{ return PyModule_Create(&definition); }}
"""
def build(source=SOURCE, name="numbers"):
    path = Path("library.cpp")
    path.write_text(source)
    return cpp_extension.load(name, [str(path)], extra_cflags=["-O0"])
def made():
    [place] = Path("made").iterdir()
    return place
{top}
numbers = build()
{after}
class ModelNew(torch.nn.Module):
    def forward(self, x):
        return x * numbers.number()
'''
QUICK = Settings(checks=1, timing=Timing().off())


def kernel(top: str = "", after: str = "", number: int = 2) -> str:
    """Return a kernel that compiles when it is imported, with statements before and after."""
    return KERNEL.format(top=top, after=after, number=number)


def judge(rig: Rig, source: str, settings: Settings = QUICK) -> Outcome:
    """Return the outcome of a kernel, and assert that the judge survived."""
    outcome = rig.judge(Request(problem=PROBLEM, kernel=source, backend="cpp", settings=settings))
    assert isinstance(outcome, Outcome), f"the judge died: {outcome}"
    return outcome


def told(outcome: Outcome, who: str) -> list[str]:
    """Return the lines that a process of the kernel printed after its ``WHO``."""
    return [line.removeprefix(who + ": ") for line in outcome.log.splitlines() if line.startswith(who + ": ")]


TELL = """
objects = list(Path(os.environ["TORCH_EXTENSIONS_DIR"]).rglob("*.o"))
print(f"{WHO}: {len(objects)} compiled, uid {os.getuid()}, GPU {os.environ.get('CUDA_VISIBLE_DEVICES')!r}", flush=True)
"""
OTHER = """
def other_library(number):
    import subprocess, sysconfig
    Path("other.cpp").write_text(SOURCE.replace("(2)", f"({number})"))
    include = "-I" + sysconfig.get_path("include")
    subprocess.run(["c++", "-shared", "-fPIC", include, "other.cpp", "-o", "other.so"], check=True)
    return Path("other.so")
"""
