"""The application: the web pages and the API."""

from __future__ import annotations

from typing import Any, Final

from fastapi import FastAPI, Response

from kqueue import registry
from kqueue.config import Config
from kqueue.errors import ConfigError
from kqueue.http import app
from kqueue.http.failures import HttpError
from kqueue.web import batches, compare, cost, evaluation, evaluations, files, now, problems, route, search, session

router: Final = route.pages()
_ROUTERS: Final = (
    session.router, router, now.router, evaluations.router, evaluation.router, problems.router, batches.router,
    compare.router, cost.router, search.router,
)  # fmt: skip


@router.get("/static/{name}")
async def asset(name: str) -> Response:
    """Return the style sheet or a script. They contain nothing about the fleet, so they need no session."""
    if name not in files.FILES:
        raise HttpError(404, "there is no such file")
    for_ever = {"Cache-Control": "public, max-age=31536000, immutable"}
    return Response(files.FILES[name], media_type=files.TYPES[name.rpartition(".")[2]], headers=for_ever)


def create_app(config: Config, **limits: Any) -> FastAPI:
    """Return the application for a fleet, with its pages.

    ``limits`` are passed to :func:`kqueue.http.app.create_app`, which documents them and the errors.
    """
    openid, routers = None, (*_ROUTERS, *registry.attached("pages"))
    if config.oidc_issuer:
        try:
            from kqueue.web import oidc
        except ImportError as missing:
            raise ConfigError("login by OpenID Connect needs Authlib: `pip install 'kqueue[oidc]'`") from missing
        openid, routers = oidc.Provider(config), (oidc.router, *routers)
    made = app.create_app(config, routers=routers, open_forms={session.LOGIN}, of_session=route.who, **limits)
    made.state.openid = openid
    made.state.glances = now.Glances()
    return made
