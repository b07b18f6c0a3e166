"""GPU MODE's tasks: a folder with ``task.yml`` and ``reference.py``. A kernel is ``custom_kernel(data)``.

The task's tests and benchmarks become the shapes. The seeds are the judge's, because those in ``task.yml`` are public.
Memory that a task hands to a kernel for its output is made new for each call, so a kernel can use it or not.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final, cast

from kqueue.errors import InvalidRequest
from kqueue.formats import common
from kqueue.formats.common import Problem, Refused

NAME: Final = "gpumode"
TITLE: Final = "GPU MODE's reference-kernels"
#: Weight of a shape from the tests, so that the benchmarks decide the speedup.
_TEST_WEIGHT: Final = 1e-6
#: Calls in ``check_implementation`` that compare with the reference's output.
_COMPARES: Final = re.compile(r"\b(make_match_reference|match_reference|verbose_all\w+|allclose|assert_close)\(")
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


def find(path: Path) -> list[Path]:
    """Return the ``task.yml`` files at a path."""
    return common.files(path, "task.yml")


def read(path: Path) -> Iterator[Problem | Refused]:
    """Yield the tasks at a path."""
    return common.each(path, "task.yml", lambda folder, name: _translate(folder, name, path))


def kernel(source: str, facts: Mapping[str, Any], problem: str) -> str:  # noqa: ARG001
    """Return a submission as a kernel. Its imports of ``task`` become names of any type.

    Raises:
        InvalidRequest: it imports another file of its task.
    """
    if "custom_kernel" not in common.defined(source):
        return source
    texts: list[tuple[ast.stmt, str]] = []
    for node in ast.parse(source).body:
        if isinstance(node, ast.ImportFrom) and node.module in facts["modules"]:
            if node.module != "task":
                raise InvalidRequest(
                    f"kernel: it imports {node.module} of its task, which is not there: copy the used parts into it"
                )
            names = ", ".join(f"Any as {alias.asname or alias.name}" for alias in node.names)
            texts.append((node, f"from typing import {names}"))
    buffers = f"BUFFERS = {tuple(map(int, facts['buffers']))}\n"
    return "\n".join(
        [common.replaced(source, texts), common.TORCH, buffers + _FRESH.format("ModelNew", "custom_kernel")]
    )


def _translate(folder: Path, name: str, path: Path) -> Problem:
    task = _task(folder / "task.yml")
    root = (path if path.is_dir() and path != folder else folder.parent).resolve()
    modules: dict[str, str] = {}
    for place, source in _files(task):
        if not (file := (folder / source).resolve()).is_relative_to(root):
            raise InvalidRequest(f"its file {source} is outside {root}: give the whole set's folder")
        modules[place.removesuffix(".py")] = common.read_text(file)
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
    kernels = [
        folder / "submission.py",
        *common.files(folder, "solutions/**/*.py"),
        *common.files(folder, "submissions/*.py"),
    ]
    solutions = {str(one.relative_to(folder)): common.read_text(one) for one in kernels if one.is_file()}
    return Problem(name, "\n".join([source, common.TORCH, literals + end]), tuple(notes), solutions)


def _task(file: Path) -> dict[str, Any]:
    import yaml

    try:
        task: Any = yaml.safe_load(common.read_text(file))
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise InvalidRequest(f"task.yml is not YAML: {' '.join(str(error).split())}") from None
    if not isinstance(task, dict):
        raise InvalidRequest("task.yml is no mapping of files, tests and benchmarks")
    known = cast("dict[str, Any]", task)
    if (language := known.get("lang", "py")) != "py":
        raise InvalidRequest(f"its language is {language}: only a Python task has a reference that can be called")
    if known.get("multi_gpu"):
        raise InvalidRequest("it needs several GPUs")
    return known


def _files(task: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return the names and places of a task's Python files."""
    try:
        pairs = [(str(one["name"]), str(one["source"])) for one in task["files"]]
    except (KeyError, TypeError):
        raise InvalidRequest("files in task.yml is no list of a name and a source each") from None
    return [(name, source) for name, source in pairs if name.endswith(".py") and not source.startswith("@")]


def _shapes(task: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the benchmarks, then the tests."""
    for kind in ("benchmarks", "tests"):
        listed = task.get(kind) or []
        if not isinstance(listed, list) or not all(isinstance(one, dict) for one in cast("list[Any]", listed)):
            raise InvalidRequest(f"{kind} in task.yml is no list of arguments")
        weight = _TEST_WEIGHT if kind == "tests" and task.get("benchmarks") else 1.0
        for one in cast("list[dict[str, Any]]", listed):
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
