"""A first call of a model in which Triton compiles every kernel and launches none."""

from __future__ import annotations

import contextlib
from collections.abc import Generator
from typing import Any


@contextlib.contextmanager
def launching_nothing(launched: list[list[Any]]) -> Generator[None]:
    """Replace every launch of a Triton kernel by its compilation, and append its argument types to ``launched``.

    An autotuner's configurations are compiled one by one. A configuration that does not compile or needs too many
    resources is skipped, because the autotuner also skips it.
    """
    from triton.compiler.errors import CompileTimeAssertionFailure
    from triton.runtime.autotuner import Autotuner
    from triton.runtime.errors import OutOfResources, PTXASError
    from triton.runtime.jit import JITFunction

    jit: Any = JITFunction
    tuner: Any = Autotuner
    run, tune = jit.run, tuner.run
    tuning = False

    def compile_only(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:  # noqa: ARG001
        try:
            kernel = run(self, *args, grid=grid, warmup=True, **kwargs)
            load = getattr(kernel, "_init_handles", None)
            if load is not None:
                load()  # load onto the device, because the first launch would
        except (CompileTimeAssertionFailure, OutOfResources, PTXASError):
            if not tuning:
                raise
            return None
        launched.append(list(getattr(getattr(kernel, "src", None), "signature", {}).values()))
        return kernel

    def compile_all(self: Any, *args: Any, warmup: bool, **kwargs: Any) -> Any:  # noqa: ARG001
        nonlocal tuning
        before, tuning = tuning, True
        try:
            return self.warmup(*args, **kwargs)
        finally:
            tuning = before

    jit.run, tuner.run = compile_only, compile_all
    try:
        yield
    finally:
        jit.run, tuner.run = run, tune
