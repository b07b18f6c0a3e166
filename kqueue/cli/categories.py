"""`kqueue categories` and `kqueue evidence`: the vocabulary of verdicts."""

from __future__ import annotations

import re
from collections.abc import Iterator
from datetime import datetime
from enum import StrEnum
from types import NoneType
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal, get_args, get_origin

import typer

from kqueue.categories import CATEGORIES, Category, CategoryInfo
from kqueue.categories import markdown as table_in_markdown
from kqueue.cli.render import Columns, category_text, print_table, table
from kqueue.figures import yes_no

if TYPE_CHECKING:
    from kqueue.evidence import Needs, Part

_NAMES: Final[dict[Any, str]] = {
    str: "text",
    int: "integer",
    float: "number",
    bool: "true or false",
    datetime: "time",
    Category: "category",
}
_INTRODUCTION: Final = """\
# Evidence

Made from the models in `kqueue/evidence.py` by `kqueue evidence --markdown`. A verdict has `facts`, which decided its
category, and `evidence`, which has further observations. Both are immutable objects with the attributes below, whose
types are in `docs/schemas/verdict.json`. An attribute is `None` where its value is unknown.

```python
if verdict.category == "crashed":
    print(verdict.facts.signal, verdict.facts.exit_status)
if verdict.evidence.provenance is not None and verdict.evidence.provenance.decoy:
    print(verdict.evidence.provenance.why)
```

The JSON form has the same names. There a field of `facts`, `evidence` or clocks without a value is absent. In all other
objects it is null. NaN and the infinities are the texts `NaN`, `Infinity` and `-Infinity`.

A verdict of another version of kqueue can be read: unknown fields, and entries in an unknown format, are omitted.

## Fields of each category

An outcome without one of these is refused. Only `passed` has `runtime` and `baseline`. With
`evidence.verified_calls` it was timed, and always has `runtime`.
"""


_CATEGORY: Final[Columns[CategoryInfo]] = {
    "category": lambda row: category_text(row.category, row.blame),
    "blame": lambda row: row.blame,
    "compiled": lambda row: yes_no(row.compiled),
    "correct": lambda row: yes_no(row.correctness),
    "meaning": lambda row: row.meaning,
}


def categories(markdown: Annotated[bool, typer.Option("--markdown", help="Print docs/categories.md.")] = False) -> None:
    """Print the table of categories."""
    if markdown:
        typer.echo(table_in_markdown(), nl=False)
    else:
        table(_CATEGORY)(CATEGORIES.values())


def evidence(markdown: Annotated[bool, typer.Option("--markdown", help="Print docs/evidence.md.")] = False) -> None:
    """Print the fields of a verdict's facts and evidence."""
    from kqueue.evidence import Evidence, Facts

    if markdown:
        typer.echo(page(), nl=False)
        return
    for model in (Facts, Evidence):
        print_table(("field", "type", "meaning"), _fields(model), title=model.__name__.lower())


def page() -> str:
    """Return ``docs/evidence.md``."""
    return "".join(f"{line}\n" for line in _lines())


def _lines() -> Iterator[str]:
    from kqueue.evidence import NEEDS, Evidence, Facts

    yield _INTRODUCTION
    for needed in dict.fromkeys(map(_needed, NEEDS.values())):
        yield f"- {', '.join(f'`{name}`' for name in NEEDS if _needed(NEEDS[name]) == needed)}: {needed or 'nothing'}"
    models = dict.fromkeys([Facts, Evidence, *_parts(Facts), *_parts(Evidence)])
    for model in models:
        yield f"\n## {model.__name__}\n"
        yield in_markdown(model.__doc__ or "").replace("`NEEDS` names", "the table above names")
        yield ""
        for name, kind, meaning in _fields(model):
            yield f"- `{name}`{f' ({kind})' * (kind not in _NAMES.values())}: {in_markdown(meaning)}"


def _needed(needs: Needs) -> str:
    names = ["message"] * needs.message + ["phase"] * needs.phase + [f"facts.{name}" for name in needs.facts]
    listed = [f"`{name}`" for name in names]
    if needs.one_of:
        listed.append(" or ".join(f"`facts.{name}`" for name in needs.one_of))
    return ", ".join(listed)


def _fields(model: type[Part]) -> Iterator[tuple[str, str, str]]:
    """Yield name, type and meaning of each field."""
    for name, field in model.model_fields.items():
        yield name, kind_of(field.annotation), " ".join((field.description or "").split())


def kind_of(annotation: Any) -> str:
    """Return the name of a field's type in JSON. ``None`` is not mentioned."""
    arguments = [argument for argument in get_args(annotation) if argument is not NoneType]
    match get_origin(annotation):
        case None:
            if name := _NAMES.get(annotation):
                return name
            return " or ".join(annotation) if issubclass(annotation, StrEnum) else annotation.__name__
        case origin if origin is tuple:
            return f"list of {kind_of(arguments[0])}"
        case origin if origin is dict:
            return f"{kind_of(arguments[1])} by name"
        case origin if origin is Literal:
            return " or ".join(str(value).lower() for value in arguments)
        case origin if origin is Annotated:
            return kind_of(arguments[0])
        case _:
            return " or ".join(map(kind_of, arguments))


def _parts(model: type[Part]) -> Iterator[type[Part]]:
    """Yield the models of a model's fields, recursively."""
    from kqueue.evidence import Part

    for field in model.model_fields.values():
        for part in _leaves(field.annotation):
            if isinstance(part, type) and issubclass(part, Part):
                yield part
                yield from _parts(part)


def _leaves(annotation: Any) -> Iterator[Any]:
    arguments = get_args(annotation)
    if not arguments:
        yield annotation
    for argument in arguments:
        yield from _leaves(argument)


def in_markdown(text: str) -> str:
    """Convert a docstring's text: roles and double backquotes become code."""
    return re.sub(r":\w+:`([^`]+)`", r"`\1`", " ".join(text.split())).replace("``", "`")
