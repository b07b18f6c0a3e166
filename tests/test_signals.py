"""Tests of signals that end a command."""

from __future__ import annotations

import os
import signal
import weakref

import pytest

from kqueue.signals import held_interrupts


class Finalized:
    """An object whose finalizer receives a signal."""

    def __init__(self) -> None:
        weakref.finalize(self, os.kill, os.getpid(), signal.SIGTERM).atexit = False


def test_a_signal_is_held_until_it_can_be_raised() -> None:
    """A signal that comes while an object is finalized is raised by the next check, and a second one at once."""
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        with held_interrupts() as check:
            check()
            Finalized()
            with pytest.raises(KeyboardInterrupt):
                check()
            with pytest.raises(KeyboardInterrupt):
                os.kill(os.getpid(), signal.SIGTERM)
        assert signal.getsignal(signal.SIGTERM) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGTERM, before)
