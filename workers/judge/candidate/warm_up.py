"""A first call of a model in which Triton compiles every kernel and launches none."""

from __future__ import annotations

import builtins
import contextlib
import sys
import types
from collections.abc import Generator
from typing import Any

import torch

#: Containers that belong to no kernel, though its module refers to them.
_NOT_ITS_OWN = (vars(builtins), sys.modules)


@contextlib.contextmanager
def launching_nothing(launched: list[list[Any]], module: Any, model: Any) -> Generator[None]:
    """Replace every launch of a Triton kernel by its compilation, and append its argument types to ``launched``.

    An autotuner's configurations are compiled one by one. A configuration that does not compile or needs too many
    resources is skipped, because the autotuner also skips it. Afterwards the kernel's module and model have the state
    that they had before, because a packed weight, a table or a CUDA graph that they keep lacks the skipped work.
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

    before: list[tuple[Any, Any]] = []
    with contextlib.suppress(Exception):  # the code of foreign objects
        before = _state(module, model)
    jit.run, tuner.run = compile_only, compile_all
    try:
        yield
    finally:
        jit.run, tuner.run = run, tune
        with contextlib.suppress(Exception):
            _restore(before)


def _state(module: Any, model: Any) -> list[tuple[Any, Any]]:
    """Return what a kernel's module and its model can change, each with a copy of its contents.

    These are attributes of the module, of its classes and functions, and of all objects of these classes and modules of
    torch. Lists, dicts and sets among the values, and caches of functions, are part of it.
    """
    found: dict[int, tuple[Any, Any]] = {}
    left: list[Any] = [vars(module), model]
    while left:
        one = left.pop()
        is_own = (one if isinstance(one, type | types.FunctionType) else type(one)).__module__ == module.__name__
        if isinstance(one, types.FunctionType) and is_own:
            left += one.__defaults__ or ()
        if (is_own or isinstance(one, torch.nn.Module)) and not isinstance(one, type):
            one = getattr(one, "__dict__", None)
        if id(one) in found or any(one is other for other in _NOT_ITS_OWN):
            continue
        if isinstance(one, dict) or (isinstance(one, type) and is_own):
            contents = dict(vars(one) if isinstance(one, type) else one)
            left += contents.values()
        elif isinstance(one, list | set):
            contents = one.copy()
            left += contents
        elif hasattr(type(one), "cache_clear"):  # lru_cache
            contents = None
        else:
            continue
        found[id(one)] = one, contents
    return list(found.values())


def _restore(state: list[tuple[Any, Any]]) -> None:
    for one, contents in state:
        if isinstance(one, type):
            for name in vars(one).keys() - contents.keys():
                delattr(one, name)
            for name in (name for name, value in contents.items() if vars(one).get(name) is not value):
                setattr(one, name, contents[name])
        elif isinstance(one, list):
            one[:] = contents
        elif contents is None:
            one.cache_clear()
        else:
            one.clear()
            one.update(contents)
