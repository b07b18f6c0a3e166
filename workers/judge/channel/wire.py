"""Transfer of messages: orders to a sealed process, and its replies and exports back."""

from __future__ import annotations

import os
import pickle
import socket
import struct
from dataclasses import dataclass
from typing import Any, Final

from workers.judge.channel.orders import Order
from workers.judge.channel.packets import receive_with_fds, send_with_fds
from workers.judge.channel.protocol import REPLY_BYTES, Export, Reply

_MAGIC: Final = 0x6B71_0001
_COMMAND = struct.Struct("=IIQq?")


@dataclass(frozen=True, slots=True)
class Command:
    """An order as the sealed process receives it."""

    order: Order
    sequence: int
    seed: int
    payload: Any
    descriptors: tuple[int, ...]


def send_command(
    channel: socket.socket,
    order: Order,
    sequence: int,
    *,
    seed: int = 0,
    payload: Any = None,
    fds: tuple[int, ...] = (),
) -> None:
    """Send an order with ``fds``, and with ``payload`` as a pickle in a memfd."""
    attached = list(fds)
    memory = -1
    if payload is not None:
        memory = os.memfd_create("kqueue-payload", os.MFD_CLOEXEC)
        with os.fdopen(os.dup(memory), "wb") as stream:
            pickle.dump(payload, stream, protocol=pickle.HIGHEST_PROTOCOL)
        attached.insert(0, memory)
    try:
        signed = seed if seed < 2**63 else seed - 2**64
        head = _COMMAND.pack(_MAGIC, order, sequence, signed, payload is not None)
        send_with_fds(channel, head, attached)
    finally:
        if memory >= 0:
            os.close(memory)


def receive_command(channel: socket.socket) -> Command | None:
    """Wait for an order, in the sealed process. Return None when the judge has closed the channel."""
    data, fds = receive_with_fds(channel, _COMMAND.size)
    if not data:
        return None
    _, order, sequence, seed, has_payload = _COMMAND.unpack_from(data)
    payload = None
    if has_payload:
        memory = fds.pop(0)
        os.lseek(memory, 0, os.SEEK_SET)
        with os.fdopen(memory, "rb") as stream:
            payload = pickle.load(stream)  # noqa: S301 -- written by the judge, for the candidate alone
    return Command(Order(order), sequence, seed, payload, tuple(fds))


def receive_record(channel: socket.socket) -> Reply | Export | None:
    """Wait for a reply or an export. Return None when the sealed process has closed the channel.

    Raise ProtocolError if the process sent something else.
    """
    # One byte more than a reply, so that a longer packet is detected instead of truncated to a valid size.
    try:
        data, fds = receive_with_fds(channel, REPLY_BYTES + 1)
    except ConnectionResetError:
        return None
    try:
        if Export.is_announced(data):
            export = Export.unpack(data, fds)
            fds = []
            return export
        return Reply.unpack(data) if data else None
    finally:
        for descriptor in fds:  # a reply carries none
            os.close(descriptor)
