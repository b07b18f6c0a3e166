"""Small sets of problems in other projects' formats, written by hand for the tests."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any, Final

GPUMODE: Final = {
    "utils.py": "import torch\ndef near(data, output):\n    return torch.allclose(output, data, rtol=0.5)\n",
    "scale/task.py": "from typing import TypeVar\ninput_t = TypeVar('input_t')\noutput_t = TypeVar('output_t')\n",
    "scale/task.yml": """
lang: py
files: [{"name": "submission.py", "source": "@SUBMISSION@"}, {"name": "task.py", "source": "task.py"},
        {"name": "utils.py", "source": "../utils.py"}, {"name": "reference.py", "source": "reference.py"}]
tests: [{"size": 4, "seed": 1}]
benchmarks: [{"size": 8, "seed": 2}, {"size": 8, "seed": 3}]
""",
    "scale/reference.py": """
from __future__ import annotations
import torch
from task import input_t, output_t
from utils import near
def ref_kernel(data: input_t) -> output_t:
    x, factor, out = data
    out[...] = x * factor
    return out
def generate_input(size: int, seed: int):
    gen = torch.Generator(device="cuda").manual_seed(seed)
    x = torch.randn(size, size, device="cuda", generator=gen)
    return x, 2.0, torch.empty_like(x)
def check_implementation(data, output):
    return near(data, output) and torch.allclose(output, ref_kernel(data), rtol=1e-3, atol=1e-2)
""",
    "scale/submission.py": """
from task import input_t, output_t
def custom_kernel(data: input_t) -> output_t:
    x, factor, out = data
    return out.copy_(x).mul_(factor)
""",
}
#: Changes that make copies of the task malformed.
BROKEN: Final[dict[str, dict[str, tuple[str, str]]]] = {
    "property": {"reference.py": ("near(data, output) and torch.allclose", "bool")},
    "distributed": {"task.yml": ("lang: py", "lang: py\nmulti_gpu: true")},
    "outside": {"task.yml": ("../utils.py", "../../utils.py")},
    "nothing": {"reference.py": ("def ref_kernel", "def other")},
    "text": {"task.yml": ("lang: py", "lang: [")},
}

ROW: Final[dict[str, Any]] = {
    "entry_point": "Adder",
    "uuid": 7,
    "python_code": """
import torch
class Adder(torch.nn.Module):
    def __init__(self, offset):
        super(Adder, self).__init__()
        self.offset = offset
    def forward(self, x):
        return x + self.offset
def get_inputs():
    return [torch.randn(4, 4)]
def get_init_inputs():
    return [[], {"offset": 3}]
""",
    "triton_code": """
import torch
class AdderNew(torch.nn.Module):
    def __init__(self, offset):
        super().__init__()
        self.forward = lambda x: x.add(offset)
""",
}

DEFINITION: Final[dict[str, Any]] = json.loads("""
{"name": "pick", "op_type": "pick", "axes": {"N": {"type": "var"}, "K": {"type": "const", "value": 3}},
 "inputs": {"x": {"shape": ["N", "K"], "dtype": "float32"}, "at": {"shape": ["N"], "dtype": "int32"},
            "eps": {"shape": null, "dtype": "float32"}},
 "outputs": {"y": {"shape": ["N", "K"], "dtype": "float32"}},
 "reference": "import time\\n\\ndef run(x, at, eps):\\n    time.sleep(2e-3)\\n    return {'y': x[at.long()] + eps}\\n"}
""")
SOLUTION: Final[dict[str, Any]] = json.loads("""
{"name": "into", "definition": "pick", "author": "a test",
 "spec": {"language": "python", "target_hardware": ["cpu"], "entry_point": "src/main.py::run"},
 "sources": [
   {"path": "src/main.py", "content": "from parts import pick\\ndef run(x, at, eps, y):\\n  y.copy_(pick(x, at)+eps)"},
   {"path": "parts.py", "content": "import time\\ndef pick(x, at):\\n  time.sleep(2e-3)\\n  return x[at.long()]\\n"}]}
""")

ROBUST: Final = {
    "func_forward.py": """
import torch
def forward_fn(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return x * weight
class Model(torch.nn.Module):
    def __init__(self, size: int, scale: float = 2.0):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(size) * scale)
    def forward(self, x, fn=forward_fn):
        return fn(x, self.weight)
def get_inputs(rows: int = 2, size: int = 5):
    return [torch.randn(rows, size)]
""",
    "config_forward.json": """
{"multi_input_configs": [{"rows": 2}, {"rows": 3}], "multi_init_configs": [{"scale": 0.5}],
 "multi_shared_configs": [{"size": 4}]}
""",
    "forward.cu": 'PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) { m.def("forward", &forward); }',
}


def write(root: Path, files: dict[str, str]) -> Path:
    """Write files below a folder, which is returned."""
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


def gpumode(root: Path) -> Path:
    """Write a task, and malformed copies of it."""
    write(root, GPUMODE)
    for name, changes in BROKEN.items():
        for place, text in GPUMODE.items():
            old, new = changes.get(place.removeprefix("scale/"), ("", ""))
            write(root, {place.replace("scale", name): text.replace(old, new) if old else text})
    return root


def flashinfer(root: Path) -> Path:
    """Write a set with two workloads that can be used, and two that cannot."""
    tensor = struct.pack("<2i", 1, 0)
    header = json.dumps({"at": {"dtype": "I32", "shape": [2], "data_offsets": [0, len(tensor)]}}).encode()
    (root / "blob").mkdir(parents=True)
    (root / "blob" / "at.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + tensor)
    rows: list[str] = []
    places = {0.5: "blob/at.safetensors", 0.0: "../secret", 1.0: "definitions/pick.json", 0.25: "blob/at.safetensors"}
    for eps, place in places.items():
        stored = {"type": "safetensors", "path": place, "tensor_key": "at"}
        inputs = {"x": {"type": "random"}, "at": stored, "eps": {"type": "scalar", "value": eps}}
        workload = {"uuid": f"w{len(rows)}", "axes": {"N": 2}, "inputs": inputs}
        rows.append(json.dumps({"definition": "pick", "workload": workload}))
    odd = {**DEFINITION, "name": "odd", "reference": "def other(): ..."}
    files = {"definitions/pick.json": json.dumps(DEFINITION), "definitions/odd.json": json.dumps(odd)}
    return write(root, {**files, "workloads/pick.jsonl": "\n".join(rows), "solutions/into.json": json.dumps(SOLUTION)})
