"""Protocols of other projects by which a verdict also reports a kernel's values.

A profile is another project's comparison of the values that ``forward`` returns. Inputs, weights and seeds remain
kqueue's. The figures come from the projects' sources of March and April 2026.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Final


class Protocol(StrEnum):
    """The profiles."""

    KERNELBENCH = "kernelbench"
    """KernelBench since November 2025: ``torch.allclose`` with 1e-4 for fp32, 1e-2 for fp16 and bf16."""
    KERNELBENCH_2025 = "kernelbench-2025"
    """KernelBench before: ``torch.allclose`` with 1e-2."""
    KERNELBENCH_EVAL = "kernelbench-eval"
    """KernelBench's comparison with both models in ``eval()`` mode, where a kernel can fold batch norm."""
    CUDA_L1 = "cuda-l1"
    """CUDA-L1's evaluation: ``torch.allclose`` with 1e-2, with both models in ``eval()`` mode."""
    ROBUST_KBENCH = "robust-kbench"
    """robust-kbench's functions: ``torch.allclose`` with 1e-5."""
    ROBUST_KBENCH_SCRIPT = "robust-kbench-script"
    """Its script ``run_kernel.py``: 1e-3."""
    FLASHINFER_BENCH = "flashinfer-bench"
    """flashinfer-bench's benchmark: all values are finite, with an absolute or a relative error of at most 1e-2."""
    FLASHINFER_BENCH_DTYPES = "flashinfer-bench-dtypes"
    """Its guide for tests of references: ``torch.allclose`` with tolerances by the output's dtype, in fp8 for 85 % of
    the values."""


@dataclass(frozen=True, slots=True)
class Rule:
    """The comparison of a profile.

    Attributes:
        bounds: absolute and relative tolerance, and the share of values that must be within, by dtype. The empty name
            is for all other dtypes.
        by_output: True if the output's dtype counts, and not the evaluation's precision.
        either: True if one of the two tolerances is enough, for finite values only.
        evaluates: True if both models are in ``eval()`` mode.
    """

    bounds: Mapping[str, tuple[float, float, float]]
    by_output: bool = False
    either: bool = False
    evaluates: bool = False

    def bound(self, dtype: str) -> tuple[float, float, float]:
        """Return the bounds for a dtype, such as ``float16``."""
        return self.bounds.get(dtype, self.bounds[""])


_KERNELBENCH: Final = {"": (1e-4, 1e-4, 1.0), "float16": (1e-2, 1e-2, 1.0), "bfloat16": (1e-2, 1e-2, 1.0)}
_FP8: Final = (1e-1, 2e-1, 0.85)
#: The comparison of each profile.
RULES: Final = {
    Protocol.KERNELBENCH: Rule(_KERNELBENCH),
    Protocol.KERNELBENCH_2025: Rule({"": (1e-2, 1e-2, 1.0)}),
    Protocol.KERNELBENCH_EVAL: Rule(_KERNELBENCH, evaluates=True),
    Protocol.CUDA_L1: Rule({"": (1e-2, 1e-2, 1.0)}, evaluates=True),
    Protocol.ROBUST_KBENCH: Rule({"": (1e-5, 1e-5, 1.0)}),
    Protocol.ROBUST_KBENCH_SCRIPT: Rule({"": (1e-3, 1e-3, 1.0)}),
    Protocol.FLASHINFER_BENCH: Rule({"": (1e-2, 1e-2, 1.0)}, either=True),
    Protocol.FLASHINFER_BENCH_DTYPES: Rule(
        {
            "": (1e-5, 1e-5, 1.0),
            "float16": (1e-3, 1e-3, 1.0),
            "bfloat16": (8e-3, 1e-2, 1.0),
            "float8_e4m3fn": _FP8,
            "float8_e5m2": _FP8,
        },
        by_output=True,
    ),
}
