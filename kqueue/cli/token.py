"""`kqueue token`: credentials for the HTTP server."""

from __future__ import annotations

import math
from datetime import timedelta
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from kqueue.cli.render import moment, print_table, write_json
from kqueue.cli.results import database
from kqueue.errors import InvalidRequest
from kqueue.moments import duration
from kqueue.states import Priority
from kqueue.text import one_line

if TYPE_CHECKING:
    from kqueue.store.tokens import Known

_group = typer.Typer(help="Tokens of the HTTP server.", no_args_is_help=True)
_LONGEST: Final = timedelta(days=3660)
_Json = Annotated[bool, typer.Option("--json", help="One line of JSON for each token.")]


def register(app: typer.Typer) -> None:
    """Add this group's commands to ``app``."""
    app.add_typer(_group, name="token", cls=app.info.cls)


@_group.command()
def create(
    name: Annotated[str, typer.Option(help="The holder's name, for people.")],
    scope: Annotated[
        list[str],
        typer.Option(
            help="`read`; `submit`, which adds kernels for stored problems; `problems`, which adds new problems; or "
            "`admin`, which adds running the fleet."
        ),
    ],
    expires: Annotated[
        str | None, typer.Option(help="After this age: `90m`, `12h`, `30d`; never unless given.")
    ] = None,
    priority: Annotated[
        str, typer.Option(help="The highest that its holder may ask for: `interactive` or `batch`.")
    ] = "interactive",
    weight: Annotated[
        float, typer.Option(min=0.01, max=100, help="Its share of the devices' time, where others have 1.")
    ] = 1.0,
    as_json: _Json = False,
) -> None:
    """Make a token and print it. It is shown this once and kept nowhere."""
    from kqueue.store import tokens

    if not math.isfinite(weight):
        raise InvalidRequest("--weight: a number from 0.01 to 100")
    try:
        scopes = [tokens.Scope(one) for one in dict.fromkeys(scope)]
    except ValueError:
        raise InvalidRequest(f"--scope: {', '.join(scope)}: use read, submit, problems or admin") from None
    if priority not in set(Priority):
        raise InvalidRequest(f"--priority: {priority}: use {' or '.join(Priority)}")
    if not name.strip() or len(name) > 200 or "\0" in name:
        raise InvalidRequest("--name: one to 200 characters")
    with database("token") as engine:
        made, secret = tokens.create(
            engine,
            name,
            scopes,
            expires_after=None if expires is None else _lifetime(expires),
            priority=Priority(priority),
            weight=weight,
        )
    if as_json:
        write_json(_record(made) | {"token": secret})
    else:
        typer.echo(secret)


@_group.command("list")
def list_(as_json: _Json = False) -> None:
    """Show all tokens but their secrets."""
    from kqueue.store import tokens

    with database("token") as engine:
        known = tokens.listing(engine)
    if as_json:
        for token in known:
            write_json(_record(token))
        return
    rows = (
        (
            token.id,
            token.name,
            " ".join(token.scopes),
            token.priority,
            f"{token.weight:g}",
            moment(token.created_at),
            moment(token.expires_at),
            moment(token.revoked_at),
            moment(token.last_used_at),
        )
        for token in known
    )
    print_table(("id", "name", "scopes", "priority", "weight", "created", "expires", "revoked", "last used"), rows)


@_group.command()
def revoke(which: Annotated[str, typer.Argument(help="An id, or a name: all tokens that have it.")]) -> None:
    """End tokens: the next request with one is refused. Evaluations that it submitted go on.

    The exit status is 1 if no valid token has this id or name.
    """
    from kqueue.store import tokens

    with database("token") as engine:
        ended = tokens.revoke(engine, which)
    for token in ended:
        typer.echo(f"revoked {token.id} {one_line(token.name)}")
    if not ended:
        typer.echo(f"no valid token has the id or name {one_line(which)}", err=True)
        raise typer.Exit(1)


def _record(token: Known) -> dict[str, Any]:
    from dataclasses import asdict

    return asdict(token) | {"scopes": [scope.value for scope in token.scopes]}


def _lifetime(text: str) -> timedelta:
    try:
        lifetime = duration(text)
    except OverflowError:
        lifetime = None
    if not lifetime or lifetime > _LONGEST:
        raise InvalidRequest(f"--expires {text}: write an age such as 90m, 12h, 30d, of ten years at most")
    return lifetime
