"""Extract the kernel from a model's answer.

Every interface that accepts answers uses :func:`take`. An answer is parsed as Markdown with the deviations of models:
fences within a line, tags next to fences, reasoning before the answer, JSON around it, or no fence. Python's parser
decides which block is the kernel, and where a block ends if its strings contain fences.
"""

from __future__ import annotations

import ast
import json
import keyword
import re
import threading
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from enum import IntEnum
from functools import cache
from typing import TYPE_CHECKING, Any, Final

from kqueue.contract import MAX_SOURCE_BYTES

if TYPE_CHECKING:
    from markdown_it import MarkdownIt
    from markdown_it.rules_block import StateBlock

_ENTRY: Final = "ModelNew"
_DEFINES: Final = re.compile(rf"^[ \t]*class[ \t]+{_ENTRY}\b", re.MULTILINE)
_RUN: Final = re.compile(r"`{3,}|~{3,}")
#: The word after a fence that opens within a line: a language or a file's name.
_WORD: Final = re.compile(r"[\w+#.:{}=/-]*")
#: Tags of reasoning, as used by DeepSeek, Qwen and most models, Seed, Kimi and Magistral.
_REASONING: Final = re.compile(
    r"(?P<first>^(?:[ \t]*<\|[^<>\s]*>){0,4}[ \t]*)?"
    r"(?:[<◁](?P<end>/?)(?i:(?:seed:)?(?:think(?:ing)?|thought|reasoning))(?:\s[^<>]*)?[>▷]|\[(?P<End>/?)THINK\])",
    re.MULTILINE,
)
_FIRST_IMPORT: Final = re.compile(r"^(?:import[ \t]+\w|from[ \t]+[\w.]+[ \t]+import\b)", re.MULTILINE)
#: Tags at the start of a line, and a tag or a chat's special token at its end.
_FIRST_TAGS: Final = re.compile(r"(?:[ \t]*<[A-Za-z|][^<>\s]*>){1,4}[ \t]*")
_LAST_TAG: Final = re.compile(r"<(?:/[A-Za-z]|\|)[^<>\s]*>")
#: Start of a line that is more likely Python than prose.
_CODE: Final = re.compile(rf"\s|[@\"')\]}}#]|(?:{'|'.join(keyword.kwlist)})\b|\w[\w.]*(?:\s*=|\(|\[)|$")
#: Maximum number of characters that are parsed as Python for one answer. A million takes about three seconds.
_MOST_PARSED: Final = 2 * MAX_SOURCE_BYTES
#: Maximum cost in characters of the search for the ends of blocks in one answer. The search is not linear, because an
#: unclosed fence is searched for up to the answer's end.
_MOST_SEARCHED: Final = 16 * MAX_SOURCE_BYTES
#: Cost in characters of a line in that search, in addition to its length.
_LINE_COST: Final = 16
#: Maximum number of tried ends of a block, and of lines of prose at which a source is cut.
_MOST_TRIES: Final = 8
#: Maximum depth of nested blocks, such as a fence in a Markdown document that is in a fence or in JSON.
_MOST_NESTED: Final = 3


class _Grade(IntEnum):
    """The likelihood that a source is the kernel."""

    #: The source does not define the class.
    OTHER = 0
    #: A line begins the definition, and the source is not valid Python.
    BROKEN = 1
    #: The source is a fragment or a sketch: its base class is not defined, or ``...`` stands for code.
    PART = 2
    WHOLE = 3


@dataclass(frozen=True, slots=True)
class Taken:
    """A kernel and its location in the answer, which ``str()`` describes.

    Attributes:
        kernel: the source to judge. Empty if the answer contains only reasoning.
        block: the number of its block, from 1. None if the source is not in a block.
        blocks: the number of blocks in the answer.
        language: the language or file that the block's fence names, perhaps empty.
        lines: the first and last line in the answer, from 1. None for a source in JSON.
        reasoning: True if sections of reasoning were dropped.
    """

    kernel: str
    block: int | None = None
    blocks: int = 0
    language: str = ""
    lines: tuple[int, int] | None = None
    reasoning: bool = False

    def __str__(self) -> str:
        """Return the location: ``block 2 of 3 (python), lines 10-48, reasoning dropped``."""
        if not self.kernel.strip():
            parts = ["nothing"]
        elif self.block is not None:
            parts = [f"block {self.block} of {self.blocks}" + (f" ({self.language})" if self.language else "")]
        else:
            parts = ["text outside of fences" if self.lines else "the whole answer"]
        if self.lines:
            parts.append(f"lines {self.lines[0]}-{self.lines[1]}")
        if self.reasoning:
            parts.append("reasoning dropped")
        return ", ".join(parts)

    @property
    def note(self) -> str:
        """The location as a line of feedback. Empty if the whole answer is the kernel."""
        return "" if self == Taken(self.kernel) and self.kernel else f"Taken from the answer: {self}."


@dataclass(frozen=True, slots=True)
class _Block:
    source: str
    grade: _Grade
    language: str = ""
    #: The first line in the answer, from 0.
    line: int | None = None
    #: True in an HTML comment, and after the end of the answer.
    aside: bool = False


@dataclass(slots=True)
class _Reader:
    """A grader of sources within the limits of one answer."""

    parse: int = _MOST_PARSED
    search: int = _MOST_SEARCHED
    grades: dict[str, _Grade] = field(default_factory=dict[str, _Grade])

    def grade(self, source: str) -> _Grade:
        if _ENTRY not in source:
            return _Grade.OTHER
        if source in self.grades:
            return self.grades[source]
        tree = self.tree(source)
        if isinstance(tree, ast.Module):
            grade = _graded(tree)
        else:
            grade = _Grade.BROKEN if _DEFINES.search(source) else _Grade.OTHER
        if tree is not None:
            self.grades[source] = grade
        return grade

    def tree(self, source: str) -> ast.Module | SyntaxError | None:
        """Return the source's tree, or its first error, or None if it cannot be parsed."""
        if len(source) > min(self.parse, MAX_SOURCE_BYTES):
            return None
        self.parse -= len(source)
        try:
            # Other threads can parse answers at the same time, and warning filters are global.
            with _warnings, warnings.catch_warnings():
                # An invalid escape in a C++ string is not an error, even if warnings are turned into errors.
                warnings.simplefilter("ignore")
                return ast.parse(source)
        except SyntaxError as error:
            return error
        except (ValueError, RecursionError, MemoryError):
            return None


_warnings: Final = threading.Lock()


def take(answer: str) -> Taken:
    """Return the kernel in a model's answer.

    A text that is the kernel's source is returned unchanged. Otherwise reasoning is dropped, and the kernel is the last
    block that defines ``class ModelNew`` in valid Python, with the names of its base classes. If there is none, it is
    the last block of the next best grade: a fragment, then a block with a syntax error, then any block. Blocks in HTML
    comments and after ``</answer>`` count only if no other names the class. If there is no block, it is the part of the
    text that defines the class, or else the whole text.
    """
    text = answer.removeprefix("\ufeff").replace("\r\n", "\n").replace("\r", "\n")
    reader = _Reader()
    if reader.grade(text) >= _Grade.PART:
        return Taken(answer)
    visible, dropped = _without_reasoning(text)
    blocks = list(_blocks(visible, reader, 0, 0))
    own = [block for block in blocks if not block.aside and block.grade > _Grade.OTHER] or blocks
    best = max((block.grade for block in own), default=_Grade.OTHER)
    if best is _Grade.OTHER and (bare := _trimmed(visible, reader)) is not None:
        return Taken(bare.source, blocks=len(blocks), lines=_lines(bare), reasoning=dropped)
    if not blocks:
        return Taken(visible.strip("\n") if dropped else answer, reasoning=dropped)
    block = next(block for block in reversed(own) if block.grade is best)
    number = next(i for i, one in enumerate(blocks, 1) if one is block)
    return Taken(block.source, number, len(blocks), block.language, _lines(block), dropped)


def _lines(block: _Block) -> tuple[int, int] | None:
    return None if block.line is None else (block.line + 1, block.line + max(1, len(block.source.splitlines())))


def _graded(tree: ast.Module) -> _Grade:
    """Return the grade of valid Python."""
    # A class with an undefined base raises NameError, as in fragments ("only forward changes").
    classes = [node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]
    entries = [node for node in classes if node.name == _ENTRY]
    bound = {node.name for node in classes}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            bound |= {(alias.asname or alias.name).partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            bound.add(node.id)
    if not entries:
        # ModelNew = FastModel
        return _Grade.PART if _ENTRY in bound else _Grade.OTHER
    entry = entries[-1]
    roots = {node.id for base in entry.bases for node in ast.walk(base) if isinstance(node, ast.Name)}
    sketched = any(
        isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and node.value.value is ...
        for node in ast.walk(entry)
    )
    return _Grade.WHOLE if not sketched and (roots <= bound or "*" in bound) else _Grade.PART


def _without_reasoning(text: str) -> tuple[str, bool]:
    """Replace reasoning by blank lines, so that lines keep their numbers. Return True if there was any."""
    # A closing tag without an opening one ends a section that began with the answer, because chat templates put the
    # opening tag into the prompt. A section without an end extends to `<answer>` or to the end if its tag begins a
    # line. Otherwise the tag is a word. If both tags of a pair are within lines after a fence, they are in a kernel's
    # comments.
    sections: list[tuple[int, int]] = []
    begin: int | None = None
    first_in_line = in_code = False
    fence = _next_run(text, 0)
    for tag in _REASONING.finditer(text):
        if tag["end"] or tag["End"]:
            if in_code and tag["first"] is None:
                begin, in_code = None, False
                continue
            if begin is None:
                sections.clear()
            sections.append((begin or 0, tag.end()))
            begin, in_code = None, False
            if fence < tag.end():
                fence = _next_run(text, tag.end())
        elif begin is None:
            first_in_line = tag["first"] is not None
            in_code = not first_in_line and tag.start() > fence
            begin = tag.start()
    if begin is not None and first_in_line:
        answer = text.find("<answer>", begin)
        sections.append((begin, len(text) if answer < 0 else answer))
    kept, last = list[str](), 0
    for first, end in sections:
        kept += [text[last:first], "\n" * text.count("\n", first, end)]
        last = end
    return "".join([*kept, text[last:]]), bool(sections)


def _without_tags(text: str) -> str:
    """Return the text without the first and last tags of each line."""
    lines = text.split("\n")
    for number, line in enumerate(lines):
        if (first := _FIRST_TAGS.match(line)) is not None:
            line = line[first.end() :]
        for _ in range(4):
            line = line.rstrip()
            if not line.endswith(">") or not _LAST_TAG.fullmatch(line, at := line.rfind("<")):
                break
            line = line[:at]
        lines[number] = line
    return "\n".join(lines)


def _next_run(text: str, begin: int) -> int:
    run = _RUN.search(text, begin)
    return len(text) if run is None else run.start()


def _blocks(text: str, reader: _Reader, depth: int, line: int | None) -> Iterator[_Block]:
    """Yield the blocks of a text that begins at ``line`` of the answer. Nested blocks replace the block around them."""
    if depth == _MOST_NESTED:
        return
    if strings := _strings(text):
        for string in strings:
            visible, _ = _without_reasoning(string)
            inner = [] if reader.grade(visible) >= _Grade.PART else list(_blocks(visible, reader, depth + 1, None))
            bare = _trimmed(visible, reader) or _Block(visible, reader.grade(visible))
            yield from inner or [replace(bare, language="json", line=None)]
        return
    if not _RUN.search(text):
        return
    env: dict[str, Any] = {"reader": reader, "<!--": False, "</answer>": False}
    for token in _markdown().block.parse(text, _markdown(), env, []) or ():
        if token.type != "fence" or not token.content.strip():
            continue
        at = None if line is None else line + token.meta["line"]
        grade, aside = reader.grade(token.content), token.meta["aside"]
        if grade is _Grade.BROKEN and not token.meta["closed"] and (bare := _trimmed(token.content, reader)):
            yield replace(bare, language=token.info, line=None if at is None else at + (bare.line or 0), aside=aside)
            continue
        inner = [] if grade >= _Grade.PART else list(_blocks(token.content, reader, depth + 1, at))
        if any(block.grade > _Grade.OTHER for block in inner):
            yield from (replace(block, aside=aside or block.aside) for block in inner)
        else:
            yield _Block(token.content, grade, token.info, at, aside)


def _strings(text: str) -> list[str]:
    """Return the strings of a JSON text that define the class. Empty if the text is not JSON."""
    if f"class {_ENTRY}" not in text:
        return []
    text = _without_tags(text).lstrip()
    if text[:1] not in ("{", "[", '"'):
        return []
    try:
        # Models write newlines into strings without escaping them.
        todo: list[Any] = [json.JSONDecoder(strict=False).raw_decode(text)[0]]
    except (ValueError, RecursionError):
        return []
    strings: list[str] = []
    while todo:
        match todo.pop():
            case str() as string if f"class {_ENTRY}" in string:
                strings.append(string)
            case list() as values:
                todo += reversed(values)
            case dict() as fields:
                todo += reversed(fields.values())
            case _:
                pass
    return strings


def _trimmed(text: str, reader: _Reader) -> _Block | None:
    """Return the source in a text without fences, from the first import to the prose after the class."""
    # A syntax error stays in the source. Only a line that is clearly not code ends it.
    if not _DEFINES.search(text):
        return None
    text = _without_tags(text)
    begin = _FIRST_IMPORT.search(text)
    if begin is None:
        return None
    source = text[begin.start() :]
    for _ in range(_MOST_TRIES):
        tree = reader.tree(source)
        if isinstance(tree, ast.Module):
            source = source.rstrip() + "\n"
            return _Block(source, reader.grade(source), line=text.count("\n", 0, begin.start()))
        lines = source.split("\n")
        if tree is None or not tree.lineno or tree.lineno > len(lines) or _CODE.match(lines[tree.lineno - 1]):
            return None
        source = "\n".join(lines[: tree.lineno - 1])
        if not _DEFINES.search(source):
            return None
    return None


# Markdown ----------------------------------------------------------------------------------------------


@cache
def _markdown() -> MarkdownIt:
    """Return a parser of lists, quotes and fences. Its import takes longer than a hundred answers."""
    from markdown_it import MarkdownIt

    parser = MarkdownIt("zero").enable(["blockquote", "list"])
    parser.block.ruler.at("paragraph", _text)
    parser.block.ruler.before("paragraph", "any_fence", _fence, {"alt": ["blockquote", "list"]})
    return parser


def _text(state: StateBlock, first: int, end: int, silent: bool) -> bool:  # noqa: ARG001 the parser's
    """Skip a line. A paragraph would absorb a fence that is indented, or not at the line's start."""
    _read_tags(state, _line(state, first))
    state.line = first + 1
    return True


def _read_tags(state: StateBlock, text: str) -> None:
    """Note from a text outside of fences whether an HTML comment follows, and whether the answer has ended."""
    for begin, end in (("<!--", "-->"), ("</answer>", "<answer>")):
        if begin in text or end in text:
            state.env[begin] = text.rfind(begin) > text.rfind(end)


def _fence(state: StateBlock, first: int, end: int, silent: bool) -> bool:
    """Parse a block from the fence in line ``first``, at any column."""
    opening = _RUN.search(_line(state, first))
    if opening is None:
        return False
    before, run, info = opening.string[: opening.start()], opening[0], opening.string[opening.end() :].strip()
    in_line = bool(before.strip())
    if (run[0] == "`" and "`" in info) or (in_line and (run[0] == "~" or not _WORD.fullmatch(info))):
        return False
    if silent:
        return True
    _read_tags(state, before)
    aside = state.env["<!--"] or state.env["</answer>"]
    # The code after the language, if the model omitted the newline between them.
    language, _, rest = info.partition(" ")
    head = f"{rest}\n" if _FIRST_IMPORT.match(rest) else ""
    last, content, closed = _end(state, first, end, run, head)
    state.line = last
    token = state.push("fence", "code", 0)
    token.content, token.info = content, language.strip("{}.")
    token.meta = {"line": first + (0 if head else 1), "closed": closed, "aside": aside}
    if closed:
        _read_tags(state, _line(state, last - 1).rpartition(run[0])[2])
    return True


def _end(state: StateBlock, first: int, end: int, run: str, head: str) -> tuple[int, str, bool]:
    """Return the line after a block, its content, and True if a fence closes it."""
    # A block ends at the first fence that is alone on its line or that opens another block, or else at one after code.
    # If the content up to another fence is a kernel, the block ends there: earlier fences are in the kernel's strings
    # and comments, and a fence with words after it was meant to close. Fences elsewhere in Python are syntax errors, so
    # two blocks are never joined.
    # Python begins in the first column, whatever the fence's column.
    indent = next((state.sCount[i] for i in range(first + 1, end) if not state.isEmpty(i)), 0)

    def content(number: int, behind: int) -> str:
        if not behind:
            return head + state.getLines(first + 1, number, indent, True)
        return head + state.getLines(first + 1, number + 1, indent, False)[:-behind] + "\n"

    reader: _Reader = state.env["reader"]
    ends: dict[str, tuple[int, int]] = {}
    tried = 0
    for number in range(first + 1, end):
        line = _line(state, number)
        reader.search -= len(line) + _LINE_COST
        if reader.search < 0:
            break
        if run not in line or (closing := _closing(line, run)) is None:
            continue
        behind, closes = closing
        if tried < _MOST_TRIES and reader.grade(content(number, behind)) >= _Grade.PART:
            ends["kernel"] = number, behind
            # If the fence is in a comment, the kernel continues after it.
            if not behind or "#" not in line:
                break
        tried += 1
        opens = not closes and _WORD.fullmatch(line.lstrip(run[0]).strip()) is not None
        ends.setdefault("behind" if behind else "alone" if closes else "opens" if opens else "words", (number, behind))
        if "alone" in ends:
            so_far = content(*ends["alone"])
            # The beginning of a kernel can have fences in its multi-line strings.
            if tried >= _MOST_TRIES or _ENTRY not in so_far or ("'''" not in so_far and '"""' not in so_far):
                break
    else:
        if reader.grade(content(end, 0)) >= _Grade.PART:
            return end, content(end, 0), False
    own = min((ends[kind] for kind in ("alone", "opens") if kind in ends), default=ends.get("behind"))
    chosen = ends.get("kernel", own)
    if chosen is None:
        return end, content(end, 0), False
    opens = "kernel" not in ends and chosen == ends.get("opens")
    return chosen[0] + (not opens), content(*chosen), not opens


def _line(state: StateBlock, number: int) -> str:
    return state.src[state.bMarks[number] + state.tShift[number] : state.eMarks[number]]


def _closing(line: str, run: str) -> tuple[int, bool] | None:
    """Return the number of characters from a fence after code on, else 0, and True if the fence closes a block."""
    # Words on both sides of the fence show that the line does not end a block.
    at = line.rfind(run[0])
    before = line[: at + 1].rstrip(run[0])
    after = line[at + 1 :].strip()
    closes = at + 1 - len(before) >= len(run) and (not after or after[0] == "<")
    if closes and not before.strip():
        return 0, True
    if closes and run[0] == "`":
        return len(line) - len(before), True
    return None if line[: line.find(run)].strip() else (0, False)
