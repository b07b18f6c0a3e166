"""Proxy of the sealed process that runs a problem's source: orders within a deadline, and checked replies.

The problem's source runs only there. The judge checks that each reply is possible for a problem, and reads tensors in
the process's own memory. A failure of the process is blamed on the problem, or on the fleet if another process killed
it.
"""

from __future__ import annotations

import contextlib
import math
import mmap
import os
import re
import secrets
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Self

import torch

from kqueue.categories import Category
from kqueue.contract import Phase, Settings
from workers.judge.channel import scalar_page
from workers.judge.channel.buffers import LocationError, SharedTensor, view_within
from workers.judge.channel.flags import memory
from workers.judge.channel.gpu_memory import CudaCallError
from workers.judge.channel.orders import Ask, Gradients, Job, Member, Opening, Order
from workers.judge.channel.protocol import Reply
from workers.judge.channel.tensors import Location, TensorSpec, Where
from workers.judge.ending import EvaluationEnded
from workers.judge.forkserver.process import SealedProcess
from workers.judge.host import linux
from workers.judge.pipeline import static
from workers.judge.pipeline.blame import blaming, invalid_problem
from workers.judge.pipeline.cases import DTYPES, Case, Form
from workers.judge.pipeline.exchange import Exchange, Output, await_opening, own_memory

#: Maximum share of a CPU host's memory for the tensors of one call. Judge and candidate hold copies of them.
_HOST_SHARE: Final = 1 / 8
#: Maximum time in seconds for a process to free its memory before it is kept for another evaluation.
_REST_S: Final = 5.0
#: Pattern of a registered buffer's full name.
_NAME: Final = re.compile(r"[\w.-]{1,300}")
#: Time in seconds that a process gets to reply when no time is left, because an alarm needs a positive time.
_LEAST_S: Final = 0.001


@dataclass(frozen=True, slots=True)
class Taken:
    """Figures reported by a problem's process."""

    #: Size of the model in bytes, and the maximum GPU memory in bytes that was allocated, or 0 on a CPU.
    weights: int
    peak: int
    #: Number of random numbers of one input set that can be changed, or 0 before a variant was made.
    drawn: int
    #: Least CPU time in seconds of drawing an input set and of a forward so far, infinite before the first.
    draw_s: float
    call_s: float
    #: Names of the buffers and parameters that forward changes, checksums of the initial values if they are in each
    #: answer, and names of further ones that are too large for a reset.
    resets: tuple[str, ...]
    initial: tuple[int, ...]
    unwatched: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Question:
    """A question to the reference on one case, which it holds."""

    case: Case
    ask: Ask

    @classmethod
    def of(cls, case: Case, nudge: float = 0.0, **how: Any) -> Self:
        """Return a question. ``how`` are further fields of :class:`Ask`."""
        assert case.slot is not None
        return cls(case, Ask(case.slot, case.seed, nudge=nudge, nudge_seed=secrets.randbits(63) if nudge else 0, **how))


class ReferenceProxy:
    """The process of a problem's reference, whose orders share one deadline.

    Attributes:
        exchange: memory shared with the process, for its calls and their timing.
        tree: text of the tree that the problem names, or empty. ``built`` is the directory of what its build wrote.
        form: form of the problem's calls, known after the first case and the first output.
        seed: random seed of the last constructor.
        init_inputs: the constructor's arguments from ``get_init_inputs()``.
        left_s: seconds left of the reference's deadline.
        allowed_bytes: GPU memory in bytes that the process can allocate.
    """

    def __init__(self, process: SealedProcess, source: str, settings: Settings, device: str) -> None:
        """Use a new or kept process, which runs nothing yet."""
        self.process = process
        self.source = source
        self.tree = self.built = ""
        self.settings = settings
        self.device = device
        self.form = Form()
        self.exchange = Exchange(process, self.form, device)
        self.init_inputs: list[Any] | dict[str, Any] | tuple[Any, ...] = []
        self.seed = 0
        self.left_s = settings.deadlines.reference_s
        self.allowed_bytes = 0
        self._opening = 0
        descriptor = memory("kqueue-sheet", scalar_page.SIZE)
        self._page = mmap.mmap(descriptor, scalar_page.SIZE, prot=mmap.PROT_READ)
        self._scalar_page: int | None = descriptor
        self._arena: SharedTensor | None = None

    def begin(self, member: Member | None = None) -> None:
        """Start opening the device in the process without waiting for it. A ``member`` joins its group."""
        opening = Opening(self.device, 0 if member else static.queues(self.source), member=member)
        self._opening = self.process.send(Order.OPEN, payload=opening)

    def await_opening(self) -> None:
        """Wait until the process has opened the device, if :meth:`begin` started that.

        Raises:
            ForkServerError: the process could not open the device.
        """
        if self._opening:
            opening, self._opening = self._opening, 0
            await_opening(self.process, opening)

    def load(self) -> None:
        """Import the problem.

        Raises:
            EvaluationEnded: ``invalid_problem``, ``reference_error`` or ``reference_timeout``.
            ForkServerError: the process could not open the device.
        """
        self.await_opening()
        job = Job(
            source=self.source,
            entry="Model",
            dtype=DTYPES[self.settings.precision],
            keeps_float64=self.settings.keeps_float64,
            tf32=self.settings.tf32,
            seed=self.seed,
            steps=static.calls(self.source) or 1,
            tree=self.tree,
            built=self.built,
        )
        self.order(Order.LOAD, what="importing the problem", payload=job)

    def construct(self, seed: int) -> None:
        """Construct the model on the device, in the place of an earlier one. The candidate's has the same seed."""
        self.seed, fds = seed, () if self._scalar_page is None else (self._scalar_page,)
        try:
            self.order(Order.INITIAL, what="get_init_inputs()", fds=fds, seed=seed)
        finally:
            self._scalar_page = None
            for descriptor in fds:
                os.close(descriptor)
        self.init_inputs = self.read("get_init_inputs()", (list, dict, tuple))
        if isinstance(self.init_inputs, tuple) and [type(part) for part in self.init_inputs] != [list, dict]:
            raise invalid_problem("get_init_inputs() sent another pair than a list and a dict")
        self.order(Order.CONSTRUCT, what="Model(*get_init_inputs())", payload=self.init_inputs)

    def taken(self) -> Taken:
        """Return the memory that the problem takes."""
        self.order(Order.TAKEN, what="the problem")
        reported = self.read("the problem", dict)
        sizes = [reported.get(name) for name in ("weights", "peak", "drawn")]
        times = [reported.get(name) for name in ("draw_s", "call_s")]
        names, initial = [reported.get(name) for name in ("resets", "unwatched")], reported.get("initial")
        if (
            any(type(size) is not int or not 0 <= size < 1 << 60 for size in sizes)
            or any(type(seconds) is not float or not seconds >= 0 for seconds in times)
            or not all(isinstance(some, list) for some in (*names, initial))
            or not all(type(name) is str and _NAME.fullmatch(name) for some in names for name in some)
            or not all(type(number) is int for number in initial)
            or len(initial) > len(names[0])
        ):
            message = "the problem reported impossible sizes, times or buffers"
            raise EvaluationEnded(Category.REFERENCE_ERROR, message, Phase.REFERENCE)
        return Taken(*sizes, *times, resets=tuple(names[0]), initial=tuple(initial), unwatched=tuple(names[1]))

    def differentiate(self, case: Case, what: str, *, backward: bool) -> Gradients:
        """Return the gradients that the process finds on a held case, and computes from now on."""
        assert case.slot is not None
        self.order(Order.DIFFERENTIATE, what=what, payload=(case.slot, backward), seed=case.seed)
        try:
            found = Gradients(**self.read(what, dict))
            sizes = (size for _, shape in found.weights for size in shape)
            if any(type(number) is not int or number < 0 for number in (*found.outputs, *found.absent, *sizes)):
                raise ValueError("an impossible number")
            names = [found.names[number] for number in (*found.delivered, *found.absent)]
            if not all(name.isprintable() for name in (*names, *(name for name, _ in found.weights))):
                raise ValueError("an impossible name")
        except (AttributeError, TypeError, ValueError, LookupError):
            message = "the problem reported impossible gradients"
            raise EvaluationEnded(Category.REFERENCE_ERROR, message, Phase.REFERENCE) from None
        return found

    def allow(self, nbytes: int) -> None:
        """Set the GPU memory in bytes that the process can allocate."""
        self.allowed_bytes = nbytes
        self.order(Order.ALLOW, what="the problem", payload=nbytes)

    @property
    def arena_bytes(self) -> int:
        """Size of the arena in bytes, or 0 if there is none."""
        return 0 if self._arena is None else self._arena.spec.nbytes

    def share_arena(self, nbytes: int) -> None:
        """Share memory with the process for its small tensors. Other tensors stay in the process's own memory."""
        if not nbytes or self._arena is not None:
            return
        with contextlib.suppress(CudaCallError, EvaluationEnded):
            arena = SharedTensor(torch.empty(1, dtype=torch.uint8, device=self.device).expand(nbytes))
            assert arena.descriptor is not None
            self._arena = arena
            try:
                self.order(Order.ARENA, what="the arena", payload=arena.spec, fds=(arena.descriptor,), optional=True)
            finally:
                arena.close()

    def free_arena(self) -> None:
        """Free the arena in the judge. No case can be read afterwards."""
        if self._arena is not None:
            self.exchange.settle()
            self._arena.free()
            self._arena = None

    def order(self, order: Order, *, what: str, optional: bool = False, **arguments: Any) -> Reply:
        """Send an order and wait for the reply within the reference's deadline."""
        with self._within_deadline(), self.blaming(what, optional=optional):
            return self.process.order(order, **arguments)

    def ask(self, questions: Sequence[Question]) -> list[Reply | EvaluationEnded]:
        """Send questions together and return the reply or the failure of each. Raise if the process ends."""
        if not questions:
            return []
        asks = tuple(question.ask for question in questions)
        with self._within_deadline(), self.blaming("Model.forward"):
            replies = self.process.order_each(Order.ANSWER, len(asks), payload=asks)
        return [self._blamed(reply, ask) for reply, ask in zip(replies, asks, strict=True)]

    def _blamed(self, reply: Reply | EvaluationEnded, ask: Ask) -> Reply | EvaluationEnded:
        """Return the reply to a question, or its failure with the problem or the fleet blamed."""
        if isinstance(reply, Reply):
            return reply
        what = "the model in float64" if ask.wide else "Model.forward"
        try:
            with self.blaming(what, optional=ask.wide or ask.nudge > 0):  # Memory can be too small for these.
                raise reply
        except EvaluationEnded as ended:
            if self.process.ended is not None:
                raise
            return ended

    def blaming(self, what: str, *, optional: bool = False) -> contextlib.AbstractContextManager[None]:
        """Blame the problem for failures in the context. See :func:`.blame.blaming`."""
        return blaming(what, self.process, self.settings.deadlines.reference_s, self.allowed_bytes, optional=optional)

    @contextlib.contextmanager
    def _within_deadline(self) -> Generator[None]:
        """Apply the reference's deadline to orders in this context, and subtract the time that they take."""
        if self.process.phase is not Phase.REFERENCE:
            self.process.enter(Phase.REFERENCE, max(self.left_s, _LEAST_S))
        waited_s = self.process.waited_s
        try:
            yield
        finally:
            self.left_s = max(self.left_s - (self.process.waited_s - waited_s), 0.0)

    def read(self, what: str, kind: type | tuple[type, ...]) -> Any:
        """Return the value that the process wrote to the scalar page."""
        try:
            value = scalar_page.decode(self._page)
        except scalar_page.ScalarPageError as error:
            raise EvaluationEnded(Category.REFERENCE_ERROR, f"{what}: {error}", Phase.REFERENCE) from None
        if not isinstance(value, kind):
            raise EvaluationEnded(Category.REFERENCE_ERROR, f"{what} sent {type(value).__name__}", Phase.REFERENCE)
        return value

    def tensors(self, specs: Sequence[TensorSpec], locations: Sequence[Location], what: str) -> list[torch.Tensor]:
        """Return the process's tensors: on a GPU as views, on a CPU as copies in the judge's own memory."""
        views: list[Output] = []
        try:
            for spec, location in zip(specs, locations, strict=True):
                blank = torch.empty(spec.shape, dtype=spec.dtype, device=self.device) if 0 in spec.shape else None
                if blank is None and location.where is Where.ARENA and self._arena is not None:
                    blank = view_within(self._arena.flat, location, spec)
                views.append(own_memory(self.process, spec, location) if blank is None else blank)
        except LocationError as error:
            raise EvaluationEnded(Category.REFERENCE_ERROR, f"{what}: {error}", Phase.REFERENCE) from None
        with self.blaming(what):
            return self.exchange.read(views)

    def check_size(self, specs: Sequence[TensorSpec], what: str) -> None:
        """Reject tensors of an impossible shape, and tensors of which the judge cannot hold a few copies."""
        if any(size < 0 for spec in specs for size in spec.shape):
            raise invalid_problem(f"{what} reported a tensor of an impossible shape")
        nbytes = sum(math.prod(max(size, 1) for size in spec.shape) * dtype_of(spec).itemsize for spec in specs)
        if self.device == "cuda":
            most = self.allowed_bytes
        else:
            most = min(self.settings.limits.host_memory_bytes, int(_HOST_SHARE * linux.physical_bytes()))
        if nbytes > most:
            message = f"{what} makes tensors of {nbytes} bytes, and at most {most} are possible here"
            raise EvaluationEnded(Category.REFERENCE_ERROR, message, Phase.REFERENCE)

    def renew(self) -> None:
        """Reset the deadlines of a kept process to a new process's deadlines."""
        self.left_s = self.settings.deadlines.reference_s
        self.process.enter(Phase.REFERENCE, self.left_s)
        self.process.allow_compilers(self.settings.deadlines.compile_s)

    def rest(self) -> None:
        """Have the process drop the problem's model and tensors, so that it can load another shape of it.

        Raises:
            EvaluationEnded: the process did not free its memory in time.
        """
        self.exchange.settle()
        self.process.enter(Phase.CLEANUP, _REST_S)
        self.process.order(Order.REST)
        self.process.imports.close()
        self.free_arena()

    def discard(self) -> None:
        """End the process, and free its memory in the judge."""
        self.process.stop()
        self.process.imports.close()
        self.free_arena()

    def keep(self, key: str, memo: dict[str, Any], wanted: Path) -> None:
        """Hand the process over to a later evaluation of the same problem and settings.

        Raises:
            EvaluationEnded: the process did not free its memory in time.
            ForkServerError: the fork server is gone.
        """
        self.process.allow_compilers(0.0)
        self.rest()
        self.process.count()
        self.process.leave(key, memo, wanted)


def dtype_of(spec: TensorSpec) -> torch.dtype:
    """Return the dtype of a tensor that was accepted before."""
    assert spec.dtype is not None
    return spec.dtype


def bytes_of(spec: TensorSpec) -> int:
    """Return the size of a tensor's values in bytes."""
    return math.prod(spec.shape) * dtype_of(spec).itemsize
