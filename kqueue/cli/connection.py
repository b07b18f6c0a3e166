"""The connection of a command to the fleet: to its database, or to its server if the environment names only that."""

from __future__ import annotations

import asyncio
import getpass
import inspect
import os
import socket
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Any

from kqueue.errors import ConfigError, ServerUnavailable

if TYPE_CHECKING:
    from sqlalchemy import Engine

    from kqueue.client.server import Server
    from kqueue.store.reports import Detail

#: The function that calls a report of a fleet. It knows the argument ``within_s``.
Reader = Callable[..., Any]


@contextmanager
def database(command: str) -> Generator[Engine]:
    """Connect to the fleet's database on behalf of a command."""
    from kqueue.config import load
    from kqueue.store import schema

    with schema.checked(load().require_database(), application=f"kqueue {command}") as engine:
        yield engine


@contextmanager
def reading(command: str, owner: str | None = None) -> Generator[Reader]:
    """Connect to the fleet on behalf of a command. Yield the function that calls reports, for an owner if given."""
    from kqueue.config import names_server
    from kqueue.store.engine import Viewer, acting

    if not names_server():
        with database(command) as engine, acting(Viewer(owner, held=owner is not None)):
            yield partial(on_database, engine)
    elif owner is not None:
        raise ConfigError("--owner: this needs KQUEUE_DATABASE_URL. At KQUEUE_URL the token has an owner: omit it")
    else:
        with asking() as (run, server):
            yield partial(_on_server, run, server)


def on_database(engine: Engine, report: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call a report on a database."""
    from kqueue.config import load

    live = {"within_s": load().live_s} if "within_s" in inspect.signature(report).parameters else {}
    return report(engine, *args, **kwargs, **live)


@contextmanager
def asking(url: str | None = None) -> Generator[tuple[Callable[..., Any], Server]]:
    """Connect to the server, or without a token to ``url``. Yield it with the function that runs its coroutines."""
    from kqueue.client.server import Server
    from kqueue.config import load

    config = load(url=url)
    if config.url is None:
        raise ConfigError("only `kqueue serve` signs receipts: set KQUEUE_URL, or run `kqueue up` on this machine")
    server = Server(config.url, None if url else config.token, retry_s=20.0, connections=1)
    with asyncio.Runner() as runner:
        try:
            yield runner.run, server
        finally:
            runner.run(server.close())


def _on_server(run: Callable[..., Any], server: Server, report: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call a report on a server. Long lists are read in pages."""
    from pydantic import TypeAdapter, ValidationError
    from pydantic_core import to_jsonable_python

    from kqueue.store.readable import PAGES, READABLE, result_of

    given = inspect.signature(report).bind_partial(None, *args, **kwargs).arguments
    given |= given.pop("filters", {})
    del given["engine"]
    kind = TypeAdapter(result_of(report))

    def get(**more: Any) -> Any:
        answer = run(server.ask("POST", f"/v1/reports/{READABLE[report]}", body=to_jsonable_python(given | more)))
        try:
            return kind.validate_python(answer["result"], extra="ignore")
        except (KeyError, ValidationError):
            raise ServerUnavailable("the server at KQUEUE_URL has another version of kqueue than this one") from None

    def pages() -> Iterator[list[Any]]:
        (ordered, most), left, after = PAGES[report], given["limit"], given.get("after")
        while left > 0 and (page := get(limit=min(most, left), after=after)):
            yield page
            after, left = [getattr(page[-1], one) for one in ordered], len(page) // most * (left - most)

    if report not in PAGES:
        return get()
    return pages() if inspect.isgeneratorfunction(report) else [*chain(*pages())]


def detail_of(command: str, evaluation: str) -> Detail:
    """Return the evaluation with this id or these first digits, on behalf of a command."""
    from kqueue.store import reports

    with reading(command) as read:
        return read(reports.show, read(reports.resolve_id, evaluation))


def actor() -> str:
    """Return this command's user and host. A user without an entry in /etc/passwd is named by its uid."""
    try:
        user = getpass.getuser()
    except (KeyError, OSError):
        user = f"uid {os.geteuid()}"
    return f"{user} on {socket.gethostname()}"
