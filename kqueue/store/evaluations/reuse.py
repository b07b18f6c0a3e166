"""Reusing verdicts: an evaluation whose equal was judged ends with that verdict, and takes no slot.

Equal are evaluations of the same problem, kernel and settings, as the database hashes them. The verdict must have been
reached under the fingerprint of a worker that serves the lane now. The fingerprint stands for all else that a verdict
depends on: the environment (GPU, driver, versions, host), the seal, the toolchain, and the judge's own code. A worker's
is known from the first kernel on that it has run.

A verdict is reused only if it would come out the same again (:func:`reusable`), and if all of the last verdicts on the
same content and fingerprint agree. So what passes by luck is judged anew once it has failed. No reused verdict is
reused or counted in ``best_verdicts``: it is the one measurement, told again.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection
from uuid import UUID

from sqlalchemy import Connection, func, select

from kqueue.contract import Outcome


def answer(connection: Connection, ids: Collection[UUID], *, live_s: float) -> set[UUID]:
    """End those of the queued evaluations ``ids`` whose equals were judged, within the caller's transaction.

    Evaluations that ask to be judged, that were tried, or that another transaction holds are left alone.

    Args:
        connection: the caller's transaction.
        ids: the evaluations.
        live_s: seconds for which a silent worker counts as one that serves.

    Returns:
        those that have their verdicts now.
    """
    if not ids:
        return set()
    # A function of the database: producers have no right to write verdicts.
    return set(connection.scalars(select(func.kqueue_reuse(list(ids), live_s))))


def fingerprint(environment_hash: str, conditions: str) -> str:
    """Return what stands for all that a worker's verdicts depend on beside what is asked for.

    Args:
        environment_hash: of the facts of its place.
        conditions: what else they depend on, in any form.
    """
    return hashlib.sha256(json.dumps([environment_hash, conditions]).encode()).hexdigest()


def reusable(outcome: Outcome) -> bool:
    """Return True if equal evaluations may have this outcome.

    It must be one that comes out the same again. Those that took more than one try, and times that were taken beside
    strangers who were seen, or on a device that had changed, are not.
    """
    evidence = outcome.evidence
    disturbed = evidence.baseline_drift is not None or evidence.strangers not in (None, "unknown", ())
    tried = any(not attempt.handed_back for attempt in evidence.attempts or ())
    return outcome.category.info.reusable and not disturbed and not tried and not evidence.alone
