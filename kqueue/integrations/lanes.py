"""Map other evaluators' names of GPU types to lanes."""

from __future__ import annotations

from kqueue.contract import Request, Verdict, gpu_model
from kqueue.errors import InvalidRequest


def lane_of(gpu_type: str) -> str:
    """Return the lane for a GPU type: ``A100``, ``A100-80GB`` and ``NVIDIA A100-SXM4-80GB`` give ``gpu.a100``.

    ``any`` gives ``gpu``, ``cpu`` the lane without GPUs, and ``auto`` leaves the choice to the client. Variants that
    differ in memory share a lane. Modal's ``!`` (no upgrade) is ignored, because kqueue substitutes another model only
    where ``KQUEUE_GPU_FALLBACK`` names it.

    Raises:
        InvalidRequest: more than one GPU is requested (``H100:8``), or none is named.
    """
    name, _, count = gpu_type.strip().rstrip("!").partition(":")
    if count not in {"", "1"}:
        raise InvalidRequest(f"gpu_type: {gpu_type!r} asks for {count} GPUs, but an evaluation uses one: omit :{count}")
    kind = name.lower()
    if not any(char.isalnum() for char in kind):
        raise InvalidRequest(f"gpu_type: {gpu_type!r} names no GPU: use a model such as A100, or any, auto or cpu")
    if kind in {"auto", "cpu"}:
        return kind
    return "gpu" if kind in {"any", "gpu"} else f"gpu.{gpu_model(kind)}"


def fallback_of(request: Request, verdict: Verdict) -> dict[str, str]:
    """Return the metadata entry of a result whose lane differs from the requested one, or an empty mapping."""
    return {} if request.lane in {"auto", verdict.lane} else {"lane_asked": request.lane}
