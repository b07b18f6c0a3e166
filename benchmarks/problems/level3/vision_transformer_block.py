"""Patches of images, and one transformer layer over them. It imports einops."""

import torch
import torch.nn as nn
import torch.nn.functional as F
from einops import rearrange, reduce
from einops.layers.torch import Rearrange


class Model(nn.Module):
    def __init__(self, patch: int, size: int, heads: int, classes: int):
        super().__init__()
        self.heads = heads
        self.embed = nn.Sequential(
            Rearrange("b c (h p) (w q) -> b (h w) (p q c)", p=patch, q=patch), nn.Linear(3 * patch * patch, size)
        )
        self.norms = nn.ModuleList([nn.LayerNorm(size), nn.LayerNorm(size)])
        self.qkv = nn.Linear(size, 3 * size, bias=False)
        self.project = nn.Linear(size, size)
        self.mlp = nn.Sequential(nn.Linear(size, 4 * size), nn.GELU(), nn.Linear(4 * size, size))
        self.classify = nn.Linear(size, classes)

    def attend(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = rearrange(self.qkv(x), "b n (three h d) -> three b h n d", three=3, h=self.heads)
        x = F.scaled_dot_product_attention(q, k, v)
        return self.project(rearrange(x, "b h n d -> b n (h d)"))

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        x = self.embed(images)
        x = x + self.attend(self.norms[0](x))
        x = x + self.mlp(self.norms[1](x))
        return self.classify(reduce(x, "b n d -> b d", "mean"))


def get_inputs():
    return [torch.rand(32, 3, 224, 224)]


def get_init_inputs():
    return [16, 384, 6, 1000]
