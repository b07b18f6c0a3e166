"""The seal: a process gives up its rights between its fork and its first foreign instruction."""

from __future__ import annotations

import os
import platform
import resource
import signal
import tempfile
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path
from typing import Final

from kqueue import backends
from workers.judge.host import linux
from workers.judge.sandbox import landlock, seccomp
from workers.judge.sandbox.cgroups import Group
from workers.judge.sandbox.landlock import Access
from workers.judge.sandbox.mounts import Covers
from workers.judge.sandbox.reach import Reach

#: Resource limits that are set to zero. Locked memory keeps the host's limit, because CUDA pins memory.
_NONE: Final = (resource.RLIMIT_CORE, resource.RLIMIT_RTPRIO, resource.RLIMIT_NICE, resource.RLIMIT_MSGQUEUE)
_OPEN_FILES: Final = 4096
#: Directory in which the processes of a group meet. NCCL uses NVLink only if this is the same device for all of them.
_MEETING: Final = "/dev/shm"  # noqa: S108


class Role(StrEnum):
    """The work of a sealed process."""

    CANDIDATE = "candidate"
    """A kernel in one evaluation."""
    REFERENCE = "reference"
    """A problem: it draws inputs, computes reference outputs, and is timed as the baseline."""
    COMPILED = "compiled"
    """A problem under ``torch.compile``, for timing."""
    BUILDER = "builder"
    """A kernel's compilers, without a GPU."""
    EXAMINED = "examined"
    """A kernel with its problem, in a program under a profiler or sanitizer."""
    TESTS = "tests"
    """Tests of a repository, in a separate program."""
    WATCHED = "watched"
    """Tests of a repository, in a program under a sanitizer."""


@dataclass(frozen=True, slots=True)
class Profile:
    """The limits of a sealed process.

    Attributes:
        uid: its uid and gid, for a reference the slot's, or None to keep the fleet's.
        scratch: private directory: working directory, HOME, TMPDIR and all caches.
        processes: maximum number of threads and processes. Needs a separate uid or a cgroup.
        file_bytes: maximum size of a file that it writes.
        host_memory_bytes: memory limit of its process tree, enforced by a cgroup or by the fork server.
        output_bytes: maximum size of its stdout and stderr together, enforced by the fork server.
        scratch_bytes: maximum size of its files, enforced by its file system or by the fork server.
        built: directory of compiled libraries, or None. A candidate reads them there. A builder cannot reach it, and
            its libraries are copied there when it has ended (:mod:`workers.judge.sandbox.shelf`).
        group: name of the group whose network it shares, or empty for none.
        devices: UUIDs of the group's GPUs.
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
    group: str = ""
    devices: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Means:
    """The host's means for a seal, from :mod:`workers.judge.sandbox.self_check`.

    Attributes:
        landlock: version of Landlock's interface, or 0 for no Landlock.
        filter: seccomp filter, or empty for no filter.
        reach: files that stay accessible.
        covers: shared directories that the private file system covers, or None if the host allows no mounts.
        group: descriptors of the network and of a mount for the sockets of the process's group, or None for no group.
    """

    landlock: int
    filter: bytes
    reach: Reach
    covers: Covers | None
    group: tuple[int, int] | None = None


def apply(profile: Profile, means: Means, group: Group | None, parent: int, keep: set[int], mount: int | None) -> None:
    """Seal the calling process irrevocably, right after its fork.

    It gets its own session and control group, resource limits, and its own uid. It loses all descriptors except
    ``keep`` and the standard three, all capabilities, the right to gain privileges, all files out of its reach, and the
    system calls denied by :mod:`workers.judge.sandbox.seccomp`. The out-of-memory killer selects it first, and it dies
    with its parent, the process ``parent``. ``mount`` is the file system for its files, or None if the host does not
    allow one.
    """
    os.setsid()
    network, meeting = means.group or (None, None)
    if network is not None:
        linux.setns(network)
    _close_all_but(keep | {0, 1, 2} | {descriptor for descriptor in (mount, meeting) if descriptor is not None})
    Path("/proc/self/oom_score_adj").write_text("1000")
    if group is not None:
        group.join()
    shelf = (profile.built,) if profile.built is not None and profile.role is not Role.BUILDER else ()
    if mount is not None and means.covers is not None:
        means.covers.attach(mount, profile.scratch, shelf)
        os.close(mount)
    if meeting is not None:
        Path(_MEETING).mkdir(exist_ok=True)
        linux.attach(meeting, _MEETING)
        os.close(meeting)
    limit()
    resource.setrlimit(resource.RLIMIT_FSIZE, (profile.file_bytes, profile.file_bytes))
    if profile.uid is not None:
        # This limit needs a separate uid, because Linux counts processes by uid.
        resource.setrlimit(resource.RLIMIT_NPROC, (profile.processes, profile.processes))
        become(profile.uid)
    linux.drop_capabilities()
    linux.prctl(linux.PR_SET_NO_NEW_PRIVS, 1)
    # Set after the change of uid, which clears the setting. The parent can have died before.
    linux.prctl(linux.PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)
    os.umask(0o077)
    os.chdir(profile.scratch)
    os.environ.update(private_directories(profile.scratch))
    if means.group is not None:
        os.umask(0)  # so that its sockets serve other ranks, which have other uids. No other file is visible to them.
        del os.environ["TMPDIR"]  # which torch prefers for sockets
        os.environ["TEMPDIR"] = _MEETING
    tempfile.tempdir = None  # the cached directory is no longer accessible
    if profile.role is Role.BUILDER:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
        means = replace(means, reach=replace(means.reach, gpu_nodes=()))
    if means.landlock:
        restrict_files(means, profile.scratch, shelf)
    if means.filter:
        seccomp.enforce(seccomp.no_signals_as_from_outside(platform.machine()))
        seccomp.enforce(means.filter)


def limit() -> None:
    """Set the resource limits that all sealed processes share."""
    for resource_limit in _NONE:
        resource.setrlimit(resource_limit, (0, 0))
    resource.setrlimit(resource.RLIMIT_NOFILE, (_OPEN_FILES, _OPEN_FILES))


def become(uid: int) -> None:
    """Change from root to another uid, and to only the group of the same number."""
    os.setgroups([])
    os.setresgid(uid, uid, uid)
    os.setresuid(uid, uid, uid)
    # A change from root makes a process undumpable, which would close its own /proc/self to it.
    linux.prctl(linux.PR_SET_DUMPABLE, 1)


def restrict_files(means: Means, scratch: str, more: tuple[str, ...] = ()) -> None:
    """Apply Landlock to the calling process. ``scratch`` stays writable, and the paths ``more`` stay readable."""
    rules = landlock.Ruleset(means.landlock, connects=means.group is not None)
    covered = means.covers.directories if means.covers is not None else ()
    means.reach.allow(rules, (scratch, *covered), more)
    if means.group is not None:
        rules.allow(_MEETING, Access.MAKE_SOCK)
    rules.enforce()


def private_directories(scratch: str) -> dict[str, str]:
    """Return environment variables that place a candidate's caches and temporary files in its own directory."""
    names = ("HOME", "TMPDIR", "XDG_CACHE_HOME", "TORCH_EXTENSIONS_DIR", "TORCHINDUCTOR_CACHE_DIR", "CUDA_CACHE_PATH")
    caches = (name for backend in backends.registered().values() for name in backend.caches)
    return {name: str(Path(scratch, name.lower())) for name in (*names, *caches)}


def _close_all_but(keep: set[int]) -> None:
    low = 0
    for descriptor in sorted(keep):
        if low < descriptor:  # closerange(0, 0) would close every descriptor
            os.closerange(low, descriptor)
        low = descriptor + 1
    os.closerange(low, 1 << 20)
