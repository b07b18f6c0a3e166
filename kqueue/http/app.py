"""The ASGI application: its routes, credentials, limits and errors."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Collection, Iterable
from contextlib import asynccontextmanager, suppress
from importlib.metadata import version
from typing import Final

from fastapi import APIRouter, FastAPI, Request
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from kqueue import receipts, registry, tracing, upper_limits
from kqueue.config import Config
from kqueue.errors import KqueueError, ServiceError
from kqueue.http import auth, check_access, failures, maintenance, metrics, openapi, readings, v1
from kqueue.http.access import AccessLog
from kqueue.http.devices import Fleet
from kqueue.http.failures import HttpError
from kqueue.http.gateway import Caller, Gateway
from kqueue.store.engine import FLEET, acting

_ROUTERS: Final = (v1.router, readings.router, maintenance.router, metrics.router)
_TWO_LENGTHS: Final = "the body's length is given in two ways: send either Content-Length or Transfer-Encoding"
_CLOSE: Final = {"Connection": "close"}
#: Maximum bytes of a form that a client without a credential can send.
_FORM_BYTES: Final = 8192
#: Type of a function that returns the caller of a request with a browser's session, or None.
OfSession = Callable[[Request], Awaitable[Caller | None]]


def create_app(
    config: Config,
    *,
    streams: int = 100,
    stream_s: float = 3600.0,
    routers: Iterable[APIRouter] = (),
    open_forms: Collection[str] = (),
    of_session: OfSession | None = None,
) -> FastAPI:
    """Return the application for a fleet. It connects to the services when it starts.

    Args:
        config: settings of the fleet. Wrong ones raise ConfigError.
        streams: maximum number of open streams of events per caller. Each queries the database every second.
        stream_s: maximum seconds of a stream. Its client must then reconnect with a token that is still valid.
        routers: additional routers, which precede the API's.
        open_forms: paths to which clients without a credential can send a small body.
        of_session: function that returns the caller of a request with a browser's session, or None.
    """
    check_access(config)
    # Invalid files and limits are reported now, and not at their first use.
    receipts.load_keys(config.receipt_key)
    upper_limits.of_scopes(config.http_limits)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncGenerator[None]:
        gateway = Gateway(config, streams=streams, stream_s=stream_s)
        app.state.gateway = gateway
        app.state.fleet = Fleet(gateway)
        app.state.metrics = metrics.Metrics(gateway, app.state.fleet)
        tasks = [asyncio.create_task(serve(gateway)) for serve in registry.attached("serve")]
        try:
            await gateway.open()
            with acting(FLEET):
                await gateway.read(app.state.metrics.begin)
            # Without this, the first request for the fleet's health would wait for the database.
            with suppress(ServiceError):
                await app.state.fleet.renewed()
            yield
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await gateway.close()

    app = FastAPI(
        title="kqueue",
        summary="Judges GPU kernels on a fleet of workers.",
        version=version("kqueue"),
        lifespan=lifespan,
        # FastAPI's pages load scripts from foreign hosts.
        docs_url=None,
        redoc_url=None,
        # Each resource has one URL.
        redirect_slashes=False,
        # Some clients post JSON without a type. Web pages are refused by their origin instead.
        strict_content_type=False,
    )
    for router in (*routers, *_ROUTERS, *registry.attached("router")):
        app.include_router(router)
    failures.install(app)
    openapi.install(app)
    app.add_middleware(_Guard, max_body_bytes=config.http_max_body_bytes, open_forms=open_forms, of_session=of_session)
    # The middleware added last is the outermost, so that the guard's refusals are logged too.
    app.add_middleware(AccessLog, tells=config.http_access_log)
    return app


class _Guard:
    """The middleware before all routes.

    It refuses requests of ambiguous length, too large bodies, and bodies of clients without a credential. It forbids
    browsers to guess media types, and records the trace that the caller names.
    """

    def __init__(
        self, app: ASGIApp, max_body_bytes: int, open_forms: Collection[str], of_session: OfSession | None
    ) -> None:
        self._app = app
        self._most = max_body_bytes
        self._open_forms = open_forms
        self._of_session = of_session

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
            # A proxy could see another end of the body than this server, and so another next request.
            refusal = failures.answer(scope["path"], 400, "malformed_request", _TWO_LENGTHS, headers=_CLOSE)
            await refusal(scope, receive, plain)
            return
        announced = headers.get(b"content-length", b"0")
        if announced.isdigit() and int(announced) > most:
            await failures.answer(scope["path"], 413, "too_large", _refusal(most))(scope, receive, plain)
            return
        if not is_open and (announced != b"0" or b"transfer-encoding" in headers):
            # FastAPI would read and parse the body before it checks the credential.
            try:
                by_browser = self._of_session if b"cookie" in headers and b"authorization" not in headers else None
                if by_browser is None or await by_browser(Request(scope)) is None:
                    await auth.identify(Request(scope))
            except (HttpError, KqueueError) as error:
                await failures.refusal(error, scope["path"])(scope, receive, plain)
                return
        with tracing.received(headers.get(tracing.HEADER.encode())):
            await self._app(scope, bounded, plain)


def _refusal(most: int) -> str:
    return f"the body is larger than {most} bytes (KQUEUE_HTTP_MAX_BODY_BYTES): send less per request"
