"""The filters of lists of evaluations, from which SQL conditions, parameters of HTTP, forms and options are made."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Annotated, Final, TypedDict, get_args, get_type_hints

from kqueue import backends
from kqueue.categories import Blame, Category
from kqueue.states import EvaluationState, Priority, Trials


class Filters(TypedDict, total=False):
    """The conditions on the evaluations of a list. None means no condition. Texts have a caption and a form's hint."""

    state: EvaluationState | None
    category: Category | None
    blame: Blame | None
    backend: Annotated[str, backends.Known] | None
    problem: Annotated[str | None, "A label, or the beginning of a hash.", "part of its label"]
    batch: Annotated[str | Collection[str] | None, "Its name.", "its beginning"]
    lane: Annotated[str | None, "Its name.", "its name"]
    priority: Priority | None
    producer: Annotated[str | None, "Its name, or `token:` and its token's id.", "its beginning"]
    trials: Trials | None
    kernel: Annotated[str | None, "A part of its label, or the beginning of its hash.", "part of its label"]
    parts: Annotated[bool | None, "A part of the problem's label and the beginning of the producer are enough.", ""]


#: The filters by name, each with its type and captions.
FILTERS: Final = get_type_hints(Filters, include_extras=True)
#: Hints for the fields of filters with any text.
HINTS: Final = {key: kind.__metadata__[-1] for key, kind in FILTERS.items() if getattr(kind, "__metadata__", ("",))[-1]}


def choices(name: str) -> Sequence[str]:
    """Return the values that a filter can have, or no value if it has any text."""
    return backends.names() if name == "backend" else [] if name in HINTS else list(get_args(FILTERS[name])[0])
