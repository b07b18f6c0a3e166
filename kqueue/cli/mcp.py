"""`kqueue mcp`: the fleet as tools of an agent."""

from __future__ import annotations

import logging
from typing import Annotated

import typer


def register(app: typer.Typer) -> None:
    """Add this command to ``app``."""
    app.command()(mcp)


def mcp(
    http: Annotated[
        str | None, typer.Option(metavar="HOST:PORT", help="Serve streamable HTTP there instead of stdio.")
    ] = None,
    allow_host: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help="With --http: a name under which clients reach it, such as a proxy's."),
    ] = None,
) -> None:
    """Serve the fleet to agents as tools, over the Model Context Protocol.

    On stdio for the one agent that started it, with this process's own settings (KQUEUE_URL and KQUEUE_TOKEN, or
    KQUEUE_DATABASE_URL and KQUEUE_REDIS_URL, or the fleet of this machine). With --http for any number, each of whom
    shows a token of the fleet.
    """
    from kqueue.errors import InvalidRequest
    from kqueue.mcp import require_mcp

    if allow_host and http is None:
        raise InvalidRequest("--allow-host: it is for --http; leave it out, or give --http HOST:PORT")
    require_mcp()
    from kqueue import logs
    from kqueue.config import load

    logs.configure(load())
    # It would tell of each request to the fleet.
    logging.getLogger("httpx").setLevel(logging.WARNING)
    from kqueue.mcp import serving

    if http is None:
        serving.serve_stdio()
    else:
        serving.serve_http(http, allow_host or [], typer.echo)
