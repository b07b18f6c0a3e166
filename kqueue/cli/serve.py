"""`kqueue serve`: the HTTP door."""

from __future__ import annotations

from typing import Annotated

import typer


def register(app: typer.Typer) -> None:
    """Add this command to ``app``."""
    app.command()(serve)


def serve(
    host: Annotated[str | None, typer.Option(help="Address to listen on (KQUEUE_HTTP_ADDRESS).")] = None,
    port: Annotated[int | None, typer.Option(help="Port; 0 for any free one (KQUEUE_HTTP_PORT).")] = None,
) -> None:
    """Answer HTTP requests for a fleet, in the foreground, until SIGTERM or Ctrl-C.

    On loopback nobody needs a token unless KQUEUE_HTTP_TOKENS is `required`; elsewhere everybody does
    (`kqueue token create`). Those who wait when it is stopped are told to ask again.
    """
    from kqueue import logs
    from kqueue.config import load
    from kqueue.http import require_http

    require_http()
    config = load(http_address=host, http_port=port)
    logs.configure(config)
    from kqueue.http.server import serve

    serve(config, typer.echo)
