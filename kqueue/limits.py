"""The time limits of an evaluation beyond its own deadlines."""

from __future__ import annotations

from typing import Final

#: Seconds that an evaluation may wait for its GPU while other slots use it.
GPU_WAIT_S: Final = 900.0
#: Seconds that Celery's hard limit lies above the sum of the judge's own deadlines.
HARD_LIMIT_GRACE_S: Final = 15.0


def hard_limit_s(deadlines_s: float) -> float:
    """Return Celery's hard time limit, in seconds, for an evaluation whose deadlines sum to ``deadlines_s`` seconds."""
    return deadlines_s + GPU_WAIT_S + HARD_LIMIT_GRACE_S
