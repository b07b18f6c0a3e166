"""A first call of a model in which Triton compiles every kernel and launches none."""

from __future__ import annotations

import builtins
import contextlib
import sys
import types
from collections import deque
from collections.abc import Callable, Generator
from functools import partial
from typing import Any, Final

import torch

from workers.judge.channel.bits import checksum

#: Types of values without attributes or entries of a kernel. Below: containers to which its module only refers.
_PLAIN: Final = frozenset({bool, int, float, complex, str, bytes, type(None)})
_NOT_ITS_OWN: Final = (vars(builtins), sys.modules)
_Slot = types.MemberDescriptorType
#: Maximum number of entries of a container, and of bytes of a tensor, that are copied, and of all objects together.
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
        self.nargs = dict(zip(self.arg_names, args, strict=False))
        try:
            for config in self.prune_configs(kwargs):
                chosen = config.all_kwargs()
                if config.pre_hook is not None:  # It can set the blocks of tensor descriptors.
                    config.pre_hook({**self.nargs, **kwargs, **chosen})
                self.fn.warmup(*args, **kwargs, **chosen)
        finally:
            tuning, self.nargs = before, None

    undo = _undoing(module, model)
    jit.run, tuner.run = compile_only, compile_all
    try:
        yield
    finally:
        jit.run, tuner.run = run, tune
        for step in undo:
            with contextlib.suppress(Exception):
                if step() is False:
                    break


def _undoing(module: Any, model: Any) -> list[Callable[[], object]]:
    """Return functions that give a kernel's module and its model their present state back.

    State is the attributes of the module, of its classes and functions, and of all objects of these classes and modules
    of torch, with containers among the values, and caches of functions. The first function returns whether no parameter
    was changed in place, and no lazy module became another one. Otherwise nothing can be undone: a kernel would prepare
    its parameters twice.
    """
    seen = {id(one): (one, type(one)) for one in (*_NOT_ITS_OWN, vars(module))}
    undo: list[Callable[[], object]] = []
    weights: list[tuple[torch.Tensor, int]] = []
    left: list[Any] = [module, model]
    while left and len(seen) <= _MOST_OBJECTS:
        one = left.pop()
        if type(one) not in _PLAIN and id(one) not in seen:
            seen[id(one)] = one, type(one)
            with contextlib.suppress(Exception):  # the code of a foreign object
                left += _undoing_one(one, module, undo, weights)

    def is_as_before() -> bool:
        return all(type(one) is kind for one, kind in seen.values()) and all(checksum(w) == bits for w, bits in weights)

    return [] if left else [is_as_before, *undo]


def _undoing_one(
    one: Any, module: Any, undo: list[Callable[[], object]], weights: list[tuple[torch.Tensor, int]]
) -> list[Any]:
    """Append what gives an object its present state back. Return the values that are part of this state."""
    kind, further = type(one), list[Any]()
    is_function = isinstance(one, types.FunctionType)
    is_own = one is module or (one if is_function or isinstance(one, type) else kind).__module__ == module.__name__
    if isinstance(one, torch.nn.Parameter):
        undo.append(partial(setattr, one, "data", one.data))
        weights.append((one.data, checksum(one.data)))
    elif isinstance(one, torch.Tensor):
        if one.nbytes <= _MOST_ENTRIES:
            undo.append(partial(one.detach().copy_, one.detach().clone()))
    elif isinstance(one, dict | list | set | deque):
        if len(one) <= _MOST_ENTRIES:
            contents = dict(one.items()) if isinstance(one, dict) else list(one)
            undo.append(partial(_refill, one, contents))
            further += contents.values() if isinstance(contents, dict) else contents
    elif isinstance(one, tuple):
        further += one
    elif isinstance(one, partial):
        further += [one.func, one.args, one.keywords]
    elif isinstance(one, staticmethod | classmethod):
        further.append(one.__func__)
    elif (clear := getattr(kind, "cache_clear", None)) is not None:  # functools.lru_cache
        undo.append(partial(clear, one))
    if is_function and is_own:
        for cell in one.__closure__ or ():
            with contextlib.suppress(ValueError):  # an empty cell
                undo.append(partial(setattr, cell, "cell_contents", cell.cell_contents))
                further.append(cell.cell_contents)
        further += [one.__defaults__, one.__kwdefaults__]
    if is_own or isinstance(one, torch.nn.Module | torch.nn.Parameter | types.SimpleNamespace):
        attributes = dict(getattr(one, "__dict__", {}))
        undo.append(partial(_set_attributes, one, attributes))
        slots = [name for base in kind.__mro__ for name, slot in vars(base).items() if isinstance(slot, _Slot)]
        undo += [partial(setattr, one, name, getattr(one, name)) for name in slots if hasattr(one, name)]
        further += [*attributes.values(), *(getattr(one, name, None) for name in slots), kind]
    return further


def _refill(one: Any, contents: Any) -> None:
    if isinstance(one, list):
        one[:] = contents
    else:
        one.clear()
        one.extend(contents) if isinstance(one, deque) else one.update(contents)


def _set_attributes(one: Any, attributes: dict[str, Any]) -> None:
    now = vars(one)
    # torch's compiler adds such names to the module of a function that it compiles.
    for name in [name for name in now if name not in attributes and not name.startswith(("__", "_dynamo", "_torch"))]:
        delattr(one, name) if isinstance(one, type) else now.pop(name)
    for name in [name for name, value in attributes.items() if name not in now or now[name] is not value]:
        setattr(one, name, attributes[name]) if isinstance(one, type) else now.update({name: attributes[name]})
