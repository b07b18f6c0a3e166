"""The ASGI application: routes, credentials, limits and errors in one place."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Collection, Iterable
from contextlib import asynccontextmanager, suppress
from importlib.metadata import version
from typing import Final

from fastapi import APIRouter, FastAPI, Request
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from kqueue import tracing
from kqueue.config import Config
from kqueue.errors import KqueueError, ServiceError
from kqueue.http import auth, check_access, eval_server, failures, jobs, maintenance, metrics, openapi, tasks, v1
from kqueue.http.access import AccessLog
from kqueue.http.devices import Fleet
from kqueue.http.failures import HttpError
from kqueue.http.gateway import Gateway

_ROUTERS: Final = (v1.router, eval_server.router, jobs.router, tasks.router, maintenance.router, metrics.router)
_TWO_LENGTHS: Final = "the body's length is told in two ways: send either Content-Length or Transfer-Encoding"
_CLOSE: Final = {"Connection": "close"}
#: The most bytes of a form that a stranger may send.
_FORM_BYTES: Final = 8192


def create_app(
    config: Config,
    *,
    streams: int = 100,
    stream_s: float = 3600.0,
    routers: Iterable[APIRouter] = (),
    open_forms: Collection[str] = (),
) -> FastAPI:
    """Return the application for a fleet. Nothing is connected before it is started.

    Args:
        config: the fleet's settings.
        streams: the most streams of events that a caller may have open: each asks the database every second.
        stream_s: how long one may last. Then its client must ask again, with a token that is still valid.
        routers: what is served beside the API, and looked at before it.
        open_forms: paths to which strangers may send a small body.

    Raises:
        ConfigError: no database is known; or requests without a token would be let in from other machines.
    """
    check_access(config)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncGenerator[None]:
        gateway = Gateway(config, streams=streams, stream_s=stream_s)
        app.state.gateway = gateway
        app.state.fleet = Fleet(gateway)
        app.state.metrics = metrics.Metrics(gateway, app.state.fleet)
        try:
            await gateway.open()
            await gateway.read(app.state.metrics.begin)
            # The first question for the fleet's health is answered at once too.
            with suppress(ServiceError):
                await app.state.fleet.renewed()
            yield
        finally:
            await gateway.close()

    app = FastAPI(
        title="kqueue",
        summary="Judges GPU kernels on a fleet of workers.",
        version=version("kqueue"),
        lifespan=lifespan,
        # Their pages load scripts from elsewhere.
        docs_url=None,
        redoc_url=None,
        # A URL has one form.
        redirect_slashes=False,
        # Clients that post text may name no type. Pages of a browser are refused by where they come from.
        strict_content_type=False,
    )
    for router in (*routers, *_ROUTERS):
        app.include_router(router)
    failures.install(app)
    openapi.install(app)
    app.add_middleware(_Guard, max_body_bytes=config.http_max_body_bytes, open_forms=open_forms)
    # The last is the outermost: refusals of the guard have lines too.
    app.add_middleware(AccessLog, tells=config.http_access_log)
    return app


class _Guard:
    """What comes before every route.

    It refuses requests whose end is in doubt, reads no body of a stranger and none that is too large, keeps browsers
    from guessing at media types, and notes the trace that the caller names.
    """

    def __init__(self, app: ASGIApp, max_body_bytes: int, open_forms: Collection[str]) -> None:
        self._app = app
        self._most = max_body_bytes
        self._open_forms = open_forms

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        received = 0
        headers = dict(scope["headers"])
        is_open = scope["path"] in self._open_forms
        most = min(self._most, _FORM_BYTES) if is_open else self._most

        async def bounded() -> Message:
            nonlocal received
            message = await receive()
            received += len(message.get("body", b""))
            if received > most:
                raise HTTPException(413, _refusal(most))
            return message

        async def plain(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message["headers"], (b"x-content-type-options", b"nosniff")]
            await send(message)

        if b"transfer-encoding" in headers and (b"content-length" in headers or scope["http_version"] == "1.0"):
            # A proxy before this server may see another end than the server does, and so another next request.
            refusal = failures.answer(scope["path"], 400, "malformed_request", _TWO_LENGTHS, headers=_CLOSE)
            await refusal(scope, receive, plain)
            return
        announced = headers.get(b"content-length", b"0")
        if announced.isdigit() and int(announced) > most:
            await failures.answer(scope["path"], 413, "too_large", _refusal(most))(scope, receive, plain)
            return
        if not is_open and (announced != b"0" or b"transfer-encoding" in headers):
            # FastAPI reads and parses the body before it asks who sent it.
            try:
                await auth.identify(Request(scope))
            except (HttpError, KqueueError) as error:
                await failures.refusal(error, scope["path"])(scope, receive, plain)
                return
        with tracing.received(headers.get(tracing.HEADER.encode())):
            await self._app(scope, bounded, plain)


def _refusal(most: int) -> str:
    return f"the body is larger than {most} bytes (KQUEUE_HTTP_MAX_BODY_BYTES): send less at once"
