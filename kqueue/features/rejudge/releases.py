"""Releases of whole repositories: the decks of kernelbench.com with their audits, and CUDA-L2's kernels for the H100.

A reader takes the folder of a checkout and yields the fields of a claim, or the reason why an entry has none. Reading
runs nothing.
"""

from __future__ import annotations

import ast
import csv
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from textwrap import indent
from typing import Any, Final

from pydantic import create_model

from kqueue.errors import InvalidRequest
from kqueue.formats import common
from kqueue.formats.common import Refused
from kqueue.judging import guess_backend

Entry = dict[str, Any] | Refused

_Audit: Any = create_model("_Audit", verdict=str)
_Facts: Any = create_model("_Facts", tolerance=(dict[str, Any], {}))
_AUDITS: Final = "benchmarks/*/results/annotations/*.yaml"
_SOLUTION: Final = "solution.py.txt"
#: The board whose device kqueue judges on, and signs of a source for newer GPUs.
_BOARD: Final = "h100"
_NEWER: Final = re.compile(r"\b(?:sm|compute)_1[0-2]\d|\bSm1[0-2]\d|[\"']1[02]\.\d")
#: A deck's check that calls more of a solution than its model.
_OTHERS: Final = re.compile(r"\bsolution\.(?!py\b|Model\b)\w+\(|\bsol_model\.step\(")
_MAKERS: Final = ("get_inputs", "get_init_inputs")
#: The names of weights and buffers that a reference's `state_dict` has.
_STATE: Final = re.compile(r"""(?:register_buffer\(["']|self\.)(\w+)(?:["'](?!.*persistent=False)| = nn\.Parameter)""")
#: A deck sets the names of a shape in the reference's module.
_SIZED: Final = """
_inputs, _init_inputs = get_inputs, get_init_inputs


def get_inputs({0}):
    globals().update(locals())
    return _inputs()


def get_init_inputs({0}):
    globals().update(locals())
    return _init_inputs()
"""
#: A deck loads the reference's weights into each solution. The judge sets one seed before both constructors, so the
#: reference that the kernel constructs first has them too.
_WEIGHTED: Final = """

def _reference():
{0}
    return Model


class ModelNew(Model):
    def __init__(self, *sizes):
        weights = _reference()(*sizes).state_dict()
        super().__init__(*sizes)
        self.load_state_dict(weights)
        self.eval()
"""

_SPEEDUPS: Final = "eval_results/cuda_l2_h100_*_speedup_offline.csv"
_TILE: Final = re.compile(r"\b(B[MNK])\s*=\s*Int<(\d+)>")
#: CUDA-L2's functions get the second operand in both layouts. `torch.matmul` takes the columns to the same function of
#: cuBLAS as the column `cuBLAS-tn`.
_PRODUCT: Final = """import torch


class Model(torch.nn.Module):
    def forward(self, a, b, columns):
        return torch.matmul(a, columns.view(b.shape[1], b.shape[0]).t())


def get_inputs():
    b = torch.randn({k}, {n}).half()
    return [torch.randn({m}, {k}).half(), b, b.t().contiguous().view(b.shape)]
"""
#: They also get the memory of the product.
_CUDA_L2: Final = """from importlib.util import find_spec

import torch
from torch.utils.cpp_extension import load_inline

source = {source!r}
headers = []
if "cutlass/" in source or "cute/" in source:
    if (found := find_spec("cutlass_library")) is None:
        raise ModuleNotFoundError("its headers are CUTLASS's: pip install nvidia-cutlass==4.2.0.0")
    folder = found.submodule_search_locations[0] + "/source/"
    headers = ["-isystem", folder + "include", "-isystem", folder + "tools/util/include"]
library = load_inline(
    "cuda_l2",
    "void {function}(torch::Tensor a, torch::Tensor b, torch::Tensor b_col_major, torch::Tensor c);",
    source,
    functions=["{function}"],
    extra_cuda_cflags=[
        "-O3", "-arch=sm_90a", "--expt-relaxed-constexpr", "--expt-extended-lambda", "--use_fast_math",
        "-U__CUDA_NO_HALF_OPERATORS__", "-U__CUDA_NO_HALF_CONVERSIONS__", "-U__CUDA_NO_HALF2_OPERATORS__",
        "-U__CUDA_NO_BFLOAT16_CONVERSIONS__", *headers,
    ],
)


class ModelNew(torch.nn.Module):
    def forward(self, a, b, columns):
        c = a.new_empty(a.shape[0], b.shape[1])
        library.{function}(a, b, columns, c)
        return c
"""


def reader(path: Path) -> Callable[[Path], Iterator[Entry]] | None:
    """Return the reader of a checkout, or None for another folder."""
    kinds = {_AUDITS: _decks, _SPEEDUPS: _cuda_l2}
    return next((read for pattern, read in kinds.items() if any(path.glob(pattern))), None)


def _each(name: str, read: Callable[[], Mapping[str, Any]]) -> Entry:
    try:
        return {"name": name, **read()}
    except InvalidRequest as error:
        return Refused(name, str(error))


# kernelbench.com -------------------------------------------------------------------------------------


def _decks(root: Path) -> Iterator[Entry]:
    """Read the solutions that have an audit. One on several boards is taken from the last by name, the H100's."""
    files = common.files(root / "public", f"*{_SOLUTION}")
    solutions = {file.name.removesuffix(_SOLUTION).rstrip("._"): file for file in files}
    for audit in sorted(root.glob(_AUDITS)):
        deck = audit.parents[2]
        yield _each(f"{deck.name}/{audit.stem}", lambda deck=deck, audit=audit: _solution(root, deck, audit, solutions))


def _solution(root: Path, deck: Path, audit: Path, solutions: Mapping[str, Path]) -> Mapping[str, Any]:
    """Read an audited solution with its problem."""
    file = solutions.get(audit.stem)
    if file is None:
        raise InvalidRequest("its solution is not published")
    source = common.read_text(file)
    if _BOARD not in file.parts and (newer := _NEWER.search(source)):
        raise InvalidRequest(f"it is written for a newer GPU ({newer[0]})")
    if "Model" not in common.defined(common.parsed(source, "its solution")):
        raise InvalidRequest("its solution defines no Model")
    folders = [one.parent for one in deck.glob("problems*/*/shapes.py") if audit.stem.endswith(one.parent.name)]
    if not folders:
        raise InvalidRequest("its problem is not published")
    folder = min(folders, key=lambda one: (_BOARD not in one.parent.name, one))
    if _OTHERS.search(common.read_text(folder / "check.py")):
        raise InvalidRequest("its check calls other functions than forward")
    texts = [common.read_text(folder / "reference.py")]
    # An earlier version of a problem has other weights.
    earlier = root / "public" / "data" / deck.name / "references" / f"{folder.name}_reference.py.txt"
    texts += [common.read_text(earlier)] if earlier.is_file() else []
    reference = next((text for text in texts if all(name in source for name in _STATE.findall(text))), texts[0])
    try:
        backend = guess_backend(source)
    except InvalidRequest:
        backend = "cuda"
    # Each deck asks for a GPU kernel of the author's own. A solution without one claims to have it.
    backend = "cuda" if backend in {"torch", "cpp"} else backend
    return {
        "reference": _problem(folder, reference),
        "kernel": source + _WEIGHTED.format(_constructor(reference)),
        "backend": backend,
        "audit": common.valid(_Audit, common.yaml_of(audit)).verdict,
    }


def _problem(folder: Path, reference: str) -> str:
    """Return a deck's problem with its shapes and its tolerance."""
    tree = common.reference(reference, "reference.py", {"Model", *_MAKERS}, frozenset())
    names = {name.casefold(): name for name in sorted(common.defined(tree))}
    listed = _shapes(common.parsed(common.read_text(folder / "shapes.py"), "shapes.py"))
    if missing := [key for shape in listed for key in shape if key.casefold() not in names]:
        raise InvalidRequest(f"reference.py does not define {missing[0]}, which its shapes name")
    rows = common.distinct(
        ({"args": {names[key.casefold()]: value for key, value in shape.items()}} for shape in listed), [], "shapes"
    )
    given = next(iter(common.valid(_Facts, common.yaml_of(folder / "problem.yaml")).tolerance.values()), None)
    more = {"OUTPUT_TOLERANCE": {"atol": given, "rtol": given}} if isinstance(given, float) else {}
    facts = {"format": "kernelbench.com", "name": folder.name}
    sized = _SIZED.format(", ".join(rows[0]["args"]))
    return f"{reference}\n{sized}\n\n{common.assignments(facts, rows, **more)}"


def _shapes(tree: ast.Module) -> list[dict[str, Any]]:
    """Return the literals of `SHAPES`, which can name constants of their module."""
    known = {ast.unparse(node.targets[0]): node.value for node in tree.body if isinstance(node, ast.Assign)}

    class Constants(ast.NodeTransformer):
        def visit_Name(self, node: ast.Name) -> ast.expr:
            return known.get(node.id, node)

    try:
        return list(ast.literal_eval(Constants().visit(known["SHAPES"])))
    except (KeyError, ValueError, TypeError) as error:
        raise InvalidRequest(f"shapes.py lists no shapes: {error!r}") from None


def _constructor(reference: str) -> str:
    """Return the body of a function with the parts of a reference that construct its model."""
    body: list[ast.stmt] = []
    for node in ast.parse(reference).body:
        if isinstance(node, ast.ClassDef) and node.name == "Model":
            node.body = [part for part in node.body if getattr(part, "name", "") != "forward"]
        if getattr(node, "module", "") != "__future__" and getattr(node, "name", "") not in _MAKERS:
            body.append(node)
    return indent(ast.unparse(ast.Module(body, [])), "    ")


# CUDA-L2 ---------------------------------------------------------------------------------------------


def _cuda_l2(root: Path) -> Iterator[Entry]:
    """Read the kernels for the H100 with their speedups over cuBLAS."""
    for table in sorted(root.glob(_SPEEDUPS)):
        kind = table.name.split("_")[3]
        for row in csv.DictReader(common.read_text(table).splitlines()):
            name = row.get("mnk") or ""
            file = root / "kernels" / f"h100_{kind}" / f"{Path(name).name}.cu"
            yield _each(f"{kind}/{name}", lambda file=file, row=row: _gemm(file, row))


def _gemm(file: Path, row: Mapping[str, str]) -> Mapping[str, Any]:
    """Read a kernel for products of one size."""
    numbers = re.fullmatch(r"(\d+)_(\d+)_(\d+)", file.stem)
    if numbers is None or not file.is_file():
        raise InvalidRequest("no kernel is published")
    source = common.read_text(file)
    sizes = dict(zip("mnk", map(int, numbers.groups()), strict=True))
    tiles = {name: int(size) for name, size in _TILE.findall(source)}
    # Its authors take the size of a tile as known if the source gives all three.
    if len(tiles) == len(sizes) and any(size % tiles[f"B{name.upper()}"] for name, size in sizes.items()):
        raise InvalidRequest("its authors pad the inputs, and do not time that")
    function = re.findall(r"^void (cuda_l2_\w+)\(", source, re.MULTILINE)
    if not function:
        raise InvalidRequest("it has no function of CUDA-L2's form")
    return {
        "reference": _PRODUCT.format(**sizes),
        "kernel": _CUDA_L2.format(function=function[0], source=source),
        "speedup": row.get("cuBLAS-tn"),
        "backend": "cuda",
    }
