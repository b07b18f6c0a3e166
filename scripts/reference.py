"""The generated pages of the reference: settings, options of commands, and Python. `make docs` writes them."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator
from enum import Enum
from typing import TYPE_CHECKING, Any, get_args, get_type_hints

import typer.main
from pydantic import BaseModel
from pydantic_core import PydanticUndefined

from kqueue.cli.categories import in_markdown, kind_of

if TYPE_CHECKING:
    from kqueue.store.tokens import Scope

SETTINGS = """\
# Settings

Generated from `kqueue/config.py` by `make docs`. A test compares both.

A fleet's programs and clients read these environment variables. An argument of a command or of a class takes precedence
over its variable. A variable takes precedence over the values from a `kqueue up` of the same user, which are its
addresses, its token, and `KQUEUE_GPU_FALLBACK`. Scripts read further variables that start with `KQUEUE_`: the
[compose stack](compose.md) those in `.env.example`, and `make venv` ([installing](install.md)) `KQUEUE_TORCH` and
`KQUEUE_WHEELHOUSE`.

| variable | default | meaning |
|---|---|---|
"""
OPTIONS = """\
# Options

Generated from the commands of `kqueue` by `make docs`. A test compares both. `kqueue COMMAND --help` prints the same.
The output and exit statuses of commands are in [The command line](cli.md).
"""
PYTHON = """\
# Names in Python

Generated from the package `kqueue` by `make docs`. A test compares both. [From Python](python.md) shows examples.
All arguments after a `*` are keyword arguments, and `...` is a default of `Request`. Separate pages describe the
adapters for other programs: [training](training.md) and [evaluators](evaluator.md). `Category` is in
[Categories](categories.md). `Evidence`, `Facts` and `Measurement` are in [Evidence](evidence.md), and the fields
of `Config` in [Settings](settings.md).
"""
#: Names that other pages describe.
ELSEWHERE = {"Category", "Config", "Evidence", "Facts", "Measurement"}


def first(what: Any) -> str:
    """Return the first paragraph of a docstring."""
    return in_markdown((inspect.getdoc(what) or "").partition("\n\n")[0])


def settings() -> str:
    """Return the page of settings."""
    from kqueue.config import Config

    rows = [
        f"| `KQUEUE_{name.upper()}` | {default(field)} | {in_markdown(field.description)} |"
        for name, field in Config.model_fields.items()
    ]
    return SETTINGS + "\n".join(rows) + "\n"


def default(field: Any) -> str:
    """Return a field's default in backquotes. Empty without a default, and for an empty one."""
    value = field.default
    if value in (None, "", PydanticUndefined):
        return ""
    if isinstance(value, BaseModel):
        return "its defaults"
    return f"`{str(value).lower() if isinstance(value, bool) else value}`"


def leaves(command: Any, *path: str) -> Iterator[tuple[str, Any, Any]]:
    """Yield the name, the command and its context for every Click command below ``command``."""
    context = command.context_class(command, info_name=" ".join(("kqueue", *path)), **command.context_settings)
    below = getattr(command, "commands", None)
    if below is None or (path and command.invoke_without_command):
        yield " ".join(path), command, context
    for name in command.list_commands(context) if below is not None else ():
        yield from leaves(command.get_command(context, name), *path, name)


def options() -> str:
    """Return the page of commands with their arguments and options."""
    from kqueue.cli import app

    parts = [OPTIONS]
    for name, command, context in leaves(typer.main.get_command(app)):
        parts.append(f"## kqueue {name}\n\n{in_markdown(command.get_short_help_str(1000))}\n")
        rows = [row for one in command.get_params(context) if (row := option(one, context))]
        if rows:
            parts.append("| argument, option | meaning |\n|---|---|\n" + "\n".join(rows) + "\n")
    return "\n".join(parts)


def option(one: Any, context: Any) -> str | None:
    """Return the row of an argument or an option, or None for hidden ones and for `--help`."""
    record = one.get_help_record(context)
    if record is None or one.name == "help":
        return None
    text = record[1].replace("; x", ", x").replace("; 0", ", 0").replace("; 1", ", 1")
    return f"| `{in_markdown(record[0])}` | {in_markdown(text)} |"


def python() -> str:
    """Return the page of the package's public names."""
    import kqueue
    from kqueue.errors import KqueueError

    # Asynchronous classes come last, because their methods share the descriptions of the synchronous ones.
    listed = sorted(vars(kqueue)["_homes"](), key=lambda name: (name.startswith("Async"), name))
    names = {name: getattr(kqueue, name) for name in listed}
    classes = {name: one for name, one in names.items() if inspect.isclass(one)}
    errors = [one for one in vars(kqueue).values() if inspect.isclass(one) and issubclass(one, KqueueError)]
    parts = [PYTHON]
    parts += [f"## {name}\n\n{signature(name, one)}\n" for name, one in names.items() if name not in classes]
    known: dict[str, str] = {}
    for name, one in classes.items():
        if not issubclass(one, (BaseModel, Enum)):
            parts.append(f"## {name}\n\n{signature(name, one)}\n{methods(name, one, known)}")
    models = [one for one in classes.values() if issubclass(one, BaseModel) and one.__name__ not in ELSEWHERE]
    parts_of = [field.default for model in models for field in model.model_fields.values()]
    models += [type(part) for part in parts_of if isinstance(part, BaseModel) and type(part).__name__ not in ELSEWHERE]
    for model in dict.fromkeys(models):
        rows = [
            f"| `{name}` | {kind_of(field.annotation)} | {default(field)} | {in_markdown(field.description or '')} |"
            for name, field in model.model_fields.items()
        ]
        table = "| field | type | default | meaning |\n|---|---|---|---|\n" + "\n".join(rows)
        parts.append(f"## {model.__name__}\n\n{first(model)}\n\n{table}\n")
    parts.append("## Enumerations\n\n| type | values |\n|---|---|")
    parts += [
        f"| `{name}` | {', '.join(f'`{value.value}`' for value in one)} |"
        for name, one in classes.items()
        if issubclass(one, Enum) and name not in ELSEWHERE
    ]
    parts.append("\n## Errors\n\nAll are `KqueueError`s.\n\n| error | below | when |\n|---|---|---|")
    parts += [f"| `{one.__name__}` | `{one.__bases__[0].__name__}` | {first(one)} |" for one in sorted(errors, key=str)]
    return "\n".join(parts) + "\n"


def signature(name: str, what: Any) -> str:
    """Return a callable's name, arguments and description. A class that only kqueue instantiates has no arguments."""
    taken = arguments(what)
    return f"`{name}{'' if '_transport' in taken else taken}`\n\n{first(what)}"


def arguments(what: Any) -> str:
    """Return the arguments of a callable without ``self`` and without types, which the docstrings name.

    ``**fields`` are shown as the keys of their TypedDict, with ``...`` as default.
    """
    parameters: list[inspect.Parameter] = []
    for one in inspect.signature(what).parameters.values():
        if one.kind is inspect.Parameter.VAR_KEYWORD:
            [keys] = get_args(get_type_hints(what, vars(inspect.getmodule(what)))[one.name])
            keywords = [name for name in get_type_hints(keys) if all(name != given.name for given in parameters)]
            parameters += [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=...) for name in keywords]
        elif one.name != "self":
            parameters.append(one.replace(annotation=inspect.Parameter.empty))
    return str(inspect.Signature(parameters)).replace("=Ellipsis", "=...")


def methods(owner: str, what: Any, known: dict[str, str]) -> str:
    """Return the table of a class's methods, and a list of the methods with the same row in an earlier class."""
    rows: list[str] = []
    same: dict[str, list[str]] = {}
    for name, one in inspect.getmembers(what):
        if (name.startswith("_") and name != "__call__") or not (inspect.isfunction(one) or isinstance(one, property)):
            continue
        shown = name if isinstance(one, property) else f"{name}{arguments(one)}"
        row = f"| `{shown}` | {first(one)} |"
        if row in known:
            same.setdefault(known[row], []).append(f"`{name}`")
        else:
            known[row] = owner
            rows.append(row)
    table = "\n| method | purpose |\n|---|---|\n" + "\n".join(rows) + "\n" if rows else ""
    return table + "".join(f"\nThe same as in `{earlier}`: {', '.join(names)}.\n" for earlier, names in same.items())


def routes() -> str:
    """Return the table of the HTTP server's routes, from its OpenAPI document."""
    from kqueue.config import load
    from kqueue.http.app import create_app

    app = create_app(load(database_url="postgresql+psycopg://nowhere/none"))
    described, needed = app.openapi()["paths"], scopes(app)
    rows = [
        f"| `{method.upper()} {path}` | {_scope(needed, method, path)} "
        f"| {in_markdown(one.get('description', '').partition(chr(10) * 2)[0])} |"
        for path, methods in sorted(described.items())
        for method, one in methods.items()
    ]
    return "| route | scope | purpose |\n|---|---|---|\n" + "\n".join(rows) + "\n"


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
