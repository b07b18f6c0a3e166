"""A worker whose judge is real, but has a clock for calls that runs at half the speed."""

from __future__ import annotations

import time
from types import SimpleNamespace

from workers import start
from workers.judge.pipeline import clocks

if __name__ == "__main__":
    slow = {"perf_counter_ns": lambda: time.perf_counter_ns() // 2}
    clocks.time = SimpleNamespace(**vars(time) | slow)  # type: ignore[assignment]
    start.main()
