"""Unified diffs of texts of any length, in a time that grows with the lines and not with their square."""

from __future__ import annotations

import difflib
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Final, NamedTuple

#: Lines of both texts together up to which difflib finds what is alike. It may take the square of them.
_FEW: Final = 2_000
#: How often parts are divided at the lines that both have once. Hostile texts could be divided without end.
_DEPTH: Final = 16
#: In a part that has no such line the fewest edits are looked for so many at a time, and with so many steps in all
#: parts together. What is left is compared line by line.
_EDITS: Final = 200
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
    """Yield the lines of a unified diff of two texts; none where they are the same.

    Of texts of up to 2,000 lines together it is difflib's. In longer ones other lines may count as those that stayed,
    and where hundreds changed among lines that stand there many times it need not be the shortest diff.

    Args:
        first, second: their lines, without what ends them.
        first_name, second_name: what they are called in the diff's head.
        context: lines round each change.
    """
    for number, group in enumerate(_Matcher(first, second).get_grouped_opcodes(context)):
        if number == 0:
            yield f"--- {first_name}"
            yield f"+++ {second_name}"
        yield f"@@ -{_lines(group[0][1], group[-1][2])} +{_lines(group[0][3], group[-1][4])} @@"
        for what, a_from, a_to, b_from, b_to in group:
            if what == "equal":
                yield from (f" {line}" for line in first[a_from:a_to])
                continue
            yield from (f"-{line}" for line in first[a_from:a_to])
            yield from (f"+{line}" for line in second[b_from:b_to])


def _lines(begin: int, end: int) -> str:
    """Write a range of lines as unified diffs do: an empty one by the line before it."""
    number = end - begin
    return f"{begin + 1}" if number == 1 else f"{begin + (number > 0)},{number}"


class _Matcher(difflib.SequenceMatcher[str]):
    """difflib's, with another way to find what is alike in long texts."""

    def __init__(self, first: Sequence[str], second: Sequence[str]) -> None:
        self._first, self._second = first, second
        super().__init__(None, first, second)

    def get_matching_blocks(self) -> list[difflib.Match]:
        """Return the runs of lines that stayed, in order, and an empty one at the end."""
        if len(self._first) + len(self._second) <= _FEW:
            return super().get_matching_blocks()
        blocks: list[difflib.Match] = []
        for i, j in _Alike(self._first, self._second).pairs():
            if blocks and blocks[-1].a + blocks[-1].size == i and blocks[-1].b + blocks[-1].size == j:
                blocks[-1] = blocks[-1]._replace(size=blocks[-1].size + 1)
            else:
                blocks.append(difflib.Match(i, j, 1))
        return [*blocks, difflib.Match(len(self._first), len(self._second), 0)]


class _Alike:
    """What is alike in two texts.

    Lines that both have once divide them. Between these the fewest edits are looked for, within bounds.
    """

    def __init__(self, a: Sequence[str], b: Sequence[str]) -> None:
        numbers: dict[str, int] = {}
        self._a, self._b = ([numbers.setdefault(line, len(numbers)) for line in text] for text in (a, b))
        self._steps = _STEPS
        self._pairs: list[tuple[int, int]] = []

    def pairs(self) -> list[tuple[int, int]]:
        """Return the places of lines that stayed, in order."""
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
        """Note what a part begins and ends with in both texts, and return the rest."""
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
        """Return the most lines that both have once and in the same order."""
        mine, theirs = self._a[part.a_from : part.a_to], self._b[part.b_from : part.b_to]
        in_a, in_b = Counter(mine), Counter(theirs)
        at = {line: j for j, line in enumerate(theirs, part.b_from) if in_b[line] == 1 == in_a[line]}
        found = [(i, at[line]) for i, line in enumerate(mine, part.a_from) if line in at]
        # The longest run that rises: of the runs of each length the one with the least end, and what comes before it.
        ends: list[int] = []
        ending: list[int] = []
        before: list[int | None] = []
        for place, (_, j) in enumerate(found):
            length = bisect_left(ends, j)
            before.append(ending[length - 1] if length else None)
            ends[length : length + 1] = [j]
            ending[length : length + 1] = [place]
        run: list[tuple[int, int]] = []
        last = ending[-1] if ending else None
        while last is not None:
            run.append(found[last])
            last = before[last]
        return run[::-1]

    def _edited(self, part: _Part) -> list[tuple[int, int]]:
        """Return what stays if few lines are removed and added."""
        found: list[tuple[int, int]] = []
        while part.a_from < part.a_to and part.b_from < part.b_to and self._steps > 0:
            kept, part = self._fewest_edits(part)
            found += kept
        return found + self._unmoved(part)

    def _fewest_edits(self, part: _Part) -> tuple[list[tuple[int, int]], _Part]:
        """Return what stays if the fewest lines are removed and added, as far as so many edits go, and the rest.

        Myers, "An O(ND) Difference Algorithm and Its Variations".
        """
        a_from, a_to, b_from, b_to = part
        a, b = self._a, self._b
        # By how much further the first text is read than the second: the furthest line of it that so many edits reach.
        reached = {1: a_from}
        trail: list[dict[int, int]] = []
        far, far_trail, far_ahead = (a_from, b_from), 0, 0
        for edits in range(_EDITS + 1):
            trail.append(dict(reached))
            for ahead in range(-edits, edits + 1, 2):
                begun = i = reached[ahead + 1] if _is_added(reached, edits, ahead) else reached[ahead - 1] + 1
                j = b_from + i - a_from - ahead
                while i < a_to and j < b_to and a[i] == b[j]:
                    i, j = i + 1, j + 1
                reached[ahead] = i
                self._steps -= 1 + i - begun
                if i <= a_to and j <= b_to and i + j >= sum(far):
                    far, far_trail, far_ahead = (i, j), len(trail), ahead
            if far == (a_to, b_to) or self._steps < 0:
                break
        return _kept(trail[:far_trail], part, far[0], far_ahead), _Part(far[0], a_to, far[1], b_to)

    def _unmoved(self, part: _Part) -> list[tuple[int, int]]:
        """Return what is alike at the same place."""
        both = zip(range(part.a_from, part.a_to), range(part.b_from, part.b_to), strict=False)
        return [(i, j) for i, j in both if self._a[i] == self._b[j]]


def _is_added(reached: dict[int, int], edits: int, ahead: int) -> bool:
    """True if one edit more reaches further by adding a line than by removing one."""
    return ahead == -edits or (ahead != edits and reached[ahead - 1] < reached[ahead + 1])


def _kept(trail: list[dict[int, int]], part: _Part, i: int, ahead: int) -> list[tuple[int, int]]:
    """Return the lines that stayed on the way to a place, from what was reached before each edit."""
    found: list[tuple[int, int]] = []
    for edits in reversed(range(len(trail))):
        added = _is_added(trail[edits], edits, ahead)
        begun = trail[edits][ahead + 1] if added else trail[edits][ahead - 1] + 1
        found += [(at, part.b_from + at - part.a_from - ahead) for at in range(begun, i)]
        i, ahead = (begun, ahead + 1) if added else (begun - 1, ahead - 1)
    return found
