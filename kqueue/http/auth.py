"""Who may do what: tokens, and what goes without them on loopback."""

from __future__ import annotations

import ipaddress
from collections.abc import Callable, Coroutine
from typing import Annotated, Any, Final
from urllib.parse import urlsplit

from fastapi import Depends, Request, Security
from fastapi.security import HTTPAuthorizationCredentials, HTTPBearer

from kqueue.config import Config
from kqueue.http.door import Caller, CurrentDoor
from kqueue.http.problems import HttpError
from kqueue.store import tokens
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
        door: CurrentDoor,
        credentials: Annotated[HTTPAuthorizationCredentials | None, Security(_BEARER)],
    ) -> Caller:
        if credentials is None:
            if "authorization" in request.headers or not open_to_all(door.config):
                raise _unauthenticated("give a token: Authorization: Bearer kq_...")
            _refuse_foreign_pages(request)
            return Caller(None, "loopback")
        token = await door.read(tokens.find, credentials.credentials)
        if token is None:
            raise _unauthenticated("the token is unknown, expired or revoked", error="invalid_token")
        if not token.may(wanted):
            challenge = f'Bearer realm="kqueue", error="insufficient_scope", scope="{wanted}"'
            raise HttpError(403, f"this needs a token of the scope {wanted}", headers={"WWW-Authenticate": challenge})
        return Caller(token.id, token.name)

    return check


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
    host = urlsplit(f"//{request.headers.get('host', '')}").hostname or ""
    origin = request.headers.get("origin")
    if not is_loopback(host) or (origin is not None and urlsplit(origin).netloc != request.headers.get("host")):
        raise HttpError(403, "requests without a token are for programs on this machine: give a token")


def _unauthenticated(detail: str, *, error: str | None = None) -> HttpError:
    challenge = 'Bearer realm="kqueue"' + (f', error="{error}"' if error else "")
    return HttpError(401, detail, headers={"WWW-Authenticate": challenge})
