"""The generated parts of the reference: settings, Python, routes. `make docs` writes them."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator
from enum import Enum
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel
from pydantic_core import PydanticUndefined

from kqueue.cli.categories import in_markdown, kind_of

if TYPE_CHECKING:
    from kqueue.store.tokens import Scope

SETTINGS = """\
# Settings

Generated from `kqueue/config.py` by `make docs`. A fleet's programs and clients read these environment variables, here
with their defaults. An argument of a command or of a class comes before its variable, and a variable before the values
from a `kqueue up` of the same user. The [compose stack](deploy.md#docker-compose) also reads the variables of
`.env.example`, and `make venv` reads `KQUEUE_TORCH` and `KQUEUE_WHEELHOUSE`.

"""
#: Path of the reports.
REPORTS = "/v1/reports/"
#: Names that other pages describe.
ELSEWHERE = {"Category", "Config", "Evidence", "Facts", "Measurement"}


def first(what: Any) -> str:
    """Return the first paragraph of a docstring."""
    return in_markdown((inspect.getdoc(what) or "").partition("\n\n")[0])


def settings() -> str:
    """Return the page of settings."""
    from kqueue.config import Config

    fields = Config.model_fields.items()
    rows = [listed(f"`KQUEUE_{name.upper()}`", default(field), field.description) for name, field in fields]
    return SETTINGS + "\n".join(rows) + "\n"


def listed(name: str, about: str, meaning: str | None) -> str:
    """Return an entry of a list of names."""
    return f"- {name}{f' ({about})' if about else ''}{': ' if meaning else ''}{in_markdown(meaning or '')}"


def default(field: Any) -> str:
    """Return a field's default in backquotes. Empty without a default, and for an empty one."""
    value = field.default
    if value in (None, "", PydanticUndefined) or isinstance(value, BaseModel):
        return ""
    return f"`{str(value).lower() if isinstance(value, bool) else value}`"


def python() -> str:
    """Return the list of the package's public names."""
    import kqueue
    from kqueue.errors import KqueueError

    # Asynchronous classes come last, because their methods share the descriptions of the synchronous ones.
    public = sorted(vars(kqueue)["_homes"](), key=lambda name: (name.startswith("Async"), name))
    names = {name: getattr(kqueue, name) for name in public}
    classes = {name: one for name, one in names.items() if inspect.isclass(one)}
    errors = [one for one in vars(kqueue).values() if inspect.isclass(one) and issubclass(one, KqueueError)]
    parts = [f"### {name}\n\n{signature(name, one)}\n" for name, one in names.items() if name not in classes]
    known: dict[str, str] = {}
    for name, one in classes.items():
        if not issubclass(one, (BaseModel, Enum)):
            parts.append(f"### {name}\n\n{signature(name, one)}\n{methods(name, one, known)}")
    models = [one for one in classes.values() if issubclass(one, BaseModel) and one.__name__ not in ELSEWHERE]
    parts_of = [field.default for model in models for field in model.model_fields.values()]
    models += [type(part) for part in parts_of if isinstance(part, BaseModel) and type(part).__name__ not in ELSEWHERE]
    for model in dict.fromkeys(models):
        rows = [
            listed(f"`{name}`", default(field) or kind_of(field.annotation), field.description)
            for name, field in model.model_fields.items()
        ]
        parts.append(f"### {model.__name__}\n\n{first(model)}\n\n" + "\n".join(rows) + "\n")
    parts.append("### Enumerations\n")
    parts += [
        listed(f"`{name}`", "", ", ".join(f"`{value.value}`" for value in one))
        for name, one in classes.items()
        if issubclass(one, Enum) and name not in ELSEWHERE
    ]
    parts.append("\n### Errors\n\nAll are `KqueueError`s. An error's other base class is in parentheses.\n")
    for one in sorted(errors, key=str):
        base = one.__bases__[0].__name__
        parts.append(listed(f"`{one.__name__}`", "" if base == "KqueueError" else f"`{base}`", first(one)))
    return "\n".join(parts) + "\n"


def signature(name: str, what: Any) -> str:
    """Return a callable's name, arguments and description. A class that only kqueue instantiates has no arguments."""
    taken = arguments(what)
    return f"`{name}{'' if '_transport' in taken else taken}`\n\n{first(what)}"


def arguments(what: Any) -> str:
    """Return the arguments of a callable without ``self`` and without types, which the docstrings name."""
    parameters = [
        one.replace(annotation=inspect.Parameter.empty)
        for one in inspect.signature(what).parameters.values()
        if one.name != "self"
    ]
    return str(inspect.Signature(parameters))


def methods(owner: str, what: Any, known: dict[str, str]) -> str:
    """Return the list of a class's methods, and a list of the methods with the same row in an earlier class."""
    rows: list[str] = []
    same: dict[str, list[str]] = {}
    for name, one in inspect.getmembers(what):
        if (name.startswith("_") and name != "__call__") or not (inspect.isfunction(one) or isinstance(one, property)):
            continue
        shown = name if isinstance(one, property) else f"{name}{arguments(one)}"
        row = listed(f"`{shown}`", "", first(one))
        if (earlier := known.setdefault(row, owner)) == owner:
            rows.append(row)
        else:
            same.setdefault(earlier, []).append(f"`{name}`")
    own = "\n" + "\n".join(rows) + "\n" if rows else ""
    for earlier, names in same.items():
        is_all = len(names) == list(known.values()).count(earlier)
        own += f"\nThe same as in `{earlier}`: {'all methods' if is_all else ', '.join(names)}.\n"
    return own


def routes() -> str:
    """Return the list of the routes below `/v1`, from the OpenAPI document. Commands' reports are one entry."""
    from kqueue.config import load
    from kqueue.http.app import create_app

    app = create_app(load(database_url="postgresql+psycopg://nowhere/none"))
    described, needed = app.openapi()["paths"], scopes(app)
    rows = [
        listed(f"`{method.upper()} {path}`", _scope(needed, method, path), one["description"].split(".")[0] + ".")
        for path, methods in sorted(described.items())
        for method, one in methods.items()
        if path.startswith("/v1/") and not path.startswith(REPORTS)
    ]
    reports = [f"`{path.removeprefix(REPORTS)}`" for path in sorted(described) if path.startswith(REPORTS)]
    rows.append(
        f"- `POST` below `{REPORTS}` (`read`, or `problems` to share problems): the reports that commands read:"
    )
    return "\n".join(rows) + f" {', '.join(reports)}.\n"


def scopes(app: Any) -> dict[tuple[str, str], Scope | None]:
    """Return the scope that each route of an application needs, or None for a public one, by method and path."""
    from kqueue.http.auth import Require
    from kqueue.store.tokens import Scope
    from kqueue.web import route as pages

    by_page = {pages.viewer: Scope.READ, pages.actor: Scope.SUBMIT}

    def needed(dependant: Any) -> Scope | None:
        own = dependant.call.scope if isinstance(dependant.call, Require) else by_page.get(dependant.call)
        return own or next(filter(None, map(needed, dependant.dependencies)), None)

    def walk(routes: Iterable[Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
        for route in routes:
            if hasattr(route, "dependant"):
                yield prefix + route.path_format, route
            elif hasattr(route, "original_router"):
                yield from walk(route.original_router.routes, prefix + route.include_context.prefix)

    return {(method, path): needed(one.dependant) for path, one in walk(app.routes) for method in sorted(one.methods)}


def _scope(needed: dict[tuple[str, str], Scope | None], method: str, path: str) -> str:
    scope = needed[method.upper(), path]
    return "" if scope is None else f"`{scope}`"
