"""What Triton says of a launch for which a GPU lacks something: how much it asked for, and which launch it was."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

from workers.judge.channel.protocol import Shortage

#: What decides how much a launch needs, beside its constants.
_OPTIONS: Final = ("num_warps", "num_stages", "num_ctas")


def of(error: BaseException) -> Shortage | None:
    """Return what ``triton.runtime.errors.OutOfResources`` says; None if it says something else than it used to.

    Triton raises it in a method of the compiled kernel, which knows its name, options and constants. Foreign code runs
    in this process and may have made all of it up.
    """
    try:
        short = Shortage(str(error.name), int(error.required), int(error.limit))  # type: ignore[attr-defined]
    except Exception:  # noqa: BLE001 -- a kernel may raise what it likes under that name
        return None
    if not 0 <= short.required < 1 << 63 > short.limit >= 0:
        return None
    for kernel in _selves(error):
        try:
            settings = ", ".join(f"{name}={value}" for name, value in (*_constants(kernel), *_options(kernel)))
            return Shortage(short.resource, short.required, short.limit, str(kernel.metadata.name), settings)
        except Exception:  # noqa: BLE001, S112 -- another version of Triton, or no kernel of its at all
            continue
    return short


def _selves(error: BaseException) -> Iterator[Any]:
    """Yield the objects whose methods an error came through, the last one first."""
    frames: list[Any] = []
    place = error.__traceback__
    while place is not None:
        frames.append(place.tb_frame)
        place = place.tb_next
    for frame in reversed(frames):
        if (own := frame.f_locals.get("self")) is not None:
            yield own


def _constants(kernel: Any) -> Iterator[tuple[str, Any]]:
    names = kernel.src.fn.arg_names
    for place, value in kernel.src.constants.items():
        # A key is the place of an argument, and of what is in it where that is a tuple. None is no one's choice.
        if len(place) == 1 and isinstance(value, (bool, int, float, str)):
            yield names[place[0]], value


def _options(kernel: Any) -> Iterator[tuple[str, Any]]:
    for name in _OPTIONS:
        if (value := getattr(kernel.metadata, name, None)) is not None:
            yield name, value
