"""Records of other projects' results as fields of verdicts, and back, by the table of their form.

A record becomes the fields of a verdict that it states, and is kept under ``other`` itself, so that nothing is lost on
the way back. It is no verdict: kqueue did not judge it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

from kqueue.categories import Category

Record = dict[str, Any]
#: Functions for a value's way to a verdict and back. None from them leaves the value out.
Kind = tuple[Callable[[Any], Any], Callable[[Any], Any]]


class Form(NamedTuple):
    """A form of results.

    ``split`` returns the records of a file's content, or None if it has another form, and ``join`` the contents of
    files. ``fields`` are paths in a verdict and in a record. Of several for one field, the first counts. ``rest``
    returns a record's other fields from a verdict, or raises InvalidRequest if the form has no such result.
    """

    name: str
    split: Callable[[Any], list[Record] | None]
    fields: Sequence[tuple[str, str, Kind]]
    rest: Callable[[Record], Record]
    join: Callable[[list[Record]], list[Any]] = list


def to_verdict(form: Form, record: Record) -> Record:
    """Return a record as fields of a verdict."""
    found: Record = {}
    for ours, theirs, (there, _) in reversed(form.fields):
        with suppress(TypeError, ValueError, LookupError, ArithmeticError):
            _put(found, ours, there(get(record, theirs)))
    if len(rows := get(found, "evidence.shapes.rows") or ()) == 1:
        found = {name: value for name, value in rows[0].items() if name != "name" and value is not None} | found
    if "category" not in found and (found.get("correctness") or found.get("compiled") is False):
        found["category"] = str(Category.PASSED if found.get("correctness") else Category.COMPILE_ERROR)
    if "category" in found:
        info = Category(found["category"]).info
        found |= {"blame": str(info.blame), "compiled": info.compiled, "correctness": info.correctness}
    return {**found, "other": {form.name: record}}


def from_verdict(form: Form, verdict: Record) -> Record:
    """Return fields of a verdict as a record: the one that they were, unless they were changed."""
    kept = get(verdict, f"other.{form.name}")
    return kept if kept and to_verdict(form, kept) == verdict else written(form, verdict)


def written(form: Form, verdict: Record) -> Record:
    """Return the record that the fields of a verdict give."""
    made = form.rest(verdict)
    for ours, theirs, (_, back) in reversed(form.fields):
        _put(made, theirs, None if (value := get(verdict, ours)) is None else back(value))
    return made


def lost(before: Any, after: Any, path: str = "") -> Iterator[str]:
    """Yield the paths of values that are missing or different in ``after``."""
    if before in (None, "", [], {}):
        return
    if isinstance(before, dict) and isinstance(after, dict) and (after or not path):
        for name, value in before.items():
            yield from lost(value, after.get(name), f"{path}.{name}".lstrip("."))
    elif isinstance(before, list) and isinstance(after, list) and len(before) == len(after):
        for one, other in zip(before, after, strict=True):
            yield from lost(one, other, f"{path}[]")
    elif before != after:
        yield path


def get(record: Any, path: str) -> Any:
    """Return the value at a path, or None."""
    for part in path.split("."):
        record = record.get(part) if isinstance(record, dict) else None
    return record


def _put(record: Record, path: str, value: object) -> None:
    if value is not None:
        *above, last = path.split(".")
        for part in above:
            record = record.setdefault(part, {})
        record[last] = value
