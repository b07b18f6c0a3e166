"""Formats of other projects' problems, in the order in which they are tried (`docs/problems.md`)."""

from kqueue.registry import Feature

FORMATS = Feature(
    name="formats",
    formats=tuple(f"{__name__}.{module}" for module in ("gpumode", "flashinfer", "robust_kbench", "kernelbook")),
)
