"""The differences between two evaluations, for `kqueue diff` and the page.

The diffs of their sources take time that is linear in the number of lines and not quadratic.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator, Sequence
from difflib import Match, SequenceMatcher
from itertools import takewhile
from operator import eq
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from kqueue.store.reports import Detail

#: Maximum total number of lines of two problems and two kernels that a server compares, which takes a second or two.
_LINES: Final = 200_000
#: Maximum number of lines of both texts for difflib, which can take quadratic time.
_FEW: Final = 2_000
#: Maximum number of lines of either text that difflib compares at once in longer texts.
_WINDOW: Final = 200
#: Maximum product of this number and of all lines, which bounds the time. The longest texts have windows of 20 lines.
_STEPS: Final = 2_000_000


def of_sources(a: Detail, b: Detail, *, context: int = 3) -> list[str]:
    """Return the lines of a unified diff of two evaluations' problems and kernels, or none if they are equal."""
    lines: list[str] = []
    for part in ("problem", "kernel"):
        one, other = (getattr(detail, part).splitlines() for detail in (a, b))
        lines += unified(one, other, _named(a, part), _named(b, part), context=context)
    return lines


def are_too_long(a: Detail, b: Detail) -> bool:
    """Return True if the sources have too many lines for a shared server. `kqueue diff` has no such limit."""
    return sum(len(getattr(detail, part).splitlines()) for detail in (a, b) for part in ("problem", "kernel")) > _LINES


def of_times(a: Detail, b: Detail) -> str:
    """Return a sentence on which of two kernels is faster. Empty if their times cannot be compared."""
    one, other = (detail.verdict and detail.verdict.runtime for detail in (a, b))
    if not one or not other or a.problem_hash != b.problem_hash or min(one.median_ms, other.median_ms) <= 0:
        return ""
    if a.verdict and b.verdict and _device(a) != _device(b):
        return "they were timed on different models of devices"
    ratio = one.median_ms / other.median_ms
    if a.kernel_hash == b.kernel_hash:
        return "the kernels are the same"
    if one.q1_ms <= other.q3_ms and other.q1_ms <= one.q3_ms:
        return f"the second takes {1 / ratio:.3g} of the first's time, with overlapping quartiles"
    return f"the second is {ratio:.3g}x as fast as the first"


def _named(detail: Detail, part: str) -> str:
    label = getattr(detail, f"{part}_label") or getattr(detail, f"{part}_hash")[:12]
    return f"{part} {label} of {str(detail.evaluation_id)[:8]}"


def _device(detail: Detail) -> str | None:
    return detail.verdict.environment.device if detail.verdict and detail.verdict.environment else None


def unified(
    first: Sequence[str], second: Sequence[str], first_name: str, second_name: str, *, context: int = 3
) -> Iterator[str]:
    """Yield the lines of a unified diff of two texts, or none if they are equal. The texts are lines without line ends.

    Up to 2,000 lines in total, the diff is difflib's. For longer texts it can keep other lines, and it is not always
    the shortest diff where dozens of lines changed among lines that occur many times.
    """
    for number, group in enumerate(_Matcher(first, second).get_grouped_opcodes(context)):
        if number == 0:
            yield f"--- {first_name}"
            yield f"+++ {second_name}"
        yield f"@@ -{_range(group[0][1], group[-1][2])} +{_range(group[0][3], group[-1][4])} @@"
        for operation, a_from, a_to, b_from, b_to in group:
            if operation == "equal":
                yield from (f" {line}" for line in first[a_from:a_to])
                continue
            yield from (f"-{line}" for line in first[a_from:a_to])
            yield from (f"+{line}" for line in second[b_from:b_to])


def _range(begin: int, end: int) -> str:
    """Format a range of lines as unified diffs do. An empty range is given by the line before it."""
    number = end - begin
    return f"{begin + 1}" if number == 1 else f"{begin + (number > 0)},{number}"


class _Matcher(SequenceMatcher[str]):
    """difflib's matcher, which compares long texts in parts."""

    def __init__(self, first: Sequence[str], second: Sequence[str]) -> None:
        self._first, self._second = first, second
        super().__init__(None, first, second)

    def get_matching_blocks(self) -> list[Match]:
        """Return the runs of unchanged lines in order, and an empty run at the end."""
        a, b = self._first, self._second
        if len(a) + len(b) <= _FEW:
            return super().get_matching_blocks()
        blocks = [Match(0, 0, 0)]
        most = min(_WINDOW, max(20, _STEPS // (len(a) + len(b) + 1)))
        i = j = 0
        for a_to, b_to in [*_anchors(a, b), (len(a), len(b))]:
            for block in [*_compared(a, b, i, a_to, j, b_to, most), Match(a_to, b_to, int(a_to < len(a)))]:
                last = blocks[-1]
                if (last.a + last.size, last.b + last.size) == (block.a, block.b):
                    blocks[-1] = last._replace(size=last.size + block.size)
                else:
                    blocks.append(block)
            i, j = a_to + 1, b_to + 1
        return [*blocks, Match(len(a), len(b), 0)]


def _anchors(a: Sequence[str], b: Sequence[str]) -> list[tuple[int, int]]:
    """Return the longest ascending sequence of lines that occur once in both texts. They divide the texts."""
    in_a, in_b = Counter(a), Counter(b)
    at = {line: j for j, line in enumerate(b) if in_b[line] == 1 == in_a[line]}
    # Of the sequences of each length, keep the one with the least end. Each is its last pair and the sequence before.
    ends: list[int] = []
    sequences: list[Any] = []
    for i, j in ((i, at[line]) for i, line in enumerate(a) if line in at):
        length = bisect_left(ends, j)
        ends[length : length + 1] = [j]
        sequences[length : length + 1] = [((i, j), sequences[length - 1] if length else None)]
    pairs: list[tuple[int, int]] = []
    rest = sequences[-1] if sequences else None
    while rest:
        pair, rest = rest
        pairs.append(pair)
    return pairs[::-1]


def _compared(a: Sequence[str], b: Sequence[str], i: int, a_to: int, j: int, b_to: int, most: int) -> Iterator[Match]:
    """Yield the unchanged lines of a part: its ends, and what difflib finds in windows of at most ``most`` lines."""
    head = sum(takewhile(bool, map(eq, a[i:a_to], b[j:b_to])))
    yield Match(i, j, head)
    i, j = i + head, j + head
    tail = sum(takewhile(bool, map(eq, a[i:a_to][::-1], b[j:b_to][::-1])))
    a_to, b_to = a_to - tail, b_to - tail
    while i < a_to and j < b_to:
        window = a[i : min(i + most, a_to)], b[j : min(j + most, b_to)]
        *found, end = SequenceMatcher(None, *window, autojunk=False).get_matching_blocks()
        yield from (Match(i + block.a, j + block.b, block.size) for block in found)
        # The next window begins after the last unchanged line if that is far enough for linear time.
        if found and 2 * (found[-1].a + found[-1].size) > most:
            end = Match(found[-1].a + found[-1].size, found[-1].b + found[-1].size, 0)
        i, j = i + end.a, j + end.b
    yield Match(a_to, b_to, tail)
