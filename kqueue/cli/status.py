"""`kqueue status`: the queue, the workers, paused devices, and the last hour."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any, Final

import typer

from kqueue.categories import Category
from kqueue.cli import options
from kqueue.cli.connection import database
from kqueue.cli.probe import last_day, print_last_day
from kqueue.cli.render import Columns, age, category_text, console, emit, gib, print_table, step, table, text
from kqueue.errors import KqueueError
from kqueue.states import EvaluationState

if TYPE_CHECKING:
    from kqueue.store.gpus import GpuStatus
    from kqueue.store.reports import Crowd
    from kqueue.store.workers import LiveWorker

#: Maximum number of producers that are shown.
_CROWDS: Final = 20


@dataclass(frozen=True, slots=True)
class _Status:
    """The state of a fleet.

    Attributes:
        lanes: numbers of evaluations in each state and of workers, by lane.
        gpu_memory: booked memory and waiting processes of the GPUs with live workers.
        last_hour: numbers of outcomes, by category and by blame.
    """

    lanes: Mapping[str, Mapping[str, int]]
    queued: Sequence[Crowd]
    workers: Sequence[LiveWorker]
    gpus_not_serving: Sequence[GpuStatus]
    gpu_memory: Sequence[Mapping[str, Any]]
    probes: dict[str, Any]
    last_hour: Mapping[str, Mapping[str, int]]
    broker: Mapping[str, Any]


def status(
    as_json: options.Json = False,
) -> None:
    """Show the queue, the workers, paused devices, and the last hour.

    Exits with 3 if Redis cannot be reached.
    """
    from kqueue.config import load

    config = load()
    config.require_database()  # report it before slow imports
    from kqueue import broker
    from kqueue.store import gpus, reports, workers

    with database("status") as engine:
        lanes: dict[str, dict[str, int]] = {
            name: {**states, "workers": 0} for name, states in reports.states(engine).items()
        }
        live = workers.live(engine, within_s=config.live_s)
        gpus_known = gpus.find(engine)
        outcomes = reports.outcomes(engine, since=datetime.now(UTC) - timedelta(hours=1))
        crowds = reports.crowds(engine)
        probes = last_day(engine, config)
    for worker in live:
        for lane in worker.lanes:
            lanes.setdefault(lane, {**dict.fromkeys(EvaluationState, 0), "workers": 0})["workers"] += 1
    blames: dict[str, int] = {}
    for category, count in outcomes.items():
        blames[category.blame] = blames.get(category.blame, 0) + count
    failure = None
    try:
        broker.check(broker.make_app(config))
    except KqueueError as error:
        failure = str(error)
    view = _Status(
        lanes,
        crowds,
        live,
        [gpu for gpu in gpus_known if gpu.paused is not None],
        list(_gpu_memory(gpus_known, live)),
        probes,
        {"by_blame": blames, "by_category": {str(name): count for name, count in outcomes.items()}},
        {"reachable": failure is None, "error": failure},
    )
    emit(view, _print, as_json=as_json)
    if failure is not None:
        raise typer.Exit(3)


def _gpu_memory(statuses: Iterable[GpuStatus], live: Sequence[LiveWorker]) -> Iterator[dict[str, Any]]:
    """Yield the booked memory of each GPU, and its waiting processes. GPUs without a live worker are omitted."""
    devices = {worker.device for worker in live}
    busy = {worker.name: worker.busy_with for worker in live}
    for gpu in statuses:
        if gpu.memory is not None and gpu.uuid in devices:
            record = {"uuid": gpu.uuid, "host": gpu.host, "index": gpu.index, **asdict(gpu.memory)}
            record["waiting"] = [
                {**asdict(one), "evaluation": busy.get(f"{one.label}@{gpu.host}")} for one in gpu.memory.waiting
            ]
            yield record


_CROWD: Final[Columns[Crowd]] = {
    "lane": lambda crowd: crowd.lane,
    "priority": lambda crowd: crowd.priority,
    "producer": lambda crowd: crowd.producer or "-",
    "queued": lambda crowd: crowd.queued,
    "oldest": lambda crowd: f"for {age(crowd.since)}",
}
_WORKER: Final[Columns[LiveWorker]] = {
    "worker": lambda worker: worker.name,
    "device": lambda worker: worker.device,
    "lanes": lambda worker: " ".join(worker.lanes),
    "busy with": lambda worker: worker.busy_with or "idle",
    "since": lambda worker: f"for {age(worker.busy_since)}" if worker.busy_since else "",
    "step": lambda worker: step(worker.step),
    "paused": lambda worker: text(worker.paused or "", "yellow"),
}
_KEPT_WAITING: Final[Columns[LiveWorker]] = {
    "worker": lambda worker: worker.name,
    "device": lambda worker: worker.device,
    "evaluation": lambda worker: worker.busy_with,
    "since": lambda worker: f"for {age(worker.waits_since)}" if worker.waits_since else "",
    "held by": lambda worker: worker.waits_for,
}
#: Columns of a GPU of `gpu_memory` with one of its waiting processes.
_WAITING: Final[Columns[tuple[Mapping[str, Any], Mapping[str, Any]]]] = {
    "gpu": lambda row: f"{row[0]['index']} of {row[0]['host']}",
    "booked GiB": lambda row: f"{gib(row[0]['booked_bytes'])} of {gib(row[0]['capacity_bytes'])}",
    "waiting": lambda row: row[1]["label"],
    "evaluation": lambda row: row[1]["evaluation"],
    "for GiB": lambda row: gib(row[1]["wanted_bytes"]),
    "since": lambda row: f"for {age(row[1]['since'])}",
}


_OUTCOME: Final[Columns[tuple[str, int]]] = {
    "outcome": lambda row: category_text(row[0], Category(row[0]).blame),
    "blame": lambda row: Category(row[0]).blame,
    "n": lambda row: row[1],
}


def _print(view: _Status) -> None:
    columns = (*EvaluationState, "workers")
    if view.lanes:
        rows = ((name, *(view.lanes[name][column] for column in columns)) for name in sorted(view.lanes))
        print_table(("lane", *columns), rows, title="queue")
    else:
        console().print("queue: empty, and no worker is alive")
    table(_CROWD, title="queued by producer")(view.queued[:_CROWDS])
    if len(view.queued) > _CROWDS:
        console().print(f"and {len(view.queued) - _CROWDS} more: --json has all of them")
    table(_WORKER, title="workers")(view.workers)
    table(_KEPT_WAITING, title="waiting for a device")(one for one in view.workers if one.waits_for is not None)
    table(_WAITING, title="waiting for GPU memory")((gpu, one) for gpu in view.gpu_memory for one in gpu["waiting"])
    for gpu in view.gpus_not_serving:
        message = f"GPU {gpu.index} of {gpu.host} is out of service since {age(gpu.since)}: {gpu.state}"
        console().print(text(message + (f", {gpu.reason}" if gpu.reason else ""), "yellow"))
    print_last_day(view.probes)
    table(_OUTCOME, title="the last hour")(view.last_hour["by_category"].items())
    if view.broker["reachable"]:
        console().print("redis: reachable")
    else:
        console().print(text(f"redis: {view.broker['error']}", "bold red"))
