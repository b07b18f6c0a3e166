"""Access of CUDA streams to the page of flags, by stream memory operations on pinned host memory.

A stream that waits for a word occupies no multiprocessor. A stream writes a word after all work that was enqueued
before. Both sides of the channel register the same page, each in its own CUDA context.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
from typing import Any

from workers.judge.channel.gpu_memory import CudaCallError, call, driver, hold, let_go

_MAPPED = 2  # cudaHostRegisterMapped
_AT_LEAST = 0  # CU_STREAM_WAIT_VALUE_GEQ
_NO_TIMING = 2  # CU_EVENT_DISABLE_TIMING
_WORD = 8  # bytes of a word of the page


class Semaphores:
    """A page of flags that is registered in this process's CUDA context."""

    def __init__(self, page: memoryview[int]) -> None:
        self._event = ctypes.c_void_p()
        self._page = page  # keeps the page mapped while it is registered
        memory: Any = page.obj
        self._host = host = ctypes.c_void_p(ctypes.addressof(ctypes.c_char.from_buffer(memory)))
        call("cudaHostRegister", host, ctypes.c_size_t(mmap.PAGESIZE), _MAPPED)
        self._is_open = True
        hold(self)
        pointer = ctypes.c_void_p()
        call("cudaHostGetDevicePointer", ctypes.byref(pointer), host, 0)
        self._address = pointer.value or 0

    def close(self) -> None:
        """Unregister the page. No stream must have pending operations on it."""
        let_go(self)
        if self._is_open:
            self._is_open = False
            call("cudaHostUnregister", self._host)

    def wait(self, stream: int, flag: int, number: int) -> None:
        """Enqueue a wait until ``flag`` is at least ``number``."""
        driver("cuStreamWaitValue32_v2", *self._arguments(stream, flag, number), _AT_LEAST)

    def write(self, stream: int, flag: int, number: int) -> None:
        """Enqueue a write of ``number`` to ``flag``. It runs after all earlier work of the stream."""
        driver("cuStreamWriteValue32_v2", *self._arguments(stream, flag, number), 0)

    def drain(self, stream: int) -> None:
        """Make a stream wait for the work so far of all streams of the context.

        Drivers before CUDA 12.5 have no such event. With them this does nothing.
        """
        with contextlib.suppress(AttributeError, CudaCallError):
            if not self._event:
                driver("cuEventCreate", ctypes.byref(self._event), _NO_TIMING)
            context = ctypes.c_void_p()
            driver("cuCtxGetCurrent", ctypes.byref(context))
            driver("cuCtxRecordEvent", context, self._event)
            driver("cuStreamWaitEvent", ctypes.c_void_p(stream), self._event, 0)

    def _arguments(self, stream: int, flag: int, number: int) -> tuple[Any, ...]:
        # A 32-bit operation covers the low half of the word, which suffices for numbers of calls.
        return ctypes.c_void_p(stream), ctypes.c_uint64(self._address + _WORD * flag), ctypes.c_uint32(number)
