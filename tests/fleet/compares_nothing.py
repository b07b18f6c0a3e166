"""A worker whose judge is real, but finds every answer right."""

from __future__ import annotations

from workers import start
from workers.judge.pipeline import compare

if __name__ == "__main__":
    compare._Output.strict_fault = lambda _: None  # type: ignore[method-assign]
    start.main()
