"""`kqueue gpu`: the GPUs of a fleet."""

from __future__ import annotations

import socket
import time
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from kqueue.cli import options
from kqueue.cli.connection import database, reading
from kqueue.cli.render import Columns, emit, table, text
from kqueue.figures import age
from kqueue.states import GpuState

if TYPE_CHECKING:
    from kqueue.store.gpus import GpuStatus

_GIB: Final = 1 << 30
gpus = typer.Typer(no_args_is_help=True, help="List GPUs, take one out of service, and return it to service.")
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
    "state": lambda gpu: text(
        ": ".join(filter(None, ("testing" if gpu.state == GpuState.SERVING and gpu.paused else gpu.state, gpu.reason))),
        "" if gpu.paused is None else "yellow",
    ),
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
