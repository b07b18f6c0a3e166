"""Requirements for the outputs of each dtype."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final

import torch

from kqueue.contract import Settings, Tolerance, Tolerances
from workers.judge.pipeline.cases import DTYPES


@dataclass(frozen=True, slots=True)
class Grade:
    """The requirements for outputs of one floating dtype.

    Attributes:
        tolerance: largest error of a value, used as ``atol`` and as ``rtol``. KernelBench's value for 32 and 16 bits.
        farthest: largest distance of all values together relative to the reference's norm.
        lenience: largest distance of values of one size, together, relative to the reference's own errors.
        resolution: differences that are not tested relative to the usual size of values, in multiples of the dtype's
            epsilon.
        downgrade: smallest and largest relative distance from the float64 reference that a lower precision explains,
            or None if no lower precision is in use.
    """

    tolerance: float
    farthest: float
    lenience: float
    resolution: float
    downgrade: tuple[float, float] | None


# The bounds of ``downgrade``. Let u be the unit roundoff: 2**-11 for fp16 and TF32, 2**-8 for bf16, 2**-4 and 2**-3 for
# fp8 (e4m3, e5m2). Rounding to nearest moves a value by at most u of it, and by 0.42 u in the root mean square over a
# binade. A sum of products of two rounded factors of both signs is off by sqrt(2) times that, 0.6 u of its norm: 3e-4
# in TF32 and fp16, 2e-3 in bf16, 4e-2 and 8e-2 in fp8. Truncation doubles it. L layers in a row multiply it by sqrt(L).
# For positive factors the errors average out: 1.5e-5 in fp16 with 512 terms.
# For an fp32 reference, bf16 explains up to 4 u: 40 layers of rounding, or 10 of truncation. Larger errors can be
# faults, such as a missing bias, which is 4e-2 of the norm after 512 terms. Fp8 instead of fp32 has errors of that
# size, so neither is reported. Instead of 16 bits fp8 is common, and up to 2 u of e4m3, which is u of e5m2, are
# explained. Zeros are off by 1, and independent values by 1.4.
_BF16_EXPLAINS: Final = 4 * 2.0**-8
_FP8_EXPLAINS: Final = 2 * 2.0**-4

_WIDE: Final = Grade(tolerance=1e-4, farthest=1e-2, lenience=8, resolution=4, downgrade=(4e-6, _BF16_EXPLAINS))
#: For fp32 where TF32 is allowed, which has as many mantissa bits as fp16.
_TF32: Final = Grade(tolerance=1e-2, farthest=5e-2, lenience=8, resolution=4 << 13, downgrade=(1e-3, _BF16_EXPLAINS))
_FP16: Final = Grade(tolerance=1e-2, farthest=5e-2, lenience=3, resolution=0.5, downgrade=(1e-3, _FP8_EXPLAINS))
_BF16: Final = Grade(tolerance=1e-2, farthest=5e-2, lenience=3, resolution=0.5, downgrade=(5e-3, _FP8_EXPLAINS))
#: For 8 bits the tolerance is one rounding step, which is 1/8 or 1/4 of a value.
_E4M3: Final = Grade(tolerance=0.15, farthest=0.3, lenience=3, resolution=0.5, downgrade=None)
_E5M2: Final = Grade(tolerance=0.3, farthest=0.3, lenience=3, resolution=0.5, downgrade=None)
#: For scales that are powers of two, and for 4 bits. The tolerance is one step again (:data:`_STEPS`).
_E8M0: Final = Grade(tolerance=1.0, farthest=0.3, lenience=3, resolution=0.5, downgrade=None)
_E2M1: Final = Grade(tolerance=0.5, farthest=0.5, lenience=3, resolution=0.5, downgrade=None)
#: Tolerances whose parts differ. An exponent's step is 1. The steps of 4 bits grow from 0.5 to 2, between 4 and 6.
_STEPS: Final = {
    torch.float8_e8m0fnu: Tolerance(atol=1.0, rtol=0.0),
    torch.float4_e2m1fn_x2: Tolerance(atol=0.5, rtol=0.375),
}
#: The grades by dtype, from fine to coarse. Values of other dtypes must be equal.
GRADES: Final = {
    torch.float64: _WIDE,
    torch.complex128: _WIDE,
    torch.float32: _WIDE,
    torch.complex64: _WIDE,
    torch.float16: _FP16,
    torch.complex32: _FP16,
    torch.bfloat16: _BF16,
    torch.float8_e4m3fn: _E4M3,
    torch.float8_e4m3fnuz: _E4M3,
    torch.float8_e5m2: _E5M2,
    torch.float8_e5m2fnuz: _E5M2,
    torch.float8_e8m0fnu: _E8M0,
    torch.float4_e2m1fn_x2: _E2M1,
}
_TF32_DTYPES: Final = frozenset({torch.float32, torch.complex64})


def each(given: Tolerances | None) -> tuple[Tolerance | None, ...]:
    """Return given tolerances as a tuple."""
    return given if isinstance(given, tuple) else (given,)


def given_for(given: Tolerances | None, number: int) -> Tolerance | None:
    """Return the tolerance that is given for one output. A list has none for gradients and for what a call changes."""
    return given if not isinstance(given, tuple) else given[number] if number < len(given) else None


def tolerance_for(dtype: torch.dtype, settings: Settings, given: Tolerance | None = None) -> Tolerance:
    """Return the tolerance for each value of an output of ``dtype``, for which one can be given."""
    if dtype not in GRADES:
        return Tolerance(atol=0.0, rtol=0.0)
    tolerance = grade_for(dtype, settings).tolerance
    return given or _STEPS.get(dtype) or Tolerance(atol=tolerance, rtol=tolerance)


def epsilon_for(dtype: torch.dtype, settings: Settings) -> float:
    """Return the distance from 1 to the next number of the coarser of both dtypes, or 0 if values must be equal."""
    if dtype not in GRADES:
        return 0.0
    basis = basis_of(dtype, settings)
    return 0.5 if basis is torch.float4_e2m1fn_x2 else torch.finfo(basis).eps


def basis_of(dtype: torch.dtype, settings: Settings) -> torch.dtype:
    """Return the coarser of the output's and the evaluation's dtype, because fp32 results of bf16 values are coarse."""
    return max(dtype, DTYPES[settings.precision], key=list(GRADES).index)


def grade_for(dtype: torch.dtype, settings: Settings, own: Tolerance | None = None) -> Grade:
    """Return the requirements. A problem's own tolerance also widens ``farthest``."""
    basis = basis_of(dtype, settings)
    grade = _TF32 if settings.tf32 and basis in _TF32_DTYPES else GRADES[basis]
    return grade if own is None else replace(grade, farthest=max(grade.farthest, own.rtol))
