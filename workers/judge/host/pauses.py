"""Time without pauses: deadlines over foreign work count only the time in which that work could go on.

A fleet can be stopped as a whole: by SIGSTOP, by a frozen container or virtual machine, or by a host that gives it no
CPU. Whoever holds a deadline is stopped too, and cannot know of it until it runs again. It then finds that it looks at
the clock much later than it meant to.
"""

from __future__ import annotations

import time
from typing import Final

#: The most that counts between two looks, in seconds. Looks come every 40 ms to 250 ms while a deadline runs, so a
#: longer time was a pause. Whoever keeps others from looking gains no more than the time beyond this.
MOST_S: Final = 0.5


class Meter:
    """Measures the time between looks, pauses left out."""

    def __init__(self) -> None:
        self._looked_at = time.monotonic()

    def look(self) -> float:
        """Return the seconds since the last look that count."""
        now = time.monotonic()
        passed, self._looked_at = min(now - self._looked_at, MOST_S), now
        return passed
