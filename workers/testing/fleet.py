"""The hosts of a fleet, which run a group's tests as an evaluation in a sealed process, with reports in the verdict.

Like other evaluations they have a position in the queue, a lease, further attempts after failures of the fleet, and
one verdict.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any, Final
from uuid import UUID, uuid4

import pytest

from kqueue import trees
from kqueue.backends import PYTEST
from kqueue.categories import Blame, Category
from kqueue.client import Ticket, connect
from kqueue.contract import TESTS_LINE, Phase, Verdict, parse_request
from kqueue.errors import ConfigError, KqueueError, UnknownProblem
from workers.testing import claims, groups, sanitizer
from workers.testing.groups import Group, named
from workers.testing.host import without_frames

#: Default limit on the number of groups that are submitted and not finished.
_AT_ONCE: Final = 64
#: Limit on one test in seconds, because other evaluations wait for its device.
_MOST_S: Final = 600.0
#: Seconds of a device's time, and bytes of messages, after which a process hands the remaining tests to another one.
_RENEW_S: Final = 240.0
_RENEW_BYTES: Final = 256 << 10
#: Approximate limit on the bytes of its messages, below the judge's limit (:mod:`workers.judge.pipeline.pytest_run`).
_SAID_BYTES: Final = 1536 << 10
#: The sender's environment variables for pytest. All other variables are the host's.
_CARRIED: Final = ("PYTEST_ADDOPTS", "PYTEST_PLUGINS", "PYTEST_DISABLE_PLUGIN_AUTOLOAD")
#: Options that name the sender's folders.
_FOLDERS: Final = frozenset({"basetemp", "confcutdir", "inifilename", "rootdir"})
_LABEL: Final = 200
#: The path of the repository's files on a host (:mod:`workers.judge.candidate.tester`) in a process's output. The group
#: is the text directly before it. The lookbehind makes a match begin only at the start of a run of such characters, so
#: that a log full of slashes does not take quadratic time.
_THERE: Final = re.compile(r"(?<![\w./-])([\w.-]*)/[\w./-]+/[0-9a-f]{32}/repository(?=/)")
#: End of a verdict's message about a phase that took too long. The limit on a process's total time has another message.
_PHASE_S: Final = "did not end within its deadline"


class Fleet:
    """The runner of processes with tests on a fleet."""

    def __init__(self, config: pytest.Config) -> None:
        """Pack the repository's files without contacting the fleet."""
        option, rootdir, inifile = config.option, config.rootpath.resolve(), config.inipath
        lane, sanitizing, timeout_s = option.kqueue_lane, option.kqueue_sanitize, option.kqueue_timeout or math.inf
        if sanitizing and lane == "cpu":
            raise ConfigError("--kqueue-sanitize: compute-sanitizer needs a GPU: choose another lane than cpu")
        if timeout_s > _MOST_S:
            raise ConfigError(f"--kqueue-timeout: on a fleet at most {_MOST_S:g} s, because other evaluations wait")
        self._root = trees.find(rootdir)
        self._cwd = config.invocation_params.dir.resolve()
        if not self._cwd.is_relative_to(self._root):
            raise ConfigError(f"--kqueue-fleet: start pytest within {self._root}, whose files are sent")
        self._client = connect(option.kqueue_url)
        self._archive = trees.packed_tests(self._root)
        self._stored = ""
        self._options = [f"--rootdir={rootdir}"]
        if inifile is not None and inifile.resolve().is_relative_to(self._root):
            self._options += ["-c", str(inifile.resolve())]
        self._timeout_s = timeout_s
        self._lane = "gpu" if sanitizing and lane == "auto" else lane
        self._room = option.kqueue_slots or _AT_ONCE
        self._batch = f"pytest-{uuid4().hex}"
        #: Number of groups whose submission has begun and whose end is not known.
        self._open = 0
        self._over: set[UUID] = set()
        size = len(self._archive) / 2**20
        self.words = f"up to {self._room} at once, on a fleet (batch {self._batch}, {size:.1f} MiB)"

    def open(self, order: dict[str, Any], folder: Path) -> None:  # noqa: ARG002
        """Prepare a run with the shared fields of :class:`~workers.testing.groups.Order`."""
        options = {name: value for name, value in order["options"].items() if name not in _FOLDERS}
        options["log_file"] = os.devnull  # its folder can be one where no test can write
        searched = [path for path in order["searched"] if Path(path).resolve().is_relative_to(self._root)]
        self._order = order | {
            "args": [*self._options, *order["args"]],
            "options": options,
            "searched": searched,
            "renew_s": _RENEW_S,
            "renew_bytes": _RENEW_BYTES,
            "said_bytes": _SAID_BYTES,
            "stacks_s": self._timeout_s,
            groups.ROOT: str(self._root),
            groups.STARTED_IN: str(self._cwd.relative_to(self._root)),
            groups.ENVIRONMENT: {name: os.environ[name] for name in _CARRIED if name in os.environ},
        }

    def has_room(self) -> bool:
        """Return whether another group can be submitted now."""
        return self._open < self._room

    def start(self, group: Group, *, sanitized: bool) -> Evaluation:
        """Submit a group's tests."""
        for item in group.items:
            if not item.path.resolve().is_relative_to(self._root):
                raise ConfigError(f"{item.path} does not lie in {self._root}, whose files are sent")
        slower, order = sanitizer.SLOWDOWN if sanitized else 1, self._order | named(group)
        timeout_s = min(self._timeout_s * slower, _MOST_S)
        if sanitized:  # one process runs as many of the tests as its time allows
            order |= {"renew_s": None, "renew_bytes": None, "stacks_s": None}
        fields: dict[str, Any] = {
            "kernel": TESTS_LINE + json.dumps(order),
            "backend": PYTEST,
            "lane": self._lane,
            "problem_label": self._root.name[:_LABEL] or None,
            "kernel_label": group.name[:_LABEL],
            "batch": self._batch,
            "reuse": False,
            "settings": {
                "timing": {"purpose": "check"},
                "examine": {"sanitize": ["memcheck"] if sanitized else []},
                "deadlines": {"load_s": _MOST_S, "check_s": timeout_s},
                "limits": {"output_bytes": 1 << 30, "processes": 4096},
            },
        }
        self._open += 1
        return Evaluation(self._submit(fields), self._root, timeout_s, sanitized=sanitized)

    def over(self, job: Any) -> None:
        """Note a group's end."""
        if not job.cancelled:
            self._open -= 1
            self._over.add(job.ticket.evaluation_id)

    def close(self) -> None:
        """Cancel all unfinished groups, including groups whose submission was interrupted after it was accepted."""
        # If the fleet is away, the groups end by themselves.
        with contextlib.suppress(KqueueError), contextlib.closing(self._client):
            for ticket in self._client.batch(self._batch) if self._open else ():
                if ticket.evaluation_id not in self._over:
                    ticket.cancel()

    def _submit(self, fields: dict[str, Any]) -> Ticket:
        """Submit a group. Only the first one includes the repository's files, which the fleet then stores."""
        if self._stored:
            with contextlib.suppress(UnknownProblem):  # the fleet has removed the files, which no evaluation used
                return self._client.submit(parse_request(fields | {"problem": self._stored}))
        request = parse_request(fields | {"problem": self._archive})
        ticket = self._client.submit(request)
        self._stored = request.problem_name
        return ticket


class Evaluation:
    """A process with a group's tests on a fleet.

    All messages come with the verdict, so the messages of attempts that failed because of the fleet are lost.

    Attributes:
        cancelled: whether :meth:`end` was called.
        sanitized: whether it runs under compute-sanitizer.
        overdue: whether it was ended because a test took too long.
        limit_s: limit on a test in seconds.
        status: its exit status, negative for a signal. None while it runs, or if it is unknown.
        why: the way in which it was ended if the status does not show it, or empty.
        unrun: the reason outside of the tests why they did not run, or empty. Then it has sent no messages.
        last_words: the end of its output.
        findings: the findings of compute-sanitizer as a text.
    """

    sources = ()

    def __init__(self, ticket: Ticket, root: Path, timeout_s: float, *, sanitized: bool) -> None:
        """Begin to wait for a submitted evaluation of tests of the repository in the folder ``root``."""
        self.sanitized = sanitized
        self.findings = ""
        self.ticket = ticket
        self.cancelled = False
        self.overdue = False
        self.limit_s = timeout_s
        self.status: int | None = None
        self.why = self.unrun = self.last_words = ""
        self._root = root
        self._future: Future[Verdict] = ticket.watch()
        self._verdict: Verdict | None = None
        self._words: list[dict[str, Any]] = []
        self._printed = b""

    def watch(self) -> bool:
        """Return whether it has a verdict or was cancelled."""
        if self._verdict is None and not self.cancelled and self._future.done():
            self._verdict = self._future.result()
            self._conclude(self._verdict)
        return self.cancelled or self._verdict is not None

    def heard(self) -> Iterator[dict[str, Any]]:
        """Yield the process's messages once there is a verdict."""
        messages, self._words = self._words, []
        yield from messages

    def output(self) -> bytes:
        """Return the end of the process's output once there is a verdict."""
        printed, self._printed = self._printed, b""
        return printed

    def end(self) -> None:
        """Stop waiting for it. :meth:`Fleet.close` cancels it."""
        self.cancelled = True
        self._future.cancel()

    def close(self) -> None:
        """Do nothing."""

    def _conclude(self, verdict: Verdict) -> None:
        log = claims.shown(here(verdict.log, self._root))
        self._printed, self.last_words = log.encode(), without_frames(log)
        summary = f"{verdict.category}: {claims.shown(verdict.message)}"
        if verdict.blame in (Blame.FLEET, Blame.NOBODY):
            self.unrun = self.findings = summary
            return
        self._words = words(verdict)
        status, ended_well = verdict.facts.status, verdict.category in (Category.PASSED, Category.TESTS_FAILED)
        if ended_well:
            # The judge has checked that the process ended with this status.
            self.status = _last_status(self._words)
        elif verdict.category is Category.CRASHED and status is not None:
            self.status = os.waitstatus_to_exitcode(status)
        elif verdict.category is Category.TIMEOUT and _in_a_test(verdict, self._words):
            self.overdue = True
        else:
            self.why = f"was ended: {claims.shown(verdict.message)}"
        raw = sanitizer.shown(verdict.evidence.tests.findings or "") if verdict.evidence.tests is not None else ""
        findings = claims.shown(raw)
        self.findings = findings if ended_well or self.overdue else f"{summary}\n{findings}".rstrip()


def here(log: str, root: Path) -> str:
    """Return a remote process's output with the repository's remote path replaced by its path on this host."""
    return _THERE.sub(lambda path: f"{path[1]}{root}", log)


def _last_status(messages: list[dict[str, Any]]) -> int | None:
    """Return the status in the last message ``end``, which the judge has compared with the process's exit."""
    for message in reversed(messages):
        match message:
            case {"at": "end", "status": status, "fault": _} if claims.is_number(status):
                return status
            case _:
                pass
    return None


def _in_a_test(verdict: Verdict, messages: list[dict[str, Any]]) -> bool:
    """Return whether a single test took too long, and not the time between tests or their total."""
    last = next((message["at"] for message in reversed(messages) if message["at"] in ("start", "finish")), "")
    return verdict.phase is Phase.CHECK and last == "start" and _PHASE_S in verdict.message


def words(verdict: Verdict) -> list[dict[str, Any]]:
    """Return the valid messages of a process. Foreign code can have sent invalid ones."""
    messages: list[dict[str, Any]] = []
    for line in (verdict.evidence.tests.words if verdict.evidence.tests else "").splitlines():
        with contextlib.suppress(ValueError, RecursionError):
            message = json.loads(line)
            if isinstance(message, dict) and isinstance(message.get("at"), str):
                messages.append(claims.cleaned(message))
    return messages
