"""The sizes of a problem: whole numbers in its source that can decide how large its inputs are.

They are found and rewritten by their offsets, so the rest of the source stays unchanged. The source is parsed and never
run.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

#: The functions whose numbers count, in addition to constants at the top level.
_MAKERS: Final = ("get_inputs", "get_init_inputs")
#: A constant that is not a size.
_TOLERANCE: Final = "OUTPUT_TOLERANCE"
#: Maximum count of numbers in a source. A problem with more contains its data.
_MOST: Final = 64


@dataclass(frozen=True, slots=True)
class Number:
    """A number of at least 2 in a problem's source.

    Attributes:
        begin, end: its offsets in the source, in bytes of UTF-8.
        line: its line, from 1.
        name: the constant or function that contains it.
    """

    begin: int
    end: int
    line: int
    name: str
    value: int


def find(source: str) -> tuple[Number, ...]:
    """Return the numbers in a problem's constants, and in the functions that make its inputs, in order.

    Numbers in functions of the same source that those functions call count too. Numbers in classes do not, because a
    kernel has the same layers and cannot follow a change. Return nothing if the source is not valid Python, or has more
    than 64 such numbers.
    """
    try:
        body = ast.parse(source.encode()).body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return ()
    starts = [0]
    for line in source.encode().splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    numbers: list[Number] = []
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
            numbers.append(Number(begin, end, node.lineno, name, node.value))
    return tuple(sorted(numbers, key=lambda number: number.begin)) if len(numbers) <= _MOST else ()


def _makers(body: Sequence[ast.stmt]) -> set[str]:
    """Return the names of the functions that make inputs, and of the functions that they name."""
    functions = {node.name: node for node in body if isinstance(node, ast.FunctionDef)}
    wanted = [name for name in _MAKERS if name in functions]
    makers = set(wanted)
    while wanted:
        for node in ast.walk(functions[wanted.pop()]):
            if isinstance(node, ast.Name) and node.id in functions and node.id not in makers:
                makers.add(node.id)
                wanted.append(node.id)
    return makers


def _numbers(node: ast.AST | None) -> Iterator[ast.Constant]:
    # Numbers in f-strings have no offsets in the source.
    if node is None or isinstance(node, ast.JoinedStr):
        return
    if isinstance(node, ast.Constant):
        if type(node.value) is int and node.value >= 2:
            yield node
        return
    for child in ast.iter_child_nodes(node):
        yield from _numbers(child)


def rewrite(source: str, numbers: Sequence[Number], values: Sequence[int]) -> str:
    """Return the source with each of the numbers of :func:`find` replaced by the value at its index in ``values``."""
    text = source.encode()
    for number, value in sorted(zip(numbers, values, strict=True), key=lambda pair: -pair[0].begin):
        if value != number.value:
            text = text[: number.begin] + str(value).encode() + text[number.end :]
    return text.decode()
