"""States, priorities and other enumerations, which the database stores as text.

A test compares these names with the database's constraints.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Self


class EvaluationState(StrEnum):
    """The state of an evaluation. It has a verdict exactly when it is ``done``."""

    QUEUED = "queued"
    """It waits for its first or a further attempt."""
    RUNNING = "running"
    """A worker executes it."""
    DONE = "done"
    """It has a verdict."""


class ArtifactName(StrEnum):
    """The files of an evaluation."""

    caption: str

    def __new__(cls, name: str, caption: str) -> Self:
        """Return a name with its caption."""
        member = str.__new__(cls, name)
        member._value_, member.caption = name, caption
        return member

    PROBLEM = "problem.py", "the problem's source"
    KERNEL = "kernel.py", "the kernel's source"
    VERDICT = "verdict.json", "the complete verdict"
    EVIDENCE = "evidence.json", "the judge's evidence"
    LOG = "log.txt", "the end of the kernel's output"

    @property
    def media_type(self) -> str:
        """The file's media type."""
        return "application/json" if self.endswith(".json") else "text/plain"


class Priority(StrEnum):
    """The priority of an evaluation."""

    INTERACTIVE = "interactive"
    """A user waits for it. It precedes all ``batch`` evaluations, which keep a tenth of the devices' time."""
    BATCH = "batch"
    """It can wait."""
    IDLE = "idle"
    """It follows all other evaluations of its lane."""


class Purpose(StrEnum):
    """The purpose of an evaluation's times. It gives the half width of a median's 95 % interval that is enough."""

    CHECK = "check"
    """No times: the verdict says if the kernel is right."""
    TRAIN = "train"
    """5 %, for rewards. Leaderboards leave such times out."""
    RANK = "rank"
    """1 %, for comparisons."""
    PUBLISH = "publish"
    """0.5 %, for published figures."""


class Trials(StrEnum):
    """The treatment of trials in a list: evaluations of autopsies, duels, tunings and tournaments."""

    WITH = "with"
    """Trials are listed too. By default they are left out, except if their batch is named."""
    ONLY = "only"
    """Nothing else is listed."""


class Spent(StrEnum):
    """The treatment of submissions with a token whose budget is used up."""

    REFUSE = "refuse"
    """They are refused until budget is available again."""
    LOWER = "lower"
    """They are accepted with the priority ``idle``."""


class GpuState(StrEnum):
    """The state of a GPU that a host's fleet uses."""

    SERVING = "serving"
    """It receives evaluations, except when a GPU self-test is due."""
    DRAINED = "drained"
    """An operator took it out of service. An operator can resume it."""
    QUARANTINED = "quarantined"
    """The fleet took it out of service, until it passes a self-test or an operator resumes it."""


class SearchState(StrEnum):
    """The state of a search for a fast kernel."""

    RUNNING = "running"
    """A process runs it, or died while it did."""
    STOPPED = "stopped"
    """It was interrupted or ended by an error. It can be resumed."""
    DONE = "done"
    """It made all its steps, or ran out of proposals."""


class ProbeKind(StrEnum):
    """The kind of a probe, an evaluation with a known answer that tests the judge (:mod:`kqueue.features.probes`)."""

    HONEST = "honest"
    """A correct kernel, which must pass."""
    CHEAT = "cheat"
    """A wrong kernel, which must be refused as wrong."""
    KNOWN_DURATION = "known_duration"
    """A known-duration kernel. It is correct, and the measured time must match its duration."""


class Finding(StrEnum):
    """The finding about the judge that follows from the verdict on a probe."""

    AGREED = "agreed"
    """The verdict is the expected one."""
    VOID = "void"
    """No finding: the fleet failed, the host lacked time or memory, or no worker judged the probe."""
    CHEAT_ACCEPTED = "cheat_accepted"
    """A wrong kernel passed."""
    CHEAT_MISTAKEN = "cheat_mistaken"
    """A wrong kernel was refused for a fault that it does not have."""
    HONEST_REFUSED = "honest_refused"
    """A correct kernel did not pass."""
    CLOCK_SHORT = "clock_short"
    """The measured time of a known-duration kernel is shorter than its duration."""
    CLOCK_LONG = "clock_long"
    """The measured time of a known-duration kernel is longer than its duration."""
    CLOCK_UNEVEN = "clock_uneven"
    """A known-duration kernel was not timed, or was timed in another way than its reference."""


class Writer(StrEnum):
    """The process that recorded the end of an attempt or an evaluation."""

    JUDGE = "judge"
    """The task process, whose judge judged the kernel."""
    WORKER = "worker"
    """The worker's parent or the supervisor, for an attempt whose task process could not record its end."""
    SWEEPER = "sweeper"
    """A sweeper, for an attempt whose worker fell silent, or an evaluation that no worker began in time."""
    CLIENT = "client"
    """A producer that cancelled the evaluation."""
    DATABASE = "database"
    """The database, which reused the verdict of an equal evaluation."""
