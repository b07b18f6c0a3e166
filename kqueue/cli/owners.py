"""Commands of `kqueue problems` for problems that owners share, and `kqueue owner` for the work of an owner."""

from __future__ import annotations

from typing import Annotated, Final

import typer

from kqueue.cli import options
from kqueue.cli.connection import Reader, database, reading
from kqueue.cli.render import emit, say
from kqueue.text import one_line

group = typer.Typer(help="The work of an owner.", no_args_is_help=True)
group.callback()(lambda: None)
_Problem = Annotated[str, typer.Argument(metavar="PROBLEM", help="Its hash, or the first digits of it.")]
_Whose = Annotated[
    str | None, typer.Option("--owner", help="The owner of the problem. [default: local, or the login's]")
]
#: Seconds for which an erasure waits until workers have ended its evaluations.
_PATIENCE_S: Final = 60.0


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

    Shapes that it holds out stay hidden. Run again, the command changes the name and the leaderboard.
    """
    from kqueue.store import sharing

    with reading("problems", owner) as read:
        known = read(sharing.share, _hash(read, problem), label=label, leaderboard=leaderboard)
    typer.echo(f"shared sha256:{known.problem_hash} {one_line(known.label)}")


def unshare(problem: _Problem, owner: _Whose = None) -> None:
    """Stop sharing a problem. Owners that submitted for it keep a copy."""
    from kqueue.store import sharing

    with reading("problems", owner) as read:
        read(sharing.unshare, digest := _hash(read, problem))
    typer.echo(f"no longer shared: sha256:{digest}")


@group.command()
def erase(
    owner: Annotated[str, typer.Argument(help="The owner's name.")],
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False,
    as_json: options.Json = False,
) -> None:
    """Erase the sources, labels, logs, verdicts and searches of an owner. Its costs stay.

    Its tokens are revoked and its evaluations cancelled first. Its logins of the database stay: remove them before. Run
    the command again if it was interrupted, or exits with 1 because workers still execute evaluations.
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
        erased = erasure.erase(engine, owner, cancel=client.cancel, patience_s=_PATIENCE_S)
    emit(erased, typer.echo, as_json=as_json)
    if erased.left:
        say(f"workers still execute {erased.left} evaluations: run the command again")
        raise typer.Exit(1)


def _hash(read: Reader, word: str) -> str:
    from kqueue.store import reports

    return read(reports.named, word, among=[reports.Kind.PROBLEM]).key
