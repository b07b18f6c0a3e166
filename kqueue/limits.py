"""The time limits of an evaluation in addition to its deadlines."""

from __future__ import annotations

from typing import Final

#: Maximum time in seconds that an evaluation waits for its GPU while other slots use it.
GPU_WAIT_S: Final = 900.0
#: Seconds by which Celery's hard limit exceeds the sum of the judge's deadlines.
HARD_LIMIT_GRACE_S: Final = 15.0
#: Upper bound of the hard limit in seconds, for the shapes and passes of a problem.
LONGEST_LIMIT_S: Final = 7 * 3600.0


def hard_limit_s(deadlines_s: float) -> float:
    """Return Celery's hard time limit in seconds for an evaluation whose deadlines sum to ``deadlines_s`` seconds."""
    return deadlines_s + GPU_WAIT_S + HARD_LIMIT_GRACE_S
