"""Packets with descriptors beside them, over a Unix socket that keeps packets apart. Loads no torch."""

from __future__ import annotations

import array
import socket
from collections.abc import Sequence


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
