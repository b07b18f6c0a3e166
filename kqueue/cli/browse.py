"""`kqueue open`: open the fleet's page or Flower in a logged-in browser."""

from __future__ import annotations

import getpass
import html
import os
import socket
import tempfile
from pathlib import Path
from typing import Annotated, Final
from urllib.parse import quote

import typer

from kqueue.cli.connection import database
from kqueue.errors import ConfigError

#: Environment variables of which a desktop sets one.
_DISPLAYS: Final = ("DISPLAY", "WAYLAND_DISPLAY")


def open_(
    url: Annotated[str | None, typer.Option(help="The page's address, such as http://127.0.0.1:18188.")] = None,
    flower: Annotated[
        bool, typer.Option("--flower", help="Open the Flower of the fleet that `kqueue up` runs.")
    ] = False,
    no_browser: Annotated[bool, typer.Option("--no-browser", help="Only print the link.")] = False,
) -> None:
    """Print a link that logs a browser in at the fleet's page, and open it if there is a display.

    The link can be used once within a minute, and needs no token. To make one, you need a database login that can make
    tokens. With --flower, the link contains Flower's password, which is valid until the fleet stops.
    """
    from kqueue.config import flower_access, http_url, load
    from kqueue.store import sessions

    config = load()
    address, credentials = flower_access(config) if flower else (http_url(config), "")
    base = (url or address).rstrip("/")
    if not base.startswith(("http://", "https://")):
        raise ConfigError(f"{base}: a browser needs an address that begins with http:// or https://: give --url")
    if flower:
        link = f"{base}/".replace("://", f"://{quote(credentials, safe=':')}@", 1)
    else:
        with database("open") as engine:
            secret = sessions.invite(engine, f"kqueue open by {getpass.getuser()} on {socket.gethostname()}")
        link = f"{base}/login?link={secret}"
    typer.echo(link)
    if not no_browser and any(os.environ.get(name) for name in _DISPLAYS):
        _show(link)


def _show(link: str) -> None:
    """Open a link in the browser through a file, because other users can read the arguments of its process."""
    import webbrowser

    number, path = tempfile.mkstemp(prefix="kqueue-open-", suffix=".html")
    with os.fdopen(number, "w") as file:
        file.write(
            f'<!doctype html><title>kqueue</title><meta http-equiv="refresh" content="0;url={html.escape(link)}">'
        )
    webbrowser.open(Path(path).as_uri())
