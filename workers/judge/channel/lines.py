"""Lines of text, with file descriptors, over a stream socket. This module does not import torch."""

from __future__ import annotations

import os
import socket
import stat
from collections.abc import Iterator
from typing import Final

#: Size in bytes of one read.
_READ_BYTES: Final = 1 << 20
#: Maximum number of received descriptors. Further ones are closed.
_MOST_DESCRIPTORS: Final = 4


class Lines:
    """The reader's end of the socket. The lines are untrusted.

    ``ended`` is True once the sender has closed the socket.
    """

    def __init__(self, source: socket.socket, most: float = float("inf")) -> None:
        """Take ownership of a socket, and accept at most ``most`` bytes."""
        source.setblocking(False)
        self.descriptors: list[int] = []
        self.nbytes = 0
        self.ended = False
        self._source = source
        self._most = most
        self._rest = b""

    def fileno(self) -> int:
        """Return the socket's descriptor, for select and poll."""
        return self._source.fileno()

    @property
    def too_many(self) -> bool:
        """True if the sender exceeded the maximum number of bytes."""
        return self.nbytes > self._most

    def read(self) -> Iterator[bytes]:
        """Yield the complete lines that arrived since the last call, without waiting."""
        while not self.too_many:
            try:
                data, descriptors, _, _ = socket.recv_fds(
                    self._source, _READ_BYTES, 2 * _MOST_DESCRIPTORS, socket.MSG_CMSG_CLOEXEC
                )
            except BlockingIOError:
                return
            except ConnectionResetError:
                data, descriptors = b"", []
            kept = _MOST_DESCRIPTORS - len(self.descriptors)
            self.descriptors += descriptors[:kept]
            for descriptor in descriptors[kept:]:
                os.close(descriptor)
            if not data:
                self.ended = True
                return
            self.nbytes += len(data)
            *lines, self._rest = (self._rest + data).split(b"\n")
            yield from lines

    def close(self) -> None:
        """Close the socket and the descriptors."""
        self._source.close()
        for descriptor in self.descriptors:
            os.close(descriptor)
        self.descriptors.clear()


def say(words: int, line: bytes, descriptors: tuple[int, ...] = ()) -> None:
    """Send a line, with descriptors, on the socket whose descriptor is ``words``. Wait until there is room."""
    left = memoryview(line + b"\n")
    if descriptors:
        with socket.socket(fileno=os.dup(words)) as target:
            left = left[socket.send_fds(target, [left], descriptors) :]
    while left:
        left = left[os.write(words, left) :]


def content(descriptor: int, most: int, *, at_end: bool = False) -> str:
    """Read the beginning or the end of the file that a received descriptor opens.

    Return at most ``most`` bytes as text. Return an empty text for anything but a regular file, because a read from it
    could block.
    """
    try:
        held = os.fstat(descriptor)
        if not stat.S_ISREG(held.st_mode):
            return ""
        data = os.pread(descriptor, most, max(0, held.st_size - most) if at_end else 0)
    except OSError:  # for example, it is open only for writing
        return ""
    return data.decode(errors="replace")
