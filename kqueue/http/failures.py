"""Errors as ``application/problem+json`` (RFC 9457), and the status of each of kqueue's exceptions.

Every body has ``type`` (``urn:kqueue:error:<code>``), ``title``, ``status``, ``detail``, ``instance`` and ``code``.
Programs decide on the code, which is kqueue's short name of the error. Sources and tokens are never repeated.
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
#: Seconds after which something that the fleet lacks is worth asking for again.
RETRY_AFTER_S: Final = 5

#: Status and code of what kqueue raises; the first that fits counts.
_STATUSES: Final[dict[type[KqueueError], tuple[int, str]]] = {
    IdempotencyConflict: (422, "idempotency_conflict"),
    LaneUnavailable: (409, "lane_unavailable"),
    UnknownLane: (422, "unknown_lane"),
    UnknownProblem: (422, "unknown_problem"),
    InvalidRequest: (422, "invalid_request"),
    UnknownEvaluation: (404, "unknown_evaluation"),
    BudgetSpent: (429, "budget_spent"),
    DatabaseUnavailable: (503, "database_unavailable"),
    BrokerUnavailable: (503, "broker_unavailable"),
    SchemaMismatch: (503, "schema_mismatch"),
    KqueueError: (500, "internal_error"),
}
#: The details of failures that are not the caller's. Their own texts name hosts, paths and users of the services.
_TOLD: Final[dict[type[KqueueError], str]] = {
    DatabaseUnavailable: "the database cannot be used at the moment: ask again; the server's log says why",
    BrokerUnavailable: "Redis cannot be used at the moment: ask again; the server's log says why",
    SchemaMismatch: "the database's schema is not this server's: `kqueue db upgrade` brings it up",
    KqueueError: "the server failed; its log says how",
}
#: Codes of errors that no exception of kqueue stands for, by status.
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
#: The beginning of a tag that tells the forms of a body apart. It is no part of a field's name.
FORM: Final = "form:"
#: The details of those of Starlette's errors that have none.
_DETAILS: Final = {
    400: "the body is not JSON",
    404: "there is nothing at this path: /openapi.json describes those that there are",
    405: "this path knows no such method: /openapi.json describes those that it knows",
}


class FieldError(BaseModel):
    """An error in one field of a request."""

    field: str = Field(examples=["body.kernel"])
    message: str = Field(examples=["Field required"])


class ProblemDetails(BaseModel):
    """An error, as RFC 9457 has it, with kqueue's own fields."""

    type: str = Field(examples=["urn:kqueue:error:invalid_request"])
    title: str = Field(examples=["Unprocessable Content"])
    status: int = Field(examples=[422])
    detail: str = Field(examples=["kernel: is required"])
    instance: str = Field(examples=["/v1/evaluations"])
    code: str = Field(examples=["invalid_request"])
    """kqueue's name of the error."""
    errors: list[FieldError] | None = None
    """Each wrong field, where fields are wrong."""
    keys: list[str] | None = None
    """The idempotency keys in question."""
    problem_hashes: list[str] | None = None
    """The hashes of the problems in question."""
    evaluation_ids: list[str] | None = None
    """The evaluations in question."""
    budget_s: float | None = None
    """The token's budget, in seconds of slots."""
    window_s: float | None = None
    """The time in which they may be used, in seconds."""
    retry_after_s: float | None = None
    """Seconds after which there is some left, if nothing more is used."""


class HttpError(Exception):
    """An error that exists over HTTP only: a status, a code, and a detail that says what to do."""

    def __init__(self, status: int, detail: str, *, code: str | None = None, headers: Mapping[str, str] = {}) -> None:
        self.status = status
        self.code = code or _CODES[status]
        self.detail = detail
        self.headers = dict(headers)
        super().__init__(detail)

    @classmethod
    def insufficient_scope(cls, scope: str, detail: str) -> Self:
        """Return the 403 for a token that lacks ``scope``."""
        challenge = f'Bearer realm="kqueue", error="insufficient_scope", scope="{scope}"'
        return cls(403, detail, headers={"WWW-Authenticate": challenge})


def answer(
    instance: str, status: int, code: str, detail: str, *, headers: Mapping[str, str] = {}, **more: Any
) -> JSONResponse:
    """Return an error's answer. ``more`` are fields of :class:`ProblemDetails`. 503 and 429 say when to ask again."""
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
    status, code = next(known for kind, known in _STATUSES.items() if isinstance(error, kind))
    detail = str(error)
    if status >= 500:
        detail = next(told for kind, told in _TOLD.items() if isinstance(error, kind))
    return _details(instance, status, code, detail, **more)


def refusal(error: KqueueError | HttpError, instance: str) -> JSONResponse:
    """Return the answer that stands for an error, and log an error that is not the caller's doing."""
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
    known = dict(headers)
    if body.status in {429, 503}:
        known.setdefault("Retry-After", str(math.ceil(body.retry_after_s or RETRY_AFTER_S)))
    return JSONResponse(body.model_dump(exclude_none=True), body.status, headers=known, media_type=MEDIA_TYPE)


def install(app: FastAPI) -> None:
    """Let ``app`` answer every error as a problem."""
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
        detail = "the body was not read as JSON: send the header Content-Type: application/json"
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
    """Nobody reads it."""
    return Response(status_code=400)


async def unexpected(request: Request, error: Exception) -> JSONResponse:
    """Return the answer to a request that failed by the server's own fault, and log the error."""
    _log.error("%s %r failed", request.method, request.scope["path"], exc_info=error)
    return answer(request.scope["path"], 500, "internal_error", _TOLD[KqueueError])
