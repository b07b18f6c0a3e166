"""Packets with descriptors beside them, over a Unix socket that keeps packets apart. Loads no torch."""

from __future__ import annotations

import array
import select
import socket
import time
from collections.abc import Sequence
from typing import Final

#: How long a packet that is expected at once is looked for before it is waited for, in seconds.
_BRIEFLY_S: Final = 1e-3


def send_with_fds(channel: socket.socket, data: bytes, fds: Sequence[int]) -> None:
    """Send one packet and descriptors beside it."""
    ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
    channel.sendmsg([data], ancillary)


def receive_with_fds(channel: socket.socket, size: int) -> tuple[bytes, list[int]]:
    """Receive one packet of at most ``size`` bytes and the descriptors beside it."""
    fds = array.array("i")
    data, ancillary, _, _ = channel.recvmsg(size, socket.CMSG_SPACE(253 * fds.itemsize), socket.MSG_CMSG_CLOEXEC)
    for level, kind, content in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            fds.frombytes(content[: len(content) - len(content) % fds.itemsize])
    return data, list(fds)


def wait_briefly(*channels: socket.socket) -> None:
    """Look whether sockets can be read until one can or a moment has passed: who sleeps is woken late.

    For calls that are checked or timed on a device: it keeps a core busy, and of small ones there is one at a time.
    """
    poll = select.poll()
    for channel in channels:
        poll.register(channel, select.POLLIN)
    deadline = time.monotonic() + _BRIEFLY_S
    while not poll.poll(0) and time.monotonic() < deadline:
        pass
