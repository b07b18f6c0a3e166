"""The input shapes and the sizes of a problem, both read from its text, so that nothing of the source runs.

Shapes are named sets of keyword arguments for its ``get_inputs`` and ``get_init_inputs``. A problem lists them as
literals, such as ``SHAPES = [{"name": "large", "args": {"n": 4096}}]``. The shapes that are held out can be cut from
the source before it is shown. Sizes are whole numbers in the source that can decide how large its inputs are. They are
rewritten by their offsets, so the rest of the source stays unchanged.
"""

from __future__ import annotations

import ast
import keyword
import math
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import accumulate
from symtable import SymbolTable, symtable
from typing import Annotated, Any, Final, cast

from pydantic import BaseModel, ConfigDict, Field, StrictBool, ValidationError, field_validator

from kqueue.errors import InvalidRequest

#: Variable that lists a problem's shapes, and their maximum number.
NAME: Final = "SHAPES"
MOST: Final = 32
#: Maximum number of further sizes on which a kernel is judged (``policies.shapes``).
FURTHER: Final = 6
#: Beginning of the name under which a held-out shape is reported. A number follows.
HELD_OUT: Final = "held out"
#: Text instead of a source whose held-out shapes cannot be found.
_NOT_SHOWN: Final = f"# This problem is not shown: its {NAME} cannot be read, and some can be held out.\n"
#: The functions that get a shape's arguments, and whose numbers are sizes, in addition to constants.
_MAKERS: Final = ("get_inputs", "get_init_inputs")
#: Maxima of one shape's arguments: characters as text, and depth of nesting.
_MOST_CHARACTERS: Final = 16 << 10
_MOST_DEPTH: Final = 4
_MOST_NAME: Final = 64
_FORM: Final = (
    f"a problem lists its shapes once, at its top level, as 1 to {MOST} literals without computed values: "
    f'{NAME} = [{{"name": "large", "args": {{"n": 4096}}, "weight": 1.0, "held_out": False}}], where args are keyword '
    "arguments of get_inputs() and get_init_inputs(), and the rest can be left out. "
    f"A variable {NAME} for another purpose needs another name"
)


class Shape(BaseModel):
    """One input shape.

    Attributes:
        name: its name in messages and results: for a held-out shape only ``held out`` and a number.
        args: keyword arguments of ``get_inputs`` and ``get_init_inputs``. Each gets those that it takes.
        weight: weight of its speedup in the geometric mean.
        held_out: True if only its result is shown to those who write kernels.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: Annotated[str, Field(min_length=1, max_length=_MOST_NAME)] = ""
    args: dict[str, Any] = {}
    weight: Annotated[float, Field(strict=True, gt=0, le=1e6)] = 1.0
    held_out: StrictBool = False

    @field_validator("name")
    @classmethod
    def _is_plain(cls, value: str) -> str:
        if not value.isprintable() or value.startswith(HELD_OUT):
            raise ValueError(f"must be printable, and must not begin with `{HELD_OUT}`")
        return value

    @field_validator("args")
    @classmethod
    def _is_data(cls, value: dict[str, Any]) -> dict[str, Any]:
        if bad := [name for name in value if not name.isidentifier() or keyword.iskeyword(name)]:
            raise ValueError(f"{bad[0]!r} is no name of an argument")
        if not _is_plain(value, _MOST_DEPTH) or len(repr(value)) > _MOST_CHARACTERS:
            raise ValueError(
                "values must be numbers of at most 64 bits, texts, True, False, None, and lists, tuples and dicts of "
                f"them, nested {_MOST_DEPTH - 1} deep, {_MOST_CHARACTERS} characters in all"
            )
        return value


def read(source: str) -> tuple[Shape, ...]:
    """Return the shapes that a problem names: those that are held out last. Return none if it names none.

    A source that is not valid Python names none. The message of an InvalidRequest for malformed ones says how to write
    them.
    """
    shapes = [shape for _, shape in _elements(source)]
    if not shapes:
        return ()
    named: list[Shape] = []
    hidden = [shape for shape in shapes if shape.held_out]
    for number, shape in enumerate(shapes, 1):
        if not shape.held_out:
            given = ", ".join(f"{name}={value!r}" for name, value in shape.args.items()) or f"shape {number}"
            short = given if len(given) <= _MOST_NAME else f"{given[: _MOST_NAME - 3]}..."
            named.append(shape.model_copy(update={"name": shape.name or short}))
    for number, shape in enumerate(hidden, 1):
        named.append(shape.model_copy(update={"name": f"{HELD_OUT} {number}"}))
    names = [shape.name for shape in named]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise InvalidRequest(f"two of the problem's {NAME} are called {twice!r}: give each its own name")
    if len(hidden) == len(shapes):
        raise InvalidRequest(f"all of the problem's {NAME} are held out: at least one must be shown")
    return tuple(named)


def problem_of(source: str, shape: Shape) -> str:
    """Return the source of the problem that has one of the shapes of :func:`read` only.

    Lines keep their numbers. Raise InvalidRequest if neither ``get_inputs`` nor ``get_init_inputs`` takes an argument
    of the shape.
    """
    functions = {node.name: node for node in _body(source) if isinstance(node, ast.FunctionDef)}
    # A maker of inputs that is no plain function is not read: it gets all arguments.
    given = {
        maker: {name: value for name, value in shape.args.items() if _takes(functions.get(maker), maker, name)}
        for maker in _MAKERS
    }
    for name in shape.args:
        if not any(name in taken for taken in given.values()):
            raise InvalidRequest(
                f"{shape.name} of the problem's {NAME} has the argument {name!r}, which neither get_inputs() nor "
                "get_init_inputs() takes"
            )
    [(begin, end, _)] = assigned(source, NAME)
    text = source.encode()
    cut = text[begin:end].count(b"\n")
    lines = [f"{text[:begin].decode()}{NAME} = ({chr(10) * cut}){text[end:].decode()}"]
    if shape.args:
        lines.append("from functools import partial as _with_arguments")
    for maker, taken in given.items():
        if taken:
            arguments = ", ".join(f"{name}={value!r}" for name, value in taken.items())
            lines.append(f"{maker} = _with_arguments({maker}, {arguments})")
    return "\n".join(lines) + "\n"


def public(source: str) -> str:
    """Return a problem's source without the shapes that are held out, for those who write kernels."""
    if NAME not in source:
        return source
    try:
        elements = _elements(source)
        if not any(shape.held_out for _, shape in elements):
            return source if _body(source) else _NOT_SHOWN
        [(begin, end, _)] = assigned(source, NAME)
    except InvalidRequest:
        return _NOT_SHOWN if "held_out" in source else source
    text = source.encode()
    shown = b"".join(text[first:last] + b",\n" for (first, last), shape in elements if not shape.held_out)
    rest = max(0, text[begin:end].count(b"\n") - shown.count(b"\n")) * b"\n"
    return (text[:begin] + f"{NAME} = [".encode() + shown + rest + b"]" + text[end:]).decode()


def count(source: str) -> int:
    """Return the number of a problem's evaluations: one for each shape, or one if it names none or malformed ones."""
    try:
        return max(1, len(read(source)))
    except InvalidRequest:
        return 1


def _body(source: str) -> Sequence[ast.stmt]:
    try:
        return ast.parse(source.encode()).body
    except SystemError:  # in Python 3.11 the parsers of two threads count their recursion together
        return _body(source)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return ()


def assigned(source: str, variable: str) -> list[tuple[int, int, ast.expr | None]]:
    """Return the first two top-level assignments to a variable: their offsets in bytes of UTF-8, and the value."""
    found: list[tuple[int, int, ast.expr | None]] = []
    for node in _body(source) if variable in source else ():
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        if len(found) < 2 and any(isinstance(one, ast.Name) and one.id == variable for one in targets):
            found.append((*_span(source, node), getattr(node, "value", None)))
    return found


def ranks(source: str) -> int:
    """Return the number of ranks that a problem's text states, 0 if it states none, or -1 if it is malformed."""
    match [value for _, _, value in assigned(source, WORLD)]:
        case []:
            return 0
        case [ast.Constant(value=int() as number)] if 1 <= number <= MOST_RANKS:
            return number
        case _:
            return -1


def _span(source: str, node: ast.stmt | ast.expr) -> tuple[int, int]:
    lines = source.encode().splitlines(keepends=True)
    assert node.end_lineno is not None
    assert node.end_col_offset is not None
    return (
        sum(map(len, lines[: node.lineno - 1])) + node.col_offset,
        sum(map(len, lines[: node.end_lineno - 1])) + node.end_col_offset,
    )


def _elements(source: str) -> list[tuple[tuple[int, int], Shape]]:
    """Return the shapes as they are written, each with its offsets in bytes of UTF-8."""
    statements = assigned(source, NAME)
    if not statements:
        return []
    value = statements[0][2]
    if len(statements) > 1 or not isinstance(value, (ast.List, ast.Tuple)) or len(value.elts) > MOST:
        raise InvalidRequest(_FORM)
    return [(_span(source, node), _shape(node, number)) for number, node in enumerate(value.elts)]


def _shape(node: ast.expr, number: int) -> Shape:
    try:
        return Shape.model_validate(ast.literal_eval(node))
    except ValidationError as error:
        fault = error.errors()[0]
        where = "".join(f"[{part!r}]" for part in (number, *fault["loc"]))
        text = str(fault["msg"]).removeprefix("Value error, ")
    except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError):
        where, text = f"[{number}]", "is no literal"
    raise InvalidRequest(f"{NAME}{where}: {text}. Write it so: {_FORM}")


def _takes(function: ast.FunctionDef | None, maker: str, name: str) -> bool:
    """Return whether a function can be called with a keyword argument, as far as its source shows."""
    if function is None:
        return maker == _MAKERS[0]
    arguments = function.args
    return arguments.kwarg is not None or any(name == one.arg for one in [*arguments.args, *arguments.kwonlyargs])


def _is_plain(value: object, depth: int) -> bool:
    if value is None or isinstance(value, bool):
        return True
    if isinstance(value, int):
        return -(2**63) <= value < 2**64
    if isinstance(value, float):
        return math.isfinite(value)
    return isinstance(value, str) or (depth > 0 and all(_is_plain(one, depth - 1) for one in _parts(value)))


def _parts(value: object) -> Iterator[object]:
    """Yield the parts of a list, tuple or dict. The part of any other value is an object that is not plain."""
    if type(value) in (list, tuple):
        yield from cast("Sequence[object]", value)
    elif type(value) is dict:
        pairs = cast("dict[object, object]", value)
        yield from (*pairs, *pairs.values())
    else:
        yield ...


#: Constants that are not sizes.
CALLS: Final = "CALLS"
WORLD: Final = "WORLD"
_OTHERS: Final = ("OUTPUT_TOLERANCE", CALLS, WORLD)
#: Maximum number of ranks of a group, each of which needs two of a slot's uids.
MOST_RANKS: Final = 4
#: Maximum count of numbers in a source. A problem with more contains its data.
_MOST_SIZES: Final = 64


@dataclass(frozen=True, slots=True)
class Number:
    """A number of at least 2 in a problem's source, at offsets in bytes of UTF-8, in a constant or function."""

    begin: int
    end: int
    line: int
    name: str
    value: int


def sizes_of(source: str) -> tuple[Number, ...]:
    """Return the numbers in a problem's constants, and in the functions that make its inputs, in order.

    Numbers in functions of the same source that those functions call count too. Numbers in classes, and of constants
    that they read, do not, because a kernel has the same layers and cannot follow a change. Return nothing if the
    source is not valid Python, or has more than 64 such numbers.
    """
    body = _body(source)
    starts = list(accumulate(map(len, source.encode().splitlines(keepends=True)), initial=0))
    numbers: list[Number] = []
    makers = _makers(body)
    fixed = _read_by_others(source, makers) if body else set[str]()
    for statement in body:
        if isinstance(statement, (ast.Assign, ast.AnnAssign)):
            targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
            name = ", ".join(ast.unparse(target) for target in targets)
            names = {node.id for target in targets for node in ast.walk(target) if isinstance(node, ast.Name)}
            inside: ast.AST | None = None if name in _OTHERS or names & fixed else statement.value
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
    return tuple(sorted(numbers, key=lambda number: number.begin)) if len(numbers) <= _MOST_SIZES else ()


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


def _read_by_others(source: str, makers: set[str]) -> set[str]:
    """Return the names of the module that classes, and functions that make no inputs, read."""

    def read(scope: SymbolTable) -> set[str]:
        own = {symbol.get_name() for symbol in scope.get_symbols() if symbol.is_global()}
        return own.union(*map(read, scope.get_children()))

    with suppress(SyntaxError, RecursionError):  # which the parser does not find
        inner = symtable(source, "problem", "exec").get_children()
        return set[str]().union(*(read(scope) for scope in inner if scope.get_name() not in makers))
    return set()


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


def with_sizes(source: str, numbers: Sequence[Number], values: Sequence[int]) -> str:
    """Return the source with the value at the same index in ``values`` for each number of :func:`sizes_of`."""
    text = source.encode()
    for number, value in sorted(zip(numbers, values, strict=True), key=lambda pair: -pair[0].begin):
        if value != number.value:
            text = text[: number.begin] + str(value).encode() + text[number.end :]
    return text.decode()
