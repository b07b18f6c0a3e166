"""`kqueue check`: judge what a change does to the operators of a repository."""

from __future__ import annotations

import sys
import tempfile
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final
from uuid import uuid4

import typer

from kqueue.cli import options
from kqueue.cli.connection import reading
from kqueue.cli.judge import where
from kqueue.cli.render import make_bar, print_table, say, write_json
from kqueue.errors import InvalidRequest

if TYPE_CHECKING:
    from kqueue.contract import Request, Verdict
    from kqueue.features.check.run import Check, Row
    from kqueue.features.duel.duels import Duel

#: Name of the file that lists the operators.
_FILE: Final = "kqueue.toml"
_SHOWN: Final = 3
_UNWRITTEN: Final = 3


def check(
    base: Annotated[str, typer.Option(metavar="REV", help="The revision before the change.")],
    *,
    head: Annotated[str, typer.Option(metavar="REV", help="The revision with the change.")] = "HEAD",
    config: Annotated[str, typer.Option(metavar="FILE", help="File of the repository with the operators.")] = _FILE,
    operator: Annotated[
        list[str] | None, typer.Option("--operator", metavar="NAME", help="Judge only this one. Repeatable.")
    ] = None,
    only_changed: Annotated[
        bool, typer.Option("--only-changed", help="Judge the operators whose files or imports the change touches.")
    ] = False,
    qualify: Annotated[
        bool, typer.Option("--qualify", help="Run the sanitizers too, and judge on every model of GPU of the fleet.")
    ] = False,
    no_timing: Annotated[bool, typer.Option("--no-timing", help="Judge right or wrong only.")] = False,
    within: Annotated[
        float, typer.Option(metavar="PART", help="End a duel once the difference is surely at most this part.")
    ] = 0.005,
    rounds: Annotated[int, typer.Option(help="Maximum number of rounds of a duel.")] = 40,
    device: options.Device = None,
    fleet: options.Fleet = False,
    url: options.Url = None,
    lane: Annotated[
        list[str] | None, typer.Option(help="With --fleet or --url: auto, cpu, gpu, or gpu.<model>. Repeatable.")
    ] = None,
    settings: options.SettingsTree = None,
    assignments: options.Assignments = None,
    markdown: Annotated[Path | None, typer.Option(metavar="FILE", help="Write a table for a pull request.")] = None,
    junit: Annotated[Path | None, typer.Option(metavar="FILE", help="Write JUnit's XML.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as one JSON line.")] = False,
) -> None:
    """Judge what a change does to a repository's operators: right at head, and not slower than base.

    Start in a clone. Exit with 1 if one is wrong, 6 if one is slower than allowed, and 3 if one could not be judged.
    """
    from kqueue.features.check import reports
    from kqueue.features.check.run import Check, sides
    from kqueue.trees import Clone

    on_fleet = options.on_fleet(fleet=fleet, url=url, device=device, lane=lane[0] if lane else None)
    if qualify and (device == "cpu" or "cpu" in (lane or ())):
        raise InvalidRequest("--qualify: the sanitizers need a GPU")
    tree = options.Timed(settings=settings, assignments=assignments).tree()
    clone = Clone(Path.cwd())
    for name, given in (("--base", base), ("--head", head)):
        if not given.strip():
            raise InvalidRequest(f"{name} is empty: name a branch or a commit")
        if not given.strip("0"):
            advice = "name the branch or commit to compare with, such as origin/main"
            raise InvalidRequest(f"{name} {given} is no revision, because a new branch has no earlier one: {advice}")
    revisions = clone.revision(base), clone.revision(head)
    if left := clone.uncommitted():
        shown = ", ".join(left[:_SHOWN]) + (" and more" if len(left) > _SHOWN else "")
        say(f"{len(left)} uncommitted {'changes are' if left[1:] else 'change is'} not judged: {shown}")
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kqueue-check-")))
        before, after = sides(clone, revisions, folder, config, operator)
        judges = _judges(stack, device, url, lane, on_fleet=on_fleet, qualify=qualify, quiet=as_json)
        judges["fight"] = partial(judges["fight"], within=within, rounds=rounds)
        plan = Check(before, after, settings=tree, timed=not no_timing, qualify=qualify, **judges)
        rows = _run(stack, plan, clone.changed(*revisions) if only_changed else None, quiet=as_json)
    if as_json:
        write_json(reports.record(*revisions, rows))
    else:
        timed = any(map(reports.speed, rows))
        names = ("result", "operator", *("speed of head",) * timed, "message")
        cells = [(row.state, row.name, *(reports.speed(row),) * timed, row.words) for row in rows]
        print_table(names, cells) if cells else None
        typer.echo(f"{revisions[1][:12]} against {revisions[0][:12]}: {reports.summary(rows)}")
    status = reports.status_of(rows)
    for path, text in ((markdown, reports.markdown), (junit, reports.junit)):
        try:
            None if path is None else path.write_text(text(*revisions, rows), encoding="utf-8")
        except OSError as error:
            say(f"{path} cannot be written: {error.strerror}")
            status = status or _UNWRITTEN
    if status:
        raise typer.Exit(status)


def _judges(
    stack: ExitStack,
    device: str | None,
    url: str | None,
    lanes: list[str] | None,
    *,
    on_fleet: bool,
    qualify: bool,
    quiet: bool,
) -> dict[str, Any]:
    """Return the fields of a check on who judges."""
    if not on_fleet:
        from kqueue.features.duel.duels import Match, duel
        from kqueue.judging import LocalJudge

        local = stack.enter_context(LocalJudge(device))
        if qualify and local.machine.device == "cpu":
            raise InvalidRequest("--qualify: the sanitizers need a GPU")
        if not quiet:
            say(where(local.machine))

        def fight(a: Request, b: Request, *, within: float, rounds: int) -> Duel:
            *_, end = duel(local.map, Match.of(a, b, within=within, most=rounds))
            return end

        return {"judge": local, "fight": fight, "environment": local.machine.environment}
    from kqueue.client import connect

    client = stack.enter_context(connect(url))
    if qualify and not lanes:
        lanes = _models(url)

    def judge(request: Request) -> Verdict:
        ticket = client.submit(request)
        try:
            return ticket.wait()
        except BaseException:
            ticket.cancel()
            raise

    batch = f"check-{uuid4().hex[:12]}"
    return {"judge": judge, "fight": client.duel, "lanes": tuple(lanes or ("auto",)), "batch": batch}


def _models(url: str | None) -> list[str]:
    """Return the lanes of all models of GPU that a fleet has now."""
    from kqueue.store import workers

    if url is not None:
        raise InvalidRequest("--qualify with --url: give a --lane for each model of GPU, or set KQUEUE_URL")
    with reading("check") as read:
        lanes = sorted(name for name in read(workers.live_lanes) if name.startswith("gpu."))
    if not lanes:
        raise InvalidRequest("--qualify: no GPU of the fleet is alive")
    return lanes


def _run(stack: ExitStack, plan: Check, changed: frozenset[str] | None, *, quiet: bool) -> list[Row]:
    """Judge all rows."""
    tasks = list(plan.tasks(changed))
    rows: list[Row] = []
    bar = stack.enter_context(make_bar(quiet=quiet))
    line = bar.add_task("judging", total=len(tasks))
    for task in tasks:
        rows.append(task())
        bar.update(line, advance=1, description=(done := f"{rows[-1].name}: {rows[-1].state}"))
        if not quiet and not sys.stderr.isatty():
            say(f"{len(rows)} of {len(tasks)}: {done}")
    return rows
