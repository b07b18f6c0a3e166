"""Compile extensions with a small part of torch's headers, and with all of them where the small part fails.

Torch's headers take nearly all of the compile time of a small extension: they declare 3000 operators, the C++ frontend
and the JIT. So each source is first compiled with a few of them. If that fails for any reason, ninja runs torch's
original command and shows only its output.

A source that compiles with fewer headers must have the same meaning with all of them. So the small part includes the
operators and headers that the source names (:func:`_operators`) and all of the standard library's headers, because
those add overloads (``abs``). A source whose meaning could change without an error is compiled with all headers
(:data:`_ASKS`). Compiler flags stay the same.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, Final

#: Script that runs a compiler with fewer headers, and with torch's own command if that fails. The first command adds
#: only a folder that is searched first, and torch's macro for per-operator headers.
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
#: Flags that add other folders of headers, whose files can use all of torch's headers.
_OTHER_PLACES: Final = re.compile(r"^(?:cflags|cuda_cflags|post_cflags|cuda_post_cflags) = .*(?<!\S)-I", re.MULTILINE)
#: Source text that can test which headers are included: pasted tokens, conditions on torch's macros, and concepts. It
#: also matches registrations of operators, for which few headers do not suffice.
_ASKS: Final = re.compile(
    r"##|\bTORCH_LIBRARY|\b(?:TORCH_STABLE_ONLY|TORCH_TARGET_VERSION|AT_PER_OPERATOR_HEADERS)\b"
    r"|^[ \t]*#[ \t]*(?:el)?if(?:n?def)?\b.*(?:TORCH|AT_|ATEN|C10|PYBIND)|\brequires\b|\b__has_include",
    re.MULTILINE,
)
_PYTHON: Final = re.compile(r"\bpy(?:bind11)?::|\bPYBIND11_|\bTHP|\bPy[A-Z_]")
_OWN_HEADER: Final = re.compile(r'^[ \t]*#[ \t]*include[ \t]*"([^"\n]+)"', re.MULTILINE)
_WORD: Final = re.compile(r"[A-Za-z_]\w*")
#: Suffixes of the further functions in an operator's header.
_VARIANT: Final = re.compile(r"(?:_outf?|_symint|_)+$")

#: Suffixes of the names of headers that declare no operator functions.
_NO_OPERATOR: Final = ("_ops", "_native", "_meta", "_dispatch")

#: All standard headers that torch's headers include.
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
#: Headers that ``ATen/ATen.h`` includes, except the operators' headers and the JIT's values.
_ATEN: Final = (
    *("ATen/Context.h", "ATen/Device.h", "ATen/DeviceGuard.h", "ATen/DimVector.h", "ATen/Dispatch.h"),
    *("ATen/Formatting.h", "ATen/Parallel.h", "ATen/ScalarOps.h", "ATen/Tensor.h", "ATen/TensorGeometry.h"),
    *("ATen/TensorIndexing.h", "ATen/TensorOperators.h", "ATen/Version.h", "ATen/core/ATenGeneral.h"),
    *("ATen/core/Generator.h", "ATen/core/Reduction.h", "ATen/core/Scalar.h", "c10/core/Allocator.h"),
    *("c10/core/InferenceMode.h", "c10/core/Layout.h", "c10/core/Storage.h", "c10/core/TensorOptions.h"),
    *("c10/util/Exception.h", "c10/util/irange.h"),
)
#: Headers that ``torch/python.h`` includes, except the bindings of C++ modules. They convert all arguments.
_BINDINGS: Final = (
    *("torch/types.h", "torch/csrc/Device.h", "torch/csrc/Dtype.h", "torch/csrc/DynamicTypes.h"),
    *("torch/csrc/Exceptions.h", "torch/csrc/autograd/python_variable.h", "torch/csrc/python_headers.h"),
    *("torch/csrc/utils/pybind.h", "torch/csrc/utils/python_numbers.h", "torch/csrc/utils/python_tuples.h"),
)


def try_fewer(build: Callable[..., Any], directory: str, *args: Any, **kwargs: Any) -> Any:
    """Run torch's ``_run_ninja_build`` with a build file that tries fewer headers first.

    ``build`` is torch's own function. A ``build.ninja`` of unexpected form in ``directory`` stays unchanged.
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
    rules = set(re.findall(r"^rule (\w+)_with_few$", rewritten, re.MULTILINE))
    file.write_text(_EDGE.sub(lambda edge: few(edge) if edge[2] in rules else edge[0], rewritten))


def _write_headers(folder: Path, source: Path) -> bool:
    """Write replacements for torch's largest headers. Return False if the source needs the originals."""
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
    """Return the operators whose names occur in a source, in any meaning."""
    return sorted({word for name in _WORD.findall(text) for word in (name, _VARIANT.sub("", name))} & _all_operators())


@cache
def _all_operators() -> frozenset[str]:
    import torch

    folder = Path(torch.__file__).parent / "include" / "ATen" / "ops"
    return frozenset(path.stem for path in folder.glob("*.h") if not path.stem.endswith(_NO_OPERATOR))
