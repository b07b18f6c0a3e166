"""Credentials of HTTP requests: tokens, the owner's unix socket, and the trust in local users."""

from __future__ import annotations

import base64
import os
import re
from dataclasses import dataclass, replace
from typing import Annotated, Final
from urllib.parse import SplitResult, urlsplit

from fastapi import Depends, Request, Security
from fastapi.security import HTTPAuthorizationCredentials, HTTPBearer
from fastapi.security.utils import get_authorization_scheme_param

from kqueue.http import SESSION, is_loopback, trusts_local_users
from kqueue.http.failures import HttpError
from kqueue.http.gateway import ENDED, Caller, Gateway
from kqueue.store import tokens
from kqueue.store.engine import FLEET, Viewer, act_as
from kqueue.store.tokens import Scope

#: Key in an ASGI scope under which :mod:`kqueue.http.server` puts the uid of a unix socket's peer. Requests over TCP
#: never have it: the server sets it by the type of the connection, and no header can set it.
PEER_UID: Final = "kqueue.peer_uid"
#: Key of the owner for whom alone such a peer acts, if it does.
PEER_OWNER: Final = "kqueue.peer_owner"

#: Form of the header :data:`kqueue.http.SESSION`.
_SESSION: Final = re.compile(r"([A-Za-z0-9._-]{1,64})?(?:;evaluations=([0-9]{1,9}))?(?:;seconds=([0-9]{1,9}))?")

#: Scopes of callers without a token.
_EVERYTHING: Final = (Scope.ADMIN, *tokens.WIDE)
_BEARER: Final = HTTPBearer(
    auto_error=False,
    description="A token of `kqueue token create`. It can also be the password of HTTP Basic, with any user name.",
)
#: Seconds for which another use of `read:all` at the same address is not recorded again.
_SAME_USE_S: Final = 3600.0
#: Credential in the OpenAPI document. :func:`identify` reads the header itself.
_Declared = Annotated[HTTPAuthorizationCredentials | None, Security(_BEARER)]


@dataclass(frozen=True)
class Require:
    """A dependency of routes that returns a caller with a scope and refuses one without it.

    Transactions act for the caller, but with the scope ``admin`` for the fleet. Without ``sessions`` an agent's session
    is refused, because the route reaches beyond its own work.
    """

    scope: Scope
    sessions: bool = True

    async def __call__(self, request: Request, _: _Declared) -> Caller:
        caller = await identify(request)
        if not caller.may(self.scope):
            raise HttpError.insufficient_scope(self.scope, f"this needs a token of the scope {self.scope}")
        if caller.restricted is not None and not self.sessions:
            raise HttpError(403, "an agent's session cannot do this")
        await note_scope(request, caller, self.scope)
        if self.scope is Scope.ADMIN:
            act_as(FLEET)
        return caller


async def note_scope(request: Request, caller: Caller, needed: Scope) -> None:
    """Record the use of a scope that reaches beyond the caller's own work. The server's own users are not recorded."""
    used = Scope.READ_ALL if needed is Scope.READ and caller.may(Scope.READ_ALL) else needed
    if caller.token_id is not None and used in (Scope.READ_ALL, Scope.ADMIN):
        gateway: Gateway = request.app.state.gateway
        address = f"{used}: {request.method} {request.scope['path'][:200]}"
        await gateway.note(caller, "scope", address, every_s=_SAME_USE_S if used is Scope.READ_ALL else 0)


async def known(request: Request, _: _Declared) -> Caller | None:
    """Return the caller of a public route, or None for a caller without a credential."""
    if "authorization" in request.headers:
        return await identify(request)
    caller = without_token(request)
    if caller is not None:
        act_as(caller.viewer)
    return caller


async def identify(request: Request) -> Caller:
    """Return the caller of a request, or raise an HttpError. The database is queried once for each request."""
    caller: Caller | None = getattr(request.state, "caller", None)
    if caller is None:
        caller = request.state.caller = _restricted(request, await _identify(request))
        act_as(caller.viewer)
    return caller


#: Callers with the scope to read, to submit kernels (also the whole owner only), to share problems, and to run the
#: fleet.
Reader = Annotated[Caller, Depends(Require(Scope.READ))]
Submitter = Annotated[Caller, Depends(Require(Scope.SUBMIT))]
WholeSubmitter = Annotated[Caller, Depends(Require(Scope.SUBMIT, sessions=False))]
Sharer = Annotated[Caller, Depends(Require(Scope.PROBLEMS, sessions=False))]
Admin = Annotated[Caller, Depends(Require(Scope.ADMIN, sessions=False))]
#: Caller of a public route, None without a credential.
Anybody = Annotated[Caller | None, Depends(known)]


def _restricted(request: Request, caller: Caller) -> Caller:
    """Return the caller with the restriction that the header :data:`~kqueue.http.SESSION` asks for."""
    wanted = request.headers.get(SESSION)
    if wanted is None:
        return caller
    match = _SESSION.fullmatch(wanted)
    if match is None:
        raise HttpError(400, f"the header {SESSION} is malformed: use NAME[;evaluations=N][;seconds=N]")
    name, most, seconds = match.groups()
    limits = [None if limit is None else int(limit) for limit in (most, seconds)]
    return replace(caller, restricted=Viewer(caller.owner, True, name or None, *limits))


async def _identify(request: Request) -> Caller:
    header = request.headers.get("authorization")
    if header is None:
        caller = without_token(request)
        if caller is None:
            raise _unauthenticated("give a token: Authorization: Bearer kq_...")
        return caller
    scheme, secret = get_authorization_scheme_param(header)
    if scheme.lower() == "basic":
        # Browsers keep such a password, and send it with requests of foreign pages too.
        if _is_foreign(request):
            raise HttpError(
                403, "a foreign web page sent this request: programs alone can send the token as a password"
            )
        secret = _password(secret)
    elif scheme.lower() != "bearer":
        secret = ""
    if not secret:
        raise _unauthenticated("give a token: Authorization: Bearer kq_...")
    gateway: Gateway = request.app.state.gateway
    caller = await gateway.identify(tokens.find, secret)
    if caller is None:
        raise _unauthenticated(ENDED, error="invalid_token")
    return caller


def without_token(request: Request) -> Caller | None:
    """Return the caller of a request without a token, or None if it has no other credential.

    Raise an HttpError 403 for a request of a foreign web page, where local users are trusted.
    """
    peer: int | None = request.scope.get(PEER_UID)
    if peer is not None:
        # Access to the socket gives other users no rights.
        if peer in {0, os.geteuid()} and (owner := request.scope.get(PEER_OWNER)) is not None:
            return Caller(f"an agent of {owner}", (Scope.PROBLEMS,), owner=owner)
        return Caller("the fleet's owner", _EVERYTHING) if peer in {0, os.geteuid()} else None
    gateway: Gateway = request.app.state.gateway
    if not trusts_local_users(gateway.config):
        return None
    # A foreign web page in a browser on this machine can reach the server by any name.
    host = request.headers.get("host", "")
    if not is_loopback(split(f"//{host}").hostname or "") or _is_foreign(request):
        raise HttpError(403, "requests without a token are for programs on this machine: give a token")
    return Caller("a local user", _EVERYTHING)


def _is_foreign(request: Request) -> bool:
    """Return True if a browser says that a web page of another server sent a request."""
    origin = request.headers.get("origin")
    # Browsers send no Origin with requests for images and scripts.
    site = request.headers.get("sec-fetch-site", "none")
    return (origin is not None and split(origin).netloc != request.headers.get("host", "")) or site not in {
        "none",
        "same-origin",
    }


def _password(credentials: str) -> str:
    """Return the password of HTTP Basic credentials, or an empty string for malformed ones."""
    try:
        return base64.b64decode(credentials, validate=True).decode().partition(":")[2]
    except ValueError:
        return ""


def split(url: str) -> SplitResult:
    """Return the parts of a URL, or empty parts for text that is not a URL."""
    try:
        return urlsplit(url)
    except ValueError:
        return urlsplit("")


def _unauthenticated(detail: str, *, error: str | None = None) -> HttpError:
    challenge = 'Bearer realm="kqueue"' + (f', error="{error}"' if error else "")
    return HttpError(401, detail, headers={"WWW-Authenticate": challenge})
