"""`kqueue db`: manage the database schema."""

from __future__ import annotations

import sys
from enum import StrEnum
from typing import Annotated

import typer

from kqueue.cli import options
from kqueue.cli.connection import database
from kqueue.errors import InvalidRequest

_group = typer.Typer(help="The database's schema.", no_args_is_help=True)


class Role(StrEnum):
    """The purpose of a login. Each one stands for the group role ``kqueue_<name>``."""

    PRODUCER = "producer"
    WORKER = "worker"
    GATEWAY = "gateway"
    READER = "reader"


def register(app: typer.Typer) -> None:
    app.add_typer(_group, name="db", cls=app.info.cls)


@_group.command()
def upgrade(
    revision: Annotated[str, typer.Argument(help="A revision of the schema.")] = "head",
) -> None:
    """Upgrade the schema to this version of kqueue. Does nothing if it is up to date."""
    from kqueue.config import load
    from kqueue.store import schema

    url = load().require_database()
    before = schema.current(url)
    schema.upgrade(url, revision)
    after = schema.current(url)
    typer.echo(f"schema {after}" if before == after else f"schema {before or 'empty'} -> {after}")


@_group.command()
def current() -> None:
    """Print the database's schema revision and the one that this version of kqueue needs."""
    from kqueue.config import load
    from kqueue.store import schema

    revision = schema.current(load().require_database())
    typer.echo(f"database {revision or 'empty'}, kqueue {schema.head()}")


@_group.command()
def check() -> None:
    """Exit with 0 if this version of kqueue works with the database. Otherwise print the remedy and exit with 3."""
    from kqueue.store import schema

    with database("db check"):
        typer.echo(f"schema {schema.head()} ok")


@_group.command()
def login(
    name: Annotated[str, typer.Argument(help="The login's name.")],
    role: Annotated[Role, typer.Option(help="The purpose of the login, which limits its privileges.")],
    owner: options.Owner = "local",
) -> None:
    """Create a login for a role, or change its password. Connect as the owner of the tables.

    A producer sees and cancels the work of its owner only. All other roles see the work of all owners.

    The password is read from stdin or prompted for, so that neither `ps` nor the server's log shows it.
    """
    from kqueue.store import roles
    from kqueue.store.models import LOCAL

    options.check_owner(owner)
    if owner != LOCAL and role is not Role.PRODUCER:
        raise InvalidRequest(f"--owner: only for producers, because a {role} serves all owners")
    if sys.stdin.isatty():
        password: str = typer.prompt("password", hide_input=True, confirmation_prompt=True)
    else:
        password = sys.stdin.readline().rstrip("\r\n")
    with database("db login") as engine:
        roles.login(engine, name, f"kqueue_{role}", password, owner=owner)
    typer.echo(f"{name} has the privileges of a {role}")
