"""Reuse of verdicts: an evaluation ends with the verdict of an equal, earlier one, without using a slot.

Equal evaluations have the same problem, kernel and settings, according to hashes in the database. The verdict must have
the fingerprint of a worker that serves the lane now. The fingerprint covers all other properties on which a verdict
depends: the environment (GPU, driver, versions, host), the sandbox, the toolchain, and the judge's own code. A worker's
fingerprint is known after its first kernel.

A verdict is reused only if a repetition would give it again (:func:`reusable`), and if all of the last verdicts with
the same content and fingerprint agree. So a kernel that passes by luck is judged again once it has failed. A reused
verdict is never reused again or counted in ``best_verdicts``, because it repeats one measurement.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection
from uuid import UUID

from sqlalchemy import Connection, func, select

from kqueue.contract import Outcome
from kqueue.figures import is_noisy


def answer(connection: Connection, ids: Collection[UUID], *, live_s: float) -> set[UUID]:
    """Within the caller's transaction, end queued evaluations that equal judged ones, and return them.

    Evaluations that forbid reuse, had an attempt, or are locked by another transaction are skipped. A worker
    counts as alive for ``live_s`` seconds without a heartbeat.
    """
    if not ids:
        return set()
    # A function of the database does this, because producers lack the right to write verdicts.
    return set(connection.scalars(select(func.kqueue_reuse(list(ids), live_s))))


def fingerprint(environment_hash: str, conditions: str) -> str:
    """Return the hash of all properties of a worker on which its verdicts depend, except the request.

    ``conditions`` are those that are no facts of its environment, in any form.
    """
    return hashlib.sha256(json.dumps([environment_hash, conditions]).encode()).hexdigest()


def reusable(outcome: Outcome) -> bool:
    """Return True if equal evaluations can reuse this outcome, because a repetition would give it again.

    Excluded are outcomes after several tries, and noisy times, and times that were measured next to foreign GPU
    processes or on a device that had changed.
    """
    evidence = outcome.evidence
    disturbed = evidence.baseline_drift is not None or evidence.foreign_processes not in (None, "unknown", ())
    tried = any(not attempt.handed_back for attempt in evidence.attempts or ())
    steady = not disturbed and not is_noisy(outcome.speedup_interval)
    return outcome.category.info.reusable and steady and not tried and not evidence.alone
