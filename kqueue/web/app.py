"""The application: the web pages and the API."""

from __future__ import annotations

from typing import Any, Final

from fastapi import FastAPI

from kqueue import registry
from kqueue.config import Config
from kqueue.errors import ConfigError
from kqueue.http import app
from kqueue.web import (
    assets,
    batches,
    compare,
    cost,
    days,
    evaluation,
    evaluations,
    now,
    problems,
    route,
    search,
    session,
)

_PAGES: Final = (
    session, assets, now, evaluations, evaluation, problems, batches, compare, cost, days, search,
)  # fmt: skip


def create_app(config: Config, **limits: Any) -> FastAPI:
    """Return the application for a fleet, with its pages.

    ``limits`` are passed to :func:`kqueue.http.app.create_app`, which documents them and the errors.
    """
    openid, routers = None, (*(one.router for one in _PAGES), *registry.attached("pages"))
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
