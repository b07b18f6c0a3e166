"""`kqueue audit`: who did what. Commands that change rights or cancel work add their entries with :func:`record`."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Final

import typer

from kqueue import figures
from kqueue.cli import options
from kqueue.cli.connection import actor, database
from kqueue.cli.render import Columns, emit, fields, table
from kqueue.figures import moment

if TYPE_CHECKING:
    from sqlalchemy import Engine

    from kqueue.store.audit import Action, Entry


def audit(
    since: Annotated[str, typer.Option(help="Such as 30m, 2h, 7d, or 2026-01-31 (UTC).")] = "7d",
    actor: Annotated[str | None, typer.Option(help="Name of a token or a person, or `USER on HOST`.")] = None,
    limit: Annotated[int, typer.Option(min=1, max=1_000_000, help="Maximum number of entries, the newest.")] = 100,
    remove_before: Annotated[
        str | None, typer.Option(metavar="AGE", help="Only remove the entries that are older, such as 365d.")
    ] = None,
    as_json: options.Json = False,
) -> None:
    """Show who did what: logins, cancellations, submissions by page, tokens, and uses of wide scopes.

    You need a database login that owns the tables. Servers can add entries, but neither read nor remove them.
    """
    after = figures.since(since)
    before = None if remove_before is None else figures.since(remove_before, "--remove-before")
    from kqueue.store import audit as store

    with database("audit") as engine:
        if before is not None:
            typer.echo(f"removed {store.forget(engine, before)}")
            return
        entries = store.listing(engine, since=after, actor=actor, limit=limit)
    emit(entries, table(_ENTRY, empty="there are no entries since then"), as_json=as_json, record=asdict)


_ENTRY: Final[Columns[Entry]] = {
    "time": lambda entry: moment(entry.at),
    "actor": lambda entry: entry.actor or "-",
    "owner": lambda entry: entry.owner or "-",
    **fields("action subject"),
}


def record(engine: Engine, action: Action, *subjects: str) -> None:
    """Record an action of this command's user."""
    from kqueue.store import audit as store

    store.record(engine, action, *subjects, actor=actor())
