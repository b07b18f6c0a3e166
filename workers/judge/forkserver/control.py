"""The messages between the judge and the fork server. Both are trusted. Each message is a record with a JSON form.

The judge sends :class:`Spawn`, :class:`Keep` and :class:`Take`, with descriptors, on the fork server's request socket.
Each sealed process has a control socket, on which the judge sends :class:`Compilers`, :class:`Enter`, :class:`Turn`,
:class:`Count`, :class:`Stop` and :class:`Closed`. The fork server replies on it with :class:`Counted`. Its last message
is a :class:`Report`.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from typing import Any, Final, TypeVar

from workers.judge.sandbox.seal import Profile, Role


class End(StrEnum):
    """The reason for a sealed process's end."""

    STOPPED = "stopped"
    """The judge stopped it, or the judge was gone."""
    DEADLINE = "deadline"
    """It exceeded a phase's deadline, or the time for compilers."""
    MEMORY = "memory"
    """It exceeded its limit of host memory."""
    OUTPUT = "output"
    """It exceeded its limit of bytes on stdout and stderr."""
    SCRATCH = "scratch"
    """It exceeded its limit of the number or size of files."""
    CLOSED = "closed"
    """It closed its channel and did not exit."""
    EXITED = "exited"
    """It exited, or a signal ended it. The wait status has the details. A SIGKILL can be from outside."""
    KILLED = "killed"
    """Linux or an operator killed the process or one of its children, for example because the host had no memory."""
    STUCK = "stuck"
    """It did not exit after SIGKILL."""
    UNSEALED = "unsealed"
    """Its seal failed, and no foreign code ran in it."""


@dataclass(frozen=True, slots=True)
class Spawn:
    """Request to fork a sealed process.

    Its descriptors are the process's end of the channel, the fork server's end of the control socket, and the page of
    flags.

    Attributes:
        profile: the process's role and limits.
        about: fields for the fork server's log that identify the evaluation.
    """

    profile: Profile
    about: dict[str, str | int] = field(default_factory=dict[str, "str | int"])


@dataclass(frozen=True, slots=True)
class Keep:
    """Request to keep a process for a later evaluation.

    Its descriptors are the judge's ends of the channel and control socket, the page of flags, and on a CPU the
    process's memory.

    Attributes:
        scratch: the process's private directory, which identifies it.
        key: key of the process's purpose (:mod:`workers.judge.pipeline.warm`).
        memo: data for its next judge.
        wanted: path of a file that changes when another process needs the memory. The kept process is then ended.
        seconds: time after which an unused process is ended.
        cpu_s: CPU time in seconds at the handover to the next judge, set by the fork server.
    """

    scratch: str
    key: str
    memo: dict[str, Any]
    wanted: str
    seconds: float
    cpu_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Take:
    """Request for the process that is kept under a key.

    Its descriptor is a socket for the answer: a :class:`Keep` with descriptors, or end of file if there is no process.

    Attributes:
        about: fields for the fork server's log that identify the evaluation.
    """

    key: str
    about: dict[str, str | int] = field(default_factory=dict[str, "str | int"])


@dataclass(frozen=True, slots=True)
class Compilers:
    """Time limit in seconds for compilers from now on, for all phases together."""

    seconds: float


@dataclass(frozen=True, slots=True)
class Enter:
    """The beginning of a phase, with its time limit in seconds. The time counts only while the process is working.

    ``gpu_s`` is the time limit for the wait for the GPU after a checked call, or None.
    """

    phase: str
    seconds: float
    gpu_s: float | None = None


@dataclass(frozen=True, slots=True)
class Turn:
    """Start or stop of the process's clock. The clock runs while the process is working."""

    running: bool


@dataclass(frozen=True, slots=True)
class Count:
    """Request for the process's figures so far (:class:`Counted`)."""


@dataclass(frozen=True, slots=True)
class Counted:
    """Figures of a running process, as in its :class:`Report`, and its id."""

    cpu_s: float
    pid: int
    peak_bytes: int
    output_bytes: int
    log: str


@dataclass(frozen=True, slots=True)
class Stop:
    """Request to end the process and report."""


@dataclass(frozen=True, slots=True)
class Closed:
    """Notice that the process has closed its channel. The fork server waits for its end and reports."""


@dataclass(frozen=True, slots=True)
class Report:
    """The end of a sealed process.

    Attributes:
        reason: the reason.
        phase: the process's last phase.
        status: its wait status, or None if it could not be reaped.
        leftovers: number of its child processes that were alive after its end.
        peak_bytes: maximum observed memory of its process tree, with its files where they lie in memory.
        output_bytes: number of bytes written to stdout and stderr.
        log: the end of that output. If the seal failed, the reason.
        scratch_bytes: final size of its files.
        robbed: True if Linux's out-of-memory killer ended one of its processes, although it was below its own limit.
        cpu_s: CPU time in seconds of the process and all its descendants.
        limit_bytes: the exceeded limit of memory, output or files, or 0 if none was exceeded.
        hung: True if the exceeded deadline was the one for waits for the GPU.
    """

    reason: End
    phase: str
    status: int | None
    leftovers: int
    peak_bytes: int
    output_bytes: int
    log: str
    scratch_bytes: int = 0
    robbed: bool = False
    cpu_s: float = 0.0
    limit_bytes: int = 0
    hung: bool = False


Request = Spawn | Keep | Take
Word = Compilers | Enter | Turn | Count | Stop | Closed
Answer = Counted | Report
_Any = TypeVar("_Any", bound=Request | Word | Answer)

_KINDS: Final = {
    kind.__name__: kind for kind in (Spawn, Keep, Take, Compilers, Enter, Turn, Count, Counted, Stop, Closed, Report)
}


def pack(message: Request | Word | Answer) -> bytes:
    """Return the JSON form of a message."""
    return json.dumps([type(message).__name__, asdict(message)]).encode()


def unpack(data: bytes, kind: type[_Any] | tuple[type[_Any], ...]) -> _Any:
    """Parse a message of one of the given kinds.

    Raises:
        ValueError: the message is of another kind.
    """
    name, fields = json.loads(data)
    if name == Spawn.__name__:
        profile = fields["profile"]
        changed = {"role": Role(profile["role"]), "devices": tuple(profile["devices"])}
        fields["profile"] = Profile(**profile | changed)
    elif name == Report.__name__:
        fields["reason"] = End(fields["reason"])
    message: Any = _KINDS[name](**fields)
    if not isinstance(message, kind):
        raise ValueError(f"unexpected message {name}")
    return message
