"""`kqueue token`: credentials for the HTTP server."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from kqueue.cli import audit, options
from kqueue.cli.connection import database
from kqueue.cli.render import Columns, emit, say, table
from kqueue.errors import InvalidRequest
from kqueue.figures import budget, duration, moment
from kqueue.states import Priority, Spent
from kqueue.text import one_line

if TYPE_CHECKING:
    from kqueue.store.budgets import Budget
    from kqueue.store.tokens import Known

group = typer.Typer(help="Tokens of the HTTP server.", no_args_is_help=True)
_LONGEST: Final = timedelta(days=3660)
_LONGEST_WINDOW: Final = timedelta(days=366)
#: Permitted maximum priorities of a token.
_HIGHEST: Final = (Priority.INTERACTIVE, Priority.BATCH)
#: Windows of budgets that have names.
_WINDOWS: Final = {"hour": "1h", "day": "1d", "week": "1w"}
_Budget = Annotated[
    str | None,
    typer.Option(
        metavar="SECONDS/TIME",
        help="Seconds of slots that it can use in any such period: `3600s/day`, `10h/7d`. Default: no limit.",
    ),
]
_WhenSpent = Annotated[
    str,
    typer.Option(
        help="When the budget is used up: `refuse` submissions, or `lower` their priority, so that they come after "
        "all other work."
    ),
]


@group.command()
def create(
    name: Annotated[str, typer.Option(help="The holder's name, for people.")],
    scope: Annotated[
        list[str],
        typer.Option(
            help="`read`, `submit` (also kernels for stored problems), `problems` (also new problems), or `admin` "
            "(also control of the fleet). In addition `read:all` and `cancel:all`, for the work of all owners."
        ),
    ],
    owner: Annotated[
        str | None, typer.Option(help="The owner of its submissions, whose work alone it sees. By default its name.")
    ] = None,
    expires: Annotated[
        str | None, typer.Option(help="Age after which it expires: `90m`, `12h`, `30d`. Default: never.")
    ] = None,
    priority: Annotated[
        str, typer.Option(help="The highest priority that its holder can request: `interactive` or `batch`.")
    ] = "interactive",
    weight: Annotated[
        float, typer.Option(min=0.01, max=100, help="Its share of the devices' time, relative to a default of 1.")
    ] = 1.0,
    budget: _Budget = None,
    when_spent: _WhenSpent = "refuse",
    limit: options.Limits = None,
    as_json: options.Json = False,
) -> None:
    """Create a token and print it. It is shown only now, because it is not stored."""
    from kqueue.store import tokens
    from kqueue.store.engine import together

    if not math.isfinite(weight):
        raise InvalidRequest("--weight: a number from 0.01 to 100")
    try:
        scopes = [tokens.Scope(one) for one in dict.fromkeys(scope)]
    except ValueError:
        raise InvalidRequest(f"--scope: {', '.join(scope)}: use one or more of {', '.join(tokens.Scope)}") from None
    if priority not in _HIGHEST:
        raise InvalidRequest(f"--priority: {priority}: use {' or '.join(_HIGHEST)}")
    allowed = None if budget is None else _budget(budget, when_spent)
    if not name.strip() or len(name) > 200 or "\0" in name:
        raise InvalidRequest("--name: one to 200 characters")
    if owner is None:
        options.check_owner(name, "--name", ", or give --owner: without it, the name is the owner of its work")
    else:
        options.check_owner(owner)
    with database("token") as engine, together(engine):
        made, secret = tokens.create(
            engine,
            name,
            scopes,
            owner=owner or name,
            expires_after=None if expires is None else _lifetime(expires),
            priority=Priority(priority),
            weight=weight,
            limits=options.limits_of(limit),
            budget=allowed,
        )
        audit.record(engine, "token create", _named(made))
    emit(made, lambda _: print(secret), as_json=as_json, record=lambda made: _record(made) | {"token": secret})
    say(f"it submits for the owner {made.owner}, and sees {_sees(made)}")


@group.command()
def edit(
    which: Annotated[str, typer.Argument(help="A token's id, or a name for all tokens with it.")],
    budget: _Budget = None,
    when_spent: _WhenSpent = "refuse",
    no_budget: Annotated[bool, typer.Option("--no-budget", help="Remove the budget.")] = False,
    limit: options.Limits = None,
    no_limits: Annotated[bool, typer.Option("--no-limits", help="Remove all upper limits.")] = False,
) -> None:
    """Change the budget of tokens, or replace their upper limits, starting with the next submission.

    The exit status is 1 if no valid token has this id or name.
    """
    from kqueue.store import tokens
    from kqueue.store.engine import together

    if [budget is not None, no_budget, bool(limit), no_limits].count(True) != 1:
        raise InvalidRequest("give one of --budget, --no-budget, --limit and --no-limits")
    allowed = None if budget is None else _budget(budget, when_spent)
    limits = options.limits_of(limit)
    with database("token") as engine, together(engine):
        if limit or no_limits:
            changed = tokens.set_limits(engine, which, limits)
        else:
            changed = tokens.set_budget(engine, which, allowed)
        audit.record(engine, "token edit", *map(_named, changed))
    _report("changed", changed, which)


@group.command("list")
def list_(as_json: options.Json = False) -> None:
    """Show all tokens without their secrets, and the work that each sees."""
    from kqueue.store import tokens

    with database("token") as engine:
        tokens_known = tokens.listing(engine)
    emit(tokens_known, table(_TOKEN, empty="there are no tokens"), as_json=as_json, record=_record)


_TOKEN: Final[Columns[Known]] = {
    "id": lambda token: token.id,
    "name": lambda token: token.name,
    "owner": lambda token: token.owner,
    "scopes": lambda token: " ".join(token.scopes),
    "sees": lambda token: _sees(token),
    "priority": lambda token: token.priority,
    "weight": lambda token: f"{token.weight:g}",
    "created": lambda token: moment(token.created_at),
    "expires": lambda token: moment(token.expires_at),
    "revoked": lambda token: moment(token.revoked_at),
    "last used": lambda token: moment(token.last_used_at),
    "budget": lambda token: budget(token.budget),
    "limits": lambda token: " ".join(f"{path}={most:.12g}" for path, most in token.limits.items()),
}


@group.command()
def revoke(which: Annotated[str, typer.Argument(help="A token's id, or a name for all tokens with it.")]) -> None:
    """Revoke tokens. The next request with one is refused. Evaluations that it submitted continue.

    The exit status is 1 if no valid token has this id or name.
    """
    from kqueue.store import tokens
    from kqueue.store.engine import together

    with database("token") as engine, together(engine):
        ended = tokens.revoke(engine, which)
        audit.record(engine, "token revoke", *map(_named, ended))
    _report("revoked", ended, which)


def _report(done: str, tokens: Sequence[Known], which: str) -> None:
    """Print the tokens that were changed. Exit with 1 if there are none."""
    for token in tokens:
        typer.echo(f"{done} {token.id} {one_line(token.name)}")
    if not tokens:
        typer.echo(f"no valid token has the id or name {one_line(which)}", err=True)
        raise typer.Exit(1)


def _named(token: Known) -> str:
    return f"{token.id} {token.name} for {token.owner}: {' '.join(token.scopes)}"


def _record(token: Known) -> dict[str, Any]:
    scopes = [scope.value for scope in token.scopes]
    return asdict(token) | {"scopes": scopes, "sees": _sees(token), "budget": budget_record(token.budget)}


def _sees(token: Known) -> str:
    """Return the work that a token sees, in words."""
    from kqueue.store.tokens import Scope

    if token.revoked_at is not None or (token.expires_at is not None and token.expires_at <= datetime.now(UTC)):
        return "nothing"
    if Scope.READ_ALL in token.scopes:
        return "all work"
    return f"work of {token.owner}" if any(scope.covers(Scope.READ) for scope in token.scopes) else "nothing"


def budget_record(budget: Budget | None) -> dict[str, Any] | None:
    """Return a budget as JSON, or None."""
    if budget is None:
        return None
    record = asdict(budget) | {"left_s": budget.left_s}
    del record["token_id"]
    return record


def _budget(text: str, when_spent: str) -> Budget:
    from kqueue.store.budgets import Budget

    amount, _, window = text.partition("/")
    seconds, length = duration(amount), duration(_WINDOWS.get(window, window))
    if not seconds or not length or seconds > _LONGEST or length > _LONGEST_WINDOW:
        raise InvalidRequest(
            f"--budget {text}: write seconds of slots and a period, such as 3600s/day, 10h/7d or 60m/hour"
        )
    if when_spent not in set(Spent):
        raise InvalidRequest(f"--when-spent: {when_spent}: use {' or '.join(Spent)}")
    return Budget(seconds.total_seconds(), length.total_seconds(), Spent(when_spent))


def _lifetime(text: str) -> timedelta:
    lifetime = duration(text)
    if not lifetime or lifetime > _LONGEST:
        raise InvalidRequest(f"--expires {text}: write an age such as 90m, 12h, 30d, up to ten years")
    return lifetime
