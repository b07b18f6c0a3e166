"""Time without pauses: deadlines for foreign work count only the time in which the work could run.

A fleet can be stopped as a whole: by SIGSTOP, by a frozen container or virtual machine, or by a host without free CPU
time. The process that checks a deadline is stopped too, and notices that only when it runs again. Its next check of the
clock is then much later than planned.
"""

from __future__ import annotations

import time
from typing import Final

#: Maximum time in seconds that counts between two checks. Checks come every 40 ms to 250 ms while a deadline runs, so a
#: longer time was a pause. A program that delays the checks gains no more than the time beyond this.
MOST_S: Final = 0.5


class Meter:
    """Measures the time between checks, without pauses."""

    def __init__(self) -> None:
        self._checked_at = time.monotonic()

    def look(self) -> float:
        """Return the seconds since the last check that count."""
        now = time.monotonic()
        passed, self._checked_at = min(now - self._checked_at, MOST_S), now
        return passed
