"""Problems in words."""

from __future__ import annotations

import pytest

from kqueue import statement
from kqueue.statement import Statement

SIGNATURE = "forward(x, *, n: int=2) -> int"
MODEL = "class Model:\n    def forward(self, x, *, n: int = 2) -> int: ...\n"


@pytest.mark.parametrize(
    ("source", "known"),
    [
        (f'"""Adds."""\n{MODEL}', Statement("Adds.", SIGNATURE)),
        ('class Model:\n    """Adds.\n\n    Twice.\n    """\n', Statement("Adds.\n\nTwice.", "")),
        # A program's first line is no description.
        (f"#!/usr/bin/python\n# Adds.\n#  Twice.\n\n{MODEL}", Statement("Adds.\nTwice.", SIGNATURE)),
        ("# only a comment", Statement("only a comment", "")),
        ("class Model: (", Statement()),
        ("x = " + "(" * 5000, Statement()),
        ("\0", Statement()),
        ("", Statement()),
        ("# long" + " " * 300_000, Statement()),
    ],
)  # fmt: skip
def test_a_source_in_words(source: str, known: Statement) -> None:
    """A statement has docstrings or leading comments, and the signature. A source that is no Python has none."""
    assert statement.of(source) == known
