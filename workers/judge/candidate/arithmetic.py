"""Arithmetic of Triton's interpreter for bfloat16 and float8, which otherwise computes with their bits as integers.

Values are converted by torch, and operations are done in float32 and rounded to the nearest value, as on a GPU. A GPU
can still round at other places, for example once for a product and a sum. So the process claims that it rounded.
"""

from __future__ import annotations

import functools
from typing import Any, Final

import numpy as np
import torch

from workers.judge.channel import flags

#: torch's dtypes by Triton's names, the narrow ones first.
_NARROW: Final = {
    "bf16": torch.bfloat16,
    "fp8e5": torch.float8_e5m2,
    "fp8e4nv": torch.float8_e4m3fn,
    "fp8e5b16": torch.float8_e5m2fnuz,
    "fp8e4b8": torch.float8_e4m3fnuz,
}
_DTYPES: Final = _NARROW | {"fp16": torch.float16, "fp32": torch.float32, "fp64": torch.float64}
#: Operations of the interpreter's builder that compute with floating-point numbers.
_OPERATIONS: Final = (
    *("fadd", "fsub", "fmul", "fdiv", "frem", "fneg", "precise_divf", "approx_divf", "fma", "clampf", "dot"),
    *("minimumf", "minnumf", "maximumf", "maxnumf", "floor", "ceil", "sqrt", "precise_sqrt", "rsqrt"),
    *("exp", "exp2", "log", "log2", "sin", "cos", "erf"),
    *(f"fcmp{order}{relation}" for order in "OU" for relation in ("LT", "GT", "LE", "GE", "EQ", "NE")),
)


def install(module: Any, page: memoryview[int]) -> None:
    """Correct the module ``triton.runtime.interpreter``. ``page`` gets the claim."""
    own, builder, interface = _Arithmetic(module, page), module.interpreter_builder, module.ReduceScanOpInterface
    apply = interface.apply
    module._convert_float = own.converted
    builder.cast_impl, builder.create_atomic_rmw = own.casted, own.updated
    for name in _OPERATIONS:
        if operation := getattr(builder, f"create_{name}", None):
            setattr(builder, f"create_{name}", functools.partial(own.computed, operation))

    def applied(self: Any, given: Any) -> Any:
        return own.combined(functools.partial(apply, self), given) if isinstance(given, tuple) else apply(self, given)

    interface.apply = applied


class _Arithmetic:
    """Replacements of functions of the interpreter and of its only builder."""

    def __init__(self, module: Any, page: memoryview[int]) -> None:
        self._language, self._handle, self._ir = module.tl, module.TensorHandle, module._ir
        self._builder, self._page = module.interpreter_builder, page
        self._convert, self._cast = module._convert_float, self._builder.cast_impl
        self._update = self._builder.create_atomic_rmw

    def _is_narrow(self, one: Any) -> bool:
        return isinstance(one, self._handle) and one.data.dtype.kind == "u" and one.dtype.scalar.name in _NARROW

    def converted(self, data: Any, source: Any, target: Any, rounding: Any) -> Any:
        """Convert values to the bits of another dtype. Too large ones get the largest float8, as on a GPU."""
        names = source.scalar.name, target.scalar.name
        if not set(names) <= _DTYPES.keys() or rounding == self._ir.ROUNDING_MODE.RTZ:
            return self._convert(data, source, target, rounding)
        given, wanted = (_DTYPES[name] for name in names)
        values = torch.from_numpy(np.array(data, order="C")).reshape(-1).view(given)
        if wanted.itemsize == 1:
            most = torch.finfo(wanted).max
            values = values.to(torch.float32).clamp(-most, most)
        return values.to(wanted).view(torch.uint8).numpy().view(f"u{wanted.itemsize}").reshape(np.shape(data))

    def _widened(self, one: Any) -> Any:
        if not self._is_narrow(one):
            return one
        bits = self.converted(one.data, one.dtype, self._language.float32, None)
        return self._handle(bits.view(np.float32), self._language.float32)

    def _rounded(self, one: Any, dtype: Any) -> Any:
        return self._handle(self.converted(one.data, self._language.float32, dtype, None), dtype.scalar)

    def _narrowed(self, one: Any, dtype: Any) -> Any:
        """Round a result in float32 to a narrow dtype, and claim that. Results of comparisons stay as they are."""
        if one.data.dtype != np.float32:
            return one
        self._page[flags.NARROW] = 1
        return self._rounded(one, dtype)

    def computed(self, operation: Any, *args: Any) -> Any:
        """Do an operation in float32."""
        if not any(map(self._is_narrow, args)):
            return operation(*args)
        result = operation(*map(self._widened, args))
        handles = [arg for arg in args if isinstance(arg, self._handle)]
        return self._narrowed(result, handles[-1].dtype) if all(map(self._is_narrow, handles)) else result

    def casted(self, src: Any, dst_type: Any) -> Any:
        """Cast numbers by their values."""
        narrows = dst_type.scalar.name in _NARROW
        if not narrows and not self._is_narrow(src):
            return self._cast(src, dst_type)
        result = self._cast(self._widened(src), self._language.float32)
        return self._rounded(result, dst_type) if narrows else self._cast(result, dst_type)

    def updated(self, op: Any, ptr: Any, val: Any, mask: Any, *more: Any) -> Any:
        """Add to memory, one element after the other, because several can be to one address."""
        if op != self._ir.ATOMIC_OP.FADD or not self._is_narrow(val):
            return self._update(op, ptr, val, mask, *more)
        before, builder = val.data.copy(), self._builder
        for index in np.ndindex(mask.data.shape):
            if mask.data[index]:
                at = self._handle(ptr.data[index].reshape(1), ptr.dtype)
                old = builder.create_load(at, None, False)
                before[index] = old.data[0]
                builder.create_store(
                    at, builder.create_fadd(old, self._handle(val.data[index].reshape(1), val.dtype)), None
                )
        return self._handle(before, val.dtype.scalar)

    def combined(self, combine: Any, given: tuple[Any, ...]) -> tuple[Any, ...]:
        """Reduce or scan in float32."""
        if not any(self._is_narrow(one.handle) for one in given):
            return combine(given)
        results = combine(tuple(self._retyped(one, self._widened(one.handle)) for one in given))
        return tuple(
            self._retyped(result, self._narrowed(result.handle, one.dtype)) if self._is_narrow(one.handle) else result
            for result, one in zip(results, given, strict=False)
        )

    def _retyped(self, tensor: Any, made: Any) -> Any:
        language = self._language
        kind = language.block_type(made.dtype, list(tensor.shape)) if tensor.type.is_block() else made.dtype
        return language.tensor(made, kind)
