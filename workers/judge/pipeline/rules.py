"""The project's own rules, which find lines in a kernel's source that can belong to a cheat.

They read the syntax tree, resolving names through imports, and C++ in strings. ``cheat`` is reserved for code that has
no other use in a kernel. The other findings are reasons to look closer. Every rule takes nearly linear time.
"""

from __future__ import annotations

import ast
import re
import sys
from collections import Counter
from collections.abc import Iterator
from functools import cached_property
from typing import Final

from workers.judge.pipeline import provenance

#: The class that a kernel's source defines.
ENTRY: Final = "ModelNew"

#: Maximum number of parts of a dotted name to read.
_PARTS: Final = 12


def hits(source: str, backend: str) -> Iterator[tuple[str, int]]:
    """Yield the rules of :data:`.findings.RULES` that a source triggers, each with a line. Pairs can repeat.

    Raises:
        SyntaxError, ValueError, RecursionError, MemoryError: the source has no syntax tree.
    """
    reading = _Reading(source)
    for rules in (_patches, _imports, _named, _classes, _in_forward, _memories, _streams, _in_strings):
        yield from rules(reading)
    yield from _authorship(reading, backend)


#: Names of rules and line numbers.
_Hits = Iterator[tuple[str, int]]

#: Modules and classes in which a kernel has no reason to replace anything, and the rule for a replacement.
_OWNERS: Final = {
    **dict.fromkeys(("time", "timeit", "statistics", "torch.cuda.Event", "torch.Event"), "patched_clock"),
    **dict.fromkeys(("torch.cuda.Stream", "triton.testing", "torch.utils.benchmark"), "patched_clock"),
    "torch.profiler": "patched_clock",
    **dict.fromkeys(("torch.testing", "numpy.testing"), "patched_comparison"),
}
#: Single names that a kernel has no reason to replace, and the rule for a replacement.
_NAMES: Final = {
    **dict.fromkeys(
        ("torch.cuda.Event", "torch.Event", "torch.cuda.synchronize", "torch.cuda.Stream"), "patched_clock"
    ),
    **{
        f"{owner}.{name}": "patched_comparison"
        for owner in ("torch", "torch.Tensor", "numpy")
        for name in ("allclose", "isclose", "equal", "array_equal", "eq", "__eq__")
    },
    **{
        f"{owner}.{name}": "patched_seed"
        for owner in ("torch", "torch.cuda", "numpy.random", "random")
        for name in ("manual_seed", "manual_seed_all", "seed", "rand", "randn", "randint", "random")
    },
}
#: Alternative prefixes of names, and the usual ones.
_SAME: Final = (
    ("np.", "numpy."),
    ("torch.cuda.streams.", "torch.cuda."),
    ("torch.random.", "torch."),
    ("torch.functional.", "torch."),
    ("torch._tensor.", "torch."),
)
_LIBRARIES: Final = frozenset(
    {"torch", "triton", "time", "statistics", "numpy", "cupy", "builtins", "os", "sys", "random"}
)
_FLAGS: Final = ("torch.backends.", "torch._dynamo.config", "torch._inductor.config", "torch._functorch.config")
#: Names that are assigned for configuration according to their documentation.
_CONFIGURED: Final = ("os.environ", "sys.stdout", "sys.stderr", "sys.path", "torch.classes.", "torch.ops.")
_EVALUATOR: Final = ("kqueue", "workers.judge")

_CALLS: Final[dict[str, str]] = {
    **dict.fromkeys(
        ("sys._getframe", "inspect.currentframe", "inspect.stack", "inspect.getouterframes", "traceback.walk_stack"),
        "stack_walk",
    ),
    **dict.fromkeys(("gc.get_objects", "gc.get_referrers", "gc.get_referents"), "heap_walk"),
    **dict.fromkeys(
        ("ctypes.memmove", "ctypes.memset", "ctypes.string_at", "ctypes.pythonapi", "mmap.mmap"), "native_memory"
    ),
    **dict.fromkeys(
        ("os.system", "os.popen", "os.fork", "os.kill", "os.killpg", "os._exit", "os.abort", "sys.exit", "os.setsid"),
        "processes",
    ),
    **dict.fromkeys(("os.write", "os.dup", "os.dup2", "os.fdopen", "os.sendfile"), "descriptors"),
    **dict.fromkeys(
        ("torch.set_float32_matmul_precision", "torch.set_num_threads", "torch.set_default_dtype"), "global_flag"
    ),
    **dict.fromkeys(
        ("torch.manual_seed", "torch.cuda.manual_seed", "torch.cuda.manual_seed_all", "torch.seed"), "seed"
    ),
    **dict.fromkeys(("torch.cuda.CUDAGraph", "torch.cuda.make_graphed_callables"), "cuda_graph"),
    **dict.fromkeys(("exec", "eval", "builtins.exec", "builtins.eval"), "dynamic_code"),
    **dict.fromkeys(("ctypes.CDLL", "ctypes.PyDLL", "ctypes.cdll.LoadLibrary"), "ctypes"),
    "torch.UntypedStorage._new_shared_cuda": "shared_device_memory",
}
_MODULES: Final = {
    **dict.fromkeys(("socket", "urllib", "http", "requests", "redis", "psycopg"), "network"),
    **dict.fromkeys(("subprocess", "multiprocessing"), "processes"),
}
#: Calls that count only inside the kernel's call, and their rules.
_CALLS_IN_FORWARD: Final[dict[str, str]] = {
    **dict.fromkeys(
        ("time.sleep", "time.time", "time.perf_counter", "time.monotonic", "time.time_ns"), "sleep_in_forward"
    ),
    **dict.fromkeys(
        (
            "threading.Thread",
            "threading.Timer",
            "concurrent.futures.ThreadPoolExecutor",
            "torch.jit.fork",
            "torch.jit._fork",
        ),
        "threads_in_forward",
    ),
    **dict.fromkeys(
        ("torch.save", "torch.load", "pickle.dump", "pickle.load", "numpy.save", "numpy.load", "open"),
        "files_in_forward",
    ),
    **dict.fromkeys(("torch.manual_seed", "torch.cuda.manual_seed", "torch.seed"), "seed_in_forward"),
    **dict.fromkeys(("torch.equal", "torch.allclose"), "content_key"),
}
#: torch's operators that do a problem's work. Allocation, reshaping and queries do not count.
_OPERATORS: Final = re.compile(
    r"(torch|torch\.nn\.functional|cupy|torch\.linalg|torch\.special|torch\.ops\.aten)\."
    r"(mm|bmm|matmul|addmm|baddbmm|einsum|tensordot|dot|mv|conv\w*|linear|bilinear|softmax|log_softmax|gelu|silu|relu"
    r"|sigmoid|tanh|exp|log|sum|mean|var|std|max|min|amax|amin|argmax|argmin|cumsum|cumprod|sort|topk|norm|\w*_norm"
    r"|\w*_pool\w*|scaled_dot_product_attention|cross_entropy|\w+_loss|dropout|embedding|interpolate)"
)
_TENSOR_CLASSES: Final = frozenset({"torch.Tensor", "torch.nn.Parameter"})
_MODES: Final = ("TorchDispatchMode", "TorchFunctionMode")
_HOOKS: Final = frozenset({"__torch_function__", "__torch_dispatch__"})

#: Rules for C++ in strings. All repetitions are bounded, so that no expression backtracks for long.
_IN_CPP: Final = (
    ("process_memory", re.compile(r"\b(?:ptrace|process_vm_readv|process_vm_writev|pidfd_getfd)\s{0,8}\(")),
    (
        "interposed_clock",
        re.compile(
            r"\b(?:cudaError_t|CUresult|int)\s{1,8}(?:CUDARTAPI\s{1,8}|CUDAAPI\s{1,8})?"
            r"(?:cudaEvent(?:Record|ElapsedTime|Synchronize|Query)\w{0,9}|cuEvent\w{1,30}|cudaDeviceSynchronize"
            r"|cudaStreamSynchronize|cuStream(?:Write|Wait)Value\w{1,9}|clock_gettime|gettimeofday)"
            r"\s{0,8}\([^(){};]{0,300}\)\s{0,8}(?:noexcept\s{0,8})?\{"
        ),
    ),
    ("native_memory", re.compile(r"\bmprotect\s{0,8}\(|\bLD_PRELOAD\b")),
    ("processes", re.compile(r"\b(?:fork|vfork|daemon|execve|system|popen)\s{0,8}\(")),
    ("network", re.compile(r"\bsocket\s{0,8}\(\s{0,8}AF_")),
    ("host_callback", re.compile(r"\bcudaLaunchHostFunc\b|\bcudaStreamAddCallback\b|\bcuLaunchHostFunc\b")),
    ("shared_device_memory", re.compile(r"\bcu(?:da)?Ipc(?:Open|Get)(?:Mem|Event)Handle")),
    ("persisting_l2", re.compile(r"\bcuda(?:AccessPropertyPersisting|LimitPersistingL2CacheSize)\b")),
    ("cuda_graph", re.compile(r"\bcudaGraphLaunch\b|\bcuGraphLaunch\b")),
    (
        "library_call",
        re.compile(
            r"\bcu(?:blas|blasLt|dnn|fft|solver)[A-Z]\w{1,40}\s{0,8}\(|"
            r"\b(?:at|torch)::(?:mm|bmm|matmul|addmm|linear|einsum|conv\w{1,20}|softmax|gelu|relu|layer_norm)\s{0,8}\("
        ),
    ),
)
_CPP_STREAM: Final = re.compile(r"\bcudaStreamCreate\w{0,20}\s{0,8}\(|\bgetStreamFromPool\s{0,8}\(")
_CPP_JOIN: Final = re.compile(r"cudaStreamWaitEvent|cudaStreamSynchronize|cudaDeviceSynchronize|\.block\s{0,8}\(")
_STREAMS: Final = frozenset({"torch.cuda.Stream", "torch.Stream", "cupy.cuda.Stream"})
_JOINS: Final = frozenset({"wait_stream", "wait_event", "wait"})
#: Methods that judges and harnesses call on a tensor.
_TENSOR_METHODS: Final = frozenset(
    {"clone", "contiguous", "copy_", "cpu", "data_ptr", "detach", "double", "float", "numpy", "to", "untyped_storage"}
)
_PROC: Final = re.compile(r"/proc/(?!cpuinfo|meminfo|stat\Z|version)|/dev/shm|/dev/mem")
_PROC_MEM: Final = re.compile(r"/proc/[^/\s]{1,40}/mem\Z")


class _Reading:
    """A source's syntax tree, with the queries that rules need."""

    def __init__(self, source: str) -> None:
        self.nodes = list(ast.walk(ast.parse(source)))
        self.calls = [node for node in self.nodes if isinstance(node, ast.Call)]

    def name(self, node: ast.AST | None) -> str:
        """Resolve a name or attribute by the imports, as to ``torch.nn.functional.gelu``. Return "" if unknown."""
        parts = list[str]()
        while isinstance(node, ast.Attribute) and len(parts) < _PARTS:
            parts.append(node.attr)
            node = node.value
        if isinstance(node, ast.Name):
            root = self._aliases.get(node.id, node.id if node.id in ("exec", "eval", "open", "id") else "")
        else:
            root = self._module(node)
        if not root:
            return ""
        name = ".".join([root, *reversed(parts)])
        for other, usual in _SAME:
            if name.startswith(other):
                name = usual + name.removeprefix(other)
        return name

    def _module(self, node: ast.AST | None) -> str:
        """Return the module that an expression such as ``sys.modules["time"]`` or ``__import__("time")`` yields."""
        named: ast.expr | None = None
        if isinstance(node, ast.Subscript) and _ends(node.value, "modules"):
            named = node.slice
        elif isinstance(node, ast.Call) and node.args and _ends(node.func, "__import__", "import_module"):
            named = node.args[0]
        elif isinstance(node, ast.Call) and len(node.args) >= 2 and _ends(node.func, "getattr"):
            inner, last = node.args[0], _text(node.args[1])
            if isinstance(inner, ast.Name) and last:
                return f"{self._aliases[inner.id]}.{last}" if inner.id in self._aliases else ""
        return _text(named) or ""

    @cached_property
    def _aliases(self) -> dict[str, str]:
        """Names from imports, and from assignments of imported names, with their full dotted names."""
        names = dict[str, str]()
        for node in self.nodes:
            if isinstance(node, ast.Import):
                for alias in node.names:
                    names[alias.asname or alias.name.partition(".")[0]] = (
                        alias.name if alias.asname else alias.name.partition(".")[0]
                    )
            elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                names.update({alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names})
        self.__dict__["_aliases"] = names
        bound = Counter(n.id for n in self.nodes if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store))
        bound.update(n.arg for n in self.nodes if isinstance(n, ast.arg))
        for node in self.nodes:
            if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
                target = node.targets[0].id
                if bound[target] == 1 and target not in names and (value := self.name(node.value)):
                    names[target] = value
        return names

    @cached_property
    def strings(self) -> list[tuple[str, int]]:
        """All string constants, each with its line number, except those that are statements, such as docstrings."""
        idle = {id(node.value) for node in self.nodes if isinstance(node, ast.Expr)}
        return [
            (node.value, node.lineno)
            for node in self.nodes
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in idle
        ]

    @cached_property
    def forward(self) -> list[ast.AST]:
        """Nodes that can run in the kernel's call: ``forward``, and the functions defined here that it calls."""
        functions = dict[str, list[ast.AST]]()
        for node in self.nodes:
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                functions.setdefault(node.name, []).append(node)
        seen, reached, waiting = set[str](), dict[int, ast.AST](), ["forward", "__call__"]
        while waiting:
            name = waiting.pop()
            if name in seen:
                continue
            seen.add(name)
            below = [*functions.get(name, ())]
            while below:
                node = below.pop()
                if id(node) in reached:
                    continue
                reached[id(node)] = node
                below += ast.iter_child_nodes(node)
                if isinstance(node, ast.Call):
                    waiting.append(_last(node.func))
        return list(reached.values())


def _last(node: ast.AST) -> str:
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


def _ends(node: ast.AST, *names: str) -> bool:
    return _last(node) in names


def _text(node: ast.AST | None) -> str:
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else ""


def _patches(reading: _Reading) -> _Hits:
    """Find parts of libraries that are assigned, set, deleted or mocked."""
    for node in reading.nodes:
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store | ast.Del):
            yield from _patched(reading.name(node.value), node.attr, node.lineno)
            if node.attr in ("__class__", "__dict__"):
                yield "instance_override", node.lineno
        elif isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Store | ast.Del):
            if reading.name(node.value) == "sys.modules":
                yield from _planted(_text(node.slice), node.lineno)
            elif owner := _dictionary(reading, node.value):
                yield from _patched(owner, _text(node.slice), node.lineno)
        elif isinstance(node, ast.Call):
            yield from _patched_by_call(reading, node)


def _patched_by_call(reading: _Reading, call: ast.Call) -> _Hits:
    function = _last(call.func)
    if function in ("setattr", "delattr") and len(call.args) >= 2:
        yield from _patched(reading.name(call.args[0]), _text(call.args[1]), call.lineno)
    elif function == "update" and isinstance(call.func, ast.Attribute):
        if owner := _dictionary(reading, call.func.value):
            for keyword in call.keywords:
                yield from _patched(owner, keyword.arg or "", call.lineno)
    elif call.args and reading.name(call.func).startswith("unittest.mock.patch"):
        if function == "object" and len(call.args) >= 2:
            yield from _patched(reading.name(call.args[0]), _text(call.args[1]), call.lineno)
        else:
            owner, _, name = _text(call.args[0]).rpartition(".")
            yield from _patched(owner, name, call.lineno)
    elif function in ("setitem", "setdefault", "__setitem__") and reading.name(call.func).startswith("sys.modules"):
        yield from _planted(_text(call.args[0]) if call.args else "", call.lineno)


def _dictionary(reading: _Reading, node: ast.AST) -> str:
    """Return the owner of the dictionary ``vars(module)`` or ``module.__dict__``."""
    if isinstance(node, ast.Attribute) and node.attr == "__dict__":
        return reading.name(node.value)
    if isinstance(node, ast.Call) and _ends(node.func, "vars") and node.args:
        return reading.name(node.args[0])
    return ""


def _patched(owner: str, name: str, line: int) -> _Hits:
    """Yield the rule for replacing ``name`` of a module or class. An empty name is only known at run time."""
    root = owner.partition(".")[0]
    if root not in _LIBRARIES and owner not in _OWNERS:
        return
    whole = f"{owner}.{name}"
    rule = _NAMES.get(whole)
    if rule is None and whole != "time.sleep":
        rule = next((its for prefix, its in _OWNERS.items() if f"{owner}.".startswith(f"{prefix}.")), None)
    if rule is not None:
        yield rule, line
    elif whole.startswith(_FLAGS):
        yield "global_flag", line
    elif not whole.startswith(_CONFIGURED):
        yield "patched_library", line


def _planted(module: str, line: int) -> _Hits:
    root = module.partition(".")[0]
    if not root:
        yield "registered_module", line
    elif root in _LIBRARIES or root in sys.stdlib_module_names or root in ("kqueue", "workers"):
        yield ("patched_library" if module == "__main__" else "planted_module"), line


def _imports(reading: _Reading) -> _Hits:
    for node in reading.nodes:
        modules = list[str]()
        if isinstance(node, ast.Import):
            modules = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and not node.level:
            modules = [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Call) and node.args and _ends(node.func, "__import__", "import_module"):
            modules = [_text(node.args[0])]
        if not isinstance(node, ast.stmt | ast.expr):
            continue
        for module in modules:
            if any(f"{module}.".startswith(f"{own}.") for own in _EVALUATOR):
                yield "evaluator_import", node.lineno
            if rule := _MODULES.get(module.partition(".")[0]):
                yield rule, node.lineno


def _named(reading: _Reading) -> _Hits:
    """Find names and attributes that are suspicious anywhere in the source."""
    for node in reading.nodes:
        if not isinstance(node, ast.Attribute | ast.Name) or not isinstance(node.ctx, ast.Load):
            continue
        name = reading.name(node)
        if rule := _CALLS.get(name):
            yield rule, node.lineno
        elif name.startswith(("torch.backends.cuda.enable_", "torch.backends.cudnn.flags")):
            yield "global_flag", node.lineno
        if isinstance(node, ast.Attribute):
            if node.attr in ("f_back", "f_locals", "tb_frame", "gi_frame"):
                yield "stack_walk", node.lineno
            elif node.attr in ("ptrace", "process_vm_readv", "process_vm_writev", "pidfd_getfd"):
                yield "process_memory", node.lineno
            elif node.attr in ("mprotect", "from_address"):
                yield "native_memory", node.lineno


def _classes(reading: _Reading) -> _Hits:
    for node in reading.nodes:
        if isinstance(node, ast.ClassDef):
            bases = {reading.name(base) for base in node.bases}
            methods = {part.name for part in node.body if isinstance(part, ast.FunctionDef)}
            if (bases & _TENSOR_CLASSES or any(base.endswith(_MODES) for base in bases)) or methods & _HOOKS:
                yield "tensor_subclass", node.lineno
        elif isinstance(node, ast.Call) and _ends(node.func, "_make_subclass", "_make_wrapper_subclass", "as_subclass"):
            yield "tensor_subclass", node.lineno


def _in_forward(reading: _Reading) -> _Hits:
    for node in reading.forward:
        if isinstance(node, ast.Call) and (rule := _CALLS_IN_FORWARD.get(reading.name(node.func))):
            yield rule, node.lineno
        elif _overrides(node):
            yield "instance_override", node.lineno  # pyright: ignore[reportAttributeAccessIssue] -- an expression
        elif isinstance(node, ast.Try) and any(isinstance(part, ast.Call) for part in _within(node.body)):
            for handler in node.handlers:
                if any(_is_operator(reading, part) for part in _within(handler.body)):
                    yield "fallback", handler.lineno
    yield from _counters(reading)


def _overrides(node: ast.AST) -> bool:
    """Return whether an object other than ``self`` gets a tensor's method, or an attribute with a computed name."""
    if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
        return node.attr in _TENSOR_METHODS and _last(node.value) != "self"
    if not isinstance(node, ast.Call) or not _ends(node.func, "setattr") or len(node.args) < 3:
        return False
    name = _text(node.args[1])
    return _last(node.args[0]) != "self" and (not name or name in _TENSOR_METHODS)


def _within(statements: list[ast.stmt]) -> Iterator[ast.AST]:
    for statement in statements:
        yield from ast.walk(statement)


def _is_operator(reading: _Reading, node: ast.AST) -> bool:
    if isinstance(node, ast.BinOp):
        return isinstance(node.op, ast.MatMult)
    return isinstance(node, ast.Call) and _OPERATORS.fullmatch(reading.name(node.func)) is not None


def _counters(reading: _Reading) -> _Hits:
    """Find counters that calls increase and that decide the work of a call."""
    changes = [node for node in reading.forward if isinstance(node, ast.AugAssign)]
    steps = [node for node in changes if isinstance(node.op, ast.Add) and isinstance(node.value, ast.Constant)]
    counted = {_key(node.target) for node in steps if not isinstance(node.target, ast.Name)}
    shared = {name for node in reading.nodes if isinstance(node, ast.Global | ast.Nonlocal) for name in node.names}
    counted |= {node.target.id for node in changes if isinstance(node.target, ast.Name) and node.target.id in shared}
    counted.discard("")
    for node in reading.forward:
        if not isinstance(node, ast.If | ast.IfExp | ast.While):
            continue
        if any(_key(part) in counted for part in ast.walk(node.test)):
            yield "call_count", node.lineno


def _key(node: ast.AST) -> str:
    """Return a name for a variable that can outlive a call: ``self.n``, ``state["n"]``, or a plain name."""
    if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
        return f"{node.value.id}.{node.attr}"
    if isinstance(node, ast.Subscript) and isinstance(node.value, ast.Name) and isinstance(node.slice, ast.Constant):
        return f"{node.value.id}[{node.slice.value!r:.40}]"
    return node.id if isinstance(node, ast.Name) else ""


def _memories(reading: _Reading) -> _Hits:
    """Find lookups and comparisons by something that identifies a tensor."""
    kinds = dict[str, str]()
    for node in reading.nodes:
        if not isinstance(node, ast.Assign) or not isinstance(node.targets[0], ast.Name):
            continue
        if kind := _identity(reading, node.value):
            kinds[node.targets[0].id] = kind

    def kind_of(key: ast.AST) -> str:
        parts = [key, *(key.elts if isinstance(key, ast.Tuple) else ())]
        direct = _identity(reading, key)
        return direct or next((kinds[part.id] for part in parts if isinstance(part, ast.Name) and part.id in kinds), "")

    for node in reading.nodes:
        keys = list[ast.AST]()
        if isinstance(node, ast.Subscript):
            keys = [node.slice]
        elif isinstance(node, ast.Compare) and all(isinstance(op, ast.In | ast.NotIn) for op in node.ops):
            keys = [node.left]
        elif isinstance(node, ast.Compare) and all(isinstance(op, ast.Eq | ast.NotEq) for op in node.ops):
            # Any kernel compares shapes. Only one that caches compares addresses or versions.
            keys = [side for side in (node.left, *node.comparators) if kind_of(side) == "pointer_key"]
        elif isinstance(node, ast.Call) and _ends(node.func, "get", "setdefault", "pop") and node.args:
            keys = [node.args[0]]
        for kind in {kind_of(key) for key in keys} - {""}:
            yield kind, node.lineno  # pyright: ignore[reportAttributeAccessIssue] -- all of these have a line


def _identity(reading: _Reading, node: ast.AST) -> str:
    """Return the rule for caching by this expression, if it is an address, an identity, a version or a shape."""
    shape = False
    for part in [node, *(node.elts if isinstance(node, ast.Tuple) else ())]:
        if isinstance(inner := part, ast.Call) and _ends(inner.func, "int", "tuple", "str") and inner.args:
            inner = inner.args[0]
        if isinstance(inner, ast.Call) and (_ends(inner.func, "data_ptr") or reading.name(inner.func) == "id"):
            return "pointer_key"
        if isinstance(inner, ast.Attribute) and inner.attr == "_version":
            return "pointer_key"
        shape = shape or (isinstance(inner, ast.Attribute) and inner.attr == "shape")
    return "shape_key" if shape else ""


def _streams(reading: _Reading) -> _Hits:
    made, own = list[int](), set[str]()
    for node in reading.nodes:
        if isinstance(node, ast.Call) and reading.name(node.func) in _STREAMS:
            made.append(node.lineno)
        if not isinstance(node, ast.Assign) or not isinstance(node.value, ast.Call):
            continue
        if reading.name(node.value.func) in _STREAMS:
            own.update(_key(target) for target in node.targets)
    # Something must wait for the own stream. The own stream's waits for other streams do not count.
    joined = any(
        _ends(call.func, "synchronize")
        or (isinstance(call.func, ast.Attribute) and call.func.attr in _JOINS and _key(call.func.value) not in own)
        for call in reading.calls
    )
    if made and not joined:
        yield "unjoined_stream", made[0]


def _in_strings(reading: _Reading) -> _Hits:
    created: int | None = None
    joined = False
    for text, line in reading.strings:
        if len(text) < 200 and _PROC_MEM.search(text):
            yield "process_memory", line
        elif len(text) < 200 and _PROC.match(text):
            yield "proc_files", line
        if "(" not in text:
            continue
        code = provenance.CPP_COMMENT.sub(lambda comment: " " + "\n" * comment[0].count("\n"), text)
        for rule, pattern in _IN_CPP:
            for match in pattern.finditer(code):
                yield rule, line + code.count("\n", 0, match.start())
                break
        if match := _CPP_STREAM.search(code):
            created = line + code.count("\n", 0, match.start())
        joined = joined or _CPP_JOIN.search(code) is not None
    if created is not None and not joined:
        yield "unjoined_stream", created


def _authorship(reading: _Reading, backend: str) -> _Hits:
    """Find signs that the author did not write the claimed kernel."""
    claims = backend != "torch"
    for node in reading.nodes:
        if isinstance(node, ast.Attribute | ast.Name) and reading.name(node) == "torch.compile":
            yield ("compiled_by_torch" if claims else "torch_compile"), node.lineno
    if not claims:
        return
    for node in reading.forward:
        if isinstance(node, ast.expr) and _is_operator(reading, node):
            yield "library_call", node.lineno
    builds = any(
        _ends(call.func, "load_inline", "load", "load_library", "CDLL", "RawModule", "exec", "exec_module")
        for call in reading.calls
    )
    if not builds and not provenance.own_kernels(reading.nodes):
        entry = next((n.lineno for n in reading.nodes if isinstance(n, ast.ClassDef) and n.name == ENTRY), 1)
        yield "no_own_kernel", entry
