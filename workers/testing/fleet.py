"""The hosts of a fleet, which run tests as evaluations: a group's in one sealed process, its reports in the verdict.

So they have what evaluations have: a place in the queue, a lease, other tries when the fleet fails, and one end.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final
from uuid import UUID, uuid4

from kqueue.categories import Blame, Category
from kqueue.client import Client
from kqueue.client.remote import RemoteClient
from kqueue.contract import TESTS_LINE, Backend, Phase, Verdict, parse_request
from kqueue.errors import ConfigError, KqueueError, UnknownProblem
from workers.testing import claims, repository, sanitizer, sealed
from workers.testing.groups import Group, named
from workers.testing.job import without_frames

if TYPE_CHECKING:
    from kqueue.client.ticket import Ticket

#: Groups that are with the fleet at once, unless it is told otherwise.
_AT_ONCE: Final = 64
#: The most seconds for one test: nobody waits longer for its device.
_MOST_S: Final = 600.0
#: What a process may use of a device's time, and say, before it gives the tests that are left to another.
_RENEW_S: Final = 240.0
_RENEW_BYTES: Final = 256 << 10
#: About how much it may say in all, which is less than a judge listens to (:mod:`workers.judge.pipeline.pytest_run`).
_SAID_BYTES: Final = 1536 << 10
#: Variables of the sender's that pytest reads. Others are the host's.
_CARRIED: Final = ("PYTEST_ADDOPTS", "PYTEST_PLUGINS", "PYTEST_DISABLE_PLUGIN_AUTOLOAD")
#: Options that name the sender's folders.
_FOLDERS: Final = frozenset({"basetemp", "confcutdir", "inifilename", "rootdir"})
_LABEL: Final = 200
#: The folder of the repository's files on a host (:mod:`workers.judge.candidate.tester`), as a process prints it, with
#: what stands before it. It is looked for once in a run of such characters, as a log may consist of slashes.
_THERE: Final = re.compile(r"(?<![\w./-])([\w.-]*)/[\w./-]+/[0-9a-f]{32}/repository(?=/)")
#: How a verdict says that a phase took too long. Of the limit for all of a process's tests it says something else.
_PHASE_S: Final = "did not end within its deadline"


class Fleet:
    """A fleet, which runs tests.

    Attributes:
        words: what the header says of it.
    """

    def __init__(
        self,
        slots: int | None,
        *,
        url: str | None,
        lane: str,
        rootdir: Path,
        inifile: Path | None,
        cwd: Path,
        timeout_s: float,
        sanitizing: bool,
    ) -> None:
        """Pack the repository's files; the fleet is asked later.

        Args:
            slots: the most groups that are with the fleet at once.
            url: of `kqueue serve`; by default the environment's fleet.
            lane: where they run.
            rootdir: pytest's.
            inifile: the file of pytest's settings, where there is one.
            cwd: the folder that pytest was started in.
            timeout_s: most seconds for a test.
            sanitizing: whether tests are to be run under compute-sanitizer.

        Raises:
            ConfigError: no fleet is known, the files are too many or too large, or a limit or the lane does not do.
        """
        if sanitizing and lane == "cpu":
            raise ConfigError("--kqueue-sanitize: compute-sanitizer needs a GPU: choose another lane than cpu")
        if timeout_s > _MOST_S:
            raise ConfigError(f"--kqueue-timeout: on a fleet at most {_MOST_S:g} s, as others wait for the device")
        rootdir = rootdir.resolve()
        self._root = repository.find(rootdir)
        self._cwd = cwd.resolve()
        if not self._cwd.is_relative_to(self._root):
            raise ConfigError(f"--kqueue-fleet: start pytest within {self._root}, whose files are sent")
        self._client = Client() if url is None else RemoteClient(url)
        self._archive = repository.packed(self._root)
        self._stored = ""
        self._options = [f"--rootdir={rootdir}"]
        if inifile is not None and inifile.resolve().is_relative_to(self._root):
            self._options += ["-c", str(inifile.resolve())]
        self._timeout_s = timeout_s
        self._lane = "gpu" if sanitizing and lane == "auto" else lane
        self._room = slots or _AT_ONCE
        self._batch = f"pytest-{uuid4().hex}"
        #: Groups whose submission has begun and whose end is not known.
        self._open = 0
        self._over: set[UUID] = set()
        size = len(self._archive) / 2**20
        self.words = f"up to {self._room} at once, on a fleet (batch {self._batch}, {size:.1f} MiB)"

    def open(self, order: dict[str, Any], folder: Path) -> None:  # noqa: ARG002
        """Get ready; see :class:`~workers.testing.controller.Host`."""
        options = {name: value for name, value in order["options"].items() if name not in _FOLDERS}
        options["log_file"] = os.devnull  # it may lie where no test can write
        searched = [path for path in order["searched"] if Path(path).resolve().is_relative_to(self._root)]
        self._order = order | {
            "args": [*self._options, *order["args"]],
            "options": options,
            "searched": searched,
            "renew_s": _RENEW_S,
            "renew_bytes": _RENEW_BYTES,
            "said_bytes": _SAID_BYTES,
            "stacks_s": self._timeout_s,
            sealed.ROOT: str(self._root),
            sealed.STARTED_IN: str(self._cwd.relative_to(self._root)),
            sealed.ENVIRONMENT: {name: os.environ[name] for name in _CARRIED if name in os.environ},
        }

    def has_room(self) -> bool:
        """Return whether another group may be submitted now."""
        return self._open < self._room

    def start(self, group: Group, *, sanitized: bool) -> Evaluation:
        """Submit a group's tests.

        Raises:
            KqueueError: the fleet refuses them, or cannot be used.
        """
        for item in group.items:
            if not item.path.resolve().is_relative_to(self._root):
                raise ConfigError(f"{item.path} does not lie in {self._root}, whose files are sent")
        slower, order = sanitizer.SLOWDOWN if sanitized else 1, self._order | named(group)
        timeout_s = min(self._timeout_s * slower, _MOST_S)
        if sanitized:  # all of it is watched, as far as that comes
            order |= {"renew_s": None, "renew_bytes": None, "stacks_s": None}
        fields: dict[str, Any] = {
            "kernel": TESTS_LINE + json.dumps(order),
            "backend": Backend.PYTEST,
            "lane": self._lane,
            "problem_label": self._root.name[:_LABEL] or None,
            "kernel_label": group.name[:_LABEL],
            "batch": self._batch,
            "reuse": False,
            "settings": {
                "timing": {"enabled": False},
                "examine": {"sanitize": ["memcheck"] if sanitized else []},
                "deadlines": {"load_s": _MOST_S, "check_s": timeout_s},
                "limits": {"output_bytes": 1 << 30, "processes": 4096},
            },
        }
        self._open += 1
        return Evaluation(self._submit(fields), self._root, timeout_s, sanitized=sanitized)

    def over(self, job: Evaluation) -> None:
        """Take note of a group's end."""
        if not job.cancelled:
            self._open -= 1
            self._over.add(job.ticket.evaluation_id)

    def close(self) -> None:
        """Cancel what is left, also what was accepted when its submission was broken off."""
        # Where the fleet is away, they end by themselves.
        with contextlib.suppress(KqueueError), contextlib.closing(self._client):
            for ticket in self._client.batch(self._batch) if self._open else ():
                if ticket.evaluation_id not in self._over:
                    ticket.cancel()

    def _submit(self, fields: dict[str, Any]) -> Ticket:
        """Submit a group; the repository's files go with the first alone, as the fleet keeps them by their hash."""
        if self._stored:
            try:
                return self._client.submit(parse_request(fields | {"problem": self._stored}))
            except UnknownProblem:  # removed meanwhile, as nothing needed them
                pass
        request = parse_request(fields | {"problem": self._archive})
        ticket = self._client.submit(request)
        self._stored = request.problem_name
        return ticket


class Evaluation:
    """A group's tests on a fleet; see :class:`~workers.testing.controller.Running`.

    All is heard at its end: so what a try has said that failed is heard of nowhere.

    Attributes:
        ticket: the evaluation's.
        cancelled: True once it was told to end.
    """

    sources = ()

    def __init__(self, ticket: Ticket, root: Path, timeout_s: float, *, sanitized: bool) -> None:
        """Wait for a submitted evaluation.

        Args:
            ticket: the evaluation's.
            root: the repository's folder here.
            timeout_s: most seconds for a test.
            sanitized: whether it runs under compute-sanitizer.
        """
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
        """Return True once it has a verdict, or was cancelled.

        Raises:
            KqueueError: the fleet cannot be used.
        """
        if self._verdict is None and not self.cancelled and self._future.done():
            self._verdict = self._future.result()
            self._conclude(self._verdict)
        return self.cancelled or self._verdict is not None

    def heard(self) -> Iterator[dict[str, Any]]:
        """Yield what its process has said, once there is a verdict."""
        words, self._words = self._words, []
        yield from words

    def output(self) -> bytes:
        """Return what it has printed, once there is a verdict: the end of that, as a fleet keeps it."""
        printed, self._printed = self._printed, b""
        return printed

    def end(self) -> None:
        """Wait for it no longer; :meth:`Fleet.close` cancels it."""
        self.cancelled = True
        self._future.cancel()

    def close(self) -> None:
        """Let go of it."""

    def _conclude(self, verdict: Verdict) -> None:
        log = claims.shown(here(verdict.log, self._root))
        self._printed, self.last_words = log.encode(), without_frames(log)
        told = f"{verdict.category}: {claims.shown(verdict.message)}"
        if verdict.blame in (Blame.FLEET, Blame.NOBODY):
            self.unrun = self.findings = told
            return
        self._words = words(verdict)
        status, ended_well = verdict.facts.status, verdict.category in (Category.PASSED, Category.TESTS_FAILED)
        if ended_well:
            # The judge has seen that its process has ended so.
            self.status = _last_status(self._words)
        elif verdict.category is Category.CRASHED and status is not None:
            self.status = os.waitstatus_to_exitcode(status)
        elif verdict.category is Category.TIMEOUT and _in_a_test(verdict, self._words):
            self.overdue = True
        else:
            self.why = f"was ended: {claims.shown(verdict.message)}"
        found = sanitizer.shown(verdict.evidence.tests.findings or "") if verdict.evidence.tests is not None else ""
        self.findings = claims.shown(found) if ended_well or self.overdue else f"{told}\n{claims.shown(found)}".rstrip()


def here(log: str, root: Path) -> str:
    """Return what a process on a host has printed, with the repository's folder here in the place of that there."""
    return _THERE.sub(lambda found: f"{found[1]}{root}", log)


def _last_status(said: list[dict[str, Any]]) -> int | None:
    """Return the status in the last word of an end, which the judge has compared."""
    for word in reversed(said):
        match word:
            case {"at": "end", "status": status, "fault": _} if claims.is_number(status):
                return status
            case _:
                pass
    return None


def _in_a_test(verdict: Verdict, said: list[dict[str, Any]]) -> bool:
    """Return whether it is a test that took too long: neither what comes before and after, nor all of them together."""
    last = next((word["at"] for word in reversed(said) if word["at"] in ("start", "finish")), "")
    return verdict.phase is Phase.CHECK and last == "start" and verdict.message.endswith(_PHASE_S)


def words(verdict: Verdict) -> list[dict[str, Any]]:
    """Return what a process has said, as far as that can be read: foreign code may have said it."""
    found: list[dict[str, Any]] = []
    for line in (verdict.evidence.tests.words if verdict.evidence.tests else "").splitlines():
        try:
            word = json.loads(line)
            if isinstance(word, dict) and isinstance(word.get("at"), str):
                found.append(claims.cleaned(word))
        except (ValueError, RecursionError):
            pass
    return found
