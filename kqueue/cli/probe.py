"""`kqueue probe`: the results of probes of the fleet's judge, and the resulting pauses."""

from __future__ import annotations

from dataclasses import asdict
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kqueue.cli.connection import database
from kqueue.cli.render import age, console, first, print_table, text, write_json
from kqueue.errors import InvalidRequest
from kqueue.states import Finding, ProbeKind

if TYPE_CHECKING:
    from sqlalchemy import Engine

    from kqueue.config import Config

_Json = Annotated[bool, typer.Option("--json", help="Print one JSON record per line.")]


def register(app: typer.Typer) -> None:
    group = typer.Typer(no_args_is_help=True, help="Show the results of probes of the judge, and the resulting pauses.")
    group.command("list")(list_probes)
    group.command()(pauses)
    group.command()(doubted)
    group.command()(now)
    group.command()(resume)
    app.add_typer(group, name="probe", cls=app.info.cls)


def last_day(engine: Engine, config: Config) -> dict[str, Any]:
    """Return the record of the last day for `status`."""
    from kqueue.store import probes

    record = probes.record(engine, live_s=config.live_s)
    return asdict(record) | {
        "cheats_accepted": record.cheats_accepted,
        "honest_refused": record.honest_refused,
        "wrong": record.wrong,
    }


def print_last_day(record: dict[str, Any]) -> None:
    """Print the record of :func:`last_day`. Print nothing if no probe was judged and nothing is paused."""
    if record["judged"]:
        honest = record["honest"] + record["spins"]
        message = (
            f"the judge: {record['judged']} probes in the last day: {record['cheats_accepted']} of {record['cheats']} "
            f"cheats accepted, {record['honest_refused']} of {honest} honest kernels refused"
        )
        message += "".join(
            f", the {one['resource']} clock {one['bias']:+.1%} (at worst {one['worst']:+.1%}, "
            f"{one['spins']} known-duration kernels)"
            for one in record["clocks"]
        )
        console().print(text(message, "yellow" if record["wrong"] else ""))
    for one in record["pauses"]:
        message = (
            f"paused by probes since {age(one['paused_at'])}: {one['device']} of {one['host']}: {one['reason']}. "
            f"{one['doubted']} verdicts are in doubt (`kqueue probe doubted {one['id']}`)"
        )
        console().print(text(message, "bold red"))


def list_probes(
    limit: Annotated[
        int, typer.Option(min=1, max=100_000, help="Maximum number of probes. The latest are listed.")
    ] = 50,
    days: Annotated[float, typer.Option(min=0.01, max=3660, help="Age of the oldest listed probe in days.")] = 1.0,
    as_json: _Json = False,
) -> None:
    """List the judged probes with their results."""
    from kqueue.store import probes

    with database("probe list") as engine:
        since = datetime.now(UTC) - timedelta(days=days)
        listed = first(probes.listing(engine, since=since, limit=limit + 1), limit)
    if as_json:
        for one in listed:
            write_json(asdict(one))
        return
    if not listed:
        typer.echo("no probe was judged in that time")
        return
    print_table(
        ("probe", "lane", "kind", "idea", "worker", "judged", "finding", "result"),
        (
            (
                str(one.evaluation_id)[:8],
                one.lane,
                one.kind,
                one.idea,
                one.worker or "",
                age(one.judged_at) if one.judged_at else "",
                text(one.finding, "" if one.finding in (Finding.AGREED, Finding.VOID) else "bold red"),
                one.words,
            )
            for one in listed
        ),
    )


def pauses(
    days: Annotated[
        float, typer.Option(min=0.01, max=3660, help="Age of the oldest listed ended pause in days.")
    ] = 30.0,
    as_json: _Json = False,
) -> None:
    """List devices that were paused because of wrong verdicts on probes."""
    from kqueue.store import probes

    with database("probe pauses") as engine:
        listed = probes.pauses(engine, since=datetime.now(UTC) - timedelta(days=days))
    if as_json:
        for one in listed:
            write_json(asdict(one))
        return
    if not listed:
        typer.echo("nothing was paused in that time")
        return
    print_table(
        ("pause", "host", "device", "since", "ended", "verdicts in doubt", "reason"),
        (
            (
                one.id,
                one.host,
                one.device[:12],
                age(one.paused_at),
                age(one.resumed_at) if one.resumed_at else "",
                one.doubted,
                one.reason,
            )
            for one in listed
        ),
    )


def doubted(pause: Annotated[int, typer.Argument(help="The pause's number.")], as_json: _Json = False) -> None:
    """List the evaluations that a paused slot judged since its last correct probe, one id on each line."""
    from kqueue.store import probes

    with database("probe doubted") as engine:
        evaluations = probes.suspect_verdicts(engine, pause)
    for one in evaluations:
        if as_json:
            write_json({"evaluation_id": one})
        else:
            typer.echo(str(one))


def now(
    lane: Annotated[str, typer.Option(help="The lane on which it waits.")],
    kind: Annotated[
        str | None,
        typer.Option(metavar="KIND", help="honest, cheat or spin (a kernel of known duration). Default: any."),
    ] = None,
    as_json: _Json = False,
) -> None:
    """Submit a probe now, for example after a judge was repaired."""
    from kqueue.config import LANE
    from kqueue.store import probes

    if kind is not None and kind not in list(ProbeKind):
        raise InvalidRequest(f"--kind {kind}: use one of {', '.join(ProbeKind)}")
    if not LANE.fullmatch(lane):
        raise InvalidRequest(f"--lane {lane}: use cpu, gpu, or gpu.<model> such as gpu.h200")
    with database("probe now") as engine:
        identity = probes.submit(engine, lane, None if kind is None else ProbeKind(kind))
    if as_json:
        write_json({"evaluation_id": identity})
    else:
        typer.echo(f"submitted {identity}. `kqueue probe list` shows its result")


def resume(host: Annotated[str, typer.Argument(help="The host's name.")], as_json: _Json = False) -> None:
    """Return a host's paused CPU slots to service. For GPUs use `kqueue gpu resume`."""
    from kqueue.store import probes

    with database("probe resume") as engine:
        ended = probes.resume(engine, host)
    if as_json:
        write_json({"host": host, "resumed": ended})
    else:
        typer.echo(
            f"the CPU slots of {host} are in service" if ended else f"the CPU slots of {host} were not paused by probes"
        )
