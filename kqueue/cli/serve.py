"""`kqueue serve` and `kqueue mcp`: a fleet over HTTP, and as tools of an agent."""

from __future__ import annotations

import logging
from typing import Annotated

import typer

from kqueue.cli import options


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
            help="On stdio, with the fleet's database: the owner of the agent's work, which is all that it sees."
        ),
    ] = None,
) -> None:
    """Serve the fleet to agents as tools, over the Model Context Protocol.

    On stdio, it serves the one agent that started it, with this process's settings (KQUEUE_URL and KQUEUE_TOKEN, or
    KQUEUE_DATABASE_URL and KQUEUE_REDIS_URL, or the fleet of this machine). With --http, it serves any number of
    agents, and each needs a token of the fleet.
    """
    from kqueue.errors import InvalidRequest
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

    logs.configure(load())
    # httpx would log each request to the fleet.
    logging.getLogger("httpx").setLevel(logging.WARNING)
    from kqueue.mcp import serving

    if http is None:
        serving.serve_stdio(owner)
    else:
        serving.serve_http(http, allow_host or [], typer.echo)
