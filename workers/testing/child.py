"""``python -m workers.testing.child ORDER SAID``: pytest on the tests of one group; it says on a socket what happens.

It is given the command line of the controlling pytest, so it has the same root folder, settings, conftests and plugins,
and another choice of tests. What pytest would print, write to its cache and to files is the controlling pytest's to do.

What it says are objects with a field ``at``:

=========  =================================================================================
capture    the files in which pytest captures output come beside it
start      a test begins: ``nodeid``, ``location``
report     ``data``: the report of a phase, as pytest makes it for other processes
finish     a test is over: ``nodeid``, ``location``
warning    a warning that a test caused: ``nodeid``, ``warning``
wait       ``on``: whether it waits for the device, which a fleet uses
lost       ``words``: why no test can be run
renew      the tests that are left need another process: a CUDA context is broken, or this one has had its share
stop       a test or plugin ends the run. ``how``: exit, stop, fail (``session.shouldfail``) or interrupt (Ctrl-C's
           exception); ``reason``; ``status``: the exit status that it wants, or null
end        ``status``: pytest's exit status; ``enough``: whether it stopped at as many failures as were allowed;
           ``fault``: what is wrong with the process after its last test, or empty
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

from workers.judge.channel.lines import say
from workers.judge.host.exclusive import room
from workers.judge.host.turns import turn
from workers.testing import context
from workers.testing.groups import Order
from workers.testing.plugin import UNLOCKED

#: Plugins of pytest that choose tests by what is in its cache: the controlling pytest's do it.
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
    # The controlling pytest has emptied it.
    "log_file_mode": "a",
}


#: The longest report of a process that has a limit on what it says, in characters, and what it may always have.
_LONGEST: Final = 128 << 10
_SHORTEST: Final = 4 << 10
#: The part of what is left to be said that one report may take, and the part of all from which on no warning is said.
_SHARE: Final = 4
#: What is kept of each text of a longer one, at first and in the end: the end of output, the beginning of what failed.
_KEPT: Final = 16 << 10
_LEAST: Final = 64
#: Of a list one entry is kept for so many characters of a text. All that pytest reads as tuples is shorter than four.
_CHARACTERS: Final = 16
#: The fields of a report that is long in all others.
_BARE: Final = frozenset(
    {"$report_type", "nodeid", "location", "outcome", "when", "duration", "start", "stop", "longrepr", "wasxfail"}
)


def main(order: Order, said: int) -> int:
    """Run the tests, say on a socket's descriptor what happens, and return pytest's exit status."""
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
    """The plugin in a job's process.

    Attributes:
        modules: the tests' modules.
        enough: True if pytest stopped at as many failures as were allowed.
    """

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
        self.enough = False

    def say(self, at: str, *, beside: tuple[int, ...] = (), **what: Any) -> None:
        """Tell the controlling pytest, from this process alone: a test may fork and go on in both."""
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

    def _has_had_its_share(self) -> bool:
        most_s, most_bytes = self._order.renew_s or math.inf, self._order.renew_bytes or math.inf
        return time.monotonic() - self._began > most_s or self._nbytes > most_bytes

    @contextlib.contextmanager
    def _showing_stacks(self) -> Generator[None]:
        """Show where the process is if the block takes too long; whoever ends it then cannot."""
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
        """Use the devices, while nobody times on them, and no kernel that is suspected of breaking them is judged."""
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

    # What pytest calls -----------------------------------------------------------------------------------

    @pytest.hookimpl(tryfirst=True)
    def pytest_cmdline_main(self, config: pytest.Config) -> None:
        """Choose other tests than the command line does, before any plugin looks."""
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
            reporter = config.pluginmanager.unregister(name=_REPORTER)
            config.pluginmanager.register(_Untold(reporter), _REPORTER)

    def pytest_sessionstart(self, session: pytest.Session) -> None:
        """Say where output is captured, which is lost with this process where nobody else has the files open."""
        manager: Any = session.config.pluginmanager.getplugin("capturemanager")
        with contextlib.suppress(AttributeError, OSError):  # pytest -s, or a pytest that keeps them elsewhere
            capturing = manager._global_capturing
            self.say("capture", beside=tuple(one.tmpfile.fileno() for one in (capturing.out, capturing.err)))

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_collection(self) -> Generator[None, Any, Any]:
        with self.devices():
            return (yield)

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        """Keep the tests of the group, in its order."""
        found: dict[str, list[pytest.Item]] = {}
        for item in items:
            found.setdefault(item.nodeid, []).append(item)
        items[:] = [found[name].pop(0) for name in self._order.tests if found.get(name)]
        modules = {id(module): module for item in items if (module := getattr(item, "module", None)) is not None}
        self.modules = list(modules.values())

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self.say(
                "lost", words=f"{report.nodeid} could not be collected in a process of its own:\n{report.longreprtext}"
            )

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, Any, Any]:
        with (
            contextlib.nullcontext() if item.get_closest_marker(UNLOCKED) else self.devices(),
            self._showing_stacks(),
        ):
            done = yield
        if not self._stopped and self._has_had_its_share():
            self._renew(item.session, "other processes run the rest")
        return done

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_teardown(self, item: pytest.Item) -> Generator[None, Any, Any]:
        """Look at the contexts after each test, so that the test is named that broke one."""
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
        # The terminal's reporter asks it in other runs, and what is asked may change the report, as for subtests.
        self._config.hook.pytest_report_teststatus(report=report, config=self._config)
        data = self._config.hook.pytest_report_to_serializable(config=self._config, report=report)
        self._failed += report.failed
        if self._failed >= (self._config.option.maxfail or math.inf):
            _ignore_interrupts()
        self.say("report", data=data)

    def pytest_runtest_logfinish(self, nodeid: str, location: Any) -> None:
        self.say("finish", nodeid=nodeid, location=location)

    def pytest_warning_recorded(self, warning_message: Any, when: str, nodeid: str) -> None:
        if when == "runtest":  # others were seen when the controlling pytest collected
            kind, source = warning_message.category, warning_message.line
            if source is None:  # the controlling pytest, which prints it, opens no file by a name that it is told
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
        """Leave the tests that are left to another process."""
        self._stopped = True
        session.shouldstop = why
        self.say("renew")

    def _stop(self, how: str, reason: str, status: int | None = None) -> None:
        _ignore_interrupts()
        with contextlib.suppress(BrokenPipeError):  # it is gone itself
            self.say("stop", how=how, reason=reason, status=status)


def _ignore_interrupts() -> None:
    """Tear fixtures down undisturbed, as the controlling pytest ends all processes for what it is told next."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def bounded(line: str, most: int) -> str:
    """Return a word, with less and less of its texts and lists until it is not longer than that, where that can be."""
    if len(line) <= most:
        return line
    word, shorter, kept = json.loads(line), line, _KEPT
    while len(shorter) > most and kept >= _LEAST:
        shorter = json.dumps(_shortened(word, kept))
        kept //= 2
    if len(shorter) > most and word["at"] == "report":
        shorter = json.dumps(word | {"data": _bare(_shortened(word["data"], _LEAST))})
    return shorter


def _shortened(value: Any, kept: int) -> Any:
    """Return what is to be said with the end of each output, and the beginning of every other text.

    Of long lists, such as the lines of a comparison, the beginning and the end are kept.
    """
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
    """Return the data of a report with nothing but what it must have."""
    found = {name: inner for name, inner in data.items() if name in _BARE} | {"keywords": {}, "sections": []}
    if isinstance(found["longrepr"], dict):
        crash = found["longrepr"].get("reprcrash") or {}
        found["longrepr"] = f"{crash.get('message', '')}\n... and more than a report may have"
    return found


class _Untold:
    """The terminal's reporter for whoever asks for it, as pytest does for how to print; no event comes to it."""

    def __init__(self, reporter: Any) -> None:
        self._reporter = reporter

    def __getattr__(self, name: str) -> Any:
        return getattr(self._reporter, name)


if __name__ == "__main__":
    sys.exit(main(Order.read(Path(sys.argv[1])), int(sys.argv[2])))
