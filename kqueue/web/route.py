"""What all pages share: headers, errors as pages, and who looks."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from http import HTTPStatus
from typing import Annotated, Any, Final
from urllib.parse import quote, urlencode

from fastapi import APIRouter, Depends, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import HTMLResponse, RedirectResponse
from fastapi.routing import APIRoute
from starlette.exceptions import HTTPException

from kqueue.errors import KqueueError
from kqueue.http import auth, failures
from kqueue.http.failures import HttpError
from kqueue.http.gateway import Caller, Gateway
from kqueue.store import sessions
from kqueue.store.tokens import Scope
from kqueue.web import present
from kqueue.web.cookie import cookie_name

#: Nothing but this server's own files, and nothing within other pages. Whoever follows a link to elsewhere takes no
#: address along; to this server it must be told, as browsers say `Origin: null` of forms otherwise.
HEADERS: Final = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
        "form-action 'self'; base-uri 'none'; frame-ancestors 'none'"
    ),
    "Referrer-Policy": "same-origin",
    "X-Frame-Options": "DENY",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Permissions-Policy": "camera=(), geolocation=(), microphone=()",
    "Cache-Control": "no-store",
}
_FAILURES: Final = (HttpError, KqueueError, HTTPException, RequestValidationError)


class LoginNeeded(Exception):
    """Nobody is logged in."""


class PageRoute(APIRoute):
    """A route whose answers are for people: its errors are pages, and a browser without a session is sent to log in."""

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
    """Return a router for pages. They are no part of the API's description."""
    return APIRouter(route_class=PageRoute, include_in_schema=False)


def page(request: Request, template: str, *, status: int = 200, **fields: Any) -> HTMLResponse:
    """Return a page: ``template`` with ``fields``, and what every page shows of its viewer."""
    viewer: Caller | None = getattr(request.state, "viewer", None)
    shown = {"viewer": viewer, "path": request.scope["path"], "may_submit": bool(viewer and viewer.may(Scope.SUBMIT))}
    return HTMLResponse(present.render(template, **shown, **fields), status)


async def who(request: Request) -> Caller | None:
    """Return whoever looks at a page: by a session, or as somebody who needs no token; None for a stranger.

    Raises:
        HttpError: 403 for a page of elsewhere, where local users are trusted.
        DatabaseUnavailable: the session cannot be looked up.
    """
    gateway: Gateway = request.app.state.gateway
    secret = request.cookies.get(cookie_name(request))
    found = await gateway.identify(sessions.find, secret) if secret else None
    request.state.viewer = found or auth.without_token(request)
    return request.state.viewer


async def viewer(request: Request) -> Caller:
    """Return whoever may look at a page.

    Raises:
        LoginNeeded: nobody is logged in.
        HttpError, DatabaseUnavailable: as :func:`who`.
    """
    found = await who(request)
    if found is None or not found.may(Scope.READ):
        raise LoginNeeded
    return found


async def actor(request: Request) -> Caller:
    """Return whoever may submit and cancel by a form of a page.

    Raises:
        LoginNeeded: nobody is logged in.
        HttpError: 403 for a form of another site, or a token of too small a scope; and as :func:`who`.
        DatabaseUnavailable: as :func:`who`.
    """
    refuse_foreign_forms(request)
    found = await viewer(request)
    if not found.may(Scope.SUBMIT):
        raise HttpError(403, "this needs a login with a token of the scope submit")
    return found


#: Whoever looks, and whoever changes something.
Viewer = Annotated[Caller, Depends(viewer)]
Actor = Annotated[Caller, Depends(actor)]


def refuse_foreign_forms(request: Request) -> None:
    """Return if a form was sent from a page of this server.

    Raises:
        HttpError: 403, it was not, or the browser does not say from where.
    """
    site = request.headers.get("sec-fetch-site")
    if site is not None:
        own = site == "same-origin"
    else:
        # Browsers say so to no server that is reached by plain HTTP on a network.
        own = auth.split(request.headers.get("origin", "")).netloc == request.headers.get("host", "") != ""
    if not own:
        raise HttpError(403, "this form was not sent from a page of this server")


def _wanted(request: Request) -> str:
    """The address to come back to. A form is not sent twice, so that is the page of whatever it changes."""
    if request.method != "GET":
        return "/"
    query = request.url.query
    return quote(request.scope["path"]) + (f"?{query}" if query else "")


def _failed(request: Request, error: Exception) -> Response:
    soon: str | None = None
    match error:
        case HttpError() | KqueueError():
            told = failures.describe(error, request.scope["path"])
            status, detail = told.status, told.detail
            refusal = failures.refusal(error, request.scope["path"])  # logs what is not the viewer's doing
            soon = refusal.headers.get("Retry-After")
        case RequestValidationError():
            status = 422
            parts = {str(part) for fault in error.errors() for part in fault["loc"][1:2]}
            detail = f"the address is not understood: {', '.join(sorted(parts))}"
        case _:
            assert isinstance(error, HTTPException)
            status, detail = error.status_code, error.detail
    answer = page(request, "error.html", status=status, title=HTTPStatus(status).phrase, detail=detail)
    if soon is not None:
        answer.headers["Retry-After"] = soon
    return answer
