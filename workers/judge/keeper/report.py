"""What the fork server tells the judge of a candidate's end."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Report:
    """How a candidate ended.

    Attributes:
        reason: why it was ended: ``stopped`` (the judge said so), ``deadline``, ``memory``, ``output``, ``scratch``;
            ``closed`` if it had closed its channel and lived on; ``exited`` if it ended by itself;
            ``stuck`` if it could not be ended;
            ``unsealed`` if its seal failed, and none of the kernel's code ran.
        phase: the phase it was in.
        status: its wait status; None if it could not be reaped.
        leftovers: processes that were alive after it had ended.
        peak_bytes: the most private memory that its process tree was seen to have.
        output_bytes: all that it wrote to stdout and stderr.
        log: the last of that; why its seal failed where it did.
        scratch_bytes: what its files took in the end.
    """

    reason: str
    phase: str
    status: int | None
    leftovers: int
    peak_bytes: int
    output_bytes: int
    log: str
    scratch_bytes: int = 0
