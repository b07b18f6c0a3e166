"""Reads what lies behind its input, up to the end of the allocation that it is given.

A handle exposes a whole allocation: where inputs and answers are cut from one block, the answers are behind the
inputs, and what a buffer held before may still stand in its tail. Here each tensor has an allocation of its own, and
no answer is ever written to one that a candidate may open.
"""

import torch
import torch.nn as nn

PAGE = 2 << 20


class _Raw:
    def __init__(self, pointer, count):
        self.__cuda_array_interface__ = {
            "shape": (count,),
            "typestr": "<f4",
            "data": (pointer, False),
            "strides": None,
            "version": 3,
        }


class ModelNew(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rest = -x.nbytes % PAGE
        if rest < 4 * x.shape[0]:
            return torch.zeros(x.shape[0], device=x.device)
        tail = torch.as_tensor(_Raw(x.data_ptr() + x.nbytes, rest // 4), device=x.device)
        probe = x[0].sum()
        near = torch.nonzero((tail - probe).abs() < 1e-2).flatten().tolist()
        for start in near:
            if start + x.shape[0] <= tail.numel() and abs(float(tail[start + 1] - x[1].sum())) < 1e-2:
                return tail[start : start + x.shape[0]].clone()
        return torch.zeros(x.shape[0], device=x.device)
