"""The build: the builder, a separate process, compiles everything that a kernel's source compiles at import.

A builder is sealed like the candidate, with another uid and without a GPU. Three of its failures are final: a timeout
of the compiler, a violation of the sandbox, and, on a CPU slot, a compiler's error. On a GPU slot a compiler's error is
not final: a module can detect the GPU without torch, and pass other flags if there is none. After any other failure,
such as a module that asks torch for a GPU at import, the candidate compiles the missing libraries.

The libraries of a build are kept in the store, if there is one, for later evaluations of the same source
(:class:`Reuse`). So is a compiler's final error.

If the source names a command that builds its tree, the builder runs that command instead. The result depends on nothing
else, so it serves every source that names the same tree and command. All of its failures are final.
"""

from __future__ import annotations

import contextlib
import re
import shlex
import time
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import torch

from kqueue.categories import Category
from kqueue.contract import TREE_LINE, Deadlines, Outcome, Phase, named_tree
from kqueue.evidence import Build as Compilation
from workers.judge.candidate.libraries import is_lasting
from workers.judge.channel.orders import Job, Opening, Order
from workers.judge.ending import EvaluationEnded
from workers.judge.forkserver.control import End, Report
from workers.judge.forkserver.handle import ForkServer, ForkServerError
from workers.judge.forkserver.process import SealedProcess
from workers.judge.host.artifacts import Entry, Header, Library, Refusal, Store
from workers.judge.pipeline.evidence import Observed
from workers.judge.sandbox import shelf
from workers.judge.sandbox.seal import Profile

_FINAL: Final = frozenset({Category.COMPILE_TIMEOUT, Category.SANDBOX_VIOLATION})
#: Failures of a builder whose finished libraries are kept: exceptions of its source, but no exceeded limits.
_REPEATED: Final = frozenset({Category.IMPORT_ERROR, Category.COMPILE_ERROR})
#: Maximum share of its memory that a builder can have used for its compiler's error to be kept.
_ROOM_SHARE: Final = 0.5
#: Deadline in seconds of the builder's preparation.
_PREPARE_S: Final = 60.0


@dataclass(frozen=True, slots=True)
class Asked:
    """A kernel to build."""

    source: str
    on_gpu: bool
    #: True to make nvcc record the source line of each instruction.
    lines: bool
    #: Text of the tree that the source names, or empty.
    tree: str = ""

    def job(self) -> Job:
        """Return the builder's job, which contains nothing else about the evaluation."""
        architectures = _architectures() if self.on_gpu else ""
        job = Job(self.source, "", dtype=torch.float32, seed=0, architectures=architectures, lines=self.lines)
        return replace(job, tree=self.tree)

    @property
    def command(self) -> str:
        """The command that builds the tree, with the tree's hash, or an empty string."""
        tree = named_tree(self.source)
        return f"{TREE_LINE}{tree.hash} {shlex.join(tree.build)}" if tree is not None and tree.build else ""

    def key(self, store: Store) -> str:
        """Return the key under which the build is kept."""
        job = self.job()
        return store.key(self.command or job.source, job.architectures + (" lines" if job.lines else ""))


class Build:
    """One build, from the builder's fork to its end."""

    def __init__(self, forkserver: ForkServer, profile: Profile, deadlines: Deadlines, asked: Asked) -> None:
        """Start forking a builder without waiting. None of the kernel's code runs yet.

        Args:
            profile: the builder's limits, with the candidate's ``built`` directory.

        Raises:
            ForkServerError: the fork server is gone.
        """
        assert profile.built is not None
        self.process = SealedProcess(forkserver, profile, deadlines.compile_s)
        self._deadlines = deadlines
        self._built = Path(profile.built)
        self._memory_bytes = profile.host_memory_bytes
        self._store = forkserver.builds
        #: Key under which the build is kept, or empty without a store.
        self._key = asked.key(self._store) if self._store is not None else ""
        #: On a CPU slot the builder's compilers have everything that the candidate's would have.
        self._final = _FINAL if asked.on_gpu else _FINAL | {Category.COMPILE_ERROR}
        self._of_tree = bool(asked.command)
        self._compiled = True
        self._job = asked.job()
        self._opening = self.process.send(Order.OPEN, payload=Opening("cpu"))

    @property
    def log(self) -> str:
        """End of the builder's log. Empty if it compiled nothing, because the candidate then prints the same output."""
        return self.process.ended.log if self.process.ended is not None and self._compiled else ""

    def run(self, evidence: Observed) -> Compilation:
        """Build, end the builder, and keep its libraries. Return the facts of the compilation.

        Raises:
            EvaluationEnded: the build failed, and its failure is final.
            ForkServerError: the builder could not be prepared or ended.
        """
        self.process.enter(Phase.PREPARE, _PREPARE_S)
        self.process.start_clock()
        try:
            self.process.receive(self._opening)
        except EvaluationEnded as ended:
            raise ForkServerError(f"a builder could not be prepared: {ended}") from None
        self.process.stop_clock()
        self.process.enter(Phase.LOAD, self._deadlines.load_s)
        skipped, ended_by_itself = "", True
        try:
            self.process.order(Order.BUILD, payload=self._job)
        except EvaluationEnded as ended:
            if self._of_tree:
                self._keep_refusal(ended.outcome, [self.process.stop()])
            if self._of_tree or ended.outcome.category in self._final:
                raise
            skipped, ended_by_itself = ended.outcome.message, ended.outcome.category in _REPEATED
        report = self.process.stop()
        if report.reason is End.STUCK:
            raise self.process.died()
        # If a build stopped early, compilers of other threads can still have run. They are killed without consequence.
        if report.leftovers and not skipped:
            raise EvaluationEnded(
                Category.SANDBOX_VIOLATION,
                f"processes that the kernel's build left behind: {report.leftovers}",
                Phase.LOAD,
                leftovers=report.leftovers,
            )
        files = shelf.files(self._built)
        libraries = [path for path in files if path.name != shelf.REFUSED]
        if self._of_tree and not libraries:
            message = f"the files that the tree's build wrote could not be kept: at most {shelf.BYTES >> 20} MiB are"
            raise EvaluationEnded(Category.COMPILE_ERROR, message, Phase.LOAD)
        self._compiled = bool(libraries)
        evidence.build = Compilation(
            where="builder" if libraries else "candidate",
            libraries=len(libraries),
            seconds=round(self.process.waited_s, 6),
            peak_bytes=report.peak_bytes,
            skipped=skipped or None,
            key=self._key or None,
        )
        if ended_by_itself and (self._had_room(report) or len(files) == len(libraries)) and not report.robbed:
            self._keep(report, skipped)
        return evidence.build

    def _had_room(self, report: Report) -> bool:
        """Return whether no compiler of a process can have failed for lack of memory."""
        return not report.robbed and report.peak_bytes < _ROOM_SHARE * self._memory_bytes

    def _keep(self, report: Report, skipped: str) -> None:
        """Keep the builder's libraries, if there are any."""
        if self._store is None:
            return
        files = shelf.read(self._built)
        kept = tuple(Library(key=key, name=name, size=len(content)) for key, name, content in files)
        contents = tuple(content for _, _, content in files)
        if files:
            self._put(report, contents, libraries=kept, log=report.log, skipped=skipped)

    def keep_refusal(self, outcome: Outcome, reports: Iterable[Report]) -> None:
        """Keep a compiler's error in the source, if it would occur again. An error of a tree's build is kept already.

        ``reports`` has the candidate's report if its compiler failed. The builder's report is added.
        """
        if not self._of_tree:
            ended = self.process.ended
            self._keep_refusal(outcome, [*reports, *([ended] if ended is not None else [])])

    def _keep_refusal(self, outcome: Outcome, reports: list[Report]) -> None:
        if self._store is None or (outcome.category, outcome.phase) != (Category.COMPILE_ERROR, Phase.LOAD):
            return
        texts = "\n".join([outcome.message, *(report.log for report in reports)])
        if reports and all(map(self._had_room, reports)) and is_lasting(texts):
            refusal = Refusal(message=outcome.message, exception=outcome.facts.exception or "")
            self._put(reports[-1], (), refusal=refusal, log="".join(report.log for report in reports))

    def _put(self, report: Report, contents: tuple[bytes, ...], **fields: Any) -> None:
        assert self._store is not None
        seconds = round(self.process.waited_s, 6)
        header = Header(key=self._key, seconds=seconds, peak_bytes=report.peak_bytes, **fields)
        self._store.put(Entry(header, contents))


class Reuse:
    """The build of an earlier evaluation of the same source, so that nothing is compiled."""

    def __init__(self, entry: Entry, built: Path) -> None:
        """Write the libraries for the candidate, before it is forked.

        Raises:
            OSError: the host's disk is full.
            ValueError: the entry contains a file that is not a library.
        """
        begun = time.monotonic()
        self._entry = entry
        kept = zip(entry.header.libraries, entry.contents, strict=True)
        shelf.fill(built, ((library.key, library.name, content) for library, content in kept))
        self._seconds = time.monotonic() - begun

    @property
    def log(self) -> str:
        """End of the earlier builder's log."""
        return self._entry.header.log

    def run(self, evidence: Observed) -> Compilation:
        """Record the facts as :meth:`Build.run` does, with the earlier builder's time as ``earlier_seconds``.

        Raises:
            EvaluationEnded: ``compile_error`` if a compiler rejected this source before.
        """
        header = self._entry.header
        evidence.build = Compilation(
            where="store",
            libraries=sum(library.name != shelf.REFUSED for library in header.libraries),
            seconds=round(self._seconds, 6),
            peak_bytes=header.peak_bytes,
            skipped=header.skipped or None,
            earlier_seconds=header.seconds,
            key=header.key,
        )
        if header.refusal is not None:
            message, exception = header.refusal.message, header.refusal.exception
            raise EvaluationEnded(Category.COMPILE_ERROR, message, Phase.LOAD, exception=exception)
        return evidence.build

    def keep_refusal(self, outcome: Outcome, reports: Iterable[Report]) -> None:
        """Keep nothing, because the store already has this build."""


def begin(forkserver: ForkServer, profile: Profile, deadlines: Deadlines, asked: Asked) -> Build | Reuse:
    """Return an earlier build of a source, or start a builder. See :class:`Build` for the arguments."""
    store = forkserver.builds
    if store is not None:
        assert profile.built is not None
        entry = store.get(asked.key(store))
        if entry is not None:
            with contextlib.suppress(OSError, ValueError):  # Otherwise a builder compiles the libraries again.
                return Reuse(entry, Path(profile.built))
    return Build(forkserver, profile, deadlines, asked)


def _architectures() -> str:
    """Return the architecture that torch's builder would target if it saw this GPU, at most the newest it supports."""
    supported = [int(re.sub(r"\D", "", name)) for name in torch.cuda.get_arch_list() if name.startswith("sm_")]
    major, minor = min(torch.cuda.get_device_capability(), divmod(max(supported), 10))
    return f"{major}.{minor}+PTX"
