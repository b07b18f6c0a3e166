"""The main loop of a sealed process: carry out the judge's orders and reply to each once.

Foreign code runs in this process, so the judge does not trust the replies. It decides from the buffers, the exit of the
process and CUDA's error codes.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import importlib
import importlib.util
import inspect
import json
import logging
import os
import socket
import sys
import time
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final, cast

import torch

from kqueue.backends import registered
from kqueue.contract import build_of
from workers.judge.candidate import (
    archive,
    failures,
    gradients,
    interpreter,
    libraries,
    memory,
    profile,
    ranks,
    warm_up,
)
from workers.judge.candidate.instance import Instance, is_plain, weights_of
from workers.judge.channel import activities, flags
from workers.judge.channel.arguments import check, put_together
from workers.judge.channel.buffers import Exports, OpenedBuffer, is_apart, is_dense
from workers.judge.channel.gpu_memory import CudaCallError, cudart
from workers.judge.channel.layout import put_back
from workers.judge.channel.marks import mark
from workers.judge.channel.objects import Built
from workers.judge.channel.orders import Binding, BufferSpec, Call, Job, Opening, Order
from workers.judge.channel.packets import send_with_fds, wait_briefly
from workers.judge.channel.parameters import described
from workers.judge.channel.protocol import Answer, Reply, Tag
from workers.judge.channel.randomness import set_seed
from workers.judge.channel.semaphores import Semaphores
from workers.judge.channel.tensors import LASTING, MAX_DIMS, MAX_TENSORS, Location, TensorSpec, Where
from workers.judge.channel.wire import Command, receive_command
from workers.judge.host import linux

#: Import name of the kernel's module.
MODULE: Final = "kernel"
#: File in which a candidate lists the argument types of each Triton kernel that it launches, as JSON.
LAUNCHED: Final = "launched"
#: Number of calls up to which memory is marked before each order, and the interval of later marks in calls.
_MARKED_CALLS: Final = 16
_MARKED_EVERY: Final = 8
#: Number of first calls before each of which the host's free memory is marked too, which takes milliseconds.
_MARKED_HOST_CALLS: Final = 4
#: GPU memory in bytes that a model can leave to torch for the next one, because allocating it again costs time.
_RESTING_BYTES: Final = 128 << 20
#: Maximum size of the inputs together of which a candidate's first call gets copies.
_COPIED_BYTES: Final = 64 << 20
#: Orders after which the judge sends another order at once.
_PROMPT: Final = frozenset({Order.ENQUEUE, Order.RUN})


class EntryPointError(Exception):
    """The source does not define the required class."""


class ProblemError(Exception):
    """A problem has the wrong form. The message states the necessary change."""


def preload() -> None:
    """Import the packages that most candidates import, without use of the GPU. Called before the first fork.

    torch's extension builder looks for GPUs when it is imported, and NVML then keeps descriptors open that a sealed
    candidate does not have. So GPUs are hidden during the import.
    """
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    logging.disable(logging.WARNING)
    try:
        importlib.import_module("torch.utils.cpp_extension")
        with contextlib.suppress(ImportError):
            with interpreter.uninterpreted():
                importlib.import_module("triton.language")
            if interpreter.VARIABLE in os.environ:
                # Sealed processes of a CPU slot use it, and would compile its source each time.
                importlib.import_module("triton.runtime.interpreter")
        for name in filter(None, os.environ.get("KQUEUE_PRELOAD", "").split(",")):
            try:
                importlib.import_module(name.strip())
            except Exception as error:  # noqa: BLE001 -- a sealed process that needs it fails then
                sys.stderr.write(f"KQUEUE_PRELOAD: {name} cannot be imported: {error}\n")
    finally:
        logging.disable(logging.NOTSET)
        if visible is None:
            del os.environ["CUDA_VISIBLE_DEVICES"]
        else:
            os.environ["CUDA_VISIBLE_DEVICES"] = visible


def serve(channel: socket.socket, page: memoryview[int], kind: Callable[[memoryview[int]], Harness]) -> None:
    """Carry out orders until the judge closes the channel."""
    obeying = kind(page)
    while (command := receive_command(channel)) is not None:
        for reply in obeying.obey(command):
            for export in obeying.exports.pending():
                send_with_fds(channel, export.pack(), export.descriptors)
                for descriptor in export.descriptors:
                    os.close(descriptor)
            channel.send(reply.pack())
        if command.order is Order.ENQUEUE and (failure := obeying.settle_after(command)) is not None:
            channel.send(failure.pack())
        if command.order in _PROMPT and obeying.on_gpu:
            wait_briefly(channel)


class Harness:
    """One model, from its source to its calls.

    Attributes:
        holds_sets: True if announced memory must stay valid until the judge releases it.
        device: ``cpu`` or ``cuda``.
        is_serial: True if no source names an API for several streams. The device then has one queue.
        is_member: True if the process is one of a group. Each order to answer then makes one call.
    """

    holds_sets = False

    def __init__(self, page: memoryview[int], directory: Path | None = None) -> None:
        """Initialize the harness. The source is written to ``directory`` or the working directory."""
        self._flags = page
        self._path = (directory or Path.cwd()) / f"{MODULE}.py"
        self.device = "cpu"
        self.is_serial = False
        self.is_member = False
        self._job = Job("", "", torch.float32, seed=0)
        self._class: Any
        self._module: Any
        self.own = Instance()
        self.exports = Exports()
        self._semaphores: Semaphores
        self._empty: torch.Tensor
        #: Begin and end of each enqueued call.
        self._events: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []
        #: In a builder, what stores the compiled libraries. Elsewhere prebuilt libraries are imported.
        self._keeper: libraries.Keeper | None = None
        self._calls = 0
        #: Gates and state that have random values, each with its name and with its own value.
        self._moved: list[tuple[str, torch.Tensor, float]] = []
        self._free_memory = memory.FreeMemory()
        self.orders: dict[Order, Callable[[Command], Reply | Iterable[Reply]]] = {
            Order.OPEN: self._open,
            Order.LOAD: self._load,
            Order.CONSTRUCT: self._construct,
            Order.BIND_INPUTS: self._bind_inputs,
            Order.WARM_UP: self._warm_up,
            Order.BIND_OUTPUTS: self._bind_outputs,
            Order.RUN: self._run,
            Order.TIME: self._time,
            Order.TIME_OVERHEAD: self._time,
            Order.ENQUEUE: self._enqueue,
            Order.SET_UP: self.set_up,
            Order.EVALUATE: self._evaluate,
            Order.PROFILE: self._profile,
            Order.BUILD: self._build,
            Order.ALLOW: self._allow,
            Order.DESCRIBE: self._describe,
            Order.MOVE: self._move,
            Order.REST: self._rest,
        }

    def obey(self, command: Command) -> Iterator[Reply]:
        """Carry out an order, and yield each reply. An exception of foreign code becomes the last reply."""
        try:
            replies = self.orders[command.order](command)
            yield from [replies] if isinstance(replies, Reply) else replies
        except BaseException as error:  # noqa: BLE001 -- the kernel can raise anything, SystemExit too
            yield self.failed(command, error)

    def settle_after(self, command: Command) -> Reply | None:
        """Wait for calls that were answered before their ends. Return a further reply if one fails."""
        try:
            self.settle()
        except Exception as error:  # noqa: BLE001 -- any error of the device
            return self.failed(command, error)
        with contextlib.suppress(RuntimeError):  # The kernel prevented the wait. The judge then uses its own clock.
            events = self._events[: len(command.payload)]
            self._report_own(command.sequence, [round(begin.elapsed_time(end) * 1e6) for begin, end in events])
        return None

    def _report_own(self, order: int, times_ns: Sequence[int]) -> None:
        """Report the times of an order's calls by this process's own clock."""
        for number, ns in enumerate(times_ns):
            self._flags[flags.OWN_NS + number] = ns
        self._flags[flags.TIMED] = order

    @property
    def on_gpu(self) -> bool:
        """Return whether the model runs on a GPU."""
        return self.device == "cuda"

    def _open(self, command: Command) -> Reply:
        opening: Opening = command.payload
        self.device = opening.device
        self.is_serial = opening.queues == 1
        if (member := opening.member) is not None:
            ranks.prepare(member)
            self.is_member = True
        self.watch_compiler()
        if self.on_gpu:
            if opening.launch_blocking:
                os.environ["CUDA_LAUNCH_BLOCKING"] = "1"
            if opening.queues:
                queues = str(opening.queues)
                os.environ |= {"CUDA_DEVICE_MAX_CONNECTIONS": queues, "CUDA_DEVICE_MAX_COPY_CONNECTIONS": queues}
            torch.cuda.init()
            if member is not None:
                torch.cuda.set_device(member.rank)
            self._semaphores = Semaphores(self._flags)
            self._empty = torch.zeros(1, device="cuda")
            torch.cuda.synchronize()
        else:
            interpreter.install(self._flags)
            torch.set_num_threads(torch.get_num_threads())  # It changes MKL, and a reference's threads are set later.
            self.exports.announce_memory()
        if member is not None:
            ranks.join(member)
        return self.done(command)

    def take_job(self, job: Job) -> None:
        """Prepare a job without running its source."""
        self._job = job
        # Written to a file, because Triton and tracebacks read sources from files.
        self._path.write_text(job.source, encoding="utf-8")
        if job.tree:
            archive.install(job, self._path.parent)
        if job.device_asserts:
            _have_triton_assert()
        if job.lines:
            libraries.note_lines()
        if self.on_gpu:
            self.set_tf32()

    def set_tf32(self) -> None:
        """Allow or forbid TF32 for matrix products and convolutions of fp32 values."""
        torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = self._job.tf32

    def _allow(self, command: Command) -> Reply:
        if self.on_gpu:
            total = torch.cuda.get_device_properties(0).total_memory
            torch.cuda.set_per_process_memory_fraction(min(1.0, command.payload / total))
        return self.done(command)

    def _describe(self, command: Command) -> Reply:
        return Reply(Answer.DONE, command.sequence, message=described(self.own.model))

    def _move(self, command: Command) -> Reply:
        """Give random values to gates and to constant state, whose names it answers, or give back their own values."""
        state = self.own.constant_state() if command.seed else {}
        with torch.no_grad():
            if command.seed:
                both = [*gradients.gates(self.own.model).items(), *state.items()]
                self._moved = [(name, one, float(one.min())) for name, one in both]
            for name, one, value in self._moved:
                if command.seed:
                    chance = torch.Generator(one.device).manual_seed(command.seed ^ zlib.crc32(name.encode()))
                    one.uniform_(generator=chance).add_(value)
                else:
                    one.fill_(value)
        self.settle()
        return Reply(Answer.DONE, command.sequence, message="\n".join(state))

    def _load(self, command: Command) -> Reply:
        self.take_job(command.payload)
        self.take_module(import_file(self._path))
        return self.done(command)

    def take_module(self, module: Any) -> None:
        """Take the required class from the imported module.

        Raises:
            EntryPointError: the module does not define the class.
        """
        entry = getattr(module, self._job.entry, None)
        if not _is_model(entry):
            told = f"the source defines no class {self._job.entry} derived from torch.nn.Module"
            if entry is not None:
                kind = "another class" if isinstance(entry, type) else f"of type {type(entry).__name__}"
                told += f" ({self._job.entry} is {kind})"
            others = [name for name, value in vars(module).items() if _is_model(value)]
            raise EntryPointError(told + (f", only {' and '.join(others[:3])}" if others else ""))
        self._class, self._module = entry, module
        for backend in registered().values() if self.on_gpu else ():
            if backend.prepare is not None and (loaded := sys.modules.get(backend.modules[0])) is not None:
                backend.prepare(loaded, torch)

    def _build(self, command: Command) -> Reply:
        """Run the command that builds the source's tree, or import the source for the libraries that it compiles."""
        job: Job = command.payload
        if build_of(job.source):
            self._job = job
            if job.lines:
                libraries.note_lines()
            self._report_compiling(True)
            try:
                archive.build(job, self._path.parent)
            except RuntimeError as error:
                raise failures.CompileError(failures.text_of(error)) from error
            finally:
                self._report_compiling(False)
            return self.done(command)
        self.take_job(job)
        keeper = libraries.Keeper(self._path.parent, self._job.architectures, lambda: self._report_compiling(False))
        self._keeper = keeper
        with keeper.installed():
            import_file(self._path)
        return self.done(command)

    def _construct(self, command: Command) -> Reply:
        arguments, keywords = put_together(self.to_device(command.payload), [])
        with torch.no_grad():
            torch.manual_seed(self._job.seed)
            model = self._class(*arguments, **keywords)
            torch.manual_seed(self._job.seed)
            model = self._model_to_device(model)
            self.own.model = torch.compile(model) if self._job.compiled else model
            self.own.steps = self._job.steps
            self.own.watch(self.own.resets, self.own.compared)
            self.settle()
        return self.done(command)

    def set_up(self, command: Command) -> Reply:
        """Call the model's setup() if it has no parameters, or the parameters of its forward.

        The latter gets arguments whose tensors have no values (device ``meta``).
        """
        model = self.own.model
        model = getattr(model, "_orig_mod", model)  # torch.compile wraps a model in another.
        positional, keywords = list[Any](), dict[str, Any]()
        if not inspect.isfunction(setup := getattr(type(model), "setup", None)):
            return Reply(Answer.MISMATCH, command.sequence)
        if len(names := [*inspect.signature(setup).parameters]) > 1:
            if names != [*inspect.signature(type(model).forward).parameters]:
                return Reply(Answer.MISMATCH, command.sequence)
            form: Binding = command.payload
            roots = [torch.empty(spec.shape, dtype=spec.dtype, device="meta") for spec in form.buffers]
            positional, keywords = put_together(form.arguments, put_back(roots, form.views))
        torch.manual_seed(self._job.seed)
        with torch.no_grad():
            setup(model, *positional, **keywords)
            self.own.watch(self.own.resets, self.own.compared)
            self.settle()
        return self.done(command)

    def to_device(self, value: Any) -> Any:
        """Return an argument with its tensors on the device, in the dtypes of :meth:`dtype_of`."""
        if isinstance(value, torch.Tensor):
            return value.detach().to(device=self.device, dtype=self.dtype_of(value))
        if type(value) in (list, tuple):
            return type(value)(self.to_device(item) for item in value)
        if type(value) is dict:
            return {key: self.to_device(item) for key, item in cast("dict[Any, Any]", value).items()}
        return Built(value.name, self.to_device(value.attributes)) if isinstance(value, Built) else value

    def dtype_of(self, tensor: torch.Tensor) -> torch.dtype:
        """Return the dtype of a weight or input on the device.

        float32 becomes the job's precision. float64 does too, because Python's and numpy's numbers have it by default.
        The source chose any other dtype on purpose, so it stays.
        """
        declared = tensor.dtype is torch.float32 or (tensor.dtype is torch.float64 and not self._job.keeps_float64)
        return self._job.dtype if declared else tensor.dtype

    def _model_to_device(self, model: torch.nn.Module) -> torch.nn.Module:
        """Return the model on the device, with its weights in the dtypes of :meth:`dtype_of`."""
        if all(
            self.dtype_of(w) is self._job.dtype for w in weights_of(model) if w.is_floating_point() or w.is_complex()
        ):
            return model.to(device=self.device, dtype=self._job.dtype)
        model = model.to(device=self.device)
        for weight in weights_of(model):
            weight.data = weight.data.to(self.dtype_of(weight))
        return model

    def _rest(self, command: Command) -> Reply:
        """Drop the model, its buffers and its memory. The next model of the class has the order's seed."""
        self.unbind(self.own.inputs)
        self._job = replace(self._job, seed=command.seed)
        self.own, self._moved = Instance(), []
        if not self.holds_sets:  # A candidate finds marks in its first calls of each shape.
            self._calls, self._free_memory = 0, memory.FreeMemory()
        linux.give_freed_memory_back()
        if self.on_gpu:
            self.exports.forget()
            if torch.cuda.memory_allocated() > _RESTING_BYTES:
                gc.collect()
            if torch.cuda.memory_reserved() > _RESTING_BYTES:
                torch.cuda.empty_cache()
        return self.done(command)

    def _bind_inputs(self, command: Command) -> Reply:
        binding: Binding = command.payload
        own = self.own
        own.forget()
        self.unbind(own.inputs)
        own.inputs = self._opened(command)
        check(binding.arguments)
        own.arrangement, own.views, own.differentiates = binding.arguments, binding.views, binding.differentiates
        own.gradients = binding.gradients
        if binding.resets != own.resets:
            own.watch(binding.resets, binding.compared)
        return self.done(command)

    def _bind_outputs(self, command: Command) -> Reply:
        binding: Binding = command.payload
        own = self.own
        own.structure, own.lasting, own.forms = binding.structure, binding.lasting, binding.buffers
        # The next allocations of forward can reuse this memory, so elements that it does not write become visible.
        for form in binding.buffers:
            mark(torch.empty(form.shape, dtype=form.dtype, device=self.device))
        return self.done(command)

    def _renew_memory(self, calls: int = 1, *, marks: bool = False) -> None:
        """Mark outputs of the last call as not written, and before some of the late calls free memory too."""
        own, before = self.own, self._calls
        self._calls += calls
        own.find_parameters()
        due = before // _MARKED_EVERY < self._calls // _MARKED_EVERY
        if self.on_gpu and (before < _MARKED_CALLS or due):
            memory.mark_free_blocks()
        made = (leaf for i, leaf in own.made.items() if i not in own.lasting)
        memory.mark_outputs(made, own.parameters, own.spared)
        own.forget()
        if not self.on_gpu:
            self._free_memory.renew(own.forms, due=due or self._calls <= _MARKED_HOST_CALLS, marks=marks)

    def grad_mode(self) -> contextlib.AbstractContextManager[Any]:
        """Return a context in which ``forward`` is called: without gradients unless the reference needs them."""
        return torch.set_grad_enabled(self.own.differentiates)

    def _opened(self, command: Command) -> list[OpenedBuffer]:
        specs: tuple[BufferSpec, ...] = command.payload.buffers
        return [OpenedBuffer(spec, fd) for spec, fd in zip(specs, command.descriptors, strict=True)]

    def unbind(self, buffers: list[OpenedBuffer]) -> None:
        """Wait for work on buffers, then unmap them."""
        self.settle()
        for buffer in buffers:
            buffer.close()

    def _warm_up(self, command: Command) -> Reply:
        """Call forward once with Triton's launches replaced by compilation."""
        # A compile error or a lack of resources counts only before the first skipped launch. Later kernels can depend
        # on data that a skipped launch did not write, so only the real call decides.
        self._flags[flags.COMPILING] = 1
        launched: list[list[Any]] = []
        compiling: contextlib.AbstractContextManager[None] = contextlib.nullcontext()
        if not self._job.compiled:
            compiling = warm_up.launching_nothing(launched, self._module, self.own.model)
        try:
            with compiling, self.grad_mode():
                self.own.call(self._copies())()
                self.settle()
        except Exception as error:  # noqa: BLE001 -- unwritten data can cause any exception
            if not launched and failures.tag_of(error) in (Tag.COMPILE, Tag.RESOURCES):
                return self.failed(command, error)
        finally:
            self._flags[flags.COMPILING] = 0
        with contextlib.suppress(OSError, TypeError, ValueError):
            self._path.with_name(LAUNCHED).write_text(json.dumps(launched))
        return self.done(command)

    def _copies(self) -> list[torch.Tensor] | None:
        """Return copies of small inputs for a candidate's first call, or None.

        So a kernel that keeps an input, or records its address in a CUDA graph, does not find later inputs there.
        """
        shared = [one.tensor for one in self.own.inputs]
        is_due = not (self._calls or self.holds_sets) and sum(one.nbytes for one in shared) <= _COPIED_BYTES
        return [one.clone() for one in shared] if is_due else None

    def _run(self, command: Command) -> Reply:
        own, copies = self.own, self._copies()
        self._renew_memory(marks=not self.holds_sets)
        own.reset()
        call = own.call(copies)
        set_seed(command.seed)
        with self.grad_mode():
            self.settle()
            output = call()
            # The host's part can compile. Only the GPU's part has a shorter deadline.
            self._flags[flags.ON_GPU] = 1
            try:
                self.settle()
            finally:
                self._flags[flags.ON_GPU] = 0
            self._begin_exports()
            reply = self.deliver(command.sequence, output)
            with torch.no_grad():
                for one, copy in zip(own.inputs, copies or (), strict=False):
                    one.tensor.copy_(copy)  # The judge reads changed inputs, and outputs that are views of them, there.
            self.settle()
        return reply

    def _time(self, command: Command) -> Reply:
        number, page = command.sequence, self._flags
        is_overhead = command.order is Order.TIME_OVERHEAD
        if not is_overhead:
            self._renew_memory()
            self.own.reset()
        forward = self._forward(Call.OVERHEAD if is_overhead else Call.IN_TURN)
        self.settle()
        self._begin_exports()
        with self.grad_mode():
            page[flags.READY] = number
            flags.wait(page, flags.GO, number, nap=not self.on_gpu)
            begin = time.perf_counter_ns()
            set_seed(page[flags.SEED])
            reply = self.deliver(number, forward(), is_overhead=is_overhead)
            self.settle()
            self._report_own(number, [time.perf_counter_ns() - begin])
        page[flags.DONE] = number
        return reply

    def _enqueue(self, command: Command) -> Iterator[Reply]:
        """Enqueue calls. All other work on the GPU ends before the first is answered, and so before any begins."""
        kinds: tuple[Call, ...] = command.payload
        if forwards := sum(kind is not Call.OVERHEAD for kind in kinds):
            last = self.own.last
            self._renew_memory(forwards)
            self.own.reset()
            self.own.last = last  # An overhead call delivers it again.
        set_seed(0)  # This clock times no model that draws random numbers.
        self.settle()
        self._begin_exports()
        while len(self._events) < len(kinds):
            self._events.append((torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)))
        stream = torch.cuda.current_stream().cuda_stream
        for number, (kind, (begin, end)) in enumerate(zip(kinds, self._events, strict=False), command.sequence):
            forward = self._forward(kind)
            with self.grad_mode():
                self._semaphores.wait(stream, flags.GO, number)
                begin.record()
                reply = self.deliver(number, forward(), is_overhead=kind is Call.OVERHEAD)
                self._semaphores.drain(stream)
                end.record()
                self._semaphores.write(stream, flags.DONE, number)
            yield reply

    def _evaluate(self, command: Command) -> Reply:
        self.own.model.eval()
        return self.done(command)

    def _profile(self, command: Command) -> Reply:
        """Record a few calls with CUPTI. The result is only evidence, so a failure is recorded too."""
        [memory] = command.descriptors
        try:
            with self.grad_mode():
                page = activities.encode(profile.kernels(self.own.call()))
        except Exception as error:  # noqa: BLE001 -- CUPTI's, or the kernel's under CUPTI
            page = activities.encode_failure(f"{failures.qualified(type(error))}: {failures.text_of(error)}")
        os.pwrite(memory, page, 0)
        return self.done(command)

    def _forward(self, kind: Call) -> Callable[[], Any]:
        """Return the function that a timed call runs: the model, or a no-op for the launch overhead."""
        # Two processes share a GPU by time slices, and a call without launches would not wait for its slice. So a
        # launch overhead launches an empty kernel. So does a call that is compared with such a launch overhead.
        last, call = self.own.last, self.own.call()
        if kind is Call.OVERHEAD:
            forward = lambda: last  # noqa: E731
        else:
            self.own.forget()
            forward = call
        if kind is Call.PLAIN or not self.on_gpu:
            return forward
        return lambda: (self._empty.zero_(), forward())[1]

    def _begin_exports(self) -> None:
        if not self.holds_sets:
            self.exports.begin()

    def deliver(self, number: int, output: Any, *, is_overhead: bool = False) -> Reply:
        """Deliver outputs of the reference's structure. Describe outputs of another structure."""
        own = self.own
        structure, leaves = gradients.described(output)
        specs = tuple(TensorSpec.of(leaf) for leaf in leaves[:MAX_TENSORS])
        own.last, own.delivered = output, []
        if not is_overhead:
            own.dense.clear()
        if structure != own.structure:
            return Reply(Answer.MISMATCH, number, structure=structure, tensors=specs)
        locations = [self._locate_output(own, i, leaf) for i, leaf in enumerate(leaves)]
        for buffer in own.buffers():
            location, spec = Location(), TensorSpec(None, (), self.device)
            if is_plain(buffer) and self.can_locate(buffer):
                location, there = self.locate(buffer.detach())
                own.delivered.append(there)
                spec = TensorSpec.of(buffer)
            locations.append(location)
            specs += (spec,)
        return Reply(Answer.DONE, number, structure=structure, tensors=specs, locations=tuple(locations))

    def _locate_output(self, own: Instance, i: int, leaf: torch.Tensor) -> Location:
        """Return an output's location. An output that the judge cannot read there is copied at the kernel's cost."""
        if not self.can_locate(leaf):
            return Location()
        leaf = leaf.detach().resolve_conj().resolve_neg()
        number = own.input_of(leaf)
        if number is None:
            own.made[i] = leaf
        if number is not None and is_apart(leaf.shape, leaf.stride()):
            offset = leaf.data_ptr() - own.input_memory[number][0]
            return Location(Where.INPUT, number, offset=offset, stride=leaf.stride())
        # A launch overhead reuses the dense copies of the call before, so that it does not include their cost.
        if not self.on_gpu and not is_dense(leaf.shape, leaf.stride()):
            if i not in own.dense:
                own.dense[i] = leaf.clone(memory_format=torch.contiguous_format)
            leaf = own.dense[i]
        location, there = self.locate(leaf)
        own.delivered.append(there)
        if there is leaf and leaf.untyped_storage().data_ptr() in own.parameters:
            return replace(location, index=LASTING)
        return location

    def can_locate(self, leaf: torch.Tensor) -> bool:
        """Return whether the judge can read a tensor of this device and form."""
        has_form = leaf.device.type == self.device and leaf.numel() > 0 and leaf.dim() <= MAX_DIMS
        return has_form and TensorSpec.of(leaf).dtype is not None

    def locate(self, leaf: torch.Tensor) -> tuple[Location, torch.Tensor]:
        """Return the location of a tensor in this process, and the tensor there, which is a copy where necessary."""
        if not self.on_gpu:
            if not is_dense(leaf.shape, leaf.stride()):
                leaf = leaf.clone(memory_format=torch.contiguous_format)
            return Location(Where.OWN, offset=leaf.data_ptr(), stride=leaf.stride()), leaf
        if is_apart(leaf.shape, leaf.stride()):
            with contextlib.suppress(CudaCallError):
                return self.exports.location(leaf), leaf
        leaf = leaf.clone(memory_format=torch.contiguous_format)
        return self.exports.location(leaf), leaf

    def settle(self) -> None:
        """Wait for the device, and raise the errors of launches that the kernel did not check."""
        self.see_launches()
        if self.on_gpu:
            torch.cuda.synchronize()

    def see_launches(self) -> None:
        """Raise the errors so far of launches that the kernel did not check."""
        if self.on_gpu and (code := cudart().cudaGetLastError()):
            raise UncheckedLaunchError(code)

    def done(self, command: Command) -> Reply:
        """Return the reply to an order without results."""
        return Reply(Answer.DONE, command.sequence)

    def failed(self, command: Command, error: BaseException) -> Reply:
        """Print an exception that ended an order, and return the reply that reports it."""
        return failures.reply_to(command, error, self._job.source, on_gpu=self.on_gpu)

    def watch_compiler(self) -> None:
        """Report to the judge while torch's extension builder compiles, and mark its exceptions as compile errors.

        The patches stay in place, so that foreign code cannot distinguish calls by them.
        """
        builder = libraries.builder()
        original = builder._jit_compile

        @functools.wraps(original)
        def watched(*args: Any, **kwargs: Any) -> Any:
            try:
                libraries.drop_stale_lock(original, args, kwargs)
                if self._keeper is not None:
                    self._report_compiling(True)
                    return self._keeper.build(original, args, kwargs)
                if library := libraries.prebuilt(self._job.built, original, args, kwargs, self._path.parent):
                    return builder._import_module_from_library(*library)
                self._report_compiling(True)
                return original(*args, **kwargs)
            except Exception as error:
                raise failures.CompileError(failures.text_of(error)) from error
            finally:
                self._report_compiling(False)

        builder._jit_compile = watched
        libraries.use_quick_compilers()

    def _report_compiling(self, compiling: bool) -> None:
        self._flags[flags.COMPILING] = compiling


class UncheckedLaunchError(RuntimeError):
    """A launch failed and the kernel did not check its result. ``error_code`` is CUDA's code."""

    def __init__(self, code: int) -> None:
        runtime: Any = torch.cuda.cudart()
        name = runtime.cudaGetErrorString(runtime.cudaError(code))
        super().__init__(f"a kernel launch failed with CUDA error {code} ({name}) and its result was not checked")
        self.error_code = code


def _is_model(value: Any) -> bool:
    return isinstance(value, type) and issubclass(value, torch.nn.Module)


def import_file(path: Path) -> Any:
    """Import a file as the module of its name."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    sys.argv = [str(path)]  # A source can parse the command line, and this one is the fork server's.
    spec.loader.exec_module(module)
    return module


def _have_triton_assert() -> None:
    """Enable assertions in Triton and its interpreter. Their environment variable was already read at import."""
    with contextlib.suppress(ImportError):  # then there are no Triton kernels
        from triton import knobs
        from triton.runtime.interpreter import interpreter_builder as builder

        knobs.runtime.debug = True
        builder.options = replace(builder.options, debug=True)
