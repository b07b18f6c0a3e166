"""`kqueue duel`: which of two kernels is faster."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kqueue.cli import options, sources
from kqueue.cli.judge import where
from kqueue.cli.render import make_bar, say, write_json
from kqueue.errors import InvalidRequest
from kqueue.text import clean

if TYPE_CHECKING:
    from kqueue.features.duel.duels import Duel


def duel(
    problem: Annotated[str, typer.Argument(metavar="PROBLEM", help="File with the reference.")],
    a: Annotated[Path, typer.Argument(metavar="A", help="File with a kernel.")],
    b: Annotated[Path, typer.Argument(metavar="B", help="File with the other kernel.")],
    *,
    within: Annotated[
        float | None,
        typer.Option(metavar="PART", help="End as equal once the difference is at most this part, such as 0.01."),
    ] = None,
    rounds: Annotated[int, typer.Option(help="Maximum number of rounds.")] = 40,
    backend: options.Backend = None,
    device: options.Device = None,
    fleet: options.Fleet = False,
    url: options.Url = None,
    lane: Annotated[str | None, typer.Option(help="With --fleet: auto, cpu, gpu, or gpu.<model>.")] = None,
    tree: Annotated[
        list[str] | None,
        typer.Option(
            "--tree",
            metavar="DIR[@REV][:ROOT]",
            help="A folder that the kernels can import, as for `kqueue judge`. A second one is B's.",
        ),
    ] = None,
    judging: options.Timed,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as one JSON line.")] = False,
) -> None:
    """Find out which of two kernels is faster, by how much and with what certainty. Exit with 1 without a decision."""
    from kqueue.client import connect
    from kqueue.features.duel.duels import Match
    from kqueue.features.duel.duels import duel as fight

    on_fleet = options.on_fleet(fleet=fleet, url=url, device=device, lane=lane)
    fields: dict[str, Any] = {"settings": judging.tree(), **sources.read_problem(problem), "priority": "batch"}
    if "problem_label" not in fields and not on_fleet:
        raise InvalidRequest(f"{problem}: only a fleet has stored problems: give a file")
    if lane is not None:
        fields["lane"] = lane
    if len(given := tree or ()) > 2:
        raise InvalidRequest("--tree: give one for both kernels, or A's and then B's")
    of_tree = [sources.read_tree(one) for one in given] or [{}]
    requests = (options.of_file(a, backend, fields | of_tree[0]), options.of_file(b, backend, fields | of_tree[-1]))
    match = Match.of(*requests, within=within, most=rounds)
    with make_bar(quiet=as_json) as bar:
        task = bar.add_task("waiting", total=rounds)

        def report(now: Duel) -> None:
            bar.update(task, completed=now.rounds, description=now.message)

        if on_fleet:
            with connect(url) as client:
                end = client.duel(*requests, within=within, rounds=rounds, report=report)
        else:
            from kqueue.judging import LocalJudge

            end = match.state([])
            with LocalJudge(device) as local:
                if not as_json:
                    say(where(local.machine))
                for end in fight(local.map, match):
                    report(end)
            for doubt in local.doubts:
                say(f"the GPU could be unfit: {doubt}")
    if as_json:
        write_json(end.model_dump(mode="json"))
    else:
        typer.echo(clean(f"A is {a}, B is {b}\n{end.message}"))
    if end.reason == "void":
        raise typer.Exit(3)
    if end.winner is None and end.reason != "equal":
        raise typer.Exit(1)
