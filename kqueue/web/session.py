"""Login and logout."""

from __future__ import annotations

import re
from typing import Annotated, Final
from urllib.parse import parse_qs, urlencode

from fastapi import Query, Request, Response
from fastapi.responses import RedirectResponse

from kqueue.http.gateway import Gateway
from kqueue.store import sessions, tokens
from kqueue.web import cookie
from kqueue.web.route import has_openid, page, pages, refuse_foreign_forms, who

router: Final = pages()
#: Path to which clients without a credential can send a form.
LOGIN: Final = "/login"
#: Path at which a login by OpenID Connect begins (:mod:`kqueue.web.oidc`).
START: Final = "/login/start"
#: Pattern of a path on this server. Browsers read `//` and `/\` as the beginning of another host's address.
_LOCAL: Final = re.compile(r"/(?![/\\])[\x21-\x5b\x5d-\x7e]*")
_REFUSED: Final = "This token is unknown, expired or revoked."
#: Seconds for which an equal refusal of a login is not recorded again.
_SAME_REFUSAL_S: Final = 60.0


@router.get(LOGIN)
async def login_form(
    request: Request,
    link: Annotated[str | None, Query(max_length=200)] = None,
    to: Annotated[str, Query(alias="next", max_length=2000)] = "/",
) -> Response:
    """Show the form, or log in with the secret of a link."""
    if link is not None:
        gateway: Gateway = request.app.state.gateway
        secret = await gateway.admit(sessions.accept, link)
        if secret is None:
            refused = "This link was used before, or is older than a minute. Run kqueue open for a new one."
            return await deny(request, refused, to)
        return await enter(request, secret, to, "link")
    if await who(request) is not None:
        return RedirectResponse(local(to), 303)
    # A person who logged in by OpenID Connect renews the login without a question.
    renews = has_openid(request) and request.cookies.get(cookie.kept_name(request, "openid"))
    if renews and "text/html" in request.headers.get("accept", ""):
        return RedirectResponse(f"{START}?{urlencode({'next': local(to)})}", 303)
    return page(request, "login.html", to=local(to), refused=None)


@router.post(LOGIN)
async def login(request: Request) -> Response:
    """Log in with a token."""
    refuse_foreign_forms(request)
    fields = parse_qs((await request.body()).decode("utf-8", "replace"))
    given, to = (fields.get(name, [""])[0] for name in ("token", "next"))
    gateway: Gateway = request.app.state.gateway
    caller = await gateway.identify(tokens.find, given.strip())
    if caller is None or caller.token_id is None:
        return await deny(request, _REFUSED, to)
    return await enter(request, await gateway.admit(sessions.begin, caller.token_id), to, "token")


@router.post("/logout")
async def logout(request: Request) -> Response:
    """End the session, whether or not it is still valid."""
    refuse_foreign_forms(request)
    await _leave(request)
    answer = RedirectResponse(LOGIN, 303)
    cookie.take_back(answer, request)
    cookie.keep(answer, request, "openid", "", 0)
    return answer


async def enter(request: Request, secret: str, to: str, how: str) -> Response:
    """End an earlier session of the browser, and begin one with a new secret."""
    await _leave(request)
    gateway: Gateway = request.app.state.gateway
    await gateway.note(await gateway.identify(sessions.find, secret), "login", f"{how}, from {_client(request)}")
    # A page instead of a redirect: a browser that follows a foreign site's link would not send the strict cookie with a
    # redirected request.
    answer = page(request, "entered.html", to=local(to))
    cookie.give(answer, request, secret)
    return answer


async def _leave(request: Request) -> None:
    former = request.cookies.get(cookie.cookie_name(request))
    if former:
        gateway: Gateway = request.app.state.gateway
        if (caller := await gateway.identify(sessions.find, former)) is not None:
            await gateway.note(caller, "logout", f"from {_client(request)}")
        await gateway.admit(sessions.end, former)


async def deny(request: Request, refused: str, to: str) -> Response:
    """Return the form with the reason why the login was refused."""
    gateway: Gateway = request.app.state.gateway
    await gateway.note(None, "login denied", f"from {_client(request)}: {refused}", every_s=_SAME_REFUSAL_S)
    return page(request, "login.html", status=403, to=local(to), refused=refused)


def _client(request: Request) -> str:
    """Return the address of a browser, or of the proxy before this server."""
    return request.client.host if request.client else "the unix socket"


def local(to: str) -> str:
    """Return the path to open after the login, or ``/`` instead of a foreign address."""
    return to if _LOCAL.fullmatch(to) and not to.startswith(LOGIN) else "/"
