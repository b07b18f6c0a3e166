"""``python -m workers.judge.gpu.canary UUID LOCK [BYTES]``: whether a GPU computes what is known to be right.

A few kernels over all of the GPU's processors, in integers and in floats that hold integers exactly, so that
the right answer is one number on every device. The judge has the same computed in its own context when a
candidate is gone; the supervisor starts this program, pinned to one GPU by ``CUDA_VISIBLE_DEVICES``, and sees
to its deadline. It also multiplies matrices, and looks whether more than so many bytes of the GPU's memory belong
to no living process.

Exit status: 0 if the answers are right; 1 if they are wrong, or the GPU cannot be used; 3 if nothing can be
said, as no memory was free. The last line of its output says what was found.
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

WRONG: Final = 1
UNKNOWN: Final = 3

#: Enough for several blocks on each processor of any GPU, in 8 MiB.
_COUNT: Final = 1 << 20
_ROUNDS: Final = 8
_CHAINS: Final = (3377699553583604, 366503526400.0)
_PRODUCTS: Final = (2159774709.0, 552763805.0)
#: How long the program waits for those who use the GPU alone; then it does not wait for them any longer.
_LOCK_S: Final = 30.0
#: How long memory of what has just ended may take to be free.
_LEAK_S: Final = 5.0
#: CUDA's code for memory that is not there.
_NO_MEMORY: Final = 2


class CanaryError(Exception):
    """The GPU answered, and the answer is wrong."""


def chains(device: str) -> None:
    """Compute chains of integers and squares in floats, and compare what they come to.

    Args:
        device: torch's name of it.

    Raises:
        CanaryError: it is not what it must be.
        torch.OutOfMemoryError, torch.AcceleratorError: the device could not do it.
    """
    place = torch.arange(_COUNT, dtype=torch.int64, device=device)
    x = place
    for _ in range(_ROUNDS):
        x = (x * 1103515245 + 12345) % (1 << 31)
    y = (x % 1024).float()
    # Each product is below 2^34, each square below 2^20, and so are exact.
    _compare("chains", _CHAINS, ((x * (place % 7)).sum(), (y * y + y).double().sum()))


def products(device: str) -> None:
    """Multiply matrices of small integers, as floats of 32 and of 16 bits. Arguments and errors as above."""

    def matrix(rows: int, columns: int, step: int, modulus: int) -> torch.Tensor:
        i = torch.arange(rows, device=device)[:, None]
        j = torch.arange(columns, device=device)[None, :]
        return (i * step + j * 3) % modulus - modulus // 2

    found: list[torch.Tensor] = []
    # No sum exceeds what the dtype of the product holds exactly: 256 * 6, and 32 * 6.
    for depth, dtype in ((256, torch.float32), (32, torch.bfloat16)):
        product = matrix(2048, depth, 5, 7).to(dtype) @ matrix(depth, 2048, 11, 5).to(dtype)
        weights = torch.arange(2048, device=device) % 13
        found.append((product.double().square() * weights).sum())
    _compare("products", _PRODUCTS, tuple(found))


def _compare(what: str, expected: tuple[float, ...], found: tuple[torch.Tensor, ...]) -> None:
    values = tuple(value.item() for value in found)
    if values != expected:
        raise CanaryError(f"{what}: computed {values} instead of {expected}")


@contextlib.contextmanager
def _alone(lock: Path) -> Generator[None]:
    """Have the device alone, so that nobody's timing is disturbed, or go ahead when that takes too long."""
    descriptor = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    deadline = time.monotonic() + _LOCK_S
    try:
        while time.monotonic() < deadline:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                time.sleep(0.02)
        yield
    finally:
        os.close(descriptor)


def main() -> int:
    """Test the one GPU that is visible; see the module's text for arguments and exit status."""
    uuid, lock, *most = sys.argv[1:]
    try:
        torch.empty(1, device="cuda")  # the context, which takes longest, disturbs nobody more than others' do
        with _alone(Path(lock)):
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
    except CanaryError as error:
        return _say(WRONG, str(error))
    if most and (leaked := leak(uuid, int(most[0]))):
        return _say(WRONG, f"{leaked} bytes of its memory belong to no process")
    return _say(0, f"right in {1000 * took:.0f} ms")


def leak(uuid: str, before: int) -> int:
    """Bytes of a GPU's memory that belong to no living process, beyond ``before`` and for seconds; 0 for none."""
    deadline = time.monotonic() + _LEAK_S
    with opened(uuid) as handle:
        while True:
            now = facts.unaccounted_bytes(handle)
            if now is None or now <= before + facts.LEAK_BYTES:
                return 0
            if time.monotonic() >= deadline:
                return now - before
            time.sleep(0.05)


def _say(status: int, what: str) -> int:
    print(" ".join(what.split())[:500], flush=True)  # noqa: T201
    return status


if __name__ == "__main__":
    # Without the interpreter's end: a driver in trouble may not survive its own tidying up.
    status = main()
    sys.stdout.flush()
    os._exit(status)
