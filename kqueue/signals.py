"""Signals that end a command."""

from __future__ import annotations

import signal
from collections.abc import Callable, Generator
from contextlib import contextmanager


def ending() -> list[signal.Signals]:
    """Return SIGINT, SIGTERM and SIGHUP, but omit SIGHUP where `nohup` made the process ignore it."""
    hung_up = [] if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN else [signal.SIGHUP]
    return [signal.SIGINT, signal.SIGTERM, *hung_up]


def raise_interrupts() -> None:
    """Raise KeyboardInterrupt on SIGTERM and SIGHUP too, so that they end this process like Ctrl-C."""
    for number in ending():
        if signal.getsignal(number) is signal.SIG_DFL:
            signal.signal(number, signal.default_int_handler)


@contextmanager
def held_interrupts() -> Generator[Callable[[], None]]:
    """Yield a function that raises KeyboardInterrupt if a signal has asked this process to end.

    During the block, the first signal raises nothing by itself. Python would drop an exception that comes while an
    object is finalized, and it could leave a lock held. A second signal raises KeyboardInterrupt at once.
    """
    received: list[int] = []

    def hold(number: int, frame: object) -> None:  # noqa: ARG001
        if received:
            raise KeyboardInterrupt
        received.append(number)

    def check() -> None:
        if received:
            raise KeyboardInterrupt

    replaced = (signal.SIG_DFL, signal.default_int_handler)
    before = {number: found for number in ending() if (found := signal.getsignal(number)) in replaced}
    for number in before:
        signal.signal(number, hold)
    try:
        yield check
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
