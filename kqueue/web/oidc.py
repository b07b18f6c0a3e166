"""Login by OpenID Connect: the authorization code flow with PKCE. It is imported only where a provider is set.

A cookie of the browser keeps state, nonce and PKCE's verifier of a login that has begun, so any server of a fleet can
finish it, and no other browser can. The provider accepts each code once. No token of the provider is stored: a session
ends after ``KQUEUE_OIDC_SESSION_S``, and another login asks the provider again.
"""

from __future__ import annotations

import hashlib
import importlib
import json
import logging
import re
from base64 import urlsafe_b64decode, urlsafe_b64encode
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from typing import Annotated, Any, Final

import httpx2
from fastapi import Query, Request, Response
from pydantic import TypeAdapter, ValidationError

from kqueue.config import Config
from kqueue.errors import ConfigError
from kqueue.http import is_loopback
from kqueue.http.auth import split
from kqueue.http.failures import HttpError
from kqueue.store import sessions
from kqueue.store.tokens import Scope
from kqueue.text import one_line
from kqueue.web import cookie, session
from kqueue.web.parameters import CurrentGateway
from kqueue.web.route import pages

router: Final = pages()
_log = logging.getLogger(__name__)
# Authlib has no types.
_client: Any = importlib.import_module("authlib.integrations.starlette_client")
_JoseError: Any = importlib.import_module("joserfc.errors").JoseError

#: Errors of code that reads an answer of another form.
_MALFORMED: Final = (LookupError, RuntimeError, TypeError, ValueError, AttributeError)
#: Path to which the provider returns the browser.
CALLBACK: Final = f"{session.LOGIN}/callback"
#: Signatures that are accepted: only those that the provider's public keys verify.
_ALGORITHMS: Final = [f"{kind}{bits}" for kind in ("RS", "PS", "ES") for bits in (256, 384, 512)] + ["EdDSA"]
#: Seconds of a request to the provider, of a login in the browser, and of the difference of two clocks.
_TIMEOUT_S: Final = 10
_LOGIN_S: Final = 600
_LEEWAY_S: Final = 60
#: Seconds for which a browser renews its login without a question.
_RENEWABLE_S: Final = 7 * 86_400


class Denied(Exception):
    """The person is not let in. The text says why."""


class Provider:
    """The fleet's OpenID provider."""

    def __init__(self, config: Config) -> None:
        """Check the settings, or raise ConfigError. The first login connects."""
        for name in ("oidc_client_id", "oidc_redirect_url"):
            if not getattr(config, name):
                raise ConfigError(f"KQUEUE_{name.upper()}: login by OpenID Connect needs it: set it")
        self._issuer, self._redirect_url = config.oidc_issuer or "", config.oidc_redirect_url or ""
        issuer = split(self._issuer)
        if issuer.scheme != "https" and not (issuer.scheme == "http" and is_loopback(issuer.hostname or "")):
            raise ConfigError(f"KQUEUE_OIDC_ISSUER: {self._issuer}: use an address that begins with https://")
        if split(self._redirect_url).path != CALLBACK:
            raise ConfigError(f"KQUEUE_OIDC_REDIRECT_URL: {self._redirect_url}: use an address that ends in {CALLBACK}")
        try:
            self._groups = TypeAdapter(dict[str, list[Scope]]).validate_json(config.oidc_groups)
        except ValidationError:
            raise ConfigError(
                'KQUEUE_OIDC_GROUPS: give the scopes of each group as JSON, such as {"kernels": ["submit"]}. '
                f"Scopes are {', '.join(Scope)}"
            ) from None
        self._config = config
        self._app: Any = _client.StarletteOAuth2App(
            _client.StarletteIntegration("kqueue"),
            client_id=config.oidc_client_id,
            client_secret=config.oidc_client_secret and config.oidc_client_secret.get_secret_value(),
            client_kwargs={
                "scope": config.oidc_scopes,
                "code_challenge_method": "S256",
                "timeout": _TIMEOUT_S,
                "leeway": 0,  # Authlib would refuse to use an access token of at most a minute
                **({} if config.oidc_client_secret else {"token_endpoint_auth_method": "none"}),
            },
            server_metadata_url=f"{self._issuer.rstrip('/')}/.well-known/openid-configuration",
        )

    async def begin(self, request: Request) -> Response:
        """Return the answer that sends the browser to the provider."""
        with _available():
            await self._load()
            return await self._app.authorize_redirect(request, self._redirect_url)

    async def finish(self, request: Request) -> tuple[str, str, list[Scope]]:
        """Return name, owner and scopes of the person with whom the provider returns the browser, or raise Denied."""
        client_id = self._config.oidc_client_id
        expected = {name: {"essential": True, "value": v} for name, v in (("iss", self._issuer), ("aud", client_id))}
        with _available():
            metadata = await self._load()
            try:
                if request.query_params.get("iss", self._issuer) != self._issuer:
                    raise KeyError("iss")
                token = await self._app.authorize_access_token(request, claims_options=expected, leeway=_LEEWAY_S)
                claims: dict[str, Any] = dict(token["userinfo"])
            except (_client.OAuthError, _JoseError, KeyError) as error:
                _log.warning("a login by OpenID Connect is refused: %r", error)
                raise Denied(
                    "This login is not valid. Begin it in this browser, and end it within ten minutes."
                ) from None
            wanted = {self._config.oidc_groups_claim, self._config.oidc_owner_claim}
            if wanted - claims.keys() and "userinfo_endpoint" in metadata:
                more = await self._app.userinfo(token=token)
                claims = {**more, **claims} if more["sub"] == claims["sub"] else claims
        return self._admitted(claims)

    def _admitted(self, claims: Mapping[str, Any]) -> tuple[str, str, list[Scope]]:
        verified = claims.get("email_verified") is True
        kind = self._config.oidc_owner_claim
        value = claims.get(kind)
        if not isinstance(value, str) or not value or (kind == "email" and not verified):
            raise Denied(f"The OpenID provider gives no verified {kind} for you.")
        # Only a verified address can be the name of a person in the audit log.
        name = one_line(str(claims["email"] if verified and claims.get("email") else claims["sub"]))[:200]
        groups: Any = claims.get(self._config.oidc_groups_claim)
        held: list[Any] = groups if isinstance(groups, list) else [groups]
        granted = {scope for group in held if isinstance(group, str) for scope in self._groups.get(group, [])}
        if not granted:
            raise Denied(f"{name} is in none of the groups that can log in here.")
        # The digest excludes collisions with owners of tokens and with equal names at another provider.
        digest = hashlib.sha256(json.dumps([self._issuer, kind, value]).encode()).hexdigest()[:20]
        words = re.sub("[^a-z0-9]+", "-", value.lower())[:40].strip("-") or "person"
        return name, f"{words}-{digest}", [scope for scope in Scope if scope in granted]

    async def _load(self) -> dict[str, Any]:
        """Return the provider's metadata. The keys are read again for each login."""
        metadata: dict[str, Any] = await self._app.load_server_metadata()
        if metadata.get("issuer") != self._issuer:
            self._app.server_metadata = {}
            raise ValueError(f"the provider is {metadata.get('issuer')!r}, but KQUEUE_OIDC_ISSUER is {self._issuer!r}")
        metadata.pop("jwks", None)
        metadata["id_token_signing_alg_values_supported"] = _ALGORITHMS
        return metadata


@router.get(session.START)
async def start(request: Request, to: Annotated[str, Query(alias="next", max_length=2000)] = "/") -> Response:
    """Send the browser to the provider."""
    request.scope["session"] = begun = {}
    answer = await request.app.state.openid.begin(request)
    kept = json.dumps({**begun, "to": session.local(to)})
    cookie.keep(answer, request, "begun", urlsafe_b64encode(kept.encode()).decode(), _LOGIN_S)
    return answer


@router.get(CALLBACK)
async def finish(request: Request, gateway: CurrentGateway) -> Response:
    """Log in the person whom the provider identified."""
    try:
        begun = json.loads(urlsafe_b64decode(request.cookies.get(cookie.kept_name(request, "begun"), "")))
        to = session.local(begun.pop("to"))
    except (ValueError, LookupError, TypeError, AttributeError):
        begun, to = {}, "/"
    request.scope["session"] = begun
    try:
        name, owner, scopes = await request.app.state.openid.finish(request)
    except Denied as denied:
        answer = await session.deny(request, str(denied), to)
        cookie.keep(answer, request, "openid", "", 0)
    else:
        lifetime = timedelta(seconds=gateway.config.oidc_session_s)
        secret = await gateway.admit(sessions.enter, name, owner, scopes, lifetime)
        answer = await session.enter(request, secret, to, "OpenID Connect")
        cookie.keep(answer, request, "openid", "1", _RENEWABLE_S)
    cookie.keep(answer, request, "begun", "", 0)
    return answer


@contextmanager
def _available() -> Generator[None]:
    """Raise an HttpError 503 if the provider cannot be reached, or answers in another form."""
    try:
        yield
    except (_client.OAuthError, httpx2.HTTPError, httpx2.InvalidURL, _JoseError, *_MALFORMED) as error:
        _log.warning("the OpenID provider cannot be used: %r", error)
        detail = "the OpenID provider cannot be used: try again. The server's log has the reason"
        raise HttpError(503, detail, code="provider_unavailable") from None
