"""`make schemas`: publish the JSON schemas of the stable interfaces in `docs/schemas` (see `docs/install.md`).

With `--check` print each difference by which the code breaks a published schema, and exit with 1 if there is one. With
`--current` print outdated schemas too.
"""

from __future__ import annotations

import inspect
import json
import sys
from collections.abc import Iterator, Mapping
from enum import Enum
from pathlib import Path
from typing import Any

from pydantic import BaseModel

FOLDER = Path(__file__).resolve().parent.parent / "docs" / "schemas"
#: Limits of a request's values: a smaller one, or a larger one, refuses requests that were accepted.
HIGHEST = ("maximum", "exclusiveMaximum", "maxLength", "maxItems")
LOWEST = ("minimum", "exclusiveMinimum", "minLength", "minItems")
Schema = Mapping[str, Any]
DIALECT = "https://json-schema.org/draft/2020-12/schema"


def current() -> dict[str, dict[str, Any]]:
    """Return the schemas of the code by their names."""
    from kqueue.config import load
    from kqueue.contract import Request, Verdict
    from kqueue.http.app import create_app
    from kqueue.receipts import PREDICATE, Receipt

    http = create_app(load(database_url="postgresql+psycopg://nowhere/none")).openapi()
    paths = {path: methods for path, methods in http["paths"].items() if path.startswith("/v1/")}
    shapes = needed(paths, http["components"]["schemas"])
    sent = needed([one.get("requestBody") for methods in paths.values() for one in methods.values()], shapes)
    verdict, receipt = (model.model_json_schema(mode="serialization") for model in (Verdict, Receipt))
    # A later version can answer with further fields. A receipt itself has exactly the fields of its form.
    answers = [shapes[name] for name in shapes.keys() - sent.keys()]
    for answer in (verdict, *verdict["$defs"].values(), *receipt["$defs"].values(), *answers):
        if answer.get("additionalProperties") is False:
            del answer["additionalProperties"]
    return {
        "request": Request.model_json_schema(),
        "verdict": {"$schema": DIALECT, "$id": "urn:kqueue:verdict:1", **verdict},
        "receipt": {"$schema": DIALECT, "$id": PREDICATE, **receipt},
        "http": {**http, "paths": paths, "components": {"schemas": shapes}},
        "python": python(),
    }


def needed(part: Any, schemas: Schema) -> dict[str, Any]:
    """Return the schemas of a document that ``part`` needs."""
    names: dict[str, Any] = {}

    def visit(one: Any) -> None:
        if isinstance(one, Mapping):
            name = str(one.get("$ref", "")).rpartition("/")[2]
            if name and name not in names:
                names[name] = schemas[name]
                visit(schemas[name])
        for below in one.values() if isinstance(one, Mapping) else one if isinstance(one, list) else ():
            visit(below)

    visit(part)
    return dict(sorted(names.items()))


def python() -> dict[str, Any]:
    """Return the package's public functions and methods, and for each of their parameters whether it is required."""
    import kqueue

    found: dict[str, Any] = {}
    for name in sorted(vars(kqueue)["_homes"]()):
        one = getattr(kqueue, name)
        public = {name: one}
        if inspect.isclass(one):
            public |= {f"{name}.{key}": part for key, part in inspect.getmembers(one, inspect.isfunction)}
        for called, part in public.items():
            if not called.rpartition(".")[2].startswith("_"):
                parameters = () if is_model(part) else inspect.signature(part).parameters.values()
                found[called] = {
                    each.name: each.default is each.empty
                    for each in parameters
                    if each.kind not in (each.VAR_KEYWORD, each.VAR_POSITIONAL) and not each.name.startswith("_")
                }
    return found


def is_model(part: Any) -> bool:
    """Return whether the other schemas describe a class."""
    return inspect.isclass(part) and issubclass(part, (BaseModel, Enum))


def broken(name: str, old: Schema, new: Schema) -> Iterator[str]:
    """Yield the differences by which ``new`` breaks those who rely on the published schema ``old``."""
    if name == "python":
        for called, parameters in old.items():
            if called not in new:
                yield f"{called} is gone"
                continue
            yield from (f"{called}: {one} is gone" for one in parameters.keys() - new[called].keys())
            for one, required in new[called].items():
                if required and not parameters.get(one, False):
                    yield f"{called}: {one} is required now"
        return
    compare = Comparison(old, new)
    if name != "http":
        yield from compare.schemas(old, new, name, accepted=name == "request")
        return
    for path, methods in old["paths"].items():
        for method, one in methods.items():
            where = f"{method.upper()} {path}"
            now = new["paths"].get(path, {}).get(method)
            if now is None:
                yield f"{where} is gone"
                continue
            yield from compare.parameters(one, now, where)
            for body, offered in contents(one.get("requestBody", {})).items():
                again = contents(now.get("requestBody", {})).get(body)
                yield from compare.schemas(offered, again, f"{where} takes {body}", accepted=True)
            for status, answer in one["responses"].items():
                for body, offered in contents(answer).items():
                    again = contents(now["responses"].get(status, {})).get(body)
                    yield from compare.schemas(offered, again, f"{where} answers {status} {body}", accepted=False)


def contents(part: Schema) -> dict[str, Schema]:
    """Return the schemas of a body by their media types."""
    return {kind: one.get("schema", {}) for kind, one in part.get("content", {}).items()}


class Comparison:
    """A comparison of the schemas in two documents."""

    def __init__(self, old: Schema, new: Schema) -> None:
        self._documents = (old, new)
        self._seen: set[tuple[str, str, bool]] = set()

    def parameters(self, old: Schema, new: Schema, where: str) -> Iterator[str]:
        """Yield what breaks those who send an operation's parameters."""
        before, now = ({(one["in"], one["name"]): one for one in part.get("parameters", [])} for part in (old, new))
        yield from (f"{where}: the parameter {name[1]} is gone" for name in before.keys() - now.keys())
        for name, one in now.items():
            earlier = before.get(name, {})
            if one.get("required") and not earlier.get("required"):
                yield f"{where}: the parameter {name[1]} is required now"
            if earlier:
                yield from self.schemas(earlier["schema"], one["schema"], f"{where}: {name[1]}", accepted=True)

    def schemas(self, old: Schema, new: Schema | None, where: str, *, accepted: bool) -> Iterator[str]:
        """Yield what breaks those who send values (``accepted``) or read values of a schema."""
        if new is None:
            yield f"{where}: it is gone"
            return
        pair = (str(old.get("$ref", id(old))), str(new.get("$ref", id(new))), accepted)
        if pair in self._seen:
            return
        self._seen.add(pair)
        before, now = (self._kinds(one, side) for side, one in enumerate((old, new)))
        if before and now and (lost := (before.keys() - now.keys()) if accepted else (now.keys() - before.keys())):
            yield f"{where}: {', '.join(sorted(lost))} is {'refused' if accepted else 'possible'} now"
        for kind in before.keys() & now.keys():
            yield from self._same_kind(before[kind], now[kind], where, accepted=accepted)

    def _same_kind(self, old: Schema, new: Schema, where: str, *, accepted: bool) -> Iterator[str]:
        values, remaining = ({*one.get("enum", ()), *([one["const"]] if "const" in one else [])} for one in (old, new))
        if remaining and (gone := (values or {"other values"}) - remaining):
            yield f"{where}: {', '.join(map(str, sorted(gone, key=str)))} is gone"
        if accepted:
            for key, worse in [*((key, min) for key in HIGHEST), *((key, max) for key in LOWEST)]:
                if key in new and (key not in old or (new[key] != old[key] and worse(new[key], old[key]) == new[key])):
                    yield f"{where}: {key} is {new[key]} now"
        fields, fields_now = old.get("properties", {}), new.get("properties", {})
        required, required_now = set(old.get("required", ())), set(new.get("required", ()))
        yield from (f"{where}.{name} is gone" for name in sorted(fields.keys() - fields_now.keys()))
        changed = (required_now - required) if accepted else (required - required_now) & fields_now.keys()
        yield from (f"{where}.{name} is {'required' if accepted else 'optional'} now" for name in sorted(changed))
        for name in sorted(fields.keys() & fields_now.keys()):
            yield from self.schemas(fields[name], fields_now[name], f"{where}.{name}", accepted=accepted)
        for part in ("items", "additionalProperties"):
            if isinstance(old.get(part), Mapping) and isinstance(new.get(part), Mapping):
                yield from self.schemas(old[part], new[part], f"{where}[]", accepted=accepted)

    def _kinds(self, schema: Schema, side: int) -> dict[str, Schema]:
        """Return the alternatives of a schema by their type, or by their name if they are objects."""
        if "$ref" in schema:
            name = schema["$ref"].rpartition("/")[2]
            document = self._documents[side]
            found = (document.get("$defs") or document["components"]["schemas"])[name]
            return {name: found} if "properties" in found else self._kinds(found, side)
        kinds: dict[str, Schema] = {}
        for one in schema.get("anyOf") or schema.get("oneOf") or schema.get("allOf") or ():
            kinds |= self._kinds(one, side)
        types = schema.get("type", ())
        return kinds or dict.fromkeys([types] if isinstance(types, str) else types, schema)


def main(arguments: list[str]) -> int:
    """Run the program. Return the exit status."""
    schemas = {name: json.dumps(one, indent=1) + "\n" for name, one in current().items()}
    if not arguments:
        for name, text in schemas.items():
            (FOLDER / f"{name}.json").write_text(text)
        return 0
    found: list[str] = []
    for name, text in schemas.items():
        published = (FOLDER / f"{name}.json").read_text()
        found += broken(name, json.loads(published), json.loads(text))
        if "--current" in arguments and published != text:
            found.append(f"docs/schemas/{name}.json is outdated: run `make schemas`")
    for line in found:
        print(line)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
