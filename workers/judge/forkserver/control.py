"""The words between the judge and the fork server. Both are trusted; each word is a record with a JSON form.

The judge asks on the fork server's request socket, with descriptors beside the word: :class:`Spawn`, :class:`Keep`,
:class:`Take`. Of each sealed process there is a control socket, on which the judge sends :class:`Compilers`,
:class:`Enter`, :class:`Turn`, :class:`Count`, :class:`Stop` and :class:`Closed`. What comes back on it is
:class:`Counted` and, last, a :class:`Report`.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from typing import Any, Final, TypeVar

from workers.judge.sandbox.seal import Profile, Role


class End(StrEnum):
    """Why a sealed process ended."""

    STOPPED = "stopped"
    """The judge said so, or was gone."""
    DEADLINE = "deadline"
    """Its time in a phase, or for compilers, was up."""
    MEMORY = "memory"
    """It took more of the host's memory than it may."""
    OUTPUT = "output"
    """It wrote more to stdout and stderr than it may."""
    SCRATCH = "scratch"
    """Its files were too many or too large."""
    CLOSED = "closed"
    """It closed its channel and lived on."""
    EXITED = "exited"
    """It ended by itself; the wait status tells how. An end by SIGKILL may also be somebody else's doing."""
    KILLED = "killed"
    """Somebody else ended it, or a part of it: Linux, as the host had no memory left, or an operator."""
    STUCK = "stuck"
    """It could not be ended."""
    UNSEALED = "unsealed"
    """Its seal failed, and nothing foreign ran in it."""


@dataclass(frozen=True, slots=True)
class Spawn:
    """Fork a sealed process. Beside it: the process's end of the channel, the fork server's of the control socket, the
    page of flags.

    Attributes:
        profile: its limits.
        about: whose evaluation it is for, as the fork server's log tells it.
    """

    profile: Profile
    about: dict[str, str | int] = field(default_factory=dict[str, "str | int"])


@dataclass(frozen=True, slots=True)
class Keep:
    """Keep a process for a later evaluation. Beside it: the judge's ends of its channel and control socket, the page
    of flags.

    Attributes:
        scratch: its private directory, which tells it from others.
        key: what it serves (:mod:`workers.judge.pipeline.warm`).
        memo: what its next judge must know.
        wanted: a file that changes when the memory that it holds is wanted, which ends it.
        seconds: how long it is kept where nobody takes it.
        cpu_s: the CPU time that it had used when it was handed over, in seconds; the fork server sets it.
    """

    scratch: str
    key: str
    memo: dict[str, Any]
    wanted: str
    seconds: float
    cpu_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Take:
    """Hand over the process that is kept under a key.

    Beside it: a socket for the answer, :class:`Keep` with its descriptors, or nothing but its end.

    Attributes:
        key: what it serves.
        about: as for :class:`Spawn`.
    """

    key: str
    about: dict[str, str | int] = field(default_factory=dict[str, "str | int"])


@dataclass(frozen=True, slots=True)
class Compilers:
    """Compilers may take so long from now on, in all phases together."""

    seconds: float


@dataclass(frozen=True, slots=True)
class Enter:
    """A phase begins, with its deadline in seconds; the time counts while it is the process's turn."""

    phase: str
    seconds: float


@dataclass(frozen=True, slots=True)
class Turn:
    """Say whether the process is at work, and its time runs."""

    running: bool


@dataclass(frozen=True, slots=True)
class Count:
    """Tell what the process has used of CPUs."""


@dataclass(frozen=True, slots=True)
class Counted:
    """The CPU time that a process and all that it has started have used, in seconds."""

    cpu_s: float


@dataclass(frozen=True, slots=True)
class Stop:
    """End the process and report."""


@dataclass(frozen=True, slots=True)
class Closed:
    """The process has closed its channel: report how it ends."""


@dataclass(frozen=True, slots=True)
class Report:
    """How a sealed process ended.

    Attributes:
        reason: why.
        phase: the phase it was in.
        status: its wait status; None if it could not be reaped.
        leftovers: processes that were alive after it had ended.
        peak_bytes: the most private memory that its process tree was seen to have.
        output_bytes: all that it wrote to stdout and stderr.
        log: the last of that; the reason why its seal failed, where it did.
        scratch_bytes: what its files took in the end.
        robbed: True if Linux has ended a process of it for want of memory although it had not reached its own limit.
        cpu_s: the CPU time that it and all that it has started have used, in seconds.
        limit_bytes: the limit that it reached, of memory, output or files; 0 where it reached none.
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


Request = Spawn | Keep | Take
Word = Compilers | Enter | Turn | Count | Stop | Closed
Answer = Counted | Report
_Any = TypeVar("_Any", bound=Request | Word | Answer)

_KINDS: Final = {
    kind.__name__: kind for kind in (Spawn, Keep, Take, Compilers, Enter, Turn, Count, Counted, Stop, Closed, Report)
}


def pack(word: Request | Word | Answer) -> bytes:
    """Return a word as it travels."""
    return json.dumps([type(word).__name__, asdict(word)]).encode()


def unpack(data: bytes, kind: type[_Any] | tuple[type[_Any], ...]) -> _Any:
    """Read a word of one of some kinds.

    Raises:
        ValueError: it is another word.
    """
    name, fields = json.loads(data)
    if name == Spawn.__name__:
        profile = fields["profile"]
        fields["profile"] = Profile(**profile | {"role": Role(profile["role"])})
    elif name == Report.__name__:
        fields["reason"] = End(fields["reason"])
    word: Any = _KINDS[name](**fields)
    if not isinstance(word, kind):
        raise ValueError(f"{name} is not expected here")
    return word
