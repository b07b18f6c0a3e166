"""Runs a gallery kernel beside its reference in this process: ``run_kernel.py PROBLEM KERNEL PRECISION``.

A program of its own, because Triton's interpreter must be chosen before Triton is imported.
Exits with 0 where the outputs agree on three inputs, else says where they do not.
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import torch

DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


def load(path: Path) -> ModuleType:
    """Import a file from its path, as a module that inspection finds (Triton reads sources)."""
    spec = importlib.util.spec_from_file_location(f"gallery_{path.parent.name}_{path.stem}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def main() -> None:
    """Compare, and raise where the two differ."""
    problem, kernel, dtype = load(Path(sys.argv[1])), load(Path(sys.argv[2])), DTYPES[sys.argv[3]]

    def construct(kind: type[torch.nn.Module]) -> torch.nn.Module:
        torch.manual_seed(42)
        return kind(*problem.get_init_inputs()).to(dtype).eval()

    reference, candidate = construct(problem.Model), construct(kernel.ModelNew)
    tolerance = 1e-4 if dtype is torch.float32 else 1e-2
    with torch.no_grad():
        for seed in range(3):
            torch.manual_seed(seed)
            inputs = [x.to(dtype) if x.is_floating_point() else x for x in problem.get_inputs()]
            kept = [x.clone() for x in inputs]
            torch.testing.assert_close(
                candidate(*inputs), reference(*kept), atol=tolerance, rtol=tolerance, check_stride=False
            )
            torch.testing.assert_close(inputs, kept, atol=0, rtol=0)


if __name__ == "__main__":
    main()
