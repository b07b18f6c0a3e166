"""The configurations of a tuning run, parsed from names with their values."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from typing import Any, Final

from kqueue.errors import InvalidRequest
from kqueue.tuning.sites import Tunable

#: Maximum number of values of a name.
MOST_VALUES: Final = 1000
#: Maximum number of names.
MOST_NAMES: Final = 20

_NAME: Final = re.compile(r"(?:[a-z]+:)?[A-Za-z_]\w*", re.ASCII)
_RANGE: Final = re.compile(r"(-?\d+)\.\.(-?\d+)(?:\.\.(x?)(\d+))?", re.ASCII)

#: A name with an optional kind as its prefix, and the texts of its values.
Parameter = tuple[str, tuple[str, ...]]
#: A value for each name, in the order of the names. Empty for the original kernel.
Config = tuple[str, ...]
ORIGINAL: Final[Config] = ()


def parse(words: Iterable[str]) -> list[Parameter]:
    """Parse ``BLOCK=64,128``, ``BLOCK=16..128..16`` and ``BLOCK=32..512..x2``.

    Raises:
        InvalidRequest: a word has none of these forms.
    """
    parameters: list[Parameter] = []
    for word in words:
        name, mark, given = word.partition("=")
        values = [value.strip() for value in given.split(",")]
        if not mark or not all(values):
            raise InvalidRequest(f"grid: {word}: write NAME=VALUE,VALUE, such as BLOCK=64,128 or BLOCK=32..512..x2")
        parameters.append((name.strip(), tuple(value for one in values for value in _range(one))))
    return parameters


def from_values(values: Mapping[str, Sequence[Any]]) -> list[Parameter]:
    """Return the parameters of a mapping of JSON values.

    Raises:
        InvalidRequest: a value is a list or an object.
    """

    def word(name: str, value: Any) -> str:
        if isinstance(value, list | dict):
            raise InvalidRequest(
                f"grid: {name}: give numbers, texts, true, false or null, not {json.dumps(value)[:80]}"
            )
        if isinstance(value, str):
            return value
        return "None" if value is None else json.dumps(value)

    return [(name, tuple(word(name, value) for value in mine)) for name, mine in values.items()]


def _range(text: str) -> list[str]:
    match = _RANGE.fullmatch(text)
    if match is None:
        return [text]
    low, high, by = int(match[1]), int(match[2]), int(match[4] or 1)
    doubling = bool(match[3])
    if low > high or by < 1 or (doubling and (low < 1 or by < 2)):
        raise InvalidRequest(f"grid: {text}: write LOW..HIGH..STEP or, from 1 on, LOW..HIGH..x2")
    values: list[str] = []
    while low <= high and len(values) <= MOST_VALUES:
        values.append(str(low))
        low = low * by if doubling else low + by
    return values


class Space:
    """The configurations of a kernel.

    Raises:
        InvalidRequest: a name is not in the kernel (:class:`~kqueue.tuning.sites.Tunable`), cannot have a value, or is
            given twice. Or there is nothing to try.
    """

    def __init__(self, kernel: str, parameters: Sequence[Parameter]) -> None:
        names = [name for name, _ in parameters]
        if not names:
            raise InvalidRequest("grid: give at least one name with its values, such as BLOCK=64,128")
        if len(names) > MOST_NAMES:
            raise InvalidRequest(f"grid: {len(names)} names are given, and at most {MOST_NAMES} are allowed")
        for name, values in parameters:
            if not _NAME.fullmatch(name):
                raise InvalidRequest(f"grid: {name!r} is not a name: write NAME=VALUE,VALUE")
            if names.count(name) > 1 or len(set(values)) < len(values):
                raise InvalidRequest(f"grid: {name}: the name, or one of its values, is given twice")
            if not 1 <= len(values) <= MOST_VALUES:
                raise InvalidRequest(f"grid: {name}: give 1 to {MOST_VALUES} values")
        self.names = names
        self.values = [values for _, values in parameters]
        self._tunable = Tunable(kernel, names)
        self._kernel = kernel
        for name, values in parameters:
            texts: dict[tuple[str | None, ...], str] = {}
            for value in values:
                other = texts.setdefault(self._tunable.written(name, value), value)
                if other != value:
                    raise InvalidRequest(f"grid: {name}: {other} and {value} are the same value: give one of them")
        if self.size == 1 and self.original is not None:
            raise InvalidRequest("grid: only the kernel's own values are given, so there is nothing to try")

    @property
    def size(self) -> int:
        """The number of configurations."""
        return math.prod(len(values) for values in self.values)

    @cached_property
    def original(self) -> Config | None:
        """The configuration with the original kernel's values, or None if it is not among them."""
        matching = [
            next((value for value in values if self._tunable.has(name, value)), None)
            for name, values in zip(self.names, self.values, strict=True)
        ]
        values = tuple(value for value in matching if value is not None)
        return values if len(values) == len(matching) else None

    def source(self, config: Config) -> str:
        """Return the kernel of a configuration."""
        if config == ORIGINAL:
            return self._kernel
        return self._tunable.kernel(dict(zip(self.names, config, strict=True)))

    def shown(self, config: Config) -> dict[str, str]:
        """Return a configuration's values by name. The original's values are read from its source."""
        if config == ORIGINAL:
            return {name: self._tunable.original(name) for name in self.names}
        return dict(zip(self.names, config, strict=True))
