"""The sealed processes of one evaluation, from fork to end."""

from __future__ import annotations

import contextlib
import json
import secrets
from dataclasses import asdict, replace
from pathlib import Path
from typing import Final
from uuid import uuid4

from kqueue import backends
from kqueue.categories import Blame
from kqueue.contract import Outcome, Phase, Request, build_of
from kqueue.evidence import Build as Compilation
from kqueue.evidence import ReferenceProcess
from kqueue.passes import Pass
from workers.judge.channel.orders import Job, Member, Opening, Order
from workers.judge.ending import EvaluationEnded
from workers.judge.forkserver.control import Report
from workers.judge.forkserver.handle import ForkServer, ForkServerError
from workers.judge.forkserver.process import HOST_SHARE, SealedProcess
from workers.judge.gpu import booking
from workers.judge.host import linux
from workers.judge.host.uids import BUILDER_OFFSET, COMPILED_OFFSET, PROBLEM_BUILDER_OFFSET
from workers.judge.pipeline import build, static, warm
from workers.judge.pipeline.build import Build, Reuse
from workers.judge.pipeline.cases import DTYPES
from workers.judge.pipeline.cpu import CpuTime
from workers.judge.pipeline.evidence import Observed
from workers.judge.pipeline.examine import Examiner
from workers.judge.pipeline.exchange import Candidate, Exchange, await_opening
from workers.judge.pipeline.reference import BOUNDS, Reference
from workers.judge.pipeline.steps import Steps
from workers.judge.sandbox import shelf
from workers.judge.sandbox.seal import Profile, Role
from workers.judge.slot_config import SlotConfig

#: Factor of a candidate's host memory limit for a reference, because most problems draw inputs there.
_REFERENCE_HOST: Final = 4
#: Maximum time in seconds for a kept reference to reproduce an earlier answer, and for its compilers.
_KEPT_S: Final = 10.0
#: Limits on hidden variants of further shapes of a problem, whose first shape gets all.
_FURTHER: Final = {"variants": 4, "timed": 1}


class Processes:
    """The reference, the candidate, its builder, and the reference under ``torch.compile``.

    Attributes:
        reference: the evaluation's reference, or None before :meth:`begin_reference`.
        candidate: the evaluation's candidate, or None before :meth:`begin_candidate`.
        builder: builder of the libraries that the candidate imports, or their reuse, or None if there are none.
        ranks: the processes of each rank, if the evaluation is a group's, which has no other processes.
    """

    def __init__(
        self,
        request: Request,
        slot: SlotConfig,
        forkserver: ForkServer,
        cpu: CpuTime,
        pass_: Pass | None = None,
        member: Member | None = None,
    ) -> None:
        """Prepare without forking a process. ``cpu`` counts the CPU time of all processes.

        ``member`` is the place of the reference, and of the candidate, in a group.
        """
        self.ranks: list[Processes] = []
        self._member = member
        self.reference: Reference | None = None
        self.candidate: Candidate | None = None
        self.builder: Build | Reuse | None = None
        self._device = "cuda" if slot.on_gpu else "cpu"
        self.turn_to(request, pass_)
        self._deadlines = request.settings.deadlines
        self._slot = slot
        self._forkserver = forkserver
        self._cpu = cpu
        #: Without uids, a leftover of one process could be blamed on a later kernel.
        self._keeps = slot.keeps_processes and slot.uid is not None
        # A reference that computes gradients has another form of calls than a kept one.
        self._keeps_reference = self._keeps and pass_ is None
        #: Key under which the reference is kept.
        self._key = f"{warm.key(request, self._device)}{forkserver.caches}"
        self._memo: warm.Memo | None = None
        #: Number of evaluations that the reference has served, including this one.
        self._uses = 1
        self._has_next = False
        #: Directory of the libraries that a builder has compiled, or empty.
        self._built = ""
        #: Contents of that directory for the examiner, because the directory is removed with the candidate.
        self._libraries: list[tuple[str, str, bytes]] = []
        #: All processes except the reference's.
        self._others: list[SealedProcess] = []

    def turn_to(self, request: Request, pass_: Pass | None, *, is_further: bool = False) -> None:
        """Judge this shape or pass of the problem from now on, with new weights.

        ``is_further`` is True if the kernel has passed another one.
        """
        self._bounds = replace(BOUNDS[self._device], **_FURTHER if is_further else {})
        self._request, self._settings, self._pass = request, request.settings, pass_
        # A kernel that knew the seed could hold the weights, or answers that depend on them alone.
        self._seed = secrets.randbits(63) if request.settings.seed is None else request.settings.seed

    def begin_reference(self) -> Reference:
        """Reuse the reference of this evaluation, or the one that is kept for its problem, or fork a new one.

        A candidate that runs drops its model, because both processes then serve another shape or pass. Next to a kept
        reference the candidate is forked at once. A new reference opens the device first, because the driver opens it
        for one process at a time.
        """
        if self.reference is not None:
            if self.candidate is not None and self.candidate.process.ended is None:
                self.candidate = self.candidate.renewed(self._seed)
            return self._renew_reference(self.reference)
        if self._keeps_reference and (kept := self._forkserver.take(self._key)) is not None:
            message, descriptors = kept
            process = SealedProcess.taken(
                self._forkserver,
                message.scratch,
                descriptors,
                Phase.REFERENCE,
                compile_s=min(self._deadlines.compile_s, _KEPT_S),
                cpu_before_s=message.cpu_s,
            )
            self._cpu.count(Role.REFERENCE, process)
            reference = self._hold(process)
            reference.proxy.left_s = min(self._deadlines.reference_s, _KEPT_S)
            self._memo = warm.Memo.model_validate(message.memo)
            self._uses = self._memo.uses + 1
            self.begin_candidate()
            return reference
        return self._fork_reference()

    def make_reference_ready(self, evidence: Observed, allowed_bytes: int) -> Reference:
        """Construct the reference's model, of which a kept process can have another shape.

        Replace a kept reference whose answer has changed.

        Args:
            evidence: gets the facts of the process, and the reason if it was replaced.
            allowed_bytes: the process's GPU memory allowance.

        Raises:
            EvaluationEnded: the problem failed.
        """
        reference, memo, self._memo = self.reference, self._memo, None
        assert reference is not None
        evidence.reference = process = ReferenceProcess(kept=self._uses > 1, uses=self._uses)
        if memo is not None:
            try:
                reference.proxy.allow(allowed_bytes)
                reference.proxy.share_arena(memo.arena_bytes)
                reference.proxy.construct(memo.weights)
                case = reference.cache.again(memo.drawn, memo.seed, on_device=memo.on_device)
                reference.answer(case)
                is_right = reference.digest(case) == memo.digest
                if is_right and memo.source == warm.hash_of(reference.proxy.source):
                    reference.cache.drop([case])
                    reference.case = None
                    if memo.weights != self._seed:
                        reference.proxy.construct(self._seed)
                    reference.proxy.renew()
                    return reference
                why = "" if is_right else "its answer to an earlier input has changed"
            except EvaluationEnded as ended:
                why = ended.outcome.message
            if why:
                evidence.reference = process.model_copy(update={"replaced": why})
                reference.proxy.discard()
            reference = self._renew_reference(reference)
        reference.proxy.load()
        reference.proxy.allow(allowed_bytes)
        reference.proxy.construct(self._seed)
        return reference

    def begin_candidate(self) -> Candidate:
        """Return the candidate, after starting it and its builder if that has not happened.

        It is the prewarmed candidate if that fits this evaluation, and otherwise a new one.
        """
        if self.candidate is not None:
            return self.candidate
        assert self.reference is not None
        process, opening, built = self._take_candidate() or self._fork_candidate()
        self._others.append(process)
        self._cpu.count(Role.CANDIDATE, process)
        if backends.find(self._request.backend).extensions or build_of(self._request.kernel):
            self._built = built
            self.builder = self._begin_build(self._request.kernel, built, BUILDER_OFFSET)
        job = self._job(self._request.kernel, static.ENTRY, built=self._built)
        self.candidate = Candidate(process, opening, job, self.reference.form, self._settings, self._device)
        return self.candidate

    def begin_next(self) -> None:
        """Prewarm a candidate for the slot's next evaluation, in case that needs the same kind of process.

        The new process knows nothing yet. This evaluation's candidate is ended first.
        """
        if not self._keeps or self._has_next or self.candidate is None or self._settings.examine:
            return
        self._has_next = True
        # A failure does not matter to this evaluation, whose own processes show that a fork server died.
        with contextlib.suppress(ForkServerError, EvaluationEnded):
            process, opening, built = self._fork_candidate()
            memo = {"opening": opening, "built": built}
            process.leave(self._candidate_key, memo, booking.wanted_file(self._slot.ledger))

    def _take_candidate(self) -> tuple[SealedProcess, int, str] | None:
        """Return the prewarmed candidate like :meth:`_fork_candidate`, or None if there is none that fits."""
        if not self._keeps or (kept := self._forkserver.take(self._candidate_key)) is None:
            return None
        message, descriptors = kept
        compile_s = self._deadlines.compile_s
        # Without cpu_before_s, the CPU time that it has used so far counts as this evaluation's.
        taken = SealedProcess.taken(self._forkserver, message.scratch, descriptors, Phase.PREPARE, compile_s=compile_s)
        return taken, message.memo["opening"], message.memo["built"]

    def _fork_candidate(self) -> tuple[SealedProcess, int, str]:
        """Fork a candidate. Return it, the number of the order to open the device, and the directory for libraries."""
        built = self._new_scratch()
        process = SealedProcess(self._forkserver, self._profile(Role.CANDIDATE, built=built), self._deadlines.compile_s)
        return process, process.send(Order.OPEN, payload=self._opening(self._request.kernel)), built

    @property
    def _candidate_key(self) -> str:
        """Key under which a candidate is kept, with everything that its process depends on."""
        profile = replace(self._profile(Role.CANDIDATE), scratch="")
        return json.dumps([asdict(profile), asdict(self._opening(self._request.kernel))])

    def _begin_build(self, source: str, built: str, uid_offset: int) -> Build | Reuse:
        profile = self._profile(Role.BUILDER, uid_offset, built)
        tree, lines = self._request.tree_of(source), bool(self._settings.examine)
        asked = build.Asked(source, on_gpu=self._slot.on_gpu, lines=lines, tree=tree)
        builder = build.begin(self._forkserver, profile, self._deadlines, asked)
        if isinstance(builder, Build):
            self._others.append(builder.process)
            self._cpu.count(Role.BUILDER, builder.process)
        return builder

    def _place_of_problem(self) -> str | None:
        """Return a new directory for the files of the build that the problem names, or None if it names none."""
        return self._new_scratch() if build_of(self._request.problem) else None

    def _build_problem(self, built: str | None) -> None:
        """Build the tree that the problem names, for a process that was forked with the directory ``built``."""
        if built is not None:
            assert self.reference is not None
            with self.reference.proxy.blaming("building its tree"):
                self._begin_build(self._request.problem, built, PROBLEM_BUILDER_OFFSET).run(Observed())

    def build(self, evidence: Observed) -> Compilation:
        """Compile the candidate's libraries. See :meth:`.Build.run`."""
        assert self.builder is not None
        result = self.builder.run(evidence)
        if self._settings.examine:
            self._libraries = shelf.read(Path(self._built))
        return result

    def begin_compiled(self) -> tuple[Exchange, Job]:
        """Fork a process that runs the reference under ``torch.compile``, and wait until it has opened the device."""
        assert self.reference is not None
        built = self._place_of_problem()
        process = self._fork(self._profile(Role.COMPILED, COMPILED_OFFSET, built))
        self._build_problem(built)
        exchange = Exchange(process, self.reference.form, self._device)
        problem = self._request.problem
        await_opening(process, process.send(Order.OPEN, payload=self._opening(problem)))
        process.order(Order.ALLOW, payload=self.reference.proxy.allowed_bytes)
        return exchange, self._job(problem, "Model", compiled=True, built=built or "")

    def examiner(self, request: Request, steps: Steps) -> Examiner:
        """Return the examiner, which runs the kernel in new processes after all current ones have ended.

        ``request`` has the problem with the shape to run.
        """
        job = self._job(request.kernel, static.ENTRY)

        def fork() -> tuple[SealedProcess, Job]:
            if not self._libraries:
                return self._fork(self._profile(Role.EXAMINED)), job
            built = self._new_scratch()
            with contextlib.suppress(OSError):  # Missing libraries are compiled again.
                shelf.fill(Path(built), self._libraries)
            return self._fork(self._profile(Role.EXAMINED, built=built)), replace(job, built=built)

        return Examiner(request, self._device, fork, steps)

    def begin_tests(self) -> SealedProcess:
        """Fork the process that waits for a repository's tests to run."""
        return self._fork(self._profile(Role.WATCHED if self._settings.examine else Role.TESTS))

    def stop_others(self) -> None:
        """End all processes except the candidate and the reference, whose memory is limited to its allowance."""
        for process in self._others:
            if self.candidate is None or process is not self.candidate.process:
                process.stop()

    def end(self, outcome: Outcome, reports: dict[SealedProcess, Report]) -> str:
        """End all running processes, but keep the reference for the next evaluation of the problem if possible.

        ``reports`` gets the report of each process that is ended.

        Returns:
            The error of a process whose end is unknown, or "". The outcome is valid all the same.

        Raises:
            ForkServerError: the end of a process is unknown, and the outcome is a right answer.
        """
        error = ""
        for rank in self.ranks:
            error = rank.end(outcome, reports) or error
        for process in self._others:
            error = self._end(process, outcome, reports) or error
        if self.builder is not None:
            own = self.candidate and reports.get(self.candidate.process)
            self.builder.keep_refusal(outcome, [own] if own else [])
        if self.reference is not None and not self._keep(outcome):
            error = self._end(self.reference.process, outcome, reports) or error
        return error

    @staticmethod
    def _end(process: SealedProcess, outcome: Outcome, reports: dict[SealedProcess, Report]) -> str:
        try:
            reports[process] = process.stop()
        except ForkServerError as error:
            if outcome.category.blame is Blame.NONE:
                raise
            return str(error)
        return ""

    def _renew_reference(self, earlier: Reference) -> Reference:
        """Return the reference of the present shape in the earlier one's process, or in a new one if that fails."""
        if earlier.process.ended is None:
            with contextlib.suppress(EvaluationEnded):
                earlier.cache.forget()
                earlier.proxy.rest()
                reference = self._hold(earlier.process)
                reference.proxy.built = earlier.proxy.built
                reference.proxy.renew()
                return reference
            earlier.proxy.discard()
        return self._fork_reference()

    def _hold(self, process: SealedProcess) -> Reference:
        self.reference = Reference(process, self._request.problem, self._settings, self._device, self._bounds)
        self.reference.proxy.tree = self._request.tree_of(self._request.problem)
        return self.reference

    def _fork_reference(self) -> Reference:
        built = self._place_of_problem()
        profile = self._profile(Role.REFERENCE, built=built)
        process = SealedProcess(self._forkserver, profile, self._deadlines.compile_s)
        self._cpu.count(Role.REFERENCE, process)
        reference = self._hold(process)
        self._uses = 1
        reference.proxy.begin(self._member)
        self._build_problem(built)
        reference.proxy.built = built or ""
        return reference

    def _keep(self, outcome: Outcome) -> bool:
        """Keep the reference for the next evaluation of the problem if possible, and return whether it was kept."""
        if not self._keeps_reference or self.reference is None:
            return False
        memo = warm.memo_of(self.reference, outcome, self._uses)
        if memo is None:
            return False
        try:
            self.reference.proxy.keep(self._key, memo.model_dump(), booking.wanted_file(self._slot.ledger))
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
            host_memory_bytes=min(host_memory_bytes, int(HOST_SHARE * linux.physical_bytes())),
            output_bytes=limits.output_bytes,
            scratch_bytes=limits.scratch_bytes,
            built=built,
            # A reference and a kernel never share a network. A builder has none.
            group="" if self._member is None or role is Role.BUILDER else f"{self._member.group}-{role}",
            devices=() if self._member is None else self._member.devices,
        )

    def _new_scratch(self) -> str:
        return str(self._slot.scratch / uuid4().hex)

    def _opening(self, source: str) -> Opening:
        # At least as many queues as the reference has, so that a library's parallel work also runs in parallel here.
        queues = static.queues(source, self._request.problem) if self._member is None else 0
        return Opening(self._device, queues, self._settings.debug.launch_blocking, self._member)

    def _job(self, source: str, entry: str, *, compiled: bool = False, built: str = "") -> Job:
        return Job(
            source=source,
            entry=entry,
            dtype=DTYPES[self._settings.precision],
            keeps_float64=self._settings.keeps_float64,
            tf32=self._settings.tf32,
            seed=self._seed,
            compiled=compiled,
            built=built,
            device_asserts=self._settings.debug.device_asserts,
            lines=bool(self._settings.examine),
            backward=self._pass is Pass.BOTH,
            steps=static.calls(self._request.problem) or 1,
            tree=self._request.tree_of(source),
        )
