"""The candidate's main loop: obey the judge's orders, answer each once.

It runs the kernel's code in its own process, so nothing it says is believed: the judge decides from the
buffers, the process's end and CUDA's codes. What the answers are honest about only helps the candidate.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import logging
import os
import sys
import traceback
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any, Final

import torch

from workers.judge.candidate import libraries, profile
from workers.judge.channel import activities, flags
from workers.judge.channel.buffers import (
    CudaCallError,
    Exports,
    cudart,
    driver,
    is_apart,
    open_buffer,
)
from workers.judge.channel.protocol import (
    MAX_DIMS,
    MAX_TENSORS,
    Answer,
    Binding,
    Command,
    Job,
    Order,
    Place,
    Reply,
    Tag,
    TensorSpec,
    Where,
    describe,
    receive_command,
)
from workers.judge.channel.randomness import set_seed
from workers.judge.channel.semaphores import Semaphores

#: The name under which the kernel's module is imported.
MODULE: Final = "kernel"

#: Exception types that say what happened, by qualified name: their packages may not be installed.
_TAGS: Final = {
    "triton.compiler.errors.CompilationError": Tag.COMPILE,
    "triton.compiler.errors.CompileTimeAssertionFailure": Tag.COMPILE,
    "triton.compiler.errors.UnsupportedLanguageConstruct": Tag.COMPILE,
    "triton.runtime.errors.PTXASError": Tag.COMPILE,
    "triton.runtime.errors.OutOfResources": Tag.RESOURCES,
    "cupy.cuda.compiler.CompileException": Tag.COMPILE,
    "cupy.cuda.memory.OutOfMemoryError": Tag.GPU_MEMORY,
    "torch.OutOfMemoryError": Tag.GPU_MEMORY,
    "torch.cuda.OutOfMemoryError": Tag.GPU_MEMORY,
    "builtins.MemoryError": Tag.HOST_MEMORY,
    "builtins.SystemExit": Tag.EXIT,
}
_OUT_OF_MEMORY: Final = 2  # cudaErrorMemoryAllocation


class EntryPointError(Exception):
    """The module does not define the class that was asked for."""


class _CompileError(Exception):
    """Stands for an exception that a compiler's failure raised; the original is its cause."""


def preload() -> None:
    """Import what most candidates import, without touching the GPU. Called before anything is forked.

    torch's extension builder asks for GPUs when it is imported, and the library that answers keeps
    descriptors open which a forked and sealed candidate does not have: there are none to find meanwhile.
    """
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    logging.disable(logging.WARNING)
    try:
        importlib.import_module("torch.utils.cpp_extension")
        with contextlib.suppress(ImportError):
            importlib.import_module("triton.language")
    finally:
        logging.disable(logging.NOTSET)
        if visible is None:
            del os.environ["CUDA_VISIBLE_DEVICES"]
        else:
            os.environ["CUDA_VISIBLE_DEVICES"] = visible


def serve(channel: Any, page: memoryview[int]) -> None:
    """Obey orders until the judge is gone."""
    candidate = Candidate(page)
    while (command := receive_command(channel)) is not None:
        channel.send(candidate.obey(command).pack())
        if (failure := candidate.settle_after(command)) is not None:
            channel.send(failure.pack())


class Candidate:
    """One model, from its source to its calls."""

    def __init__(self, page: memoryview[int]) -> None:
        self._flags = page
        self._path = Path.cwd() / f"{MODULE}.py"
        self._job: Job
        self._module: Any
        self._model: Any
        self._arguments: list[Any] = []
        self._inputs: Binding
        self._outputs: list[torch.Tensor] = []
        self._structure = ""
        #: The last output, and the tensors of it as they were delivered: they must live until they were read.
        self._last: Any = None
        self._delivered: list[torch.Tensor] = []
        #: Beginning and size of the shared inputs.
        self._input_memory: list[tuple[int, int]] = []
        self._exports = Exports()
        self._semaphores: Semaphores
        self._empty: torch.Tensor
        self._orders: dict[Order, Callable[[Command], Reply]] = {
            Order.OPEN: self._open,
            Order.LOAD: self._load,
            Order.CONSTRUCT: self._construct,
            Order.BIND_INPUTS: self._bind_inputs,
            Order.REHEARSE: self._rehearse,
            Order.BIND_OUTPUTS: self._bind_outputs,
            Order.RUN: self._run,
            Order.TIME: self._time,
            Order.TIME_NULL: self._time,
            Order.AHEAD: self._run_ahead,
            Order.AHEAD_NULL: self._run_ahead,
            Order.AHEAD_IN_TURN: self._run_ahead,
            Order.PROFILE: self._profile,
            Order.BUILD: self._build,
        }

    def obey(self, command: Command) -> Reply:
        """Carry out an order; whatever the kernel raises becomes an answer."""
        try:
            return self._orders[command.order](command)
        except BaseException as error:  # noqa: BLE001 -- the kernel may raise anything, SystemExit too
            traceback.print_exc()
            return self._raised(command, error)

    def settle_after(self, command: Command) -> Reply | None:
        """Wait for a call that was answered ahead of its end; the answer if it fails after all."""
        if command.order not in (Order.AHEAD, Order.AHEAD_NULL, Order.AHEAD_IN_TURN):
            return None
        try:
            self._settle()
        except Exception as error:  # noqa: BLE001 -- whatever the device has to say
            traceback.print_exc()
            return self._raised(command, error)
        return None

    @property
    def _on_gpu(self) -> bool:
        return self._job.device == "cuda"

    def _open(self, command: Command) -> Reply:
        self._job = command.payload
        # A file, because Triton and tracebacks read sources from files.
        self._path.write_text(self._job.source, encoding="utf-8")
        if self._on_gpu:
            torch.cuda.init()
            torch.cuda.set_per_process_memory_fraction(self._job.memory_fraction)
            self._semaphores = Semaphores(self._flags)
            self._empty = torch.zeros(1, device="cuda")
            torch.cuda.synchronize()
        return self._done(command)

    def _load(self, command: Command) -> Reply:
        with self._compiler_watched():
            module = self._import_source()
        entry = getattr(module, self._job.entry, None)
        if not (isinstance(entry, type) and issubclass(entry, torch.nn.Module)):
            raise EntryPointError(f"the source defines no class {self._job.entry} derived from torch.nn.Module")
        self._module = entry
        return self._done(command)

    def _build(self, command: Command) -> Reply:
        """Import the source for the libraries that it has compiled; nothing else of it is used."""
        keeper = libraries.Keeper(self._path.parent, command.payload, lambda: self._say_compiling(False))
        with keeper.installed(), self._compiler_watched(keeper.build):
            self._import_source()
        return self._done(command)

    def _import_source(self) -> Any:
        spec = importlib.util.spec_from_file_location(MODULE, self._path)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[MODULE] = module
        spec.loader.exec_module(module)
        return module

    def _construct(self, command: Command) -> Reply:
        arguments = [_move(value, self._job) for value in self._job.init_inputs]
        with torch.no_grad(), self._compiler_watched():
            torch.manual_seed(self._job.seed)
            model = self._module(*arguments)
            torch.manual_seed(self._job.seed)
            model = model.to(device=self._job.device, dtype=self._job.dtype)
            self._model = torch.compile(model) if self._job.compiled else model
            self._settle()
        return self._done(command)

    def _bind_inputs(self, command: Command) -> Reply:
        binding: Binding = command.payload
        tensors = self._shared(command)
        self._arguments = list(binding.arguments)
        for place, tensor in zip(binding.tensors, tensors, strict=True):
            self._arguments[place] = tensor
        self._input_memory = [(t.data_ptr(), spec.nbytes) for t, spec in zip(tensors, binding.buffers, strict=True)]
        return self._done(command)

    def _bind_outputs(self, command: Command) -> Reply:
        binding: Binding = command.payload
        self._structure = binding.structure
        if self._on_gpu:
            # What forward allocates next may lie where this has been: what it does not write then shows.
            for spec in binding.buffers:
                torch.full((spec.nbytes,), 0xFF, dtype=torch.uint8, device="cuda")
        else:
            self._outputs = self._shared(command)
        return self._done(command)

    def _shared(self, command: Command) -> list[torch.Tensor]:
        specs = command.payload.buffers
        descriptors = command.descriptors or (None,) * len(specs)
        return [open_buffer(spec, fd) for spec, fd in zip(specs, descriptors, strict=True)]

    def _rehearse(self, command: Command) -> Reply:
        """Call forward once with Triton's launches turned into compilation; only its compilers' word counts."""
        self._flags[flags.COMPILING] = 1
        compiling = contextlib.nullcontext() if self._job.compiled else _triton_launches_nothing()
        try:
            with compiling, torch.no_grad():
                self._model(*self._arguments)
                self._settle()
        except Exception as error:  # noqa: BLE001 -- on garbage anything may be raised; the real call will tell
            if _tag(error) is Tag.COMPILE:
                traceback.print_exc()
                return self._raised(command, error)
        finally:
            self._flags[flags.COMPILING] = 0
        return self._done(command)

    def _run(self, command: Command) -> Reply:
        set_seed(command.seed)
        with torch.no_grad(), self._compiler_watched():
            output = self._model(*self._arguments)
            self._settle()
            reply = self._deliver(command, output)
            self._settle()
        return reply

    def _time(self, command: Command) -> Reply:
        number, page, forward = command.sequence, self._flags, self._forward(command)
        set_seed(command.seed)
        self._settle()
        with torch.no_grad():
            page[flags.READY] = number
            flags.wait(page, flags.GO, number, nap=not self._on_gpu)
            reply = self._deliver(command, forward())
            self._settle()
        page[flags.DONE] = number
        return reply

    def _run_ahead(self, command: Command) -> Reply:
        number, forward = command.sequence, self._forward(command)
        set_seed(command.seed)
        self._settle()
        stream = torch.cuda.current_stream().cuda_stream
        with torch.no_grad():
            self._semaphores.wait(stream, flags.GO, number)
            reply = self._deliver(command, forward())
            self._semaphores.write(stream, flags.DONE, number)
        return reply

    def _profile(self, command: Command) -> Reply:
        """Have CUPTI record a few calls. What comes of it is evidence and no more: a failure is written down too."""
        [memory] = command.descriptors
        try:
            with torch.no_grad():
                page = activities.encode(profile.kernels(lambda: self._model(*self._arguments)))
        except Exception as error:  # noqa: BLE001 -- CUPTI's, or the kernel's under CUPTI
            page = activities.encode_failure(f"{_qualified(type(error))}: {error}")
        os.pwrite(memory, page, 0)
        return self._done(command)

    def _forward(self, command: Command) -> Callable[[], Any]:
        """What a timed call runs: the model, or for a null all that a call costs but its forward.

        Two processes take turns on a GPU's processors: a call that launched nothing would not wait for its
        turn. So a null launches an empty kernel, and where it is asked for a call does so too.
        """
        model, arguments, last = self._model, self._arguments, self._last
        null = command.order in (Order.TIME_NULL, Order.AHEAD_NULL)
        forward = (lambda: last) if null else (lambda: model(*arguments))
        if command.order is Order.AHEAD or not self._on_gpu:
            return forward
        return lambda: (self._empty.zero_(), forward())[1]

    def _deliver(self, command: Command, output: Any) -> Reply:
        """Hand outputs of the reference's form over; describe any others."""
        structure, leaves = describe(output)
        tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)][:MAX_TENSORS]
        specs = tuple(TensorSpec.of(tensor) for tensor in tensors)
        if structure != self._structure:
            return Reply(Answer.MISMATCH, command.sequence, structure=structure, tensors=specs)
        fits = all(
            leaf.shape == to.shape and leaf.dtype == to.dtype and leaf.device == to.device
            for leaf, to in zip(leaves, self._outputs, strict=False)
        )
        if not fits:
            return Reply(Answer.MISMATCH, command.sequence, structure=structure, tensors=specs)
        self._last, self._delivered = output, []
        places = tuple(self._place(i, leaf) for i, leaf in enumerate(leaves))
        return Reply(Answer.DONE, command.sequence, structure=structure, tensors=specs, places=places)

    def _place(self, i: int, leaf: torch.Tensor) -> Place:
        """Where an output lies. What the judge could not read there is copied, at the kernel's cost."""
        if leaf.device.type != self._job.device or leaf.numel() == 0 or leaf.dim() > MAX_DIMS:
            return Place()
        if TensorSpec.of(leaf).dtype is None:
            return Place()
        leaf = leaf.detach().resolve_conj().resolve_neg()
        apart = is_apart(leaf.shape, leaf.stride())
        for index, (begin, nbytes) in enumerate(self._input_memory):
            offset = leaf.data_ptr() - begin
            if 0 <= offset < nbytes and apart:
                return Place(Where.INPUT, index, offset=offset, stride=leaf.stride())
        if not self._on_gpu:
            self._outputs[i].copy_(leaf)
            return Place(Where.SHARED)
        place = None
        if apart:
            with contextlib.suppress(CudaCallError):
                place = self._exports.place(leaf)
        if place is None:
            leaf = leaf.clone(memory_format=torch.contiguous_format)
            place = self._exports.place(leaf)
        self._delivered.append(leaf)
        return place

    def _settle(self) -> None:
        """Wait for the device, and raise what it has to say about launches that nobody checked."""
        if self._on_gpu:
            if code := cudart().cudaGetLastError():
                raise UncheckedLaunchError(code)
            torch.cuda.synchronize()

    def _done(self, command: Command) -> Reply:
        return Reply(Answer.DONE, command.sequence)

    def _raised(self, command: Command, error: BaseException) -> Reply:
        tag, code = _tag(error), _cuda_code(error)
        if code == 0 and self._on_gpu and tag in (Tag.OTHER, Tag.CUDA):
            code = _context_code()
        if code == _OUT_OF_MEMORY:
            tag = Tag.GPU_MEMORY
        elif code and tag is Tag.OTHER:
            tag = Tag.CUDA
        shown = error.__cause__ if isinstance(error, _CompileError) and error.__cause__ else error
        return Reply(
            Answer.RAISED,
            command.sequence,
            tag=tag,
            code=code,
            exception=_qualified(type(shown)),
            message=str(shown),
        )

    @contextlib.contextmanager
    def _compiler_watched(self, build: Callable[..., Any] | None = None) -> Generator[None]:
        """While torch's extension builder works, say so, and mark what it raises.

        Args:
            build: takes the builder's function and its arguments in its place; without, what was built before is
                imported, and the rest built.
        """
        builder = libraries.builder()
        original = builder._jit_compile

        def watched(*args: Any, **kwargs: Any) -> Any:
            try:
                if build is not None:
                    self._say_compiling(True)
                    return build(original, args, kwargs)
                if found := libraries.prebuilt(self._job.built, original, args, kwargs, self._path.parent):
                    return builder._import_module_from_library(*found)
                self._say_compiling(True)
                return original(*args, **kwargs)
            except Exception as error:
                raise _CompileError(str(error)) from error
            finally:
                self._say_compiling(False)

        builder._jit_compile = watched
        try:
            yield
        finally:
            builder._jit_compile = original

    def _say_compiling(self, compiling: bool) -> None:
        self._flags[flags.COMPILING] = compiling


class UncheckedLaunchError(RuntimeError):
    """A launch failed and the kernel did not look; ``error_code`` is CUDA's code."""

    def __init__(self, code: int) -> None:
        super().__init__(f"a kernel launch failed with CUDA error {code} and its result was not checked")
        self.error_code = code


def _move(value: Any, job: Job) -> Any:
    """A constructor's argument on the device, floating tensors in the evaluation's precision."""
    if isinstance(value, torch.Tensor):
        return value.to(device=job.device, dtype=job.dtype if value.is_floating_point() else None)
    return value


def _qualified(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


def _tag(error: BaseException) -> Tag:
    if isinstance(error, _CompileError):
        return Tag.COMPILE
    if isinstance(error, EntryPointError):
        return Tag.ENTRY_POINT
    for kind in type(error).__mro__:
        if (tag := _TAGS.get(_qualified(kind))) is not None:
            return tag
    return Tag.CUDA if _cuda_code(error) else Tag.OTHER


def _cuda_code(error: BaseException) -> int:
    """CUDA's code as torch's, CuPy's and our own exceptions carry it; 0 for none."""
    for name in ("error_code", "status"):
        code = getattr(error, name, None)
        if type(code) is int and 0 < code < 10_000:
            return code
    return 0


def _context_code() -> int:
    """The error that has ended this process's CUDA context, asked of the driver; 0 if it is well."""
    try:
        driver("cuCtxSynchronize")
    except CudaCallError as error:
        return error.error_code
    except OSError:  # there is no driver
        return 0
    return 0


@contextlib.contextmanager
def _triton_launches_nothing() -> Generator[None]:
    """Turn every launch of a Triton kernel into its compilation."""
    from triton.runtime.autotuner import Autotuner
    from triton.runtime.jit import JITFunction

    jit: Any = JITFunction
    tuner: Any = Autotuner
    run, tune = jit.run, tuner.run

    def compile_only(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:  # noqa: ARG001
        kernel = run(self, *args, grid=grid, warmup=True, **kwargs)
        load = getattr(kernel, "_init_handles", None)
        if load is not None:
            load()  # onto the device, which the first launch would do else
        return kernel

    def compile_all(self: Any, *args: Any, warmup: bool, **kwargs: Any) -> Any:  # noqa: ARG001
        return self.warmup(*args, **kwargs)

    jit.run, tuner.run = compile_only, compile_all
    try:
        yield
    finally:
        jit.run, tuner.run = run, tune
