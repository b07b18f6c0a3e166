"""`kqueue problems`: problems that owners share. `kqueue owner`: erasure of an owner's work."""

from __future__ import annotations

import time
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from kqueue.cli import options
from kqueue.cli.connection import database
from kqueue.cli.render import Columns, emit, moment, table
from kqueue.text import one_line

if TYPE_CHECKING:
    from sqlalchemy import Engine

    from kqueue.store.sharing import Entry, Shared

_problems = typer.Typer(help="Problems that owners share.", no_args_is_help=True)
_owner = typer.Typer(help="The work of an owner.", no_args_is_help=True)
_Problem = Annotated[str, typer.Argument(metavar="PROBLEM", help="Its hash, or the first digits of it.")]
_Whose = Annotated[
    str | None, typer.Option("--owner", help="The owner of the problem. [default: local, or the login's]")
]
#: Seconds for which an erasure waits until workers have ended its evaluations, and between two looks.
_PATIENCE_S: Final = 60.0
_LOOK_S: Final = 0.5


def register(app: typer.Typer) -> None:
    app.add_typer(_problems, name="problems", cls=app.info.cls)
    app.add_typer(_owner, name="owner", cls=app.info.cls)


@_problems.command("list")
def list_(as_json: options.Json = False) -> None:
    """Show the shared problems. Submissions name them `sha256:` and their hash."""
    from kqueue.store import sharing

    with database("problems") as engine:
        shared = sharing.listing(engine)
    emit(shared, table(_SHARED, empty="no problem is shared"), as_json=as_json, record=asdict)


@_problems.command()
def share(
    problem: _Problem,
    label: Annotated[
        str | None, typer.Option("--name", help="Its name. [default: the label of its last evaluation]")
    ] = None,
    leaderboard: Annotated[
        bool, typer.Option("--leaderboard", help="Let owners see each other's best times for it.")
    ] = False,
    owner: _Whose = None,
) -> None:
    """Share a problem with all owners: they can read it and submit kernels for it.

    Shapes that it holds out stay hidden. Run again for the same problem, the command changes the name and the
    leaderboard.
    """
    from kqueue.store import sharing

    with database("problems") as engine:
        known = sharing.share(engine, _hash(engine, problem), owner=owner, label=label, leaderboard=leaderboard)
    typer.echo(f"shared sha256:{known.problem_hash} {one_line(known.label)}")


@_problems.command()
def unshare(problem: _Problem, owner: _Whose = None) -> None:
    """Stop sharing a problem. Owners that submitted for it keep a copy."""
    from kqueue.store import sharing

    with database("problems") as engine:
        sharing.unshare(engine, digest := _hash(engine, problem), owner=owner)
    typer.echo(f"no longer shared: sha256:{digest}")


@_problems.command()
def board(problem: _Problem, as_json: options.Json = False) -> None:
    """Show the best times of each owner for a problem that is shared with a leaderboard."""
    from kqueue.store import sharing

    with database("problems") as engine:
        entries = sharing.board(engine, _hash(engine, problem))
    emit(entries, table(_BOARD, empty="no owner has a time, or there is no leaderboard"), as_json=as_json, record=asdict)


@_owner.command()
def erase(
    owner: Annotated[str, typer.Argument(help="The owner's name.")],
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False,
    as_json: options.Json = False,
) -> None:
    """Erase the sources, labels, logs, verdicts and searches of an owner. Its costs stay.

    Its tokens are revoked and its evaluations cancelled first. Its logins of the database stay: remove them before. Run
    the command again if it was interrupted. It exits with 1 if workers still execute evaluations. Copies of its shared
    problems belong to the owners that submitted for them.
    """
    from kqueue import logs
    from kqueue.client import Client
    from kqueue.config import load
    from kqueue.store import erasure

    options.check_owner(owner)
    if not yes:
        typer.confirm(f"Erase all work of the owner {owner}? It cannot be restored", abort=True)
    config = load()
    logs.configure(config)
    with database("owner") as engine, Client(config) as client:
        tokens = erasure.revoke(engine, owner)
        deadline = time.monotonic() + _PATIENCE_S
        evaluations = 0
        while True:
            for identity in erasure.unfinished(engine, owner):
                client.cancel(identity)
            erased = erasure.erase(engine, owner, tokens=tokens)
            evaluations += erased.evaluations
            if not erased.left or time.monotonic() > deadline:
                break
            time.sleep(_LOOK_S)
    erased = replace(erased, evaluations=evaluations)
    emit(erased, lambda one: typer.echo(_words(asdict(one))), as_json=as_json)
    if erased.left:
        raise typer.Exit(1)


def _words(numbers: dict[str, Any]) -> str:
    return ", ".join(f"{name}: {number}" for name, number in numbers.items())


def _hash(engine: Engine, word: str) -> str:
    """Return the hash of a stored or shared problem that a word names."""
    from kqueue.store import reports, sharing

    shared = {one.problem_hash for one in sharing.listing(engine)}
    digest = word.removeprefix("sha256:").lower()
    return digest if digest in shared else reports.named(engine, word, among=[reports.Kind.PROBLEM]).key


_SHARED: Final[Columns[Shared]] = {
    "problem": lambda one: f"sha256:{one.problem_hash}",
    "name": lambda one: one_line(one.label),
    "owner": lambda one: one.owner,
    "leaderboard": lambda one: "yes" if one.leaderboard else "",
    "since": lambda one: moment(one.created_at),
}
_BOARD: Final[Columns[Entry]] = {
    "rank": lambda one: one.rank,
    "owner": lambda one: one.owner,
    "speedup": lambda one: "" if one.speedup is None else f"{one.speedup:.3g}x",
    "runtime ms": lambda one: f"{one.runtime_ms:.4g}",
    "precision": lambda one: one.precision,
    "device": lambda one: one_line(one.device or ""),
    "measured": lambda one: one.measured,
}
