"""States of evaluations, GPUs, searches and probes, priorities, and the other words that the database holds.

The database holds each as text; a test compares these names with its constraints.
"""

from __future__ import annotations

from enum import StrEnum


class EvaluationState(StrEnum):
    """The state of an evaluation. A verdict exists exactly when it is ``done``."""

    QUEUED = "queued"
    """It waits for a worker, for its first attempt or a further one."""
    RUNNING = "running"
    """A worker executes it."""
    DONE = "done"
    """It has its verdict."""


class Priority(StrEnum):
    """Whose turn comes first."""

    INTERACTIVE = "interactive"
    """Somebody waits for it: it comes before all of ``batch``, which keeps a tenth of the devices' time."""
    BATCH = "batch"
    """It can wait."""
    IDLE = "idle"
    """It comes after all else that waits on its lane."""


class Spent(StrEnum):
    """What becomes of submissions with a token whose budget is used up."""

    REFUSE = "refuse"
    """They are refused until there is some left."""
    LOWER = "lower"
    """They are accepted with the priority ``idle``."""


class GpuState(StrEnum):
    """The state of a GPU that some host's fleet uses."""

    SERVING = "serving"
    """It is given evaluations, unless a test of it is due."""
    DRAINED = "drained"
    """An operator took it out of service, until an operator resumes it."""
    QUARANTINED = "quarantined"
    """The fleet took it out of service, until it passes a test or an operator resumes it."""


class SearchState(StrEnum):
    """The state of a search for a fast kernel."""

    RUNNING = "running"
    """A process runs it, or died while it did."""
    STOPPED = "stopped"
    """It was interrupted, or an error ended it; it can be resumed."""
    DONE = "done"
    """It made all its steps, or had no more proposals."""


class ProbeKind(StrEnum):
    """What a probe of the fleet's judge is (:mod:`kqueue.probes`)."""

    HONEST = "honest"
    """A right kernel, which must pass."""
    CHEAT = "cheat"
    """A wrong kernel, which must be refused as wrong."""
    SPIN = "spin"
    """A right kernel that takes a known time, which must be timed at that."""


class Finding(StrEnum):
    """What the verdict on a probe shows of the judge."""

    AGREED = "agreed"
    """It is what it must be."""
    VOID = "void"
    """Nothing: the fleet failed, the host lacked time or memory, or nobody judged it."""
    CHEAT_ACCEPTED = "cheat_accepted"
    """A wrong kernel passed."""
    CHEAT_MISTAKEN = "cheat_mistaken"
    """A wrong kernel was refused for something that it is not."""
    HONEST_REFUSED = "honest_refused"
    """A right kernel did not pass."""
    CLOCK_SHORT = "clock_short"
    """A spin was timed at less than it took."""
    CLOCK_LONG = "clock_long"
    """A spin was timed at more than it took."""
    CLOCK_UNEVEN = "clock_uneven"
    """A spin and its reference were timed by different measures, or the spin not at all."""


class Writer(StrEnum):
    """The part of a fleet that recorded the end of an attempt or an evaluation."""

    JUDGE = "judge"
    """The process that judged the kernel."""
    WORKER = "worker"
    """The judge's parent, or the supervisor, for an attempt whose judge could not record its end."""
    SWEEPER = "sweeper"
    """A sweeper, for an attempt whose worker fell silent, or for an evaluation that nobody began in time."""
    CLIENT = "client"
    """A producer that cancelled the evaluation."""
    DATABASE = "database"
    """The database, which found the verdict of an equal evaluation."""
