"""The number of CUDA contexts that this host's driver makes in a second, for all of its GPUs together.

Each of a few processes, ``python -m workers.contexts SECONDS``, repeats in forks what every candidate does at least: it
opens a context with a single hardware queue on its GPU, fills 32 MiB there, and ends.
"""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from itertools import cycle, islice
from typing import Final

from kqueue import program
from workers.judge.channel import gpu_memory
from workers.judge.host import linux

#: Number of processes, which is enough to keep the driver busy.
_AT_ONCE: Final = 12
_FILLED_BYTES: Final = 32 << 20
#: Seconds for a process to start, and to make its last context.
_MARGIN_S: Final = 30.0
#: As in candidates (docs/timing.md#cost-of-cuda-contexts).
_ONE_QUEUE: Final = {"CUDA_DEVICE_MAX_CONNECTIONS": "1", "CUDA_DEVICE_MAX_COPY_CONNECTIONS": "1"}


def rate(gpus: Sequence[str], seconds: float = 2.0) -> float:
    """Return contexts a second on the GPUs with these UUIDs in turn. Raise OSError if one cannot be made in time."""
    command, until = [*program.PYTHON, "workers.contexts", str(seconds)], time.monotonic() + seconds + _MARGIN_S
    base, pipe = os.environ | _ONE_QUEUE, subprocess.PIPE
    started = [
        subprocess.Popen(command, env=base | {"CUDA_VISIBLE_DEVICES": gpu}, stdout=pipe, stderr=pipe, text=True)
        for gpu in islice(cycle(gpus), _AT_ONCE)
    ]
    try:
        found = 0.0
        for process in started:
            output, errors = process.communicate(timeout=max(0.0, until - time.monotonic()))
            if process.returncode:
                raise OSError((errors.strip().splitlines() or ["a process died"])[-1])
            found += float(output)
        return found
    except subprocess.TimeoutExpired:
        raise OSError(f"no answer within {seconds + _MARGIN_S:.0f} s") from None
    finally:
        for process in started:
            process.kill()
            process.communicate()


def main() -> None:
    """Make contexts for some seconds, one after the other, and print how many a second."""
    made, begun, dies_with_parent = 0, time.monotonic(), linux.die_with(os.getpid())
    while (took := time.monotonic() - begun) < float(sys.argv[1]):
        if (pid := os.fork()) == 0:
            try:
                dies_with_parent()
                context, pointer, device = ctypes.c_void_p(), ctypes.c_uint64(), ctypes.c_int()
                gpu_memory.driver("cuInit", 0)
                gpu_memory.driver("cuDeviceGet", ctypes.byref(device), 0)
                gpu_memory.driver("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
                gpu_memory.driver("cuCtxSetCurrent", context)
                gpu_memory.driver("cuMemAlloc_v2", ctypes.byref(pointer), ctypes.c_size_t(_FILLED_BYTES))
                gpu_memory.driver("cuMemsetD8_v2", pointer, ctypes.c_ubyte(1), ctypes.c_size_t(_FILLED_BYTES))
                gpu_memory.driver("cuCtxSynchronize")
            except (gpu_memory.CudaCallError, OSError) as error:
                sys.stderr.write(f"{error}\n")
                linux.leave(1)
            linux.leave(0)
        if os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]):
            sys.exit(1)
        made += 1
    sys.stdout.write(str(made / took))


if __name__ == "__main__":
    main()
