"""The base of all pages: headers, error pages, and the viewer."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from datetime import timedelta
from functools import partial
from http import HTTPStatus
from typing import Annotated, Any, Final
from urllib.parse import quote, urlencode

from fastapi import APIRouter, Depends, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import HTMLResponse, RedirectResponse
from fastapi.routing import APIRoute
from starlette.exceptions import HTTPException

from kqueue import contract
from kqueue.errors import KqueueError
from kqueue.http import auth, failures
from kqueue.http.failures import HttpError
from kqueue.http.gateway import Caller, Gateway
from kqueue.store import sessions
from kqueue.store.engine import act_as
from kqueue.store.tokens import Scope
from kqueue.web import present
from kqueue.web.cookie import cookie_name

#: Headers that allow only this server's own files and no embedding in foreign pages. Foreign sites get no referrer.
#: This server must get it, because browsers otherwise send `Origin: null` with forms.
HEADERS: Final = {
    "Content-Security-Policy": "; ".join((
        "default-src 'none'", *(f"{what}-src 'self'" for what in ("script", "style", "img", "connect")),
        "form-action 'self'", "base-uri 'none'", "frame-ancestors 'none'",
    )),
    "Referrer-Policy": "same-origin",
    "X-Frame-Options": "DENY",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Permissions-Policy": "camera=(), geolocation=(), microphone=()",
    "Cache-Control": "no-store",
}  # fmt: skip
_FAILURES: Final = (HttpError, KqueueError, HTTPException, RequestValidationError)


class LoginNeeded(Exception):
    """The request has no valid session."""


class PageRoute(APIRoute):
    """A route for pages. Its errors are pages, and a browser without a session is redirected to the login."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()

        async def handled(request: Request) -> Response:
            try:
                answer = await handle(request)
            except LoginNeeded:
                answer = RedirectResponse(f"/login?{urlencode({'next': _wanted(request)})}", 303)
            except _FAILURES as error:
                answer = _failed(request, error)
            for name, value in HEADERS.items():
                answer.headers.setdefault(name, value)
            return answer

        return handled


def pages() -> APIRouter:
    """Return a router for pages, which are not part of the API's OpenAPI document."""
    return APIRouter(route_class=PageRoute, include_in_schema=False)


def page(request: Request, template: str, *, status: int = 200, **fields: Any) -> HTMLResponse:
    """Return a page: ``template`` with ``fields`` and the fields of the viewer that every page shows."""
    viewer: Caller | None = getattr(request.state, "viewer", None)
    shown = {"viewer": viewer, "path": request.scope["path"], "may_submit": bool(viewer and viewer.may(Scope.SUBMIT))}
    return HTMLResponse(present.render(template, openid=has_openid(request), **shown, **fields), status)


def has_openid(request: Request) -> bool:
    """Return True if people can log in by OpenID Connect."""
    return request.app.state.openid is not None


async def who(request: Request) -> Caller | None:
    """Return the caller of a page, who has a session or needs no token, or None for any other caller.

    Raise an HttpError 403 for a request of a foreign web page, where local users are trusted.
    """
    gateway: Gateway = request.app.state.gateway
    secret = request.cookies.get(cookie_name(request))
    # A page that is left open updates itself, and is idle meanwhile.
    used = "text/event-stream" not in request.headers.get("accept", "")
    find = partial(sessions.find, idle=timedelta(seconds=gateway.config.session_idle_s), used=used)
    caller = await gateway.identify(find, secret) if secret else None
    caller = request.state.viewer = caller or auth.without_token(request)
    if caller is not None:
        act_as(caller.viewer)
    return caller


async def viewer(request: Request) -> Caller:
    """Return the caller of a page with the scope to read, or raise LoginNeeded or an error of :func:`who`."""
    caller = await who(request)
    if caller is None or not caller.may(Scope.READ):
        raise LoginNeeded
    await auth.note_scope(request, caller, Scope.READ)
    return caller


async def actor(request: Request) -> Caller:
    """Return the caller of a page's form with the scope to submit.

    A form of another site and a session without the scope raise an HttpError 403. Other errors are the ones of
    :func:`viewer`.
    """
    refuse_foreign_forms(request)
    caller = await viewer(request)
    if not caller.may(Scope.SUBMIT):
        raise HttpError(403, "this needs a login with a token of the scope submit")
    return caller


#: Callers of pages, and of forms that change something.
Viewer = Annotated[Caller, Depends(viewer)]
Actor = Annotated[Caller, Depends(actor)]


async def submitted(gateway: Gateway, actor: Caller, wanted: contract.Request) -> Response:
    """Submit a request, and show the new evaluation."""
    [ticket] = await gateway.submit(actor, [wanted])
    await gateway.note(actor, "submit", ticket.evaluation_id)
    return RedirectResponse(f"/evaluations/{ticket.evaluation_id}", 303)


def refuse_foreign_forms(request: Request) -> None:
    """Raise an HttpError 403 unless the browser says that a form was sent from a page of this server."""
    site = request.headers.get("sec-fetch-site")
    if site is not None:
        own = site == "same-origin"
    else:
        # Browsers do not send Sec-Fetch-Site over plain HTTP on a network.
        own = auth.split(request.headers.get("origin", "")).netloc == request.headers.get("host", "") != ""
    if not own:
        raise HttpError(403, "this form was not sent from a page of this server")


def _wanted(request: Request) -> str:
    """Return the URL to open after the login."""
    if request.method != "GET":  # a form is not sent twice
        return "/"
    query = request.url.query
    return quote(request.scope["path"]) + (f"?{query}" if query else "")


def _failed(request: Request, error: Exception) -> Response:
    soon: str | None = None
    match error:
        case HttpError() | KqueueError():
            described = failures.describe(error, request.scope["path"])
            status, detail = described.status, described.detail
            refusal = failures.refusal(error, request.scope["path"])  # logs errors that the server caused
            soon = refusal.headers.get("Retry-After")
        case RequestValidationError():
            status = 422
            parts = {str(part) for fault in error.errors() for part in fault["loc"][1:2]}
            detail = f"the address has wrong values: {', '.join(sorted(parts))}"
        case _:
            assert isinstance(error, HTTPException)
            status, detail = error.status_code, error.detail
    answer = page(request, "error.html", status=status, title=HTTPStatus(status).phrase, detail=detail)
    if soon is not None:
        answer.headers["Retry-After"] = soon
    return answer
