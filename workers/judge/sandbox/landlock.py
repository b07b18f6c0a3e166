"""Landlock: irrevocable limits on files, devices, TCP and signals for a process and its descendants.

The three system calls have the same numbers on every architecture. A ruleset omits features that an older kernel does
not support (see :func:`abi`).
"""

from __future__ import annotations

import ctypes
import os
import stat
import struct
from enum import IntFlag
from pathlib import Path
from typing import Final

from workers.judge.host import linux

_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446
_CREATE_RULESET_VERSION: Final = 1
_RULE_PATH_BENEATH: Final = 1
#: Flag that keeps denials out of the host's audit log, which a candidate could otherwise fill.
_LOG_SAME_EXEC_OFF: Final = 1

#: First version of Landlock's interface with each feature that the seal uses.
ABI_FILES: Final = 2  # version 1 forbids renames between directories, which compilers' caches need
ABI_TCP: Final = 4
ABI_DEVICES: Final = 5
ABI_SCOPES: Final = 6
_ABI_TRUNCATE: Final = 3
_ABI_LOG: Final = 7


class Access(IntFlag):
    """Access rights to the files below a path."""

    EXECUTE = 1 << 0
    WRITE_FILE = 1 << 1
    READ_FILE = 1 << 2
    READ_DIR = 1 << 3
    REMOVE_DIR = 1 << 4
    REMOVE_FILE = 1 << 5
    MAKE_CHAR = 1 << 6
    MAKE_DIR = 1 << 7
    MAKE_REG = 1 << 8
    MAKE_SOCK = 1 << 9
    MAKE_FIFO = 1 << 10
    MAKE_BLOCK = 1 << 11
    MAKE_SYM = 1 << 12
    REFER = 1 << 13
    TRUNCATE = 1 << 14
    IOCTL_DEV = 1 << 15


_ALL: Final = Access((1 << 16) - 1)
#: Rights that apply to a single file. Linux rejects a rule about a file with other rights.
_OF_A_FILE: Final = Access.EXECUTE | Access.WRITE_FILE | Access.READ_FILE | Access.TRUNCATE | Access.IOCTL_DEV
READ: Final = Access.READ_FILE | Access.READ_DIR
READ_AND_RUN: Final = READ | Access.EXECUTE
#: All rights except the creation of devices and sockets.
OWN: Final = _ALL & ~(Access.MAKE_CHAR | Access.MAKE_BLOCK | Access.MAKE_SOCK | Access.IOCTL_DEV)
DEVICE: Final = Access.READ_FILE | Access.WRITE_FILE | Access.TRUNCATE

_BIND_AND_CONNECT_TCP: Final = 1 | 2
_ABSTRACT_SOCKETS, _SIGNALS = 1, 2


def abi() -> int:
    """Return the version of the kernel's Landlock interface, or 0 if it is missing or forbidden."""
    try:
        return linux.syscall(_CREATE_RULESET, None, ctypes.c_size_t(0), _CREATE_RULESET_VERSION)
    except OSError:
        return 0


class Ruleset:
    """The accesses that stay allowed. :meth:`enforce` gives up every other access that Landlock controls."""

    def __init__(self, version: int, *, connects: bool = False) -> None:
        """Create a ruleset that allows no access. Raise OSError if Linux rejects it. A lower version gives up less.

        ``connects`` allows connections, for processes that can reach only each other.
        """
        self._handled = _ALL
        if version < ABI_DEVICES:
            self._handled &= ~Access.IOCTL_DEV
        if version < _ABI_TRUNCATE:
            self._handled &= ~Access.TRUNCATE
        if version < ABI_FILES:
            self._handled &= ~Access.REFER
        words = [int(self._handled)]
        if version >= ABI_TCP:
            words.append(0 if connects else _BIND_AND_CONNECT_TCP)
        if version >= ABI_SCOPES:
            words.append(_SIGNALS if connects else _ABSTRACT_SOCKETS | _SIGNALS)
        attributes = struct.pack(f"{len(words)}Q", *words)
        self._flags = _LOG_SAME_EXEC_OFF if version >= _ABI_LOG else 0
        self._descriptor = linux.syscall(_CREATE_RULESET, attributes, ctypes.c_size_t(len(attributes)), 0)

    def allow(self, path: str | Path, access: Access) -> None:
        """Allow ``access`` to a file, or to a directory and everything below it. Ignore a missing path."""
        try:
            descriptor = os.open(path, os.O_PATH | os.O_CLOEXEC)
        except OSError:
            return
        try:
            access &= self._handled
            if not stat.S_ISDIR(os.fstat(descriptor).st_mode):
                access &= _OF_A_FILE
            linux.syscall(_ADD_RULE, self._descriptor, _RULE_PATH_BENEATH, struct.pack("=Qi", access, descriptor), 0)
        finally:
            os.close(descriptor)

    def enforce(self) -> None:
        """Give up all accesses that are not allowed, irrevocably. The process needs ``no_new_privs`` and one thread."""
        linux.syscall(_RESTRICT_SELF, self._descriptor, self._flags)
        os.close(self._descriptor)
