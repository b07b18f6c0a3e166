"""Tests of a repository, judged in place of a kernel: pytest's reports from their process, and its end.

The reports are as credible as a kernel's own exceptions, because tests decide themselves whether they pass. The fork
server observes how and when their process ends.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import time
from collections.abc import Callable
from functools import partial
from typing import Final

from kqueue.backends import PYTEST
from kqueue.categories import Category
from kqueue.contract import TESTS_LINE, Outcome, Phase, Request
from kqueue.evidence import Facts, Tests
from workers.judge.channel.lines import Lines, content
from workers.judge.channel.orders import Order, Testing
from workers.judge.channel.protocol import Tag
from workers.judge.ending import EvaluationEnded
from workers.judge.forkserver.control import End
from workers.judge.forkserver.process import SealedProcess
from workers.judge.host import toolchain
from workers.judge.pipeline import health, plan
from workers.judge.pipeline.blame import invalid_problem
from workers.judge.pipeline.context import Context

_SANITIZER: Final = "compute-sanitizer"
#: Maximum time in seconds for one evaluation. Another one that needs the device waits at most
#: :data:`kqueue.limits.GPU_WAIT_S` for all evaluations before it together.
_MOST_S: Final = 720.0
#: Seconds beyond a test's limit, in which its process reports where it is.
_GRACE_S: Final = 2.0
#: Maximum size in bytes of pytest's reports. An honest process hands its remaining tests to a new process before that.
_MOST_BYTES: Final = 2 << 20
#: Size in bytes of the end of each file of captured output that is kept.
_CAPTURED_BYTES: Final = 16 << 10
#: Size in bytes of compute-sanitizer's output that is kept.
_FOUND_BYTES: Final = 16 << 10
#: Seconds between two reads of the clock, and of the GPU's memory.
_LOOK_S: Final = 0.25
_MEMORY_S: Final = 1.0
#: GPU memory in bytes that tests can hold beyond the booked amount before they are ended, for their CUDA context.
_SLACK_BYTES: Final = 2 << 30
#: pytest's exit statuses after a complete run: all tests passed, or there were none.
_ALL_RUN: Final = frozenset({0, 5})


def check(request: Request) -> None:
    """Raise EvaluationEnded if the problem is a repository's files for a kernel, or no repository's files for tests."""
    if request.problem.startswith(TESTS_LINE) is not (request.backend == PYTEST):
        actual = "no repository's files" if request.backend == PYTEST else "a repository's files, and no problem"
        raise invalid_problem(f"the stored source holds {actual}")


def run_tests(context: Context) -> Outcome:
    """Run a repository's tests. Their GPU memory use is unknown, so a slot's share is booked."""
    budget, slot = context.budget, context.slot
    budget.book(plan.of_first_draw(**budget.whole, alone=False))
    held = partial(health.held_bytes, slot.device) if slot.on_gpu else lambda: None
    tests = PytestRun(context.processes.begin_tests(), context.request, budget.plan.total, held)
    try:
        with context.steps.untimed("tests"), context.steps.backstop(Phase.CHECK):
            return tests.run()
    finally:
        context.evidence.tests, context.tests_log = tests.evidence, tests.log


class PytestRun:
    """Tests that share one sealed process. ``log`` is the end of their captured output."""

    def __init__(self, process: SealedProcess, request: Request, booked: int, held: Callable[[], int | None]) -> None:
        """Prepare to run tests that can use ``booked`` bytes of GPU memory. ``held`` returns the bytes in use.

        Raises:
            EvaluationEnded: ``judge_error`` if compute-sanitizer is requested but not installed.
        """
        self.log = ""
        self._sanitizer = ""
        self._findings: str | None = None
        if request.settings.examine:
            self._sanitizer = toolchain.program(_SANITIZER) or ""
            if not self._sanitizer:
                lacks = f"{_SANITIZER} is not installed on this host: it comes with the CUDA toolkit"
                raise EvaluationEnded(Category.JUDGE_ERROR, lacks, Phase.PREPARE, missing=[lacks])
        self._process = process
        self._request = request
        self._booked = booked
        self._held = held
        self._held_before = held() or 0
        self._held_more = 0
        self._deadlines = request.settings.deadlines
        self._events: list[str] = []
        self._failed = self._finished = 0
        self._renewed = False
        self._end: int | None = None
        self._until = self._look_at = 0.0

    @property
    def evidence(self) -> Tests:
        """Pytest's output so far."""
        return Tests(words="\n".join(self._events), findings=self._findings)

    def run(self) -> Outcome:
        """Run the tests, which use the device, until their process ends.

        Raises:
            EvaluationEnded: the process did not finish its tests.
            ForkServerError: the fork server is gone.
        """
        process = self._process
        ours, theirs = socket.socketpair()
        lines = Lines(ours, _MOST_BYTES)
        with contextlib.closing(lines):
            self._until = time.monotonic() + _MOST_S
            with theirs:
                self._begin(theirs)
            while not process.ends(_LOOK_S, *(() if lines.ended else (ours,))) and not lines.too_many:
                for line in lines.read():
                    self._note(line)
                if self._takes_too_much():
                    break
            for line in lines.read():
                self._note(line)
            report = process.stop()
            captured = lines.descriptors
            if self._sanitizer:
                self._findings = "".join(content(log, _FOUND_BYTES).strip() for log in captured[:1])
                captured = captured[1:]
            self.log = "\n".join(filter(None, (content(one, _CAPTURED_BYTES, at_end=True).strip() for one in captured)))
            too_many = lines.too_many
        if too_many:
            message = f"pytest's reports of these tests have more than {_MOST_BYTES} bytes"
            raise EvaluationEnded(Category.OUTPUT_LIMIT, message, process.phase, reason=End.OUTPUT)
        self._enforce_limits(report.reason)
        if report.reason is not End.EXITED or report.status is None or not os.WIFEXITED(report.status):
            raise process.died()
        status = os.WEXITSTATUS(report.status)
        if status != self._end or not (status in _ALL_RUN or self._failed or self._renewed):
            raise process.died()
        if not self._renewed and not self._failed and self._finished < (asked := self._count()):
            died, message = process.died().outcome, f"{self._finished} of {asked} tests ran, and pytest ended"
            raise EvaluationEnded(died.category, message, died.phase, **died.facts.model_dump())
        if self._failed:
            return Outcome(
                category=Category.TESTS_FAILED,
                message=f"pytest reported {self._failed} failure{'s' if self._failed > 1 else ''}",
                phase=Phase.CHECK,
                facts=Facts(failed=self._failed),
            )
        return Outcome(category=Category.PASSED, message="the tests passed")

    def _count(self) -> int:
        """Return the number of tests to run. 0 if the order, which is not trusted, names none."""
        with contextlib.suppress(ValueError, RecursionError):
            match json.loads(self._request.kernel.removeprefix(TESTS_LINE)):
                case {"tests": list(tests)}:
                    return len(tests)
                case _:
                    pass
        return 0

    def _takes_too_much(self) -> bool:
        """Return whether tests hold much more GPU memory than is booked, which other slots can have booked."""
        now = time.monotonic()
        if now >= self._look_at:
            self._look_at = now + _MEMORY_S
            self._held_more = (self._held() or 0) - self._held_before
        return self._held_more > self._booked + _SLACK_BYTES

    def _enforce_limits(self, reason: End) -> None:
        """Raise EvaluationEnded if the tests were ended for using too much of the device."""
        if self._held_more > self._booked + _SLACK_BYTES:
            raise EvaluationEnded(
                Category.GPU_OUT_OF_MEMORY,
                f"the tests held {self._held_more} bytes of the GPU's memory, and their share is {self._booked} bytes",
                self._process.phase,
                held_bytes=self._held_more,
                allowed_bytes=self._booked,
            )
        if reason is End.DEADLINE and time.monotonic() >= self._until:
            died = self._process.died().outcome
            message = f"the tests of one process can take {_MOST_S:g} s together, imports and collection included"
            raise EvaluationEnded(died.category, message, died.phase, **died.facts.model_dump())

    def _begin(self, stream: socket.socket) -> None:
        self._enter(Phase.LOAD, self._deadlines.load_s)
        asked = Testing(self._request.problem, self._request.kernel.removeprefix(TESTS_LINE), self._sanitizer)
        try:
            self._process.become(Order.TEST, asked, stream.fileno())
        except EvaluationEnded as ended:
            if ended.reply is not None and ended.reply.tag is Tag.PROBLEM:
                raise invalid_problem(ended.reply.message) from None
            raise

    def _enter(self, phase: Phase, seconds: float) -> None:
        self._process.enter(phase, max(min(seconds, self._until - time.monotonic()), 0.0))

    def _note(self, line: bytes) -> None:
        """Record an event and set the deadline of the test or phase that it begins."""
        try:
            text = line.decode("ascii")
            event = json.loads(text)
        except (ValueError, RecursionError):
            return  # The process died within this line.
        if not isinstance(event, dict):
            return
        self._events.append(text)
        match event:
            case {"at": "start"}:
                self._enter(Phase.CHECK, self._deadlines.check_s + _GRACE_S)
            case {"at": "finish"}:
                self._finished += 1
                self._enter(Phase.CHECK, max(self._deadlines.check_s, self._deadlines.load_s))
            case {"at": "report", "data": {"outcome": "failed"}} | {"at": "lost"}:
                self._failed += 1
            case {"at": "renew"}:
                self._renewed = True
            case {"at": "end", "status": int(status), "fault": fault}:
                self._end = status
                self._failed += bool(fault)
            case _:
                pass
