"""`kqueue status` and `kqueue top`: the queue, the workers and the last outcomes, once or live."""

from __future__ import annotations

import os
import select
import sys
import threading
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout, suppress
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime, timedelta
from io import StringIO
from itertools import chain
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from kqueue.categories import Blame, Category
from kqueue.cli import options
from kqueue.cli.connection import Reader, reading
from kqueue.cli.render import Columns, category_text, console, emit, fields, print_table, table, text
from kqueue.errors import ConfigError, KqueueError, SchemaMismatch
from kqueue.figures import age, brief, gib, step
from kqueue.states import EvaluationState

if TYPE_CHECKING:
    from kqueue.store.gpus import GpuStatus
    from kqueue.store.reports import Crowd, Listed
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
        broker: whether Redis can be reached. None over HTTP, where the server alone needs it.
    """

    lanes: Mapping[str, Mapping[str, int]]
    queued: Sequence[Crowd]
    workers: Sequence[LiveWorker]
    gpus_not_serving: Sequence[GpuStatus]
    gpu_memory: Sequence[Mapping[str, Any]]
    records: Mapping[str, Any]
    last_hour: Mapping[str, Mapping[str, int]]
    broker: Mapping[str, Any] | None = None


def status(as_json: options.Json = False) -> None:
    """Show the queue, the workers, paused devices, and the last hour.

    Exits with 3 if Redis cannot be reached.
    """
    from kqueue.config import load, names_server

    over_http, failure = names_server(), None
    from kqueue.store import reports

    with reading("status") as read:
        view = _look(read, reports.states, EvaluationState)
    if not over_http:
        from kqueue import broker

        try:
            broker.check(broker.make_app(load()))
        except KqueueError as error:
            failure = str(error)
        view = replace(view, broker={"reachable": failure is None, "error": failure})
    emit(view, _print, as_json=as_json, record=lambda one: (fields := asdict(one)) | fields.pop("records"))
    if failure is not None:
        raise typer.Exit(3)


def _look(read: Reader, counts: Callable[..., Any], states: Iterable[EvaluationState]) -> _Status:
    """Return the state of a fleet. ``counts`` is a report on the numbers of evaluations in ``states`` by lane."""
    from kqueue.store import reports

    lanes: dict[str, dict[str, int]] = {name: {**counted, "workers": 0} for name, counted in read(counts).items()}
    fleet = read(reports.fleet)
    outcomes = read(reports.outcomes, since=datetime.now(UTC) - timedelta(hours=1))
    for worker in fleet.workers:
        for lane in worker.lanes:
            lanes.setdefault(lane, {**dict.fromkeys(states, 0), "workers": 0})["workers"] += 1
    blames: dict[str, int] = {}
    for category, count in outcomes.items():
        blames[category.blame] = blames.get(category.blame, 0) + count
    return _Status(
        lanes,
        read(reports.crowds),
        fleet.workers,
        [gpu for gpu in fleet.gpus if gpu.paused is not None],
        list(_gpu_memory(fleet.gpus, fleet.workers)),
        fleet.records,
        {"by_blame": blames, "by_category": {str(name): count for name, count in outcomes.items()}},
    )


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
    **fields("lane priority"),
    "producer": lambda crowd: crowd.producer or "-",
    "queued": lambda crowd: crowd.queued,
    "oldest": lambda crowd: f"for {age(crowd.since)}",
}
_WORKER: Final[Columns[LiveWorker]] = {
    "worker": lambda worker: worker.name,
    "device": lambda worker: worker.device,
    "lanes": lambda worker: " ".join(worker.lanes),
    "busy with": lambda worker: worker.busy_with or ("another owner's" if worker.busy_since else "idle"),
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
    if view.lanes:
        rows = ((name, *view.lanes[name].values()) for name in sorted(view.lanes))
        print_table(("lane", *next(iter(view.lanes.values()))), rows, title="queue")
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
    for line, style in chain.from_iterable(record.lines() for record in view.records.values()):
        console().print(text(line, style))
    table(_OUTCOME, title="the last hour")(view.last_hour["by_category"].items())
    if view.broker is not None and view.broker["reachable"]:
        console().print("redis: reachable")
    elif view.broker is not None:
        console().print(text(f"redis: {view.broker['error']}", "bold red"))


#: Seconds between two polls of the keyboard.
_KEYS_S: Final = 0.2
#: Ratio of the minimum pause between two queries to the duration of a query.
_PAUSE_RATIO: Final = 4
#: Maximum number of shown failures of the last hour for each blamed party.
_FAILURES: Final = 3
_BLAMED: Final = (Blame.FLEET, Blame.PROBLEM, Blame.CANDIDATE)
_QUIT: Final = frozenset(b"qQ\x03")


def top(
    once: Annotated[
        bool, typer.Option("--once", help="Print one view and exit, which is also done without a terminal.")
    ] = False,
    every: Annotated[float, typer.Option(metavar="S", min=0.2, max=3600, help="Seconds between two updates.")] = 2.0,
) -> None:
    """Show lanes, workers, throughput and the last failures, live. Press q to exit."""
    from kqueue.config import load, names_server

    if not names_server():
        load().require_database()  # report it at once, and not as a temporary error
    if once or not (sys.stdin.isatty() and sys.stdout.isatty()):
        with reading("top") as read:
            _frame(_query(read), None)
        return
    from rich.live import Live
    from rich.text import Text

    shown = console()
    poller = _Poller(every)
    last: tuple[Any, ...] = ()
    try:
        # Ctrl-C exits like q. Live restores the screen, and _keys the terminal.
        with (
            suppress(KeyboardInterrupt),
            _keys() as pressed,
            Live(text("asking Postgres"), console=shown, screen=True, auto_refresh=False) as live,
        ):
            while not pressed():
                # Ages are in whole seconds. An unchanged view is not drawn again.
                now = (poller.view, poller.trouble, shown.size, int(time.monotonic()))
                if now != last:
                    with redirect_stdout(_Held()) as held:
                        _frame(poller.view, poller.trouble)
                    live.update(Text.from_ansi(held.getvalue()), refresh=True)
                    last = now
    finally:
        poller.over.set()


# Polling -----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _View:
    """The state of the fleet at one time, with the number of outcomes of the last minute, and the last failures."""

    at: datetime
    fleet: _Status
    minute: int
    failures: list[Listed]


def _query(read: Reader) -> _View:
    from kqueue.store import reports

    now = datetime.now(UTC)
    hour = now - timedelta(hours=1)
    return _View(
        at=now,
        fleet=_look(read, reports.backlog, (EvaluationState.QUEUED, EvaluationState.RUNNING)),
        minute=sum(read(reports.outcomes, since=now - timedelta(minutes=1)).values()),
        failures=[one for blame in _BLAMED for one in read(reports.results, since=hour, limit=_FAILURES, blame=blame)],
    )


class _Poller:
    """A poller of the database in its own thread, so that the user can exit while the database does not answer."""

    def __init__(self, every_s: float) -> None:
        self._every_s = every_s
        self.over = threading.Event()
        self.view: _View | None = None
        self.trouble: str | None = None
        """Reason why there is no newer view, or None."""
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        while not self.over.is_set():
            try:
                # The schema can have changed when the database answers again.
                with reading("top") as read:
                    while not self.over.is_set():
                        began = time.monotonic()
                        self.view, self.trouble = _query(read), None
                        # A slow database is queried less often.
                        self.over.wait(max(self._every_s, _PAUSE_RATIO * (time.monotonic() - began)))
            except (ConfigError, SchemaMismatch) as error:
                self.trouble = str(error)
            except KqueueError as error:
                self.trouble = f"{error} (trying again)"
            except Exception as error:  # noqa: BLE001 it is shown
                self.trouble = f"the query failed: {type(error).__name__}: {error} (trying again)"
            self.over.wait(self._every_s)


# Showing -----------------------------------------------------------------------------------------------


class _Held(StringIO):
    """Output to a terminal that is kept."""

    def isatty(self) -> bool:
        return True


@contextmanager
def _keys() -> Generator[Any]:
    """Yield a function that polls the keyboard. It returns True after a key to exit, or if the terminal is gone."""
    import termios
    import tty

    descriptor = sys.stdin.fileno()
    before = termios.tcgetattr(descriptor)

    def pressed() -> bool:
        if not select.select([descriptor], [], [], _KEYS_S)[0]:
            return False
        try:
            keys = os.read(descriptor, 64)
        except OSError:
            return True
        return not keys or bool(_QUIT & set(keys))

    try:
        tty.setcbreak(descriptor)
        yield pressed
    finally:
        with suppress(termios.error):
            termios.tcsetattr(descriptor, termios.TCSADRAIN, before)


def _frame(view: _View | None, trouble: str | None) -> None:
    """Print a view."""
    if trouble is not None:
        console().print(text(trouble, "bold red"))
    if view is None:
        console().print(text("no data yet. Press q to exit", "dim"))
        return
    live, hour = view.fleet.workers, view.fleet.last_hour
    slots = sum(worker.paused is None or worker.busy_since is not None for worker in live)
    parts = [
        f"{view.at:%H:%M:%S}Z",
        f"{sum(worker.busy_since is not None for worker in live)} of {slots} slots busy",
        f"{view.minute} ended in a minute",
        f"{sum(hour['by_category'].values())} in an hour, {hour['by_blame'].get(Blame.NONE, 0)} passed",
    ]
    console().print(text(" | ".join(parts), "bold"))
    _print(replace(view.fleet, last_hour={"by_category": {}}))
    table(_FAILURE, title="last failures")(view.failures)


_FAILURE: Final[Columns[Listed]] = {
    "blame": lambda one: one.blame,
    "ago": lambda one: one.finished_at and age(one.finished_at),
    "category": lambda one: category_text(str(one.category), str(one.blame)),
    "id": lambda one: str(one.evaluation_id)[:8],
    "kernel": lambda one: one.kernel_label or one.kernel_hash[:12],
    "message": lambda one: brief(one.message),
}
