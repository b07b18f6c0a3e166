"""The application: the web pages and the API."""

from __future__ import annotations

from typing import Any, Final

from fastapi import FastAPI

from kqueue.config import Config
from kqueue.http import app
from kqueue.web import (
    assets,
    autopsy,
    batches,
    compare,
    cost,
    days,
    evaluation,
    evaluations,
    now,
    problems,
    runs,
    search,
    session,
)

_ROUTERS: Final = (
    session.router,
    assets.router,
    now.router,
    evaluations.router,
    evaluation.router,
    autopsy.router,
    problems.router,
    batches.router,
    runs.router,
    compare.router,
    cost.router,
    days.router,
    search.router,
)


def create_app(config: Config, **limits: Any) -> FastAPI:
    """Return the application for a fleet, with its pages.

    ``limits`` are passed to :func:`kqueue.http.app.create_app`, which documents them and the errors.
    """
    made = app.create_app(config, routers=_ROUTERS, open_forms={session.LOGIN}, **limits)
    made.state.glances = now.Glances()
    made.state.autopsies = autopsy.Autopsies()
    return made
