"""The cookie of a session."""

from __future__ import annotations

from fastapi import Request, Response

from kqueue.http import auth
from kqueue.store.sessions import LIFETIME


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
