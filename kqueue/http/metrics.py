"""``GET /metrics``: the fleet in figures, for Prometheus.

Postgres knows all that happens on all hosts, so one address tells of the whole fleet, and workers listen nowhere.
Counters and histograms begin at zero with the server, and count each verdict once; two servers of one fleet count the
same, each for itself. Everything else is read when it is asked for.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from datetime import UTC, datetime, timedelta
from typing import Annotated, Final
from uuid import UUID

from fastapi import APIRouter, Depends, Request
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
from kqueue.states import EvaluationState, Finding, GpuState, Writer
from kqueue.store import probes, reports
from kqueue.store.reports import Crowd, Ended

router: Final = APIRouter(tags=["metrics"])
# When a counter began is known to whoever sees it fall, and would be as many lines again.
disable_created_metrics()

#: Bounds of durations, in seconds: from a claim to a long compilation.
_BOUNDS_S: Final = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600, 1800)
#: A verdict that was begun this long ago and is not there yet is not counted.
_LATE: Final = timedelta(seconds=60)
#: Ids that are read at once, and evaluations.
_MANY: Final = 20_000
_FEW: Final = 500
#: The most lanes that are told apart. Those of further ones are counted as one, named `other`.
_LANES: Final = 32
#: The beginning of the names of steps for which a device is held alone.
_ALONE: Final = "alone_"
#: Figures of GPUs: the name, the fact that it is, and what it means.
_FACTS: Final = (
    ("gpu_temperature_celsius", "temperature_c", "Temperature."),
    ("gpu_sm_megahertz", "sm_mhz", "Clock of the multiprocessors."),
    ("gpu_utilisation_percent", "utilisation_percent", "Share of time in which some kernel ran."),
    ("gpu_memory_used_bytes", "memory_used_bytes", "Memory in use, by whomever."),
    ("gpu_memory_bytes", "memory_bytes", "Memory in all."),
)


class Metrics:
    """The figures of one fleet. Requests for them take turns."""

    def __init__(self, gateway: Gateway, fleet: Fleet) -> None:
        self._gateway = gateway
        self._fleet = fleet
        self._turn = asyncio.Lock()
        self._since = datetime.max.replace(tzinfo=UTC)
        self._known: dict[UUID, datetime] = {}
        self._lanes: set[str] = set()
        self._registry = CollectorRegistry()
        self._registry.register(_Now(self))
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
        self._alone = counter("device_alone_seconds", "Seconds for which devices were held alone.", "lane")
        self._waited = histogram("wait_seconds", "From submission to the first attempt.", "lane", "priority")
        self._total = histogram("verdict_seconds", "From submission to the verdict.", "lane", "priority")
        self._steps = histogram("step_seconds", "Steps of an evaluation.", "lane", "step")
        for category in Category:
            if category.blame is Blame.FLEET:
                self._retried.labels(category.value)
        for writer in Writer:
            self._recorded.labels(writer.value)

    async def text(self) -> bytes:
        """Return all figures in Prometheus' text format.

        Raises:
            DatabaseUnavailable: they cannot be read.
        """
        async with self._turn:
            view = await self._fleet.get()
            # In a thread that reads: a million verdicts take minutes, and other requests are answered meanwhile.
            return await self._gateway.read(self._text, view)

    def begin(self, engine: Engine) -> None:
        """Begin to count: what has ended is known."""
        self._since = reports.now(engine) - _LATE
        for page in self._pages(engine):
            self._known |= dict(page)

    def _text(self, engine: Engine, view: View) -> bytes:
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
        return generate_latest(self._registry)

    def _pages(self, engine: Engine) -> Iterator[list[tuple[UUID, datetime]]]:
        """Yield the ids of what ended since the last look, and a while before it."""
        after = self._since, UUID(int=0)
        while page := reports.finished(engine, after=after, limit=_MANY):
            yield page
            after = page[-1][1], page[-1][0]

    def _add(self, one: Ended) -> None:
        lane, priority = self.lane(one.lane), one.priority.value
        self._ended.labels(lane, one.category.value, one.category.blame.value).inc()
        self._recorded.labels(one.written_by.value).inc()
        self._total.labels(lane, priority).observe((one.finished_at - one.submitted_at).total_seconds())
        if one.begun_at is not None:
            self._waited.labels(lane, priority).observe(max((one.begun_at - one.submitted_at).total_seconds(), 0.0))
        if one.reused:
            self._reused.labels(lane).inc()
            return  # its attempts and steps are the other one's
        for category in one.earlier:
            self._retried.labels(category.value).inc()
        if one.built is not None:
            self._builds.labels(one.built).inc()
        for step, seconds in one.durations_s.items():
            self._steps.labels(lane, step).observe(seconds)
            if step.startswith(_ALONE):
                self._alone.labels(lane).inc(seconds)

    def lane(self, name: str) -> str:
        """Return a lane's label: there is no end to the names that producers may think of."""
        if name in self._lanes or len(self._lanes) < _LANES:
            self._show(name)
            return name
        return "other"

    def _show(self, lane: str) -> None:
        """Have all counters of a lane begin at 0: of one that begins at 1 Prometheus does not see that it rose."""
        if lane not in self._lanes:
            self._lanes.add(lane)
            for category in Category:
                self._ended.labels(lane, category.value, category.blame.value)


class _Now(Collector):
    """What is so at this moment."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics

    def describe(self) -> Iterable[Metric]:
        """Nothing is known before it is asked for."""
        return ()

    def collect(self) -> Iterator[Metric]:
        """Yield the gauges of what :class:`Metrics` has just read."""
        view = self._metrics.view
        assert view is not None
        yield from self._queue(view)
        yield from self._workers(view)
        yield from _gpus(view)
        yield from _probes(view.probes)

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
        yield _gauge("queued", "Evaluations that wait.", ("lane", "priority"), queued)
        yield _gauge("oldest_queued_seconds", "How long the first of them has waited.", ("lane", "priority"), oldest)
        yield _gauge("running", "Evaluations that are executed.", ("lane",), running)

    def _workers(self, view: View) -> Iterator[Metric]:
        slots: defaultdict[tuple[str, ...], float] = defaultdict(float)
        serving: dict[tuple[str, ...], float] = {(lane,): 0.0 for lane in view.lanes}
        for worker in view.workers:
            state = "paused" if worker.paused else "busy" if worker.busy_with else "idle"
            slots[worker.host, "cpu" if worker.device == "cpu" else "gpu", state] += 1
            for lane in worker.lanes if worker.paused is None else ():
                serving[(lane,)] += 1
        yield _gauge("slots", "Live workers, by what they do.", ("host", "device", "state"), slots)
        yield _gauge("serving", "Live workers that take a lane's evaluations.", ("lane",), serving)


def _gpus(view: View) -> Iterator[Metric]:
    labels = ("host", "gpu", "name")
    # A GPU that was replaced is known for a day, at the same place.
    by_place = {(d.gpu.host, d.gpu.index): d for d in sorted(view.devices, key=lambda device: device.gpu.seen_at)}
    devices = {(host, str(index), device.gpu.name): device for (host, index), device in by_place.items()}
    states: dict[tuple[str, ...], float] = {
        (*place, state.value): device.gpu.state == state for place, device in devices.items() for state in GpuState
    }
    yield _gauge("gpu_state", "1 for the state that a GPU is in.", (*labels, "state"), states)
    serves: dict[tuple[str, ...], float] = {place: device.error is None for place, device in devices.items()}
    yield _gauge("gpu_serves", "1 if a GPU gets evaluations.", labels, serves)
    for name, fact, words in _FACTS:
        seen = {place: device.gpu.facts.get(fact) for place, device in devices.items()}
        yield _gauge(name, words, labels, {place: value for place, value in seen.items() if value is not None})
    booked: dict[tuple[str, ...], float] = {
        place: device.gpu.memory.booked_bytes if device.gpu.memory else 0 for place, device in devices.items()
    }
    yield _gauge("gpu_memory_booked_bytes", "Memory that evaluations have booked.", labels, booked)
    reasons: dict[tuple[str, ...], float] = {
        (*place, reason): 1.0 for place, device in devices.items() for reason in device.gpu.facts.get("throttle", ())
    }
    yield _gauge("gpu_clocks_reason", "1 for each of NVML's reasons for lower clocks.", (*labels, "reason"), reasons)


def _probes(record: probes.Record) -> Iterator[Metric]:
    found: dict[tuple[str, ...], float] = {
        (finding.value,): record.findings.get(finding, 0) for finding in Finding if finding is not Finding.VOID
    }
    yield _gauge("probes_day", "Probes of the judge in the last day, by what they showed.", ("finding",), found)
    bias: dict[tuple[str, ...], float] = {(one.resource,): one.bias for one in record.clocks}
    words = "What spins of a known time were timed at too much in the last day, as a share: the median."
    yield _gauge("probe_clock_bias_ratio", words, ("device",), bias)
    paused: defaultdict[tuple[str, ...], float] = defaultdict(float)
    doubted: defaultdict[tuple[str, ...], float] = defaultdict(float)
    for one in record.pauses:
        where = one.host, "cpu" if one.device == "cpu" else "gpu"
        paused[where] += 1
        doubted[where] += one.doubted
    yield _gauge("probe_paused", "Places that are paused as probes were judged wrongly.", ("host", "device"), paused)
    words = "Verdicts that these places reached since their last good probe."
    yield _gauge("probe_doubted", words, ("host", "device"), doubted)


def _gauge(
    name: str, words: str, labels: tuple[str, ...], values: Mapping[tuple[str, ...], float]
) -> GaugeMetricFamily:
    family = GaugeMetricFamily(f"kqueue_{name}", words, labels=labels)
    for where, value in values.items():
        family.add_metric(where, float(value))
    return family


def _own(request: Request) -> Metrics:
    metrics: Metrics = request.app.state.metrics
    return metrics


@router.get("/metrics", response_class=Response)
async def metrics(_: Reader, own: Annotated[Metrics, Depends(_own)]) -> Response:
    """Return the fleet's figures in Prometheus' text format. A scrape needs a token of the scope `read`."""
    return Response(await own.text(), media_type=CONTENT_TYPE_LATEST)
