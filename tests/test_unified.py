"""Unified diffs: difflib's of short texts, and right ones of texts of any length."""

from __future__ import annotations

import difflib
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kqueue import unified as module
from kqueue.unified import unified

_TEXTS = st.lists(st.sampled_from("abcdefgh"), max_size=30)
#: As many bytes as a source may have, in lines.
_LINES = [f"value = value * {number % 100} + other" for number in range((1 << 20) // 28)]


def _applied(first: Sequence[str], diff: Sequence[str]) -> list[str]:
    """The text that a diff makes of the first one. What it says of the first must be so."""
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
    """Line for line, with the same heads and places."""
    theirs = difflib.unified_diff(first, second, "one", "two", "", "", context, "")
    assert list(unified(first, second, "one", "two", context=context)) == list(theirs)


@pytest.mark.parametrize("bounds", [{}, {"_DEPTH": 0}, {"_DEPTH": 0, "_EDITS": 2}, {"_STEPS": 5}], ids=str)
@given(first=_TEXTS, second=_TEXTS)
def test_long_texts_are_compared_rightly(bounds: dict[str, int], first: list[str], second: list[str]) -> None:
    """The diff makes the second text of the first, whichever bounds are met; nothing where they are the same."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {"_FEW": -1, **bounds}.items():
            patch.setattr(module, name, value)
        diff = list(unified(first, second, "one", "two"))
        assert _applied(first, diff) == second
        assert (diff == []) == (first == second)
        if bounds == {"_DEPTH": 0}:
            stayed = difflib.SequenceMatcher(None, first, second, autojunk=False).get_matching_blocks()
            longest = sum(block.size for block in stayed)
            assert _changes(diff) <= len(first) + len(second) - 2 * longest


@pytest.mark.parametrize(
    ("second", "most"),
    [
        ([line if number % 100 else f"{line} + 1" for number, line in enumerate(_LINES)], 2 * len(_LINES) // 100 + 2),
        ([line for number, line in enumerate(_LINES) if number % 100], len(_LINES) // 100 + 1),
        ([*_LINES[:9], "new", *_LINES[9:20_000], *_LINES[20_500:]], 501),
        pytest.param(_LINES[::-1], 2 * len(_LINES), marks=pytest.mark.nightly),
    ],
    ids=["changed", "removed", "one added and a part removed", "reversed"],
)
def test_a_megabyte_of_lines_over_and_over(second: list[str], most: int) -> None:
    """What difflib takes minutes or hours for is found, and few lines where few differ."""
    diff = list(unified(_LINES, second, "one", "two"))
    assert _applied(_LINES, diff) == second
    assert _changes(diff) <= most


def test_texts_with_few_distinct_lines_or_endless_divisions() -> None:
    """Each part has one line more that both have once. Of lines that are all equal, any may be another."""
    equal = ["x = 1"] * 150_000
    changed = [line if number % 100 else "y = 2" for number, line in enumerate(equal)]
    assert _changes(list(unified(equal, changed, "one", "two"))) == 3000
    first = [str(number + further) for number in range(60_000) for further in (1, 0)]
    second = ["begin", *first[1:], "end"]
    diff = list(unified(first, second, "one", "two"))
    assert _applied(first, diff) == second
