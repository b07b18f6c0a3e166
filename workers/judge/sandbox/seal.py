"""The seal: all that a process gives up between its fork and its first foreign instruction."""

from __future__ import annotations

import os
import resource
import signal
import tempfile
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path
from typing import Final

from workers.judge.host import linux
from workers.judge.sandbox import landlock, seccomp
from workers.judge.sandbox.cgroups import Group
from workers.judge.sandbox.reach import Reach

#: Real-time scheduling, a better nice value, message queues and files locked against others: none. Pinned
#: memory stays as the host has it.
_NONE: Final = (resource.RLIMIT_CORE, resource.RLIMIT_RTPRIO, resource.RLIMIT_NICE, resource.RLIMIT_MSGQUEUE)
_OPEN_FILES: Final = 4096


class Role(StrEnum):
    """What a sealed process runs."""

    CANDIDATE = "candidate"
    """A kernel, once."""
    REFERENCE = "reference"
    """A problem: it draws inputs, answers them, and is timed as the baseline."""
    BUILDER = "builder"
    """A kernel's compilers, without a GPU."""


@dataclass(frozen=True, slots=True)
class Profile:
    """The bounds of a sealed process.

    Attributes:
        role: what it runs.
        uid: its uid and gid; None to keep the fleet's.
        scratch: its private directory: working directory, HOME, TMPDIR and all caches.
        processes: threads and processes at once, enforced where it has a uid or a cgroup of its own.
        file_bytes: the largest file it may write.
        host_memory_bytes: memory of its process tree, enforced by a cgroup or by the fork server.
        output_bytes: what it may write to stdout and stderr, enforced by the fork server.
        scratch_bytes: what all its files may take in ``scratch``, enforced by the fork server.
        built: the directory of libraries that a builder has compiled for it, which it reads; for a builder, where
            they go when it has ended (:mod:`workers.judge.sandbox.shelf`), and out of its reach. None for none.
    """

    role: Role
    uid: int | None
    scratch: str
    processes: int
    file_bytes: int
    host_memory_bytes: int
    output_bytes: int
    scratch_bytes: int
    built: str | None = None


@dataclass(frozen=True, slots=True)
class Means:
    """What the host lets a seal be made of, found out once by :mod:`workers.judge.sandbox.ground`.

    Attributes:
        landlock: the version of Landlock's interface to use; 0 for none.
        filter: the filter of system calls; empty for none.
        reach: the files that stay in reach.
    """

    landlock: int
    filter: bytes
    reach: Reach


def apply(profile: Profile, means: Means, group: Group | None, parent: int, keep: set[int]) -> None:
    """Seal the calling process, freshly forked by ``parent``: it can only lose from here.

    Own session and control group; descriptors other than ``keep`` and the standard three closed; resource
    limits; first to go when memory runs out; own uid; no capability; no new privileges; dies with its parent; no
    files but what it runs on and its own; none of the system calls in :mod:`workers.judge.sandbox.seccomp`.
    """
    os.setsid()
    _close_all_but(keep | {0, 1, 2})
    Path("/proc/self/oom_score_adj").write_text("1000")
    if group is not None:
        group.join()
    limit()
    resource.setrlimit(resource.RLIMIT_FSIZE, (profile.file_bytes, profile.file_bytes))
    if profile.uid is not None:
        # Counted by uid: without one of its own a candidate would be bounded by its neighbours.
        resource.setrlimit(resource.RLIMIT_NPROC, (profile.processes, profile.processes))
        become(profile.uid)
    linux.drop_capabilities()
    linux.prctl(linux.PR_SET_NO_NEW_PRIVS, 1)
    # After the change of uid, which clears it. The parent may have died before it took hold.
    linux.prctl(linux.PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)
    os.umask(0o077)
    os.chdir(profile.scratch)
    os.environ.update(private_directories(profile.scratch))
    tempfile.tempdir = None  # what was found before is out of reach now
    more: tuple[str, ...] = ()
    if profile.role is Role.BUILDER:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
        means = replace(means, reach=replace(means.reach, gpu_nodes=()))
    elif profile.built is not None:
        more = (profile.built,)
    if means.landlock:
        restrict_files(means, profile.scratch, more)
    if means.filter:
        seccomp.enforce(means.filter)


def limit() -> None:
    """The limits that are the same for every candidate."""
    for resource_limit in _NONE:
        resource.setrlimit(resource_limit, (0, 0))
    resource.setrlimit(resource.RLIMIT_NOFILE, (_OPEN_FILES, _OPEN_FILES))


def become(uid: int) -> None:
    """Become another user, with the group of the same number and no other; for root."""
    os.setgroups([])
    os.setresgid(uid, uid, uid)
    os.setresuid(uid, uid, uid)
    # Leaving root made the process undumpable: its own /proc/self would be closed to it.
    linux.prctl(linux.PR_SET_DUMPABLE, 1)


def restrict_files(means: Means, scratch: str, more: tuple[str, ...] = ()) -> None:
    """Give up all files but what the means leave, ``scratch``, and ``more`` to read; and what else Landlock takes."""
    rules = landlock.Ruleset(means.landlock)
    means.reach.allow(rules, scratch, more)
    rules.enforce()


def private_directories(scratch: str) -> dict[str, str]:
    """The environment that sends every cache and temporary file of a candidate into its own directory."""
    names = ("HOME", "TMPDIR", "XDG_CACHE_HOME", "TRITON_HOME", "TRITON_CACHE_DIR", "TORCH_EXTENSIONS_DIR")
    more = ("TORCHINDUCTOR_CACHE_DIR", "CUPY_CACHE_DIR", "CUDA_CACHE_PATH", "NUMBA_CACHE_DIR")
    return {name: str(Path(scratch, name.lower())) for name in (*names, *more)}


def _close_all_but(keep: set[int]) -> None:
    low = 0
    for descriptor in sorted(keep):
        if low < descriptor:  # an empty range would be taken for one without an end
            os.closerange(low, descriptor)
        low = descriptor + 1
    os.closerange(low, 1 << 20)
