"""The two ways to time one call of a sealed process. Neither asks the process for the time.

On a GPU, :class:`GpuClock` puts events of the judge's own CUDA context around all that belongs to the call::

    judge's stream      [wait HOLD][event][write inputs][flush L2][GO][wait DONE][copy outputs][event]
    candidate's stream                                              [wait GO][forward][DONE]

The candidate enqueues its part first, then the judge enqueues its own and lets HOLD go. So the span holds no time of
the host. Inputs appear within the span, so nothing can be worked on before it. Outputs are copied within the span, so
an early DONE gains nothing. Two processes take turns on a GPU's processors and never run there side by side, so work
that a candidate does before GO delays the judge's own work, which is in the span too. A forward that needs no
processors (copies, callbacks) waits for no turn, but a null does; such a forward is timed behind an empty kernel.

A forward that waits for the GPU cannot be enqueued ahead: it would wait for a GO that waits for it. Its answer does not
come. Such calls, and all calls on a CPU, are timed by :class:`CpuClock`: the judge's CPU clock from before the inputs
are written until the outputs have been copied.
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import math
import os
import time
from collections.abc import Callable
from functools import cache
from typing import Any, Final

import torch

from kqueue.categories import Category
from kqueue.contract import Phase
from workers.judge.channel import flags
from workers.judge.channel.gpu_memory import CudaCallError, call
from workers.judge.channel.protocol import Order, TensorSpec
from workers.judge.channel.semaphores import Semaphores
from workers.judge.ending import EvaluationEnded
from workers.judge.pipeline.cases import Case
from workers.judge.pipeline.exchange import Exchange, Output, copy_out

#: Seconds that a candidate may take to enqueue a call before the judge concludes that it waits for the GPU: at the
#: first try and at later ones. A busy host can hold up an honest candidate for a moment.
_ENQUEUE_S: Final = (0.05, 0.25)
#: Seconds that the judge waits for an untimed call, and between two looks at it.
_LET_GO_S: Final = 10.0
_NAP_S: Final = 0.0002
#: How often a copy is timed, and what it copies at most, in bytes.
_COPIES: Final = 5
_COPIED_BYTES: Final = 128 << 20
#: By how much such times differ without a reason, in nanoseconds.
_COPY_NOISE_NS: Final = 1000.0
#: ``cudaDeviceAttr``: the memory's peak clock in kilohertz, and the width of its bus in bits.
_MEMORY_CLOCK_KHZ: Final = 36
_MEMORY_BUS_BITS: Final = 37
#: Looks at an event between looks at the candidate (about 1 ms).
_LOOK: Final = 1 << 10


class Flusher:
    """Empties the GPU's L2 cache: it resets lines that were asked to persist, and writes twice the cache's size."""

    def __init__(self) -> None:
        size = torch.cuda.get_device_properties(0).L2_cache_size
        self._buffer = torch.empty(2 * size, dtype=torch.uint8, device="cuda")

    def __call__(self) -> None:
        call("cudaCtxResetPersistingL2Cache")
        self._buffer.zero_()

    def bandwidth(self) -> float:
        """Return the device's memory bandwidth, reads and writes together, in bytes a second.

        That is what the memory's clock and width allow at most: a floor under a kernel's time that rests on it accuses
        nobody wrongly. Where the device does not tell them, it is twice of what the best of a few copies reaches:
        copies of the cache's size came to half of the peak on an H200.
        """
        with contextlib.suppress(CudaCallError):
            return _peak_bandwidth(torch.cuda.current_device())
        half = self._buffer.numel() // 2
        best = min(_span(lambda: self._buffer[:half].copy_(self._buffer[half:])) for _ in range(_COPIES))
        return 4 * half / best * 1e9


@cache
def _peak_bandwidth(device: int) -> float:
    """Return what the memory's clock and width allow, in bytes a second.

    Raises:
        CudaCallError: the device does not tell.
    """
    told: list[int] = []
    for attribute in (_MEMORY_CLOCK_KHZ, _MEMORY_BUS_BITS):
        value = ctypes.c_int()
        call("cudaDeviceGetAttribute", ctypes.byref(value), attribute, device)
        told.append(value.value)
    kilohertz, bits = told
    return 2 * kilohertz * 1e3 * bits / 8  # two transfers a cycle


class Hold:
    """Holds the judge's stream until all of a call is enqueued, by a page of flags of the judge's own.

    To register a page takes milliseconds where others open the device, so this is made before the device is had alone.
    """

    def __init__(self) -> None:
        page = flags.create()
        self._page = flags.attach(page)
        os.close(page)
        self._semaphores = Semaphores(self._page)
        self._numbers = itertools.count(1)
        self._number = 0

    def wait(self, stream: int) -> None:
        """Have a stream wait."""
        self._number = next(self._numbers)
        self._semaphores.wait(stream, flags.GO, self._number)

    def let_go(self) -> None:
        """Let the stream go on that waits."""
        self._page[flags.GO] = self._number


class GpuClock:
    """Events around work that was enqueued ahead.

    Attributes:
        views: the outputs of the last call, where they lie.
    """

    basis: Final = "gpu_clock"

    def __init__(self, exchange: Exchange, hold: Hold, flusher: Flusher | None) -> None:
        """Time the calls of one process, the L2 cache emptied before each where a flusher is given."""
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

    def time(self, order: Order, case: Case, into: list[torch.Tensor]) -> tuple[int, int] | None:
        """Time one call.

        Args:
            order: ``AHEAD``, ``AHEAD_IN_TURN`` or ``AHEAD_NULL``.
            case: its inputs.
            into: memory for its outputs.

        Returns:
            nanoseconds of the whole span and of the judge's own work before GO; None if the candidate could
            not enqueue the call in time.

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
            self._process.flags[flags.DONE] = number  # nothing may be left that waits
            raise
        finally:
            self._hold.let_go()
        self._await(end, number)
        return round(begin.elapsed_time(end) * 1e6), round(begin.elapsed_time(ready) * 1e6)

    def _load_copies(self, into: list[torch.Tensor], views: list[Output]) -> None:
        """Copy once from new layouts: the copy loads kernels, which cannot be loaded behind a stream that waits."""
        layouts = tuple((view.shape, view.stride(), view.dtype) for view in views)
        if layouts not in self._layouts:
            copy_out(views, into)
            torch.cuda.synchronize()
            self._layouts.add(layouts)

    def _enqueue(self, order: Order, case: Case, seconds: float) -> tuple[int, list[Output]] | None:
        """Have the candidate enqueue a call; return None if it did not do so in time and was let go."""
        number = self._process.send(order, seed=case.seed)
        self._process.look_out()
        if self._process.answered(seconds):
            return number, self._exchange.outputs(self._process.receive(number))
        # It runs on right inputs, untimed; its answer does not count.
        self._exchange.load(case.inputs)
        self._exchange.settle()
        self._process.flags[flags.GO] = number
        self._process.receive(number)
        return None

    def _let_go(self, number: int) -> None:
        """Have an enqueued call run untimed, and wait for its end, so that it does not disturb what is timed next."""
        page = self._process.flags
        page[flags.GO] = number
        deadline = time.monotonic() + _LET_GO_S
        while page[flags.DONE] != number and not self._process.answered() and time.monotonic() < deadline:
            time.sleep(_NAP_S)

    def _await(self, end: torch.cuda.Event, number: int) -> None:
        """Wait for the end of a call. Say DONE for a candidate that fails meanwhile: the stream waits for it."""
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
    """The judge's CPU clock: from before the inputs are written until the outputs have been copied.

    Attributes:
        views: the outputs of the last call, where they lie.
    """

    basis: Final = "cpu_clock"

    def __init__(self, exchange: Exchange, flusher: Flusher | None, *, on_gpu: bool) -> None:
        """On a GPU the go-ahead is the judge's stream's to give, right after the inputs."""
        self._exchange = exchange
        self._process = exchange.process
        self._flusher = flusher
        self._on_gpu = on_gpu
        self.views: list[Output] = []

    def time(self, order: Order, case: Case, into: list[torch.Tensor]) -> tuple[int, int]:
        """One timed call with ``TIME`` or ``TIME_NULL``; otherwise as :meth:`GpuClock.time`."""
        page, process, exchange = self._process.flags, self._process, self._exchange
        number = process.send(order, seed=case.seed)
        self._wait(flags.READY, number)
        begin = time.perf_counter_ns()
        if not self._on_gpu:
            exchange.load(case.inputs)
            ready = time.perf_counter_ns()
            page[flags.GO] = number
        else:
            # Flushed first: a wait for the flush would leave time to begin early on inputs that are there.
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
                Category.SANDBOX_VIOLATION, "the candidate answered a timed call that it had not done", Phase.TIME
            )
        return end - begin, ready - begin

    def _wait(self, flag: int, number: int) -> None:
        """Wait until the flag shows the call's number, or the candidate says something else."""
        process = self._process
        flags.wait(process.flags, flag, number, nap=not self._on_gpu, gone=process.answered)


def copy_ns(spec: TensorSpec, stride: tuple[int, ...], flusher: Flusher | None) -> float:
    """Return the time that copying an output takes on a GPU, in nanoseconds, as in calls: the shortest of a few.

    It is measured with memory of the judge's own, of large outputs with a part of them.

    Args:
        spec: of the output.
        stride: how it lies.
        flusher: empties the L2 cache before each copy; None as in :class:`GpuClock`.
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
    # Of a part only what its size costs is multiplied, and not what any copy does.
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


def empty_kernel_ns() -> float:
    """Return the time of a null's empty kernel on this device, in nanoseconds: one of many that run back to back."""
    word = torch.zeros(1, device="cuda")
    many = 32

    def burst() -> None:
        for _ in range(many):
            word.zero_()

    return min(_span(burst, behind=True) for _ in range(3)) / many


def _span(work: Callable[[], object], *, behind: bool = False) -> float:
    """Return the nanoseconds that work takes on this process's stream.

    Args:
        work: enqueues it.
        behind: enqueue it behind longer work, so that no gaps of the host are in the time.
    """
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    if behind:
        # Cycles, half a millisecond: all is enqueued by then.
        torch.cuda._sleep(1_000_000)  # pyright: ignore[reportPrivateUsage]
    begin.record()
    work()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) * 1e6
