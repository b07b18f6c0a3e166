"""Failures of orders: the exceptions of foreign code as replies to the judge."""

from __future__ import annotations

import errno
import traceback
from typing import Final

from workers.judge.candidate import shortage
from workers.judge.channel.gpu_memory import CudaCallError, driver
from workers.judge.channel.protocol import Answer, Reply, Shortage, Tag
from workers.judge.channel.wire import Command

#: Tags of known exceptions, by qualified name because their packages can be missing or import this module.
_TAGS: Final = {
    "triton.compiler.errors.CompilationError": Tag.COMPILE,
    "triton.compiler.errors.CompileTimeAssertionFailure": Tag.COMPILE,
    "triton.compiler.errors.UnsupportedLanguageConstruct": Tag.COMPILE,
    "triton.runtime.errors.PTXASError": Tag.COMPILE,
    "triton.runtime.errors.OutOfResources": Tag.RESOURCES,
    "cupy.cuda.compiler.CompileException": Tag.COMPILE,
    "cupy.cuda.memory.OutOfMemoryError": Tag.GPU_MEMORY,
    "torch.OutOfMemoryError": Tag.GPU_MEMORY,
    "torch.cuda.OutOfMemoryError": Tag.GPU_MEMORY,
    "builtins.MemoryError": Tag.HOST_MEMORY,
    "builtins.SystemExit": Tag.EXIT,
    "workers.judge.candidate.harness.EntryPointError": Tag.ENTRY_POINT,
    "workers.judge.candidate.harness.ProblemError": Tag.PROBLEM,
}
_OUT_OF_MEMORY: Final = 2  # cudaErrorMemoryAllocation


class CompileError(Exception):
    """Wrapper of an exception that a compiler's failure raised. The original exception is its cause."""


def reply_to(command: Command, error: BaseException, *, on_gpu: bool) -> Reply:
    """Print an exception that ended an order, and return the reply that reports it."""
    traceback.print_exception(error)
    tag, code = tag_of(error), _cuda_code(error)
    if code == 0 and on_gpu and tag in (Tag.OTHER, Tag.CUDA):
        code = _context_code()
    if code == _OUT_OF_MEMORY:
        tag = Tag.GPU_MEMORY
    elif code and tag is Tag.OTHER:
        tag = Tag.CUDA
    shown = error.__cause__ if isinstance(error, CompileError) and error.__cause__ else error
    return Reply(
        Answer.RAISED,
        command.sequence,
        tag=tag,
        code=code,
        exception=qualified(type(shown)),
        message=text_of(shown),
        shortage=(shortage.of(error) if tag is Tag.RESOURCES else None) or Shortage(),
    )


def qualified(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


def text_of(error: BaseException) -> str:
    """Return an exception's text. Foreign code makes the text, and can raise another exception."""
    try:
        return str(error)
    except BaseException as fault:  # noqa: BLE001
        return f"<its text cannot be read: {qualified(type(fault))}>"


def tag_of(error: BaseException) -> Tag:
    if isinstance(error, CompileError):
        return Tag.COMPILE
    if isinstance(error, OSError) and error.errno == errno.ENOSPC:
        return Tag.FILES
    for kind in type(error).__mro__:
        if (tag := _TAGS.get(qualified(kind))) is not None:
            return tag
    return Tag.CUDA if _cuda_code(error) else Tag.OTHER


def _cuda_code(error: BaseException) -> int:
    """Return the CUDA error code that an exception of torch, CuPy or this project carries, or 0."""
    for name in ("error_code", "status"):
        try:
            code = getattr(error, name, None)
        except BaseException:  # noqa: BLE001 -- a property of foreign code
            code = None
        if type(code) is int and 0 < code < 10_000:
            return code
    return 0


def _context_code() -> int:
    """Return the error that ended this process's CUDA context, or 0."""
    try:
        driver("cuCtxSynchronize")
    except CudaCallError as error:
        return error.error_code
    except OSError:  # there is no driver
        return 0
    return 0
