"""Descriptions of a model's parameters, by which the judge explains wrong values.

A kernel describes its own parameters, so a description is a claim, and no verdict depends on it.
"""

from __future__ import annotations

from typing import Final

import torch

from workers.judge.channel.bits import checksum

#: Maximum length of a description in bytes, and total size in bytes up to which parameters have checksums.
_LONGEST: Final = 2000
_SUMMED_BYTES: Final = 1 << 30
#: Modules whose results depend on the training mode.
_MODAL: Final = (
    *(torch.nn.BatchNorm1d, torch.nn.BatchNorm2d, torch.nn.BatchNorm3d, torch.nn.SyncBatchNorm),
    *(torch.nn.Dropout, torch.nn.Dropout1d, torch.nn.Dropout2d, torch.nn.Dropout3d, torch.nn.AlphaDropout),
)


def described(model: torch.nn.Module) -> str:
    """Return a line with the modules that depend on the training mode and are in it, then one for each parameter."""
    named = list(torch.nn.Module.named_parameters(model))
    summed = sum(each.nbytes for _, each in named) <= _SUMMED_BYTES
    modal = {type(each).__name__ for each in model.modules() if each.training and isinstance(each, _MODAL)}
    lines = [" ".join(sorted(modal))]
    for name, each in named:
        lines.append(f"{name}\t{list(each.shape)}\t{checksum(each.detach()) if summed else 0:x}")
        if sum(map(len, lines)) + len(lines) > _LONGEST:
            return "\n".join(lines[:-1])
    return "\n".join(lines)
