"""The access log: one line for each answered request, with an id that all log lines of the request share.

A line never contains a query, a body, a header or a token's secret. It names the route's template, not the path.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterable
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final
from uuid import UUID, uuid4

import structlog
from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from structlog.contextvars import bound_contextvars

from kqueue.http import failures

if TYPE_CHECKING:
    from kqueue.http.gateway import Caller

_log: Any = structlog.get_logger(__name__)

#: Header with the request's id, and the pattern of ids that a caller can choose.
HEADER: Final = "X-Request-ID"
_GIVEN: Final = re.compile(r"[A-Za-z0-9._-]{1,64}")
#: Routes that machines poll. Their successes are logged at the level ``debug``.
_QUIET: Final = frozenset({"/health", "/metrics", "/openapi.json"})
#: Maximum number of evaluations that a line names.
_NAMED: Final = 20
#: Length in characters to which a method is cut.
_METHOD_CHARACTERS: Final = 16

#: Evaluations that the request of this context submits or reads.
_about: ContextVar[list[UUID] | None] = ContextVar("kqueue_request_is_about", default=None)


def is_about(evaluation_ids: Iterable[UUID]) -> None:
    """Add evaluations to the log line of the request of this context. Outside a request this does nothing."""
    named = _about.get()
    if named is not None:
        named += evaluation_ids


class AccessLog:
    """The outermost middleware of the application. It logs each request."""

    def __init__(self, app: ASGIApp, *, tells: bool) -> None:
        """Wrap ``app``. Without ``tells``, requests get ids but no log lines."""
        self._app = app
        self._writes_lines = tells

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request = Request(scope)
        given = request.headers.get(HEADER, "")
        identity = given if _GIVEN.fullmatch(given) else uuid4().hex
        figures = _Figures()

        async def receive_counted() -> Message:
            message = await receive()
            figures.bytes_in += len(message.get("body", b""))
            return message

        async def send_counted(message: Message) -> None:
            if message["type"] == "http.response.start":
                figures.status = message["status"]
                message["headers"] = [*message["headers"], (HEADER.lower().encode(), identity.encode())]
            figures.bytes_out += len(message.get("body", b""))
            await send(message)

        mark = _about.set(figures.evaluations)
        try:
            with bound_contextvars(request=identity):
                try:
                    await self._app(scope, receive_counted, send_counted)
                except Exception as error:
                    if figures.status:
                        raise
                    # Answering here gives the id to the answer and to the error's log lines.
                    answer = await failures.unexpected(request, error)
                    await answer(scope, receive_counted, send_counted)
                finally:
                    if self._writes_lines:
                        _write_line(request, figures)
        finally:
            _about.reset(mark)


@dataclass(slots=True)
class _Figures:
    """Figures of one request, for its log line."""

    begun: float = field(default_factory=time.perf_counter)
    status: int = 0
    bytes_in: int = 0
    bytes_out: int = 0
    evaluations: list[UUID] = field(default_factory=list[UUID])


def _write_line(request: Request, figures: _Figures) -> None:
    # A path without a route is the caller's own text.
    found, path = request.scope.get("route"), request.scope["path"]
    route = getattr(found, "path_format", None) or getattr(found, "path", path if path in _QUIET else None)
    # Users of the page are identified by their sessions.
    caller: Caller | None = getattr(request.state, "caller", None) or getattr(request.state, "viewer", None)
    named = request.path_params.get("evaluation_id")
    evaluations = list(dict.fromkeys(([str(named)] if named else []) + [str(one) for one in figures.evaluations]))
    fields: dict[str, Any] = {
        "method": request.method[:_METHOD_CHARACTERS],
        "route": route,
        "status": figures.status,  # 0: the connection broke before the answer
        "duration_ms": round((time.perf_counter() - figures.begun) * 1000, 3),
        "bytes_in": figures.bytes_in,
        "bytes_out": figures.bytes_out,
        "client": request.client.host if request.client else "unix",
        "caller": caller and caller.name,
        "owner": caller and caller.owner,
        "token": caller and caller.token_id and str(caller.token_id),
    }
    if len(evaluations) == 1:
        fields["evaluation"] = evaluations[0]
    elif evaluations:
        fields |= {"evaluations": evaluations[:_NAMED], "evaluations_count": len(evaluations)}
    quiet = route in _QUIET and 200 <= figures.status < 300
    (_log.debug if quiet else _log.info)("request", **fields)
