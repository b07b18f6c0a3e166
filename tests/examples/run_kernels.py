"""Runs gallery kernels beside their references in this process.

A program of its own, because Triton's interpreter must be chosen before Triton is imported. Reads a JSON list
of ``[name, problem, kernel, precision]`` from stdin; writes a JSON object to the file named as argument: by
name, null where the outputs agree on two inputs, else what went wrong.
"""

from __future__ import annotations

import importlib.util
import json
import sys
import traceback
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


def compare(problem: ModuleType, kernel: ModuleType, dtype: torch.dtype) -> None:
    """Raise where the kernel's outputs are not the reference's or an input was changed."""

    def construct(kind: type[torch.nn.Module]) -> torch.nn.Module:
        torch.manual_seed(42)
        return kind(*problem.get_init_inputs()).to(dtype)

    reference, candidate = construct(problem.Model), construct(kernel.ModelNew)
    tolerance = 1e-4 if dtype is torch.float32 else 1e-2
    with torch.no_grad():
        for seed in range(2):
            torch.manual_seed(seed)
            inputs = [x.to(dtype) if x.is_floating_point() else x for x in problem.get_inputs()]
            kept = [x.clone() for x in inputs]
            torch.testing.assert_close(candidate(*inputs), reference(*kept), atol=tolerance, rtol=tolerance)
            torch.testing.assert_close(inputs, kept, atol=0, rtol=0)


def main() -> None:
    """Run what stdin names."""
    found: dict[str, str | None] = {}
    for name, problem, kernel, precision in json.load(sys.stdin):
        try:
            compare(load(Path(problem)), load(Path(kernel)), DTYPES[precision])
            found[name] = None
        except Exception:  # noqa: BLE001 -- reported, one kernel must not hide the others
            found[name] = traceback.format_exc()
    Path(sys.argv[1]).write_text(json.dumps(found))


if __name__ == "__main__":
    main()
