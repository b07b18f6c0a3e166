"""``python -m workers.testing.child ORDER SAID``: run pytest on the tests of one group, and report on a socket.

It gets the command line of the controlling pytest, so it has the same root folder, settings, conftests and plugins, but
runs only its group's tests. The controlling pytest does all printing and writes the cache and the report files.

Its messages are objects with a field ``at``:

=========  =================================================================================
capture    The files in which pytest captures output are passed with it as descriptors.
start      A test begins: ``nodeid``, ``location``.
report     ``data`` is the report of a phase, serialized by pytest.
finish     A test is over: ``nodeid``, ``location``.
warning    A test caused a warning: ``nodeid``, ``warning``.
wait       ``on`` is true while it waits for the device, which a fleet uses.
lost       ``words`` is the reason why no test can be run.
renew      The remaining tests need another process, because a CUDA context is broken or this process has used up
           its time or output.
stop       A test or plugin ends the run. ``how`` is exit, stop, fail (``session.shouldfail``) or interrupt (Ctrl-C's
           exception). ``reason`` is its text, and ``status`` the requested exit status or null.
end        ``status`` is pytest's exit status. ``enough`` is true if it stopped at the limit on failures. ``fault`` is
           the process's fault after its last test, or empty.
=========  =================================================================================
"""

from __future__ import annotations

import contextlib
import faulthandler
import fcntl
import json
import linecache
import math
import os
import signal
import sys
import time
from collections.abc import Generator
from contextlib import ExitStack
from pathlib import Path
from types import ModuleType
from typing import Any, Final, cast

import pytest

from kqueue.pytest_plugin import UNLOCKED
from workers.judge.channel.lines import say
from workers.judge.host.exclusive import room
from workers.judge.host.turns import turn
from workers.testing import context
from workers.testing.groups import Order

#: Plugins of pytest that choose tests by its cache, which only the controlling pytest must do.
_CHOOSING: Final = ("lfplugin", "nfplugin", "stepwiseplugin")
#: The plugin of pytest that prints.
_REPORTER: Final = "terminalreporter"
#: Options that choose tests, write files or limit the run.
_UNSET: Final = {
    "kqueue": False,
    "keyword": "",
    "markexpr": "",
    "deselect": None,
    "lf": False,
    "failedfirst": False,
    "newfirst": False,
    "stepwise": False,
    "stepwise_skip": False,
    "stepwise_reset": False,
    "cacheclear": False,
    "cacheshow": None,
    "xmlpath": None,
    "pastebin": None,
    "keepduplicates": True,
    "pyargs": False,
    # The controlling pytest has emptied the log file.
    "log_file_mode": "a",
}


#: Upper and lower bound in characters on the limit of one message, for a process whose total output is limited.
_LONGEST: Final = 128 << 10
_SHORTEST: Final = 4 << 10
#: Divisor of limits: one message gets at most a fourth of the remaining output, and warnings are dropped after a fourth
#: of the total.
_SHARE: Final = 4
#: Characters kept of each text of a message that is too long, at first and at least. Of output the end is kept, of
#: other texts the beginning.
_KEPT: Final = 16 << 10
_LEAST: Final = 64
#: Characters of a text per kept entry of a list. With ``_LEAST`` four entries are kept, more than pytest's tuples have.
_CHARACTERS: Final = 16
#: The fields that a report keeps if shortening its texts is not enough.
_BARE: Final = frozenset(
    {"$report_type", "nodeid", "location", "outcome", "when", "duration", "start", "stop", "longrepr", "wasxfail"}
)


def main(order: Order, said: int) -> int:
    """Run the tests, report on the socket with descriptor ``said``, and return pytest's exit status."""
    sys.path[:] = order.searched
    sys.argv[:] = [order.program, *order.args]
    os.set_inheritable(said, False)
    child = _Child(order, said)
    status = int(pytest.main(list(order.args), plugins=[child]))
    with child.devices():
        fault = context.unload(child.modules)
    child.say("end", status=status, enough=child.enough, fault=fault)
    return status


class _Child:
    """The plugin in a job's process."""

    def __init__(self, order: Order, said: int) -> None:
        self._order = order
        self._said = said
        self._pid = os.getpid()
        self._began = time.monotonic()
        self._nbytes = 0
        self._stderr = os.dup(2)  # before pytest captures it
        self._config: pytest.Config
        self._stopped = False
        self._failed = 0
        self.modules: list[ModuleType] = []
        #: Whether pytest stopped at the limit on failures.
        self.enough = False

    def say(self, at: str, *, beside: tuple[int, ...] = (), **what: Any) -> None:
        """Send a message to the controlling pytest. Forks of this process, which a test can make, send none."""
        if os.getpid() != self._pid:
            return
        line = json.dumps({"at": at, **what}, default=str)
        if (most := self._order.said_bytes) is not None:
            left = most - self._nbytes
            if at == "warning" and self._nbytes > most // _SHARE:
                return
            line = bounded(line, max(min(left // _SHARE, _LONGEST), _SHORTEST))
        if self._order.paths is not None:
            here, there = (json.dumps(path)[1:-1] for path in self._order.paths)
            line = line.replace(here, there)
        self._nbytes += len(line)
        say(self._said, line.encode(), beside)

    def _is_used_up(self) -> bool:
        most_s, most_bytes = self._order.renew_s or math.inf, self._order.renew_bytes or math.inf
        return time.monotonic() - self._began > most_s or self._nbytes > most_bytes

    @contextlib.contextmanager
    def _showing_stacks(self) -> Generator[None]:
        """Print stacks if the block takes too long, because the process that ends this one cannot print them."""
        if self._order.stacks_s is None:
            yield
            return
        faulthandler.dump_traceback_later(self._order.stacks_s, file=self._stderr)
        try:
            yield
        finally:
            faulthandler.cancel_dump_traceback_later()

    @contextlib.contextmanager
    def devices(self) -> Generator[None]:
        """Share the devices with judges. Timings, and kernels that need a device exclusively, wait meanwhile."""
        if not self._order.locks:
            yield
            return
        with ExitStack() as stack:
            self.say("wait", on=True)
            for lock in map(Path, self._order.locks):
                stack.enter_context(room(lock, alone=False, patience_s=math.inf))
                stack.enter_context(turn(lock, fcntl.LOCK_SH))
            self.say("wait", on=False)
            yield

    # Hooks of pytest -------------------------------------------------------------------------------------

    @pytest.hookimpl(tryfirst=True)
    def pytest_cmdline_main(self, config: pytest.Config) -> None:
        """Replace the command line's choice of tests before any plugin reads it."""
        self._config = config
        for name, value in {**self._order.options, **_UNSET, "basetemp": self._order.basetemp}.items():
            if hasattr(config.option, name):
                setattr(config.option, name, value)
        config.args[:] = self._order.files

    @pytest.hookimpl(trylast=True)
    def pytest_configure(self, config: pytest.Config) -> None:
        for name in _CHOOSING:
            if config.pluginmanager.hasplugin(name):
                config.pluginmanager.unregister(name=name)
        if config.pluginmanager.hasplugin(_REPORTER):
            config.pluginmanager.register(_Silenced(config.pluginmanager.unregister(name=_REPORTER)), _REPORTER)

    def pytest_sessionstart(self, session: pytest.Session) -> None:
        """Pass on the files with captured output, which would be lost with this process if no other had them open."""
        manager: Any = session.config.pluginmanager.getplugin("capturemanager")
        with contextlib.suppress(AttributeError, OSError):  # pytest -s, or a pytest with other attributes
            capturing = manager._global_capturing
            self.say("capture", beside=tuple(one.tmpfile.fileno() for one in (capturing.out, capturing.err)))

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_collection(self) -> Generator[None, Any, Any]:
        with self.devices():
            return (yield)

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        """Select the tests of the group, in its order."""
        by_id: dict[str, list[pytest.Item]] = {}
        for item in items:
            by_id.setdefault(item.nodeid, []).append(item)
        items[:] = [by_id[name].pop(0) for name in self._order.tests if by_id.get(name)]
        modules = {id(module): module for item in items if (module := getattr(item, "module", None)) is not None}
        self.modules = list(modules.values())

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self.say(
                "lost", words=f"{report.nodeid} could not be collected in a separate process:\n{report.longreprtext}"
            )

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, Any, Any]:
        with contextlib.nullcontext() if item.get_closest_marker(UNLOCKED) else self.devices(), self._showing_stacks():
            done = yield
        if not self._stopped and self._is_used_up():
            self._renew(item.session, "other processes run the rest")
        return done

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_teardown(self, item: pytest.Item) -> Generator[None, Any, Any]:
        """Check the contexts after each test, so that the test which broke one fails."""
        try:
            return (yield)
        finally:
            if not self._stopped and (fault := context.fault()):
                self._renew(item.session, "a CUDA context is broken")
                pytest.fail(f"{item.nodeid} left the CUDA context of its process broken: {fault}", pytrace=False)

    def pytest_runtest_logstart(self, nodeid: str, location: Any) -> None:
        self.say("start", nodeid=nodeid, location=location)

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        # The terminal's reporter calls this hook in other runs, and the hook can change the report, as for subtests.
        self._config.hook.pytest_report_teststatus(report=report, config=self._config)
        data = self._config.hook.pytest_report_to_serializable(config=self._config, report=report)
        self._failed += report.failed
        if self._failed >= (self._config.option.maxfail or math.inf):
            _ignore_interrupts()
        self.say("report", data=data)

    def pytest_runtest_logfinish(self, nodeid: str, location: Any) -> None:
        self.say("finish", nodeid=nodeid, location=location)

    def pytest_warning_recorded(self, warning_message: Any, when: str, nodeid: str) -> None:
        if when == "runtest":  # the controlling pytest got all other warnings when it collected
            kind, source = warning_message.category, warning_message.line
            if source is None:  # the controlling pytest prints it, and opens no file by a name from a message
                source = linecache.getline(warning_message.filename, warning_message.lineno)
            warning = {
                "module": kind.__module__,
                "name": kind.__qualname__,
                "words": str(warning_message.message),
                "file": warning_message.filename,
                "line": warning_message.lineno,
                "source": source,
            }
            self.say("warning", nodeid=nodeid, warning=warning)

    def pytest_keyboard_interrupt(self, excinfo: pytest.ExceptionInfo[BaseException]) -> None:
        if isinstance(excinfo.value, pytest.exit.Exception):
            self._stop("exit", excinfo.value.msg, excinfo.value.returncode)
        elif not isinstance(excinfo.value, pytest.Session.Interrupted):
            self._stop("interrupt", str(excinfo.getrepr(style="short").reprcrash))

    def pytest_internalerror(self, excrepr: Any) -> None:
        self.say("lost", words=f"pytest itself failed in the process of the tests:\n{excrepr}")

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        allowed = session.config.option.maxfail
        self.enough = bool(allowed) and session.testsfailed >= allowed
        if session.shouldfail and not self.enough:
            self._stop("fail", str(session.shouldfail))
        elif session.shouldstop and not self._stopped:
            self._stop("stop", str(session.shouldstop))

    def _renew(self, session: pytest.Session, why: str) -> None:
        """Hand the remaining tests to another process."""
        self._stopped = True
        session.shouldstop = why
        self.say("renew")

    def _stop(self, how: str, reason: str, status: int | None = None) -> None:
        _ignore_interrupts()
        with contextlib.suppress(BrokenPipeError):  # the controlling pytest is gone
            self.say("stop", how=how, reason=reason, status=status)


def _ignore_interrupts() -> None:
    """Protect the teardown of fixtures, because the controlling pytest ends all processes after the next message."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def bounded(line: str, most: int) -> str:
    """Return a message with its texts and lists shortened until it has at most ``most`` characters, if possible."""
    if len(line) <= most:
        return line
    message, shorter, kept = json.loads(line), line, _KEPT
    while len(shorter) > most and kept >= _LEAST:
        shorter = json.dumps(_shortened(message, kept))
        kept //= 2
    if len(shorter) > most and message["at"] == "report":
        shorter = json.dumps(message | {"data": _bare(_shortened(message["data"], _LEAST))})
    return shorter


def _shortened(value: Any, kept: int) -> Any:
    """Return a value with the end of each output, the beginning of other texts, and both ends of long lists."""
    match value:
        case str():
            return value if len(value) <= kept else f"{value[:kept]}\n... and {len(value) - kept} characters more"
        case dict():
            named = cast("dict[str, Any]", value)
            return {
                name: [[_shortened(title, kept), text[-kept:], *rest] for title, text, *rest in inner][-kept // 256 :]
                if name == "sections"
                else inner
                if name == "nodeid"
                else _shortened(inner, kept)
                for name, inner in named.items()
            }
        case list():
            entries = cast("list[Any]", value)
            half = kept // _CHARACTERS // 2
            if len(entries) > 2 * half:
                more = [f"... and {len(entries) - 2 * half} lines more"] if isinstance(entries[half], str) else []
                entries = [*entries[:half], *more, *entries[-half:]]
            return [_shortened(inner, kept) for inner in entries]
        case _:
            return value


def _bare(data: dict[str, Any]) -> dict[str, Any]:
    """Return a report's data with only the fields that pytest requires."""
    bare = {name: inner for name, inner in data.items() if name in _BARE} | {"keywords": {}, "sections": []}
    if isinstance(bare["longrepr"], dict):
        crash = bare["longrepr"].get("reprcrash") or {}
        bare["longrepr"] = f"{crash.get('message', '')}\n... and more than fits into a report"
    return bare


class _Silenced:
    """A stand-in for the terminal's reporter with its attributes, which pytest reads, but without its hooks."""

    def __init__(self, reporter: Any) -> None:
        self._reporter = reporter

    def __getattr__(self, name: str) -> Any:
        return getattr(self._reporter, name)


if __name__ == "__main__":
    sys.exit(main(Order.read(Path(sys.argv[1])), int(sys.argv[2])))
