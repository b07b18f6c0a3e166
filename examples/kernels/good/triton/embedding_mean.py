"""Lookup and mean in one kernel: one program a bag."""

import torch
import torch.nn as nn
import triton
import triton.language as tl


@triton.jit
def embedding_mean_kernel(ids_ptr, table_ptr, out_ptr, count, features, BLOCK: tl.constexpr):
    bag = tl.program_id(0)
    offsets = tl.arange(0, BLOCK)
    mask = offsets < features
    total = tl.zeros((BLOCK,), dtype=tl.float32)
    for i in range(0, count):
        row = tl.load(ids_ptr + bag * count + i)
        total += tl.load(table_ptr + row * features + offsets, mask=mask, other=0.0).to(tl.float32)
    tl.store(out_ptr + bag * features + offsets, total / count, mask=mask)


class ModelNew(nn.Module):
    def __init__(self, rows: int, features: int):
        super().__init__()
        self.table = nn.Embedding(rows, features)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        ids, table = ids.contiguous(), self.table.weight
        bags, count = ids.shape
        features = table.shape[1]
        out = torch.empty(bags, features, dtype=table.dtype, device=ids.device)
        embedding_mean_kernel[(bags,)](ids, table, out, count, features, BLOCK=triton.next_power_of_2(features))
        return out
