"""Kept references and prewarmed candidates: verdicts do not depend on them, and each is kept for a limited time."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Callable, Generator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest
import torch

from kqueue.categories import Category
from kqueue.contract import Deadlines, Limits, Outcome, Phase, Precision, Request, Settings, Timing
from tests.judge import extension, linear
from tests.judge.rig import Rig
from tests.waiting import proc, until
from workers.judge.forkserver.control import End, Keep, Report
from workers.judge.forkserver.process import SealedProcess
from workers.judge.gpu import booking
from workers.judge.gpu.booking import Ledger
from workers.judge.host import linux
from workers.judge.pipeline import warm
from workers.judge.pipeline.cases import Case
from workers.judge.pipeline.reference import Reference
from workers.judge.sandbox.seal import Profile, Role

pytestmark = pytest.mark.slow("judges the same kernels many times")

#: Path of the file that would request the memory of kept references. It never exists.
NEVER_WANTED = Path("/nowhere/wanted")
RETURN = "return torch.nn.functional.gelu(self.layer(x))"
PROBLEM = linear.PROBLEM.replace("return self.layer(x)", RETURN)
KERNEL = PROBLEM.partition("def get_inputs")[0].replace("Model", "ModelNew")
HANGING = KERNEL.replace(RETURN, "import time; open('here', 'w'); time.sleep(1000)")
#: Kernels, and the categories in which they end with a new reference.
KERNELS = {
    KERNEL: Category.PASSED,
    KERNEL.replace("gelu", "relu"): Category.WRONG_VALUES,
    KERNEL.replace(
        RETURN, f"self.n = getattr(self, 'n', 0) + 1; {RETURN} * (0 if self.n == 3 else 1)"
    ): Category.NONDETERMINISTIC,
    KERNEL.replace(RETURN, "import os; os._exit(3)"): Category.CRASHED,
    HANGING: Category.TIMEOUT,
    KERNEL.replace(RETURN, "x.mul_(2); return torch.nn.functional.gelu(self.layer(x / 2))"): Category.INPUT_MUTATED,
}
SLOW = KERNEL.replace(RETURN, f"import time; time.sleep(0.01); {RETURN}")
QUICK = Settings(checks=2, timing=Timing().off(), deadlines=Deadlines(check_s=3))
#: Settings with long deadlines, which do not end a process before the test does.
PATIENT = QUICK.model_copy(update={"deadlines": Deadlines()})


def request(kernel: str = KERNEL, problem: str = PROBLEM, settings: Settings = QUICK) -> Request:
    return Request(problem=problem, kernel=kernel, backend="torch", settings=settings)


def uses(outcome: Outcome) -> int:
    """Return the number of evaluations that the outcome's reference has served."""
    told = outcome.evidence.reference
    assert told is not None
    assert told.kept == (told.uses > 1)
    return 1 if told.replaced else told.uses


def sealed(rig: Rig) -> list[int]:
    return rig.sealed(Role.REFERENCE)


@pytest.fixture
def empty(keeping: Rig) -> Rig:
    def ended() -> bool:
        keeping.end_kept()  # each time, because a requested candidate might be forked late
        return nothing_left(keeping)

    until(ended, what="the end of all that is kept")
    return keeping


def nothing_left(rig: Rig) -> bool:
    return not rig.sealed(Role.REFERENCE, Role.CANDIDATE) and not list(rig.slot.scratch.iterdir())


def gone(rig: Rig) -> None:
    until(lambda: nothing_left(rig), what="the end of all")


def reference(rig: Rig, name: str = "left") -> SealedProcess:
    profile = Profile(
        role=Role.REFERENCE,
        uid=rig.slot.uid,
        scratch=str(rig.slot.scratch / name),
        processes=16,
        file_bytes=1 << 20,
        host_memory_bytes=1 << 30,
        output_bytes=1 << 20,
        scratch_bytes=1 << 20,
    )
    return SealedProcess(rig.forkserver, profile, 60.0)


def test_a_reference_of_several_shapes_is_kept(empty: Rig) -> None:
    """It answers for the last shape that it has loaded, and then loads the first."""
    problem = PROBLEM.replace("get_inputs():", "get_inputs(rows):").replace("4, 8", "rows, 8")
    problem += "\nSHAPES = [{'args': {'rows': 4}}, {'args': {'rows': 5}}]\n"
    wrong = KERNEL.replace(RETURN, f"{RETURN} * (1 if len(x) == 4 else 0)")
    for use, (kernel, category) in enumerate([(KERNEL, None), (wrong, Category.WRONG_VALUES), (KERNEL, None)], 1):
        outcome = empty.judge(request(kernel, problem))
        assert (uses(outcome), outcome.passed) == (use, category is None), outcome
        if category is None:
            assert outcome.evidence.inputs[0].shape == (4, 8)
        else:
            assert (outcome.category, outcome.facts.shape) == (category, "rows=5")


def test_verdicts_do_not_depend_on_a_kept_reference(empty: Rig) -> None:
    for use, (kernel, category) in enumerate([*KERNELS.items(), (KERNEL, Category.PASSED)], 1):
        outcome = empty.judge(request(kernel))
        assert (uses(outcome), outcome.category) == (use, category), outcome
        if outcome.passed:
            assert outcome.evidence.comparison is not None
            assert outcome.evidence.comparison.strict_correct
        else:
            assert outcome.phase is Phase.CHECK


def test_times_are_taken_with_a_kept_reference_too(empty: Rig) -> None:
    for use in (1, 2):
        outcome = empty.judge(request(SLOW, settings=QUICK.model_copy(update={"timing": Timing(calls=10, warmup=1)})))
        assert (outcome.category, uses(outcome)) == (Category.PASSED, use)
        assert outcome.runtime is not None
        assert outcome.runtime.median_ms > 9
        assert outcome.baseline is not None
        assert outcome.baseline.median_ms < outcome.runtime.median_ms


def test_a_kept_reference_s_time_counts_from_when_it_was_taken(empty: Rig) -> None:
    burn = "import time\nbegun = time.thread_time()\nwhile time.thread_time() - begun < 1: pass\n"
    first, second = (empty.judge(request(problem=PROBLEM + burn)) for _ in range(2))
    assert uses(second) == 2
    assert 0 < (second.evidence.cpu_s or {})["reference"] < (first.evidence.cpu_s or {})["reference"] - 0.5


def test_other_settings_have_another_reference(empty: Rig) -> None:
    for changes, use in (
        ({}, 1),
        ({"checks": 3}, 2),
        ({"seed": 7}, 1),
        ({"precision": Precision.BF16}, 1),
        ({"limits": Limits(processes=100)}, 1),
        ({}, 3),
    ):
        assert uses(empty.judge(request(settings=QUICK.model_copy(update=changes)))) == use, changes


def test_owners_share_no_reference(empty: Rig) -> None:
    """Its evidence would show an owner that another one has the same problem."""
    assert [uses(empty.judge(request(), caches)) for caches in ("", "ada", "ada")] == [1, 1, 2]


def test_the_one_that_waits_longest_goes_first(empty: Rig) -> None:
    for number in range(8):
        reference(empty, str(number)).leave(str(number), {}, NEVER_WANTED, seconds=600)
    until(lambda: len(sealed(empty)) == 8, what="eight references")
    if empty.slot.uid is not None:
        until(lambda: len({linux.owner(pid) for pid in sealed(empty)}) == 8, what="eight uids")
    reference(empty, "8").leave("8", {}, NEVER_WANTED, seconds=600)
    assert empty.forkserver.take("0") is None
    for number in range(1, 9):
        found = empty.forkserver.take(str(number))
        assert found is not None
        word, descriptors = found
        again = SealedProcess.taken(empty.forkserver, word.scratch, descriptors, Phase.REFERENCE, compile_s=60.0)
        assert again.stop().reason is End.STOPPED
    gone(empty)


@pytest.mark.parametrize(
    ("problem", "category"),
    [
        (PROBLEM.replace("return torch.nn", "raise ValueError; return torch.nn"), Category.REFERENCE_ERROR),
        (PROBLEM.replace("randn(4", "randn(int(torch.randint(1, 9999, ())) * 4"), Category.INVALID_PROBLEM),
    ],
)
def test_a_problem_that_failed_is_not_kept(empty: Rig, problem: str, category: Category) -> None:
    assert empty.judge(request(problem=problem)).category is category
    gone(empty)


@contextlib.contextmanager
def killing(rig: Rig, role: Role, victims: Callable[[], list[int]]) -> Generator[None]:
    """Kill processes like an operator, after code in a sealed process of a role created the file ``here``."""

    def kill() -> None:
        until(lambda: any(Path(f"/proc/{pid}/cwd/here").exists() for pid in rig.sealed(role)), what="foreign code")
        for pid in victims():
            os.kill(pid, signal.SIGKILL)

    with ThreadPoolExecutor(1) as pool:
        killed = pool.submit(kill)
        yield
        killed.result()


def judges() -> list[int]:
    """Return the judges: forks of this process. Its other children, such as services, run other programs."""
    own = proc(os.getpid(), "cmdline")
    return [pid for pid in linux.children(os.getpid()) if proc(pid, "cmdline") == own]


def test_after_the_fleet_s_failure_nothing_is_kept(empty: Rig) -> None:
    with killing(empty, Role.CANDIDATE, judges):
        assert empty.judge(request(HANGING, settings=PATIENT)).category is Category.WORKER_LOST
    gone(empty)
    assert uses(empty.judge(request())) == 1


def test_a_reference_that_an_operator_kills_is_the_fleet_s_failure(empty: Rig) -> None:
    endless = "open('here', 'w'); import time; time.sleep(1000); return torch.nn"
    with killing(empty, Role.REFERENCE, lambda: sealed(empty)):
        outcome = empty.judge(request(problem=PROBLEM.replace("return torch.nn", endless)))
    assert (outcome.category, outcome.facts.signal) == (Category.WORKER_LOST, "SIGKILL")
    gone(empty)


def test_one_that_died_while_it_was_kept_is_not_taken(empty: Rig) -> None:
    empty.judge(request())
    [pid] = sealed(empty)
    os.kill(pid, signal.SIGKILL)
    outcome = empty.judge(request())
    assert (outcome.category, uses(outcome)) == (Category.PASSED, 1)
    assert sealed(empty) != [pid]


def test_one_that_answers_otherwise_is_replaced(empty: Rig) -> None:
    problem = PROBLEM.replace(
        "        self.layer", "        Model.n = getattr(Model, 'n', 0) + 1\n        self.layer"
    ).replace("gelu(self.layer(x))", "gelu(self.layer(x)) * (1 if Model.n == 1 else 1.00001)")
    assert uses(empty.judge(request(problem=problem))) == 1
    outcome = empty.judge(request(problem=problem))
    assert outcome.category is Category.PASSED
    assert outcome.evidence.reference is not None
    assert outcome.evidence.reference.replaced == "its answer to an earlier input has changed"
    assert uses(outcome) == 1


@pytest.mark.nightly
def test_a_fork_server_takes_all_that_it_keeps_along(judge_environment: None) -> None:
    with Rig(keeps=True) as rig:
        assert rig.judge(request()).passed
        until(lambda: len(rig.sealed(Role.REFERENCE, Role.CANDIDATE)) == 2, what="a reference and a candidate")
        pids = rig.sealed(Role.REFERENCE, Role.CANDIDATE)
        os.kill(rig.forkserver.pid, signal.SIGKILL)
        until(lambda: all(linux.is_zombie(pid) for pid in pids), what="their end")


CASE = Case(1, drawn=2, inputs=[torch.zeros(64)], outputs=[torch.zeros(1)])


def memo_of(outcome: Outcome, *, used: int = 1, nbytes: int = 64, ended: bool = False) -> warm.Memo | None:
    """Return the memo of a reference that has answered a case of this size, or None if it is not kept."""
    case = replace(CASE, inputs=[torch.zeros(nbytes, dtype=torch.uint8)])

    def digest(_: Case) -> str:
        return "digest"

    report = Report(End.EXITED, "reference", 0, 0, 0, 0, "")
    process, proxy = SimpleNamespace(ended=report if ended else None), SimpleNamespace(arena_bytes=0, seed=3, source="")
    reference = SimpleNamespace(proxy=proxy, case=case, process=process, digest=digest)
    return warm.memo_of(cast("Reference", reference), outcome, used)


def outcome_of(category: Category) -> Outcome:
    return Outcome.model_construct(category=category)


def test_the_policy_in_one_place() -> None:
    passed, wrong = outcome_of(Category.PASSED), outcome_of(Category.WRONG_VALUES)
    assert memo_of(passed) == warm.Memo(
        uses=1, source=warm.hash_of(""), weights=3, drawn=2, seed=1, on_device=False, digest="digest", arena_bytes=0
    )
    assert memo_of(wrong, used=63) is not None
    assert memo_of(wrong, used=64) is None
    assert memo_of(passed, nbytes=(64 << 20) + 1) is None
    assert memo_of(passed, ended=True) is None
    for category in Category:
        kept = memo_of(outcome_of(category)) is not None
        assert kept == (category is Category.PASSED or category.blame == "candidate")


def test_a_reference_that_nobody_takes_is_ended(empty: Rig) -> None:
    process = reference(empty)
    until(lambda: sealed(empty), what="the reference")
    process.leave("mine", {}, NEVER_WANTED, seconds=0.5)
    gone(empty)
    assert empty.forkserver.take("mine") is None


def test_references_whose_memory_is_wanted_are_ended(empty: Rig) -> None:
    ledger, left = Ledger(empty.slot.ledger, 1), booking.wanted_file(empty.slot.ledger)
    with ledger.book(1, label="large", wait_s=0):
        ledger.want_room()
    reference(empty, "before").leave("before", {}, left, seconds=600)
    reference(empty, "elsewhere").leave("elsewhere", {}, NEVER_WANTED, seconds=600)
    until(lambda: len(sealed(empty)) == 2, what="both")
    ledger.want_room()
    until(lambda: len(sealed(empty)) == 1, what="the end of the first")
    assert empty.forkserver.take("before") is None
    found = empty.forkserver.take("elsewhere")
    assert found is not None
    SealedProcess.taken(empty.forkserver, found[0].scratch, found[1], Phase.REFERENCE, compile_s=60.0).stop()
    gone(empty)


def test_a_process_that_was_left_can_be_taken_once(empty: Rig) -> None:
    reference(empty).leave("mine", {"a": 1}, NEVER_WANTED)
    assert empty.forkserver.take("other") is None
    found = empty.forkserver.take("mine")
    assert found is not None
    word, descriptors = found
    assert replace(word, cpu_s=0.0) == Keep(str(empty.slot.scratch / "left"), "mine", {"a": 1}, str(NEVER_WANTED), 60.0)
    assert empty.forkserver.take("mine") is None
    again = SealedProcess.taken(empty.forkserver, word.scratch, descriptors, Phase.REFERENCE, compile_s=60.0)
    assert again.stop().reason is End.STOPPED
    gone(empty)


# Prewarmed candidates -----------------------------------------------------------------------------------

#: Kernel that prints its process and the files in its working directory.
TELLING = 'import os\nprint("ran in", os.getpid(), sorted(os.listdir()))\n' + KERNEL


def ran_in(outcome: Outcome) -> int:
    [line] = [line for line in outcome.log.splitlines() if line.startswith("ran in")]
    return int(line.split()[2])


def waiting(rig: Rig) -> int:
    until(lambda: len(rig.sealed(Role.CANDIDATE)) == 1, what="a candidate that waits")
    [pid] = rig.sealed(Role.CANDIDATE)
    return pid


@pytest.fixture
def made(keeping: Rig) -> int:
    """Return the candidate that an earlier evaluation prewarmed."""
    if os.getuid() != 0:
        pytest.skip("a fleet that is not root keeps nothing")
    if not keeping.sealed(Role.CANDIDATE):
        assert keeping.judge(request()).passed
    return waiting(keeping)


@pytest.mark.parametrize(("body", "category"), [(RETURN, Category.PASSED), ("os._exit(3)", Category.CRASHED)])
def test_each_serves_one_kernel_and_leaves_another(keeping: Rig, made: int, body: str, category: Category) -> None:
    assert not (Path(f"/proc/{made}/cwd") / "kernel.py").exists()
    outcome = keeping.judge(request(TELLING.replace(RETURN, body)))
    assert (outcome.category, ran_in(outcome)) == (category, made)
    assert "'kernel.py'" in outcome.log
    following = waiting(keeping)
    assert following != made
    again = keeping.judge(request(TELLING.replace("gelu", "relu"), PROBLEM.replace("gelu", "relu")))
    assert (again.category, ran_in(again)) == (Category.PASSED, following)


def test_one_with_other_limits_is_not_taken(keeping: Rig, made: int) -> None:
    outcome = keeping.judge(request(TELLING, settings=QUICK.model_copy(update={"limits": Limits(processes=100)})))
    assert outcome.category is Category.PASSED
    assert ran_in(outcome) != made
    assert made not in keeping.sealed(Role.CANDIDATE)


def test_after_the_problem_s_failure_none_is_made(keeping: Rig, made: int) -> None:
    assert keeping.judge(request("def")).category is Category.SYNTAX_ERROR
    assert keeping.sealed(Role.CANDIDATE) == [made]
    assert keeping.judge(request(problem=PROBLEM.replace("gelu", "undefined"))).category is Category.REFERENCE_ERROR
    until(lambda: not keeping.sealed(Role.CANDIDATE), what="its end")


def test_one_that_was_killed_meanwhile_is_not_taken(keeping: Rig, made: int) -> None:
    os.kill(made, signal.SIGKILL)
    until(lambda: not keeping.sealed(Role.CANDIDATE), what="its end")
    outcome = keeping.judge(request(TELLING))
    assert outcome.category is Category.PASSED
    assert ran_in(outcome) != made


def test_it_makes_room_where_memory_is_wanted(keeping: Rig, made: int) -> None:
    ledger = Ledger(keeping.slot.ledger, 1)
    with ledger.book(1, label="large", wait_s=0):
        ledger.want_room()
    until(lambda: not keeping.sealed(Role.CANDIDATE), what="its end")


@pytest.mark.nightly
@pytest.mark.usefixtures("made")
def test_libraries_of_a_builder_reach_it(keeping: Rig) -> None:
    assert extension.judge(keeping, extension.kernel()).category is Category.PASSED
    for slot in ("builder", "store"):
        pid = waiting(keeping)
        outcome = extension.judge(keeping, extension.kernel(after="print('ran in', os.getpid(), WHO)"))
        assert outcome.category is Category.PASSED, outcome
        assert outcome.evidence.build is not None
        assert outcome.evidence.build.where == slot
        assert f"ran in {pid} candidate" in outcome.log
