"""robust-kbench's tasks: a folder with ``func_forward.py`` and ``config_forward.json``.

A kernel is CUDA source that exports ``forward``, or Python that defines ``forward_fn``. It replaces the function that
``Model.forward`` gets as ``fn``.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, Final

from pydantic import RootModel

from kqueue.errors import InvalidRequest
from kqueue.formats import common
from kqueue.formats.common import Problem

NAME: Final = "robust-kbench"
TITLE: Final = "robust-kbench"
_FILE: Final = "func_forward.py"
_KERNEL: Final = "forward.cu"
_PARTS: Final = ("init", "input", "shared")
_Settings: Any = RootModel[dict[str, list[dict[str, Any]]]]
_CLASS: Final = """

class ModelNew(Model):
    def forward(self, *inputs):
        return super().forward(*inputs, fn=_kernel)
"""


def kernel(source: str, facts: Mapping[str, Any], problem: str) -> str:  # noqa: ARG001
    """Return a kernel that calls the task's ``Model`` with another function."""
    model = problem.partition(f"\n{common.ORIGIN} = ")[0]
    if "PYBIND11_MODULE" in source:
        build = f'_load_inline("forward", cpp_sources="", cuda_sources={source!r}).forward'
        return (
            f"{model}\nfrom torch.utils.cpp_extension import load_inline as _load_inline\n\n_kernel = {build}\n{_CLASS}"
        )
    # The kernel comes first, so that its lines keep their numbers.
    return f"{source}\n\n_kernel = forward_fn\n\n{model}{_CLASS}" if "forward_fn" in common.defined(source) else source


def _translate(folder: Path, name: str, root: Path) -> Problem:  # noqa: ARG001
    source = common.read_text(folder / _FILE)
    tree = common.reference(source, _FILE, {"Model", "forward_fn", "get_inputs"}, frozenset())
    notes = ["only forward is judged"] if (folder / "func_backward.py").is_file() else []
    shapes = common.distinct(_configs(folder, notes), notes, "settings")
    text = common.assignments({"format": NAME, "name": name}, shapes)
    if common.function(tree, "get_init_inputs") is None:
        model = next(node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == "Model")
        text += _init_inputs(common.function(model, "__init__"))
    solution = folder / _KERNEL
    solutions = {_KERNEL: common.read_text(solution)} if solution.is_file() else {}
    return Problem(name, f"{source}\n{text}", tuple(notes), solutions)


def _init_inputs(maker: ast.FunctionDef | None) -> str:
    """Return a function that gives the constructor its own arguments, with their defaults."""
    if maker is None:
        return ""
    if maker.args.vararg or maker.args.kwarg:
        raise InvalidRequest("the arguments of Model.__init__ have no fixed names")
    arguments = [*maker.args.args, *maker.args.kwonlyargs]
    for one in arguments:
        one.annotation = None
    given = ", ".join(f"{one.arg!r}: {one.arg}" for one in arguments[1:])
    return f"\n\ndef get_init_inputs({ast.unparse(maker.args).partition(', ')[2]}):\n    return {{{given}}}\n"


def _configs(folder: Path, notes: list[str]) -> Iterator[dict[str, Any]]:
    """Yield a shape for each setting: constructions, inputs, and values that both get."""
    path = folder / "config_forward.json"
    if not path.is_file():
        notes.append("it has no config_forward.json, so all defaults apply")
        return
    given = common.valid(_Settings, common.fields(common.read_text(path))).root
    kind = "multi" if any(any(given.get(f"multi_{part}_configs", [])) for part in _PARTS) else "single"
    for init, one, both in product(*(given.get(f"{kind}_{part}_configs") or [{}] for part in _PARTS)):
        if clash := [name for name in init.keys() & one.keys() if init[name] != one[name]]:
            raise InvalidRequest(f"construction and inputs have different values of {clash[0]}")
        yield {"args": {**init, **one, **both}}


#: The ``func_forward.py`` files at a path, and the tasks' translations.
find = partial(common.files, pattern=_FILE)
read = partial(common.each, marker=_FILE, translate=_translate)
