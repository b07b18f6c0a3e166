"""Completes the corpus's programs: a file holds a program's unique code, and ``bases/`` holds shared code.

Most files hold several programs, each below a line ``# %% NAME``. A name that a program uses and does not define comes
from its base: an import, a helper, and the honest part that a judge requires. A function ``forward`` becomes the method
of a class, and a function ``attack`` that the program does not call is called at the end. A complete program is
unchanged::

    compose("def forward(self, x):\n    return x + os.getpid()\n", "kernel")
"""

from __future__ import annotations

import ast
import re
import symtable
import textwrap
from functools import cache
from pathlib import Path
from typing import Final

BASES: Final = Path(__file__).resolve().parent / "bases"
#: Names that every program has, by base. The first is the class that gets a function ``forward``.
_NEEDED: Final = {"kernel": ["ModelNew"], "problem": ["Model", "get_inputs", "get_init_inputs"]}


def programs_of(file: Path) -> dict[str, str]:
    """Return the programs of a file by name. A file without such lines is one program."""
    parts = re.split(r"(?m)^# %% (\w+)\n", file.read_text(encoding="utf-8"))
    return dict(zip(parts[1::2], parts[2::2], strict=True)) or {file.stem: parts[0]}


def compose(program: str, base: str) -> str:
    """Return a program with its missing definitions inserted after its docstring."""
    shared = _definitions(base)
    program = _with_class(program, shared[_NEEDED[base][0]])
    defined, used = names(program)
    lacking, wanted = set[str](), {*used, *_NEEDED[base]}
    while wanted := (wanted - defined - lacking) & shared.keys():
        lacking |= wanted
        wanted = set[str]().union(*(names(shared[name])[1] for name in wanted))
    added = "".join(text for name, text in shared.items() if name in lacking)
    body, lines = ast.parse(program).body, program.splitlines(keepends=True)
    head = body[0].end_lineno if body and isinstance(body[0], ast.Expr) else 0
    end = "\n\nattack()\n" if "attack" in defined - used else ""
    return "".join([*lines[:head], "\n" if added else "", added, *lines[head:], end])


def _with_class(program: str, honest: str) -> str:
    """Return the program with its function ``forward`` as the method of a class like the honest one."""
    for node in ast.parse(program).body:
        if isinstance(node, ast.FunctionDef) and node.name == "forward":
            lines = program.splitlines(keepends=True)
            header = honest.split("\n")[2]
            method = textwrap.indent("".join(lines[node.lineno - 1 : node.end_lineno]), "    ")
            return "".join([*lines[: node.lineno - 1], header, "\n", method, *lines[node.end_lineno :]])
    return program


@cache
def _definitions(base: str) -> dict[str, str]:
    """Return the imports and definitions of a base by the names that they define, in their order."""
    source = (BASES / f"{base}.py").read_text(encoding="utf-8")
    lines, found = source.splitlines(keepends=True), dict[str, str]()
    for node in ast.parse(source).body:
        if isinstance(node, ast.Import | ast.ImportFrom):
            origin = f"from {node.module} " if isinstance(node, ast.ImportFrom) else ""
            found |= {alias.asname or alias.name: f"{origin}import {ast.unparse(alias)}\n" for alias in node.names}
        elif isinstance(node, ast.FunctionDef | ast.ClassDef):
            begin = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
            found[node.name] = "".join(["\n\n", *lines[begin - 1 : node.end_lineno]])
        elif isinstance(node, ast.Assign):
            found[ast.unparse(node.targets[0])] = "".join(["\n\n", *lines[node.lineno - 1 : node.end_lineno]])
    return found


@cache
def names(program: str) -> tuple[set[str], set[str]]:
    """Return the names that a program defines at its top level, and the global names that it uses."""
    defined, used = set[str](), set[str]()
    tables = [symtable.symtable(program, "program", "exec")]
    while tables:
        table = tables.pop()
        tables += table.get_children()
        at_top = table.get_type() == "module"
        for symbol in table.get_symbols():
            if at_top and (symbol.is_assigned() or symbol.is_imported()):
                defined.add(symbol.get_name())
            if symbol.is_referenced() and (at_top or symbol.is_global()):
                used.add(symbol.get_name())
    return defined, used
