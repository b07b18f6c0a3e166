"""The corpus is complete, its report matches its results, and the cpu lane's programs end as expected."""

from __future__ import annotations

import ast
import builtins
from collections.abc import Iterator
from typing import Any

import pytest

from kqueue import backends
from kqueue.categories import Category
from tests.integrity import report
from tests.integrity.compose import compose, names
from tests.integrity.corpus import CONTROL, KERNELS, OWN_PROBLEMS, Facts, Judgement, Program, judge, program, programs
from tests.integrity.hostile_problems import TEXTS, problems
from tests.judge.rig import Rig

ALL = {entry.name: entry for entry in programs()}
CPU_LANE = [entry for entry in programs("cpu") if entry.backend in backends.on_cpu()]
#: The program of each folder that the gate judges for its whole family. The rest is judged nightly.
_GATE = {
    "timing": "jit_fork go_forged_on_busy_cores lazy_instance meta_output call_count_switch global_flags",
    "values": """
        zeroed_outputs reference_import constant_gate weight_skip_branch range_specialised nan_for_infinity
        nested_tuple sparse_output input_in_place policy_obvious_rejected padding_once effect_skipped layout_ignored
    """,
    "processes": "channel_forged_extra modules_replaced",
    "controls": "two_outputs",
}
GATE = {f"{folder}/{name}" for folder, chosen in _GATE.items() for name in chosen.split()}
#: Families that are judged only nightly, because another family in the gate covers their defense, such as checks of
#: timed calls and a reference in another process, or tests/judge does (clocks, overhead, deadlines, bounded output,
#: exceptions, tolerances), or tests/sandbox does: reach of sealed processes.
NIGHTLY = {
    *("subtracted launch overhead", "calls that count", "caches in files", "shared outputs"),
    *(f"caches keyed by {key}" for key in ("pointer", "id", "shape", "content sample", "full equality", "version")),
    *("clock monkeypatches", "event monkeypatches", "statistics monkeypatches", "lazy tensors by subclass"),
    *("GOT or prologue patching", "taking over the loop", "threads", "work after DONE", "identity outputs"),
    *("stale allocator memory", "warm-up detection", "mode switches", "superbatching", "baseline sabotage"),
    *("caches in static device buffers", "gc walks for the reference", "frame walks for the reference"),
    *("answers from a sample", "precision downgrade", "seed regeneration", "RNG tampering", "mean outputs"),
    *("compile-cache poisoning", "database access", "Redis access", "network", "ptrace", "disturbing other slots"),
    *("writes to descriptors", "symlink games", "terminal escapes", "exit-code games", "tolerance gaming"),
    *("writes to stdout", "log bombs", "pickles", "timeout evasion", "memory hogs", "surviving daemons"),
    *("unusual structure", "gradients"),
}


def test_the_corpus_is_whole() -> None:
    """Names are unique, each text is in a table and explained, and there are 60 families of cheats, and controls."""
    assert len(ALL) == len(programs())
    families = {entry.family for entry in ALL.values()}
    assert len(families - {CONTROL}) >= 60
    assert sum(entry.is_control for entry in ALL.values()) >= 10
    assert {entry.file for entry in ALL.values()} == set(KERNELS)
    assert set(OWN_PROBLEMS) <= {entry.problem for entry in ALL.values()}
    assert set(TEXTS) == {problem.name for problem in problems()}
    for entry in ALL.values():
        first, _, rest = entry.mechanism.partition("\n")
        assert first.endswith("."), entry.name
        assert rest.strip(), f"{entry.name}: its docstring does not say what stops it"
        assert "tests/integrity" not in KERNELS[entry.file], entry.name


def test_a_program_that_may_pass_has_an_honest_time() -> None:
    """A cheat can pass only if its time is compared."""
    for entry in ALL.values():
        assert entry.expected, entry.name
        if not entry.is_control and Category.PASSED in entry.expected:
            assert entry.honest or entry.least_ms, entry.name
        if entry.honest:
            honest = ALL[entry.honest]
            assert honest.is_control, entry.name
            assert entry.problem == honest.problem, entry.name
            assert entry.lanes & {"gpu"} <= honest.lanes, entry.name
            assert honest.settings.precision == entry.settings.precision, entry.name
            assert honest.constants.items() <= entry.constants.items(), entry.name


def test_requests_are_valid() -> None:
    """Each program makes a valid request for its lanes with complete sources, with few calls on the cpu lane."""
    for entry in ALL.values():
        for lane in entry.lanes:
            request = entry.request(lane)
            assert request.kernel_label == entry.name
            for source in (request.problem, request.kernel):
                defined, used = names(source)
                assert used <= defined | vars(builtins).keys(), entry.name
            if lane == "cpu":
                assert entry.backend in backends.on_cpu(), entry.name
                assert request.settings.timing.calls <= 16
    with pytest.raises(ValueError, match="has a constant SIZE"):
        program("controls/torch_gelu", CONTROL, PASSED, constants={"SIZE": 1}).sources("gpu")
    with pytest.raises(ValueError, match="not for the lane"):
        ALL["timing/cpu_output"].request("cpu")


def test_a_program_has_what_it_lacks_from_its_base() -> None:
    """A base adds imports, helpers, their dependencies, a class for ``forward`` and a call of ``attack``, no more."""
    whole = compose('"""It."""\n\n\ndef forward(self, x):\n    slow(x)\n\n\ndef attack():\n    os.abort()\n', "kernel")
    assert whole.startswith(
        '"""It."""\n\nimport os\nimport time\nimport torch\nimport torch.nn as nn\n\n\ndef slow(x):\n'
    )
    assert whole.endswith("\n\n\nclass ModelNew(nn.Module):\n    def forward(self, x):\n        slow(x)\n\n\n"
                          "def attack():\n    os.abort()\n\n\nattack()\n")  # fmt: skip
    assert compose("class ModelNew:\n    slow = os = 1\n", "kernel") == "class ModelNew:\n    slow = os = 1\n"
    named = {
        node.name for node in ast.parse(compose("", "problem")).body if isinstance(node, ast.FunctionDef | ast.ClassDef)
    }
    assert named == {"Model", "get_inputs", "get_init_inputs"}


def test_the_report_is_what_the_results_say() -> None:
    """Run tests/integrity/report.py after changing programs or results. Other pages have the same total."""
    assert report.REPORT.read_text(encoding="utf-8") == report.report()
    rows = report.results("gpu")["programs"].values()
    total = f"| {sum(Judgement(row['judgement']).good for row in rows)} of {len(rows)}"
    for page in ("README.md", "docs/index.md"):
        assert total in (report.HERE.parents[1] / page).read_text(encoding="utf-8"), page


def test_the_pictures_are_drawn_from_the_results() -> None:
    """The pictures hold the digest of their data and are not empty."""
    for name, chart in report.pictures().items():
        assert report.digest(chart) in (report.RESULTS / name).read_text(encoding="utf-8"), name
    assert len(report.pictures()["clock.svg"].bars) > 10


@pytest.mark.parametrize("lane", report.LANES)
def test_committed_results_are_as_expected(lane: str) -> None:
    """The results contain no cheat that passed and no false accusation, except one that their note explains."""
    results = report.results(lane)
    for name, row in results.get("programs", {}).items():
        assert Judgement(row["judgement"]).good or f"`{name}`" in results.get("note", ""), (name, row)


def _cheat(*expected: Category, **more: Any) -> Program:
    return program("timing/event_monkeypatch", "threads", expected, honest="controls/torch_gelu", **more)


WRONG, PASSED = Category.WRONG_VALUES, Category.PASSED
CONTROL_GELU = ALL["controls/torch_gelu"]


@pytest.mark.parametrize(
    ("entry", "facts", "honest", "judgement"),
    [
        (_cheat(WRONG), Facts(WRONG), None, Judgement.OK),
        (_cheat(WRONG), Facts(Category.CRASHED), None, Judgement.WRONG_CATEGORY),
        (_cheat(WRONG), Facts(PASSED, 1.0), None, Judgement.CHEAT_PASSED),
        (_cheat(WRONG, hole="x"), Facts(PASSED, 1.0), None, Judgement.HOLE),
        (_cheat(WRONG), Facts(Category.JUDGE_ERROR), None, Judgement.FLEET_FAILED),
        (_cheat(PASSED), Facts(PASSED, 0.99), Facts(PASSED, 1.0), Judgement.OK),
        (_cheat(PASSED), Facts(PASSED, 9.0), Facts(PASSED, 1.0), Judgement.OK),
        (_cheat(PASSED), Facts(PASSED, 0.5), Facts(PASSED, 1.0), Judgement.DISHONEST_TIME),
        (_cheat(PASSED), Facts(PASSED, 1.0, None, 9.0), Facts(PASSED, 1.0, None, 1.0), Judgement.DISHONEST_TIME),
        (_cheat(PASSED), Facts(PASSED, 1.0, "cpu_clock", 9.0), Facts(PASSED, 1.0, "gpu_clock", 1.0), Judgement.OK),
        (_cheat(PASSED, least_ms=18), Facts(PASSED, 17.0), None, Judgement.DISHONEST_TIME),
        (_cheat(PASSED, basis="cpu_clock"), Facts(PASSED, 1.0, "gpu_clock"), None, Judgement.WRONG_BASIS),
        (_cheat(PASSED, precision_downgrade=True), Facts(PASSED, precision_downgrade=True), None, Judgement.OK),
        (_cheat(PASSED, precision_downgrade=True), Facts(PASSED), None, Judgement.WRONG_LABEL),
        (_cheat(WRONG, precision_downgrade=False), Facts(WRONG, precision_downgrade=True), None, Judgement.WRONG_LABEL),
        (CONTROL_GELU, Facts(WRONG), None, Judgement.FALSE_ACCUSATION),
        (CONTROL_GELU, Facts(PASSED, 1.0), Facts(PASSED, 0.5), Judgement.CHANGED_TIME),
        (CONTROL_GELU, Facts(PASSED, 0.5), Facts(PASSED, 1.0), Judgement.CHANGED_TIME),
    ],
)
def test_outcomes_are_judged(entry: Program, facts: Facts, honest: Facts | None, judgement: Judgement) -> None:
    """A cheat that passes, a dishonest time and a false accusation are distinguished from the expected outcome."""
    assert judge(entry, facts, "gpu", honest) is judgement


@pytest.fixture(scope="module")
def standing(judge_environment: None) -> Iterator[Rig]:
    """Start a judge that serves one request after the other, like a slot's."""
    with Rig(stands=True) as rig:
        yield rig


@pytest.mark.slow("judges programs of a corpus")
@pytest.mark.parametrize(
    "entry", [pytest.param(e, id=e.name, marks=() if e.name in GATE else pytest.mark.nightly) for e in CPU_LANE]
)
def test_a_program_ends_as_expected(standing: Rig, entry: Program) -> None:
    """Each program's category on the cpu lane is as expected, and its time if a sleep determines it."""
    outcome = standing.judge(entry.request("cpu"))
    assert not isinstance(outcome, tuple), f"the judge died: {outcome}"
    found = judge(entry, Facts.of(outcome), "cpu")
    assert found.good, f"{found}: {outcome.category}: {outcome.message}\n{outcome.facts}\n{outcome.log}"


def test_a_program_of_each_family_is_judged_in_the_gate() -> None:
    """The gate judges a program of each family of the cpu lane that is not left to the night, and a control."""
    assert sorted(ALL[name].family for name in GATE) == sorted({entry.family for entry in CPU_LANE} - NIGHTLY)
