"""The reason and the kernel's line in the text of a compiler's error."""

from __future__ import annotations

import re
from typing import Final

from kqueue.text import one_line

#: An error of a C++ compiler (``main.cpp:6:43: error: ...``) or nvcc (``main.cu(6): error: ...``).
LOCATED: Final = re.compile(r"^\S+?(?::\d+(?::\d+)?|\(\d+\)): (?:\w+ )*error(?: #[\w-]+)?: (.+)", re.MULTILINE)
#: The same, or an error of ptxas, CuTe DSL, MLIR, a compiler's driver with its name, or a linker.
_ERROR: Final = re.compile(
    rf"{LOCATED.pattern}|^ptxas.*?(?:error|fatal) *: (.+)|^error(?:\[\w+\])?: (?:unknown: )?(.+)"
    r"|^(nv(?:cc|link) (?:error|fatal)) *: (.+)|^(?:\S*/)?([\w.+-]+: (?:fatal )?error): (?!ld returned)(.+)"
    r"|^(?:\S*/)?([\w-]*ld[.\w]*: (?:cannot |.*\brelocation ).*)"
    r"|\b((?:undefined (?:symbol|reference)|multiple definition).*)|: (\S+: (?:command )?not found)$",
    re.MULTILINE,
)
#: Lines of ninja, which torch's extension builder runs: a command, a target that failed with its command, and the end.
_NINJA: Final = re.compile(r"(?m)(?<=': )\[\d+/\d+\] .*|^(?:\[\d+/\d+\] .*|FAILED: .*\n.*|ninja: build stopped.*)\n?")
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


def complaint(text: str, kernel: str) -> str:
    """Return a compiler's text about a source without the command line, and before it the reason and the kernel's line.

    The line is there if the source has it exactly once.
    """
    rest, marked = _NINJA.sub("", _STEP.sub("", text.strip())), list[str]()
    if excerpts := list(_EXCERPT.finditer(rest)):
        marked = [each[1] for each in reversed(excerpts)]
        reason = _NOTATION.sub(r"\1: \3", rest[excerpts[-1].end() :].strip()) or marked[0].splitlines()[-1]
    elif error := _ERROR.search(rest):
        reason, rest = ": ".join(filter(None, error.groups())), rest[error.start() :]
        if reason.endswith(" not found"):
            reason += ": the worker lacks this program, so install it there"
        marked = _MARKED.findall(rest.partition("\n\n")[0])[:1]
    else:
        reason, _, rest = rest.partition("\n")
        reason += "".join(re.findall(r">>>( .+)", rest)[:1])  # Numba names the arguments below.
    own = _OWN.search(rest)
    line = int(own[1]) if own else next(filter(None, (_find(each, kernel) for each in marked)), 0)
    return "\n".join([f"line {line}: " * bool(line) + one_line(reason), *rest.splitlines()[:_LINES]])


def _find(excerpt: str, kernel: str) -> int:
    """Return the number of the kernel's line at which an excerpt ends. 0 if it is not there, or more than once."""
    wanted, own = ([line.strip() for line in source.splitlines()] for source in (excerpt, kernel))
    ends = [end for end in range(len(wanted), len(own) + 1) if own[end - len(wanted) : end] == wanted]
    return ends[0] if len(ends) == 1 else 0
