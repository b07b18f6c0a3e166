"""Namespaces of a slot: a network without interfaces, and private System V objects.

The fork server enters them once and its candidates inherit them, so they cost a candidate no time. There is no pid
namespace, because Landlock hides other processes' ``/proc`` instead.
"""

from __future__ import annotations

import fcntl
import os
import socket
import struct
from pathlib import Path
from typing import Final

from workers.judge.host import linux

_OWN_NETWORK: Final = "/proc/thread-self/ns/net"
_SIOCSIFFLAGS: Final = 0x8914
_UP: Final = 1


def enter() -> dict[str, bool | str]:
    """Enter the namespaces that the host allows. The calling process must have one thread.

    A fleet that is not root also needs a user namespace, in which it keeps its own uid. Return for each namespace True,
    or the reason why it was not entered.
    """
    if os.geteuid() == 0:
        return {
            "user_namespace": "not used: the fleet is root",
            "network_namespace": _try(linux.CLONE_NEWNET),
            "ipc_namespace": _try(linux.CLONE_NEWIPC),
        }
    # The separate mount namespace is necessary for mounts (see workers.judge.sandbox.mounts).
    every = linux.CLONE_NEWUSER | linux.CLONE_NEWNET | linux.CLONE_NEWIPC | linux.CLONE_NEWNS
    uid, gid = os.geteuid(), os.getegid()  # read first: a namespace without a map shows 65534
    # A child tries the namespaces first, because a process cannot leave a user namespace that is not usable.
    child = os.fork()
    if child == 0:
        os._exit(0 if _try(every) is True and _keep_ids(uid, gid) is True else 1)
    worked = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    entered: bool | str = "refused: this user cannot create user namespaces"
    if worked and (entered := _try(every)) is True:
        entered = _keep_ids(uid, gid)
    return dict.fromkeys(("user_namespace", "network_namespace", "ipc_namespace"), entered)


def loopback() -> int:
    """Return a descriptor of a new network, in which only its members can reach each other, by the address 127.0.0.1.

    Raises:
        OSError: this host does not allow it.
    """
    before = os.open(_OWN_NETWORK, os.O_RDONLY | os.O_CLOEXEC)
    try:
        linux.unshare(linux.CLONE_NEWNET)
        try:
            with socket.socket() as any_socket:
                fcntl.ioctl(any_socket, _SIOCSIFFLAGS, struct.pack("16sh14x", b"lo", _UP))
            return os.open(_OWN_NETWORK, os.O_RDONLY | os.O_CLOEXEC)
        finally:
            linux.setns(before)
    finally:
        os.close(before)


def _try(flags: int) -> bool | str:
    try:
        linux.unshare(flags)
    except OSError as error:
        return f"refused: {error.strerror}"
    return True


def _keep_ids(uid: int, gid: int) -> bool | str:
    """Map the user to itself, so that it keeps its files and processes inside the namespace."""
    try:
        Path("/proc/self/setgroups").write_text("deny")
        Path("/proc/self/uid_map").write_text(f"{uid} {uid} 1")
        Path("/proc/self/gid_map").write_text(f"{gid} {gid} 1")
    except OSError as error:
        return f"refused: {error.strerror}"
    return True
