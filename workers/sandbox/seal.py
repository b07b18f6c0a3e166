"""What a candidate's process gives up between its fork and its first instruction."""

from __future__ import annotations

import os
import resource
import signal
from dataclasses import dataclass
from pathlib import Path

from workers.sandbox import linux

_OPEN_FILES = 4096


@dataclass(frozen=True, slots=True)
class Profile:
    """A candidate's bounds.

    Attributes:
        uid: its uid and gid; None to keep the fleet's.
        scratch: its private directory: working directory, HOME, TMPDIR and all caches.
        processes: threads and processes at once, enforced where it has a uid of its own.
        file_bytes: the largest file it may write.
        host_memory_bytes: resident memory of its process tree, enforced by the fork server.
        output_bytes: what it may write to stdout and stderr, enforced by the fork server.
    """

    uid: int | None
    scratch: str
    processes: int
    file_bytes: int
    host_memory_bytes: int
    output_bytes: int


def apply(profile: Profile, parent: int, keep: set[int]) -> None:
    """Seal the calling process, freshly forked by ``parent``: it can only lose from here.

    Own session; descriptors other than ``keep`` and the standard three closed; resource limits; first to go
    when memory runs out; own uid without any capability; no new privileges; dies with its parent.
    """
    os.setsid()
    _close_all_but(keep | {0, 1, 2})
    Path("/proc/self/oom_score_adj").write_text("1000")
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_NOFILE, (_OPEN_FILES, _OPEN_FILES))
    resource.setrlimit(resource.RLIMIT_FSIZE, (profile.file_bytes, profile.file_bytes))
    if profile.uid is not None:
        # Counted by uid: without one of its own a candidate would be bounded by its neighbours.
        resource.setrlimit(resource.RLIMIT_NPROC, (profile.processes, profile.processes))
        os.setgroups([])
        os.setresgid(profile.uid, profile.uid, profile.uid)
        os.setresuid(profile.uid, profile.uid, profile.uid)
        # Leaving root made the process undumpable: its own /proc/self would be closed to it.
        linux.prctl(linux.PR_SET_DUMPABLE, 1)
    linux.prctl(linux.PR_SET_NO_NEW_PRIVS, 1)
    # After the change of uid, which clears it. The parent may have died before it took hold.
    linux.prctl(linux.PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)
    os.umask(0o077)
    os.chdir(profile.scratch)
    os.environ.update(private_directories(profile.scratch))


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
