"""Who may do what: tokens, and what goes without them on loopback."""

from __future__ import annotations

import ipaddress
from collections.abc import Callable, Coroutine
from typing import Annotated, Any, Final
from urllib.parse import SplitResult, urlsplit

from fastapi import Depends, Request, Security
from fastapi.security import HTTPAuthorizationCredentials, HTTPBearer
from fastapi.security.utils import get_authorization_scheme_param

from kqueue.config import Config
from kqueue.http.door import Caller, Door
from kqueue.http.problems import HttpError
from kqueue.store.tokens import Scope

_BEARER: Final = HTTPBearer(auto_error=False, description="A token of `kqueue token create`.")


def require(scope: Scope | str) -> Callable[..., Coroutine[Any, Any, Caller]]:
    """A dependency that lets in who may do what needs ``scope``, and says who it is.

    ::

        @router.get("/v1/fleet")
        async def fleet(caller: Annotated[Caller, Depends(require("read"))]): ...
    """
    wanted = Scope(scope)

    async def check(
        request: Request,
        # For the description of the API: :func:`identify` reads the header itself.
        _: Annotated[HTTPAuthorizationCredentials | None, Security(_BEARER)],
    ) -> Caller:
        caller = await identify(request)
        if not caller.may(wanted):
            challenge = f'Bearer realm="kqueue", error="insufficient_scope", scope="{wanted}"'
            raise HttpError(403, f"this needs a token of the scope {wanted}", headers={"WWW-Authenticate": challenge})
        return caller

    return check


async def identify(request: Request) -> Caller:
    """Who makes a request, looked up once for each.

    Raises:
        HttpError: 401, no valid token; 403, a page of a browser without one.
        DatabaseUnavailable: nobody can be looked up.
    """
    known: Caller | None = getattr(request.state, "caller", None)
    if known is None:
        known = request.state.caller = await _identify(request)
    return known


async def _identify(request: Request) -> Caller:
    door: Door = request.app.state.door
    header = request.headers.get("authorization")
    if header is None and open_to_all(door.config):
        _refuse_foreign_pages(request)
        return Caller(None)
    scheme, secret = get_authorization_scheme_param(header)
    if scheme.lower() != "bearer" or not secret:
        raise _unauthenticated("give a token: Authorization: Bearer kq_...")
    caller = await door.whose(secret)
    if caller is None:
        raise _unauthenticated("the token is unknown, expired or revoked", error="invalid_token")
    return caller


#: Who may look, submit, and run the fleet.
Reader = Annotated[Caller, Depends(require(Scope.READ))]
Submitter = Annotated[Caller, Depends(require(Scope.SUBMIT))]
Admin = Annotated[Caller, Depends(require(Scope.ADMIN))]


def is_loopback(host: str) -> bool:
    """Whether an address or name can only be reached from this machine."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def open_to_all(config: Config) -> bool:
    """Whether requests without a token are let in."""
    return config.http_tokens == "auto" and is_loopback(config.http_address)


def _refuse_foreign_pages(request: Request) -> None:
    """A page in a browser on this machine must not submit kernels, whatever name it has for the machine."""
    host, origin = request.headers.get("host", ""), request.headers.get("origin")
    foreign = (
        not is_loopback(_split(f"//{host}").hostname or "")
        or (origin is not None and _split(origin).netloc != host)
        # Of images and scripts a browser tells no origin.
        or request.headers.get("sec-fetch-site", "none") not in {"none", "same-origin"}
    )
    if foreign:
        raise HttpError(403, "requests without a token are for programs on this machine: give a token")


def _split(url: str) -> SplitResult:
    """A URL's parts; nothing of what is none."""
    try:
        return urlsplit(url)
    except ValueError:
        return urlsplit("")


def _unauthenticated(detail: str, *, error: str | None = None) -> HttpError:
    challenge = 'Bearer realm="kqueue"' + (f', error="{error}"' if error else "")
    return HttpError(401, detail, headers={"WWW-Authenticate": challenge})
