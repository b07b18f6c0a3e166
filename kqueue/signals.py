"""Signals that end a command."""

from __future__ import annotations

import signal


def ending() -> list[signal.Signals]:
    """Return SIGINT, SIGTERM and SIGHUP, but omit SIGHUP where `nohup` made the process ignore it."""
    hung_up = [] if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN else [signal.SIGHUP]
    return [signal.SIGINT, signal.SIGTERM, *hung_up]


def raise_interrupts() -> None:
    """Raise KeyboardInterrupt on SIGTERM and SIGHUP too, so that they end this process like Ctrl-C."""
    for number in ending():
        if signal.getsignal(number) is signal.SIG_DFL:
            signal.signal(number, signal.default_int_handler)
