"""flashinfer-bench's sets: definitions (JSON), workloads (JSON lines) and solutions (JSON).

A definition's ``run`` becomes ``Model``, and its workloads the shapes. Tensors that a workload stores in a safetensors
file are read as bytes and become part of the problem, if they are small.
"""

from __future__ import annotations

import base64
import json
import struct
import zlib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, Literal

from pydantic import create_model

from kqueue.contract import MAX_SOURCE_BYTES
from kqueue.errors import InvalidRequest
from kqueue.formats import common
from kqueue.formats.common import Problem, Refused

NAME: Final = "flashinfer-bench"
TITLE: Final = "flashinfer-bench"
#: Maximum number of bytes of a problem's stored tensors as text, and of one of them before compression.
_MOST_STORED: Final = 512 << 10
_MOST_TENSOR: Final = 8 << 20
#: Dtypes of inputs and outputs, by their names in safetensors files.
_DTYPES: Final = {
    "BOOL": "bool", "F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16",
    "F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2", "I64": "int64", "I32": "int32", "I16": "int16", "I8": "int8",
}  # fmt: skip
#: Functions of problems and kernels. ``AXES``, ``INPUTS`` and ``OUTPUTS`` are assigned before them.
_OUTPUTS: Final = """

def _outputs(result):
    if isinstance(result, dict):
        result = [result[name] for name in OUTPUTS]
    parts = result if isinstance(result, (tuple, list)) else [result]
    dtypes = [getattr(_torch, dtype) for _, dtype in OUTPUTS.values()]
    return tuple(p if _torch.is_tensor(p) else _torch.tensor(p, dtype=d) for p, d in zip(parts, dtypes, strict=True))
"""
_MAKE: Final = """

import base64 as _base64
import zlib as _zlib


def _made(key, shape, dtype):
    kind = getattr(_torch, dtype)
    if key is not None:
        data = bytearray(_zlib.decompress(_base64.b64decode(STORED[key])))
        return _torch.frombuffer(data, dtype=kind).reshape(shape)
    if kind.is_floating_point:
        drawn = _torch.randn(shape)
        return (drawn.clamp(-2, 2) if kind.itemsize == 1 else drawn).to(kind)
    low, high = {"bool": (0, 2), "int8": (-128, 128)}.get(dtype, (-1024, 1024))
    return _torch.randint(low, high, shape, dtype=kind)


def get_inputs(axes, scalars, stored):
    sizes, made = {**AXES, **axes}, []
    for name, (dims, dtype) in INPUTS.items():
        shape = [sizes[dim] for dim in dims or ()]
        made.append(scalars[name] if name in scalars else _made(stored.get(name), shape, dtype))
    return made
"""
_CLASS: Final = """

class {}(_torch.nn.Module):
    def forward(self, *inputs):
"""
_INTO: Final = """\
        sizes = dict(AXES)
        for (dims, _), value in zip(INPUTS.values(), inputs, strict=True):
            sizes.update(zip(dims or (), getattr(value, "shape", ())))
        device = next((value.device for value in inputs if _torch.is_tensor(value)), None)
        made = [
            _torch.empty([sizes[dim] for dim in dims or ()], dtype=getattr(_torch, dtype), device=device)
            for dims, dtype in OUTPUTS.values()
        ]
        _entry(*inputs, *made)
        return tuple(made)
"""
#: The parts of the project's JSON that are read.
_Axis: Any = create_model("_Axis", type=Literal["const", "var"], value=(int | None, None))
_Spec: Any = create_model("_Spec", shape=list[str] | None, dtype=str)
_Specs: Any = dict[str, _Spec]
_Axes: Any = dict[str, _Axis]
_Definition: Any = create_model("_Definition", name=str, axes=_Axes, inputs=_Specs, outputs=_Specs, reference=str)
_Kind: Any = Literal["random", "scalar", "safetensors"]
_Value: Any = (bool | int | float | None, None)
_Source: Any = create_model("_Source", type=_Kind, value=_Value, path=(str, ""), tensor_key=(str, ""))
_Workload: Any = create_model("_Workload", axes=dict[str, int], inputs=dict[str, _Source])
_Build: Any = create_model("_Build", entry_point=str, destination_passing_style=(bool, True))
_File: Any = create_model("_File", path=str, content=str)
_Solution: Any = create_model("_Solution", definition=str, spec=_Build, sources=list[_File])


def find(path: Path) -> list[Path]:
    """Return the files of definitions at a path."""
    found = [file for file in common.files(path, "*.json") if file == path or "definitions" in file.parts]
    texts = {file: file.read_bytes() for file in found if file.stat().st_size <= MAX_SOURCE_BYTES}
    return [file for file, text in texts.items() if {"axes", "reference"} <= common.fields(text).keys()]


def read(path: Path) -> Iterator[Problem | Refused]:
    """Yield the definitions at a path, with all workloads and solutions of their set."""
    definitions = find(path)
    # The set is the folder with ``definitions``.
    above = [folder for folder in definitions[0].parents if folder.name == "definitions"]
    root = above[-1].parent if above else definitions[0].parent
    solutions: dict[str, dict[str, str]] = {}
    workloads: dict[str, list[dict[str, Any]]] = {}
    for text in map(common.read_text, common.files(root, "*.jsonl")):
        for row in map(common.fields, text.splitlines()):
            if isinstance(workload := row.get("workload"), dict):
                workloads.setdefault(str(row.get("definition")), []).append(workload)
    for text in map(common.read_text, common.files(root, "*.json")):
        if "sources" in (known := common.fields(text)):
            solutions.setdefault(str(known.get("definition")), {})[str(known.get("name"))] = text
    for file in definitions:
        fields = common.fields(common.read_text(file))
        name = str(fields.get("name", file.stem))
        given = fields, workloads.get(name, []), root, solutions.get(name, {})
        yield common.attempt(name, lambda given=given: _translate(*given))


def kernel(source: str, facts: Mapping[str, Any], problem: str) -> str:  # noqa: ARG001
    """Return the kernel that calls a solution (JSON), or the function ``run`` of Python source."""
    entry, into = "run", False
    if source.lstrip().startswith("{"):
        solution = common.valid(_Solution, common.fields(source))
        if solution.definition != facts["name"]:
            raise InvalidRequest(f"kernel: the solution is for {solution.definition}, not for {facts['name']}")
        file, _, entry = solution.spec.entry_point.partition("::")
        files = {_module(one.path): one.content for one in solution.sources}
        if not file.endswith(".py") or not entry.isidentifier() or (main := _module(file)) not in files:
            raise InvalidRequest(f"kernel: {solution.spec.entry_point} is no function of a Python file of the solution")
        text = files.pop(main)
        source, into = common.with_modules(text, files, file), solution.spec.destination_passing_style
    if entry not in common.defined(source):
        return source  # The judge reports it.
    literals = "".join(f"{name} = {facts[name.lower()]!r}\n" for name in ("AXES", "INPUTS", "OUTPUTS"))
    call = _INTO if into else "        return _outputs(_entry(*inputs))\n"
    return f"{source}\n{common.TORCH}\n{literals}_entry = {entry}\n{_OUTPUTS}{_CLASS.format('ModelNew')}{call}"


def _translate(fields: object, listed: Sequence[Any], root: Path, solutions: Mapping[str, str]) -> Problem:
    definition = common.valid(_Definition, fields)
    run = common.function(common.reference(definition.reference, "reference", {"run"}), "run")
    given = [one.arg for one in run.args.args] if run else []
    if given != list(definition.inputs):
        raise InvalidRequest(f"run takes {', '.join(given)}, but the inputs are {', '.join(definition.inputs)}")
    for name, spec in {**definition.inputs, **definition.outputs}.items():
        if spec.dtype not in _DTYPES.values():
            raise InvalidRequest(f"{name} has the dtype {spec.dtype}, whose values cannot be drawn")
        if not definition.axes.keys() >= set(spec.shape or ()):
            raise InvalidRequest(f"{name} has an axis that is not defined")
    stored: dict[str, str] = {}
    shapes: list[dict[str, Any]] = []
    reasons: Counter[str] = Counter()
    for raw in listed:
        try:
            shapes.append(_shape(definition, raw, root, stored))
        except InvalidRequest as error:
            reasons[str(error)] += 1
    notes = [f"{count} of {len(listed)} workloads left out: {reason}" for reason, count in reasons.items()]
    if not shapes:
        raise InvalidRequest("; ".join(notes) or "the set has no workload for it")
    shapes = common.distinct(shapes, notes, "workloads")
    used = {key for shape in shapes for key in shape["args"]["stored"].values()}
    sizes = {name: axis.value for name, axis in definition.axes.items() if axis.type == "const"}
    specs = definition.inputs, definition.outputs
    inputs, outputs = ({name: (spec.shape, spec.dtype) for name, spec in one.items()} for one in specs)
    facts: dict[str, Any] = {"format": NAME, "name": definition.name, "axes": sizes, "inputs": inputs}
    facts |= {"outputs": outputs, "workloads": [shape.pop("workload") for shape in shapes]}
    kept = {key: text for key, text in stored.items() if key in used}
    literals = common.assignments(facts, shapes, AXES=sizes, INPUTS=inputs, OUTPUTS=outputs, STORED=kept)
    source = f"{definition.reference}\n{common.TORCH}\n{literals}{_OUTPUTS}{_MAKE}{_CLASS.format('Model')}"
    return Problem(definition.name, f"{source}        return _outputs(run(*inputs))\n", tuple(notes), solutions)


def _shape(definition: Any, raw: Mapping[str, Any], root: Path, stored: dict[str, str]) -> dict[str, Any]:
    """Return the shape of a workload. Its stored tensors are added to ``stored``."""
    workload = common.valid(_Workload, raw)
    free = {name for name, axis in definition.axes.items() if axis.type == "var"}
    if free != workload.axes.keys() or definition.inputs.keys() != workload.inputs.keys():
        raise InvalidRequest("its axes or inputs do not fit the definition's")
    sizes = {**{name: axis.value for name, axis in definition.axes.items()}, **workload.axes}
    files = {name: one for name, one in workload.inputs.items() if one.type == "safetensors"}
    keys = {name: f"{one.path}:{one.tensor_key}" for name, one in files.items()}
    new: dict[str, str] = {}
    for name, one in files.items():
        spec = definition.inputs[name]
        if keys[name] not in stored:
            data = _tensor(root, one, spec.dtype, [sizes[dim] for dim in spec.shape or ()])
            new[keys[name]] = base64.b64encode(zlib.compress(data, 9)).decode()
    if sum(map(len, (*stored.values(), *new.values()))) > _MOST_STORED:
        raise InvalidRequest(f"its stored tensors do not fit into the {_MOST_STORED >> 10} KiB that a problem can hold")
    stored.update(new)
    scalars = {name: one.value for name, one in workload.inputs.items() if one.type == "scalar"}
    name = ", ".join(f"{name}={size}" for name, size in workload.axes.items())
    return {"name": name, "args": {"axes": workload.axes, "scalars": scalars, "stored": keys}, "workload": raw}


def _tensor(root: Path, given: Any, dtype: str, shape: Sequence[int]) -> bytes:
    """Return the bytes of a tensor in a safetensors file below the set's folder."""
    path = (root / given.path).resolve()
    if not path.is_relative_to(root.resolve()) or not path.is_file():
        raise InvalidRequest("a safetensors file is not there, or outside the set's folder")
    try:
        with path.open("rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            entry = json.loads(file.read(min(length, _MOST_TENSOR)))[given.tensor_key]
            begin, end = entry["data_offsets"]
            if _DTYPES.get(entry["dtype"]) != dtype or entry["shape"] != shape or not 0 <= end - begin <= _MOST_TENSOR:
                raise InvalidRequest(f"a stored tensor is not {dtype} {shape}, or larger than {_MOST_TENSOR} bytes")
            file.seek(8 + length + begin)
            return file.read(end - begin)
    except (OSError, struct.error, ValueError, KeyError, TypeError):
        raise InvalidRequest("a file is no safetensors file, or has no such tensor") from None


def _module(file: str) -> str:
    return file.removesuffix(".py").replace("/", ".")
