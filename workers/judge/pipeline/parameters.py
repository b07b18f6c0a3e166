"""Differences between a kernel's parameters and the reference's (:mod:`workers.judge.channel.parameters`)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from typing import Final

from kqueue.text import one_line

#: Maximum number of parameters that an explanation names.
_SHOWN: Final = 4


def modes(description: str) -> list[str]:
    """Return the modules that depend on the training mode and are in it."""
    return one_line(description.partition("\n")[0]).split()


def difference(kernel: str, reference: str, changed: Collection[str] = ()) -> str | None:
    """Return how a kernel's parameters differ from the reference's, or None if at most their names do.

    Parameters that calls have ``changed`` are left out.
    """
    mine, theirs = (
        [tuple(map(one_line, line.split("\t"))) for line in text.split("\n")[1:] if line.split("\t")[0] not in changed]
        for text in (kernel, reference)
    )
    names, expected = ([each[0] for each in every] for every in (mine, theirs))
    is_alike = [each[1:] for each in mine] == [each[1:] for each in theirs]
    # Values follow from the order of construction. In another order each name has other values.
    if is_alike and (names == expected or Counter(names) != Counter(expected)):
        return None
    if names == expected and [each[1:2] for each in mine] == [each[1:2] for each in theirs]:
        other = [name for name, a, b in zip(names, mine, theirs, strict=True) if a != b]
        return f"{len(other)} of {len(names)} have other values, the first {other[0]}"
    if Counter(each[:2] for each in mine) == Counter(each[:2] for each in theirs):
        return f"they are created in another order: {listed(names)} instead of {listed(expected)}"
    shapes, wanted = ([" ".join(each[:2]) for each in every] for every in (mine, theirs))
    return f"they are {listed(shapes)} instead of {listed(wanted)}"


def listed(names: list[str]) -> str:
    """Return the first names."""
    return ", ".join(names[:_SHOWN]) + (", ..." if len(names) > _SHOWN else "") if names else "none"
