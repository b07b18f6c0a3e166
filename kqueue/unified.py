"""Unified diffs of texts of any length, in time that is linear in the number of lines and not quadratic."""

from __future__ import annotations

import difflib
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Final, NamedTuple

#: Maximum number of lines of both texts for difflib, which can take quadratic time.
_FEW: Final = 2_000
#: Maximum depth of dividing parts at unique common lines. Hostile texts could be divided without end.
_DEPTH: Final = 16
#: Maximum number of edits of one search in a part without a unique common line.
_EDITS: Final = 200
#: Maximum number of steps of these searches in all parts. The remaining lines are compared pairwise.
_STEPS: Final = 3_000_000


class _Part(NamedTuple):
    """Lines ``a_from`` to ``a_to`` of the first text, and ``b_from`` to ``b_to`` of the second."""

    a_from: int
    a_to: int
    b_from: int
    b_to: int


def unified(
    first: Sequence[str], second: Sequence[str], first_name: str, second_name: str, *, context: int = 3
) -> Iterator[str]:
    """Yield the lines of a unified diff of two texts, or none if they are equal.

    Up to 2,000 lines in total, the diff is difflib's. For longer texts it can keep other lines, and it is not always
    the shortest diff where hundreds of lines changed among lines that occur many times.

    Args:
        first, second: their lines, without line ends.
        first_name, second_name: their names in the diff's head.
        context: number of lines round each change.
    """
    for number, group in enumerate(_Matcher(first, second).get_grouped_opcodes(context)):
        if number == 0:
            yield f"--- {first_name}"
            yield f"+++ {second_name}"
        yield f"@@ -{_lines(group[0][1], group[-1][2])} +{_lines(group[0][3], group[-1][4])} @@"
        for operation, a_from, a_to, b_from, b_to in group:
            if operation == "equal":
                yield from (f" {line}" for line in first[a_from:a_to])
                continue
            yield from (f"-{line}" for line in first[a_from:a_to])
            yield from (f"+{line}" for line in second[b_from:b_to])


def _lines(begin: int, end: int) -> str:
    """Format a range of lines as unified diffs do. An empty range is given by the line before it."""
    number = end - begin
    return f"{begin + 1}" if number == 1 else f"{begin + (number > 0)},{number}"


class _Matcher(difflib.SequenceMatcher[str]):
    """difflib's matcher with another algorithm for long texts."""

    def __init__(self, first: Sequence[str], second: Sequence[str]) -> None:
        self._first, self._second = first, second
        super().__init__(None, first, second)

    def get_matching_blocks(self) -> list[difflib.Match]:
        """Return the runs of unchanged lines in order, and an empty run at the end."""
        if len(self._first) + len(self._second) <= _FEW:
            return super().get_matching_blocks()
        blocks: list[difflib.Match] = []
        for i, j in _CommonLines(self._first, self._second).pairs():
            if blocks and blocks[-1].a + blocks[-1].size == i and blocks[-1].b + blocks[-1].size == j:
                blocks[-1] = blocks[-1]._replace(size=blocks[-1].size + 1)
            else:
                blocks.append(difflib.Match(i, j, 1))
        return [*blocks, difflib.Match(len(self._first), len(self._second), 0)]


class _CommonLines:
    """The common lines of two texts."""

    # Lines that occur once in both texts divide them. Between these, a bounded search finds the fewest edits.

    def __init__(self, a: Sequence[str], b: Sequence[str]) -> None:
        numbers: dict[str, int] = {}
        self._a, self._b = ([numbers.setdefault(line, len(numbers)) for line in text] for text in (a, b))
        self._steps = _STEPS
        self._pairs: list[tuple[int, int]] = []

    def pairs(self) -> list[tuple[int, int]]:
        """Return the indices of unchanged lines, in order."""
        self._compare(_Part(0, len(self._a), 0, len(self._b)), _DEPTH)
        return sorted(self._pairs)

    def _compare(self, part: _Part, depth: int) -> None:
        part = self._without_ends(part)
        if part.a_from == part.a_to or part.b_from == part.b_to:
            return
        anchors = self._anchors(part) if depth else []
        if not anchors:
            edited, unmoved = self._edited(part), self._unmoved(part)
            self._pairs += edited if len(edited) > len(unmoved) else unmoved
            return
        self._pairs += anchors
        i, j = part.a_from, part.b_from
        for to in [*anchors, (part.a_to, part.b_to)]:
            if i < to[0] and j < to[1]:
                self._compare(_Part(i, to[0], j, to[1]), depth - 1)
            i, j = to[0] + 1, to[1] + 1

    def _without_ends(self, part: _Part) -> _Part:
        """Record the common first and last lines of a part, and return the rest."""
        i, a_to, j, b_to = part
        a, b = self._a, self._b
        while i < a_to and j < b_to and a[i] == b[j]:
            self._pairs.append((i, j))
            i, j = i + 1, j + 1
        while i < a_to and j < b_to and a[a_to - 1] == b[b_to - 1]:
            a_to, b_to = a_to - 1, b_to - 1
            self._pairs.append((a_to, b_to))
        return _Part(i, a_to, j, b_to)

    def _anchors(self, part: _Part) -> list[tuple[int, int]]:
        """Return the longest ascending sequence of lines that occur once in both texts."""
        mine, theirs = self._a[part.a_from : part.a_to], self._b[part.b_from : part.b_to]
        in_a, in_b = Counter(mine), Counter(theirs)
        at = {line: j for j, line in enumerate(theirs, part.b_from) if in_b[line] == 1 == in_a[line]}
        unique = [(i, at[line]) for i, line in enumerate(mine, part.a_from) if line in at]
        # The longest ascending sequence. Of the sequences of each length, keep the one with the least end.
        ends: list[int] = []
        ending: list[int] = []
        before: list[int | None] = []
        for index, (_, j) in enumerate(unique):
            length = bisect_left(ends, j)
            before.append(ending[length - 1] if length else None)
            ends[length : length + 1] = [j]
            ending[length : length + 1] = [index]
        run: list[tuple[int, int]] = []
        last = ending[-1] if ending else None
        while last is not None:
            run.append(unique[last])
            last = before[last]
        return run[::-1]

    def _edited(self, part: _Part) -> list[tuple[int, int]]:
        """Return the unchanged lines of a part, found by repeated searches for few edits."""
        pairs: list[tuple[int, int]] = []
        while part.a_from < part.a_to and part.b_from < part.b_to and self._steps > 0:
            kept, part = self._fewest_edits(part)
            pairs += kept
        return pairs + self._unmoved(part)

    def _fewest_edits(self, part: _Part) -> tuple[list[tuple[int, int]], _Part]:
        """Return the unchanged lines for the fewest edits, up to a maximum number of edits, and the unsearched rest."""
        # Myers, "An O(ND) Difference Algorithm and Its Variations".
        a_from, a_to, b_from, b_to = part
        a, b = self._a, self._b
        # Keys: difference between the lines read of the first and of the second text. Values: the furthest line of the
        # first text that is reached with this number of edits.
        reached = {1: a_from}
        trail: list[dict[int, int]] = []
        far, far_trail, far_offset = (a_from, b_from), 0, 0
        for edits in range(_EDITS + 1):
            trail.append(dict(reached))
            for offset in range(-edits, edits + 1, 2):
                begun = i = reached[offset + 1] if _is_added(reached, edits, offset) else reached[offset - 1] + 1
                j = b_from + i - a_from - offset
                while i < a_to and j < b_to and a[i] == b[j]:
                    i, j = i + 1, j + 1
                reached[offset] = i
                self._steps -= 1 + i - begun
                if i <= a_to and j <= b_to and i + j >= sum(far):
                    far, far_trail, far_offset = (i, j), len(trail), offset
            if far == (a_to, b_to) or self._steps < 0:
                break
        return _kept(trail[:far_trail], part, far[0], far_offset), _Part(far[0], a_to, far[1], b_to)

    def _unmoved(self, part: _Part) -> list[tuple[int, int]]:
        """Return the equal lines at equal indices."""
        both = zip(range(part.a_from, part.a_to), range(part.b_from, part.b_to), strict=False)
        return [(i, j) for i, j in both if self._a[i] == self._b[j]]


def _is_added(reached: dict[int, int], edits: int, offset: int) -> bool:
    """Return True if the next edit reaches further by adding a line than by removing one."""
    return offset == -edits or (offset != edits and reached[offset - 1] < reached[offset + 1])


def _kept(trail: list[dict[int, int]], part: _Part, i: int, offset: int) -> list[tuple[int, int]]:
    """Return the unchanged lines on the path to a position, from the lines reached before each edit."""
    pairs: list[tuple[int, int]] = []
    for edits in reversed(range(len(trail))):
        added = _is_added(trail[edits], edits, offset)
        begun = trail[edits][offset + 1] if added else trail[edits][offset - 1] + 1
        pairs += [(at, part.b_from + at - part.a_from - offset) for at in range(begun, i)]
        i, offset = (begun, offset + 1) if added else (begun - 1, offset - 1)
    return pairs
