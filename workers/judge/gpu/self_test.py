"""``python -m workers.judge.gpu.self_test UUID LOCK [BYTES]``: test that a GPU computes known results.

The test runs a few kernels on all multiprocessors of the GPU. They compute with integers, and with floats that
represent integers exactly, so every device has the same correct results. The judge runs :func:`chains` in its own
context after a candidate has ended. The supervisor runs this program under a time limit, on the one GPU in
``CUDA_VISIBLE_DEVICES``. The program also multiplies matrices. With BYTES, it also checks for leaks: memory of the GPU
that belongs to no living process, far beyond BYTES.

Exit status: 0 if the results are correct, 1 if they are wrong or the GPU cannot be used, 3 if the test could not run
for lack of free memory. The last line of output explains the status.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import sys
import time
from collections.abc import Generator
from pathlib import Path
from typing import Any, Final

import torch

from workers.judge.gpu import facts
from workers.judge.gpu.devices import opened
from workers.judge.host import turns

WRONG: Final = 1
UNKNOWN: Final = 3

#: Number of elements: several blocks for each multiprocessor of any GPU, in 8 MiB.
_COUNT: Final = 1 << 20
_ROUNDS: Final = 8
_CHAINS: Final = (3377699553583604, 366503526400.0)
_PRODUCTS: Final = (2159774709.0, 552763805.0)
#: Time limit in seconds for getting the device's lock. After it the test runs without the lock.
_LOCK_S: Final = 30.0
#: Time in seconds that the driver needs at most to free the memory of ended processes.
LEAK_S: Final = 5.0
#: CUDA's error code for "out of memory".
_NO_MEMORY: Final = 2


class SelfTestError(Exception):
    """The GPU computed a wrong result."""


def chains(device: str) -> None:
    """Test chains of integer operations, and squares in floats.

    Raise SelfTestError if a result is wrong, and torch's errors if the device failed.
    """
    index = torch.arange(_COUNT, dtype=torch.int64, device=device)
    x = index
    for _ in range(_ROUNDS):
        x = (x * 1103515245 + 12345) % (1 << 31)
    y = (x % 1024).float()
    # Exact, because each product is below 2^34 and each square below 2^20.
    _compare("chains", _CHAINS, ((x * (index % 7)).sum(), (y * y + y).double().sum()))


def products(device: str) -> None:
    """Test products of matrices of small integers, in fp32 and bf16. Raise the same errors as :func:`chains`."""

    def matrix(rows: int, columns: int, step: int, modulus: int) -> torch.Tensor:
        i = torch.arange(rows, device=device)[:, None]
        j = torch.arange(columns, device=device)[None, :]
        return (i * step + j * 3) % modulus - modulus // 2

    sums: list[torch.Tensor] = []
    # Each dtype represents every sum exactly: at most 256 * 6 in fp32, 32 * 6 in bf16.
    for depth, dtype in ((256, torch.float32), (32, torch.bfloat16)):
        product = matrix(2048, depth, 5, 7).to(dtype) @ matrix(depth, 2048, 11, 5).to(dtype)
        weights = torch.arange(2048, device=device) % 13
        sums.append((product.double().square() * weights).sum())
    _compare("products", _PRODUCTS, tuple(sums))


def _compare(test: str, expected: tuple[float, ...], results: tuple[torch.Tensor, ...]) -> None:
    values = tuple(value.item() for value in results)
    if values != expected:
        raise SelfTestError(f"{test}: computed {values} instead of {expected}")


@contextlib.contextmanager
def _untimed(lock: Path) -> Generator[None]:
    """Take a shared lock on the device, so that no timing runs during the test. Give up after ``_LOCK_S``."""
    deadline = time.monotonic() + _LOCK_S
    with turns.opened(lock) as descriptor:
        while time.monotonic() < deadline:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                time.sleep(0.02)
        yield


def main() -> int:
    """Test the one visible GPU. The module's docstring describes the arguments and exit statuses."""
    uuid, lock, *most = sys.argv[1:]
    try:
        torch.empty(1, device="cuda")  # create the context without the lock, because it is the slowest part
        with _untimed(Path(lock)):
            begun = time.monotonic()
            chains("cuda")
            products("cuda")
            took = time.monotonic() - begun
    except torch.OutOfMemoryError as error:
        return _say(UNKNOWN, f"no memory is free for a test: {error}")
    except (torch.AcceleratorError, RuntimeError, AssertionError) as error:
        code: Any = getattr(error, "error_code", None)
        if code == _NO_MEMORY:
            return _say(UNKNOWN, f"no memory is free for a test: {error}")
        return _say(WRONG, f"the GPU cannot be used: {error}")
    except SelfTestError as error:
        return _say(WRONG, str(error))
    if most and (leaked := leak(uuid, int(most[0]))):
        return _say(WRONG, f"{leaked} bytes of its memory belong to no process")
    return _say(0, f"right in {1000 * took:.0f} ms")


def leak(uuid: str, before: int, *, stays_s: float = LEAK_S) -> int:
    """Return the leaked bytes of a GPU's memory, or 0.

    Leaked memory belongs to no living process, exceeds ``before`` bytes, and stays for ``stays_s`` seconds.
    """
    deadline = time.monotonic() + stays_s
    with opened(uuid) as handle:
        while True:
            now = facts.unaccounted_bytes(handle)
            if now is None or now <= before + facts.LEAK_BYTES:
                return 0
            if time.monotonic() >= deadline:
                return now - before
            time.sleep(0.05)


def _say(status: int, text: str) -> int:
    print(" ".join(text.split())[:500], flush=True)  # noqa: T201
    return status


if __name__ == "__main__":
    # Skip the interpreter's shutdown, because it can crash if the driver fails.
    status = main()
    sys.stdout.flush()
    os._exit(status)
