"""The sealed processes of one evaluation, from their forks to their ends."""

from __future__ import annotations

import contextlib
import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, Final
from uuid import uuid4

from kqueue.categories import Blame
from kqueue.contract import Outcome, Phase, Request
from workers.judge.channel.protocol import Job, Opening, Order
from workers.judge.ending import EvaluationEnded
from workers.judge.forkserver.control import Report
from workers.judge.forkserver.handle import ForkServer, ForkServerError
from workers.judge.forkserver.process import SealedProcess
from workers.judge.gpu import booking
from workers.judge.host import linux
from workers.judge.host.uids import BUILDER_OFFSET, COMPILED_OFFSET
from workers.judge.pipeline import build, static, warm
from workers.judge.pipeline.build import Build, Reuse
from workers.judge.pipeline.cases import DTYPES
from workers.judge.pipeline.cpu import CpuTime
from workers.judge.pipeline.examine import Examiner
from workers.judge.pipeline.exchange import Candidate, Exchange, await_opening
from workers.judge.pipeline.reference import Reference
from workers.judge.pipeline.steps import Steps
from workers.judge.sandbox import shelf
from workers.judge.sandbox.seal import Profile, Role
from workers.judge.slot_config import SlotConfig

#: How many times a candidate's limit of the host's memory a reference may take: most problems draw inputs there.
_REFERENCE_HOST: Final = 4
#: The most of the host's memory that one process may take. It must be ended before Linux runs out of memory, which
#: would look like others' doing.
_HOST_SHARE: Final = 0.5
#: How long a reference that was kept may take to show that it is what it was, in seconds; and for compilers as long.
_KEPT_S: Final = 10.0


class Processes:
    """The reference, the candidate, its builder, and the reference under ``torch.compile``.

    Attributes:
        reference: the evaluation's; None before :meth:`begin_reference`.
        candidate: the evaluation's; None before :meth:`begin_candidate`.
        builder: compiles what the candidate is going to import, or has done so for an earlier evaluation; None where
            nothing is compiled so.
    """

    def __init__(self, request: Request, slot: SlotConfig, forkserver: ForkServer, cpu: CpuTime) -> None:
        """Fork nothing yet. ``cpu`` counts all processes."""
        self.reference: Reference | None = None
        self.candidate: Candidate | None = None
        self.builder: Build | Reuse | None = None
        self._request = request
        self._settings = request.settings
        self._deadlines = request.settings.deadlines
        self._slot = slot
        self._forkserver = forkserver
        self._cpu = cpu
        self._device = "cuda" if slot.on_gpu else "cpu"
        #: Without uids, what a process leaves behind would be taken for a later kernel's.
        self._keeps = slot.keeps_processes and slot.uid is not None
        #: What the reference is kept under.
        self._key = warm.key(request, self._device)
        self._memo: warm.Memo | None = None
        #: How many evaluations the reference has served, this one included.
        self._uses = 1
        self._has_next = False
        #: Where libraries lie that a builder has compiled; empty where there is none.
        self._built = ""
        #: What lay there, for those who examine the kernel: the directory goes with the candidate.
        self._libraries: list[tuple[str, str, bytes]] = []
        #: All but the reference's.
        self._others: list[SealedProcess] = []

    def begin_reference(self) -> Reference:
        """Take over the reference that is kept for this problem, or have a new one forked.

        Beside one that is kept the candidate is forked at once. Another one opens the device first, as the driver opens
        it for one process after the other.
        """
        if self._keeps and (kept := self._forkserver.take(self._key)) is not None:
            word, descriptors = kept
            process = SealedProcess.taken(
                self._forkserver,
                word.scratch,
                descriptors,
                Phase.REFERENCE,
                compile_s=min(self._deadlines.compile_s, _KEPT_S),
                cpu_before_s=word.cpu_s,
            )
            reference = self._hold(process)
            reference.left_s = min(self._deadlines.reference_s, _KEPT_S)
            self._memo = warm.Memo.model_validate(word.memo)
            self._uses = self._memo.uses + 1
            self.begin_candidate()
            return reference
        return self._fork_reference()

    def make_reference_ready(self, told: dict[str, Any], allowed_bytes: int) -> Reference:
        """Have the reference's model constructed; replace a reference that is not what it was.

        Args:
            told: takes, for the evidence, whether it was ``kept``, its ``uses``, and why it was ``replaced``, if so.
            allowed_bytes: what it may take of the GPU's memory.

        Raises:
            EvaluationEnded: the problem failed.
        """
        reference, memo = self.reference, self._memo
        assert reference is not None
        told |= {"kept": memo is not None, "uses": self._uses}
        if memo is not None:
            try:
                reference.allow(allowed_bytes)
                reference.share_arena(memo.arena_bytes)
                reference.construct()
                case = reference.again(memo.drawn, memo.seed, on_device=memo.on_device)
                reference.answer(case)
                if reference.digest(case) == memo.digest:
                    reference.drop([case])
                    reference.case = None
                    reference.renew()
                    return reference
                told["replaced"] = "its answer to an earlier input has changed"
            except EvaluationEnded as ended:
                told["replaced"] = ended.outcome.message
            reference.process.stop()
            reference.process.imports.close()
            reference.free_arena()
            reference = self._fork_reference()
        reference.load()
        reference.allow(allowed_bytes)
        reference.construct()
        return reference

    def begin_candidate(self) -> Candidate:
        """Have a candidate, if there was none yet, and the process that compiles what its source does when imported.

        The candidate is the one that was made ahead, if it is as this evaluation needs it, or a new one.
        """
        if self.candidate is not None:
            return self.candidate
        assert self.reference is not None
        process, opening, built = self._take_candidate() or self._fork_candidate()
        self._others.append(process)
        self._cpu.count(Role.CANDIDATE, process)
        if self._request.backend in build.BACKENDS:
            self._built = built
            self._begin_build()
        job = self._job(self._request.kernel, static.ENTRY, built=self._built)
        self.candidate = Candidate(process, opening, job, self.reference.form, self._settings, self._device)
        return self.candidate

    def begin_next(self) -> None:
        """Have a candidate made ready for the slot's next evaluation, in case that needs one like this one's.

        It knows nothing yet. This evaluation's is ended first, if it still runs.
        """
        if not self._keeps or self._has_next or self.candidate is None or self._settings.examine:
            return
        self._has_next = True
        # What becomes of it is nothing to this evaluation, which learns of a dead fork server by its own processes.
        with contextlib.suppress(ForkServerError, EvaluationEnded):
            process, opening, built = self._fork_candidate()
            memo = {"opening": opening, "built": built}
            process.leave(self._candidate_key, memo, booking.wanted_file(self._slot.ledger))

    def _take_candidate(self) -> tuple[SealedProcess, int, str] | None:
        """Return the candidate that was made ahead, as :meth:`_fork_candidate` does; None where there is none like it.

        The CPU's time that it has used so far counts as this evaluation's.
        """
        if not self._keeps or (kept := self._forkserver.take(self._candidate_key)) is None:
            return None
        word, descriptors = kept
        compile_s = self._deadlines.compile_s
        taken = SealedProcess.taken(self._forkserver, word.scratch, descriptors, Phase.PREPARE, compile_s=compile_s)
        return taken, word.memo["opening"], word.memo["built"]

    def _fork_candidate(self) -> tuple[SealedProcess, int, str]:
        """Have a candidate forked. Return it, the number of the order to open the device, and where libraries lie."""
        built = self._new_scratch()
        process = SealedProcess(self._forkserver, self._profile(Role.CANDIDATE, built=built), self._deadlines.compile_s)
        return process, process.send(Order.OPEN, payload=self._opening(self._request.kernel)), built

    @property
    def _candidate_key(self) -> str:
        """What a candidate is kept under: all that it depends on."""
        profile = replace(self._profile(Role.CANDIDATE), scratch="")
        return json.dumps([asdict(profile), asdict(self._opening(self._request.kernel))])

    def _begin_build(self) -> None:
        profile = self._profile(Role.BUILDER, BUILDER_OFFSET, self._built)
        asked = build.Asked(self._request.kernel, on_gpu=self._slot.on_gpu, lines=bool(self._settings.examine))
        self.builder = build.begin(self._forkserver, profile, self._deadlines, asked)
        if isinstance(self.builder, Build):
            self._others.append(self.builder.process)
            self._cpu.count(Role.BUILDER, self.builder.process)

    def build(self, evidence: dict[str, Any]) -> dict[str, Any]:
        """Have the builder do its work; arguments, result and exceptions are :meth:`.Build.run`'s."""
        assert self.builder is not None
        found = self.builder.run(evidence)
        if self._settings.examine:
            self._libraries = shelf.read(Path(self._built))
        return found

    def begin_compiled(self) -> tuple[Exchange, Job]:
        """Fork a process that runs the reference under ``torch.compile``, and wait until it has opened the device.

        Returns:
            what is shared with it, and its job.
        """
        assert self.reference is not None
        process = self._fork(self._profile(Role.COMPILED, COMPILED_OFFSET))
        exchange = Exchange(process, self.reference.form, self._device)
        problem = self._request.problem
        await_opening(process, process.send(Order.OPEN, payload=self._opening(problem)))
        process.order(Order.ALLOW, payload=self.reference.allowed_bytes)
        return exchange, self._job(problem, "Model", compiled=True)

    def examiner(self, steps: Steps) -> Examiner:
        """Return what examines the kernel, in processes of its own, when all others have ended."""
        job = self._job(self._request.kernel, static.ENTRY)

        def fork() -> tuple[SealedProcess, Job]:
            if not self._libraries:
                return self._fork(self._profile(Role.EXAMINED)), job
            built = self._new_scratch()
            with contextlib.suppress(OSError):  # what is not there is compiled
                shelf.fill(Path(built), self._libraries)
            return self._fork(self._profile(Role.EXAMINED, built=built)), replace(job, built=built)

        return Examiner(self._request, self._device, fork, steps)

    def begin_tests(self) -> SealedProcess:
        """Fork the process that runs tests of a repository; it waits."""
        return self._fork(self._profile(Role.WATCHED if self._settings.examine else Role.TESTS))

    def stop_others(self) -> None:
        """End all but the candidate and the reference, which is held to its share of memory."""
        for process in self._others:
            if self.candidate is None or process is not self.candidate.process:
                process.stop()

    def end(self, outcome: Outcome, reports: dict[SealedProcess, Report]) -> str:
        """End what still runs; leave the reference to the next evaluation of the problem, if it may be.

        Args:
            outcome: the evaluation's.
            reports: takes the report of each process that is ended.

        Returns:
            why the end of one is unknown, else an empty text. What is known of the kernel stays true all the same.

        Raises:
            ForkServerError: the end of one is unknown, and the outcome is a right answer.
        """
        why = ""
        for process in self._others:
            why = self._end(process, outcome, reports) or why
        if self.builder is not None:
            own = self.candidate and reports.get(self.candidate.process)
            self.builder.keep_refusal(outcome, [own] if own else [])
        if self.reference is not None and not self._keep(outcome):
            why = self._end(self.reference.process, outcome, reports) or why
        return why

    @staticmethod
    def _end(process: SealedProcess, outcome: Outcome, reports: dict[SealedProcess, Report]) -> str:
        try:
            reports[process] = process.stop()
        except ForkServerError as error:
            if outcome.category.blame is Blame.NONE:
                raise
            return str(error)
        return ""

    def _hold(self, process: SealedProcess) -> Reference:
        self._cpu.count(Role.REFERENCE, process)
        self.reference = Reference(process, self._request.problem, self._settings, self._device)
        return self.reference

    def _fork_reference(self) -> Reference:
        profile = self._profile(Role.REFERENCE)
        reference = self._hold(SealedProcess(self._forkserver, profile, self._deadlines.compile_s))
        self._uses = 1
        reference.begin()
        return reference

    def _keep(self, outcome: Outcome) -> bool:
        """Leave the reference to the next evaluation of the problem, if it may be; return whether it was."""
        if not self._keeps or self.reference is None:
            return False
        memo = warm.memo_of(self.reference, outcome, self._uses)
        if memo is None:
            return False
        try:
            self.reference.keep(self._key, memo.model_dump(), booking.wanted_file(self._slot.ledger))
        except (EvaluationEnded, ForkServerError):
            return False
        return True

    def _fork(self, profile: Profile) -> SealedProcess:
        process = SealedProcess(self._forkserver, profile, self._deadlines.compile_s)
        self._others.append(process)
        self._cpu.count(profile.role, process)
        return process

    def _profile(self, role: Role, uid_offset: int = 0, built: str | None = None) -> Profile:
        limits, uid = self._settings.limits, self._slot.uid
        host_memory_bytes = limits.host_memory_bytes
        if role in (Role.REFERENCE, Role.COMPILED):
            host_memory_bytes *= _REFERENCE_HOST
        return Profile(
            role=role,
            uid=uid + uid_offset if uid is not None else None,
            scratch=self._new_scratch(),
            processes=limits.processes,
            file_bytes=limits.file_bytes,
            host_memory_bytes=min(host_memory_bytes, int(_HOST_SHARE * linux.physical_bytes())),
            output_bytes=limits.output_bytes,
            scratch_bytes=limits.scratch_bytes,
            built=built,
        )

    def _new_scratch(self) -> str:
        return str(self._slot.scratch / uuid4().hex)

    def _opening(self, source: str) -> Opening:
        # At least as many queues as the reference has: what a library runs side by side there it may run so here.
        queues = static.queues(source, self._request.problem)
        return Opening(self._device, queues, self._settings.debug.launch_blocking)

    def _job(self, source: str, entry: str, *, compiled: bool = False, built: str = "") -> Job:
        return Job(
            source=source,
            entry=entry,
            dtype=DTYPES[self._settings.precision],
            keeps_float64=self._settings.keeps_float64,
            tf32=self._settings.tf32,
            seed=self._settings.seed,
            compiled=compiled,
            built=built,
            device_asserts=self._settings.debug.device_asserts,
            lines=bool(self._settings.examine),
        )
