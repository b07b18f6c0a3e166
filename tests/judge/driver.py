"""A driver of GPUs that is made up: Triton loads it where there is no GPU."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

from triton.backends import nvidia


def make_driver(folder: Path, **functions: str) -> dict[str, str]:
    """Make a driver that has all functions; return the variables by which it is found.

    Those that are given in C do as they say, and the others nothing.
    """
    source = Path(nvidia.__file__).with_name("driver.c").read_text()
    names = sorted(set(re.findall(r"\bcu[A-Z]\w+", source)) | set(functions))
    text = "".join(functions.get(name, f"void {name}(void) {{}}\n") for name in names)
    command = ["gcc", "-shared", "-fPIC", "-w", "-o", str(folder / "libcuda.so.1"), "-x", "c", "-"]
    subprocess.run(command, input=text, text=True, check=True)
    return {"CUDA_VISIBLE_DEVICES": "0", "TRITON_LIBCUDA_PATH": str(folder), "LD_LIBRARY_PATH": str(folder)}
