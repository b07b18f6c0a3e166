"""The sizes of a problem: the whole numbers in its source that may decide how large its inputs are.

They are found and rewritten by their place in the text, so that all else of the source stays as it was written. The
source is read and never run.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

#: The functions whose numbers count, beside constants at the top level.
_MAKERS: Final = ("get_inputs", "get_init_inputs")
#: A constant that is no size.
_TOLERANCE: Final = "OUTPUT_TOLERANCE"
#: The most numbers that are looked at; a problem that writes its data out has more.
_MOST: Final = 64


@dataclass(frozen=True, slots=True)
class Number:
    """A number of at least 2 in a problem's source.

    Attributes:
        begin, end: its place in the source, in bytes of UTF-8.
        line: its line, from 1.
        name: the constant or function that it stands in.
        value: as it is written.
    """

    begin: int
    end: int
    line: int
    name: str
    value: int


def find(source: str) -> tuple[Number, ...]:
    """Return the numbers in a problem's constants, and in the functions that make its inputs, in order.

    Functions of the same source that those functions name count too. Classes do not: a kernel has the same layers, and
    knows nothing of a change. Empty if the source is no Python, or has more than 64 such numbers.
    """
    try:
        body = ast.parse(source.encode()).body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return ()
    starts = [0]
    for line in source.encode().splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    found: list[Number] = []
    makers = _makers(body)
    for statement in body:
        if isinstance(statement, (ast.Assign, ast.AnnAssign)):
            targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
            name = ", ".join(ast.unparse(target) for target in targets)
            inside: ast.AST | None = None if name == _TOLERANCE else statement.value
        elif isinstance(statement, ast.FunctionDef) and statement.name in makers:
            name, inside = f"{statement.name}()", statement
        else:
            continue
        for node in _numbers(inside):
            assert node.end_col_offset is not None
            begin = starts[node.lineno - 1] + node.col_offset
            end = starts[(node.end_lineno or node.lineno) - 1] + node.end_col_offset
            assert isinstance(node.value, int)
            found.append(Number(begin, end, node.lineno, name, node.value))
    return tuple(sorted(found, key=lambda number: number.begin)) if len(found) <= _MOST else ()


def _makers(body: Sequence[ast.stmt]) -> set[str]:
    """Return the names of the functions that make inputs, and of those that they name."""
    functions = {node.name: node for node in body if isinstance(node, ast.FunctionDef)}
    wanted = [name for name in _MAKERS if name in functions]
    known = set(wanted)
    while wanted:
        for node in ast.walk(functions[wanted.pop()]):
            if isinstance(node, ast.Name) and node.id in functions and node.id not in known:
                known.add(node.id)
                wanted.append(node.id)
    return known


def _numbers(node: ast.AST | None) -> Iterator[ast.Constant]:
    # Numbers in f-strings have no place of their own in the source.
    if node is None or isinstance(node, ast.JoinedStr):
        return
    if isinstance(node, ast.Constant):
        if type(node.value) is int and node.value >= 2:
            yield node
        return
    for child in ast.iter_child_nodes(node):
        yield from _numbers(child)


def rewrite(source: str, numbers: Sequence[Number], values: Sequence[int]) -> str:
    """Return the source with each of the numbers :func:`find` replaced by the value at its place in ``values``."""
    text = source.encode()
    for number, value in sorted(zip(numbers, values, strict=True), key=lambda pair: -pair[0].begin):
        if value != number.value:
            text = text[: number.begin] + str(value).encode() + text[number.end :]
    return text.decode()
