"""Arenas: memory of the judge in which a reference keeps its small tensors."""

from __future__ import annotations

import os

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from workers.judge.channel.arena import Arena, taken_by
from workers.judge.channel.buffers import LocationError, OpenedBuffer, SharedTensor, view_within
from workers.judge.channel.tensors import Location, TensorSpec, Where


def both(nbytes: int) -> tuple[SharedTensor, Arena]:
    shared = SharedTensor(torch.empty(1, dtype=torch.uint8).expand(nbytes))
    assert shared.descriptor is not None
    return shared, Arena(OpenedBuffer(shared.spec, os.dup(shared.descriptor)))


def test_the_judge_sees_what_was_kept_in_its_own_layout() -> None:
    shared, arena = both(1 << 16)
    for tensor in (torch.randn(3, 5), torch.arange(7), torch.randn(4, 6).t(), torch.tensor(2.0, dtype=torch.float64)):
        kept = arena.keep(tensor)
        assert kept is not None
        assert kept.stride() == tensor.stride()
        location = arena.location(kept)
        assert location is not None
        assert location.where is Where.ARENA
        assert torch.equal(view_within(shared.flat, location, TensorSpec.of(tensor)), tensor)
    for tensor in (torch.randn(4, 6)[:, ::2], torch.randn(3).expand(4, 3), torch.empty(0), torch.zeros(1 << 16)):
        assert arena.keep(tensor) is None
        assert arena.location(tensor) is None


def test_no_place_beyond_the_arena_can_be_told() -> None:
    shared, _ = both(4096)
    spec = TensorSpec.of(torch.zeros(8))
    for offset in (4096 - 28, 4096, -4, 2, 1 << 40):
        with pytest.raises(LocationError):
            view_within(shared.flat, Location(Where.ARENA, offset=offset, stride=(1,)), spec)


@given(st.lists(st.tuples(st.integers(1, 700), st.integers(0, 30)), max_size=60))
def test_what_is_kept_at_the_same_time_never_overlaps_and_room_comes_back(steps: list[tuple[int, int]]) -> None:
    shared, arena = both(16 * taken_by(1))
    held: list[tuple[torch.Tensor, torch.Tensor]] = []
    for number, (size, which) in enumerate(steps):
        tensor = torch.full((size,), number, dtype=torch.int16)
        if (kept := arena.keep(tensor)) is not None:
            held.append((kept, tensor))
        if held and which < len(held):
            arena.let_go(held.pop(which)[0])
        assert all(torch.equal(kept, tensor) for kept, tensor in held)
    for kept, _ in held:
        arena.let_go(kept)
        arena.let_go(kept)  # releasing it a second time has no effect
    assert arena.keep(torch.zeros(shared.flat.numel(), dtype=torch.uint8)) is not None
