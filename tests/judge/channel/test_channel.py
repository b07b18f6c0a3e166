"""The judge's end of the channel: it accepts valid messages of a candidate and refuses all other data."""

from __future__ import annotations

import contextlib
import gc
import itertools
import os
import socket
import weakref
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from workers.judge.channel import flags
from workers.judge.channel.arguments import put_together, take_apart
from workers.judge.channel.buffers import (
    LocationError,
    OpenedBuffer,
    ProcessMemory,
    SharedTensor,
    is_apart,
    is_dense,
    view_within,
)
from workers.judge.channel.orders import Order
from workers.judge.channel.protocol import Answer, ProtocolError, Reply, Shortage, Tag
from workers.judge.channel.tensors import DTYPES, Location, TensorSpec, Where, describe
from workers.judge.channel.wire import receive_command, receive_record, send_command

SIZE = len(Reply(Answer.DONE, 1).pack())


def opened(shared: SharedTensor) -> torch.Tensor:
    assert shared.descriptor is not None
    return OpenedBuffer(shared.spec, os.dup(shared.descriptor)).tensor


def test_a_reply_survives_the_way() -> None:
    specs = tuple(TensorSpec(dtype, (2, 3), "cuda") for dtype in DTYPES)
    locations = tuple(Location(Where.EXPORTED, 3, 2**60 + i, 512 * i, (3, 1)) for i in range(len(DTYPES)))
    reply = Reply(
        Answer.RAISED,
        7,
        Tag.CUDA,
        700,
        "(Tensor,)",
        "builtins.ValueError",
        "größer",
        specs,
        locations,
        True,
        False,
        2**50,
    )
    assert Reply.unpack(replace(reply, drew=False, differentiates=True).pack()).differentiates
    reply = replace(reply, shortage=Shortage("shared memory", 2**50, 232448, "matmul", "BM=128, ö=1"))
    assert Reply.unpack(reply.pack()) == reply


def test_texts_are_cut_to_their_bounds() -> None:
    reply = Reply.unpack(Reply(Answer.RAISED, 1, exception="e" * 500, message="ä" * 5000).pack())
    assert len(reply.exception) == 128
    assert len(reply.message.encode()) <= 2050
    assert reply.structure == ""


def test_a_tensor_of_too_many_dimensions_is_seen_as_such() -> None:
    spec = TensorSpec(torch.float32, (1,) * 12, "cpu")
    assert len(Reply.unpack(Reply(Answer.MISMATCH, 1, tensors=(spec,)).pack()).tensors[0].shape) == 12


@given(st.binary(max_size=600), st.booleans())
def test_no_bytes_do_more_than_be_refused(data: bytes, padded: bool) -> None:
    head = Reply(Answer.DONE, 1).pack()[:4]
    with contextlib.suppress(ProtocolError):
        assert isinstance(Reply.unpack((head + data).ljust(SIZE, b"\xff") if padded else data), Reply)


@given(st.integers(0, SIZE - 1), st.integers(0, 255))
def test_one_wrong_byte_is_harmless(position: int, value: int) -> None:
    data = bytearray(Reply(Answer.MISMATCH, 3, tensors=(TensorSpec(torch.int8, (4,), "cpu"),)).pack())
    data[position] = value
    with contextlib.suppress(ProtocolError):
        assert isinstance(Reply.unpack(bytes(data)), Reply)


def test_only_a_whole_packet_is_a_reply() -> None:
    """A reply with extra bytes raises ProtocolError, and a closed channel returns None."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours:
        theirs.send(Reply(Answer.DONE, 1).pack() + b"!")
        with pytest.raises(ProtocolError):
            receive_record(ours)
        theirs.close()
        assert receive_record(ours) is None


def test_a_command_brings_its_payload_and_descriptors() -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    page = flags.create()
    with ours, theirs:
        send_command(ours, Order.BIND_INPUTS, 5, seed=2**63 - 1, payload={"x": torch.ones(2)}, fds=(page,))
        command = receive_command(theirs)
    assert command is not None
    assert (command.order, command.sequence, command.seed) == (Order.BIND_INPUTS, 5, 2**63 - 1)
    assert command.payload["x"].tolist() == [1.0, 1.0]
    assert os.fstat(command.descriptors[0]).st_size == os.fstat(page).st_size


@pytest.mark.parametrize("dtype", DTYPES)
def test_both_sides_see_the_same_tensor(dtype: torch.dtype) -> None:
    for shape in ((), (0,), (3,), (2, 3), (2, 0, 4)):
        like = torch.zeros((*shape, dtype.itemsize), dtype=torch.uint8).view(dtype).reshape(shape)
        shared = SharedTensor(like)
        there = opened(shared)
        shared.tensor.copy_(like)
        assert (there.shape, there.dtype) == (like.shape, dtype)
        assert set(os.pread(shared.descriptor, 4096, shared.flat.numel())) == {0xFF}  # A float beyond the end is NaN.
        assert there.reshape(-1).view(torch.uint8).tolist() == like.reshape(-1).view(torch.uint8).tolist()
        shared.close()
    shared = SharedTensor(torch.zeros(4, 5, dtype=dtype).t())
    there = opened(shared)
    assert there.stride() == (1, 5)
    shared.tensor.untyped_storage().fill_(64)
    assert there[2, 1].reshape(1).view(torch.uint8).tolist() == [64] * dtype.itemsize


SHAPES = st.lists(st.integers(1, 4), max_size=4).map(tuple)


@given(SHAPES, st.data())
def test_apart_means_that_no_two_elements_share_memory(shape: tuple[int, ...], data: st.DataObject) -> None:
    """A layout that counts as apart has no overlapping elements, and every dense layout is apart."""
    stride = tuple(data.draw(st.integers(0, 20)) for _ in shape)
    offsets = [
        sum(i * s for i, s in zip(index, stride, strict=True)) for index in itertools.product(*map(range, shape))
    ]
    if is_apart(shape, stride):
        assert len(set(offsets)) == len(offsets)
    dense = torch.empty(shape).permute(data.draw(st.permutations(range(len(shape)))))
    assert is_apart(dense.shape, dense.stride())
    assert is_dense(dense.shape, dense.stride())
    if is_dense(shape, stride):
        assert set(offsets) == set(range(len(offsets)))


@given(SHAPES, st.integers(-64, 4096), st.lists(st.integers(-3, 2000), max_size=5), st.sampled_from(DTYPES))
def test_an_output_is_read_within_its_allocation_or_not_at_all(
    shape: tuple[int, ...], offset: int, stride: list[int], dtype: torch.dtype
) -> None:
    flat = torch.zeros(2048, dtype=torch.uint8)
    try:
        view = view_within(
            flat, Location(Where.EXPORTED, offset=offset, stride=tuple(stride)), TensorSpec(dtype, shape, "cpu")
        )
    except LocationError:
        return
    assert view.shape == shape
    assert view.dtype is dtype
    first = view.data_ptr() - flat.data_ptr()
    last = first + sum((n - 1) * s for n, s in zip(shape, stride, strict=True)) * dtype.itemsize
    assert 0 <= first <= last <= flat.numel() - dtype.itemsize


def test_an_output_at_an_offset_is_the_one_that_lies_there() -> None:
    whole = torch.arange(24, dtype=torch.float32)
    output = whole[4:16].view(3, 4).t()
    location = Location(Where.EXPORTED, offset=16, stride=output.stride())
    seen = view_within(whole.view(torch.uint8), location, TensorSpec.of(output))
    assert torch.equal(seen, output)


@pytest.fixture
def process_memory() -> Iterator[ProcessMemory]:
    """Memory of this process, opened in the same way as a sealed process's."""
    memory = ProcessMemory(os.open("/proc/self/mem", os.O_RDONLY))
    yield memory
    memory.close()


def test_a_process_s_memory_is_read_as_it_is(process_memory: ProcessMemory) -> None:
    for count in (1, 5_000, 1_000_003):
        there, here = torch.arange(count, dtype=torch.int32), torch.zeros(count, dtype=torch.int32)
        process_memory.read(there.data_ptr(), here)
        assert torch.equal(there, here)
    for address in (-8, 0, 8, (1 << 47) + 4096, (1 << 63) - 8, (1 << 63) - 1):
        with pytest.raises(LocationError):
            process_memory.read(address, torch.zeros(4))


def test_the_memory_of_a_process_that_has_ended_is_nobody_s() -> None:
    there = torch.ones(4)
    reader, writer = socket.socketpair()
    child = os.fork()
    if child == 0:
        try:
            socket.send_fds(writer, [b"memory"], [os.open("/proc/self/mem", os.O_RDONLY)])
        finally:
            os._exit(0)
    with reader, writer:
        _, [descriptor], *_ = socket.recv_fds(reader, 16, 1)
    os.waitpid(child, 0)
    memory = ProcessMemory(descriptor)
    with pytest.raises(EOFError):
        memory.read(there.data_ptr(), torch.zeros(4))
    memory.close()


@pytest.mark.parametrize(
    "read", [describe, take_apart, lambda values: put_together(*take_apart(values))], ids=["out", "in", "in and out"]
)
def test_what_has_been_read_keeps_no_tensor_alive(read: Callable[[Any], Any]) -> None:
    gc.disable()
    try:
        tensor = torch.zeros(4)
        gone = weakref.ref(tensor)
        values: Any = [{"a": [tensor, (tensor, 1)]}, 2.0]
        held = read(values)
        assert gone() is not None
        del tensor, values, held
        assert gone() is None
    finally:
        gc.enable()
