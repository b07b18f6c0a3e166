"""The initial kernel of a search."""

from __future__ import annotations

import ast

from kqueue.errors import InvalidRequest


def starting_kernel(source: str) -> str:
    """Return a working kernel to start a search from.

    A reference becomes a kernel by renaming ``Model`` to ``ModelNew``. Comments and layout stay. The result uses plain
    torch, so it passes under every backend of the lane. A kernel is returned unchanged.

    Raises:
        InvalidRequest: the source is not Python, or defines neither class.
    """
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError) as error:
        raise InvalidRequest(f"the initial kernel: not valid Python: {error}") from None
    classes = {node.name for node in tree.body if isinstance(node, ast.ClassDef)}
    if "ModelNew" in classes:
        return source
    if "Model" not in classes:
        raise InvalidRequest("the initial kernel: defines neither ModelNew nor Model: give a kernel or a reference")
    lines = source.encode().splitlines(keepends=True)
    # From the end, so that earlier positions stay valid. Columns are in bytes.
    for line, column in sorted({_position(node, lines) for node in ast.walk(tree) if _names_model(node)}, reverse=True):
        text = lines[line - 1]
        lines[line - 1] = text[:column] + b"ModelNew" + text[column + len("Model") :]
    return b"".join(lines).decode()


def _names_model(node: ast.AST) -> bool:
    return (isinstance(node, ast.Name) and node.id == "Model") or (
        isinstance(node, ast.ClassDef) and node.name == "Model"
    )


def _position(node: ast.AST, lines: list[bytes]) -> tuple[int, int]:
    """Return the line (from 1) and byte column of a node's name."""
    assert isinstance(node, ast.Name | ast.ClassDef)
    if isinstance(node, ast.Name):
        return node.lineno, node.col_offset
    return node.lineno, lines[node.lineno - 1].index(b"Model", node.col_offset + len("class"))
