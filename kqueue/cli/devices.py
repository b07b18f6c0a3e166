"""`kqueue gpu`: the GPUs of a fleet. `kqueue probe`: the results of probes of its judge, and the resulting pauses."""

from __future__ import annotations

import socket
import time
from dataclasses import asdict
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from kqueue.cli import options
from kqueue.cli.connection import database, reading
from kqueue.cli.render import Columns, console, emit, first, table, text, write_json
from kqueue.errors import InvalidRequest
from kqueue.figures import age
from kqueue.states import Finding, GpuState, ProbeKind

if TYPE_CHECKING:
    from kqueue.store.gpus import GpuStatus
    from kqueue.store.probes import Pause, Record, Settled

_GIB: Final = 1 << 30
gpus = typer.Typer(no_args_is_help=True, help="List GPUs, take one out of service, and return it to service.")
probes = typer.Typer(no_args_is_help=True, help="Show the results of probes of the judge, and the resulting pauses.")
#: Seconds between two polls while waiting.
_POLL_S: Final = 0.5
_Named = Annotated[
    str, typer.Argument(metavar="GPU", help="The GPU's index on its host, or the first digits of its UUID.")
]
_Host = Annotated[str | None, typer.Option(help="The host that the index refers to. Default: this host.")]


@gpus.command("list")
def list_gpus(
    host: Annotated[str | None, typer.Option(help="List only this host's GPUs.")] = None, as_json: options.Json = False
) -> None:
    """List the GPUs of all hosts with state, reason, and last known health."""
    from kqueue.store import reports

    with reading("gpu list") as read:
        gpus_known = [gpu for gpu in read(reports.fleet).gpus if host in (None, gpu.host)]
    empty = "no fleet with a GPU is known" if host is None else f"no GPU of {host} is known"
    emit(gpus_known, table(_GPU, empty=empty), as_json=as_json)


def _state(gpu: GpuStatus) -> str:
    """Return a GPU's state with its reason in one line."""
    name = "testing" if gpu.state == GpuState.SERVING and gpu.paused else gpu.state
    return f"{name}: {gpu.reason}" if gpu.reason else name


def _memory(facts: dict[str, Any]) -> str:
    used, whole = facts.get("memory_used_bytes"), facts.get("memory_bytes")
    return "" if used is None or whole is None else f"{used / _GIB:.1f} of {whole / _GIB:.0f} GiB"


def _signs(facts: dict[str, Any]) -> str:
    """Return the health facts that matter to an operator, in one line."""
    ecc, rows = facts.get("uncorrected_ecc", {}), facts.get("remapped_rows", {})
    signs = [
        facts.get("error"),
        facts.get("test_hangs") and "a test hangs in the driver",
        ", ".join(reason for reason in facts.get("throttle", []) if reason != "GpuIdle"),
        ecc.get("aggregate") and f"ECC uncorrected {ecc['volatile']} ({ecc['aggregate']} over its lifetime)",
        (rows.get("corrected") or rows.get("uncorrected"))
        and f"rows remapped {rows['corrected']}+{rows['uncorrected']}",
        rows.get("pending") and "a row remap is pending",
        rows.get("failed") and "a row remap has failed",
        facts.get("retired_pages") and f"pages retired {facts['retired_pages']}",
        facts.get("xids") and "Xid " + " ".join(str(xid["xid"]) for xid in facts["xids"]),
    ]
    return ", ".join(sign for sign in signs if sign)


_GPU: Final[Columns[GpuStatus]] = {
    "gpu": lambda gpu: f"{gpu.index} {gpu.name}",
    "host": lambda gpu: gpu.host,
    "uuid": lambda gpu: gpu.uuid[:12],
    "state": lambda gpu: text(_state(gpu), "" if gpu.paused is None else "yellow"),
    "since": lambda gpu: age(gpu.since),
    "seen": lambda gpu: age(gpu.seen_at),
    "running": lambda gpu: " ".join(str(identity)[:8] for identity in gpu.running),
    "deg C": lambda gpu: gpu.facts.get("temperature_c"),
    "memory": lambda gpu: _memory(gpu.facts),
    "health": lambda gpu: _signs(gpu.facts),
}


@gpus.command()
def drain(
    gpu: _Named,
    host: _Host = None,
    reason: Annotated[str | None, typer.Option(help="The reason, shown by `kqueue gpu list`.")] = None,
    wait: Annotated[bool, typer.Option("--wait", help="Return once no evaluation runs on the GPU.")] = False,
) -> None:
    """Assign no more evaluations to a GPU until `kqueue gpu resume`.

    Running evaluations finish. The GPU stays drained if its fleet restarts.
    """
    from kqueue.store import gpus

    with database("gpu drain") as engine:
        named = gpus.resolve(engine, gpu, host=host or socket.gethostname())
        gpus.drain(engine, named.uuid, reason=reason)
        [now] = gpus.find(engine, uuids=[named.uuid])
        typer.echo(f"GPU {named.index} of {named.host} is drained, and {len(now.running)} evaluations run on it")
        while wait:
            time.sleep(_POLL_S)  # at least once, because a claim could have been in progress
            [now] = gpus.find(engine, uuids=[named.uuid])
            if not now.running:
                typer.echo("no evaluation runs on it")
                break


@gpus.command()
def resume(gpu: _Named, host: _Host = None) -> None:
    """Return a GPU to service. A GPU that was quarantined, or failed its last test, is tested first."""
    from kqueue.store import gpus

    with database("gpu resume") as engine:
        named = gpus.resolve(engine, gpu, host=host or socket.gethostname())
        gpus.resume(engine, named.uuid)
        [now] = gpus.find(engine, uuids=[named.uuid])
    result = "is in service again" if now.state == GpuState.SERVING else "is being tested, and serves if it passes"
    typer.echo(f"GPU {named.index} of {named.host} {result}")


_Json = Annotated[bool, typer.Option("--json", help="Print one JSON record per line.")]


def last_day(record: Record) -> dict[str, Any]:
    """Return the record of the last day as JSON for `status`."""
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


@probes.command("list")
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
    emit(listed, table(_PROBE, empty="no probe was judged in that time"), as_json=as_json)


_PROBE: Final[Columns[Settled]] = {
    "probe": lambda one: str(one.evaluation_id)[:8],
    "lane": lambda one: one.lane,
    "kind": lambda one: one.kind,
    "idea": lambda one: one.idea,
    "worker": lambda one: one.worker,
    "judged": lambda one: one.judged_at and age(one.judged_at),
    "finding": lambda one: text(one.finding, "" if one.finding in (Finding.AGREED, Finding.VOID) else "bold red"),
    "result": lambda one: one.words,
}


@probes.command()
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


@probes.command()
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


@probes.command()
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


@probes.command("resume")
def resume_host(host: Annotated[str, typer.Argument(help="The host's name.")], as_json: _Json = False) -> None:
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
