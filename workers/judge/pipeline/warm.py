"""Policy for keeping references for the next evaluation.

A kept reference saves the next evaluation of the same problem and settings a fork, a CUDA context and the loading of
its kernels. It must not change a verdict: its model is constructed again, with the weights of the evaluation before,
whose answer must have the same bits as then, and with its own. Seeds and inputs are new. On any fault it is replaced.
"""

from __future__ import annotations

import hashlib
from typing import Final

from pydantic import BaseModel, ConfigDict

from kqueue.categories import Blame
from kqueue.contract import Outcome, Request
from workers.judge.pipeline.reference import Reference

#: Maximum number of evaluations of one process.
_MOST_USES: Final = 64
#: Maximum size in bytes of one case of a kept reference. Larger problems would hold a GPU's memory, and save little
#: compared with their own time.
_MOST_BYTES: Final = 64 << 20


class Memo(BaseModel):
    """Facts that the next judge needs about a kept reference.

    Attributes:
        uses: number of evaluations that it has served.
        source: hash of the problem that it has loaded, which is one shape of the evaluation's.
        weights: seed of the weights.
        drawn, seed: seeds of an answered case, of its inputs and of its forward.
        on_device: whether these inputs were made on the device.
        digest: hash of the answer.
        arena_bytes: size of its arena, or 0 for none.
    """

    model_config = ConfigDict(frozen=True)

    uses: int
    source: str
    weights: int
    drawn: int
    seed: int
    on_device: bool
    digest: str
    arena_bytes: int


def key(request: Request, device: str) -> str:
    """Return the key under which a reference is kept, with everything that its process depends on."""
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
    return hash_of("\0".join(map(str, parts)))


def hash_of(text: str) -> str:
    """Return the hash of a text."""
    return hashlib.sha256(text.encode()).hexdigest()


def memo_of(reference: Reference, outcome: Outcome, uses: int) -> Memo | None:
    """Return the memo of a reference to keep after ``uses`` evaluations, or None if it must be ended."""
    case = reference.case
    if outcome.blame not in (Blame.NONE, Blame.CANDIDATE) or reference.process.ended is not None:
        return None
    if uses >= _MOST_USES or case is None or not case.outputs or case.nbytes > _MOST_BYTES:
        return None
    return Memo(
        uses=uses,
        source=hash_of(reference.proxy.source),
        weights=reference.proxy.seed,
        drawn=case.drawn,
        seed=case.seed,
        on_device=case.on_device,
        digest=reference.digest(case),
        arena_bytes=reference.proxy.arena_bytes,
    )
