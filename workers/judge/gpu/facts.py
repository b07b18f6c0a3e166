"""``python -m workers.judge.gpu.facts GPU-...``: print the health of GPUs as a line of JSON every few seconds.

It is a separate process, because a hanging driver blocks its callers. Its sources are the driver's management library
(NVML) and, if readable, the kernel's log. It never uses CUDA. Facts that a GPU or a host does not provide are omitted.

A line is ``{"gpus": {UUID: facts}, "xids": [[UUID, number], ...]}``, with the facts of :func:`read` and the errors
since the previous line.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import pynvml as _pynvml

_nvml: Any = _pynvml

#: Intervals in seconds between two lines and between two polls for errors. Errors are printed at once.
EVERY_S: Final = 5.0
_LOOK_S: Final = 0.5
_KMSG: Final = Path("/dev/kmsg")
_XID: Final = re.compile(r"NVRM: Xid \(PCI:([0-9a-fA-F]+):([0-9a-fA-F]+):([0-9a-fA-F]+)[^)]*\): (\d+)")
#: Time in seconds within which NVML and the kernel's log report the same error.
_SAME_S: Final = 5.0
#: Inode number of Linux's initial pid namespace.
_FIRST_NAMESPACE: Final = 0xEFFFFFFC
#: Growth in bytes of unaccounted memory that counts as a leak. Less is normal, because NVML lists contexts with a
#: delay.
LEAK_BYTES: Final = 1 << 30

#: Xids that a program causes and that affect only this program: out of range, illegal instructions, page faults,
#: corrupted command streams, engine classes, overrun time slices, and the cleanup after them. NVIDIA's catalogue
#: recommends a restart of the application after these.
OF_APPLICATIONS: Final = frozenset({8, 11, 13, 31, 32, 43, 45, 68, 69, 109})


@dataclass(frozen=True, slots=True)
class Process:
    """A process with a context on a GPU, with its GPU memory in bytes if NVML reports it.

    ``pid`` is NVML's. In a container it can be missing, or belong to another process.
    """

    pid: int
    memory_bytes: int | None

    @property
    def name(self) -> str:
        """Return the program's name, or an empty string if it is unknown."""
        try:
            return Path(f"/proc/{self.pid}/comm").read_text().strip()
        except OSError:
            return ""


def ask(question: Callable[..., Any], *arguments: Any) -> Any:
    """Call a function of NVML. Return None if the GPU, the driver or the host does not support or permit it."""
    try:
        return question(*arguments)
    except _nvml.NVMLError:
        return None


def processes(handle: Any) -> list[Process] | None:
    """Return the processes that compute on a GPU, or None if NVML does not report them."""
    listed = ask(_nvml.nvmlDeviceGetComputeRunningProcesses, handle)
    return None if listed is None else [Process(int(p.pid), p.usedGpuMemory) for p in listed]


def sees_all() -> bool:
    """Return whether this process sees all of the host's processes. Otherwise NVML's pids have no meaning here."""
    try:
        return Path("/proc/self/ns/pid").stat().st_ino == _FIRST_NAMESPACE
    except OSError:
        return False


def unaccounted_bytes(handle: Any) -> int | None:
    """Return the bytes of used GPU memory that belong to no living process: memory of the driver, and leaks.

    Return None if they are unknown, for example in a container that sees only its own processes.
    """
    memory, computing = ask(_nvml.nvmlDeviceGetMemoryInfo, handle), processes(handle)
    if memory is None or computing is None or not sees_all():
        return None
    drawing = ask(_nvml.nvmlDeviceGetGraphicsRunningProcesses, handle) or []
    held = {p.pid: p.memory_bytes for p in computing} | {int(p.pid): p.usedGpuMemory for p in drawing}
    living = [bytes_ for pid, bytes_ in held.items() if Path(f"/proc/{pid}").exists()]
    sizes = [bytes_ for bytes_ in living if bytes_ is not None]
    return None if len(sizes) < len(living) else max(int(memory.used) - sum(sizes), 0)


def throttling(mask: int) -> list[str]:
    """Return NVML's names of the throttle reasons in a bit mask."""
    prefix = "nvmlClocksEventReason"
    names = {name.removeprefix(prefix): getattr(_nvml, name) for name in dir(_nvml) if name.startswith(prefix)}
    return sorted(name for name, bit in names.items() if name not in ("All", "None") and mask & bit)


def read(handle: Any) -> dict[str, Any]:
    """Return the known facts of a GPU.

    The facts are: ``compute_capability``, such as ``9.0``, ``temperature_c``, ``sm_mhz``, ``throttle``
    (:func:`throttling`), ``uncorrected_ecc`` since the driver was loaded (``volatile``) and over the GPU's lifetime
    (``aggregate``), ``remapped_rows`` (``corrected``, ``uncorrected``, ``pending``, ``failed``), ``retired_pages``,
    ``memory_used_bytes``, ``memory_bytes``, ``unaccounted_bytes`` (:func:`unaccounted_bytes`), ``utilisation_percent``
    of the SMs, and ``processes``, each with ``pid``, ``name`` and ``memory_bytes``.
    """

    def ecc(counter: int) -> Any:
        return ask(_nvml.nvmlDeviceGetTotalEccErrors, handle, _nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, counter)

    reasons = ask(_nvml.nvmlDeviceGetCurrentClocksEventReasons, handle)
    errors = {"volatile": ecc(_nvml.NVML_VOLATILE_ECC), "aggregate": ecc(_nvml.NVML_AGGREGATE_ECC)}
    rows = ask(_nvml.nvmlDeviceGetRemappedRows, handle)
    causes = (_nvml.NVML_PAGE_RETIREMENT_CAUSE_MULTIPLE_SINGLE_BIT_ECC_ERRORS,)
    causes += (_nvml.NVML_PAGE_RETIREMENT_CAUSE_DOUBLE_BIT_ECC_ERROR,)
    retired = [ask(_nvml.nvmlDeviceGetRetiredPages, handle, cause) for cause in causes]
    memory = ask(_nvml.nvmlDeviceGetMemoryInfo, handle)
    use = ask(_nvml.nvmlDeviceGetUtilizationRates, handle)
    capability = ask(_nvml.nvmlDeviceGetCudaComputeCapability, handle)
    running = processes(handle)
    facts: dict[str, Any] = {
        "temperature_c": ask(_nvml.nvmlDeviceGetTemperature, handle, _nvml.NVML_TEMPERATURE_GPU),
        "sm_mhz": ask(_nvml.nvmlDeviceGetClockInfo, handle, _nvml.NVML_CLOCK_SM),
        "throttle": None if reasons is None else throttling(int(reasons)),
        "uncorrected_ecc": None if None in errors.values() else errors,
        "remapped_rows": None
        if rows is None
        else {"corrected": rows[0], "uncorrected": rows[1], "pending": bool(rows[2]), "failed": bool(rows[3])},
        "retired_pages": None if None in retired else sum(map(len, retired)),
        "compute_capability": capability and "{}.{}".format(*capability),
        "memory_used_bytes": memory and memory.used,
        "memory_bytes": memory and memory.total,
        "unaccounted_bytes": unaccounted_bytes(handle),
        "utilisation_percent": use and use.gpu,
        "processes": None
        if running is None
        else [{"pid": p.pid, "name": p.name, "memory_bytes": p.memory_bytes} for p in running],
    }
    return {name: value for name, value in facts.items() if value is not None}


def breakage(before: dict[str, Any], now: dict[str, Any]) -> str | None:
    """Compare a GPU's facts with earlier facts. Return the reason for a test of the GPU, or None."""
    if "error" in now and "error" not in before:
        return f"the driver reports: {now['error']}"
    then, there = before.get("uncorrected_ecc"), now.get("uncorrected_ecc")
    if then and there and there["volatile"] > then["volatile"]:
        return f"{there['volatile'] - then['volatile']} more memory errors that ECC could not correct"
    if now.get("remapped_rows", {}).get("failed") and not before.get("remapped_rows", {}).get("failed"):
        return "a row of its memory could not be remapped"
    return None


class Errors:
    """The errors (Xids) that the driver reports as they happen."""

    def __init__(self, handles: dict[str, Any], kmsg: Path = _KMSG) -> None:
        self._seen: dict[tuple[str, int], float] = {}
        self._set: Any = ask(_nvml.nvmlEventSetCreate)
        self._by_address: dict[tuple[int, ...], str] = {}
        for uuid, handle in handles.items():
            if self._set is not None:
                ask(_nvml.nvmlDeviceRegisterEvents, handle, _nvml.nvmlEventTypeXidCriticalError, self._set)
            address = ask(_nvml.nvmlDeviceGetPciInfo, handle)
            if address is not None:
                self._by_address[(address.domain, address.bus, address.device)] = uuid
        self._log = -1
        with contextlib.suppress(OSError):
            self._log = os.open(kmsg, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
            os.lseek(self._log, 0, os.SEEK_END)

    def news(self) -> list[tuple[str, int]]:
        """Return the GPU's UUID and the Xid of each error since the last call."""
        now = time.monotonic()
        self._seen = {error: at for error, at in self._seen.items() if now - at < _SAME_S}
        reported = [error for error in (*self._events(), *self._logged()) if error not in self._seen]
        self._seen |= dict.fromkeys(reported, now)
        return list(dict.fromkeys(reported))

    def _events(self) -> Iterator[tuple[str, int]]:
        while self._set is not None and (event := ask(_nvml.nvmlEventSetWait_v2, self._set, 0)) is not None:
            uuid = ask(_nvml.nvmlDeviceGetUUID, event.device)
            if uuid is not None and event.eventType == _nvml.nvmlEventTypeXidCriticalError:
                yield uuid, int(event.eventData)

    def _logged(self) -> Iterator[tuple[str, int]]:
        while self._log >= 0:
            try:
                record = os.read(self._log, 8192).decode("utf-8", "replace")
            except BlockingIOError:
                return
            except BrokenPipeError:
                continue  # records were overwritten before they were read
            except OSError:
                return
            if not record:
                return
            for match in _XID.finditer(record):
                address = tuple(int(part, 16) for part in match.groups()[:3])
                if address in self._by_address:
                    yield self._by_address[address], int(match[4])


def main() -> None:
    """Print the facts of the GPUs in the arguments until the reader closes the pipe."""
    _nvml.nvmlInit()
    handles: dict[str, Any] = {}
    facts: dict[str, dict[str, Any]] = {}
    for uuid in sys.argv[1:]:
        try:
            handles[uuid] = _nvml.nvmlDeviceGetHandleByUUID(uuid)
        except _nvml.NVMLError as error:
            facts[uuid] = {"error": str(error)}
    errors = Errors(handles)
    due = 0.0
    while True:
        xids = errors.news()
        if xids or time.monotonic() >= due:
            due = time.monotonic() + EVERY_S
            for uuid, handle in handles.items():
                # Every working GPU supports this query, so an error here means that the GPU is lost.
                try:
                    _nvml.nvmlDeviceGetMemoryInfo(handle)
                    facts[uuid] = read(handle)
                except _nvml.NVMLError as error:
                    facts[uuid] = {"error": str(error)}
            print(json.dumps({"gpus": facts, "xids": xids}), flush=True)  # noqa: T201
        time.sleep(_LOOK_S)


if __name__ == "__main__":
    with contextlib.suppress(BrokenPipeError, KeyboardInterrupt):
        main()
