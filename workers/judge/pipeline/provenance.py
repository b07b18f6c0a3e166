"""Provenance: the share of a kernel's GPU time in its own kernels, and the share in a library's.

The basis is a record from the candidate's own process, which a kernel can forge, and the names in it. So the result is
a label with reasons, and in doubt favors the candidate. A name that is neither in the source nor known as a library's
is *unclear* and no accusation: sources can build names from macros, templates and strings.
"""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Final

from kqueue import backends
from kqueue.backends import registered
from kqueue.categories import Category
from kqueue.contract import Phase, Policy
from kqueue.evidence import Hack, LibraryKernel, Provenance
from workers.judge.channel.activities import REST
from workers.judge.ending import EvaluationEnded

#: Share of the time in kernels below which own kernels count as a decoy.
DECOY_BELOW: Final = 0.01
BASIS: Final = "the candidate's own profile"

_COPIES: Final = frozenset({"[memcpy]", "[memset]"})
_LIBRARIES_SHOWN: Final = 8
_OWN_SHOWN: Final = 16
_BACKENDS: Final = tuple(registered().values())
_DECORATORS: Final = frozenset(name for backend in _BACKENDS for name in backend.kernel_decorators)
_WRAPPERS: Final = frozenset(name for backend in _BACKENDS for name in backend.kernel_wrappers)
_NAMERS: Final = {name: (at, default) for backend in _BACKENDS for name, at, default in backend.kernel_namers}
_NAMES: Final = tuple(re.compile(name) for backend in _BACKENDS for name in backend.kernel_names)

#: Namespaces that always belong to a library, because the names inside them can be any.
_FOREIGN: Final = ("at::", "c10::", "at_cuda_detail::", "cudnn::", "cublas::", "cublasLt::", "pytorch_flash::")
#: Namespaces of header-only libraries. If a source includes them it compiled their kernels, so they are its own.
_HEADERS: Final = {
    "cub": ("cub::", "thrust::"),
    "thrust": ("cub::", "thrust::"),
    "cutlass": ("cutlass::", "cute::"),
    "cute": ("cutlass::", "cute::"),
}
#: Names of kernels of torch, its compiler, cuBLAS, cuDNN, CUTLASS, cuFFT and NCCL.
_COMMON: Final = re.compile(
    r"""
      triton_(poi|per|red|tem|for|spl|mm|bmm)_ | nvjet_ | cudnn_ | cublas | cutlass | nccl | fmha_
    | (sm\d+|maxwell|volta|turing|ampere|ada|hopper|blackwell)_\w*(gemm|fprop|dgrad|wgrad|xmma|cudnn|cublas|winograd)
    | gemm(SN|k1)_ | gemv(2T|2N|NSP)_ | internal::gemvx:: | splitKreduce | dot_kernel | reduce_1Block
    | softmax_warp_(for|back)ward | cunn_\w*Soft | implicit_convolve | (regular|vector|multi)_fft
    """,
    re.VERBOSE,
)
_LIBRARIES: Final = (_COMMON, *(re.compile(backend.library) for backend in _BACKENDS if backend.library))
#: A comment in C++, even if it does not end.
CPP_COMMENT: Final = re.compile(r"//[^\n]*|/\*(?:.*?\*/|.*\Z)", re.DOTALL)
_INCLUDE: Final = re.compile(r'#\s*include\s*[<"](\w+)/')
#: An attribute, with or without arguments, or a name before an opening parenthesis.
_WORDS: Final = re.compile(r"(?P<word>\w+)\s*(?P<arguments><[^<>(){};]{0,200}>\s*)?(?P<call>\()?")
_TRITON_TEXT: Final = re.compile(r"@(?:triton\.)?jit\b[^\n]{0,200}\n\s{0,40}def\s{1,8}(\w+)")
#: Characters after `__global__` in which the kernel's name must follow.
_HEAD_CHARS: Final = 400


def own_kernels(nodes: Sequence[ast.AST]) -> frozenset[str]:
    """Return the names of the GPU kernels that a source defines, as far as its syntax tree shows them."""
    names = set[str]()
    for node in nodes:
        if isinstance(node, ast.FunctionDef) and any(map(_compiles, node.decorator_list)):
            names.add(node.name)
        elif isinstance(node, ast.Call):
            names.update(_made_by_call(node))
    for text in texts(nodes):
        names.update(_globals(text))
        names.update(_TRITON_TEXT.findall(text))
    return frozenset(names)


def texts(nodes: Sequence[ast.AST]) -> list[str]:
    """Return a source's strings that can be code, without C++ comments, docstrings and unused strings."""
    idle = {id(node.value) for node in nodes if isinstance(node, ast.Expr)}
    return [
        CPP_COMMENT.sub(" ", node.value)
        for node in nodes
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in idle
    ]


def assess(kernels: Sequence[tuple[str, int, int]], source: str, backend: str) -> Provenance:
    """Attribute the GPU time of one call to own kernels, libraries and copies.

    Args:
        kernels: name, nanoseconds and launches, from :func:`workers.judge.channel.activities.decode`.
        source: the kernel's source.
        backend: the claimed backend, which decides if the kernel can be a decoy.

    Returns:
        The origins. Shares are of all GPU time of the call, including copies. ``decoy`` is True if own and
        unclear kernels take less than :data:`DECOY_BELOW` of the time in kernels, and libraries the rest.
    """
    nodes = nodes_of(source)
    own = own_kernels(nodes)
    compiled = tuple(
        space for text in texts(nodes) for folder in _INCLUDE.findall(text) for space in _HEADERS.get(folder, ())
    )
    mine, library, unclear = Counter[str](), Counter[str](), Counter[str]()
    copies = 0
    for name, ns, _ in kernels:
        if name in _COPIES:
            copies += ns
            continue
        {"own": mine, "library": library, "unclear": unclear}[_owner(name, own, compiled)][name] += ns
    in_kernels = mine.total() + library.total() + unclear.total()
    total = in_kernels + copies

    def share(ns: int) -> float:
        return round(ns / total, 4) if total else 0.0

    decoy = backends.find(backend).own_kernels and mine.total() + unclear.total() < DECOY_BELOW * in_kernels
    known = [LibraryKernel(name=name, share=share(library[name])) for name in _by_cost(library)[:_LIBRARIES_SHOWN]]
    return Provenance(
        own_share=share(mine.total()),
        own=tuple(_by_cost(mine)[:_OWN_SHOWN]),
        library=tuple(known),
        unclear_share=share(unclear.total()),
        unclear=tuple(_by_cost(unclear)[:_LIBRARIES_SHOWN]),
        copies_share=share(copies),
        decoy=decoy,
        why=_why(mine, library, unclear, copies, own),
        basis=BASIS,
    )


def enforce(result: Provenance | None, policy: Policy) -> None:
    """End the evaluation of a decoy, if the policy is to reject it.

    Raises:
        EvaluationEnded: ``reward_hack``.
    """
    if policy is Policy.REJECT and result is not None and result.decoy:
        raise EvaluationEnded(Category.REWARD_HACK, f"a decoy: {result.why}", Phase.CHECK, hack=Hack.DECOY)


def _why(
    mine: dict[str, int], library: dict[str, int], unclear: dict[str, int], copies: int, own: frozenset[str]
) -> str:
    parts = {
        "kernels of the source": sum(mine.values()),
        "kernels of libraries": sum(library.values()),
        "kernels of unclear origin": sum(unclear.values()),
        "copies and fills": copies,
    }
    total = sum(parts.values())
    if not total:
        return "nothing ran on the GPU"
    shares = ", ".join(f"{ns / total:.1%} {name}" for name, ns in parts.items() if ns)
    if mine:
        return shares
    return f"{shares}; " + ("none of the source's own kernels ran" if own else "no kernel was found in the source")


def _by_cost(times: dict[str, int]) -> list[str]:
    return sorted(times, key=lambda name: (-times[name], name))


# Names at run time -----------------------------------------------------------------------------------


def _owner(name: str, own: frozenset[str], compiled: tuple[str, ...]) -> str:
    """Classify a kernel's name by the source's kernels (``own``) and its included namespaces (``compiled``)."""
    if name == REST:
        return "unclear"
    path = _path(name)
    if compiled and path.startswith(compiled):
        return "own"
    if path.startswith(_FOREIGN) or any(path.startswith(spaces) for spaces in _HEADERS.values()):
        return "library"
    base = path.rpartition("::")[2]
    if base in own or any((match := name.fullmatch(base)) and match["name"] in own for name in _NAMES):
        return "own"
    return "library" if any(library.match(path) for library in _LIBRARIES) else "unclear"


def _path(name: str) -> str:
    """Return a kernel's qualified name without return type, anonymous namespaces and arguments of any kind."""
    if name.startswith("_Z"):
        name = "::".join(_mangled(name)) or name
    # Only templates have a return type in their names.
    name = name.replace("(anonymous namespace)::", "").removeprefix("void ")
    name = re.split(r"[<(\[]", name, maxsplit=1)[0].strip()
    return "::".join(part for part in name.split("::") if not part.startswith("_GLOBAL__N"))


def _mangled(name: str) -> Iterator[str]:
    """Yield the parts of a mangled symbol's qualified name."""
    at = re.match(r"_ZN?[KVL]*(?:St)?L?", name)
    rest = name[at.end() :] if at else ""
    while match := re.match(r"L?(\d{1,3})", rest):
        length = int(match[1])
        rest = rest[match.end() :]
        yield rest[:length]
        rest = rest[length:]


# Names in a source -----------------------------------------------------------------------------------


def nodes_of(source: str) -> list[ast.AST]:
    """Return every node of a source's syntax tree, or none if it does not parse."""
    try:
        return list(ast.walk(ast.parse(source)))
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return []


def _last(node: ast.expr) -> str:
    """Return the last part of a dotted name."""
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


def _unbound(node: ast.expr) -> ast.expr:
    """Return the function to which ``functools.partial`` binds arguments, or any other expression itself."""
    return node.args[0] if isinstance(node, ast.Call) and node.args and _last(node.func) == "partial" else node


def _compiles(decorator: ast.expr) -> bool:
    """Return whether a decorator turns a function into a GPU kernel."""
    decorator = _unbound(decorator)
    return _last(decorator.func if isinstance(decorator, ast.Call) else decorator) in _DECORATORS


def _made_by_call(call: ast.Call) -> Iterator[str]:
    """Yield the names of the kernels that a call creates: a wrapped function, or the name that the call gives."""
    made, maker = _last(call.func), _unbound(call.func)
    if isinstance(maker, ast.Call) and not any(map(_function, maker.args[:1])):  # cuda.jit("void()")(function)
        maker = maker.func
    if _last(maker) in _WRAPPERS:
        yield from filter(None, map(_function, call.args[:1]))
    if made in _NAMERS:
        position, default = _NAMERS[made]
        given = [keyword.value for keyword in call.keywords if keyword.arg in ("name", "kernel_name")]
        given += call.args[position : position + 1]
        yield from (node.value for node in given if isinstance(node, ast.Constant) and isinstance(node.value, str))
        if default and not given:
            yield default


def _function(node: ast.expr) -> str:
    """Return the name of a function, which calls such as ``jax.vmap`` can wrap. Return "" if there is none."""
    while isinstance(node, ast.Call):
        node = node.func if not node.args or isinstance(node.args[0], ast.Constant) else node.args[0]
    return "<lambda>" if isinstance(node, ast.Lambda) else _last(node)


def _globals(code: str) -> Iterator[str]:
    """Yield the names of the ``__global__`` functions in a string."""
    for part in code.split("__global__")[1:]:
        head, at = part[:_HEAD_CHARS], 0
        while match := _WORDS.search(head, at):
            at = match.end()
            if not match["call"]:
                continue
            if match["word"].startswith("__") or match["word"] in ("alignas", "maxnreg"):
                at = _closing(head, at)  # __launch_bounds__(256, 2), __attribute__((...))
                continue
            yield match["word"]
            break


def _closing(text: str, at: int) -> int:
    """Return the position after the parenthesis that closes the one before ``at``."""
    depth = 1
    while at < len(text) and depth:
        depth += {"(": 1, ")": -1}.get(text[at], 0)
        at += 1
    return at
