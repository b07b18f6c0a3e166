"""Error figures of tensors as JSON: ``python one_pass.py cpu|cuda``. A test that used CUDA itself could not fork."""

from __future__ import annotations

import itertools
import json
import sys
from typing import Any

import torch

from kqueue.contract import Settings
from workers.judge.ending import EvaluationEnded
from workers.judge.pipeline import compare
from workers.judge.pipeline.cases import Case

SIZES = (1003, (1 << 20) + 3)
DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)


def figures(
    device: str, size: int, dtype: torch.dtype, offset: int, *, all_finite: bool, knows_exact: bool
) -> dict[str, Any]:
    """Compare two tensors that have the same values on any device."""
    generator = torch.Generator().manual_seed(1)
    exact = 3 * torch.randn(size + offset, dtype=torch.float64, generator=generator)
    ref = exact.to(dtype)
    out = (exact * (1 + 1e-2 * torch.randn(exact.shape, dtype=torch.float64, generator=generator))).to(dtype)
    if not all_finite:
        most = torch.finfo(dtype).max
        out[8:12] = torch.tensor([torch.nan, torch.inf, -torch.inf, most], dtype=dtype)
        ref[10:16] = torch.tensor([-torch.inf, -most, torch.nan, torch.inf, 0.0, -0.0], dtype=dtype)
    mine, theirs, truth = (tensor.to(device)[offset:] for tensor in (out, ref, exact))
    case = Case(0, outputs=[theirs], exact=[truth] if knows_exact else None)
    [found] = compare.check_each([([mine], case)], Settings())
    errors = found.outcome.facts.errors if isinstance(found, EvaluationEnded) else found.errors
    assert errors is not None
    [apart] = compare.differences([mine], [theirs], case, Settings(), times=2.0)
    return errors.model_dump() | {"wrong": apart.wrong, "strays": apart.strays, "spread": apart.spread}


def main() -> None:
    found: dict[str, dict[str, Any]] = {}
    yes_or_no = (True, False)
    for size, dtype, offset, all_finite, knows_exact in itertools.product(SIZES, DTYPES, (0, 1), yes_or_no, yes_or_no):
        name = f"{size} {dtype} offset={offset} all_finite={all_finite} knows_exact={knows_exact}"
        found[name] = figures(sys.argv[1], size, dtype, offset, all_finite=all_finite, knows_exact=knows_exact)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
