"""The state of a duel on the page of its batch."""

from __future__ import annotations

from markupsafe import Markup
from sqlalchemy import Engine

from kqueue.features.duel.duels import BATCH, ID
from kqueue.features.duel.reports import duel
from kqueue.web.present import render


def of_batch(engine: Engine, batch: str) -> Markup | None:
    """Return the state of the duel whose batch this is, or None for another batch."""
    identity = batch.removeprefix(BATCH)
    if not batch.startswith(BATCH) or not ID.fullmatch(identity):
        return None
    return Markup(render("duel/batch.html", duel=duel(engine, identity)))  # noqa: S704 the template escapes
