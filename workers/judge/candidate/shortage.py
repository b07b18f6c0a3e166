"""Details of a Triton launch that exceeds a GPU resource: the required amount, the limit, and the kernel's settings."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

from workers.judge.channel.protocol import Shortage

#: Compile options that, together with the constants, decide how many resources a launch needs.
_OPTIONS: Final = ("num_warps", "num_stages", "num_ctas")


def of(error: BaseException) -> Shortage | None:
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
    for kernel in _selves(error):
        try:
            settings = ", ".join(f"{name}={value}" for name, value in (*_constants(kernel), *_options(kernel)))
            return Shortage(short.resource, short.required, short.limit, str(kernel.metadata.name), settings)
        except Exception:  # noqa: BLE001, S112 -- another version of Triton, or not a Triton kernel
            continue
    return short


def _selves(error: BaseException) -> Iterator[Any]:
    """Yield each ``self`` of an error's traceback, innermost frame first."""
    frames: list[Any] = []
    entry = error.__traceback__
    while entry is not None:
        frames.append(entry.tb_frame)
        entry = entry.tb_next
    for frame in reversed(frames):
        if (own := frame.f_locals.get("self")) is not None:
            yield own


def _constants(kernel: Any) -> Iterator[tuple[str, Any]]:
    names = kernel.src.fn.arg_names
    for path, value in kernel.src.constants.items():
        # A key is the position of an argument, followed by positions within it if it is a tuple. None is not a setting.
        if len(path) == 1 and isinstance(value, (bool, int, float, str)):
            yield names[path[0]], value


def _options(kernel: Any) -> Iterator[tuple[str, Any]]:
    for name in _OPTIONS:
        if (value := getattr(kernel.metadata, name, None)) is not None:
            yield name, value
