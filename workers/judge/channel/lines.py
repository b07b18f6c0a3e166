"""Lines that a process says on a stream socket, and descriptors that it sends beside them. Loads no torch."""

from __future__ import annotations

import os
import socket
import stat
from collections.abc import Iterator
from typing import Final

#: How much is read at once, in bytes, and the most descriptors that are kept.
_READ_BYTES: Final = 1 << 20
_MOST_DESCRIPTORS: Final = 4


class Lines:
    """The reader's end. What comes is a claim.

    Attributes:
        descriptors: those that were sent.
        nbytes: how much was said.
        ended: True once nobody can say anything more.
    """

    def __init__(self, source: socket.socket, most: float = float("inf")) -> None:
        """Read from a socket, which this closes in the end.

        Args:
            source: the socket.
            most: how many bytes are listened to.
        """
        source.setblocking(False)
        self.descriptors: list[int] = []
        self.nbytes = 0
        self.ended = False
        self._source = source
        self._most = most
        self._rest = b""

    def fileno(self) -> int:
        """Return the socket's descriptor."""
        return self._source.fileno()

    @property
    def too_many(self) -> bool:
        """True if more was said than is listened to."""
        return self.nbytes > self._most

    def read(self) -> Iterator[bytes]:
        """Yield the whole lines that were said and not yielded before, without waiting."""
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
    """Say a line on the descriptor of a socket, with others beside it; wait until there is room.

    Raises:
        OSError: nobody listens.
    """
    left = memoryview(line + b"\n")
    if descriptors:
        with socket.socket(fileno=os.dup(words)) as target:
            left = left[socket.send_fds(target, [left], descriptors) :]
    while left:
        left = left[os.write(words, left) :]


def content(descriptor: int, most: int, *, at_end: bool = False) -> str:
    """Return the beginning or the end of the file behind a descriptor that was sent; nothing of what is no file.

    To read something else could mean to wait for it.

    Args:
        descriptor: the descriptor.
        most: how many bytes are read.
        at_end: whether the end is wanted.
    """
    try:
        held = os.fstat(descriptor)
        if not stat.S_ISREG(held.st_mode):
            return ""
        data = os.pread(descriptor, most, max(0, held.st_size - most) if at_end else 0)
    except OSError:  # such as one that cannot be read
        return ""
    return data.decode(errors="replace")
