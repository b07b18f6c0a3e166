"""`kqueue probe`: the results of probes of the judge, and the resulting pauses."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Annotated, Final

import typer

from kqueue.cli import options
from kqueue.cli.connection import database
from kqueue.cli.render import Columns, emit, fields, first, table, text
from kqueue.errors import InvalidRequest
from kqueue.figures import age
from kqueue.states import Finding, ProbeKind

if TYPE_CHECKING:
    from kqueue.features.probes.fleet import Pause, Settled

group = typer.Typer(no_args_is_help=True, help="Show the results of probes of the judge, and the resulting pauses.")


@group.command("list")
def list_(
    limit: Annotated[
        int, typer.Option(min=1, max=100_000, help="Maximum number of probes. The latest are listed.")
    ] = 50,
    days: Annotated[float, typer.Option(min=0.01, max=3660, help="Age of the oldest listed probe in days.")] = 1.0,
    as_json: options.Json = False,
) -> None:
    """List the judged probes with their results."""
    from kqueue.features.probes import fleet

    with database("probe list") as engine:
        listed = first(fleet.listing(engine, since=datetime.now(UTC) - timedelta(days=days), limit=limit + 1), limit)
    emit(listed, table(_PROBE, empty="no probe was judged in that time"), as_json=as_json)


_PROBE: Final[Columns[Settled]] = {
    "probe": lambda one: str(one.evaluation_id)[:8],
    **fields("lane kind idea worker"),
    "judged": lambda one: one.judged_at and age(one.judged_at),
    "finding": lambda one: text(one.finding, "" if one.finding in (Finding.AGREED, Finding.VOID) else "bold red"),
    "result": lambda one: one.words,
}


@group.command()
def pauses(
    days: Annotated[
        float, typer.Option(min=0.01, max=3660, help="Age of the oldest listed ended pause in days.")
    ] = 30.0,
    as_json: options.Json = False,
) -> None:
    """List devices that were paused because of wrong verdicts on probes."""
    from kqueue.features.probes import fleet

    with database("probe pauses") as engine:
        listed = fleet.pauses(engine, since=datetime.now(UTC) - timedelta(days=days))
    emit(listed, table(_PAUSE, empty="nothing was paused in that time"), as_json=as_json)


_PAUSE: Final[Columns[Pause]] = {
    "pause": lambda one: one.id,
    "host": lambda one: one.host,
    "device": lambda one: one.device[:12],
    "since": lambda one: age(one.paused_at),
    "ended": lambda one: one.resumed_at and age(one.resumed_at),
    "verdicts in doubt": lambda one: one.doubted,
    "reason": lambda one: one.reason,
}


@group.command()
def doubted(pause: Annotated[int, typer.Argument(help="The pause's number.")], as_json: options.Json = False) -> None:
    """List the evaluations that a paused slot judged since its last correct probe, one id on each line."""
    from kqueue.features.probes import fleet

    with database("probe doubted") as engine:
        evaluations = fleet.suspect_verdicts(engine, pause)
    emit(evaluations, lambda ids: [*map(typer.echo, ids)], as_json=as_json, record=lambda one: {"evaluation_id": one})


@group.command()
def now(
    lane: Annotated[str, typer.Option(help="The lane on which it waits.")],
    kind: Annotated[str | None, typer.Option(metavar="KIND", help=f"{', '.join(ProbeKind)}. Default: any.")] = None,
    as_json: options.Json = False,
) -> None:
    """Submit a probe now, for example after a judge was repaired."""
    from kqueue.config import LANE
    from kqueue.features.probes import fleet

    if kind is not None and kind not in list(ProbeKind):
        raise InvalidRequest(f"--kind {kind}: use one of {', '.join(ProbeKind)}")
    if not LANE.fullmatch(lane):
        raise InvalidRequest(f"--lane {lane}: use cpu, gpu, or gpu.<model> such as gpu.h200")
    with database("probe now") as engine:
        identity = fleet.submit(engine, lane, None if kind is None else ProbeKind(kind))
    words = f"submitted {identity}. `kqueue probe list` shows its result"
    emit(words, typer.echo, as_json=as_json, record=lambda _: {"evaluation_id": identity})


@group.command()
def resume(host: Annotated[str, typer.Argument(help="The host's name.")], as_json: options.Json = False) -> None:
    """Return a host's paused CPU slots to service. For GPUs use `kqueue gpu resume`."""
    from kqueue.features.probes import fleet

    with database("probe resume") as engine:
        ended = fleet.resume(engine, host)
    words = f"the CPU slots of {host} {'are in service' if ended else 'were not paused by probes'}"
    emit(words, typer.echo, as_json=as_json, record=lambda _: {"host": host, "resumed": ended})
