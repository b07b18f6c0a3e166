"""Levels of isolation, and the measures that each one needs."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import Final


class Level(StrEnum):
    """Levels of isolation, from none to full. Each level includes the lower ones."""

    NONE = "none"
    BASIC = "basic"
    STRONG = "strong"
    FULL = "full"


#: Measures by name, and the change that makes a host provide each one.
MEASURES: Final = {
    "own_uid": "run the fleet as root (its container does), with an interpreter and packages that all users can read",
    "no_capabilities": "use a kernel in which a process can drop its capabilities",
    "no_new_privs": "use Linux 3.5 or later",
    "limits": "allow the fleet to lower its own resource limits",
    "seccomp": "use x86-64 or aarch64 and a kernel with CONFIG_SECCOMP_FILTER",
    "files": "use Linux 5.19 or later, boot with `lsm=landlock,...`, allow Landlock in the container's seccomp profile",
    "mounts": "use Linux 5.2 or later, and give the fleet CAP_SYS_ADMIN and mounts, or allow user namespaces",
    "tcp": "use Linux 6.7 or later with Landlock",
    "devices": "use Linux 6.10 or later with Landlock",
    "scopes": "use Linux 6.12 or later with Landlock",
    "gpu_nodes": "install nvidia-ml-py, and give the fleet GPUs by CUDA_VISIBLE_DEVICES or KQUEUE_GPUS",
    "user_namespace": "set kernel.unprivileged_userns_clone, or run the fleet as root",
    "network_namespace": "give the fleet CAP_SYS_ADMIN, or allow user namespaces",
    "ipc_namespace": "give the fleet CAP_SYS_ADMIN, or allow user namespaces",
    "cgroup_memory": "make the fleet's cgroup writable: Delegate=yes in its systemd unit",
    "cgroup_processes": "make the fleet's cgroup writable: Delegate=yes in its systemd unit",
    "cgroup_kill": "make the fleet's cgroup writable: Delegate=yes in its systemd unit",
}

#: Measures that each level adds, in groups. One measure of each group is enough.
_NEEDED: Final[dict[Level, tuple[tuple[str, ...], ...]]] = {
    Level.NONE: (),
    Level.BASIC: (("no_new_privs",), ("no_capabilities",), ("limits",)),
    # These protect the judge, its memory and its files from a candidate. A default container provides them.
    Level.STRONG: (("own_uid", "scopes"), ("seccomp",), ("files",)),
    Level.FULL: (
        *(("scopes",), ("tcp",), ("devices",), ("gpu_nodes",), ("network_namespace",), ("ipc_namespace",)),
        *(("mounts",), ("cgroup_memory",), ("cgroup_processes",), ("cgroup_kill",)),
    ),
}


def reached(measures: Mapping[str, object]) -> Level:
    """Return the highest level that the measures reach. A measure is True, or the reason why it is missing."""
    level = Level.NONE
    for candidate in Level:
        if lacking(measures, candidate):
            break
        level = candidate
    return level


def lacking(measures: Mapping[str, object], wanted: Level) -> dict[str, str]:
    """Return the measures that a level lacks, each with the reason and the remedy."""
    missing: dict[str, str] = {}
    for level in Level:
        for group in _NEEDED[level]:
            if not any(measures.get(name) is True for name in group):
                for name in group:
                    missing[name] = f"{measures.get(name, 'unknown')}, remedy: {MEASURES[name]}"
        if level is wanted:
            break
    return missing
