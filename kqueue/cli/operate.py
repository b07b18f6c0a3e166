"""Commands for operators: `kqueue serve`, `mcp`, `open`, `sweep`, `db` and `doctor`."""

from __future__ import annotations

import html
import logging
import os
import sys
import tempfile
import time
from dataclasses import asdict, replace
from datetime import UTC, datetime, timedelta
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final
from urllib.parse import quote, urlencode

import typer

from kqueue.cli import options
from kqueue.cli.connection import actor, database
from kqueue.cli.render import console, emit, text
from kqueue.errors import ConfigError, InvalidRequest
from kqueue.text import one_line

if TYPE_CHECKING:
    from sqlalchemy import Engine

    from kqueue.config import Config
    from kqueue.doctor import Check
    from kqueue.sweeper import SweepReport


def serve(
    host: Annotated[str | None, typer.Option(help="Address to listen on (KQUEUE_HTTP_ADDRESS).")] = None,
    port: Annotated[int | None, typer.Option(help="Port, or 0 for any free one (KQUEUE_HTTP_PORT).")] = None,
) -> None:
    """Answer HTTP requests for a fleet and show its page, in the foreground, until SIGTERM or Ctrl-C.

    Every request needs a token (`kqueue token create`), except requests of the server's own user and of root on the
    unix socket KQUEUE_HTTP_SOCKET. Waiting clients are asked to retry when it stops.
    """
    from kqueue import logs
    from kqueue.config import load
    from kqueue.http import require_http

    require_http()
    config = load(http_address=host, http_port=port)
    logs.configure(config)
    from kqueue.http import server
    from kqueue.web.app import create_app

    server.serve(config, create_app, typer.echo)


def mcp(
    http: Annotated[
        str | None, typer.Option(metavar="HOST:PORT", help="Serve streamable HTTP at this address instead of stdio.")
    ] = None,
    allow_host: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help="With --http: a host name that clients use, such as a proxy's. Repeatable."),
    ] = None,
    owner: Annotated[
        str | None,
        typer.Option(
            help="On stdio, with the fleet's database: the owner of the agent's work. [default: local, or the login's]"
        ),
    ] = None,
    sees: Annotated[
        str,
        typer.Option(
            help="The evaluations that an agent reads and cancels: of this `session`, of its `owner`, or `all` that "
            "its credential allows."
        ),
    ] = "session",
    evaluations: Annotated[int | None, typer.Option(min=1, help="Maximum number of evaluations of a session.")] = None,
    seconds: Annotated[
        int | None, typer.Option(min=1, help="Seconds of slots after which a session can submit no more.")
    ] = None,
) -> None:
    """Serve the fleet to agents as tools, over the Model Context Protocol.

    On stdio, it serves the one agent that started it, with this process's settings (KQUEUE_URL and KQUEUE_TOKEN, or
    KQUEUE_DATABASE_URL and KQUEUE_REDIS_URL, or the fleet of this machine). With --http, it serves any number of
    agents, and each needs a token of the fleet.
    """
    from kqueue.mcp import require_mcp

    if allow_host and http is None:
        raise InvalidRequest("--allow-host: only for --http: omit it, or give --http HOST:PORT")
    if owner is not None:
        options.check_owner(owner)
        if http is not None:
            raise InvalidRequest("--owner: only on stdio: with --http each agent has the owner of its token")
    require_mcp()
    from kqueue import logs
    from kqueue.config import load
    from kqueue.mcp.connection import Sees

    if sees not in set(Sees):
        raise InvalidRequest(f"--sees: {sees}: use {', '.join(Sees)}")
    if owner is not None and sees == Sees.ALL:
        raise InvalidRequest("--owner: an agent with an owner does not see all: omit --sees all")
    limits = {"evaluations": evaluations, "seconds": seconds}
    given = "".join(f";{name}={limit}" for name, limit in limits.items() if limit is not None)
    if given and sees != Sees.SESSION:
        raise InvalidRequest("--evaluations, --seconds: these are limits of a session: omit --sees")

    logs.configure(load())
    # httpx would log each request to the fleet.
    logging.getLogger("httpx").setLevel(logging.WARNING)
    from kqueue.mcp import serving

    if http is None:
        serving.serve_stdio(owner, Sees(sees), given)
    else:
        serving.serve_http(http, allow_host or [], typer.echo, Sees(sees), given)


#: Environment variables of which a desktop sets one.
_DISPLAYS: Final = ("DISPLAY", "WAYLAND_DISPLAY")


def open_(
    url: Annotated[str | None, typer.Option(help="The page's address, such as http://127.0.0.1:18188.")] = None,
    flower: Annotated[
        bool, typer.Option("--flower", help="Open the Flower of the fleet that `kqueue up` runs.")
    ] = False,
    no_browser: Annotated[bool, typer.Option("--no-browser", help="Only print the link.")] = False,
    share: Annotated[
        int | None,
        typer.Option(
            metavar="DAYS", min=1, max=366, help="Print a link that only reads, for any browser, for these days."
        ),
    ] = None,
    owner: Annotated[str | None, typer.Option(help="With --share: show the work of this owner only.")] = None,
    to: Annotated[str, typer.Option(metavar="PATH", help="The page to show, such as /batches/night.")] = "/",
) -> None:
    """Print a link that logs a browser in at the fleet's page, and open it if there is a display.

    The link can be used once within a minute, and needs no token. To make one, you need a database login that can make
    tokens. With --share, any number of browsers can use the link, and `kqueue token` lists and revokes it. With
    --flower, it contains Flower's password, which is valid until the fleet stops.
    """
    from kqueue.config import flower_access, http_url, load
    from kqueue.store import sessions
    from kqueue.store.tokens import Scope

    if (flower and (share is not None or to != "/")) or (owner is not None and share is None):
        raise ConfigError("--share and --to need a link to the page (omit --flower), and --owner needs --share")
    config = load()
    address, credentials = flower_access(config) if flower else (http_url(config), "")
    base = (url or address).rstrip("/")
    if not base.startswith(("http://", "https://")):
        raise ConfigError(f"{base}: a browser needs an address that begins with http:// or https://: give --url")
    if flower:
        link = f"{base}/".replace("://", f"://{quote(credentials, safe=':')}@", 1)
    else:
        name, how = f"kqueue open by {actor()}", dict[str, Any]()
        if share is not None:
            how["lifetime"] = lifetime = timedelta(days=share)
            name += f", shared until {datetime.now(UTC) + lifetime:%Y-%m-%d %H:%M:%S}"
            how |= {"scopes": [Scope.READ_ALL]} if owner is None else {"scopes": [Scope.READ], "owner": owner}
        with database("open") as engine:
            secret = sessions.invite(engine, name, **how)
        link = f"{base}/login?{urlencode({'link': secret} | ({} if to == '/' else {'next': to}))}"
    typer.echo(link)
    if not no_browser and share is None and any(os.environ.get(name) for name in _DISPLAYS):
        _open_link(link)


def _open_link(link: str) -> None:
    """Open a link in the browser through a file, because other users can read the arguments of its process."""
    import webbrowser

    number, path = tempfile.mkstemp(prefix="kqueue-open-", suffix=".html")
    with os.fdopen(number, "w") as file:
        file.write(
            f'<!doctype html><title>kqueue</title><meta http-equiv="refresh" content="0;url={html.escape(link)}">'
        )
    webbrowser.open(Path(path).as_uri())


#: Maximum seconds of the wait for another sweeper.
_LOCK_WAIT_S: Final = 10.0


def sweep(
    prune: Annotated[bool, typer.Option("--prune", help="Also remove everything past its retention.")] = False,
    as_json: options.Json = False,
) -> None:
    """End lost and expired evaluations, and send the messages that are missing in Redis.

    Every fleet sweeps every few seconds by itself. Exits with 3 if Redis cannot be reached.
    """
    from kqueue.config import load
    from kqueue.store import retention, schema

    config = load()
    if prune and config.retention_days is None and config.log_retention_days is None:
        raise ConfigError(
            "--prune: no retention is set: set KQUEUE_RETENTION_DAYS or KQUEUE_LOG_RETENTION_DAYS, in days"
        )
    with schema.checked(config.require_database(), application="kqueue sweep", pool_size=2) as engine:
        report = _sweep(engine, config)
        days = config.retention_days, config.log_retention_days
        while prune and (bite := retention.prune(engine, retention_days=days[0], log_retention_days=days[1])):
            report = replace(report, pruned=report.pruned + bite)
    emit(report, _print_sweep, as_json=as_json, record=_record)
    if report.broker_error is not None:
        raise typer.Exit(3)


def _record(report: SweepReport) -> dict[str, Any]:
    lost = [{"evaluation_id": identity, "recorded": became.value} for identity, became in report.lost]
    record = asdict(report) | {"lost": lost}
    del record["idle"]
    return record


def _sweep(engine: Engine, config: Config) -> SweepReport:
    """Sweep once, after waiting for another sweeper if necessary."""
    from kqueue import broker, sweeper

    deadline = time.monotonic() + _LOCK_WAIT_S
    with broker.make_app(config) as app:
        while True:
            report = sweeper.sweep(engine, app, retry_delay_s=config.retry_delay_s)
            if report.swept or time.monotonic() >= deadline:
                return report
            time.sleep(0.1)


def _print_sweep(report: SweepReport) -> None:
    if not report.swept:
        typer.echo("another sweeper held the lock all the time")
    counts = {
        "attempts lost with silent workers": len(report.lost),
        "evaluations expired": report.expired,
        "workers marked as stopped": report.stopped_workers,
        "messages missing from Redis": report.missing,
        "messages sent": report.published,
        **{f"{kind} {'emptied' if kind == 'logs' else 'removed'}": n for kind, n in asdict(report.pruned).items()},
    }
    if lines := [f"{name}: {number}" for name, number in counts.items() if number]:
        typer.echo("\n".join(lines))
    elif report.swept and report.broker_error is None:
        typer.echo("nothing to do")
    if report.broker_error is not None:
        console().print(text(f"redis: {report.broker_error}", "bold red"))


db = typer.Typer(help="The database's schema.", no_args_is_help=True)


class Role(StrEnum):
    """The purpose of a login. Each one stands for the group role ``kqueue_<name>``."""

    PRODUCER = "producer"
    WORKER = "worker"
    GATEWAY = "gateway"
    READER = "reader"


@db.command()
def upgrade(revision: Annotated[str, typer.Argument(help="A revision of the schema.")] = "head") -> None:
    """Upgrade the schema to this version of kqueue. Does nothing if it is up to date."""
    from kqueue.config import load
    from kqueue.store import schema

    url = load().require_database()
    before = schema.current(url)
    schema.upgrade(url, revision)
    after = schema.current(url)
    typer.echo(f"schema {after}" if before == after else f"schema {before or 'empty'} -> {after}")


@db.command()
def current() -> None:
    """Print the database's schema revision and the one that this version of kqueue needs."""
    from kqueue.config import load
    from kqueue.store import schema

    typer.echo(f"database {schema.current(load().require_database()) or 'empty'}, kqueue {schema.head()}")


@db.command()
def check() -> None:
    """Exit with 0 if this version of kqueue works with the database. Otherwise print the remedy and exit with 3."""
    from kqueue.store import schema

    with database("db check"):
        typer.echo(f"schema {schema.head()} ok")


@db.command()
def login(
    name: Annotated[str, typer.Argument(help="The login's name.")],
    role: Annotated[Role, typer.Option(help="The purpose of the login, which limits its privileges.")],
    owner: options.Owner = "local",
    limit: options.Limits = None,
) -> None:
    """Create a login for a role, or change its password. Connect as the owner of the tables.

    A producer sees and cancels the work of its owner only. All other roles see the work of all owners.

    The password is read from stdin or prompted for, so that neither `ps` nor the server's log shows it.
    """
    from kqueue.store import roles
    from kqueue.store.models import LOCAL
    from kqueue.upper_limits import RUNNING, SOURCE

    options.check_owner(owner)
    limits = options.limits_of(limit)
    if of_tokens := {SOURCE, RUNNING} & limits.keys():
        raise InvalidRequest(f"--limit: {min(of_tokens)} is only for tokens")
    if (owner != LOCAL or limits) and role is not Role.PRODUCER:
        option = "--limit" if limits else "--owner"
        raise InvalidRequest(f"{option}: only for producers, because a {role} serves all owners")
    if sys.stdin.isatty():
        password: str = typer.prompt("password", hide_input=True, confirmation_prompt=True)
    else:
        password = sys.stdin.readline().rstrip("\r\n")
    with database("db login") as engine:
        roles.login(engine, name, f"kqueue_{role}", password, owner=owner, limits=limits)
    typer.echo(f"{name} has the privileges of a {role}")


#: Width in characters of the column of names.
_NAME_WIDTH: Final = 22
_STATE_STYLES: Final = {"ok": "green", "info": "dim", "warn": "yellow", "fail": "bold red"}


def doctor(
    deep: Annotated[
        bool, typer.Option("--deep", help="Also judge known kernels, and report faults. Takes minutes.")
    ] = False,
    as_json: options.Json = False,
) -> None:
    """Check this host and its services. The report contains no secrets, so you can share it to ask for help.

    Exits with 1 if something is broken.
    """
    from kqueue.config import load
    from kqueue.doctor import State, examine

    group, failed = "", False
    # Each check is shown at once, because all of them take a minute on a busy host.
    for check in examine(load(), deep=deep):
        failed = failed or check.state is State.FAIL
        if check.group != group and not as_json:
            group = check.group
            console().print(text(group, "bold"))
        emit(check, _print_check, as_json=as_json)
    if failed:
        raise typer.Exit(1)


def _print_check(check: Check) -> None:
    out = console()
    out.print(f"  {check.state:<4}", end="", style=_STATE_STYLES[check.state])
    out.print(f"  {check.name:<{_NAME_WIDTH}}  {one_line(check.detail)}", soft_wrap=True)
    if check.fix:
        out.print(" " * (_NAME_WIDTH + 10) + one_line(check.fix), style="cyan", soft_wrap=True)
    sys.stdout.flush()
