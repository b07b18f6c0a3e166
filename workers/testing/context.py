"""Checks of this process's CUDA contexts through the driver, whichever library opened them.

An error such as an illegal address is sticky: every later call in the context returns it. torch, CuPy, Triton and the
runtime share the device's primary context. Nothing here loads the driver or opens a context.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import sys
from collections.abc import Iterable
from types import ModuleType
from typing import Any, Final

_DRIVER: Final = "libcuda.so.1"


def fault() -> str:
    """Wait for all work on this process's GPUs, and return a context's error, or an empty text."""
    driver = _loaded()
    if driver is None:
        return ""
    count = ctypes.c_int()
    if driver.cuDeviceGetCount(ctypes.byref(count)):
        return ""  # the driver is not initialized
    for number in range(count.value):
        flags, active = ctypes.c_uint(), ctypes.c_int()
        if driver.cuDevicePrimaryCtxGetState(number, ctypes.byref(flags), ctypes.byref(active)) or not active.value:
            continue
        if code := _synchronized(driver, number):
            name = ctypes.c_char_p()
            driver.cuGetErrorName(code, ctypes.byref(name))
            return f"{(name.value or b'error').decode()} ({code})"
    return ""


def unload(modules: Iterable[ModuleType]) -> str:
    """Free the objects of test modules, unload CuPy's compiled kernels, and return an error of that, or an empty text.

    Otherwise such errors would arise while Python ends, which ignores them.
    """
    if _loaded() is None:
        return ""
    failed: list[str] = []

    def note(unraisable: Any) -> None:
        name = type(unraisable.exc_value).__name__
        if name.startswith("CUDA"):
            failed.append(f"{name}: {unraisable.exc_value}")

    before, sys.unraisablehook = sys.unraisablehook, note
    try:
        cupy: Any = sys.modules.get("cupy")
        if cupy is not None:
            with contextlib.suppress(AttributeError):  # a cupy whose import failed
                cupy.clear_memo()
        for module in modules:
            vars(module).clear()
        gc.collect()
    finally:
        sys.unraisablehook = before
    return fault() or (failed[0] if failed else "")


def _loaded() -> Any:
    """Return the driver's library if this process has loaded it, else None."""
    try:
        return ctypes.CDLL(_DRIVER, mode=os.RTLD_NOW | os.RTLD_NOLOAD)
    except OSError:
        return None


def _synchronized(driver: Any, number: int) -> int:
    """Return the error of a device's primary context, or 0."""
    context = ctypes.c_void_p()
    if code := driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), number):
        return code
    try:
        if code := driver.cuCtxPushCurrent_v2(context):
            return code
        try:
            return driver.cuCtxSynchronize()
        finally:
            driver.cuCtxPopCurrent_v2(ctypes.byref(ctypes.c_void_p()))
    finally:
        driver.cuDevicePrimaryCtxRelease_v2(number)
