"""Cheats on the clock, and the controls."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from kqueue.categories import Category
from tests.integrity.corpus import GPU, Program, control, program

#: An answer that was wrong, whenever it was found out.
WRONG: Final = frozenset({Category.WRONG_VALUES, Category.NONDETERMINISTIC, Category.NOT_FINITE, Category.REWARD_HACK})


def _table() -> Iterator[Program]:
    c = Category
    yield program("timing/event_monkeypatch", "event monkeypatches", c.PASSED, lanes=GPU, honest="controls/torch_gelu")
    yield control("controls/torch_gelu")


TABLE: Final = list(_table())
