"""Checks the names in the pages' Python. `python -m tests.docs.snippets < TEXT` runs a snippet.

Pages use a problem and a kernel of their reader. :func:`known` returns examples of them.
"""

from __future__ import annotations

import ast
import asyncio
import importlib.util
import inspect
import sys
from pathlib import Path
from typing import Any

EXAMPLES = Path(__file__).parents[2] / "examples"
#: The reader's problem and kernel. They are small because a CPU interprets Triton's kernels.
PROBLEM = (EXAMPLES / "problems" / "row_sum.py").read_text().replace("512, 2048", "8, 256")
KERNEL = (EXAMPLES / "kernels" / "good" / "triton" / "row_sum.py").read_text()
#: A request for that kernel.
REQUEST = {"problem": PROBLEM, "kernel": KERNEL, "backend": "triton", "lane": "cpu"}


def known() -> dict[str, Any]:
    """Return the names that pages assume: a problem, a kernel, an open client, a verdict, a model's answers."""
    import kqueue

    client = kqueue.Client()
    return {
        "REFERENCE": PROBLEM,
        "PROBLEM": PROBLEM,
        "KERNEL": KERNEL,
        "kq": client,
        "client": client,
        "entries": [REQUEST],
        "verdict": client.evaluate(**REQUEST),
        "problems": [PROBLEM],
        "completions": [f"```python\n{KERNEL}```"],
        "answer": f"```python\n{KERNEL}```",
        "name": "run",
        "step": 4,
    }


def compiled(text: str, place: str) -> Any:
    """Compile a snippet, which can have a top-level await like a notebook."""
    return compile(text, place, "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)


def run(text: str, names: dict[str, Any]) -> None:
    """Run a snippet with these names."""
    waits = eval(compiled(text, "a page"), names)
    if inspect.iscoroutine(waits):
        asyncio.run(waits)


def faults(text: str) -> list[str]:
    """Return the modules of this repository, and names in them, that a snippet uses and that do not exist."""
    tree = ast.parse(text)
    names, found = imports(tree)
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            what = names.get(node.value.id)
            if what is not None and not hasattr(what, node.attr):
                found.append(f"{node.value.id} has no {node.attr}")
    return found


def imports(tree: ast.AST) -> tuple[dict[str, Any], list[str]]:
    """Return the objects that a snippet imports from this repository by name, and the missing ones."""
    names: dict[str, Any] = {}
    found: list[str] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {one.name: importlib.import_module(one.name) for one in node.names if ours(one.name)}
        elif isinstance(node, ast.ImportFrom) and node.module and ours(node.module):
            for one in node.names:
                try:
                    names[one.asname or one.name] = imported(node.module, one.name)
                except AttributeError:
                    found.append(f"{node.module} has no {one.name}")
    return names, found


def imported(module: str, name: str) -> Any:
    """Return the object of `from module import name`, or None if that needs a foreign package that is not installed.

    Raises:
        AttributeError: the module has no such name.
    """
    try:
        found = importlib.import_module(module)
    except ModuleNotFoundError as error:
        if ours(error.name or ""):
            raise
        spec = importlib.util.find_spec(module)
        assert spec is not None
        assert spec.origin is not None
        body = ast.parse(Path(spec.origin).read_text()).body
        if name not in {getattr(node, "name", None) for node in body}:
            raise AttributeError(name) from None
        return None
    if not hasattr(found, name) and importlib.util.find_spec(f"{module}.{name}"):
        return importlib.import_module(f"{module}.{name}")
    return getattr(found, name)


def ours(module: str) -> bool:
    """Return whether a module belongs to this repository."""
    return module.partition(".")[0] in {"kqueue", "workers"}


if __name__ == "__main__":
    run(sys.stdin.read(), known())
