"""The OpenAPI document: the routes' own descriptions, and the errors that all routes share."""

from __future__ import annotations

import re
from typing import Any, Final

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi

from kqueue.http import failures

#: Heading of the attributes in a docstring, and the pattern of their names and meanings below it.
_ATTRIBUTES: Final = "\n\nAttributes:\n"
_ATTRIBUTE: Final = re.compile(r"^    ([\w, ]+): (.+(?:\n {5,}.+)*)", re.MULTILINE)
_METHODS: Final = frozenset({"get", "post", "put", "patch", "delete"})


def install(app: FastAPI) -> None:
    """Set ``app.openapi``, which creates the document on the first request for it."""

    def document() -> dict[str, Any]:
        if app.openapi_schema is None:
            document = get_openapi(
                title=app.title,
                version=app.version,
                summary=app.summary,
                description=(
                    "Errors are `application/problem+json` (RFC 9457). Programs should branch on `code`. Answers 503 "
                    "and 429 have `Retry-After`."
                ),
                routes=app.routes,
            )
            schemas = document.setdefault("components", {}).setdefault("schemas", {})
            for unused in ("HTTPValidationError", "ValidationError"):
                schemas.pop(unused, None)
            own = failures.ProblemDetails.model_json_schema(ref_template="#/components/schemas/{model}")
            schemas |= own.pop("$defs", {}) | {"ProblemDetails": own}
            for schema in schemas.values():
                _describe_properties(schema)
            for path, operations in document["paths"].items():
                for method, operation in operations.items():
                    if method in _METHODS:
                        _add_errors(operation, path)
            app.openapi_schema = document
        return app.openapi_schema

    app.openapi = document


def _describe_properties(schema: dict[str, Any]) -> None:
    """Move the descriptions of attributes from a report's docstring to its properties."""
    text, _, attributes = schema.get("description", "").partition(_ATTRIBUTES)
    if attributes:
        schema["description"] = text
    for names, meaning in _ATTRIBUTE.findall(attributes):
        for name in names.split(", "):
            if name in schema["properties"]:
                schema["properties"][name]["description"] = " ".join(meaning.split())


def _add_errors(operation: dict[str, Any], path: str) -> None:
    """Add the errors that are common to such routes, except where the route documents them itself."""
    common = {503}
    if operation.get("security"):
        common |= {401, 403}
    if "requestBody" in operation:
        common |= {400, 413, 415, 422}
    if operation.get("parameters"):
        common |= {422}
    if "{" in path:
        common |= {404}
    responses = operation["responses"]
    if "HTTPValidationError" in str(responses.get("422")):
        del responses["422"]
    for status, described in failures.documented(*sorted(common)).items():
        responses.setdefault(str(status), described)
