"""Triton on a CPU: kernels are compiled as for a GPU, as far as that needs no GPU, and run in Triton's interpreter.

Triton itself either compiles or interprets. Here each ``@triton.jit`` function can do both, so that a compiler's error
is not missed. A kernel can undo all of this in its own process and so hide its error, but not a wrong answer.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Generator
from dataclasses import replace
from operator import index
from types import SimpleNamespace
from typing import Any, Final

import torch

from workers.judge.candidate import arithmetic

#: Variable by which Triton chooses its interpreter.
VARIABLE: Final = "TRITON_INTERPRET"
#: Name and architecture of the GPU that kernels are compiled for: one that knows all of Triton's usual dtypes.
_TARGET: Final = ("cuda", 90, 32)


@contextlib.contextmanager
def uninterpreted() -> Generator[None]:
    """Import Triton so that its own functions can be compiled."""
    given = os.environ.pop(VARIABLE, None)
    try:
        yield
    finally:
        if given is not None:
            os.environ[VARIABLE] = given


class NeedsGpuError(AttributeError):
    """A kernel uses a part of Triton that its interpreter or driver lacks."""


class _NoGpu:
    """Replacement of a compiled kernel, and of the active driver. It can say what kernels are compiled for."""

    def __getattr__(self, name: str) -> Any:
        raise NeedsGpuError(f"{name} is not known: Triton's interpreter runs on the CPU, without a GPU")

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget(*_TARGET)

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int = 0) -> int:  # noqa: ARG002
        return 0


def install(page: memoryview[int]) -> None:
    """Make this process compile and interpret Triton's kernels. Without Triton, do nothing."""
    try:
        from triton import compiler, knobs
        from triton.runtime import autotuner, interpreter, jit
        from triton.runtime.driver import driver
    except ImportError:
        return
    runtime: Any = vars(knobs.runtime)
    runtime["interpret"] = False  # The knob's setter would change the environment, which a kernel can ask too.
    config: Any = driver
    config.set_active(_NoGpu())
    front: Any = compiler
    front.compile = _compile
    arithmetic.install(interpreter, page)
    _interpret(runtime, interpreter, jit.JITFunction)
    _tune(autotuner.Autotuner)


def _compile(src: Any, target: Any, options: Any, **_: Any) -> _NoGpu:
    """Compile a kernel as far as possible without assembling it. Used by Triton for each new kind of launch."""
    from triton._C.libtriton import ir
    from triton.compiler import make_backend

    backend: Any = make_backend(target)
    stages = dict[str, Callable[..., Any]]()
    parsed = backend.parse_options(dict(options))
    backend.add_stages(stages, parsed, src.language)
    context = ir.context()
    ir.load_dialects(context)
    backend.load_dialects(context)
    generators = backend.get_codegen_implementation(parsed)
    module = src.make_ir(target, parsed, generators, backend.get_module_map(), context)
    metadata = {"target": target, **vars(parsed)}
    for stage in ("ttir", "ttgir"):
        if stage in stages:
            module = stages[stage](module, metadata)
    if "ttir" not in stages:
        raise NeedsGpuError("Triton's interpreter cannot run Gluon")
    return _NoGpu()


def _interpret(runtime: dict[str, Any], module: Any, function: Any) -> None:
    """Make a launch compile the function, and then run it in the interpreter.

    A launch replaces the language's functions once, and not again for each call of a function in it. That would take
    most of the launch's time, and some of them would stay replaced.
    """
    patch, compile_only, language = module._patch_lang, function.run, module.tl
    everything = SimpleNamespace(__globals__={"language": language, "core": language.core})
    builder = module.interpreter_builder
    # The interpreter would compute each product and sum of integers twice, and report no overflow.
    builder.options = replace(builder.options, sanitize_overflow=False)
    interpreted: dict[Any, Any] = {}

    def of(own: Any) -> Any:
        if own.fn not in interpreted:
            interpreted[own.fn] = module.InterpretedFunction(own.fn)
        return interpreted[own.fn]

    def is_running() -> bool:
        return runtime["interpret"]

    def run(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        def sizes(by: Any) -> tuple[int, ...]:
            given: Any = grid(by) if callable(grid) else grid
            return (*map(index, given),)

        compiled = compile_only(self, *args, grid=grid, warmup=True, **kwargs)
        if not warmup:
            scope, runtime["interpret"] = patch(everything), True
            try:
                of(self).run(*args, grid=sizes, warmup=False, **kwargs)
            except module.InterpreterError as error:
                cause: BaseException = error
                while isinstance(cause, module.InterpreterError) and cause.__cause__ is not None:
                    cause = cause.__cause__
                # A GPU raises nothing else in a kernel that compiles.
                if isinstance(cause, AssertionError | MemoryError):
                    raise
                raise NeedsGpuError(f"Triton's interpreter cannot run this kernel: {cause!r}") from error
            finally:
                runtime["interpret"] = False
                scope.restore()
        return compiled

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not is_running():
            raise RuntimeError("Cannot call @triton.jit'd outside of the scope of a kernel")
        return of(self)(*args, **kwargs)

    def bind(self: Any, tensor: Any, _: Any = None) -> Any:
        """Bind a function that is also a tensor's method, such as ``sum``. The compiler binds it itself."""
        if not (is_running() and isinstance(tensor, language.tensor)):
            return self
        return lambda *args, **kwargs: self(tensor, *args, **kwargs)  # pyright: ignore[reportUnknownLambdaType]

    module._patch_lang = lambda fn: module._LangPatchScope() if is_running() else patch(fn)  # pyright: ignore[reportUnknownLambdaType]
    function.run, function.__call__, function.__get__ = run, call, bind


def _tune(tuner: Any) -> None:
    """Make an autotuner take the first configuration that its pruning leaves and that compiles."""
    from triton.compiler.errors import CompileTimeAssertionFailure

    prune = tuner.prune_configs

    def first(self: Any, kwargs: dict[str, Any]) -> list[Any]:
        configs = prune(self, kwargs)
        for config in configs:
            with contextlib.suppress(CompileTimeAssertionFailure):
                self.fn.run(*self.nargs.values(), **kwargs | config.all_kwargs() | {"warmup": True})
                return [config]
        return configs[:1]

    tuner.prune_configs = first
