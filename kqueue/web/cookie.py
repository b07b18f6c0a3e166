"""The cookies of a session and of a login."""

from __future__ import annotations

from typing import Any, Final

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
    _set(answer, request, cookie_name(request), secret, int(LIFETIME.total_seconds()), path="/", samesite="strict")


def keep(answer: Response, request: Request, kind: str, value: str, seconds: int) -> None:
    """Set a cookie for the login page, which the browser sends also when a provider returns it. 0 seconds delete it."""
    _set(answer, request, kept_name(request, kind), value, seconds, path=_LOGIN, samesite="lax")


def kept_name(request: Request, kind: str) -> str:
    """Return the name of a cookie of :func:`keep`."""
    return f"{cookie_name(request)}_{kind}"


def take_back(answer: Response, request: Request) -> None:
    """Delete the cookie."""
    _set(answer, request, cookie_name(request), "", 0, path="/", samesite="strict")


def _set(answer: Response, request: Request, name: str, value: str, seconds: int, **where: Any) -> None:
    """Set a cookie that no script reads. It is bound to HTTPS if the browser used HTTPS, perhaps to a proxy."""
    # A false header affects only its sender's cookie.
    secure = (
        request.headers.get("x-forwarded-proto", request.url.scheme) == "https"
        or auth.split(request.headers.get("origin", "")).scheme == "https"
    )
    answer.set_cookie(name, value, max_age=seconds, secure=secure, httponly=True, **where)
