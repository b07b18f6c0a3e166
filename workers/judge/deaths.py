"""The outcome of an evaluation whose judge raised an exception, or died before it sent an outcome.

No foreign code runs in a judge, so its failure is the fleet's fault and not the kernel's or the problem's.
"""

from __future__ import annotations

import signal
import traceback
from collections.abc import Callable
from typing import Any, Final

from kqueue.categories import Category
from kqueue.contract import Outcome, Phase
from kqueue.evidence import Evidence, Facts

#: Signals that a judge never sends to itself. They come from an operator, a supervisor or the Linux kernel.
_FROM_OUTSIDE: Final = {-s for s in (signal.SIGKILL, signal.SIGTERM, signal.SIGHUP, signal.SIGINT, signal.SIGQUIT)}
_TRACEBACK_CHARACTERS: Final = 8000


class JudgeDied(Exception):
    """Raised with the evaluation's outcome if the judge died before it sent one."""

    def __init__(self, outcome: Outcome) -> None:
        super().__init__(outcome.message)
        self.outcome = outcome


def describe(exitcode: int) -> str:
    """Return ``exited with status 3`` or ``was killed by SIGSEGV``, for a status or a signal's negative number."""
    if exitcode >= 0:
        return f"exited with status {exitcode}"
    try:
        return f"was killed by {signal.Signals(-exitcode).name}"
    except ValueError:
        return f"was killed by signal {-exitcode}"


def explain(exitcode: int, phase: Phase | None, *, out_of_memory: bool = False) -> Outcome:
    """Return the outcome: ``worker_lost``, ``gpu_unhealthy`` or ``judge_error``.

    ``phase`` is the judge's last phase. ``out_of_memory`` is whether the host's out-of-memory killer ended a process
    while the judge ran.
    """
    how = describe(exitcode)
    facts: dict[str, Any] = {"exit_status": exitcode} if exitcode >= 0 else {"signal": how.rpartition(" ")[2]}
    if out_of_memory:
        facts["out_of_memory"] = True
    if exitcode in _FROM_OUTSIDE:
        category, message = Category.WORKER_LOST, f"the judge {how}"
    elif phase is Phase.SELF_TEST:
        category, message = Category.GPU_UNHEALTHY, f"the judge {how} while it tested the GPU"
    else:
        category, message = Category.JUDGE_ERROR, f"the judge {how}"
    return Outcome(category=category, message=message, phase=phase, facts=Facts(**facts))


def outcome_of(run: Callable[[], Outcome]) -> Outcome:
    """Return the outcome of ``run``, or ``judge_error`` if it raises an exception.

    Faults of candidates and problems are regular outcomes, so an exception is a fault of the judge.

    Raises:
        JudgeDied: the judge died.
    """
    try:
        return run()
    except JudgeDied:
        raise
    except Exception as error:  # noqa: BLE001
        return Outcome(
            category=Category.JUDGE_ERROR,
            message=f"the judge failed: {type(error).__name__}: {error}"[:500],
            facts=Facts(exception=type(error).__name__),
            evidence=Evidence(traceback=traceback.format_exc()[-_TRACEBACK_CHARACTERS:]),
        )
