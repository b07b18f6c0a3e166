"""Packets with file descriptors over a Unix ``SOCK_SEQPACKET`` socket. This module does not import torch."""

from __future__ import annotations

import array
import select
import socket
import time
from collections.abc import Sequence
from typing import Final

#: Time in seconds for which :func:`wait_briefly` polls.
_BRIEFLY_S: Final = 1e-3


def send_with_fds(channel: socket.socket, data: bytes, fds: Sequence[int]) -> None:
    """Send one packet with descriptors."""
    ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
    channel.sendmsg([data], ancillary)


def receive_with_fds(channel: socket.socket, size: int) -> tuple[bytes, list[int]]:
    """Receive one packet of at most ``size`` bytes and its descriptors."""
    fds = array.array("i")
    data, ancillary, _, _ = channel.recvmsg(size, socket.CMSG_SPACE(253 * fds.itemsize), socket.MSG_CMSG_CLOEXEC)
    for level, kind, content in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            fds.frombytes(content[: len(content) - len(content) % fds.itemsize])
    return data, list(fds)


def wait_briefly(*channels: socket.socket) -> None:
    """Poll without sleeping until a socket is readable or a millisecond has passed.

    A sleeping process would wake too late for short calls. Polling keeps a core busy, so it is only for calls that are
    checked or timed on a device.
    """
    poll = select.poll()
    for channel in channels:
        poll.register(channel, select.POLLIN)
    deadline = time.monotonic() + _BRIEFLY_S
    while not poll.poll(0) and time.monotonic() < deadline:
        pass
