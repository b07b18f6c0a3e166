"""The transport to a fleet's Postgres and Redis."""

from __future__ import annotations

import functools
import logging
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from typing import Final
from uuid import UUID

from celery import Celery
from pydantic import SecretStr
from sqlalchemy import Engine

from kqueue import backends, broker, tracing
from kqueue.client.transport import Accepted, Transport, all_valid
from kqueue.config import Config, load
from kqueue.contract import Request, Verdict
from kqueue.errors import (
    BrokerUnavailable,
    DatabaseUnavailable,
    IdempotencyConflict,
    InvalidRequest,
    KqueueError,
    LaneUnavailable,
    UnknownProblem,
)
from kqueue.states import GpuState
from kqueue.store import evaluations, gpus, schema, workers
from kqueue.store.engine import connect
from kqueue.store.listener import Listener

_log = logging.getLogger(__name__)

_APPLICATION: Final = "kqueue-client"


class DatabaseTransport(Transport):
    """The transport to a fleet by its database and broker. :class:`kqueue.Client` documents arguments and errors."""

    def __init__(
        self,
        config: Config | None,
        *,
        database_url: str | None = None,
        redis_url: str | None = None,
        fenced: bool = False,
    ) -> None:
        super().__init__()
        if config is None:
            config = load(database_url=database_url, redis_url=redis_url)
        else:
            given = {"database_url": database_url, "redis_url": redis_url}
            config = config.model_copy(update={k: SecretStr(v) for k, v in given.items() if v is not None})
        self._config = config
        url = config.require_database()
        self._engine = connect(url, application=_APPLICATION, fenced=fenced)
        self._listener = Listener(url, self._engine, application=_APPLICATION)
        self._checked = False

    def close(self) -> None:
        if self._begin_close():
            self._listener.close()
            self._engine.dispose()
            if "_app" in self.__dict__:
                self._app.close()

    @functools.cached_property
    def _app(self) -> Celery:
        return broker.make_app(self._config)

    def _ready(self) -> Engine:
        """Return the engine. Check the schema before its first use."""
        self._check()
        with self._lock:
            if not self._checked:
                schema.check(self._engine)
                self._checked = True
        return self._engine

    def submit(self, requests: Sequence[Request], allow_idle_lane: bool) -> list[Accepted]:
        with tracing.submission(len(requests)) as traceparent:
            live = self._live()
            good = all_valid(self._resolve(requests, live, allow_idle_lane), numbered=len(requests) > 1)
            return self._accept(good, live, self._any_lane(requests), traceparent)

    def submit_each(
        self, entries: Sequence[Request | InvalidRequest], allow_idle_lane: bool
    ) -> list[Accepted | InvalidRequest]:
        requests = [entry for entry in entries if isinstance(entry, Request)]
        with tracing.submission(len(requests)) as traceparent:
            live, any_lane = self._live(), self._any_lane(requests)
            good = iter(self._resolve(requests, live, allow_idle_lane))
            entries = [next(good) if isinstance(entry, Request) else entry for entry in entries]
            while True:
                try:
                    requests = [entry for entry in entries if isinstance(entry, Request)]
                    accepted = iter(self._accept(requests, live, any_lane, traceparent))
                    return [next(accepted) if isinstance(entry, Request) else entry for entry in entries]
                except (IdempotencyConflict, UnknownProblem) as error:
                    entries = [_blamed(entry, error) for entry in entries]

    def _live(self) -> Mapping[str, int]:
        """Return the number of live workers of each lane."""
        return workers.live_lanes(self._ready(), within_s=self._config.live_s)

    def _resolve(
        self, requests: Sequence[Request], live: Mapping[str, int], allow_idle_lane: bool
    ) -> list[Request | InvalidRequest]:
        """Return each request with its lane, or the error if it has none."""
        resolved: list[Request | InvalidRequest] = []
        most = functools.cache(self._most_gpus)
        for request in requests:
            try:
                lane = lane_for(request, live, allow_idle_lane, self._config.gpu_fallback)
                if request.ranks > 1 and lane != "cpu" and not allow_idle_lane:
                    number, shown = most(lane)
                    if number < request.ranks:
                        needs = f"the problem runs on {request.ranks} GPUs of one host (WORLD = {request.ranks})"
                        raise LaneUnavailable(f"lane: {needs}, and the largest host on {lane} has {shown}")
                resolved.append(request.model_copy(update={"lane": lane}))
            except InvalidRequest as error:
                resolved.append(error)
        return resolved

    def _most_gpus(self, lane: str) -> tuple[int, str]:
        """Return how many GPUs in service the largest live host of a lane has, and the same in words."""
        live = workers.live(self._ready(), within_s=self._config.live_s)
        away = {gpu.uuid: gpu.paused for gpu in gpus.find(self._ready()) if gpu.state is not GpuState.SERVING}
        found: list[tuple[int, str]] = []
        for host in {worker.host for worker in live if lane in worker.lanes}:
            own = {worker.device for worker in live if worker.host == host and worker.device != "cpu"}
            why = ", ".join(str(away[uuid]) for uuid in sorted(own & away.keys()))
            number = len(own - away.keys())
            found.append((number, f"{number} in service ({why})" if why else str(number)))
        return max(found, default=(0, "none"))

    def _any_lane(self, requests: Sequence[Request]) -> set[str]:
        """Return the idempotency keys of requests that can get another lane when they are repeated."""
        fallback = self._config.gpu_fallback
        return {key for one in requests if (key := one.idempotency_key) is not None and takes_any_lane(one, fallback)}

    def _accept(
        self, requests: Sequence[Request], live: Mapping[str, int], any_lane: Collection[str], traceparent: str | None
    ) -> list[Accepted]:
        """Store evaluations, and send messages for those that are next in the queue."""
        app = self._app
        submitted = evaluations.submit(
            self._engine, requests, slots=live, any_lane=any_lane, reuse_s=self._config.lease_s, traceparent=traceparent
        )
        messages = [evaluation.message for evaluation in submitted if evaluation.next]
        try:
            if messages:
                broker.publish(app, messages)
        except BrokerUnavailable as error:
            _log.warning("accepted evaluations wait for the fleet's sweeper to send them: %s", error)
            # Without this mark, the sweeper would notice the missing messages later.
            with suppress(DatabaseUnavailable):
                evaluations.unpublish(self._engine, [message.evaluation_id for message in messages])
        return [Accepted(evaluation.evaluation_id, evaluation.created) for evaluation in submitted]

    def batch(self, name: str) -> list[UUID]:
        return evaluations.in_batch(self._ready(), name)

    def verdict(self, evaluation_id: UUID) -> Verdict | None:
        return evaluations.verdict(self._ready(), evaluation_id)

    def cancel(self, evaluation_id: UUID) -> bool:
        if cancelled := evaluations.cancel(self._ready(), evaluation_id):
            try:
                broker.revoke(self._app, evaluation_id)
            except KqueueError as error:
                _log.warning("%s is cancelled, but the message to its worker was not sent: %s", evaluation_id, error)
        return cancelled

    def watch(self, evaluation_id: UUID) -> Future[Verdict]:
        self._check()
        return self._listener.watch(evaluation_id)


def _blamed(entry: Request | InvalidRequest, error: IdempotencyConflict | UnknownProblem) -> Request | InvalidRequest:
    """Return an entry, or its own error if it is one of those that caused ``error``."""
    if isinstance(entry, Request):
        if isinstance(error, UnknownProblem):
            unknown = {entry.problem_hash, *entry.tree_names} & error.hashes
            return UnknownProblem(unknown) if unknown else entry
        if entry.idempotency_key in error.keys:
            return IdempotencyConflict([entry.idempotency_key])
    return entry


def takes_any_lane(request: Request, fallback: str | None) -> bool:
    """Return True if a request can get another lane from :func:`lane_for` when it is repeated."""
    return request.lane == "auto" or (fallback is not None and request.lane != "cpu")


def lane_for(request: Request, live: Mapping[str, int], allow_idle_lane: bool, fallback: str | None) -> str:
    """Return the lane for a request.

    ``live`` has the numbers of live workers by lane. ``fallback`` replaces a GPU lane without live workers. Raise
    InvalidRequest if the kernel cannot be judged on the lane, and LaneUnavailable if no live worker serves it, unless
    ``allow_idle_lane``.
    """
    on_cpu = (cpu := backends.find(request.backend).cpu) and not request.settings.examine
    if request.lane == "auto":
        for lane in ("gpu", "cpu") if on_cpu else ("gpu",):
            if lane in live:
                return lane
        need = "gpu or cpu" if on_cpu else f"gpu, which {'examinations' if cpu else f'{request.backend} kernels'} need"
        raise LaneUnavailable(f"lane: no live worker serves {need}{_instead(live)}")
    broker.check_lane(request.lane)
    if request.lane == "cpu" and not on_cpu:
        raise InvalidRequest(f"backend: a {request.backend} kernel cannot be judged on the lane cpu. Use the lane gpu")
    if request.lane not in live and not allow_idle_lane:
        if request.lane != "cpu" and fallback is not None and fallback in live and (on_cpu or fallback != "cpu"):
            return fallback
        raise LaneUnavailable(f"lane: no live worker serves {request.lane}{_instead(live, named=request.lane)}")
    return request.lane


def _instead(live: Mapping[str, int], *, named: str = "cpu") -> str:
    """Return the end of an error about a lane without workers: the lanes with workers, and advice."""
    if not live:
        return ": this fleet has no live worker. Start one with `kqueue up` or `kqueue worker`"
    served = ", ".join(f"{lane} ({number})" for lane, number in sorted(live.items()))
    other = "or use" if named == "cpu" else "set KQUEUE_GPU_FALLBACK to a lane that replaces it, or use"
    return f" (served now: {served}): run `kqueue worker` on a machine that serves it, {other} a lane that fits"
