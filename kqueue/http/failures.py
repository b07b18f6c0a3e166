"""Errors as ``application/problem+json`` (RFC 9457), and the HTTP status of each of kqueue's exceptions.

Every body has ``type`` (``urn:kqueue:error:<code>``), ``title``, ``status``, ``detail``, ``instance`` and ``code``.
Programs branch on the code, which is kqueue's short name of the error. A body never contains sources or tokens.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from http import HTTPStatus
from typing import Any, Final, Self

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from pydantic import BaseModel, Field
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from kqueue.errors import (
    AccessRefused,
    BrokerUnavailable,
    BudgetSpent,
    DatabaseUnavailable,
    IdempotencyConflict,
    InvalidRequest,
    KqueueError,
    LaneUnavailable,
    SchemaMismatch,
    UnknownEvaluation,
    UnknownLane,
    UnknownProblem,
)

_log = logging.getLogger(__name__)

MEDIA_TYPE: Final = "application/problem+json"
#: Seconds after which a client should repeat a request that the fleet could not serve.
RETRY_AFTER_S: Final = 5

#: Status and code of each of kqueue's exceptions. The first matching class counts.
_STATUSES: Final[dict[type[KqueueError], tuple[int, str]]] = {
    IdempotencyConflict: (422, "idempotency_conflict"),
    LaneUnavailable: (409, "lane_unavailable"),
    UnknownLane: (422, "unknown_lane"),
    UnknownProblem: (422, "unknown_problem"),
    InvalidRequest: (422, "invalid_request"),
    UnknownEvaluation: (404, "unknown_evaluation"),
    BudgetSpent: (429, "budget_spent"),
    AccessRefused: (403, "session_spent"),
    DatabaseUnavailable: (503, "database_unavailable"),
    BrokerUnavailable: (503, "broker_unavailable"),
    SchemaMismatch: (503, "schema_mismatch"),
    KqueueError: (500, "internal_error"),
}
#: Details of the server's failures. The exceptions' own texts name hosts, paths and users of the services.
_SERVER_DETAILS: Final[dict[type[KqueueError], str]] = {
    DatabaseUnavailable: "the database cannot be used at the moment: try again. The server's log has the reason",
    BrokerUnavailable: "Redis cannot be used at the moment: try again. The server's log has the reason",
    SchemaMismatch: "the database's schema does not match this server: run `kqueue db upgrade`",
    KqueueError: "the server failed. Its log has the reason",
}
#: Codes of errors without an exception of kqueue, by status.
_CODES: Final = {
    400: "malformed_request",
    401: "unauthenticated",
    403: "forbidden",
    404: "not_found",
    405: "method_not_allowed",
    413: "too_large",
    415: "unsupported_media_type",
    429: "too_many_queued",
}
#: Prefix of the tags that distinguish the forms of a body. A tag is not part of a field's name.
FORM: Final = "form:"
#: Details of Starlette's errors that have none.
_DETAILS: Final = {
    400: "the body is not JSON",
    404: "there is no route with this path: /openapi.json lists the routes",
    405: "this route does not have this method: /openapi.json lists its methods",
}


class FieldError(BaseModel):
    """An error in one field of a request."""

    field: str = Field(examples=["body.kernel"])
    message: str = Field(examples=["Field required"])


class ProblemDetails(BaseModel):
    """An error in the form of RFC 9457, with kqueue's own fields."""

    type: str = Field(examples=["urn:kqueue:error:invalid_request"])
    title: str = Field(examples=["Unprocessable Content"])
    status: int = Field(examples=[422])
    detail: str = Field(examples=["kernel: is required"])
    instance: str = Field(examples=["/v1/evaluations"])
    code: str = Field(examples=["invalid_request"])
    """kqueue's name of the error."""
    errors: list[FieldError] | None = None
    """The wrong fields, if any."""
    keys: list[str] | None = None
    """The idempotency keys in question."""
    problem_hashes: list[str] | None = None
    """The hashes of the problems in question."""
    evaluation_ids: list[str] | None = None
    """The evaluations in question."""
    budget_s: float | None = None
    """The token's budget in seconds of slot time."""
    window_s: float | None = None
    """Length in seconds of the window that the budget covers."""
    retry_after_s: float | None = None
    """Seconds until some budget is free again, if no more is used."""


class HttpError(Exception):
    """An error that exists over HTTP only: a status, a code, and a detail with advice."""

    def __init__(self, status: int, detail: str, *, code: str | None = None, headers: Mapping[str, str] = {}) -> None:
        self.status = status
        self.code = code or _CODES[status]
        self.detail = detail
        self.headers = dict(headers)
        super().__init__(detail)

    @classmethod
    def insufficient_scope(cls, scope: str, detail: str) -> Self:
        """Return the error 403 for a token without ``scope``."""
        challenge = f'Bearer realm="kqueue", error="insufficient_scope", scope="{scope}"'
        return cls(403, detail, headers={"WWW-Authenticate": challenge})


def answer(
    instance: str, status: int, code: str, detail: str, *, headers: Mapping[str, str] = {}, **more: Any
) -> JSONResponse:
    """Return an error's answer. ``more`` has fields of :class:`ProblemDetails`. 503 and 429 get ``Retry-After``."""
    return _answer(_details(instance, status, code, detail, **more), headers)


def describe(error: KqueueError | HttpError, instance: str) -> ProblemDetails:
    """Return the details of an error."""
    if isinstance(error, HttpError):
        return _details(instance, error.status, error.code, error.detail)
    more: dict[str, Any] = {}
    if isinstance(error, IdempotencyConflict):
        more["keys"] = sorted(error.keys)
    if isinstance(error, UnknownProblem):
        more["problem_hashes"] = sorted(error.hashes)
    if isinstance(error, BudgetSpent):
        more["retry_after_s"], more["budget_s"], more["window_s"] = error.retry_after_s, error.budget_s, error.window_s
    status, code = next(entry for kind, entry in _STATUSES.items() if isinstance(error, kind))
    detail = str(error)
    if status >= 500:
        detail = next(text for kind, text in _SERVER_DETAILS.items() if isinstance(error, kind))
    return _details(instance, status, code, detail, **more)


def refusal(error: KqueueError | HttpError, instance: str) -> JSONResponse:
    """Return the answer to an error, and log the error if the server caused it."""
    body = describe(error, instance)
    if isinstance(error, HttpError):
        return _answer(body, error.headers)
    if body.status >= 500:
        _log.warning("%r: %s", instance, error)
    return _answer(body)


def documented(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """Return a route's ``responses`` for errors with these statuses."""
    return {
        status: {
            "description": HTTPStatus(status).phrase,
            "content": {MEDIA_TYPE: {"schema": {"$ref": "#/components/schemas/ProblemDetails"}}},
        }
        for status in statuses
    }


def _details(instance: str, status: int, code: str, detail: str, **more: Any) -> ProblemDetails:
    return ProblemDetails(
        type=f"urn:kqueue:error:{code}",
        title=HTTPStatus(status).phrase,
        status=status,
        detail=detail,
        instance=instance,
        code=code,
        **more,
    )


def _answer(body: ProblemDetails, headers: Mapping[str, str] = {}) -> JSONResponse:
    headers = dict(headers)
    if body.status in {429, 503}:
        headers.setdefault("Retry-After", str(math.ceil(body.retry_after_s or RETRY_AFTER_S)))
    return JSONResponse(body.model_dump(exclude_none=True), body.status, headers=headers, media_type=MEDIA_TYPE)


def install(app: FastAPI) -> None:
    """Add handlers to ``app`` that answer every error as ``application/problem+json``."""
    app.add_exception_handler(KqueueError, _refused)
    app.add_exception_handler(HttpError, _refused)
    app.add_exception_handler(HTTPException, _starlette)
    app.add_exception_handler(RequestValidationError, _validation)
    app.add_exception_handler(ClientDisconnect, _gone)
    app.add_exception_handler(Exception, unexpected)


async def _refused(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, KqueueError | HttpError)
    return refusal(error, request.scope["path"])


async def _starlette(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, HTTPException)
    code = _CODES.get(error.status_code, "internal_error" if error.status_code >= 500 else "invalid_request")
    detail = _DETAILS.get(error.status_code, error.detail)
    return answer(request.scope["path"], error.status_code, code, detail, headers=error.headers or {})


async def _validation(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, RequestValidationError)
    faults = error.errors()
    if any(fault["type"] == "json_invalid" for fault in faults):
        return answer(request.scope["path"], 400, _CODES[400], _DETAILS[400])
    if any(isinstance(fault.get("input"), bytes) for fault in faults):
        detail = "the body is not marked as JSON: send the header Content-Type: application/json"
        return answer(request.scope["path"], 415, _CODES[415], detail)
    errors = [
        FieldError(
            field=".".join(str(part) for part in fault["loc"] if not str(part).startswith(FORM))[:200],
            message=str(fault["msg"]).removeprefix("Value error, "),
        )
        for fault in faults[:20]
    ]
    detail = "; ".join(f"{fault.field}: {fault.message}" for fault in errors[:5])
    return answer(request.scope["path"], 422, "invalid_request", detail, errors=errors)


async def _gone(_request: Request, _error: Exception) -> Response:
    """Return a placeholder. The client has disconnected and does not read it."""
    return Response(status_code=400)


async def unexpected(request: Request, error: Exception) -> JSONResponse:
    """Return the answer to a request that failed because of a bug of the server, and log the error."""
    _log.error("%s %r failed", request.method, request.scope["path"], exc_info=error)
    return answer(request.scope["path"], 500, "internal_error", _SERVER_DETAILS[KqueueError])
