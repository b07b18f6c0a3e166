"""Fewer of torch's headers for the compilers of an extension; all of them where those do not suffice.

Nearly all of the time that a small extension takes goes into torch's headers, which declare 3000 operators, the C++
frontend and the JIT. So each source is compiled with a few of them first. If that fails for any reason, ninja runs the
command that torch has written, and only that command's output is shown.

A source that compiles with fewer headers must mean the same with all of them. Operators and headers that it names come
with those few (:func:`_operators`); the standard library's headers all do, as they add overloads (``abs``). A source
that could mean something else without failing is compiled with all headers (:data:`_ASKS`). Flags stay as they are.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, Final

#: Runs a compiler with fewer headers, then as torch has written, if need be: the folder that is searched first and
#: torch's own macro for headers of operators are all that differs.
_TRY: Final = """#!/bin/sh
if "$@" -DAT_PER_OPERATOR_HEADERS '-I{folder}' >'{folder}/log' 2>&1; then
    cat '{folder}/log'
else
    exec "$@"
fi
"""
_RULE: Final = re.compile(r"^rule (compile|cuda_compile)\n((?:  .*\n)+)", re.MULTILINE)
_COMMAND: Final = re.compile(r"^  command = (?=\$cxx |\$nvcc )", re.MULTILINE)
_EDGE: Final = re.compile(r"^build ([^\s:$]+): (compile|cuda_compile) ([^\s$]+)$", re.MULTILINE)
#: Other places of headers than torch's. What lies there may use all of them.
_OTHER_PLACES: Final = re.compile(r"^(?:cflags|cuda_cflags|post_cflags|cuda_post_cflags) = .*(?<!\S)-I", re.MULTILINE)
#: What in a source may ask which headers there are: names that are put together, conditions on torch's macros, and
#: registrations, for which few headers do not suffice anyway.
_ASKS: Final = re.compile(
    r"##|\bTORCH_LIBRARY|\b(?:TORCH_STABLE_ONLY|TORCH_TARGET_VERSION|AT_PER_OPERATOR_HEADERS)\b"
    r"|^[ \t]*#[ \t]*(?:el)?if(?:n?def)?\b.*(?:TORCH|AT_|ATEN|C10|PYBIND)|\brequires\b|\b__has_include",
    re.MULTILINE,
)
_PYTHON: Final = re.compile(r"\bpy(?:bind11)?::|\bPYBIND11_|\bTHP|\bPy[A-Z_]")
_OWN_HEADER: Final = re.compile(r'^[ \t]*#[ \t]*include[ \t]*"([^"\n]+)"', re.MULTILINE)
_WORD: Final = re.compile(r"[A-Za-z_]\w*")
#: Ends of names that an operator's header declares beside the operator.
_VARIANT: Final = re.compile(r"(?:_outf?|_symint|_)+$")

#: Ends of names of headers that declare something else than an operator's functions.
_NO_OPERATOR: Final = ("_ops", "_native", "_meta", "_dispatch")

#: All of the standard library that torch's headers include.
_STANDARD: Final = (
    *("algorithm", "array", "atomic", "bitset", "cassert", "cctype", "cerrno", "chrono", "climits", "clocale", "cmath"),
    *("complex", "condition_variable", "cstdarg", "cstddef", "cstdint", "cstdio", "cstdlib", "cstring", "ctime"),
    *("cwchar", "cwctype", "deque", "exception", "forward_list", "functional", "initializer_list", "iomanip", "ios"),
    *("iosfwd", "iostream", "istream", "iterator", "limits", "list", "locale", "map", "memory", "mutex", "new"),
    *("numeric", "optional", "ostream", "queue", "ratio", "set", "sstream", "stack", "stdexcept", "streambuf"),
    *("string", "string_view", "system_error", "thread", "tuple", "type_traits", "typeindex", "typeinfo"),
    *("unordered_map", "unordered_set", "utility", "valarray", "variant", "vector"),
    *("assert.h", "ctype.h", "errno.h", "inttypes.h", "limits.h", "locale.h", "math.h", "stdint.h", "stdio.h"),
    *("stdlib.h", "string.h", "time.h", "wchar.h"),
)
#: What ``ATen/ATen.h`` includes, but for the operators and the JIT's values.
_ATEN: Final = (
    *("ATen/Context.h", "ATen/Device.h", "ATen/DeviceGuard.h", "ATen/DimVector.h", "ATen/Dispatch.h"),
    *("ATen/Formatting.h", "ATen/Parallel.h", "ATen/ScalarOps.h", "ATen/Tensor.h", "ATen/TensorGeometry.h"),
    *("ATen/TensorIndexing.h", "ATen/TensorOperators.h", "ATen/Version.h", "ATen/core/ATenGeneral.h"),
    *("ATen/core/Generator.h", "ATen/core/Reduction.h", "ATen/core/Scalar.h", "c10/core/Allocator.h"),
    *("c10/core/InferenceMode.h", "c10/core/Layout.h", "c10/core/Storage.h", "c10/core/TensorOptions.h"),
    *("c10/util/Exception.h", "c10/util/irange.h"),
)
#: What ``torch/python.h`` includes, but for bindings of C++ modules. All conversions of arguments are there.
_BINDINGS: Final = (
    *("torch/types.h", "torch/csrc/Device.h", "torch/csrc/Dtype.h", "torch/csrc/DynamicTypes.h"),
    *("torch/csrc/Exceptions.h", "torch/csrc/autograd/python_variable.h", "torch/csrc/python_headers.h"),
    *("torch/csrc/utils/pybind.h", "torch/csrc/utils/python_numbers.h", "torch/csrc/utils/python_tuples.h"),
)


def try_fewer(build: Callable[..., Any], directory: str, *args: Any, **kwargs: Any) -> Any:
    """Stand in for torch's ``_run_ninja_build``: let ninja try each source with fewer headers first.

    Args:
        build: torch's own function.
        directory: where torch has written ``build.ninja``. A file that looks otherwise than expected is left alone.
        args, kwargs: further arguments of torch's function.
    """
    with contextlib.suppress(OSError, UnicodeError):
        _rewrite(Path(directory).absolute())
    return build(directory, *args, **kwargs)


def _rewrite(directory: Path) -> None:
    file = directory / "build.ninja"
    text = file.read_text()
    if _OTHER_PLACES.search(text):
        return

    def few(edge: re.Match[str]) -> str:
        target, rule, source = edge.groups()
        if not _write_headers(directory / f"{target}.headers", Path(source)):
            return edge[0]
        return f"build {target}: {rule}_with_few {source}"

    def tried(rule: re.Match[str]) -> str:
        body, changed = _COMMAND.subn("  command = sh $out.headers/try ", rule[2])
        return f"{rule[0]}\nrule {rule[1]}_with_few\n{body}" if changed == 1 else rule[0]

    rewritten = _RULE.sub(tried, text)
    known = set(re.findall(r"^rule (\w+)_with_few$", rewritten, re.MULTILINE))
    file.write_text(_EDGE.sub(lambda edge: few(edge) if edge[2] in known else edge[0], rewritten))


def _write_headers(folder: Path, source: Path) -> bool:
    """Write the headers that stand in for torch's largest ones; return False if the source needs those."""
    text = source.read_text()
    if (
        "'" in str(folder)
        or _ASKS.search(text)
        or any((source.parent / name).exists() for name in _OWN_HEADER.findall(text))
    ):
        return False
    aten = [*_STANDARD, *_ATEN, *(f"ATen/ops/{name}.h" for name in _operators(text))]
    contents = {
        "ATen/ATen.h": aten,
        "torch/all.h": ["torch/types.h", "torch/version.h"],
        "torch/library.h": [],
        "torch/python.h": _BINDINGS if _PYTHON.search(text) else ["torch/types.h"],
    }
    for name, included in contents.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("#pragma once\n" + "".join(f"#include <{header}>\n" for header in included))
    (folder / "try").write_text(_TRY.format(folder=folder))
    return True


def _operators(text: str) -> list[str]:
    """Return the operators whose names are in a source, however they are meant."""
    return sorted({word for name in _WORD.findall(text) for word in (name, _VARIANT.sub("", name))} & _all_operators())


@cache
def _all_operators() -> frozenset[str]:
    import torch

    folder = Path(torch.__file__).parent / "include" / "ATen" / "ops"
    return frozenset(path.stem for path in folder.glob("*.h") if not path.stem.endswith(_NO_OPERATOR))
