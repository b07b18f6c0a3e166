"""The lanes that evaluators' names of GPU types mean."""

from __future__ import annotations

from kqueue.contract import gpu_model
from kqueue.errors import InvalidRequest


def lane_of(gpu_type: str) -> str:
    """The lane of a GPU type: ``A100``, ``A100-80GB`` and ``NVIDIA A100-SXM4-80GB`` are ``gpu.a100``.

    ``any`` is the lane ``gpu``, ``auto`` leaves it to the client, and ``cpu`` is the lane without GPUs. Variants
    by memory share a lane; Modal's ``!`` (no upgrade) changes nothing, as another model is never used.

    Raises:
        InvalidRequest: more than one GPU is asked for (``H100:8``), or none is named.
    """
    name, _, count = gpu_type.strip().rstrip("!").partition(":")
    if count not in {"", "1"}:
        raise InvalidRequest(
            f"gpu_type: {gpu_type!r} asks for {count} GPUs; an evaluation has one, so leave :{count} out"
        )
    kind = name.lower()
    if not any(char.isalnum() for char in kind):
        raise InvalidRequest(f"gpu_type: {gpu_type!r} names no GPU; use a model such as A100, or any, auto or cpu")
    if kind in {"auto", "cpu"}:
        return kind
    return "gpu" if kind in {"any", "gpu"} else f"gpu.{gpu_model(kind)}"
