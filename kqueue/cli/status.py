"""`kqueue status` and `kqueue top`: the queue, the workers and the last outcomes, once or live."""

from __future__ import annotations

import os
import select
import sys
import threading
import time
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from datetime import UTC, datetime, timedelta
from itertools import chain
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from kqueue.categories import Blame, Category
from kqueue.cli import options
from kqueue.cli.connection import Reader, reading
from kqueue.cli.render import Columns, category_text, console, emit, fields, print_table, table, text
from kqueue.errors import ConfigError, DatabaseUnavailable, KqueueError, SchemaMismatch
from kqueue.figures import age, brief, gib, step
from kqueue.states import EvaluationState

if TYPE_CHECKING:
    from rich.console import Group
    from rich.table import Table

    from kqueue.categories import Category
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
    broker: Mapping[str, Any] | None


def status(
    as_json: options.Json = False,
) -> None:
    """Show the queue, the workers, paused devices, and the last hour.

    Exits with 3 if Redis cannot be reached.
    """
    from kqueue.config import load, names_server

    config, over_http = load(), names_server()
    from kqueue import broker
    from kqueue.store import reports

    with reading("status") as read:
        lanes: dict[str, dict[str, int]] = {
            name: {**states, "workers": 0} for name, states in read(reports.states).items()
        }
        fleet = read(reports.fleet)
        outcomes = read(reports.outcomes, since=datetime.now(UTC) - timedelta(hours=1))
        crowds = read(reports.crowds)
    for worker in fleet.workers:
        for lane in worker.lanes:
            lanes.setdefault(lane, {**dict.fromkeys(EvaluationState, 0), "workers": 0})["workers"] += 1
    blames: dict[str, int] = {}
    for category, count in outcomes.items():
        blames[category.blame] = blames.get(category.blame, 0) + count
    failure = None
    try:
        if not over_http:
            broker.check(broker.make_app(config))
    except KqueueError as error:
        failure = str(error)
    view = _Status(
        lanes,
        crowds,
        fleet.workers,
        [gpu for gpu in fleet.gpus if gpu.paused is not None],
        list(_gpu_memory(fleet.gpus, fleet.workers)),
        fleet.records,
        {"by_blame": blames, "by_category": {str(name): count for name, count in outcomes.items()}},
        None if over_http else {"reachable": failure is None, "error": failure},
    )
    emit(view, _print, as_json=as_json, record=lambda one: (fields := asdict(one)) | fields.pop("records"))
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
#: Columns of a terminal below which lanes and labels, or also devices, are omitted.
_WIDE: Final = 100
_NARROW: Final = 60
#: Maximum characters of a cell. Only the last column can be longer, if there is room.
_CELL: Final = 28


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
            shown = console()
            shown.print(_frame(_query(read), None, shown.width))
        return
    _show(every)


# Polling -----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _View:
    """The state of the fleet at one time, with outcomes of the last minute and hour, and the last failures."""

    at: datetime
    backlog: dict[str, dict[EvaluationState, int]]
    crowds: list[Crowd]
    live: list[LiveWorker]
    gpus: list[GpuStatus]
    minute: dict[Category, int]
    hour: dict[Category, int]
    failures: list[Listed]


def _query(read: Reader) -> _View:
    from kqueue.store import reports

    now = datetime.now(UTC)
    hour = now - timedelta(hours=1)
    fleet = read(reports.fleet)
    return _View(
        at=now,
        backlog=read(reports.backlog),
        crowds=read(reports.crowds),
        live=fleet.workers,
        gpus=fleet.gpus,
        minute=read(reports.outcomes, since=now - timedelta(minutes=1)),
        hour=read(reports.outcomes, since=hour),
        failures=[one for blame in _BLAMED for one in read(reports.results, since=hour, limit=_FAILURES, blame=blame)],
    )


class _Poller:
    """A poller of the database in its own thread, so that the user can exit while the database does not answer."""

    def __init__(self, every_s: float) -> None:
        self._every_s = every_s
        self._over = threading.Event()
        self.view: _View | None = None
        self.trouble: str | None = None
        """Reason why there is no newer view, or None."""
        threading.Thread(target=self._run, daemon=True).start()

    def stop(self) -> None:
        """Stop polling."""
        self._over.set()

    def _run(self) -> None:
        while not self._over.is_set():
            # The schema can have changed when the database answers again.
            with suppress(KqueueError), self._reported_errors(), reading("top") as read:
                while not self._over.is_set():
                    began = time.monotonic()
                    self.view = _query(read)
                    self.trouble = None
                    # A slow database is queried less often.
                    self._over.wait(max(self._every_s, _PAUSE_RATIO * (time.monotonic() - began)))
            self._over.wait(self._every_s)

    @contextmanager
    def _reported_errors(self) -> Generator[None]:
        try:
            yield
        except (ConfigError, SchemaMismatch) as error:
            self.trouble = str(error)
            raise
        except KqueueError as error:
            self.trouble = f"{error} (trying again)"
            raise
        except Exception as error:
            self.trouble = f"the query failed: {type(error).__name__}: {error} (trying again)"
            raise DatabaseUnavailable(self.trouble) from error


# Showing -----------------------------------------------------------------------------------------------


def _show(every: float) -> None:
    """Show views on the terminal until the user exits."""
    from rich.live import Live

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
                    live.update(_frame(poller.view, poller.trouble, shown.width), refresh=True)
                    last = now
    finally:
        poller.stop()


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


def _frame(view: _View | None, trouble: str | None, width: int) -> Group:
    """Return a view for a terminal of this number of columns."""
    from rich.console import Group

    parts: list[Any] = []
    if trouble is not None:
        parts.append(text(trouble, "bold red"))
    if view is None:
        return Group(*parts, text("no data yet. Press q to exit", "dim"))
    parts.append(_head(view))
    parts += [text(""), _lanes(view), text(""), _workers(view, width)]
    if view.failures:
        parts += [text(""), _failures(view.failures, wide=width >= _WIDE)]
    return Group(*parts)


def _head(view: _View) -> Any:
    ended = sum(view.hour.values())
    passed = sum(number for category, number in view.hour.items() if category.blame is Blame.NONE)
    slots = sum(worker.paused is None or worker.busy_since is not None for worker in view.live)
    busy = sum(worker.busy_since is not None for worker in view.live)
    parts = [
        f"{view.at:%H:%M:%S}Z",
        f"{busy} of {slots} slots busy",
        f"{sum(view.minute.values())} ended in a minute",
        f"{ended} in an hour, {passed} passed",
    ]
    return text(" | ".join(parts), "bold")


def _lanes(view: _View) -> Table:
    oldest: dict[str, datetime] = {}
    for crowd in view.crowds:
        oldest[crowd.lane] = min(crowd.since, oldest.get(crowd.lane, crowd.since))
    slots: dict[str, int] = {}
    for worker in view.live:
        for lane in worker.lanes:
            slots[lane] = slots.get(lane, 0) + (worker.paused is None)
    rows: list[Sequence[object]] = []
    for lane in sorted(slots.keys() | view.backlog.keys()):
        counts = view.backlog.get(lane, {})
        queued = counts.get(EvaluationState.QUEUED, 0)
        serving = text(slots.get(lane, 0), "bold red" if queued and not slots.get(lane) else "")
        since = age(oldest[lane]) if lane in oldest else ""
        rows.append((lane, queued, counts.get(EvaluationState.RUNNING, 0), serving, since))
    return _table("lanes", ("lane", "queued", "running", "slots", "oldest waits"), rows, right=(1, 2, 3))


def _workers(view: _View, width: int) -> Table:
    names = {gpu.uuid: gpu for gpu in view.gpus}
    rows: list[Sequence[object]] = []
    for worker in view.live:
        gpu = names.get(worker.device)
        device = worker.device if gpu is None else f"{gpu.index} {gpu.name}"
        state = doing = ""
        if worker.paused is not None:
            state = f"pauses: {worker.paused}"
        elif worker.waits_for is not None:
            state = f"waits for the device, which {worker.waits_for} has"
        elif gpu is not None and gpu.reason is not None:
            state = f"{gpu.state}: {gpu.reason}"
        else:
            doing = step(worker.step)
        other = "another owner's" if worker.busy_since else "idle"
        busy = str(worker.busy_with)[:8] if worker.busy_with else text(other, "dim")
        since = age(worker.busy_since) if worker.busy_since else ""
        row: list[object] = [worker.name, busy, since]
        if width >= _NARROW:
            row.append(device)
        if width >= _WIDE:
            row.append(" ".join(worker.lanes))
        rows.append((*row, text(state, "yellow") if state else text(doing, "dim")))
    columns = ("slot", "runs", "for", *(["device"] if width >= _NARROW else []), *(["lanes"] if width >= _WIDE else []))
    return _table("slots", (*columns, ""), rows, right=(2,), empty="no worker is alive")


def _failures(listed: Iterable[Listed], *, wide: bool) -> Table:
    rows: list[Sequence[object]] = []
    for one in listed:
        assert one.finished_at is not None, "it is finished"
        assert one.blame is not None, "it is finished"
        kernel = one.kernel_label or one.kernel_hash[:12]
        row: list[object] = [one.blame, age(one.finished_at), category_text(str(one.category), one.blame)]
        if wide:
            row += [str(one.evaluation_id)[:8], kernel]
        rows.append((*row, brief(one.message)))
    columns = ("blame", "ago", "category", *(["id", "kernel"] if wide else []), "message")
    return _table("last failures", columns, rows, right=(1,))


def _table(
    title: str, columns: Sequence[str], rows: Iterable[Sequence[object]], *, right: Sequence[int] = (), empty: str = ""
) -> Table:
    """Return a table with one line for each row. Cells that do not fit are cut off."""
    from rich.table import Table
    from rich.text import Text

    cells = [[cell if isinstance(cell, Text) else text(cell) for cell in row] for row in rows]
    table = Table(
        box=None, title=text(title, "bold"), title_justify="left", header_style="dim", expand=True, pad_edge=False,
        padding=(0, 2, 0, 0), caption=None if cells or not empty else text(empty), caption_justify="left",
    )  # fmt: skip
    last = len(columns) - 1
    for index, column in enumerate(columns):
        for row in cells:
            if index != last:
                row[index].truncate(_CELL, overflow="ellipsis")
        table.add_column(
            column, justify="right" if index in right else "left", no_wrap=True, overflow="ellipsis",
            # The last column has the remaining width.
            ratio=1 if index == last else None,
            min_width=None if index == last else max((row[index].cell_len for row in cells), default=0),
        )  # fmt: skip
    for row in cells:
        table.add_row(*row)
    return table
