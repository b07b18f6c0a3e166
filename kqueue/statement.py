"""The description of a problem in words, read from its source without running it."""

from __future__ import annotations

import ast
import inspect
import io
import tokenize
from dataclasses import dataclass
from typing import Final

#: Maximum characters of a source that is parsed, of a description and of a signature.
_MOST: Final = 200_000
_LONGEST: Final = 4000
_LONGEST_SIGNATURE: Final = 400


@dataclass(frozen=True, slots=True)
class Statement:
    """A problem in words. Each text is empty if the source does not have it."""

    words: str = ""
    """The docstrings of the module, the model and its ``forward``, or else the comments at the beginning."""
    signature: str = ""
    """The arguments and the result of ``forward``."""


def of(source: str) -> Statement:
    """Return the statement of a problem. A source that is too long or cannot be parsed has an empty one."""
    if len(source) > _MOST:
        return Statement()
    try:
        module = ast.parse(source)
        models = [node for node in module.body if isinstance(node, ast.ClassDef) and node.name == "Model"]
        methods = [
            node for one in models for node in one.body if isinstance(node, ast.FunctionDef) and node.name == "forward"
        ]
        texts = [ast.get_docstring(node) for node in (module, *models, *methods)]
        words = "\n\n".join(dict.fromkeys(text for text in texts if text)) or _comments(source)
        signature = next((_signature(method) for method in methods), "")
    except (SyntaxError, ValueError, RecursionError, MemoryError, tokenize.TokenError):
        return Statement()
    return Statement(words[:_LONGEST], signature[:_LONGEST_SIGNATURE])


def _signature(method: ast.FunctionDef) -> str:
    arguments = ast.unparse(method.args).removeprefix("self").removeprefix(", ")
    result = f" -> {ast.unparse(method.returns)}" if method.returns else ""
    return f"{method.name}({arguments}){result}"


def _comments(source: str) -> str:
    """Return the comments before the first statement as a text."""
    lines: list[str] = []
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            lines += [] if token.string.startswith("#!") else [token.string.lstrip("#")]
        elif token.type not in (tokenize.NL, tokenize.NEWLINE):
            break
    return inspect.cleandoc("\n".join(lines))
