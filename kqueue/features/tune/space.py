"""The values that a kernel's source names, their replacement, and the configurations of a tuning run.

A source is Python, with CUDA and C++ in its strings. Only the text of a value is replaced. These kinds of values can be
changed:

- ``constant``: ``BLOCK = 64`` in the module, ``BLOCK: tl.constexpr = 64`` and ``BLOCK = tl.constexpr(64)``;
- ``macro``: ``#define BLOCK 64`` and ``-DBLOCK=64`` in strings;
- ``launch``: ``kernel[grid](..., BLOCK=64, num_warps=4)``, and ``BLOCK: tl.constexpr = 64`` of a function;
- ``argument``: ``tile=32`` of ``ModelNew.__init__``.
"""

from __future__ import annotations

import ast
import json
import math
import re
from array import array
from bisect import bisect_right
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property
from itertools import accumulate, pairwise
from typing import Any, Final

from kqueue.errors import InvalidRequest
from kqueue.features.search.plan import ORIGINAL, Config

Scalar = int | float | bool | str | None


class Kind(StrEnum):
    """The kinds of sites that name a value."""

    CONSTANT = "constant"
    MACRO = "macro"
    LAUNCH = "launch"
    ARGUMENT = "argument"


_KIND_DESCRIPTIONS: Final = {
    Kind.CONSTANT: "constants of the module",
    Kind.MACRO: "#define and -D in strings",
    Kind.LAUNCH: "keywords of Triton launches and defaults of tl.constexpr",
    Kind.ARGUMENT: "defaults of ModelNew.__init__",
}
#: Maximum number of sites of one name.
_MAX_SITES: Final = 100
#: Permitted values of a macro: none can end a literal, a line or a placeholder of an f-string.
_MACRO_VALUE: Final = re.compile(r"[\w.+\-*/%()<>&|^~!=?:,\[\] ]+", re.ASCII)
_NUMBER: Final = re.compile(r"[-+]?[\w.+-]+", re.ASCII)
_LITERAL: Final = re.compile(
    rb"#[^\n]*|(?P<prefix>[rbufRBUF]{0,2})(?P<quote>'''|\"\"\"|'|\")(?P<body>(?:\\.|(?!(?P=quote)).)*)(?P=quote)?",
    re.DOTALL,
)
_ESCAPE: Final = re.compile(
    rb"\\(?:\r\n|x[0-9a-fA-F]{2}|[0-7]{1,3}|N\{[^}]{0,100}\}|u[0-9a-fA-F]{4}|U[0-9a-fA-F]{8}|.)", re.DOTALL
)
_ESCAPED: Final = {b"\\n": "\n", b"\\t": "\t", b"\\\\": "\\", b'\\"': '"', b"\\'": "'", b"\\r": " "}
#: Stand-in, within decoded C, for the placeholder of an f-string.
_UNKNOWN: Final = "\0"
#: Comments, joined lines, numbers (with optional digit separators) and strings of C. An unclosed quote matches up to
#: the end of its line. If it did not match, the rest of the line would be scanned again from each such quote.
_C: Final = re.compile(
    r"(?P<gone>//(?:\\\n|[^\n])*|/\*.*?\*/|/\*.*\Z|\\\n)"
    r"|(?<!\w)\d(?:'?[\w.])*|\"(?:\\.|[^\"\\\n])*\"?|'(?:\\.|[^'\\\n])*'?",
    re.DOTALL,
)
#: Bytes that stand for themselves in a literal, one byte for each character.
_ITSELF: Final = re.compile(rb"[^\\{}\r\x80-\xff]+")
_DEFINE: Final = re.compile(r"^[ \t]*#[ \t]*define[ \t]+(?P<name>[A-Za-z_]\w*)(?![\w(])(?P<value>[^\n]*)", re.M)
#: Start of a string of compiler options. Each option is one word, and quotes in it are for a shell.
_OPTIONS: Final = re.compile(r"\s*-\S")
_OPTION: Final = re.compile(r"(?<!\S)-D[ ]?(?P<name>[A-Za-z_]\w*)=(?P<value>[^\s\"'\\]+)(?!\S)")


@dataclass(frozen=True, slots=True)
class Site:
    """A position in a source that names a value.

    Attributes:
        line: its line, from 1.
        start: offset of the value in bytes from the source's start.
        end: offset of the value's end in bytes.
        plain: False if there is no plain value, so nothing can be replaced.
        value: the plain value. The value of a macro is its text.
        word: True if the value must be one word, as in a compiler's option.
    """

    kind: Kind
    name: str
    line: int
    start: int
    end: int
    plain: bool
    value: Scalar
    word: bool = False


class Tunable:
    """A source with names whose values can be changed.

    A name that occurs in several kinds of sites needs a prefix (``macro:BLOCK``). Raise InvalidRequest if the source is
    not valid Python, or is nested too deeply. Or a name has no site, has sites of several kinds, has no plain value,
    shares its site with another name, or is assigned twice.
    """

    def __init__(self, source: str, names: Sequence[str]) -> None:
        self._source = source.encode()
        with _readable():
            sites = list(_sites(source))
            self._sites = {name: _sites_of(name, sites) for name in names}
        every = sorted(((site, name) for name in names for site in self._sites[name]), key=lambda one: one[0].start)
        for (site, name), (other, its) in pairwise(every):
            if other.start < site.end:
                raise InvalidRequest(
                    f"grid: {name} and {its} are in one place, in line {other.line}: give one of them, or write each "
                    "its own value"
                )

    def original(self, name: str) -> str:
        """Return the text of a name's value in the source."""
        site = self._sites[name][0]
        return self._source[site.start : site.end].decode()

    def written(self, name: str, value: str) -> tuple[str | None, ...]:
        """Return the new text of each of a name's sites, or None for a site that has the value already.

        Raise InvalidRequest if the name cannot have the value.
        """
        with _readable():
            return tuple(_written(site, value) for site in self._sites[name])

    def has(self, name: str, value: str) -> bool:
        """Return True if the name has the value in the source already."""
        return not any(self.written(name, value))

    def kernel(self, values: Mapping[str, str]) -> str:
        """Return the source with these values. Sites that have their value already are not rewritten.

        Raise InvalidRequest if a name cannot have its value.
        """
        changes: list[tuple[int, int, str]] = []
        for name, value in values.items():
            for site in self._sites[name]:
                text = _written(site, value)
                if text is not None:
                    changes.append((site.start, site.end, text))
        parts: list[bytes] = []
        at = 0
        for start, end, text in sorted(changes):
            parts += [self._source[at:start], text.encode()]
            at = end
        return b"".join([*parts, self._source[at:]]).decode()


@contextmanager
def _readable() -> Generator[None]:
    """Raise :class:`InvalidRequest` if a source is nested too deeply for Python, or has a too long number."""
    try:
        yield
    except InvalidRequest:
        raise
    except (RecursionError, MemoryError, ValueError) as error:
        raise InvalidRequest(f"the kernel cannot be tuned because a part of it is too large: {error}") from None


def _sites_of(given: str, sites: Sequence[Site]) -> list[Site]:
    """Return the sites of a name."""
    kind, mark, name = given.rpartition(":")
    if mark and kind not in set(Kind):
        raise InvalidRequest(f"grid: {given}: {kind!r} is not a kind of place. Use {', '.join(Kind)}")
    named = [site for site in sites if site.name == name and (not mark or site.kind == kind)]
    plain = [site for site in named if site.plain]
    kinds = sorted({site.kind for site in plain})
    if len(kinds) > 1:
        where = ", ".join(f"{one} in line {_lines(s for s in plain if s.kind == one)}" for one in kinds)
        raise InvalidRequest(
            f"grid: {name} is in several kinds of places: {where}. Write {kinds[0]}:{name}, for instance"
        )
    if not plain:
        looked = _KIND_DESCRIPTIONS[Kind(kind)] if mark else ", ".join(_KIND_DESCRIPTIONS.values())
        if named:
            raise InvalidRequest(
                f"grid: {name} has no plain value in line {_lines(named)}: write a number, a text, True or False there"
            )
        names = sorted({site.name for site in sites if site.plain and "\n" not in str(site.value)})
        candidates = f". The kernel has {', '.join(names[:20])}" if names else ""
        raise InvalidRequest(f"grid: {name} is not in the kernel. Searched: {looked}{candidates}")
    if len(plain) > _MAX_SITES:
        raise InvalidRequest(f"grid: {name} is in {len(plain)} places, and at most {_MAX_SITES} can be changed")
    constants = [site for site in named if site.kind == Kind.CONSTANT]
    if kinds == [Kind.CONSTANT] and len(constants) > 1:
        raise InvalidRequest(f"grid: {name} is assigned in lines {_lines(constants)}: assign it once")
    return plain


def _lines(sites: Iterator[Site] | Sequence[Site]) -> str:
    return ", ".join(map(str, sorted({site.line for site in sites})))


def _written(site: Site, word: str) -> str | None:
    """Return the text that gives a site the value, or None if the site has it already."""
    if site.kind == Kind.MACRO:
        apart = word != word.strip() or (site.word and " " in word)
        if not _MACRO_VALUE.fullmatch(word) or apart or "//" in word or "/*" in word:
            raise InvalidRequest(f"grid: {site.name}: {word!r} cannot be the value of a macro")
        return None if word == site.value or _same(_literal(word), _literal(str(site.value))) else word
    if isinstance(site.value, str):
        return None if word == site.value else repr(word)
    value = {"true": True, "false": False}.get(word.lower()) if isinstance(site.value, bool) else _literal(word)
    if not isinstance(value, (bool,) if isinstance(site.value, bool) else (int, float)) and word != "None":
        raise InvalidRequest(
            f"grid: {site.name} is {site.value} in the kernel, and cannot be {word!r}: give "
            f"{'True or False' if isinstance(site.value, bool) else 'numbers'}"
        )
    return None if _same(value, site.value) else str(value) if isinstance(value, bool) else word


def _same(one: Scalar, other: Scalar) -> bool:
    return one is not None and type(one) is type(other) and one == other


def _literal(text: str) -> int | float | None:
    """Return the number that a word stands for in Python, or None."""
    if not _NUMBER.fullmatch(text):
        return None
    try:
        value: object = ast.literal_eval(text)
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        return None
    return value if isinstance(value, int | float) and not isinstance(value, bool) else None


# Finding ---------------------------------------------------------------------------------------------------


def _sites(text: str) -> Iterator[Site]:
    """Yield all sites of a source."""
    try:
        # The offsets of a str are in UTF-8, whatever encoding a cookie names.
        tree = ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise InvalidRequest(f"the kernel is not valid Python: {error}") from None
    source = text.encode()
    starts = list(accumulate(map(len, source.splitlines(keepends=True)), initial=0))

    def site(kind: Kind, name: str, node: ast.expr) -> Site:
        value = _inner(node)
        start = starts[value.lineno - 1] + value.col_offset
        end = starts[(value.end_lineno or value.lineno) - 1] + (value.end_col_offset or 0)
        plain, constant = _plain(value)
        return Site(kind, name, value.lineno, start, end, plain, constant)

    for name, node in _assigned(tree.body):
        yield site(Kind.CONSTANT, name, node)
    for name, node in _arguments(tree.body):
        yield site(Kind.ARGUMENT, name, node)
    for node in _nodes(tree):
        for name, value in _launched(node):
            yield site(Kind.LAUNCH, name, value)
        if isinstance(node, ast.Global):
            # A function can assign the name.
            for name in node.names:
                yield site(Kind.CONSTANT, name, node)  # type: ignore[arg-type] it has a line, and no plain value
        elif isinstance(node, ast.JoinedStr) or (isinstance(node, ast.Constant) and isinstance(node.value, str)):
            start = starts[node.lineno - 1] + node.col_offset
            end = starts[(node.end_lineno or node.lineno) - 1] + (node.end_col_offset or 0)
            yield from _macros(source, starts, start, end)


def _inner(node: ast.expr) -> ast.expr:
    """Return the expression that holds the value. For ``tl.constexpr(64)`` it is the number."""
    if isinstance(node, ast.Call) and _is_constexpr(node.func) and len(node.args) == 1 and not node.keywords:
        return node.args[0]
    return node


def _is_constexpr(node: ast.expr) -> bool:
    return getattr(node, "attr", getattr(node, "id", None)) == "constexpr"


def _plain(node: ast.expr) -> tuple[bool, Scalar]:
    """Return whether a node is a plain value, and that value."""
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub | ast.UAdd):
        is_plain, value = _plain(node.operand)
        number = is_plain and isinstance(value, int | float) and not isinstance(value, bool)
        return (True, -value if isinstance(node.op, ast.USub) else value) if number else (False, None)  # type: ignore[operator]
    if isinstance(node, ast.Constant) and isinstance(node.value, int | float | bool | str | None):
        return True, node.value
    return False, None


def _assigned(body: Sequence[ast.stmt]) -> Iterator[tuple[str, ast.expr]]:
    """Yield the names that a module assigns in its own scope, with the assigned expressions."""
    for statement in body:
        match statement:
            case ast.Assign(targets=targets, value=value):
                for target in targets:
                    # In `A = B = 64` the two names share one value, so neither can be changed alone.
                    yield from _targets(target, value if len(targets) == 1 else target)
            case ast.AnnAssign(target=ast.Name(id=name), value=ast.expr() as value):
                yield name, value
            case ast.AugAssign(target=ast.Name(id=name)):
                yield name, statement  # type: ignore[misc] it has a line, and no plain value
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
                pass
            case _:
                for part in ("body", "orelse", "finalbody"):
                    yield from _assigned(getattr(statement, part, []))
                for handler in getattr(statement, "handlers", []):
                    yield from _assigned(handler.body)


def _targets(target: ast.expr, value: ast.expr) -> Iterator[tuple[str, ast.expr]]:
    if isinstance(target, ast.Name):
        yield target.id, value
    elif isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple) and len(target.elts) == len(value.elts):
        for one, its in zip(target.elts, value.elts, strict=True):
            yield from _targets(one, its)


def _arguments(body: Sequence[ast.stmt]) -> Iterator[tuple[str, ast.expr]]:
    for statement in body:
        if isinstance(statement, ast.ClassDef) and statement.name == "ModelNew":
            for method in statement.body:
                if isinstance(method, ast.FunctionDef) and method.name == "__init__":
                    for argument, default in _defaults(method.args):
                        yield argument.arg, default


def _launched(node: ast.AST) -> Iterator[tuple[str, ast.expr]]:
    """Yield the keywords of a Triton launch, or a function's defaults of ``tl.constexpr``."""
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Subscript):
        for keyword in node.keywords:
            # A name that is passed on gets its value elsewhere.
            if keyword.arg is not None and _plain(_inner(keyword.value))[0]:
                yield keyword.arg, keyword.value
    elif isinstance(node, ast.FunctionDef):
        for argument, default in _defaults(node.args):
            if argument.annotation is not None and _is_constexpr(argument.annotation):
                yield argument.arg, default


def _defaults(arguments: ast.arguments) -> Iterator[tuple[ast.arg, ast.expr]]:
    """Yield the arguments that have a default."""
    positional = [*arguments.posonlyargs, *arguments.args]
    yield from zip(positional[len(positional) - len(arguments.defaults) :], arguments.defaults, strict=True)
    for argument, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True):
        if default is not None:
            yield argument, default


def _nodes(tree: ast.AST) -> Iterator[ast.AST]:
    """Yield all nodes except docstrings and the parts of f-strings, whose positions older Pythons do not record."""
    todo: list[ast.AST] = [tree]
    while todo:
        node = todo.pop()
        yield node
        is_docstring = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        if not is_docstring and not isinstance(node, ast.JoinedStr):
            todo += ast.iter_child_nodes(node)


# C in strings ----------------------------------------------------------------------------------------------


def _macros(source: bytes, starts: Sequence[int], start: int, end: int) -> Iterator[Site]:
    """Yield the macros of a string, which can be several adjacent literals. Lines begin at ``starts``."""
    text, begins, ends = _decoded(source, start, end)

    def site(match: re.Match[str], *, word: bool = False) -> Site:
        value, first = match["value"].strip(), match.end("value") - len(match["value"].lstrip())
        begin, over = (begins[first], ends[first + len(value) - 1]) if value else (start, start)
        is_plain = bool(value) and _UNKNOWN not in value
        return Site(Kind.MACRO, match["name"], bisect_right(starts, begin), begin, over, is_plain, value, word)

    if _OPTIONS.match(text):
        for option in _OPTION.finditer(text):
            yield site(option, word=True)
    clear = _C.sub(lambda match: " " * len(match[0]) if match["gone"] else match[0], text)
    for define in _DEFINE.finditer(clear):
        yield site(define)


def _decoded(source: bytes, start: int, end: int) -> tuple[str, array[int], array[int]]:
    """Return the text of the literals in a part of a source, and each character's begin and end offsets there."""
    # Characters that mean nothing to a preprocessor can differ from the original ones.
    text: list[str] = []
    begins, ends = array("L"), array("L")

    def add(char: str, first: int, last: int) -> None:
        text.append(char)
        begins.append(first)
        ends.append(last)

    for literal in _LITERAL.finditer(source, start, end):
        if literal["quote"] is None:
            continue
        prefix = literal["prefix"].lower()
        at, over = literal.span("body")
        while at < over:
            if plain := _ITSELF.match(source, at, over):
                text.append(plain[0].decode())
                begins.extend(range(at, plain.end()))
                ends.extend(range(at + 1, plain.end() + 1))
                at = plain.end()
                continue
            escape = None if b"r" in prefix else _ESCAPE.match(source, at, over)
            if escape is not None:
                if escape[0] not in {b"\\\n", b"\\\r\n"}:  # Python joins these lines
                    add(_ESCAPED.get(escape[0], "?"), at, escape.end())
                at = escape.end()
            elif b"f" in prefix and source[at : at + 1] in {b"{", b"}"}:
                double = source[at : at + 2] in {b"{{", b"}}"}
                last = at + 2 if double else _placeholder(source, at, over)
                add(source[at : at + 1].decode() if double else _UNKNOWN, at, last)
                at = last
            else:
                last = at + 2 if source[at : at + 2] == b"\r\n" else at + 1
                char = source[at:last]
                add("\n" if char in {b"\r\n", b"\r"} else chr(char[0]) if char[0] < 128 else "?", at, last)
                at = last
    return "".join(text), begins, ends


def _placeholder(source: bytes, at: int, over: int) -> int:
    """Return the end of an f-string's placeholder that begins at ``at``."""
    depth = 0
    for offset in range(at, over):
        depth += {ord("{"): 1, ord("}"): -1}.get(source[offset], 0)
        if depth <= 0:
            return offset + 1
    return over


#: Maximum number of values of a name.
MOST_VALUES: Final = 1000
#: Maximum number of names.
MOST_NAMES: Final = 20

_NAME: Final = re.compile(r"(?:[a-z]+:)?[A-Za-z_]\w*", re.ASCII)
_RANGE: Final = re.compile(r"(-?\d+)\.\.(-?\d+)(?:\.\.(x?)(\d+))?", re.ASCII)

#: A name with an optional kind as its prefix, and the texts of its values.
Parameter = tuple[str, tuple[str, ...]]


def parse(words: Iterable[str]) -> list[Parameter]:
    """Parse ``BLOCK=64,128``, ``BLOCK=16..128..16`` and ``BLOCK=32..512..x2``, or raise InvalidRequest."""
    parameters: list[Parameter] = []
    for word in words:
        name, mark, given = word.partition("=")
        values = [value.strip() for value in given.split(",")]
        if not mark or not all(values):
            raise InvalidRequest(f"grid: {word}: write NAME=VALUE,VALUE, such as BLOCK=64,128 or BLOCK=32..512..x2")
        parameters.append((name.strip(), tuple(value for one in values for value in _range(one))))
    return parameters


def from_values(values: Mapping[str, Sequence[Any]]) -> list[Parameter]:
    """Return the parameters of a mapping of JSON values. Raise InvalidRequest if a value is a list or an object."""

    def word(name: str, value: Any) -> str:
        if isinstance(value, list | dict):
            raise InvalidRequest(
                f"grid: {name}: give numbers, texts, true, false or null, not {json.dumps(value)[:80]}"
            )
        if isinstance(value, str):
            return value
        return "None" if value is None else json.dumps(value)

    return [(name, tuple(word(name, value) for value in mine)) for name, mine in values.items()]


def _range(text: str) -> list[str]:
    match = _RANGE.fullmatch(text)
    if match is None:
        return [text]
    low, high, by = int(match[1]), int(match[2]), int(match[4] or 1)
    doubling = bool(match[3])
    if low > high or by < 1 or (doubling and (low < 1 or by < 2)):
        raise InvalidRequest(f"grid: {text}: write LOW..HIGH..STEP or, from 1 on, LOW..HIGH..x2")
    values: list[str] = []
    while low <= high and len(values) <= MOST_VALUES:
        values.append(str(low))
        low = low * by if doubling else low + by
    return values


class Space:
    """The configurations of a kernel.

    Raise InvalidRequest if a name is not in the kernel (:class:`Tunable`), cannot have a value, or is given twice, or
    if there is nothing to try.
    """

    def __init__(self, kernel: str, parameters: Sequence[Parameter]) -> None:
        names = [name for name, _ in parameters]
        if not names:
            raise InvalidRequest("grid: give at least one name with its values, such as BLOCK=64,128")
        if len(names) > MOST_NAMES:
            raise InvalidRequest(f"grid: {len(names)} names are given, and at most {MOST_NAMES} are allowed")
        for name, values in parameters:
            if not _NAME.fullmatch(name):
                raise InvalidRequest(f"grid: {name!r} is not a name: write NAME=VALUE,VALUE")
            if names.count(name) > 1 or len(set(values)) < len(values):
                raise InvalidRequest(f"grid: {name}: the name, or one of its values, is given twice")
            if not 1 <= len(values) <= MOST_VALUES:
                raise InvalidRequest(f"grid: {name}: give 1 to {MOST_VALUES} values")
        self.names = names
        self.values = [values for _, values in parameters]
        self._tunable = Tunable(kernel, names)
        self._kernel = kernel
        for name, values in parameters:
            texts: dict[tuple[str | None, ...], str] = {}
            for value in values:
                other = texts.setdefault(self._tunable.written(name, value), value)
                if other != value:
                    raise InvalidRequest(f"grid: {name}: {other} and {value} are the same value: give one of them")
        if self.size == 1 and self.original is not None:
            raise InvalidRequest("grid: only the kernel's own values are given, so there is nothing to try")

    @property
    def size(self) -> int:
        """The number of configurations."""
        return math.prod(len(values) for values in self.values)

    @cached_property
    def original(self) -> Config | None:
        """The configuration with the original kernel's values, or None if it is not among them."""
        matching = [
            next((value for value in values if self._tunable.has(name, value)), None)
            for name, values in zip(self.names, self.values, strict=True)
        ]
        values = tuple(value for value in matching if value is not None)
        return values if len(values) == len(matching) else None

    def source(self, config: Config) -> str:
        """Return the kernel of a configuration."""
        return self._kernel if config == ORIGINAL else self._tunable.kernel(self.shown(config))

    def shown(self, config: Config) -> dict[str, str]:
        """Return a configuration's values by name. The original's values are read from its source."""
        if config == ORIGINAL:
            return {name: self._tunable.original(name) for name in self.names}
        return dict(zip(self.names, config, strict=True))
