"""An evaluator that starts a fleet on this machine if none runs, and stops it when it is idle.

::

    with LocalKernelEvaluator(gpu="L40S", idle_timeout=600) as evaluator:
        result = evaluator.evaluate(reference, kernel)
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import threading
import time
from collections.abc import Callable, Generator, Sequence
from pathlib import Path
from typing import Any, Final, Self

from kqueue.client import Client
from kqueue.client.database import lane_for
from kqueue.config import Config, load
from kqueue.contract import Request, Verdict
from kqueue.errors import HomeInUse, InvalidRequest, KqueueError
from kqueue.integrations.common import lane_of, result_for
from kqueue.kernelbench import request_of
from kqueue.local.fleet import LocalFleet
from kqueue.store import workers
from kqueue.store.engine import connect

_log = logging.getLogger(__name__)

#: Maximum seconds of the wait for another process to start its fleet.
_OTHER_START_S: Final = 180.0
#: Seconds between two checks of a fleet.
_CHECK_S: Final = 0.5


class LocalKernelEvaluator:
    """An evaluator on this machine's fleet, with KernelBench's results. Threads can share it.

    A fleet that already runs, or that the settings name, is used and never stopped. Otherwise the first evaluation
    starts one, which takes seconds. It stops after ``idle_timeout`` idle seconds, even outside the ``with`` block,
    and at the latest with the process. The next evaluation starts it again. Its verdicts stay under ``KQUEUE_HOME``.
    Processes on one machine share the fleet of the first process until that process ends.
    """

    def __init__(
        self, gpu: str = "any", idle_timeout: float = 600.0, *, config: Config | None = None, **arguments: Any
    ) -> None:
        """Configure an evaluator without starting a fleet.

        Args:
            gpu: the GPU's model, such as ``L40S``, or ``any``, ``auto``, ``cpu``.
            config: the fleet's settings. The default is the environment's.
            arguments: arguments of :func:`~kqueue.kernelbench.request_of` for all evaluations, such as ``backend``.
        """
        self._arguments: dict[str, Any] = {"lane": lane_of(gpu), **arguments}
        self._idle_s = idle_timeout
        self._config = config

    def __enter__(self) -> Self:
        """Start a fleet if none runs.

        Raises:
            LaneUnavailable: this machine has no such GPU. It is raised here, because callers of :meth:`evaluate` that
                catch exceptions would mistake it for a bad kernel.
        """
        with self._client():
            settings = self._settings()
            engine = connect(settings.require_database(), application="kqueue-client", pool_size=1)
            try:
                live = workers.live_lanes(engine, within_s=settings.live_s)
            finally:
                engine.dispose()
            # Any kernel will do, because an evaluation can have another backend.
            anything = request_of("...", "...", backend="torch", lane=self._arguments["lane"])
            lane_for(anything, live, allow_idle_lane=False, fallback=settings.gpu_fallback)
            return self

    def __exit__(self, *_: object) -> None:
        """Do not stop the fleet, so that it stays warm for later evaluations."""

    def evaluate(self, ref_arch_src: str, custom_cuda: str, verbose: bool = False, **arguments: Any) -> dict[str, Any]:
        """Evaluate a kernel of any backend, with further arguments of :func:`~kqueue.kernelbench.request_of`.

        Returns:
            KernelBench's result: see :func:`~kqueue.kernelbench.result_of`. If ``KQUEUE_GPU_FALLBACK`` replaced
            ``gpu``, ``metadata`` has ``lane_asked`` in addition to ``lane``.

        Raises:
            LaneUnavailable: this machine has no such GPU, and ``KQUEUE_GPU_FALLBACK`` names no lane of it.
            EvaluationFailed: the fleet or the problem failed, so the kernel's quality is unknown.
        """
        request = request_of(ref_arch_src, custom_cuda, **self._arguments | arguments)
        [verdict] = self.judge([request])
        if isinstance(verdict, InvalidRequest):
            raise verdict
        return result_for(request, verdict, verbose=verbose)

    def judge(self, requests: Sequence[Request]) -> Sequence[Verdict | InvalidRequest]:
        """Run :meth:`kqueue.Client.evaluate_batch` on this machine's fleet."""
        with self._client() as client:
            return client.evaluate_batch(requests)

    def close(self) -> None:
        """Stop the fleet once it is idle, if this process started it. The next evaluation starts it again."""
        _warm_fleet(self._settings().home_path).let_go()

    def _client(self) -> contextlib.AbstractContextManager[Client]:
        return _warm_fleet(self._settings().home_path).client(self._settings, self._idle_s)

    def _settings(self) -> Config:
        """Return the settings, with the addresses of a running fleet."""
        return load(**({} if self._config is None else self._config.model_dump(exclude_unset=True)))


class _WarmFleet:
    """The fleet of one home, started by this process or by another one."""

    # The fleet's processes die with the thread that started them, so one thread starts, watches and stops an own fleet.

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._users = 0
        self._idle_s = 0.0
        self._used = time.monotonic()
        self._owner_thread: threading.Thread | None = None
        #: The client. ``_own`` is True if this process started the client's fleet.
        self._client: Client | None = None
        self._own = False
        self._other_url: str | None = None
        self._failure: BaseException | None = None

    @contextlib.contextmanager
    def client(self, read: Callable[[], Config], idle_s: float) -> Generator[Client]:
        """Provide a client of a fleet. An own fleet stops ``idle_s`` seconds after its last use at the earliest."""
        with self._changed:
            self._users += 1
            self._idle_s = idle_s
        try:
            with self._changed:
                client = self._find(read)
            yield client
        finally:
            with self._changed:
                self._users -= 1
                self._used = time.monotonic()

    def let_go(self) -> None:
        """Stop an own fleet once it is idle. If it is idle now, wait for its end."""
        with self._changed:
            self._idle_s = 0.0
            self._changed.notify_all()
            if self._users == 0 and self._owner_thread is not None:
                self._changed.wait_for(lambda: self._owner_thread is None)

    def _find(self, read: Callable[[], Config]) -> Client:
        deadline = time.monotonic() + _OTHER_START_S
        while not self._own:
            if self._owner_thread is None:
                settings = read()
                if settings.database_url is not None:
                    url = settings.require_database()
                    if self._client is None or url != self._other_url:
                        if self._client is not None:
                            self._client.close()
                        self._client, self._other_url = Client(settings), url
                    return self._client
                self._failure = None
                self._owner_thread = threading.Thread(
                    target=self._keep, args=(settings,), name="kqueue-fleet", daemon=True
                )
                self._owner_thread.start()
            # The owner thread can still be starting a fleet, or stopping an idle one.
            self._changed.wait_for(lambda: self._own or self._owner_thread is None)
            if isinstance(self._failure, HomeInUse) and time.monotonic() < deadline:
                # Another process is starting or stopping a fleet there.
                self._changed.wait(_CHECK_S)
            elif self._failure is not None:
                raise self._failure
        assert self._client is not None
        return self._client

    def _keep(self, settings: Config) -> None:
        """Run one fleet from start to stop, in the owner thread."""
        try:
            with LocalFleet(settings, report=_log.warning) as fleet, fleet.client() as client:
                with self._changed:
                    if self._client is not None:
                        self._client.close()
                    self._client, self._own, self._other_url = client, True, None
                    self._used = time.monotonic()
                    self._changed.notify_all()
                self._watch(fleet)
        except Exception as error:  # noqa: BLE001 raised in the threads that wait for the fleet
            self._failure = error
        finally:
            with self._changed:
                if self._own:
                    self._client, self._own = None, False
                self._owner_thread = None
                self._changed.notify_all()

    def _watch(self, fleet: LocalFleet) -> None:
        """Withdraw the client and return once the fleet is idle."""
        while True:
            fleet.look()
            with self._changed:
                self._changed.wait_for(self._is_idle, timeout=_CHECK_S)
                if self._is_idle() and not _serves_other_process(fleet):
                    self._client, self._own = None, False
                    return

    def _is_idle(self) -> bool:
        return self._users == 0 and time.monotonic() - self._used >= self._idle_s


def _serves_other_process(fleet: LocalFleet) -> bool:
    """Return True if another process's evaluation runs."""
    try:
        return any(slot.busy_with is not None for slot in fleet.slots())
    except KqueueError:
        return False


_warm: Final[dict[tuple[int, Path], _WarmFleet]] = {}
_warm_lock: Final = threading.Lock()


def _warm_fleet(home: Path) -> _WarmFleet:
    with _warm_lock:
        # A fork inherits neither threads nor usable connections, so each process needs its own fleet object.
        return _warm.setdefault((os.getpid(), home), _WarmFleet())


@atexit.register
def _let_all_go() -> None:
    for (pid, _), fleet in [*_warm.items()]:
        if pid == os.getpid():
            fleet.let_go()
