"""Failures of orders: the exceptions of foreign code as replies to the judge."""

from __future__ import annotations

import ast
import contextlib
import errno
import re
import traceback
from pathlib import Path
from typing import Final

from kqueue.backends import registered
from kqueue.contract import named_tree
from workers.judge.candidate.compilers import LOCATED, complaint
from workers.judge.channel.gpu_memory import CudaCallError, driver
from workers.judge.channel.protocol import Answer, Reply, Shortage, Tag
from workers.judge.channel.wire import Command

#: Tags of known exceptions, by qualified name because their packages can be missing or import this module.
_TAGS: Final = {
    **{name: Tag.COMPILE for backend in registered().values() for name in backend.compile_errors},
    **{name: Tag.RESOURCES for backend in registered().values() for name in backend.resource_errors},
    **{name: Tag.GPU_MEMORY for backend in registered().values() for name in backend.memory_errors},
    "torch.OutOfMemoryError": Tag.GPU_MEMORY,
    "torch.cuda.OutOfMemoryError": Tag.GPU_MEMORY,
    "builtins.MemoryError": Tag.HOST_MEMORY,
    "builtins.SystemExit": Tag.EXIT,
    "workers.judge.candidate.harness.EntryPointError": Tag.ENTRY_POINT,
    "workers.judge.candidate.harness.ProblemError": Tag.PROBLEM,
    "workers.judge.candidate.interpreter.NeedsGpuError": Tag.NEEDS_GPU,
}
#: Text that no reader can use: a terminal's colours (Numba), torch's advice, and other processes on the GPU.
_NOISE: Final = re.compile(
    r"\x1b\[[0-9;]*m| If reserved but unallocated memory is large try setting PYTORCH_.*|(?:\n(?:Search for `cuda"
    r"|CUDA kernel errors might |For debugging consider passing CUDA_|Compile with `TORCH_USE_CUDA).*)+(?:\s*\Z)?"
    r"| GPU \d+ has a total capacity of \S+ \w+ of which \S+ \w+ is free\.| Process \d+ has \S+ \w+ memory in use\."
)
_NEXT_TO: Final = "Only the source and installed files are here: write the content of files next to it into the source"
_OF_PACKAGE: Final = ", or judge the package with its tree (`kqueue check`)"
_IN_TREE: Final = "The seal hides all files but the tree's and installed ones: commit the module below the tree's root"
_OUT_OF_MEMORY: Final = 2  # cudaErrorMemoryAllocation
#: Compile options that, together with the constants, decide how many resources a launch needs.
_OPTIONS: Final = ("num_warps", "num_stages", "num_ctas")


class CompileError(Exception):
    """Wrapper of an exception that a compiler's failure raised. The original exception is its cause."""


def reply_to(command: Command, error: BaseException, kernel: str, *, on_gpu: bool) -> Reply:
    """Print an exception of the source ``kernel`` that ended an order, and return the reply that reports it."""
    traceback.print_exception(error)
    tag = tag_of(error)
    code = 0 if tag is Tag.COMPILE else _cuda_code(error)  # compilers count their errors differently
    if code == 0 and on_gpu and tag in (Tag.OTHER, Tag.CUDA):
        code = _context_code()
    if tag is Tag.OTHER and not on_gpu and _wants_gpu(error):
        tag = Tag.NEEDS_GPU
    if code == _OUT_OF_MEMORY:
        tag = Tag.GPU_MEMORY
    elif code and tag is Tag.OTHER:
        tag = Tag.CUDA
    shown = error.__cause__ if isinstance(error, CompileError) and error.__cause__ else error
    text, cause = text_of(shown), shown.__cause__
    # Triton's error at a call of a function has the error in that function as its cause.
    while tag is Tag.COMPILE and cause is not None and tag_of(cause) is tag:
        text, cause = f"{text}\n{text_of(cause)}", cause.__cause__
    message = complaint(text, kernel) if tag is Tag.COMPILE or LOCATED.search(text) else text
    head, end, rest = message.partition("\n")
    if isinstance(shown, ModuleNotFoundError):
        files = _IN_TREE if named_tree(kernel) else _NEXT_TO + _OF_PACKAGE
        message = f"{message}: this worker lacks it. Do without it, or install it for the workers. {files}"
    elif "relative import with no" in head or (
        "No such file" in head and head[:3] != "ld:" and (tag is Tag.COMPILE or isinstance(shown, FileNotFoundError))
    ):
        files = _IN_TREE.replace("module", "file") if named_tree(kernel) else _NEXT_TO
        message = f"{head}. {files}{end}{rest}"
    return Reply(
        Answer.RAISED,
        command.sequence,
        tag=tag,
        code=code,
        exception=qualified(type(shown)),
        message=message,
        shortage=(shortage_of(error) if tag is Tag.RESOURCES else None) or Shortage(),
    )


def qualified(kind: type) -> str:
    """Return a type's name with its module."""
    return f"{kind.__module__}.{kind.__qualname__}"


def text_of(error: BaseException) -> str:
    """Return an exception's text without noise. Foreign code makes the text, and can raise another exception."""
    try:
        return _NOISE.sub("", str(error))
    except BaseException as fault:  # noqa: BLE001
        return f"<its text cannot be read: {qualified(type(fault))}>"


def tag_of(error: BaseException) -> Tag:
    """Return the kind of an exception."""
    if isinstance(error, CompileError):
        return Tag.COMPILE
    if isinstance(error, OSError) and error.errno == errno.ENOSPC:
        return Tag.FILES
    if isinstance(error, RuntimeError) and "DefaultCPUAllocator: can't allocate memory" in text_of(error):
        return Tag.HOST_MEMORY
    for kind in type(error).__mro__:
        if (tag := _TAGS.get(qualified(kind))) is not None:
            return tag
    return Tag.CUDA if _cuda_code(error) else Tag.OTHER


def _wants_gpu(error: BaseException) -> bool:
    """Return whether ``torch.cuda`` raised an exception, or a statement whose condition names CUDA."""
    steps = list(traceback.walk_tb(error.__traceback__))
    if any(str(frame.f_globals.get("__name__")).startswith("torch.cuda") for frame, _ in steps[-2:]):
        return True
    with contextlib.suppress(Exception):  # its source cannot be read
        frame, line = steps[-1]
        nodes = ast.walk(ast.parse(Path(frame.f_code.co_filename).read_text(encoding="utf-8")))
        kept = (node for node in nodes if isinstance(node, ast.Assert | ast.If | ast.Raise))
        around = [node for node in kept if node.lineno <= line <= (node.end_lineno or 0)]
        tests = [ast.unparse(node.test) for node in around if not isinstance(node, ast.Raise)]
        return not isinstance(around[-1], ast.If) and "cuda" in " ".join(tests)
    return False


def _cuda_code(error: BaseException) -> int:
    """Return the CUDA error code that an exception of torch, CuPy or this project carries, or 0."""
    for name in ("error_code", "status"):
        with contextlib.suppress(BaseException):  # a property of foreign code
            if type(code := getattr(error, name, None)) is int and 0 < code < 10_000:
                return code
    return 0


def _context_code() -> int:
    """Return the error that ended this process's CUDA context, or 0."""
    try:
        driver("cuCtxSynchronize")
    except (CudaCallError, OSError) as error:
        return getattr(error, "error_code", 0)  # without a driver there is none
    return 0


def shortage_of(error: BaseException) -> Shortage | None:
    """Return the details of an ``OutOfResources`` error of Triton, or None if its attributes are not as expected.

    A method of the compiled kernel raises the error, and that object has the kernel's name, options and constants.
    Foreign code runs in this process and can forge all of them.
    """
    try:
        short = Shortage(str(error.name), int(error.required), int(error.limit))  # type: ignore[attr-defined]
    except Exception:  # noqa: BLE001 -- a kernel can raise any object under that name
        return None
    if not 0 <= short.required < 1 << 63 > short.limit >= 0:
        return None
    for frame, _ in reversed(list(traceback.walk_tb(error.__traceback__))):
        try:
            kernel = frame.f_locals["self"]
            names = kernel.src.fn.arg_names
            # A key is the position of an argument, followed by positions within it if it is a tuple.
            constants = [(names[path[0]], value) for path, value in kernel.src.constants.items() if len(path) == 1]
            constants += [(name, getattr(kernel.metadata, name, None)) for name in _OPTIONS]
            shown = [f"{name}={value}" for name, value in constants if isinstance(value, int | float | str)]
            return Shortage(short.resource, short.required, short.limit, str(kernel.metadata.name), ", ".join(shown))
        except Exception:  # noqa: BLE001, S112 -- another frame or version of Triton, or not a Triton kernel
            continue
    return short
