"""Unified diffs: difflib's for short texts, and correct ones for texts of any length."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from unittest import mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kqueue import differences as module
from kqueue.differences import unified

_TEXTS = st.lists(st.sampled_from("abcdefgh"), max_size=30)
#: The lines of a source with the maximum number of bytes.
_LINES = [f"value = value * {number % 100} + other" for number in range((1 << 20) // 28)]


def _applied(first: Sequence[str], diff: Sequence[str]) -> list[str]:
    """Apply a diff, which must repeat removed and unchanged lines, and return the second text."""
    made: list[str] = []
    at = 0
    for line in diff[2:]:
        if line.startswith("@@"):
            begin, _, number = line.split()[1][1:].partition(",")
            begun = int(begin) - (number != "0")
            made += first[at:begun]
            at = begun
        elif line[0] == "+":
            made.append(line[1:])
        else:
            assert first[at] == line[1:]
            made += [line[1:]] * (line[0] == " ")
            at += 1
    return [*made, *first[at:]]


def _changes(diff: Sequence[str]) -> int:
    return sum(line[0] in "+-" for line in diff[2:])


@given(first=_TEXTS, second=_TEXTS, context=st.integers(0, 4))
def test_short_texts_are_compared_by_difflib(first: list[str], second: list[str], context: int) -> None:
    """Short texts have difflib's diff line for line, with the same headers."""
    theirs = difflib.unified_diff(first, second, "one", "two", "", "", context, "")
    assert list(unified(first, second, "one", "two", context=context)) == list(theirs)


@pytest.mark.parametrize("window", [3, 200])
@given(first=_TEXTS, second=_TEXTS)
def test_long_texts_are_compared_rightly(window: int, first: list[str], second: list[str]) -> None:
    """The diff makes the second text of the first, and is empty for equal texts."""
    with mock.patch.multiple(module, _FEW=-1, _WINDOW=window):
        diff = list(unified(first, second, "one", "two"))
    assert _applied(first, diff) == second
    assert (diff == []) == (first == second)


@pytest.mark.parametrize(
    ("second", "most"),
    [
        ([line if number % 100 else f"{line} + 1" for number, line in enumerate(_LINES)], 2 * len(_LINES) // 100 + 2),
        ([line for number, line in enumerate(_LINES) if number % 100], len(_LINES) // 100 + 1),
        ([*_LINES[:9], "new", *_LINES[9:20_000], *_LINES[20_500:]], 501),
        (_LINES[::-1], 2 * len(_LINES)),
    ],
    ids=["changed", "removed", "one added and a part removed", "reversed"],
)
def test_a_megabyte_of_lines_over_and_over(second: list[str], most: int) -> None:
    """Texts that take difflib minutes or hours are compared, and a few changed lines make a small diff."""
    diff = list(unified(_LINES, second, "one", "two"))
    assert _applied(_LINES, diff) == second
    assert _changes(diff) <= most


def test_texts_with_few_distinct_lines() -> None:
    """Texts with few distinct lines are compared correctly."""
    equal = ["x = 1"] * 150_000
    changed = [line if number % 100 else "y = 2" for number, line in enumerate(equal)]
    assert _changes(list(unified(equal, changed, "one", "two"))) == 3000
