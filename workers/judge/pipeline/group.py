"""Kernels that span several GPUs: a problem with ``WORLD = n`` runs in n sealed processes, one for each GPU.

The reference's processes form a group, and so do the candidate's. Each group has a private network, which neither the
other group nor the judge can reach. Every call is made in all processes of a group at the same time, each in a thread
of the judge, because a rank can wait for its peers. The inputs of each rank have another seed.

If a rank fails, the judge ends all and names the first that no other rank explains: a rank whose peer is gone fails
too, or waits.

A call is timed by the judge's clock, from before the inputs of any rank are written until the outputs of all have been
copied. An overhead call takes the same without a forward, so the difference is the time from the last GO to the last
DONE.
"""

from __future__ import annotations

import contextlib
import functools
import random
import re
import secrets
import sys
import time
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import replace
from typing import Final, Self, TypeVar
from uuid import uuid4

import torch

from kqueue.categories import Category
from kqueue.contract import Outcome, Phase, Policy
from kqueue.evidence import BaselineError, Measurement
from workers.judge.channel import flags
from workers.judge.channel.bits import checksum
from workers.judge.channel.orders import Member, Order
from workers.judge.ending import EvaluationEnded
from workers.judge.forkserver.control import End
from workers.judge.forkserver.process import SealedProcess
from workers.judge.pipeline import compare, estimator, plan
from workers.judge.pipeline.blame import ABOUT_VALUES, invalid_problem
from workers.judge.pipeline.cases import Case
from workers.judge.pipeline.context import Context
from workers.judge.pipeline.estimator import Kind, Sample, Series, Stopping
from workers.judge.pipeline.exchange import Candidate, Exchange, copy_out
from workers.judge.pipeline.processes import Processes
from workers.judge.pipeline.reference import UNSTEADY_INPUTS, Reference, differing
from workers.judge.pipeline.stages.conclude import enforce_policies, passed, stop
from workers.judge.pipeline.stages.measure import unless_repeated
from workers.judge.slot_config import SlotConfig

_T = TypeVar("_T")
#: The inputs of one call, and its outputs, by rank.
_Cases = list[Case]
_Outputs = list[list[torch.Tensor]]

#: Seconds after a rank's failure for other ranks to fail. Then they are ended.
_GRACE_S: Final = 0.5
#: Text of an exception that says only that a peer is gone.
_OF_A_PEER: Final = re.compile(r"gloo/|NCCL|(?:closed|reset) by peer")
#: The innermost frame of a stack that waits for peers.
_WAITS: Final = re.compile(r'\A[^"]*File "[^"]*/torch/(?:distributed/|cuda/__init__\.py)')
#: A frame of the kernel's source in a stack, and its line.
_LINE: Final = re.compile(r'File "[^"]*/kernel\.py", line (\d+)')
#: Maximum number of timed calls whose outputs are kept and verified, chosen at random.
_MOST_KEPT: Final = 8
#: Share of the time phase's deadline after which no further call begins.
_BUDGET: Final = 0.6


def judge(context: Context, world: int) -> Outcome:
    """Judge a kernel of ``world`` ranks, and return a pass without evidence.

    Raises:
        EvaluationEnded: a rank failed, which the message and the facts name.
    """
    with _Group(context, world) as group:
        group.refer()
        group.load()
        checks = group.check()
        runtime, baseline = group.time() if context.settings.timing.enabled else (None, None)
        group.stop()
    context.evidence.unvaried = why = f"the problem runs in {world} ranks"
    if runtime is not None and context.settings.timing.compiled_baseline:
        context.evidence.compiled_baseline = BaselineError(error=why)
    if context.slot.on_gpu and context.settings.policies.decoys is not Policy.ALLOW:
        context.evidence.provenance_error = why
    return passed(context, f"right on {checks} input sets, in {world} ranks", runtime, baseline)


def devices_of(slot: SlotConfig, world: int) -> tuple[str, ...]:
    """Return the GPUs of a group by rank, or none on a CPU. Raise EvaluationEnded (``judge_error``) for too few."""
    devices = (slot.device, *slot.peers)[:world] if slot.on_gpu else ()
    if slot.on_gpu and len(devices) < world:
        message = f"the problem runs on {world} GPUs (WORLD = {world}), and this worker can use {len(devices)}"
        raise EvaluationEnded(Category.JUDGE_ERROR, message, Phase.PREPARE)
    return devices


class _Group:
    """The processes of all ranks. Use it as a context manager, which ends its threads."""

    def __init__(self, context: Context, world: int) -> None:
        """Prepare without forking a process. Raise EvaluationEnded as :func:`devices_of` does."""
        slot, settings = context.slot, context.settings
        devices = devices_of(slot, world)
        # The weights of all ranks agree, unless the model draws them by its rank. The caches of the CPU alone are cold.
        seed = secrets.randbits(63) if settings.seed is None else settings.seed
        timing = settings.timing.model_copy(update={"cold_l2": False})
        settings = settings.model_copy(update={"seed": seed, "timing": timing})
        request = context.request.model_copy(update={"settings": settings})
        own, name = replace(slot, keeps_processes=False), uuid4().hex
        self._ranks = [
            Processes(request, own, context.forkserver, context.cpu, member=Member(rank, world, name, devices))
            for rank in range(world)
        ]
        context.processes.ranks, context.device.count = self._ranks, world
        self._context, self._steps, self._settings = context, context.steps, settings
        self._on_gpu, self._random = slot.on_gpu, random.SystemRandom()
        self._references: list[Reference] = []
        self._candidates: list[Candidate] = []
        self._first: _Cases = []
        self._pool = ThreadPoolExecutor(world)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.shutdown()
        for rank in range(len(self._ranks) if self._on_gpu else 0):
            with contextlib.suppress(torch.AcceleratorError):  # The test of the device reports it.
                torch.cuda.synchronize(rank)

    def refer(self) -> None:
        """Make the references draw and answer the first case."""
        with self._steps.timed("reference"), self._steps.backstop(Phase.REFERENCE):
            self._references += [rank.begin_reference() for rank in self._ranks]
            share = 0
            if self._on_gpu:
                self._context.evidence.tf32 = self._settings.tf32
                # The devices are this evaluation's alone. The rest is for the judge.
                share = torch.cuda.get_device_properties(0).total_memory // 3
            self._context.budget.plan = plan.Plan(0, None, 0, 0, share, share)

            def begin(rank: int) -> Case:
                reference = self._ranks[rank].make_reference_ready(self._context.evidence, share)
                first = reference.cache.first()
                with reference.proxy.blaming("Model.setup"):
                    reference.proxy.exchange.set_up(first.inputs)
                return first

            self._first = self._together(self._references, begin)
            self._answer(self._first)
        self._context.evidence.inputs = self._references[0].describe_inputs()

    def load(self) -> None:
        """Compile, import and construct the kernel in all ranks."""
        with self._context.forkserver.one_build():
            for rank in self._ranks:  # The first rank's build serves all.
                self._candidates.append(rank.begin_candidate())
                if rank.builder is not None:
                    with self._steps.timed("build"), self._steps.backstop(Phase.COMPILE):
                        rank.build(self._context.evidence)
        self._context.processes.candidate = self._candidates[0]

        def construct(rank: int) -> None:
            candidate, reference = self._candidates[rank], self._references[rank]
            arguments, budget = reference.proxy.init_inputs, self._context.budget.plan
            # A warm-up would skip launches, and a rank that failed for that would leave its peers waiting.
            candidate.construct(arguments, self._first[rank], budget, warm_up=False)
            candidate.bind_outputs(reference.form.output_specs)

        with self._steps.timed("construct"), self._steps.backstop(Phase.CONSTRUCT):
            self._together(self._candidates, construct)
            self._context.evidence.setup_ms = self._candidates[0].setup_ms

    def check(self) -> int:
        """Check each rank on the requested number of input sets, and on the first again. Return the number."""
        count = self._settings.checks
        self._enter(self._candidates, Phase.CHECK)
        with self._steps.alone("check"), self._steps.timed("check"), self._steps.backstop(Phase.CHECK):
            for number in range(count):
                self._check(self._drawn() if number else self._first)
            with _again("right at first, wrong when the same input was run again"):
                self._try(self._first)
        self._context.evidence.checks = self._context.evidence.checks_asked = count
        self._context.compared.is_complete = True
        forms = [reference.form for reference in self._references]
        enforce_policies(self._context, next((form for form in forms if form.unkept), forms[0]))
        return count

    def time(self) -> tuple[Measurement, Measurement]:
        """Time the kernel in turn with the reference, check it again, end it, and return both times."""
        kept: list[tuple[int, _Cases, _Outputs]] = []
        self._context.device.before_timing()
        with self._steps.alone("measure"), self._steps.timed("time"), self._steps.backstop(Phase.TIME):
            own, beside = self._take(self._candidates, kept)
        self._context.device.after_timing()
        with self._steps.untimed("verify"), self._steps.backstop(Phase.CHECK):
            for _, cases, outputs in kept:
                self._answer(cases)
                self._compare(outputs, cases)
            self._context.evidence.verified_calls = len(kept)
            self._enter(self._candidates, Phase.CHECK)
            with _again("right before it was timed, wrong after"):
                self._check(self._drawn())
        self.stop()
        with self._steps.alone("measure_reference"), self._steps.timed("baseline"), self._steps.backstop(Phase.TIME):
            [alone] = self._take([], [])
        measured, unslowed = self._summary(beside), self._summary(alone)
        is_slowed = estimator.is_longer(measured, unslowed)
        self._context.evidence.baseline_taken = "without_kernel" if is_slowed else "in_turn"
        return self._summary(own, beside, measured), unslowed if is_slowed else measured

    def stop(self) -> None:
        """End the kernel in all ranks, and reject leftovers."""
        for candidate in self._candidates:
            candidate.process.begin_stop()
        for rank, candidate in enumerate(self._candidates):
            with self._at(rank):
                stop(self._context, candidate)
        self._candidates = []

    def _summary(
        self, series: Series, reference: Series | None = None, baseline: Measurement | None = None
    ) -> Measurement:
        on_gpu = self._on_gpu
        overhead = estimator.overhead_of(series, baseline, on_gpu=on_gpu)
        return estimator.summarise(series, overhead, self._settings.timing, reference, on_gpu=on_gpu, fine=False)

    def _take(self, candidates: Sequence[Exchange], kept: list[tuple[int, _Cases, _Outputs]]) -> list[Series]:
        """Time the candidates, if any, and the references in turn. Return a series of each, and keep some calls."""
        timing, proxy = self._settings.timing, self._references[0].proxy
        with contextlib.ExitStack() as shared:
            references = self._together(
                self._references, lambda rank: shared.enter_context(self._references[rank].timed(beside=True))
            )
            groups = [every for every in (candidates, references) if every]
            series = [Series("cpu_clock", timing.warmup) for _ in groups]
            stopping = Stopping(timing, series, self._random, alone=self._on_gpu)
            begun, late = time.monotonic(), False
            while not stopping.is_finished(time.monotonic() - begun, late=late):
                late = time.monotonic() > begun + self._settings.deadlines.time_s * _BUDGET
                cases = self._drawn()
                for number in self._random.sample(range(len(groups)), len(groups)):
                    group, one = groups[number], series[number]
                    is_own = group is candidates
                    self._enter(group, Phase.TIME)
                    for kind in stopping.kinds(one, estimator.OVERHEAD_SHARES[not is_own]):
                        at = time.monotonic()
                        with contextlib.nullcontext() if is_own else proxy.blaming("Model.forward"):
                            sample, outputs = self._timed(group, kind, cases)
                        counts = stopping.add(one, kind, sample, time.monotonic() - at)
                        place = self._random.randrange(len(one.calls)) if counts and is_own else _MOST_KEPT
                        if place < _MOST_KEPT:
                            kept[place : place + (len(kept) == _MOST_KEPT)] = [(sample.ns, cases, outputs)]
            series[0].kept = [ns for ns, _, _ in kept]
        return series

    def _timed(self, group: Sequence[Exchange], kind: Kind, cases: _Cases) -> tuple[Sample, _Outputs]:
        """Make one timed call in all ranks. Return its time, and copies of the outputs."""
        processes, every = [exchange.process for exchange in group], range(len(group))
        order = Order.TIME_OVERHEAD if kind is Kind.OVERHEAD else Order.TIME
        rooms: _Outputs = []
        for rank in every:
            with self._at(rank):
                rooms.append([tensor.zero_() for tensor in group[rank].blanks()])  # maps the memory now
                group[rank].settle()
        for process in processes:
            process.start_clock()
        numbers = [process.send(order) for process in processes]
        self._await(group, flags.READY, numbers)
        every = self._random.sample(every, len(every))
        begin = time.perf_counter_ns()
        for rank in every:
            with self._at(rank):
                processes[rank].flags[flags.SEED] = cases[rank].seed if group[rank].form.draws else 0
                group[rank].load(cases[rank].inputs)
        ready = time.perf_counter_ns()
        for rank in every:
            if not self._on_gpu:
                processes[rank].flags[flags.GO] = numbers[rank]
                continue
            with self._at(rank):
                processes[rank].semaphores.write(torch.cuda.current_stream().cuda_stream, flags.GO, numbers[rank])
        self._await(group, flags.DONE, numbers)
        for rank in every:
            with self._at(rank):
                copy_out(group[rank].outputs(processes[rank].receive(numbers[rank])), rooms[rank])
        for rank in every:
            with self._at(rank):
                group[rank].settle()
        end = time.perf_counter_ns()
        for rank, process in enumerate(processes):
            process.stop_clock()
            if process.flags[flags.DONE] != numbers[rank]:
                raise _early(rank)
        return Sample(end - begin, ready - begin), rooms

    def _await(self, group: Sequence[Exchange], flag: int, numbers: Sequence[int]) -> None:
        """Wait until the flag of each rank shows its call's number. Raise the first failure of a rank."""

        def missing() -> list[int]:
            return [rank for rank, number in enumerate(numbers) if group[rank].process.flags[flag] != number]

        def has_failed() -> bool:
            return any(group[rank].process.answered() for rank in missing())

        for rank, number in enumerate(numbers):
            flags.wait(group[rank].process.flags, flag, number, nap=not self._on_gpu, gone=has_failed)
        if late := missing():
            self._together(group, lambda rank: group[rank].process.receive(numbers[rank]))
            raise _early(late[0])

    def _drawn(self) -> _Cases:
        """Return a new input set of each rank, and release the set before."""
        return self._together(self._references, lambda rank: self._references[rank].cache.fresh())

    def _answer(self, cases: _Cases) -> None:
        """Make the references answer a case, each by one call."""
        self._together(self._references, lambda rank: self._references[rank].answer_in_step(cases[rank]))

        @functools.cache
        def nudged() -> list[list[torch.Tensor] | None]:
            if any(reference.is_hurried for reference in self._references):
                return [None] * len(cases)
            return self._together(self._references, lambda rank: self._references[rank].again(cases[rank]))

        for rank, case in enumerate(cases):
            case.again = lambda rank=rank: nudged()[rank]

    def _try(self, cases: _Cases) -> None:
        """Make a call of the kernel in all ranks, and compare the outputs."""
        if not all(case.outputs for case in cases):
            self._answer(cases)
        outputs = self._together(self._candidates, lambda rank: self._candidates[rank].answer(cases[rank]))
        for rank, candidate in enumerate(self._candidates):
            with self._at(rank):
                candidate.check_inputs(cases[rank])
        self._compare(outputs, cases)

    def _compare(self, outputs: _Outputs, cases: _Cases) -> None:
        for rank, case in enumerate(cases):
            with self._at(rank):
                self._context.compared.add(*compare.check_values(outputs[rank], case, self._settings))

    def _check(self, cases: _Cases) -> None:
        """Check a call. Confirm the references' answer before the kernel is called wrong, and repeat the call."""
        try:
            self._try(cases)
        except EvaluationEnded as ended:
            if ended.outcome.category not in ABOUT_VALUES:
                raise
            wrong = ended.with_traceback(None)
        else:
            return
        self._confirm(cases)
        try:
            self._try(cases)
        except EvaluationEnded:
            raise wrong from None
        raise unless_repeated(wrong, "wrong at first, right when the same input was run again")

    def _confirm(self, cases: _Cases) -> None:
        """Draw and answer a case again. Raise ``invalid_problem`` if the inputs or the answers differ."""
        others = [
            reference.cache.again(case.drawn, case.seed, on_device=case.on_device)
            for reference, case in zip(self._references, cases, strict=True)
        ]
        self._together(self._references, lambda rank: self._references[rank].answer_in_step(others[rank]))
        for rank, (case, other) in enumerate(zip(cases, others, strict=True)):
            with self._at(rank):
                if [*map(checksum, case.inputs)] != [*map(checksum, other.inputs)]:
                    raise invalid_problem(UNSTEADY_INPUTS)
                try:
                    compare.check_values(other.outputs, case, self._settings)
                except EvaluationEnded as ended:
                    raise differing(ended) from None
                self._references[rank].cache.drop([other])

    def _enter(self, group: Sequence[Exchange], phase: Phase) -> None:
        deadlines = self._settings.deadlines
        for exchange in group:
            if exchange.process.phase is not phase:
                exchange.process.enter(phase, deadlines.time_s if phase is Phase.TIME else deadlines.check_s)

    @contextlib.contextmanager
    def _at(self, rank: int) -> Generator[None]:
        """Use the GPU of a rank, and name the rank if it fails."""
        with torch.cuda.device(rank) if self._on_gpu else contextlib.nullcontext(), _named(rank):
            yield

    def _together(self, group: Sequence[Reference] | Sequence[Exchange], work: Callable[[int], _T]) -> list[_T]:
        """Do work with the process of each rank at the same time, and return the results.

        Raises:
            EvaluationEnded: the first failure of a rank that no other rank explains. All processes have ended then.
        """
        processes = [each.process for each in group]

        def bound(rank: int) -> _T:
            if self._on_gpu:
                torch.cuda.set_device(rank)
                torch.cuda.synchronize()  # gives this thread a context
            with torch.no_grad():
                return work(rank)

        futures = {self._pool.submit(bound, rank): rank for rank in range(len(processes))}
        pending, failed, until = set[Future[_T]](futures), dict[int, BaseException](), None
        while pending:
            left = None if until is None else max(0.0, until - time.monotonic())
            done, pending = wait(pending, left, FIRST_COMPLETED)
            for future in sorted(done, key=futures.__getitem__):
                if (error := future.exception()) is not None:
                    failed[futures[future]] = error
            if until is None and any(_weight(error, processes[rank])[0] < _WAITED for rank, error in failed.items()):
                until = time.monotonic() + _GRACE_S
            if pending and until is not None and time.monotonic() >= until:
                for future in pending:
                    processes[futures[future]].begin_stop()
                wait(pending)
                break
        if not failed:
            return [future.result() for future in futures]
        weights = {rank: _weight(error, processes[rank]) for rank, error in failed.items()}
        first = min(weights, key=weights.__getitem__)
        for rank, process in enumerate(processes):
            if rank != first:
                process.begin_stop()
        if group is not self._references and self._candidates:
            self._context.processes.candidate = self._candidates[first]  # Its log is stored.
        late = [rank for rank in failed if rank != first and weights[rank][0] == weights[first][0] != _OWN]
        with _named(first, late):
            raise failed[first]


#: Order in which failures explain each other: any other failure, a rank that did not end, one that waited for peers and
#: did not end, and one that says only that a peer is gone.
_OWN, _HANGS, _WAITED, _PEER = range(4)


def _weight(error: BaseException, process: SealedProcess) -> tuple[int, int]:
    """Return the place of a rank's failure in this order, and for a rank that did not end its line in the kernel.

    All ranks run the same source, so of two that did not end the one at the earlier line is the one that is late. One
    that is at no line has not begun, or the judge did not learn it.
    """
    if not isinstance(error, EvaluationEnded):
        return _OWN, 0
    if process.ended is not None and process.ended.reason is End.DEADLINE:
        stack = process.ended.log.partition("(most recent call first)")[2]
        line = _LINE.search(stack)
        return (_WAITED if _WAITS.search(stack) else _HANGS), int(line[1]) if line else sys.maxsize
    return (_PEER if process.ended is None and _OF_A_PEER.search(error.outcome.message) else _OWN), 0


def _early(rank: int) -> EvaluationEnded:
    message = f"rank {rank}: the process answered a timed call before its end"
    return EvaluationEnded(Category.SANDBOX_VIOLATION, message, Phase.TIME, rank=rank)


@contextlib.contextmanager
def _named(rank: int, others: Sequence[int] = ()) -> Generator[None]:
    """Name the rank in the end of an evaluation, and other ranks that did not end either."""
    try:
        yield
    except EvaluationEnded as ended:
        if ended.outcome.facts.rank is None:
            also = f". Rank {', '.join(map(str, others))} did not end either" if others else ""
            facts = ended.outcome.facts.model_copy(update={"rank": rank})
            message = f"rank {rank}: {ended.outcome.message}{also}"
            ended.outcome = ended.outcome.model_copy(update={"message": message, "facts": facts})
        raise


@contextlib.contextmanager
def _again(how: str) -> Generator[None]:
    """Call a wrong answer to an input, of which another answer was right, ``nondeterministic``."""
    try:
        yield
    except EvaluationEnded as ended:
        raise unless_repeated(ended, how) from None
