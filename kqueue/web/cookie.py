"""The cookies of a session and of a login."""

from __future__ import annotations

from typing import Final

from fastapi import Request, Response

from kqueue.http import auth
from kqueue.store.sessions import LIFETIME

#: Path of the cookies of logins, which no other page needs.
_LOGIN: Final = "/login"


def cookie_name(request: Request) -> str:
    """Return the cookie's name."""
    # Browsers share cookies among all ports of a host, and each port can belong to another fleet.
    port = request.headers.get("host", "").rpartition(":")[2]
    return f"kqueue_{port}" if port.isascii() and port.isdigit() else "kqueue"


def give(answer: Response, request: Request, secret: str) -> None:
    """Set the cookie with a session's secret, which the browser sends only to this server's pages."""
    answer.set_cookie(
        cookie_name(request),
        secret,
        max_age=int(LIFETIME.total_seconds()),
        path="/",
        secure=_came_by_https(request),
        httponly=True,
        samesite="strict",
    )


def keep(answer: Response, request: Request, kind: str, value: str, seconds: int) -> None:
    """Set a cookie for the login page, which the browser sends also when a provider returns it. 0 seconds delete it."""
    answer.set_cookie(
        kept_name(request, kind),
        value,
        max_age=seconds,
        path=_LOGIN,
        secure=_came_by_https(request),
        httponly=True,
        samesite="lax",
    )


def kept_name(request: Request, kind: str) -> str:
    """Return the name of a cookie of :func:`keep`."""
    return f"{cookie_name(request)}_{kind}"


def take_back(answer: Response, request: Request) -> None:
    """Delete the cookie."""
    answer.delete_cookie(
        cookie_name(request), path="/", secure=_came_by_https(request), httponly=True, samesite="strict"
    )


def _came_by_https(request: Request) -> bool:
    """Return True if the browser used HTTPS, perhaps to a proxy. A false header affects only its sender's cookie."""
    return (
        request.headers.get("x-forwarded-proto", request.url.scheme) == "https"
        or auth.split(request.headers.get("origin", "")).scheme == "https"
    )
