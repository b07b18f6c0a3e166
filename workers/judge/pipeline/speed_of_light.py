"""The lower bound that memory bandwidth sets on a kernel's time."""

from __future__ import annotations

from typing import Final

from kqueue.categories import Category
from kqueue.contract import Phase
from kqueue.evidence import Hack, Measurement, SpeedOfLightBound
from workers.judge.ending import EvaluationEnded

#: A time is too short if the median plus this slack in milliseconds, or the upper end of its interval if that is more,
#: is below this share of the bound. Both bandwidth and time are measurements.
_SHARE: Final = 0.7
_SLACK_MS: Final = 0.003


def floor(read: int, written: int, bandwidth: float) -> SpeedOfLightBound:
    """Return the bound for reading all inputs.

    Args:
        read: bytes of all inputs.
        written: bytes of output that must be written.
        bandwidth: the device's memory bandwidth in bytes per second.
    """
    return SpeedOfLightBound(
        bytes_in=read,
        bytes_out=written,
        bandwidth_gbs=round(bandwidth / 1e9, 1),
        floor_ms=(read + written) / bandwidth * 1e3,
        floor_out_ms=written / bandwidth * 1e3,
    )


def cacheable(runtime: Measurement, l2: int) -> int:
    """Return the bytes of inputs that a timed kernel can find in an L2 cache of ``l2`` bytes.

    There are none if the cache was flushed between the inputs and the call, which only the GPU's clock allows.
    """
    return 0 if runtime.cold_l2 and runtime.basis == "gpu_clock" else l2


def is_beyond(known: SpeedOfLightBound, runtime: Measurement, cached: int) -> bool:
    """Return whether a time is too short to read all inputs except ``cached`` bytes."""
    least_ms = known.floor_ms - cached / (known.bandwidth_gbs * 1e9) * 1e3
    return _most_ms(runtime) < _SHARE * least_ms


def _most_ms(runtime: Measurement) -> float:
    return max(runtime.median_ms + _SLACK_MS, runtime.high_ms or 0.0)


def needing(known: SpeedOfLightBound, needed: int, cached: int) -> SpeedOfLightBound:
    """Return a bound that counts the bytes of inputs that a kernel must read from memory, as ``bytes_needed``."""
    needed = max(0, min(needed, known.bytes_in) - cached)
    least_ms = (needed + known.bytes_out) / (known.bandwidth_gbs * 1e9) * 1e3
    return known.model_copy(update={"bytes_needed": needed, "floor_needed_ms": least_ms})


def enforce(known: SpeedOfLightBound, runtime: Measurement) -> None:
    """Reject an impossible time. ``known`` is the result of :func:`floor` or :func:`needing`.

    Raises:
        EvaluationEnded: ``reward_hack`` if the outputs cannot have been written, or the needed inputs read, in time.
    """
    read, written = known.bytes_needed or 0, known.bytes_out
    least_ms = known.floor_out_ms if known.floor_needed_ms is None else known.floor_needed_ms
    # A kernel that moves nothing can take no time, and noise can make the measurement negative.
    if (read or written) and _most_ms(runtime) < _SHARE * least_ms:
        raise EvaluationEnded(
            Category.REWARD_HACK,
            f"{runtime.median_ms:.4f} ms is too short to read {read} bytes and write {written} at"
            f" {known.bandwidth_gbs} GB/s, which takes {least_ms:.4f} ms",
            Phase.TIME,
            hack=Hack.FASTER_THAN_MEMORY,
            median_ms=runtime.median_ms,
        )
