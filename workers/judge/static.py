"""Checks that settle a hopeless kernel in milliseconds, without a device."""

from __future__ import annotations

import ast

from kqueue.categories import Category
from kqueue.contract import Phase
from workers.judge.ending import EvaluationEnded

ENTRY = "ModelNew"


def check(source: str) -> None:
    """Refuse what cannot be imported or cannot define the entry point.

    Raises:
        EvaluationEnded: ``syntax_error`` or ``entry_point_missing``.
    """
    try:
        tree = ast.parse(source)
        compile(tree, "kernel.py", "exec", dont_inherit=True)
    except SyntaxError as error:
        raise EvaluationEnded(
            Category.SYNTAX_ERROR,
            f"line {error.lineno}: {error.msg}",
            Phase.PREPARE,
            line=error.lineno,
            column=error.offset,
            text=(error.text or "").rstrip(),
        ) from None
    except (ValueError, RecursionError, MemoryError) as error:
        raise EvaluationEnded(Category.SYNTAX_ERROR, f"not valid Python: {error}", Phase.PREPARE) from None
    if ENTRY not in source and not any(_imports_anything(node) for node in ast.walk(tree)):
        raise EvaluationEnded(
            Category.ENTRY_POINT_MISSING, f"the source never names {ENTRY}, the class to define", Phase.PREPARE
        )


def _imports_anything(node: ast.AST) -> bool:
    """Whether a name could come from elsewhere: a star import, or code made at run time."""
    if isinstance(node, ast.ImportFrom):
        return any(alias.name == "*" for alias in node.names)
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ("exec", "eval")
