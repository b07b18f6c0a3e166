"""``GET /metrics``: the fleet's metrics for Prometheus.

Postgres has the data of all hosts, so one address serves the metrics of the whole fleet and workers open no ports.
Counters and histograms begin at zero when the server starts, and count each verdict once. Each server of a fleet counts
all verdicts. Gauges are read for each scrape.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from datetime import UTC, datetime, timedelta
from typing import Final
from uuid import UUID

from fastapi import APIRouter, Request
from prometheus_client import (
    CONTENT_TYPE_LATEST,
    CollectorRegistry,
    Counter,
    Histogram,
    disable_created_metrics,
    generate_latest,
)
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from sqlalchemy import Engine
from starlette.responses import Response

from kqueue.categories import Blame, Category
from kqueue.http.auth import Reader
from kqueue.http.devices import Fleet, View
from kqueue.http.gateway import Gateway
from kqueue.states import EvaluationState, GpuState, Writer
from kqueue.store import reports
from kqueue.store.engine import FLEET, acting
from kqueue.store.reports import Crowd, Ended
from kqueue.store.tokens import Scope

router: Final = APIRouter(tags=["metrics"])
# Prometheus sees a restart because the counter falls. The series of creation times would double the output.
disable_created_metrics()

#: Bounds in seconds of the histograms' buckets: from a claim to a long compilation.
_BOUNDS_S: Final = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600, 1800)
#: Maximum duration of the transaction that writes a verdict. A verdict that takes longer is not counted.
_LATE: Final = timedelta(seconds=60)
#: Number of ids, and of evaluations, that one query reads.
_MANY: Final = 20_000
_FEW: Final = 500
#: Number of lanes with a separate label. All further lanes share the label `other`.
_LANES: Final = 32
#: Number of owners with a separate label. All further owners share the label `other`. Each has five series.
_OWNERS: Final = 100
#: Prefix of the names of steps that have a device exclusively.
_EXCLUSIVE: Final = "alone_"
#: Gauges of GPUs: name, the fact that is its value, and help text.
_FACTS: Final = (
    ("gpu_temperature_celsius", "temperature_c", "Temperature."),
    ("gpu_sm_megahertz", "sm_mhz", "Clock of the multiprocessors."),
    ("gpu_utilisation_percent", "utilisation_percent", "Share of time in which some kernel ran."),
    ("gpu_memory_used_bytes", "memory_used_bytes", "Memory in use by all processes."),
    ("gpu_memory_bytes", "memory_bytes", "Total memory."),
)


class Metrics:
    """The metrics of one fleet. Scrapes run one at a time."""

    def __init__(self, gateway: Gateway, fleet: Fleet) -> None:
        self._gateway = gateway
        self._fleet = fleet
        self._turn = asyncio.Lock()
        self._since = datetime.max.replace(tzinfo=UTC)
        self._known: dict[UUID, datetime] = {}
        self._lanes: set[str] = set()
        self._owners: set[str] = set()
        self._load = CollectorRegistry()
        self._load.register(_Now(self))
        self._registry = CollectorRegistry()
        self.view: View | None = None
        self.crowds: list[Crowd] = []
        self.now = self._since

        def counter(name: str, words: str, *labels: str) -> Counter:
            return Counter(f"kqueue_{name}", words, labels, registry=self._registry)

        def histogram(name: str, words: str, *labels: str) -> Histogram:
            return Histogram(f"kqueue_{name}", words, labels, buckets=_BOUNDS_S, registry=self._registry)

        self._ended = counter("evaluations", "Evaluations that got their verdicts.", "lane", "category", "blame")
        self._reused = counter("reused", "Evaluations that got the verdict of an equal one.", "lane")
        self._retried = counter("failed_attempts", "Attempts that were followed by another one.", "category")
        self._recorded = counter("recorded", "Verdicts, by the part of the fleet that recorded them.", "by")
        self._builds = counter("builds", "Sources with extensions, by the process that compiled them.", "by")
        self._exclusive = counter("device_exclusive_seconds", "Seconds of exclusive use of devices.", "lane")
        self._owners_ended = counter("owner_evaluations", "Evaluations that got their verdicts.", "owner", "blame")
        self._owners_used = counter("owner_step_seconds", "Seconds of the steps of evaluations.", "owner")
        self._waited = histogram("wait_seconds", "Time from submission to the first attempt.", "lane", "priority")
        self._total = histogram("verdict_seconds", "Time from submission to the verdict.", "lane", "priority")
        self._steps = histogram("step_seconds", "Durations of an evaluation's steps.", "lane", "step")
        for category in Category:
            if category.blame is Blame.FLEET:
                self._retried.labels(category.value)
        for writer in Writer:
            self._recorded.labels(writer.value)

    async def text(self, *, work: bool) -> bytes:
        """Return the metrics in Prometheus' text format, or raise DatabaseUnavailable.

        Without ``work`` they describe the load and the health of the fleet only, and not the evaluations of owners.
        """
        async with self._turn:
            view = await self._fleet.get()
            # A million verdicts take minutes. A reader's thread keeps the event loop free for other requests.
            with acting(FLEET):
                return await self._gateway.read(self._text, view, work=work)

    def begin(self, engine: Engine) -> None:
        """Begin to count. Evaluations that have ended are not counted."""
        self._since = reports.now(engine) - _LATE
        for page in self._pages(engine):
            self._known |= dict(page)

    def _text(self, engine: Engine, view: View, *, work: bool) -> bytes:
        self.view, self.now, self.crowds = view, reports.now(engine), reports.crowds(engine)
        for lane in view.lanes:
            self._show(lane)
        for page in self._pages(engine):
            new = [(identity, at) for identity, at in page if identity not in self._known]
            for begin in range(0, len(new), _FEW):
                few = dict(new[begin : begin + _FEW])
                for one in reports.ended(engine, few):
                    self._add(one)
                self._known |= few
        self._since = max(self._since, self.now - _LATE)
        self._known = {identity: at for identity, at in self._known.items() if at > self._since}
        return generate_latest(self._load) + (generate_latest(self._registry) if work else b"")

    def _pages(self, engine: Engine) -> Iterator[list[tuple[UUID, datetime]]]:
        """Yield pages of ids of the evaluations that ended since the last scrape, and shortly before it."""
        after = self._since, UUID(int=0)
        while page := reports.finished(engine, after=after, limit=_MANY):
            yield page
            after = page[-1][1], page[-1][0]

    def _add(self, one: Ended) -> None:
        lane, priority, owner = self.lane(one.lane), one.priority.value, self._owner(one.owner)
        self._owners_ended.labels(owner, one.category.blame.value).inc()
        self._ended.labels(lane, one.category.value, one.category.blame.value).inc()
        self._recorded.labels(one.written_by.value).inc()
        self._total.labels(lane, priority).observe((one.finished_at - one.submitted_at).total_seconds())
        if one.begun_at is not None:
            self._waited.labels(lane, priority).observe(max((one.begun_at - one.submitted_at).total_seconds(), 0.0))
        if one.reused:
            self._reused.labels(lane).inc()
            return  # its attempts and steps belong to the evaluation whose verdict it got
        for category in one.earlier:
            self._retried.labels(category.value).inc()
        if one.built is not None:
            self._builds.labels(one.built).inc()
        self._owners_used.labels(owner).inc(sum(one.durations_s.values()))
        for step, seconds in one.durations_s.items():
            self._steps.labels(lane, step).observe(seconds)
            if step.startswith(_EXCLUSIVE):
                self._exclusive.labels(lane).inc(seconds)

    def lane(self, name: str) -> str:
        """Return a lane's label, or ``other``. Producers choose lanes' names, so the number of labels needs a limit."""
        if name in self._lanes or len(self._lanes) < _LANES:
            self._show(name)
            return name
        return "other"

    def _owner(self, name: str) -> str:
        """Return an owner's label, or ``other`` for all owners after the first ones, and show all its counters."""
        if name not in self._owners and len(self._owners) >= _OWNERS:
            return "other"
        self._owners.add(name)
        for blame in Blame:
            self._owners_ended.labels(name, blame.value)
        return name

    def _show(self, lane: str) -> None:
        """Set all counters of a new lane to 0, because Prometheus sees no increase in a counter that begins at 1."""
        if lane not in self._lanes:
            self._lanes.add(lane)
            for category in Category:
                self._ended.labels(lane, category.value, category.blame.value)


class _Now(Collector):
    """The gauges: the fleet's state at the moment of the scrape."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics

    def describe(self) -> Iterable[Metric]:
        """Return nothing, because gauges have no values before a scrape."""
        return ()

    def collect(self) -> Iterator[Metric]:
        """Yield the gauges from the state that :class:`Metrics` has just read."""
        view = self._metrics.view
        assert view is not None
        yield from self._queue(view)
        yield from self._workers(view)
        yield from _gpus(view)
        yield from (_gauge(*one) for record in view.records.values() for one in record.gauges())

    def _queue(self, view: View) -> Iterator[Metric]:
        queued: defaultdict[tuple[str, str], float] = defaultdict(float)
        oldest: defaultdict[tuple[str, str], float] = defaultdict(float)
        for crowd in self._metrics.crowds:
            where = self._metrics.lane(crowd.lane), crowd.priority.value
            queued[where] += crowd.queued
            oldest[where] = max(oldest[where], (self._metrics.now - crowd.since).total_seconds())
        running: defaultdict[tuple[str, ...], float] = defaultdict(float)
        for lane, counts in view.backlog.items():
            running[(self._metrics.lane(lane),)] += counts[EvaluationState.RUNNING]
        yield _gauge("queued", "Queued evaluations.", ("lane", "priority"), queued)
        yield _gauge("oldest_queued_seconds", "Waiting time of the oldest of them.", ("lane", "priority"), oldest)
        yield _gauge("running", "Running evaluations.", ("lane",), running)

    def _workers(self, view: View) -> Iterator[Metric]:
        slots: defaultdict[tuple[str, ...], float] = defaultdict(float)
        serving: dict[tuple[str, ...], float] = {(lane,): 0.0 for lane in view.lanes}
        for worker in view.workers:
            state = "paused" if worker.paused else "busy" if worker.busy_with else "idle"
            slots[worker.host, "cpu" if worker.device == "cpu" else "gpu", state] += 1
            for lane in worker.lanes if worker.paused is None else ():
                serving[(lane,)] += 1
        yield _gauge("slots", "Live workers, by state.", ("host", "device", "state"), slots)
        yield _gauge("serving", "Live workers that accept a lane's evaluations.", ("lane",), serving)


def _gpus(view: View) -> Iterator[Metric]:
    labels = ("host", "gpu", "name")
    # A GPU that was replaced is listed for a day with the same host and index.
    newest = {(d.gpu.host, d.gpu.index): d for d in sorted(view.devices, key=lambda device: device.gpu.seen_at)}
    devices = {(host, str(index), device.gpu.name): device for (host, index), device in newest.items()}
    states: dict[tuple[str, ...], float] = {
        (*key, state.value): device.gpu.state == state for key, device in devices.items() for state in GpuState
    }
    yield _gauge("gpu_state", "1 for a GPU's current state, 0 for all other states.", (*labels, "state"), states)
    serves: dict[tuple[str, ...], float] = {key: device.error is None for key, device in devices.items()}
    yield _gauge("gpu_serves", "1 if a GPU gets evaluations.", labels, serves)
    for name, fact, words in _FACTS:
        facts = {key: device.gpu.facts.get(fact) for key, device in devices.items()}
        yield _gauge(name, words, labels, {key: value for key, value in facts.items() if value is not None})
    booked: dict[tuple[str, ...], float] = {
        key: device.gpu.memory.booked_bytes if device.gpu.memory else 0 for key, device in devices.items()
    }
    yield _gauge("gpu_memory_booked_bytes", "Memory that evaluations have booked.", labels, booked)
    reasons: dict[tuple[str, ...], float] = {
        (*key, reason): 1.0 for key, device in devices.items() for reason in device.gpu.facts.get("throttle", ())
    }
    yield _gauge("gpu_clocks_reason", "1 for each of NVML's reasons for lower clocks.", (*labels, "reason"), reasons)


def _gauge(
    name: str, words: str, labels: tuple[str, ...], values: Mapping[tuple[str, ...], float]
) -> GaugeMetricFamily:
    family = GaugeMetricFamily(f"kqueue_{name}", words, labels=labels)
    for where, value in values.items():
        family.add_metric(where, float(value))
    return family


@router.get("/metrics", response_class=Response)
async def metrics(request: Request, caller: Reader) -> Response:
    """Return the fleet's load in Prometheus' text format, and with the scope `read:all` also figures of evaluations."""
    work = caller.may(Scope.READ_ALL) and caller.restricted is None
    own: Metrics = request.app.state.metrics
    return Response(await own.text(work=work), media_type=CONTENT_TYPE_LATEST)
