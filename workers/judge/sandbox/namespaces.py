"""Namespaces of a slot: a network without interfaces, and private System V objects.

The fork server enters them once and its candidates inherit them, so they cost a candidate no time. There is no pid
namespace, because Landlock hides other processes' ``/proc`` instead.
"""

from __future__ import annotations

import fcntl
import os
import socket
import struct
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final

from workers.judge.host import linux

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


def for_group(size: int) -> list[int]:
    """Return descriptors of a network and of ``size`` detached mounts for the members of a group.

    Only the members reach each other: by the address 127.0.0.1, and by sockets in the file system of all the mounts.

    Raises:
        OSError: this host does not allow it.
    """

    def make() -> list[int]:
        linux.unshare(linux.CLONE_NEWNET | linux.CLONE_NEWNS)
        with socket.socket() as any_socket:
            fcntl.ioctl(any_socket, _SIOCSIFFLAGS, struct.pack("16sh14x", b"lo", _UP))
        linux.mount(None, "/", None, linux.MS_REC | linux.MS_PRIVATE)
        flags = linux.MS_NOSUID | linux.MS_NODEV
        linux.mount("tmpfs", "/tmp", "tmpfs", flags, "mode=1777,size=64m,nr_inodes=256")  # noqa: S108
        return [
            os.open("/proc/thread-self/ns/net", os.O_RDONLY | os.O_CLOEXEC),
            *(linux.clone("/tmp") for _ in range(size)),  # noqa: S108
        ]

    with ThreadPoolExecutor(1) as pool:  # so that only a thread, which ends, moves to other namespaces
        return pool.submit(make).result()


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
