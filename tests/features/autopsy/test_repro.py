"""`repro.py` as text: it contains sources and messages of any content unchanged."""

from __future__ import annotations

import ast
from typing import Any

from kqueue.categories import Category
from kqueue.contract import Outcome, Phase
from kqueue.evidence import Facts
from kqueue.features.autopsy import report
from kqueue.judging import request_of

#: Sources that try to become code of the surrounding program.
HOSTILE = [
    "x = '''\nboom()\n'''\n",
    "# @@KERNEL@@ @@PROBLEM@@ @@SUMMARY@@ # @@VALUES@@\n",
    "y = 1 \\",
    "s = '",
    "bell = '\x07\u202e'\n",
]


def test_sources_and_messages_cannot_leave_their_places() -> None:
    """Each source is a literal with exactly its text, and the message stays in the docstring."""
    outcome = Outcome(
        category=Category.RUNTIME_ERROR,
        message='"""\nboom()\n@@KERNEL@@ \\',
        phase=Phase.CHECK,
        facts=Facts(exception="builtins.ValueError"),
    )
    harmless = _parts(report.program(request_of(problem="a", kernel="b"), "a", outcome, (0,), ""))
    for problem in HOSTILE:
        for kernel in HOSTILE:
            found = _parts(report.program(request_of(problem=problem, kernel=kernel), problem, outcome, (0,), "words"))
            assert (found["PROBLEM"], found["KERNEL"]) == (problem, kernel)
            assert found[""] == harmless[""]


def _parts(source: str) -> dict[str, Any]:
    """Return the two sources, and the rest of the program without its docstring."""
    tree = ast.parse(source)
    assert isinstance(tree.body[0], ast.Expr)
    rest: list[str] = []
    found: dict[str, Any] = {}
    for node in tree.body[1:]:
        match node:
            case ast.Assign(targets=[ast.Name(id="PROBLEM" | "KERNEL" as name)], value=ast.Call() as call):
                # This call joins lines.
                assert ast.unparse(call.func) == r"'\n'.join"
                found[name] = "\n".join(ast.literal_eval(call.args[0]))
            case ast.Assign(targets=[ast.Name(id="PROBLEM" | "KERNEL" as name)], value=value):
                found[name] = ast.literal_eval(value)
            case _:
                rest.append(ast.unparse(node))
    return found | {"": rest}
