"""The cookie of a session."""

from __future__ import annotations

from fastapi import Request, Response

from kqueue.http import auth
from kqueue.store.sessions import LIFETIME


def cookie_name(request: Request) -> str:
    """Return the cookie's name.

    Browsers keep one set of cookies for all ports of a host, and each port may be another fleet's.
    """
    port = request.headers.get("host", "").rpartition(":")[2]
    return f"kqueue_{port}" if port.isascii() and port.isdigit() else "kqueue"


def give(answer: Response, request: Request, secret: str) -> None:
    """Have the browser keep a session's secret, for this server's pages alone."""
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
    """Have the browser forget the secret."""
    answer.delete_cookie(
        cookie_name(request), path="/", secure=_came_by_https(request), httponly=True, samesite="strict"
    )


def _came_by_https(request: Request) -> bool:
    """True if the browser speaks HTTPS with a proxy before this server. Who lies here spoils his own cookie alone."""
    return (
        request.headers.get("x-forwarded-proto", request.url.scheme) == "https"
        or auth.split(request.headers.get("origin", "")).scheme == "https"
    )
