"""Whether a candidate's outputs are the reference's."""

from __future__ import annotations

from typing import Any, Final

import torch

from kqueue.categories import Category
from kqueue.contract import Phase, Precision, Settings, Tolerance
from workers.channel.protocol import Reply, TensorSpec
from workers.judge.ending import EvaluationEnded
from workers.judge.problem import GIVEN, Case

#: The largest accepted error of each value, ``atol`` and ``rtol`` alike, by the output's dtype (KernelBench's for
#: 32 and 16 bits); dtypes that are not floating must be equal.
_TOLERANCES: Final = {
    torch.float64: 1e-4,
    torch.float32: 1e-4,
    torch.complex64: 1e-4,
    torch.complex128: 1e-4,
    torch.float16: 1e-2,
    torch.bfloat16: 1e-2,
    torch.float8_e4m3fn: 1e-1,
    torch.float8_e5m2: 1e-1,
}
#: KernelBench's tolerance follows the evaluation's precision, whatever the output's dtype.
_KERNELBENCH: Final = {Precision.FP32: 1e-4, Precision.FP16: 1e-2, Precision.BF16: 1e-2}
_SHOWN: Final = 5
#: The largest accepted distance as a share of the reference's own size, all values together: where all values
#: are tiny an answer of zeros, or of any constant, lies within the tolerance of each.
_FARTHEST: Final = 0.5


def tolerance_for(dtype: torch.dtype, settings: Settings) -> Tolerance:
    """The tolerance that holds for each value of outputs of ``dtype``."""
    if dtype not in _TOLERANCES:
        return Tolerance(atol=0.0, rtol=0.0)
    return settings.tolerance or Tolerance(atol=_TOLERANCES[dtype], rtol=_TOLERANCES[dtype])


def check_form(reply: Reply, structure: str, expected: list[torch.Tensor]) -> None:
    """Say how outputs that a candidate could not deliver differ from the reference's.

    Raises:
        EvaluationEnded: always; the first difference in the order structure, shape, dtype, device.
    """
    specs = [TensorSpec.of(tensor) for tensor in expected]
    got = list(reply.tensors)
    if reply.structure != structure or len(got) != len(specs):
        raise _wrong(
            Category.WRONG_OUTPUT_STRUCTURE,
            f"the output is {reply.structure}, the reference's is {structure} (T: a tensor)",
        )
    for i, (mine, theirs) in enumerate(zip(specs, got, strict=True)):
        if mine.shape != theirs.shape:
            raise _wrong(Category.WRONG_SHAPE, f"output {i} has shape {theirs.shape}, not {mine.shape}", output=i)
    for i, (mine, theirs) in enumerate(zip(specs, got, strict=True)):
        if mine.dtype != theirs.dtype:
            raise _wrong(Category.WRONG_DTYPE, f"output {i} has dtype {theirs.dtype}, not {mine.dtype}", output=i)
    for i, (mine, theirs) in enumerate(zip(specs, got, strict=True)):
        if mine.device != theirs.device:
            raise _wrong(Category.WRONG_DEVICE, f"output {i} lives on {theirs.device}, not {mine.device}", output=i)
    raise _wrong(Category.WRONG_OUTPUT_STRUCTURE, "the output could not be copied", structure=reply.structure)


def check_values(outputs: list[torch.Tensor], case: Case, settings: Settings) -> dict[str, Any]:
    """Compare delivered outputs with the reference's, all of one spec.

    Returns:
        the error's figures: ``max_abs_error``, ``max_rel_error``, ``relative_norm``, ``error_ratio`` (None without
        exact outputs), ``strict_correct`` and ``kernelbench_correct`` (None but for given cases).

    Raises:
        EvaluationEnded: ``not_finite`` or ``wrong_values`` by the verdict that ``settings.comparison`` chooses,
            with the same figures and the first wrong places.
    """
    worst = {"max_abs_error": 0.0, "max_rel_error": 0.0, "relative_norm": 0.0, "error_ratio": None}
    expected = case.outputs
    kernelbench = settings.tolerance or Tolerance(
        atol=_KERNELBENCH[settings.precision], rtol=_KERNELBENCH[settings.precision]
    )
    for i, (out, ref) in enumerate(zip(outputs, expected, strict=True)):
        if out.numel() == 0:
            continue
        exact = out == ref
        out, ref = _comparable(out), _comparable(ref)
        finite = torch.isfinite(ref)
        strays = finite & ~torch.isfinite(out)
        if bool(strays.any()):
            raise _wrong(
                Category.NOT_FINITE,
                f"output {i} holds {int(strays.sum())} values that are not finite where the reference is",
                output=i,
                kind=case.kind,
                strict_correct=False,
                kernelbench_correct=False if case.kind == GIVEN else None,
                first=_first(strays, out, ref),
            )
        tolerance = tolerance_for(expected[i].dtype, settings)
        error = (out - ref).abs()
        # Where the reference is infinite only the same infinity will do: inf - inf would be NaN.
        good = torch.where(finite, error <= tolerance.atol + tolerance.rtol * ref.abs(), out == ref)
        if tolerance.atol == 0 == tolerance.rtol:
            good = exact  # 64-bit integers do not fit a float
        error = torch.where(finite, error, torch.zeros_like(error))
        worst["max_abs_error"] = max(worst["max_abs_error"], float(error.max()))
        relative = error / ref.abs().clamp_min(torch.finfo(error.dtype).tiny)
        nonzero = finite & (ref != 0)
        if bool(nonzero.any()):
            worst["max_rel_error"] = max(worst["max_rel_error"], float(relative[nonzero].max()))
        if not bool(good.all()):
            wrong = int((~good).sum())
            raise _wrong(
                Category.WRONG_VALUES,
                f"output {i}: {wrong} of {good.numel()} values differ by more than"
                f" {tolerance.atol:g} + {tolerance.rtol:g}·|reference|, at most by {float(error.max()):.6g}",
                output=i,
                kind=case.kind,
                strict_correct=False,
                kernelbench_correct=torch.allclose(out, ref, kernelbench.rtol, kernelbench.atol)
                if case.kind == GIVEN
                else None,
                wrong=wrong,
                of=good.numel(),
                first=_first(~good, out, ref),
                **worst,
            )
        distance, size = (float(torch.linalg.vector_norm(t[finite].double())) for t in (out - ref, ref))
        worst["relative_norm"] = max(worst["relative_norm"], distance / size if size else 0.0)
        if settings.tolerance is None and distance > _FARTHEST * size:
            raise _wrong(
                Category.WRONG_VALUES,
                f"output {i} is within the tolerance of the reference only because that is tiny:"
                f" |output - reference| is {distance / size if size else float('inf'):.3g} of |reference|",
                output=i,
                relative_norm=distance / size if size else None,
                of=good.numel(),
            )
    return {**worst, "strict_correct": True, "kernelbench_correct": True if case.kind == GIVEN else None}


def merge_errors(figures: list[dict[str, Any]]) -> dict[str, Any]:
    """The figures of several cases as one: the worst of each; what is None anywhere does not count there."""
    merged: dict[str, Any] = {}
    for one in figures:
        for name, value in one.items():
            known = merged.get(name)
            if known is None or value is None:
                merged[name] = value if known is None else known
            elif isinstance(value, bool):
                merged[name] = (known and value) if name.endswith("_correct") else (known or value)
            else:
                merged[name] = max(known, value)
    return merged


def _comparable(tensor: torch.Tensor) -> torch.Tensor:
    """Values in a type in which differences are exact enough: fp32 for small floats, else 64 bits."""
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor)
    if tensor.dtype in (torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2, torch.float32):
        return tensor.to(torch.float32)
    return tensor.to(torch.float64)


def _first(where: torch.Tensor, out: torch.Tensor, ref: torch.Tensor) -> list[dict[str, Any]]:
    """The first wrong places: index, expected and got."""
    indices = torch.nonzero(where.reshape(-1))[:_SHOWN, 0].tolist()
    flat_out, flat_ref = out.reshape(-1), ref.reshape(-1)
    shape = tuple(where.shape)
    return [
        {
            "index": _unravel(i, shape),
            "expected": float(flat_ref[i]),
            "got": float(flat_out[i]),
        }
        for i in indices
    ]


def _unravel(flat: int, shape: tuple[int, ...]) -> list[int]:
    index: list[int] = []
    for size in reversed(shape):
        flat, place = divmod(flat, size)
        index.insert(0, place)
    return index


def _wrong(category: Category, message: str, **facts: Any) -> EvaluationEnded:
    return EvaluationEnded(category, message, Phase.CHECK, **facts)
