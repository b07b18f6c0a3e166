"""A first call of a model in which Triton compiles every kernel and launches none."""

from __future__ import annotations

import builtins
import contextlib
import sys
import types
from collections.abc import Callable, Generator
from functools import partial
from typing import Any, Final

import torch

from workers.judge.channel.bits import checksum

#: Types of values without attributes or entries of a kernel. Below: containers to which its module only refers.
_PLAIN: Final = frozenset({bool, int, float, complex, str, bytes, type(None), torch.Tensor})
_NOT_ITS_OWN: Final = (vars(builtins), sys.modules)
#: Maximum number of entries of a container that is copied, and of all objects together.
_MOST_ENTRIES: Final = 100_000
_MOST_OBJECTS: Final = 100_000


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

    undo: list[Callable[[], object]] = []
    with contextlib.suppress(Exception):  # the code of foreign objects
        undo = _undoing(module, model)
    jit.run, tuner.run = compile_only, compile_all
    try:
        yield
    finally:
        jit.run, tuner.run = run, tune
        weights, *rest = undo or [lambda: True]
        for step in rest if weights() else ():
            with contextlib.suppress(Exception):
                step()


def _undoing(module: Any, model: Any) -> list[Callable[[], object]]:
    """Return functions that give a kernel's module and its model their present state back.

    State is the attributes of the module, of its classes and functions, and of all objects of these classes and modules
    of torch, with lists, dicts and sets among the values, and caches of functions. The first function returns whether
    all parameters are unchanged. Otherwise nothing can be undone: a kernel would prepare its parameters twice.
    """
    seen: dict[int, Any] = {}
    undo: list[Callable[[], object]] = []
    weights: list[tuple[torch.Tensor, int, int]] = []
    left: list[Any] = [module, model]
    while left:
        one = left.pop()
        kind = type(one)
        if kind in _PLAIN or id(one) in seen or any(one is other for other in _NOT_ITS_OWN):
            continue
        seen[id(one)] = one
        own = one if isinstance(one, type | types.FunctionType) else kind
        if isinstance(one, torch.nn.Parameter):
            weights.append((one, one.data_ptr(), checksum(one.data)))
        elif isinstance(one, dict | list | set):
            if len(one) <= _MOST_ENTRIES:
                contents = one.copy()
                undo.append(partial(_refill, one, contents))
                left += contents.values() if isinstance(contents, dict) else contents
        elif (clear := getattr(kind, "cache_clear", None)) is not None:  # functools.lru_cache
            undo.append(partial(clear, one))
        elif one is module or own.__module__ == module.__name__ or isinstance(one, torch.nn.Module):
            attributes = dict(getattr(one, "__dict__", {}))
            undo.append(partial(_set_attributes, one, kind, attributes))
            left += [*attributes.values(), *(getattr(one, "__defaults__", None) or ())]
        if len(seen) > _MOST_OBJECTS:
            return []
    return [lambda: all((w.data_ptr(), checksum(w.data)) == (at, total) for w, at, total in weights), *undo]


def _refill(one: Any, contents: Any) -> None:
    if isinstance(one, list):
        one[:] = contents
    elif one != contents or isinstance(one, dict):
        one.clear()
        one.update(contents)


def _set_attributes(one: Any, kind: type, attributes: dict[str, Any]) -> None:
    if type(one) is not kind:  # A lazy module has become another one.
        return
    now = vars(one)
    # torch's compiler adds such names to the module of a function that it compiles.
    for name in [name for name in now if name not in attributes and not name.startswith("__")]:
        delattr(one, name) if isinstance(one, type) else now.pop(name)
    for name in [name for name, value in attributes.items() if name not in now or now[name] is not value]:
        setattr(one, name, attributes[name]) if isinstance(one, type) else now.update({name: attributes[name]})
