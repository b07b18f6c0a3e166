"""Examinations: the kernel once more, with its problem, under a tool of the CUDA toolkit.

They come last, when the verdict is known and all other processes of the evaluation are gone: the memory that was booked
is free, and nothing that a tool says or breaks can change the verdict. Kernel and problem run in one sealed process, as
nothing is compared there.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Final

from pydantic import ValidationError

from kqueue.contract import Outcome, Phase, Request
from kqueue.evidence import KernelProfile, Profile, Sanitized
from kqueue.text import one_line
from workers.judge.channel import activities, reports
from workers.judge.channel.flags import memory
from workers.judge.channel.protocol import Examine, Job, Order
from workers.judge.ending import EvaluationEnded
from workers.judge.forkserver.handle import ForkServerError
from workers.judge.forkserver.process import SealedProcess
from workers.judge.host import toolchain
from workers.judge.pipeline.steps import Steps

#: The programs, by the tool's name.
_SANITIZER, _PROFILER = "compute-sanitizer", "ncu"
#: Findings and kernels that are kept.
_MOST: Final = 32
#: What the process may take beyond the tool's own time, in seconds, and to read what the tool has written.
_GRACE_S: Final = 10.0
_READ_S: Final = 60.0
#: The last line of a traceback.
_RAISED: Final = re.compile(r"^[A-Za-z_][\w.]*(?:Error|Exception)\b.*$", re.MULTILINE)
#: The steps of a run: what needs no device, and what does. Waiting for the device is none of its time.
_STARTING, _READING = "start_examine", "read_examine"
_SPENT: Final = (_STARTING, "untimed_examine", "alone_examine", _READING)
#: Holds the device during a block, for the step of this name.
_Hold = Callable[[str], AbstractContextManager[None]]
#: The most characters of a text that a tool or a kernel chose.
_TEXT: Final = 500


class Examiner:
    """The examination that an evaluation asks for."""

    def __init__(
        self, request: Request, device: str, fork: Callable[[], tuple[SealedProcess, Job]], steps: Steps
    ) -> None:
        """Run nothing yet.

        Args:
            request: what is judged.
            device: ``cpu`` or ``cuda``.
            fork: makes the sealed process for one run, and tells its job, the candidate's.
            steps: the evaluation's.
        """
        self._request = request
        self._device = device
        self._fork = fork
        self._steps = steps
        self._left_s = request.settings.deadlines.examine_s

    def sanitize(self, tool: str) -> dict[str, Any]:
        """Run the kernel under a tool of compute-sanitizer; return :class:`~kqueue.evidence.Sanitized`'s fields."""
        told, seconds = self._run(tool, _SANITIZER, self._steps.untimed)
        findings = [_bounded(finding) for finding in _list(told, "findings")[:_MOST]]
        fields = {"tool": tool, "seconds": seconds, "error": _error(told)}
        try:
            full = fields | {"errors": told.get("errors"), "findings": findings}
            return Sanitized.model_validate(full).model_dump()
        except ValidationError:
            return fields | {"error": "the process wrote no report that can be read"}

    def profile(self, seen: list[activities.Activity] | None) -> dict[str, Any]:
        """Run the kernel under Nsight Compute; return :class:`~kqueue.evidence.Profile`'s fields.

        Args:
            seen: what the candidate has told of its kernels before, which takes the place of counters.
        """
        # Counters are the device's, and each launch is repeated for them.
        told, seconds = self._run(_PROFILER, _PROFILER, self._steps.alone)
        kernels = [_bounded(kernel) for kernel in _list(told, "kernels")[:_MOST]]
        fields: dict[str, Any] = {"by": "ncu", "seconds": seconds, "error": _error(told)}
        if kernels:
            peaks = {name: told.get(name) for name in ("peak_gbs", "peak_gflops")}
            try:
                return Profile.model_validate(fields | {"kernels": kernels} | peaks).model_dump()
            except ValidationError:
                fields["error"] = "the process wrote no report that can be read"
        if seen is None:
            return fields
        rows = [KernelProfile(name=row.name, launches=row.launches, duration_ms=row.ns / 1e6) for row in seen[:_MOST]]
        return Profile.model_validate(fields | {"by": "cupti", "kernels": rows}).model_dump()

    def _run(self, tool: str, program: str, hold: _Hold) -> tuple[dict[str, Any], float]:
        """Make one run; return what was told, with ``error`` where that is not all, and the seconds that it took."""
        found = toolchain.program(program)
        if found is None:
            return {"error": f"{program} is not installed on this host: it comes with the CUDA toolkit"}, 0.0
        if self._left_s <= 0:
            return {"error": "there was no time left for it (deadlines.examine_s)"}, 0.0
        spent = -sum(self._steps.durations.get(name, 0.0) for name in _SPENT)
        try:
            told = self._ask(tool, found, hold)
        except (EvaluationEnded, ForkServerError, reports.NotReported) as error:
            told = {"error": str(error)}
        spent += sum(self._steps.durations.get(name, 0.0) for name in _SPENT)
        self._left_s -= spent
        return told, round(spent, 6)

    def _ask(self, tool: str, program: str, hold: _Hold) -> dict[str, Any]:
        """Have a new process run the kernel under a tool, on the device from where it needs that.

        Raises:
            EvaluationEnded: it was ended, at its deadline or beyond its limits.
            ForkServerError: it could not be sealed or ended.
            NotReported: it told nothing that can be read.
        """
        process, job = self._fork()
        order = Examine(tool, program, self._device, job, self._request.problem, self._left_s)
        page = memory("kqueue-report", reports.SIZE)
        try:
            with self._steps.timed(_STARTING), self._steps.backstop(Phase.EXAMINE):
                process.enter(Phase.EXAMINE, order.seconds + _GRACE_S)
                process.order(Order.EXAMINE, payload=order)
            with hold("examine"), self._steps.backstop(Phase.EXAMINE):
                process.order(Order.FINISH)
            with self._steps.timed(_READING), self._steps.backstop(Phase.EXAMINE):
                process.enter(Phase.EXAMINE, _READ_S)
                process.order(Order.REPORT, fds=(page,))
            told = reports.read(page)
        finally:
            os.close(page)
            report = process.stop()
        if told.get("error") and (raised := _RAISED.findall(report.log)):
            told["error"] = f"{told['error']}: {raised[-1]}"
        return told


def is_worthwhile(outcome: Outcome) -> bool:
    """Return whether a kernel got so far that its code runs on a device."""
    return outcome.judged and outcome.phase not in {Phase.PREPARE, Phase.REFERENCE, Phase.LOAD, Phase.COMPILE}


def _error(told: dict[str, Any]) -> str | None:
    said = told.get("error")
    return one_line(said)[:_TEXT] if isinstance(said, str) and said else None


def _list(told: dict[str, Any], name: str) -> list[Any]:
    value = told.get(name)
    return value if isinstance(value, list) else []


def _bounded(told: Any, depth: int = 3) -> Any:
    """Return what a sealed process told, each text on one line and none too long, without what is nested deeper."""
    if isinstance(told, str):
        return one_line(told)[:_TEXT]
    if not isinstance(told, dict | list):
        return told
    if depth == 0:
        return None
    if isinstance(told, list):
        return [_bounded(value, depth - 1) for value in told[:_MOST]]
    return {name: _bounded(value, depth - 1) for name, value in told.items()}
