"""Which references are kept for the next evaluation: the one place of that policy.

A reference that is kept saves the next evaluation of the same problem and settings a fork, a CUDA context and the
loading of its kernels. It must not change a verdict: its model is constructed anew, seeds and inputs are new, and its
answer to an input of the evaluation before must have the same bits as then. On any fault it is replaced.
"""

from __future__ import annotations

import hashlib
from typing import Final

from pydantic import BaseModel, ConfigDict

from kqueue.categories import Blame
from kqueue.contract import Outcome, Request
from workers.judge.pipeline.reference import Reference

#: How many evaluations one process may serve.
_MOST_USES: Final = 64
#: Larger problems are not kept, in bytes of one case: they would hold a GPU's memory, and what is saved is small beside
#: their own time.
_MOST_BYTES: Final = 64 << 20


class Memo(BaseModel):
    """What the judge that takes a reference must know of it.

    Attributes:
        uses: evaluations that it has served.
        drawn, seed: the seeds of an input that it has answered, for drawing it and for the forward.
        on_device: whether that input was made on the device.
        digest: of the answer.
        arena_bytes: size of the arena that it had; 0 for none.
    """

    model_config = ConfigDict(frozen=True)

    uses: int
    drawn: int
    seed: int
    on_device: bool
    digest: str
    arena_bytes: int


def key(request: Request, device: str) -> str:
    """Return what a reference is kept under: all that its process depends on."""
    settings = request.settings
    parts = (
        request.problem_hash,
        settings.precision,
        settings.keeps_float64,
        settings.tf32,
        settings.seed,
        device,
        settings.limits.model_dump_json(),
    )
    return hashlib.sha256("\0".join(map(str, parts)).encode()).hexdigest()


def memo_of(reference: Reference, outcome: Outcome, uses: int) -> Memo | None:
    """Return the memo of a reference that is to be kept; None where it is to be ended.

    Args:
        reference: the evaluation's.
        outcome: the evaluation's; a problem or a fleet that failed keeps nothing.
        uses: how many evaluations it has served, this one included.
    """
    case = reference.case
    if outcome.blame not in (Blame.NONE, Blame.CANDIDATE) or reference.process.ended is not None:
        return None
    if uses >= _MOST_USES or case is None or not case.outputs or case.nbytes > _MOST_BYTES:
        return None
    return Memo(
        uses=uses,
        drawn=case.drawn,
        seed=case.seed,
        on_device=case.on_device,
        digest=reference.digest(case),
        arena_bytes=reference.arena_bytes,
    )
