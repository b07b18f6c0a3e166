"""Python of the pages: what it names is there, and `python -m tests.docs.snippets < TEXT` runs it.

Pages speak of a problem and a kernel that their reader has. :func:`known` has some for them.
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
#: The problem and the kernel of whoever reads the pages: small ones, as Triton's kernels are interpreted on a CPU.
PROBLEM = (EXAMPLES / "problems" / "row_sum.py").read_text().replace("512, 2048", "8, 256")
KERNEL = (EXAMPLES / "kernels" / "good" / "triton" / "row_sum.py").read_text()
#: A request for that.
REQUEST = {"problem": PROBLEM, "kernel": KERNEL, "backend": "triton", "lane": "cpu"}


def known() -> dict[str, Any]:
    """What pages take for granted: a problem, a kernel, an open client, a verdict, the answers of a model."""
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
    """Compile a snippet, which may wait at its top as notebooks do."""
    return compile(text, place, "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)


def run(text: str, names: dict[str, Any]) -> None:
    """Run a snippet with some names."""
    waits = eval(compiled(text, "a page"), names)
    if inspect.iscoroutine(waits):
        asyncio.run(waits)


def faults(text: str) -> list[str]:
    """What a snippet names of this repository and what is not there: modules, and names in them."""
    tree = ast.parse(text)
    names, found = imports(tree)
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            what = names.get(node.value.id)
            if what is not None and not hasattr(what, node.attr):
                found.append(f"{node.value.id} has no {node.attr}")
    return found


def imports(tree: ast.AST) -> tuple[dict[str, Any], list[str]]:
    """What a snippet imports of this repository by its name, and what is not there."""
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
    """What `from module import name` gives; None where that needs a package of others that is not installed.

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
    """Whether a module is of this repository."""
    return module.partition(".")[0] in {"kqueue", "workers"}


if __name__ == "__main__":
    run(sys.stdin.read(), known())
