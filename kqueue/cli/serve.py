"""`kqueue serve`: HTTP for a fleet."""

from __future__ import annotations

from typing import Annotated

import typer


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
    from kqueue.http.server import serve
    from kqueue.web.app import create_app

    serve(config, create_app, typer.echo)
