"""The reason and the kernel's line in the text of a compiler's error."""

from __future__ import annotations

import re
from typing import Final, NamedTuple

from kqueue.text import one_line

#: An error of a C++ compiler (``main.cpp:6:43: error: ...``) or nvcc (``main.cu(6): error: ...``).
LOCATED: Final = re.compile(r"^\S+?(?::\d+(?::\d+)?|\(\d+\)): (?:fatal )?error(?: #[\w-]+)?: (.+)", re.MULTILINE)
#: The same, or an error of ptxas, CuTe DSL, MLIR, or a linker.
_ERROR: Final = re.compile(
    rf"{LOCATED.pattern}|^ptxas.*?(?:error|fatal) *: (.+)|^error(?:\[\w+\])?: (?:unknown: )?(.+)"
    r"|\b(undefined (?:symbol|reference).*)|: (\S+: (?:command )?not found)$",
    re.MULTILINE,
)
#: Triton's excerpt of a function, up to the line with the error, and a mark below it.
_EXCERPT: Final = re.compile(r"^\S*\s*at \d+:\d+:\n((?:.*\n)*?) *\^$\n?", re.MULTILINE)
#: An exception that Triton shows in Python's notation: ``NameError('x is not defined')``.
_NOTATION: Final = re.compile(r"""^(\w+)\((['"])(.*)\2\)$""")
#: The mark of a C++ compiler or nvcc below the line with the error, which can have its number in front.
_MARKED: Final = re.compile(r"^(?: *\d+ \|)?(.*)\n[ |]*[~^]+$", re.MULTILINE)
#: A line of the kernel's file: ``kernel.py:14:13`` (CuTe DSL, MLIR) or ``kernel.py", line 14`` (Numba).
_OWN: Final = re.compile(r'\bkernel\.py(?:"?:|", line )(\d+)')
#: First line of Numba's errors, which names a step of its compiler.
_STEP: Final = re.compile(r"^Failed in .* pipeline \(step: .*\)\n")
_LINES: Final = 24
_AFTER_ERROR: Final = 6


class Complaint(NamedTuple):
    """A compiler's error: its reason, the kernel's line from 1 if it is known, and the compiler's own lines."""

    reason: str
    line: int | None
    lines: list[str]

    def __str__(self) -> str:
        """The text of a verdict's message, with the reason first."""
        where = "" if self.line is None else f"line {self.line}: "
        return "\n".join([where + self.reason, *self.lines])


def complaint(text: str, kernel: str) -> Complaint:
    """Return what a compiler says in ``text`` about the source ``kernel``, without its command line."""
    if excerpts := list(_EXCERPT.finditer(text)):
        reason = one_line(_NOTATION.sub(r"\1: \3", text[excerpts[-1].end() :].strip()))
        found = (_find(each[1].splitlines(), kernel) for each in reversed(excerpts))
        line = next((number for number in found if number), None)
        return Complaint(reason or one_line(excerpts[-1][1].splitlines()[-1]), line, text.splitlines())
    text = _STEP.sub("", text.strip())
    if (error := _ERROR.search(text)) is None:
        own = _OWN.search(text)
        first, _, rest = text.partition("\n")
        if called := re.search(r">>> (.+)", rest):  # Numba names the arguments below.
            first = f"{first} {called[1]}"
        return Complaint(first, int(own[1]) if own else None, rest.splitlines()[:_LINES])
    reason = next(filter(None, error.groups()))
    if reason.endswith(" not found"):
        reason += ": the worker lacks this program, so install it there"
    following = text[error.start() :].split("\n", 1)[-1]
    if (own := _OWN.search(text, error.start())) is not None:
        line = int(own[1])
    else:
        until = _ERROR.search(following)
        marked = _MARKED.search(following[: until.start() if until else None])
        line = _find([marked[1]], kernel) if marked else None
    return Complaint(reason, line, _errors(text))


def _find(excerpt: list[str], kernel: str) -> int | None:
    """Return the number of the kernel's line at which an excerpt ends. None if it is not there, or more than once."""
    wanted, own = ([line.strip() for line in lines] for lines in (excerpt, kernel.splitlines()))
    ends = [end for end in range(len(wanted), len(own) + 1) if own[end - len(wanted) : end] == wanted]
    return ends[0] if len(ends) == 1 else None


def _errors(text: str) -> list[str]:
    """Return the lines with errors, each with the lines below it."""
    lines = text.splitlines()
    numbers = [number for number, line in enumerate(lines) if _ERROR.search(line)]
    wanted = sorted({at for number in numbers for at in range(number, min(number + 1 + _AFTER_ERROR, len(lines)))})
    return [lines[number] for number in wanted[:_LINES]]
