"""Record with CUPTI which kernels a call runs on the GPU, and for how long.

The recording runs in the candidate's process, where the kernel's code can forge it. So it is only a label, never proof
of innocence. CUPTI's activity records are read directly, which takes 22 ms to start. Torch's profiler takes 3.5 s
(H200, torch 2.11). Record only after all timing, because each later launch takes about 1 us more until the process
ends.
"""

from __future__ import annotations

import ctypes
import struct
import time
from collections.abc import Callable
from functools import cache
from typing import Any, Final

import torch

from workers.judge.channel.activities import MAX_NAME_BYTES
from workers.judge.channel.gpu_memory import cudart

# From cupti_activity.h. The three structures begin with the same fields in CUPTI 11 to 13, which append new fields.
_MEMCPY, _MEMSET, _CONCURRENT_KERNEL = 1, 2, 10
_KINDS: Final = {_MEMCPY: "[memcpy]", _MEMSET: "[memset]", _CONCURRENT_KERNEL: ""}
_TIMES: Final = struct.Struct("=I12xQQ")  # kind, start and end in ns
_NAME_AT: Final = 104  # `const char *name` of a kernel's record
_FORCED: Final = 1  # CUPTI_ACTIVITY_FLAG_FLUSH_FORCED

#: Buffers of 1 MiB. A record takes about 220 bytes, and CUPTI drops records that do not fit.
_BUFFER_BYTES: Final = 1 << 20
_BUFFERS: Final = 8
#: Limits in calls and in seconds for repeating the call, because another process's time slice can lengthen a kernel.
_CALLS: Final = 5
_ENOUGH_S: Final = 0.02


class ProfileError(Exception):
    """The GPU's activities could not be recorded."""


def kernels(call: Callable[[], object]) -> list[tuple[str, int, int]]:
    """Record the kernels that one call runs on the GPU.

    The call is made up to 5 times, and each name's shortest total counts.

    Returns:
        Name, nanoseconds and launches of each kernel, the most expensive first. Names are demangled. The driver's
        copies and fills have the names ``[memcpy]`` and ``[memset]``.

    Raises:
        ProfileError: CUPTI is missing, fails, or does not record a known operation.
    """
    recorder = _recorder()
    recorder.start()
    try:
        recorder.prove()
        begun = time.monotonic()
        seen = [_one(recorder, call)]
        while len(seen) < _CALLS and time.monotonic() - begun < _ENOUGH_S:
            seen.append(_one(recorder, call))
    finally:
        recorder.stop()
    names = {name for one in seen for name in one}
    least = [(name, *min(one[name] for one in seen if name in one)) for name in names]
    return sorted(((_readable(name), ns, count) for name, ns, count in least), key=lambda row: (-row[1], row[0]))


def _one(recorder: _Recorder, call: Callable[[], object]) -> dict[bytes, tuple[int, int]]:
    call()
    torch.cuda.synchronize()
    totals: dict[bytes, tuple[int, int]] = {}
    for name, ns in recorder.take():
        total, count = totals.get(name, (0, 0))
        totals[name] = total + ns, count + 1
    return totals


_REQUESTED = ctypes.CFUNCTYPE(
    None, ctypes.POINTER(ctypes.c_void_p), ctypes.POINTER(ctypes.c_size_t), ctypes.POINTER(ctypes.c_size_t)
)
_COMPLETED = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_uint32, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_size_t)


class _Recorder:
    """CUPTI's activity records of this process."""

    def __init__(self) -> None:
        self._cupti = _library()
        # Allocated in advance, because CUPTI calls back from the launching thread, which can hold locks.
        self._buffers = {
            ctypes.addressof(buffer): buffer
            for buffer in (ctypes.create_string_buffer(_BUFFER_BYTES) for _ in range(_BUFFERS))
        }
        self._free = list(self._buffers)
        self._full: list[tuple[int, int]] = []
        self._callbacks = _REQUESTED(self._request), _COMPLETED(self._complete)

    def start(self) -> None:
        self._do("cuptiActivityRegisterCallbacks", *self._callbacks)
        for kind in _KINDS:
            self._do("cuptiActivityEnable", kind)

    def stop(self) -> None:
        for kind in _KINDS:
            self._cupti.cuptiActivityDisable(kind)
        torch.cuda.synchronize()
        self._cupti.cuptiActivityFlushAll(_FORCED)
        # CUPTI can still use the buffers that it has not returned.
        self._free += [address for address, _ in self._full]
        self._full.clear()

    def prove(self) -> None:
        """Check that CUPTI records a fill of our own, so that an empty record proves that no kernel ran."""
        mark = torch.empty(64, dtype=torch.uint8, device="cuda")
        cudart().cudaMemset(ctypes.c_void_p(mark.data_ptr()), 0, ctypes.c_size_t(64))
        torch.cuda.synchronize()
        if not any(name == _KINDS[_MEMSET].encode() for name, _ in self.take()):
            raise ProfileError("CUPTI does not record what runs on the GPU")

    def take(self) -> list[tuple[bytes, int]]:
        """Return name and nanoseconds of every activity since the last call, as far as the buffers hold it."""
        self._do("cuptiActivityFlushAll", _FORCED)
        activities: list[tuple[bytes, int]] = []
        record = ctypes.c_void_p()
        full, self._full = self._full, []
        for address, size in full:
            record.value = None
            while not self._cupti.cuptiActivityGetNextRecord(
                ctypes.c_void_p(address), ctypes.c_size_t(size), ctypes.byref(record)
            ):
                at = record.value
                assert at is not None
                kind, start, end = _TIMES.unpack(ctypes.string_at(at, _TIMES.size))
                if kind in _KINDS and end > start:
                    activities.append((_KINDS[kind].encode() or _name(at), end - start))
            self._free.append(address)
        return activities

    def _request(self, buffer: Any, size: Any, records: Any) -> None:
        records[0] = 0
        buffer[0], size[0] = (self._free.pop(), _BUFFER_BYTES) if self._free else (None, 0)

    def _complete(self, _context: int, _stream: int, buffer: int, _size: int, valid: int) -> None:
        self._full.append((buffer, valid))

    def _do(self, function: str, *arguments: Any) -> None:
        if code := getattr(self._cupti, function)(*arguments):
            raise ProfileError(f"{function} failed with CUPTI error {code}")


def _name(record: int) -> bytes:
    pointer = ctypes.c_void_p.from_address(record + _NAME_AT).value
    return ctypes.string_at(pointer) if pointer else b""


def _readable(name: bytes) -> str:
    """Return a symbol's demangled name, cut to ``MAX_NAME_BYTES``."""
    demangler = _demangler() if name.startswith(b"_Z") else None
    return ((demangler and demangler(name)) or name)[:MAX_NAME_BYTES].decode("utf-8", "replace")


@cache
def _recorder() -> _Recorder:
    return _Recorder()


@cache
def _library() -> Any:
    """Return the CUPTI that torch has loaded, or one on the loader's path."""
    with open("/proc/self/maps") as maps:  # noqa: PTH123 -- a file of the kernel
        loaded = {line.split(maxsplit=5)[-1].strip() for line in maps if "/libcupti.so" in line}
    for name in (*loaded, "libcupti.so.13", "libcupti.so.12", "libcupti.so"):
        try:
            return ctypes.CDLL(name)
        except OSError:
            continue
    raise ProfileError("no libcupti was found")


@cache
def _demangler() -> Callable[[bytes], bytes | None] | None:
    """Return the C++ runtime's demangler, if there is one."""
    try:
        demangle = ctypes.CDLL("libstdc++.so.6").__cxa_demangle
        free = ctypes.CDLL(None).free
    except (OSError, AttributeError):
        return None
    demangle.restype = ctypes.c_void_p
    free.argtypes = [ctypes.c_void_p]

    def readable(name: bytes) -> bytes | None:
        text = demangle(name, None, None, None)
        if not text:
            return None
        try:
            return ctypes.string_at(text)
        finally:
            free(text)

    return readable
