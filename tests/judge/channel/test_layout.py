"""Layouts of inputs, and marks of memory that no call has written."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from workers.judge.channel.layout import checked, put_back, taken_apart
from workers.judge.channel.marks import mark, unwritten
from workers.judge.channel.tensors import TensorSpec

ROWS = torch.arange(24.0).reshape(4, 6)


@pytest.mark.parametrize(
    ("tensors", "roots"),
    [
        ([ROWS, torch.ones(2, 3).t()], 2),
        ([ROWS[:, ::2], ROWS[1:, 1:3]], 1),
        ([ROWS[:, :1].expand(4, 6)], 1),
        ([ROWS.reshape(-1).unfold(0, 4, 1), ROWS.t()], 1),
        ([torch.empty(0, 3), torch.tensor(1.0)], 2),
    ],
    ids=["dense", "slices", "expanded", "windows", "empty"],
)
def test_inputs_are_put_back_as_they_were(tensors: list[torch.Tensor], roots: int) -> None:
    made, views = taken_apart(tensors)
    assert len(made) == roots
    checked([tuple(view) for view in views], [TensorSpec.of(root) for root in made])
    for before, after in zip(tensors, put_back(made, views), strict=True):
        assert (after.shape, after.stride()) == (before.shape, before.stride())
        assert torch.equal(after, before)


@pytest.mark.parametrize(
    "view",
    [(1, 0, (2,), (1,)), (0, 23, (2,), (1,)), (0, 0, (2,), (1, 1)), (0, -1, (2,), (1,)), (0, 0, (2.0,), (1,)), (0,)],
)
def test_impossible_views_are_refused(view: Any) -> None:
    with pytest.raises((TypeError, ValueError)):
        checked([view], [TensorSpec.of(ROWS)])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.complex128, torch.int64, torch.float8_e5m2])
def test_marked_values_are_recognized(dtype: torch.dtype) -> None:
    out = torch.zeros(4, 6, dtype=dtype)
    ref = out.clone()
    mark(out[:, 4:])
    mark(out[:1].expand(3, 6))
    if dtype.is_complex:
        out, ref = torch.view_as_real(out)[..., 0], torch.view_as_real(ref)[..., 0]
    assert unwritten(out.reshape(-1), ref.reshape(-1)).tolist() == [0, 1, 2, 3, 4, 5, 10, 11, 16, 17, 22, 23]
