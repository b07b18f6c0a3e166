"""Examinations, which run the kernel again with its problem under a tool of the CUDA toolkit.

They come last, when the verdict is known and all other processes of the evaluation have ended. The booked memory is
free, and a tool cannot change the verdict. Kernel and problem run in one sealed process, because no outputs are
compared.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from contextlib import AbstractContextManager
from itertools import islice
from typing import Any, Final

from pydantic import ValidationError

from kqueue.contract import Outcome, Phase, Request
from kqueue.evidence import KernelProfile, Profile, Sanitized
from kqueue.text import one_line
from workers.judge.channel import activities, reports
from workers.judge.channel.flags import memory
from workers.judge.channel.orders import Examine, Job, Order
from workers.judge.ending import EvaluationEnded
from workers.judge.forkserver.handle import ForkServerError
from workers.judge.forkserver.process import SealedProcess
from workers.judge.host import toolchain
from workers.judge.pipeline.steps import Steps

#: The programs, by the tool's name.
_SANITIZER, _PROFILER = "compute-sanitizer", "ncu"
#: Maximum number of findings and kernels that are kept.
_MOST: Final = 32
_UNREADABLE: Final = "the process wrote no readable report"
#: Time in seconds for the process in addition to the tool's own time, and for reading the tool's output.
_GRACE_S: Final = 10.0
_READ_S: Final = 60.0
#: The last line of a traceback.
_RAISED: Final = re.compile(r"^[A-Za-z_][\w.]*(?:Error|Exception)\b.*$", re.MULTILINE)
#: Steps of a run whose time counts: those without the device, and those with it. Waiting for the device does not count.
_STARTING, _READING = "start_examine", "read_examine"
_SPENT: Final = (_STARTING, "untimed_examine", "alone_examine", _READING)
#: Function that holds the device during a block, for the step with the given name.
_Hold = Callable[[str], AbstractContextManager[None]]
#: Maximum number of characters of a text that a tool or a kernel wrote.
_TEXT: Final = 500


class Examiner:
    """The examination that a request asks for."""

    def __init__(
        self, request: Request, device: str, fork: Callable[[], tuple[SealedProcess, Job]], steps: Steps
    ) -> None:
        """Prepare without running a tool. ``fork`` returns the sealed process for one run, and the candidate's job."""
        self._request = request
        self._device = device
        self._fork = fork
        self._steps = steps
        self._left_s = request.settings.deadlines.examine_s

    def sanitize(self, tool: str) -> Sanitized:
        """Run the kernel under a tool of compute-sanitizer."""
        result, seconds = self._run(tool, _SANITIZER, self._steps.untimed)
        findings = [_bounded(finding) for finding in _list(result, "findings")[:_MOST]]
        fields = {"tool": tool, "seconds": seconds, "error": _error(result)}
        try:
            return Sanitized.model_validate(fields | {"errors": result.get("errors"), "findings": findings})
        except ValidationError:
            return Sanitized(tool=tool, seconds=seconds, error=_UNREADABLE)

    def profile(self, seen: list[activities.Activity] | None) -> Profile:
        """Run the kernel under Nsight Compute.

        Args:
            seen: the candidate's earlier report of its kernels, which is used if there are no counters.
        """
        # Counters cover the whole device, and each launch is repeated to read them.
        result, seconds = self._run(_PROFILER, _PROFILER, self._steps.alone)
        kernels = [_bounded(kernel) for kernel in _list(result, "kernels")[:_MOST]]
        error = _error(result)
        if kernels:
            fields: dict[str, Any] = {"by": "ncu", "seconds": seconds, "error": error, "kernels": kernels}
            peaks = {name: result.get(name) for name in ("peak_gbs", "peak_gflops")}
            try:
                return Profile.model_validate(fields | peaks)
            except ValidationError:
                error = _UNREADABLE
        rows = (KernelProfile(name=row.name, launches=row.launches, duration_ms=row.ns / 1e6) for row in seen or ())
        by = "ncu" if seen is None else "cupti"
        return Profile(by=by, seconds=seconds, error=error, kernels=tuple(islice(rows, _MOST)))

    def _run(self, tool: str, program: str, hold: _Hold) -> tuple[dict[str, Any], float]:
        """Run a tool, and return the report, with ``error`` if it is incomplete, and the seconds that the run took."""
        executable = toolchain.program(program)
        if executable is None:
            return {"error": f"{program} is not installed on this host: it comes with the CUDA toolkit"}, 0.0
        if self._left_s <= 0:
            return {"error": "there was no time left for it (deadlines.examine_s)"}, 0.0
        spent = -sum(self._steps.durations.get(name, 0.0) for name in _SPENT)
        try:
            result = self._ask(tool, executable, hold)
        except (EvaluationEnded, ForkServerError, reports.NotReported) as error:
            result = {"error": str(error)}
        spent += sum(self._steps.durations.get(name, 0.0) for name in _SPENT)
        self._left_s -= spent
        return result, round(spent, 6)

    def _ask(self, tool: str, program: str, hold: _Hold) -> dict[str, Any]:
        """Run the kernel under a tool in a new process, which holds the device only while it needs it."""
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
            result = reports.read(page)
        finally:
            os.close(page)
            report = process.stop()
        if result.get("error") and (raised := _RAISED.findall(report.log)):
            result["error"] = f"{result['error']}: {raised[-1]}"
        return result


def is_worthwhile(outcome: Outcome) -> bool:
    """Return whether the kernel's code ran far enough to use a device."""
    return outcome.judged and outcome.phase not in {Phase.PREPARE, Phase.REFERENCE, Phase.LOAD, Phase.COMPILE}


def _error(result: dict[str, Any]) -> str | None:
    error = result.get("error")
    return one_line(error)[:_TEXT] if isinstance(error, str) and error else None


def _list(result: dict[str, Any], name: str) -> list[Any]:
    value = result.get(name)
    return value if isinstance(value, list) else []


def _bounded(result: Any, depth: int = 3) -> Any:
    """Return a sealed process's report with bounded one-line texts, lists and nesting."""
    if isinstance(result, str):
        return one_line(result)[:_TEXT]
    if not isinstance(result, dict | list):
        return result
    if depth == 0:
        return None
    if isinstance(result, list):
        return [_bounded(value, depth - 1) for value in result[:_MOST]]
    return {name: _bounded(value, depth - 1) for name, value in result.items()}
