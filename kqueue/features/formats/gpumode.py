"""GPU MODE's tasks: a folder with ``task.yml`` and ``reference.py``. A kernel is ``custom_kernel(data)``.

The task's tests and benchmarks become the shapes. The seeds are the judge's, because those in ``task.yml`` are public.
Memory that a task hands to a kernel for its output is made new for each call, so a kernel can use it or not.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Final, cast

from pydantic import create_model

from kqueue.errors import InvalidRequest
from kqueue.formats import common
from kqueue.formats.common import Problem

NAME: Final = "gpumode"
TITLE: Final = "GPU MODE's reference-kernels"
#: Weight of a shape from the tests, so that the benchmarks decide the speedup.
_TEST_WEIGHT: Final = 1e-6
#: Calls in ``check_implementation`` that compare with the reference's output.
_COMPARES: Final = re.compile(r"\b(make_match_reference|match_reference|verbose_all\w+|allclose|assert_close)\(")
_File: Any = create_model("_File", name=str, source=str)
_Cases: Any = (list[dict[str, Any]] | None, None)
_Task: Any = create_model(
    "_Task", lang=(str, "py"), multi_gpu=(bool, False), files=list[_File], benchmarks=_Cases, tests=_Cases
)
_FRESH: Final = """

def _fresh(data):
    if not BUFFERS:
        return data
    return tuple(_torch.empty_like(part) if place in BUFFERS else part for place, part in enumerate(data))


class {}(_torch.nn.Module):
    def forward(self, data):
        return {}(_fresh(data))
"""
_INPUTS: Final = """

def get_inputs(**arguments):
    data = generate_input(**arguments{})
    for place in BUFFERS:
        data[place].zero_()
    return [data]
"""


def kernel(source: str, facts: Mapping[str, Any], problem: str) -> str:  # noqa: ARG001
    """Return a submission as a kernel. Its imports of ``task`` become names of any type."""
    if "custom_kernel" not in common.defined(source):
        return source
    others = "|".join(re.escape(name) for name in ("reference", *facts["modules"]) if name != "task")
    if found := re.search(rf"^(?:from|import) +({others})\b", source, re.MULTILINE):
        raise InvalidRequest(
            f"kernel: it imports {found[1]} of its task, which is not there: copy the used parts into it"
        )
    text = re.sub(r"^from task import ([\w, ]+)", _any, source, flags=re.MULTILINE)
    buffers = f"BUFFERS = {tuple(map(int, facts['buffers']))}\n"
    return f"{text}\n{common.TORCH}\n{buffers}{_FRESH.format('ModelNew', 'custom_kernel')}"


def _any(found: re.Match[str]) -> str:
    return "from typing import " + ", ".join(f"Any as {one.split()[-1]}" for one in found[1].split(","))


def _translate(folder: Path, name: str, root: Path) -> Problem:
    task = common.valid(_Task, common.yaml_of(folder / "task.yml"))
    if task.lang != "py":
        raise InvalidRequest(f"its language is {task.lang}: only a Python task has a reference that can be called")
    if task.multi_gpu:
        raise InvalidRequest("it needs several GPUs")
    modules: dict[str, str] = {}
    for one in task.files:
        file = (folder / one.source).resolve()
        if one.name.endswith(".py") and not one.source.startswith("@"):
            if not file.is_relative_to(root.resolve()):
                raise InvalidRequest(f"its file {one.source} is outside {root}: give the whole set's folder")
            modules[one.name.removesuffix(".py")] = common.read_text(file)
    text = modules.pop("reference", "")
    modules.pop("eval", None)
    tree = common.reference(text, "reference.py", {"ref_kernel", "generate_input", "check_implementation"})
    notes: list[str] = []
    tolerance = _tolerance(tree, notes)
    maker = common.function(tree, "generate_input")
    named = [] if maker is None else [one.arg for one in (*maker.args.args, *maker.args.kwonlyargs)]
    seed = ", seed=int(_torch.randint(2**31, ()))" if "seed" in named else ""
    listed = common.distinct(_shapes(task), notes, "tests and benchmarks")
    buffers = _buffers(tree)
    facts = {"format": NAME, "name": name, "buffers": buffers, "modules": sorted({*modules, "reference"})}
    literals = common.assignments(facts, listed, BUFFERS=buffers, **tolerance)
    source = common.with_modules(text, modules, "reference.py")
    end = _FRESH.format("Model", "ref_kernel") + _INPUTS.format(seed)
    kernels = [*common.files(folder, "submission.py"), *common.files(folder, "s*s/**/*.py")]
    solutions = {str(one.relative_to(folder)): common.read_text(one) for one in kernels}
    return Problem(name, "\n".join([source, common.TORCH, literals + end]), tuple(notes), solutions)


def _shapes(task: Any) -> Iterator[dict[str, Any]]:
    """Yield the benchmarks, then the tests."""
    for listed, weight in ((task.benchmarks or (), 1.0), (task.tests or (), _TEST_WEIGHT if task.benchmarks else 1.0)):
        for one in listed:
            yield {"args": {name: value for name, value in one.items() if name != "seed"}, "weight": weight}


def _tolerance(tree: ast.Module, notes: list[str]) -> dict[str, Any]:
    """Return the assignment of the tolerance of a task's check. Empty if it is the default or computed."""
    [*_, check] = [node for node in tree.body if "check_implementation" in common.defined(ast.Module([node], []))]
    if not _COMPARES.search(ast.unparse(check)):
        raise InvalidRequest(
            "its check_implementation tests properties and compares with no output of ref_kernel, so right answers "
            "that differ from that output would be called wrong"
        )
    found = {"atol": 1e-8, "rtol": 1e-5}
    given = [node for node in ast.walk(check) if isinstance(node, ast.keyword) and node.arg in found]
    values = [(str(one.arg), one.value.value) for one in given if isinstance(one.value, ast.Constant)]
    if not values or len(values) < len(given):
        notes.append(f"the task {'computes its' if given else 'names no'} tolerance, so the judge's own applies")
        return {}
    for name, value in values:
        found[name] = max(found[name], float(cast("float", value)))
    return {"OUTPUT_TOLERANCE": found}


def _buffers(tree: ast.Module) -> tuple[int, ...]:
    """Return the places in ``data`` of memory for outputs.

    ``ref_kernel`` never reads the values there, and writes to it, uses its name for another value, or
    ``generate_input`` makes it by ``torch.empty``.
    """
    text, made = (ast.unparse(common.function(tree, name) or tree) for name in ("ref_kernel", "generate_input"))
    unpacked = re.search(r"^ +\(?((?:\w+, )+\w+)\)? = data$", text, re.MULTILINE)
    if unpacked is None:
        return ()
    names, body = unpacked[1].split(", "), text[unpacked.end() :]
    returned = re.search(r"return \(?((?:\w+, )+\w+)\)?$", made)
    places = returned[1].split(", ") if returned else []
    found: list[int] = []
    for place, name in enumerate(names):
        write = rf"^ +{name}(\[[^\n=]*\])? = "
        rest = re.sub(rf"{write}|^ +return {name}$|\b{name}\.(shape|dtype|device|size)\b", "", body, flags=re.MULTILINE)
        empty = place < len(places) and re.search(rf"^ +{places[place]} = torch\.empty", made, re.MULTILINE)
        written = empty or re.search(write, body, re.MULTILINE)
        if names.count(name) == 1 and written and not re.search(rf"\b{name}\b", rest):
            found.append(place)
    return tuple(found)


#: The ``task.yml`` files at a path, and the tasks' translations.
find = partial(common.files, pattern="task.yml")
read = partial(common.each, marker="task.yml", translate=_translate)
