"""The two clocks for one call of a sealed process. Neither relies on times from the process.

On a GPU, :class:`GpuClock` puts events of the judge's own CUDA context around all that belongs to the call::

    judge's stream      [wait HOLD][event][write inputs][flush L2][GO][wait DONE][copy outputs][event]
    candidate's stream                                              [wait GO][forward][DONE]

The candidate enqueues its part first, then the judge enqueues its own and releases HOLD. So the span contains no time
of the host. Inputs appear within the span, so no work on them can start before it. Outputs are copied within the span,
so an early DONE gains nothing. Two processes take turns on a GPU and never run at the same time, so work that a
candidate does before GO delays the judge's own work, which is in the span too. A forward that needs no time slice
(copies, callbacks) does not wait for one, but the launch-overhead call does. Such a forward is timed after an empty
kernel.

A forward that waits for the GPU cannot be enqueued in advance: it would wait for a GO that waits for it, and send no
reply. Such calls, and all calls on a CPU, are timed by :class:`CpuClock`, which is the judge's CPU clock from before
the inputs are written until the outputs have been copied.
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import math
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any, Final, NamedTuple

import torch

from kqueue.categories import Category
from kqueue.contract import Phase
from workers.judge.channel import flags
from workers.judge.channel.gpu_memory import CudaCallError, call
from workers.judge.channel.orders import Order
from workers.judge.channel.semaphores import Semaphores
from workers.judge.channel.tensors import TensorSpec
from workers.judge.ending import EvaluationEnded
from workers.judge.gpu import environment
from workers.judge.pipeline.cases import Case
from workers.judge.pipeline.exchange import Exchange, Output, copy_out

#: Maximum seconds for a candidate to enqueue a call before the judge concludes that it waits for the GPU, for the first
#: try and for later ones. A busy host can delay an honest candidate for a moment.
_ENQUEUE_S: Final = (0.05, 0.25)
#: Maximum seconds that the judge waits for an untimed call, and seconds between two polls.
_LET_GO_S: Final = 10.0
_NAP_S: Final = 0.0002
#: Maximum seconds that the judge waits for a call's time by the process's own clock.
_OWN_S: Final = 0.005
#: Number of timings of a copy, and the maximum size in bytes of the copy.
_COPIES: Final = 5
_COPIED_BYTES: Final = 128 << 20
#: Difference between such times that is noise, in ns.
_COPY_NOISE_NS: Final = 1000.0
#: ``cudaDeviceAttr`` for the memory's peak clock in kilohertz, and for the width of its bus in bits.
_MEMORY_CLOCK_KHZ: Final = 36
_MEMORY_BUS_BITS: Final = 37
#: Number of polls of an event between two polls of the candidate (about 1 ms).
_LOOK: Final = 1 << 10


class Flusher:
    """Flushes the GPU's L2 cache by resetting persisting lines and writing twice the cache's size."""

    def __init__(self) -> None:
        size = torch.cuda.get_device_properties(0).L2_cache_size
        self._buffer = torch.empty(2 * size, dtype=torch.uint8, device="cuda")

    def __call__(self) -> None:
        call("cudaCtxResetPersistingL2Cache")
        self._buffer.zero_()

    def bandwidth(self) -> float:
        """Return the device's memory bandwidth, reads and writes together, in bytes per second.

        This is the peak by the memory's clock and width, so that a bound on a kernel's time accuses no honest kernel.
        If the device does not report these, it is twice the best bandwidth of a few copies: copies of the cache's size
        reached half of the peak on an H200.
        """
        with contextlib.suppress(CudaCallError):
            return _peak_bandwidth(torch.cuda.current_device())
        half = self._buffer.numel() // 2
        best = min(_span(lambda: self._buffer[:half].copy_(self._buffer[half:])) for _ in range(_COPIES))
        return 4 * half / best * 1e9


@cache
def _peak_bandwidth(device: int) -> float:
    """Return the peak bandwidth by the memory's clock and width, in bytes per second, or raise CudaCallError."""
    figures: list[int] = []
    for attribute in (_MEMORY_CLOCK_KHZ, _MEMORY_BUS_BITS):
        value = ctypes.c_int()
        call("cudaDeviceGetAttribute", ctypes.byref(value), attribute, device)
        figures.append(value.value)
    kilohertz, bits = figures
    return 2 * kilohertz * 1e3 * bits / 8  # Two transfers per cycle.


class Hold:
    """Holds the judge's stream until a whole call is enqueued, by means of the judge's own page of flags.

    Registering a page takes milliseconds while other processes open the device, so it is done before the device is
    exclusive.
    """

    def __init__(self) -> None:
        page = flags.create()
        self._page = flags.attach(page)
        os.close(page)
        self._semaphores = Semaphores(self._page)
        self._numbers = itertools.count(1)
        self._number = 0

    def wait(self, stream: int) -> None:
        """Make a stream wait."""
        self._number = next(self._numbers)
        self._semaphores.wait(stream, flags.GO, self._number)

    def let_go(self) -> None:
        """Release the waiting stream."""
        self._page[flags.GO] = self._number


@dataclass(frozen=True, slots=True)
class Instruments:
    """Means to time calls: the watch of the device's clocks, and on a GPU the stream's hold and the cache's flusher."""

    watch: environment.Watch
    hold: Hold | None = None
    flusher: Flusher | None = None


class Sample(NamedTuple):
    """The times of one call in nanoseconds.

    Attributes:
        ns: the whole span.
        yardstick_ns: the judge's own work before GO.
        own_ns: the time of the forward by the process's own clock, or -1 if it reported none. Not trusted.
    """

    ns: int
    yardstick_ns: int
    own_ns: int = -1


class GpuClock:
    """Clock of events around work that was enqueued in advance.

    Attributes:
        views: the last call's outputs in the process's memory.
    """

    basis: Final = "gpu_clock"

    def __init__(self, exchange: Exchange, hold: Hold, flusher: Flusher | None) -> None:
        """Time the calls of one process. A flusher flushes the L2 cache before each."""
        self._exchange = exchange
        self._process = exchange.process
        self._hold = hold
        self._flusher = flusher
        self._layouts: set[tuple[Any, ...]] = set()
        self.views: list[Output] = []

    def blocks(self, case: Case) -> bool:
        """Return True if the forward waits for the GPU, so that this clock cannot time it."""
        for seconds in _ENQUEUE_S:
            if (enqueued := self._enqueue(Order.ENQUEUE, case, seconds)) is not None:
                self._let_go(enqueued[0])
                return False
        return True

    def time(self, order: Order, case: Case, into: list[torch.Tensor]) -> Sample | None:
        """Time one call, with the order ``ENQUEUE``, ``ENQUEUE_IN_TURN`` or ``ENQUEUE_OVERHEAD``.

        Returns:
            The times, or None if the candidate did not enqueue the call in time.

        Raises:
            EvaluationEnded: the call failed, or its outputs do not have the reference's form.
        """
        enqueued = self._enqueue(order, case, _ENQUEUE_S[-1])
        if enqueued is None:
            return None
        number, views = enqueued
        self.views = views
        self._load_copies(into, views)
        begin, ready, end = (torch.cuda.Event(enable_timing=True) for _ in range(3))
        stream = torch.cuda.current_stream().cuda_stream
        semaphores = self._process.semaphores
        self._hold.wait(stream)
        try:
            begin.record()
            self._exchange.load(case.inputs)
            if self._flusher is not None:
                self._flusher()
            ready.record()
            semaphores.write(stream, flags.GO, number)
            semaphores.wait(stream, flags.DONE, number)
            copy_out(views, into)
            end.record()
        except BaseException:
            self._process.flags[flags.DONE] = number  # No stream must be left waiting.
            raise
        finally:
            self._hold.let_go()
        self._await(end, number)
        return Sample(
            round(begin.elapsed_time(end) * 1e6),
            round(begin.elapsed_time(ready) * 1e6),
            _own_ns(self._process.flags, number),
        )

    def _load_copies(self, into: list[torch.Tensor], views: list[Output]) -> None:
        """Copy once from new layouts, because the copy's kernels cannot be loaded while a stream waits."""
        layouts = tuple((view.shape, view.stride(), view.dtype) for view in views)
        if layouts not in self._layouts:
            copy_out(views, into)
            torch.cuda.synchronize()
            self._layouts.add(layouts)

    def _enqueue(self, order: Order, case: Case, seconds: float) -> tuple[int, list[Output]] | None:
        """Let the candidate enqueue a call. Return None if it did not do so in time and ran the call untimed."""
        number = self._process.send(order)
        self._process.look_out()
        if self._process.answered(seconds):
            return number, self._exchange.outputs(self._process.receive(number))
        # The call runs on the right inputs, untimed, and its answer does not count.
        self._exchange.load(case.inputs)
        self._exchange.settle()
        self._process.flags[flags.GO] = number
        self._process.receive(number)
        return None

    def _let_go(self, number: int) -> None:
        """Run an enqueued call untimed and wait for its end, so that it does not disturb the next timed call."""
        page = self._process.flags
        page[flags.GO] = number
        deadline = time.monotonic() + _LET_GO_S
        while page[flags.DONE] != number and not self._process.answered() and time.monotonic() < deadline:
            time.sleep(_NAP_S)

    def _await(self, end: torch.cuda.Event, number: int) -> None:
        """Wait for the end of a call. If the candidate fails, set DONE, because the stream waits for it."""
        turns = 0
        try:
            while not end.query():
                turns += 1
                if turns % _LOOK == 0 and self._process.answered():
                    self._process.receive(number)
                    raise EvaluationEnded(
                        Category.SANDBOX_VIOLATION, "the candidate answered a timed call twice", Phase.TIME
                    )
        finally:
            while not end.query():
                self._process.flags[flags.DONE] = number


class CpuClock:
    """The judge's CPU clock, from before the inputs are written until the outputs have been copied."""

    basis: Final = "cpu_clock"

    def __init__(self, exchange: Exchange, flusher: Flusher | None, *, on_gpu: bool) -> None:
        """Time the calls of one process. On a GPU the judge's stream writes GO right after the inputs."""
        self._exchange = exchange
        self._process = exchange.process
        self._flusher = flusher
        self._on_gpu = on_gpu
        #: The last call's outputs in the process's memory.
        self.views: list[Output] = []

    def time(self, order: Order, case: Case, into: list[torch.Tensor]) -> Sample:
        """Time one call with ``TIME`` or ``TIME_OVERHEAD``. See :meth:`GpuClock.time` for arguments and results."""
        page, process, exchange = self._process.flags, self._process, self._exchange
        number = process.send(order)
        self._wait(flags.READY, number)
        begin = time.perf_counter_ns()
        page[flags.SEED] = case.seed if exchange.form.draws else 0
        if not self._on_gpu:
            exchange.load(case.inputs)
            ready = time.perf_counter_ns()
            page[flags.GO] = number
        else:
            # Flush first: waiting for a flush after the inputs would give a kernel time to begin early.
            if self._flusher is not None:
                self._flusher()
            exchange.load(case.inputs)
            ready = time.perf_counter_ns()
            self._process.semaphores.write(torch.cuda.current_stream().cuda_stream, flags.GO, number)
        self._wait(flags.DONE, number)
        self.views = exchange.outputs(process.receive(number))
        copy_out(self.views, into)
        exchange.settle()
        end = time.perf_counter_ns()
        if page[flags.DONE] != number:
            raise EvaluationEnded(
                Category.SANDBOX_VIOLATION, "the candidate answered a timed call before its end", Phase.TIME
            )
        return Sample(end - begin, ready - begin, _own_ns(page, number))

    def _wait(self, flag: int, number: int) -> None:
        """Wait until the flag shows the call's number, or the candidate sends a reply."""
        process = self._process
        flags.wait(process.flags, flag, number, nap=not self._on_gpu, gone=process.answered)


def _own_ns(page: memoryview[int], number: int) -> int:
    """Return a call's time by the process's own clock, which it reports when the call has ended, or -1."""
    deadline = time.monotonic() + _OWN_S
    while page[flags.TIMED] != number:
        if time.monotonic() > deadline:
            return -1
    return page[flags.OWN_NS]


def copy_ns(spec: TensorSpec, stride: tuple[int, ...], flusher: Flusher | None) -> float:
    """Return the shortest of a few times of copying an output on a GPU, in nanoseconds, as in a call.

    The copies use the judge's own memory, and only a part of large outputs. ``flusher`` flushes the L2 cache before
    each copy.
    """
    assert spec.dtype is not None
    shape, most = list(spec.shape), _COPIED_BYTES // spec.dtype.itemsize
    for _ in shape:
        extents = [(size - 1) * step for size, step in zip(shape, stride, strict=True)]
        if sum(extents) < most:
            break
        longest = extents.index(max(extents))
        shape[longest] = 1 + most // 2 // stride[longest]
    share = math.prod(spec.shape) / max(math.prod(shape), 1)
    taken = _shortest_copy(shape, stride, spec.dtype, flusher)
    if share <= 1:
        return taken
    # Only the cost of the size is scaled from a part, not the fixed cost of a copy.
    least = _shortest_copy([1] * len(shape), stride, spec.dtype, flusher)
    return least + (taken - least if taken - least > _COPY_NOISE_NS else 0.0) * share


def _shortest_copy(shape: list[int], stride: tuple[int, ...], dtype: torch.dtype, flusher: Flusher | None) -> float:
    view = torch.empty_strided(shape, stride, dtype=dtype, device="cuda")
    copy = torch.empty(shape, dtype=dtype, device="cuda")
    times: list[float] = []
    for _ in range(_COPIES):
        if flusher is not None:
            flusher()
        times.append(_span(lambda: copy.copy_(view), behind=flusher is None))
    return min(times)


@cache
def empty_kernel_ns() -> float:
    """Return the time in nanoseconds of the empty kernel of an overhead call, the least of many back to back.

    It is a property of the device, so a judge measures it once.
    """
    value = torch.zeros(1, device="cuda")
    many = 32

    def burst() -> None:
        for _ in range(many):
            value.zero_()

    return min(_span(burst, behind=True) for _ in range(10)) / many


def _span(work: Callable[[], object], *, behind: bool = False) -> float:
    """Return the nanoseconds of enqueued work. With ``behind`` it follows longer work, so the host adds no gaps."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    if behind:
        # Cycles, half a millisecond, in which all work is enqueued.
        torch.cuda._sleep(1_000_000)  # pyright: ignore[reportPrivateUsage]
    begin.record()
    work()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) * 1e6
