"""The judge as a library: a request in, an outcome out, with no service at all.

:func:`judge` forks a process for the evaluation, outlives it, and explains its death. A worker of the fleet, whose
process is that fork already, calls :func:`workers.judge.trial.run.evaluate` itself.
"""

from __future__ import annotations

import json
import os
import signal
import traceback
from typing import Any
from uuid import UUID

from kqueue.contract import Measurement, Outcome, Request
from workers.judge import deaths
from workers.judge.host.blackbox import BlackBox
from workers.judge.keeper.handle import ForkServer
from workers.judge.place import Place
from workers.judge.ports import InMemoryRecords
from workers.judge.trial.run import evaluate


def judge(request: Request, place: Place, records: InMemoryRecords, forkserver: ForkServer) -> Outcome:
    """Judge one request in a process of its own.

    Args:
        request: what to judge.
        place: where.
        records: baselines that are known, and that become known. Kept by this process.
        forkserver: the place's, ready.

    Returns:
        the outcome; of a judge that raised or died too.
    """
    blackbox = BlackBox()
    blackbox.open(UUID(int=0), 1)
    reader, writer = os.pipe2(os.O_CLOEXEC)
    pid = os.fork()
    if pid == 0:
        os.close(reader)
        _run(request, place, records, blackbox, forkserver, writer)
    os.close(writer)
    try:
        with os.fdopen(reader, "rb") as stream:
            data = stream.read()
    except BaseException:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        raise
    _, status = os.waitpid(pid, 0)
    if not data:
        record = blackbox.read()
        return deaths.explain(os.waitstatus_to_exitcode(status), record.phase if record else None)
    told = json.loads(data)
    for key, measurement in told["baselines"]:
        records.baselines[tuple(key)] = Measurement.model_validate(measurement)
    records.doubts += [tuple(doubt) for doubt in told["doubts"]]
    return Outcome.model_validate(told["outcome"])


def _run(
    request: Request, place: Place, records: InMemoryRecords, blackbox: BlackBox, forkserver: ForkServer, writer: int
) -> None:
    """In the child: judge, tell, end."""
    status = 1
    try:
        known = dict(records.baselines)
        records.doubts = []
        outcome = deaths.outcome_of(lambda: evaluate(request, place, records, blackbox, forkserver))
        new: list[Any] = [
            [key, value.model_dump(mode="json")] for key, value in records.baselines.items() if known.get(key) != value
        ]
        told = {"outcome": outcome.model_dump(mode="json"), "baselines": new, "doubts": records.doubts}
        with os.fdopen(writer, "wb") as stream:
            stream.write(json.dumps(told).encode())
        status = 0
    except BaseException:  # noqa: BLE001 -- nothing may return into the parent's frames
        traceback.print_exc()
    finally:
        os._exit(status)
