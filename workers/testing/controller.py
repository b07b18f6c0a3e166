"""The controlling pytest, which runs groups of tests concurrently, and passes their reports to its own plugins."""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal, cast

import pytest

from kqueue.errors import KqueueError
from kqueue.signals import held_interrupts
from workers.testing import claims, sanitizer
from workers.testing.groups import Group, grouped

if TYPE_CHECKING:
    from workers.testing.fleet import Evaluation, Fleet
    from workers.testing.host import Here, Job

    #: A process with a group's tests, on this host or a fleet's.
    Running = Job | Evaluation

#: Seconds between checks of jobs that send no messages.
_CHECK_S: Final = 0.2
#: Options of these types mean the same in a job's process.
_PLAIN: Final = (bool, int, float, str, type(None))

_Phase = Literal["setup", "call", "teardown"]
#: pytest's exit status if some tests could not be run for reasons outside of the tests.
_INTERNAL_ERROR: Final = 3


@dataclass(slots=True, eq=False)
class _Run:
    """The run of one group's tests, in one process after another until all have run.

    Attributes:
        group, whole: the remaining tests, and all tests of the group.
        events: pending calls of pytest's hooks, with True for the beginning of a test.
        held: the last reports of the last test, held back until its process has continued or ended well.
        at: the test that runs, and its phase.
        finished: number of tests that the current process has finished.
        lost: the reason why pytest could run no test, or empty.
        renewed: whether the current process has handed the remaining tests to another process.
        ended: the last message of the current process.
        over: whether the outcomes of all tests are known.
    """

    group: Group
    whole: Group
    events: deque[tuple[bool, Callable[[], object]]] = field(default_factory=deque[Any])
    held: list[pytest.TestReport] = field(default_factory=list[pytest.TestReport])
    at: tuple[str, _Phase] | None = None
    finished: int = 0
    failed: list[pytest.TestReport] = field(default_factory=list[pytest.TestReport])
    lost: str = ""
    renewed: bool = False
    ended: dict[str, Any] | None = None
    over: bool = False


class Controller:
    """The plugin that replaces pytest's own loop over the tests."""

    def __init__(self, config: pytest.Config, searched: list[str]) -> None:
        """Configure the host that runs the tests. ``searched`` is ``sys.path`` before test modules changed it."""
        self._config = config
        self._isolate = config.option.kqueue_isolate
        self._sanitizes = config.option.kqueue_sanitize
        self._host = _host(config)
        self._order: dict[str, Any] = {
            "args": [os.fspath(argument) for argument in config.invocation_params.args],
            "program": sys.argv[0],
            "searched": searched,
        }
        self._session: pytest.Session
        #: Descriptions of the groups with tests that were not run, with the reasons.
        self._unrun: list[str] = []
        self._runs: list[_Run] = []
        self._speaker: _Run | None = None

    def pytest_report_header(self) -> str:
        """Return the line of the header that describes the run."""
        return f"kqueue: a process for each {self._isolate}, {self._host.words}"

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool | None:
        """Run all tests in place of pytest's own loop."""
        if session.testsfailed and not session.config.option.continue_on_collection_errors:
            return None  # pytest's own loop reports this
        self._session = session
        groups = grouped(session.items, self._isolate)
        self._runs = [_Run(group, Group(group.name, list(group.items))) for group in groups]
        self._order["options"] = {name: v for name, v in vars(session.config.option).items() if isinstance(v, _PLAIN)}
        with contextlib.ExitStack() as stack:
            factory: Any = getattr(self._config, "_tmp_path_factory", None)
            if factory is not None:
                folder = factory.getbasetemp()
            else:
                folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kqueue-")))
            # A CI job's time limit is a SIGTERM. It cancels tests on a fleet like Ctrl-C.
            check = stack.enter_context(held_interrupts())
            stack.callback(self._host.close)
            self._host.open(self._order, folder)
            try:
                self._run_all(check)
            except KqueueError as error:
                pytest.exit(f"--kqueue: {error}", _INTERNAL_ERROR)
        if self._unrun:
            pytest.exit(f"not all tests were run: {'; '.join(self._unrun)}", _INTERNAL_ERROR)
        return True

    # Jobs ------------------------------------------------------------------------------------------------

    def _run_all(self, check: Callable[[], None]) -> None:
        """Run all groups. ``check`` raises KeyboardInterrupt if a signal has asked this process to end."""
        waiting: deque[tuple[_Run, bool]] = deque((run, False) for run in self._runs)
        running: dict[Running, _Run] = {}
        with selectors.DefaultSelector() as selector:
            try:
                while waiting or running:
                    while waiting and self._host.has_room():
                        check()
                        run, sanitized = waiting.popleft()
                        run.at, run.finished, run.lost, run.renewed, run.ended = None, 0, "", False, None
                        job = self._host.start(run.whole if sanitized else run.group, sanitized=sanitized)
                        running[job] = run
                        for source in job.sources:
                            selector.register(source, selectors.EVENT_READ)
                    selector.select(_CHECK_S)
                    check()
                    for job, run in list(running.items()):
                        gone = job.watch()
                        self._show(job)
                        for message in job.heard():
                            self._hear(run, job, message)
                        if gone:
                            for source in job.sources:
                                selector.unregister(source)
                            del running[job]
                            self._host.over(job)
                            try:
                                again = self._concluded(run, job)
                            finally:
                                job.close()
                            if again is not None:
                                waiting.appendleft((run, again))
                        self._stop_if_told()
            finally:
                self._end(running)

    def _end(self, jobs: Iterable[Running]) -> None:
        """End jobs that still run, with all that they started."""
        left = list(jobs)
        for job in left:
            job.end()
        while left:
            for job in list(left):
                gone = job.watch()
                job.output()
                deque(job.heard(), maxlen=0)  # the process can block until its messages are read
                if gone:
                    self._host.over(job)
                    job.close()
                    left.remove(job)
            time.sleep(0.01)

    def _show(self, job: Running) -> None:
        printed = job.output()
        if printed and self._config.getoption("capture") == "no" and not job.sanitized:
            sys.stdout.write(printed.decode(errors="replace"))
            sys.stdout.flush()

    def _stop_if_told(self) -> None:
        session = self._session
        if session.shouldfail:
            raise session.Failed(session.shouldfail)
        if session.shouldstop:
            raise session.Interrupted(session.shouldstop)

    # Messages of a job -----------------------------------------------------------------------------------

    def _hear(self, run: _Run, job: Running, word: dict[str, Any]) -> None:
        if job.sanitized:
            return  # the tests were reported before, and only the findings count
        try:
            heard = self._checked(run, word)
        except Exception as error:  # noqa: BLE001 -- foreign code on another host can have sent it
            run.lost = (
                run.lost or f"its process sent a message that cannot be understood ({type(error).__name__}: {error})"
            )
            return
        match word["at"]:
            case "start":
                self._begin(run, heard)
                run.at = (heard.nodeid, "setup")
            case "report":
                if run.at is not None and heard.when in ("setup", "call"):
                    run.at = (run.at[0], "call" if heard.when == "setup" and heard.passed else "teardown")
                if heard.when == "teardown":
                    self._let_go(run)
                    run.held.append(heard)
                else:
                    self._report(run, heard)
            case "finish":
                run.at = None
                run.finished += 1
                self._taken(run, heard.nodeid)
            case "warning":
                self._tell(run, self._config.hook.pytest_warning_recorded.call_historic, kwargs=heard)
            case "stop":
                self._let_go(run)
                self._flush(run)
                self._stop(word["how"], word["reason"], word["status"])
            case "lost":
                run.lost = heard
            case "renew":
                run.renewed = True
            case "end":
                run.ended = heard
            case _:
                pass

    def _checked(self, run: _Run, word: dict[str, Any]) -> Any:
        """Return the test, report or fields of a message. Raise an exception if it is not valid for the group."""
        match word:
            case {"at": "start" | "finish", "nodeid": name}:
                return _named(run, name)
            case {"at": "report", "data": data}:
                given = {"config": self._config, "data": claims.with_tuples(data)}
                report = self._config.hook.pytest_report_from_serializable(**given)
                report.location = _named(run, report.nodeid).location
                claims.check_report(report)
                return report
            case {"at": "warning", "nodeid": name, "warning": dict(warning)}:
                return {
                    "warning_message": claims.warning(cast("dict[str, Any]", warning)),
                    "when": "runtest",
                    "nodeid": _named(run, name).nodeid,
                    "location": None,
                }
            case {"at": "stop", "how": str(), "reason": str(), "status": status} if status is None or claims.is_number(
                status
            ):
                return None
            case {"at": "lost", "words": str(reason)}:
                return reason
            case {"at": "end", "status": status, "enough": bool(), "fault": str()} if claims.is_number(status):
                return word
            case {"at": "start" | "finish" | "report" | "warning" | "stop" | "lost" | "end" as at}:
                raise ValueError(f"a message {at!r} with missing fields")
            case _:
                return None

    def _stop(self, how: str, reason: str, status: int | None) -> None:
        """End the run in the way that a test or plugin requested."""
        if how == "interrupt":
            raise KeyboardInterrupt(reason)
        if how == "fail":
            self._session.shouldfail = reason
        elif how == "stop":
            self._session.shouldstop = reason
        self._stop_if_told()
        pytest.exit(reason, status)

    def _concluded(self, run: _Run, job: Running) -> bool | None:
        """Handle the end of a process. Return None if its group is over, else whether its next one is sanitized."""
        if job.sanitized:
            self._add_findings(run, job)
            self._finish(run)
            return None
        if job.unrun:
            self._unrun.append(f"{len(run.group.items)} of {self._place_of(run)} ({job.unrun})")
            self._let_go(run)
            self._finish(run)
            return None
        began = run.finished > 0 or run.at is not None
        # A process with a broken context can die of it at its end. The test that broke the context has failed already.
        if not run.renewed and (why := self._fault(run, job)):
            self._blame(run, job, why)
        self._let_go(run)
        if run.ended is not None and run.ended["enough"]:
            run.group.items.clear()
        if run.group.items and not self._session.shouldfail:
            if not began:
                self._give_up(run, job, run.lost or "began none of its tests")
            elif run.ended is not None and not run.renewed and not run.lost:
                self._give_up(run, job, "did not find this test, which pytest had collected")
            else:
                return False  # the remaining tests get another process
        if run.failed and self._sanitizes:
            return True
        self._finish(run)
        return None

    def _fault(self, run: _Run, job: Running) -> str:
        """Return a description of the fault in a process's end, or an empty text."""
        ended = run.ended
        if job.overdue:
            return f"took longer than {job.limit_s:g} s (--kqueue-timeout) and was ended"
        if job.why:
            return job.why
        if run.lost and run.group.items:
            return run.lost
        if job.status is None:
            return "could not be ended, or its reaper was killed"
        if ended is not None and ended["fault"]:
            return f"is left with a broken CUDA context: {ended['fault']}"
        if ended is None or job.status != ended["status"]:
            if job.status >= 0:
                return f"ended with exit status {job.status}, which is not pytest's"
            with contextlib.suppress(ValueError):
                name = signal.Signals(-job.status).name
                return f"was killed by {name} ({signal.strsignal(-job.status)})"
            return f"was killed by signal {-job.status}"
        return ""

    def _blame(self, run: _Run, job: Running, why: str) -> None:
        """Report a process's fault as the failure of the running test, or else of the last test that ended."""
        if run.at is not None:
            name, phase = run.at
            run.at = None
            item = self._taken(run, name)
            failure = _report(item, phase, "failed", f"its process {_and_said(why, job)}")
            if phase == "teardown":
                run.held.append(failure)
            else:
                self._report(run, failure)
                run.held.append(_report(item, "teardown", "passed"))
        elif run.held:
            last = run.held.pop()
            when = "after this test" if run.group.items else f"after the last test of {self._place_of(run)}"
            text = f"{when} its process {_and_said(why, job)}"
            if last.failed:
                sanitizer.add(last, "kqueue", text)
                run.held.append(last)
            else:
                run.held.append(_report(_named(run, last.nodeid), "teardown", "failed", text))
        elif run.group.items:
            self._give_up(run, job, why)

    def _taken(self, run: _Run, name: str) -> pytest.Item:
        """Return a test by its node id, and remove it from the remaining tests of its group."""
        item = next((item for item in run.group.items if item.nodeid == name), None)
        if item is None:
            return _named(run, name)
        run.group.items.remove(item)
        return item

    def _place_of(self, run: _Run) -> str:
        return f"{self._isolate} {run.whole.name}"

    def _give_up(self, run: _Run, job: Running, why: str) -> None:
        """Report that the remaining tests cannot be run."""
        why = why if run.lost else f"its process {_and_said(why, job)}"
        while run.group.items:
            item = run.group.items.pop(0)
            self._begin(run, item)
            self._report(run, _report(item, "setup", "failed", why))
            run.held.append(_report(item, "teardown", "passed"))

    def _add_findings(self, run: _Run, job: Running) -> None:
        text = job.findings
        if job.overdue:
            text = f"(ended after {job.limit_s:g} s)\n{text}"
        for report in run.failed:
            sanitizer.add(report, f"compute-sanitizer on {self._place_of(run)}", text)

    # Calls of pytest's hooks -----------------------------------------------------------------------------

    def _begin(self, run: _Run, item: pytest.Item) -> None:
        self._let_go(run)
        start: Any = self._config.hook.pytest_runtest_logstart
        self._tell(run, start, begins=True, nodeid=item.nodeid, location=item.location)

    def _report(self, run: _Run, report: pytest.TestReport) -> None:
        if report.failed:
            run.failed.append(report)
        self._tell(run, self._config.hook.pytest_runtest_logreport, report=report)
        if report.failed and self._config.option.maxfail and not self._sanitizes:
            self._flush(run)

    def _let_go(self, run: _Run) -> None:
        """Report the end of the last test."""
        for report in run.held:
            self._report(run, report)
            finish: Any = self._config.hook.pytest_runtest_logfinish
            self._tell(run, finish, nodeid=report.nodeid, location=report.location)
        run.held.clear()

    def _tell(self, run: _Run, hook: Callable[..., object], *, begins: bool = False, **fields: object) -> None:
        """Queue a hook call. Make it at once unless another group has its turn: modules' output must not mix."""
        run.events.append((begins, partial(hook, **fields)))
        if self._speaker is None and not self._sanitizes:
            self._speaker = run
        if self._speaker is run:
            self._flush(run)

    def _flush(self, run: _Run) -> None:
        while run.events:
            begins, event = run.events.popleft()
            if begins and (self._session.shouldfail or self._session.shouldstop):
                run.events.clear()
                return
            event()

    def _finish(self, run: _Run) -> None:
        """Report the end of a group, and give the next group its turn if this one had it."""
        run.over = True
        if self._speaker is None or self._speaker is run:
            for other in self._runs:
                if other.over:
                    self._flush(other)
            self._speaker = None
            if not self._sanitizes:
                self._speaker = next((other for other in self._runs if other.events), None)
            if self._speaker is not None:
                self._flush(self._speaker)


def _host(config: pytest.Config) -> Here | Fleet:
    if config.option.kqueue_fleet:
        from workers.testing.fleet import Fleet

        return Fleet(config)
    from workers.testing.host import Here

    return Here(config)


def _named(run: _Run, name: str) -> pytest.Item:
    """Return a test of a group by its node id, or raise KeyError."""
    for item in run.whole.items:
        if item.nodeid == name:
            return item
    raise KeyError(name)


def _report(
    item: pytest.Item, phase: _Phase, outcome: Literal["passed", "failed"], text: str | None = None
) -> pytest.TestReport:
    now = time.time()
    keywords: dict[str, Any] = dict.fromkeys(item.keywords, 1)
    return pytest.TestReport(item.nodeid, item.location, keywords, outcome, text, phase, start=now, stop=now)


def _and_said(why: str, job: Running) -> str:
    return f"{why}\n{job.last_words}".rstrip()
