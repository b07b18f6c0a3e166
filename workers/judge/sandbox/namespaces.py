"""Namespaces of a slot: a network without interfaces, and System V objects of its own.

The fork server enters them once and its candidates inherit them, so that they cost a candidate nothing. There
is no pid namespace: CUDA's memory handles do not pass between those.
"""

from __future__ import annotations

import os
from pathlib import Path

from workers.judge.host import linux


def enter() -> dict[str, bool | str]:
    """Enter what the host allows, in the calling process of one thread.

    A fleet that is not root needs a user namespace around the others, in which it keeps its own uid.

    Returns:
        for each namespace True, or why it was not entered.
    """
    if os.geteuid() == 0:
        return {
            "user_namespace": "not used: the fleet is root",
            "network_namespace": _try(linux.CLONE_NEWNET),
            "ipc_namespace": _try(linux.CLONE_NEWIPC),
        }
    every = linux.CLONE_NEWUSER | linux.CLONE_NEWNET | linux.CLONE_NEWIPC
    # A user namespace that turns out to be of no use cannot be left again: a child tries it first.
    child = os.fork()
    if child == 0:
        os._exit(0 if _try(every) is True and _keep_ids(os.geteuid(), os.getegid()) is True else 1)
    worked = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    uid, gid = os.geteuid(), os.getegid()
    entered: bool | str = "refused: this user may make no user namespace"
    if worked and (entered := _try(every)) is True:
        entered = _keep_ids(uid, gid)
    return dict.fromkeys(("user_namespace", "network_namespace", "ipc_namespace"), entered)


def _try(flags: int) -> bool | str:
    try:
        linux.unshare(flags)
    except OSError as error:
        return f"refused: {error.strerror}"
    return True


def _keep_ids(uid: int, gid: int) -> bool | str:
    """Be the same user inside as outside; of files and processes it then owns the same."""
    try:
        Path("/proc/self/setgroups").write_text("deny")
        Path("/proc/self/uid_map").write_text(f"{uid} {uid} 1")
        Path("/proc/self/gid_map").write_text(f"{gid} {gid} 1")
    except OSError as error:
        return f"refused: {error.strerror}"
    return True
