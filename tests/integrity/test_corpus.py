"""The corpus is whole, its report is what its results say, and the programs of the cpu lane end as expected."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kqueue.categories import Category
from kqueue.contract import CPU_BACKENDS
from tests.integrity import report
from tests.integrity.corpus import CONTROL, FAMILIES, HERE, Facts, Judgement, Program, judge, program, programs
from tests.judge.rig import Rig

ALL = {entry.name: entry for entry in programs()}
CPU_LANE = [entry for entry in programs("cpu") if entry.backend in CPU_BACKENDS]


def test_names_are_unique_and_enough() -> None:
    """No two programs share a name; at least 60 families of cheats are shown, and controls."""
    assert len(ALL) == len(programs())
    shown = {entry.family for entry in ALL.values()}
    assert shown <= {*FAMILIES, CONTROL}
    assert len(shown - {CONTROL}) >= 60
    assert sum(entry.is_control for entry in ALL.values()) >= 10


def test_every_file_is_in_a_table_and_explained() -> None:
    """No program lies about that nobody judges, and each says in several lines what it does and what stops it."""
    assert {entry.path for entry in ALL.values()} == set((HERE / "programs").rglob("*.py"))
    used = {entry.problem for entry in ALL.values()}
    assert set((HERE / "problems").glob("*.py")) <= used
    for entry in ALL.values():
        first, _, rest = entry.mechanism.partition("\n")
        assert first.endswith("."), entry.name
        assert rest.strip(), f"{entry.name}: its docstring does not say what stops it"


def test_a_program_that_may_pass_has_an_honest_time() -> None:
    """A cheat is allowed to pass only with a time that is looked at; a hole says why it is one."""
    for entry in ALL.values():
        assert entry.expected, entry.name
        if not entry.is_control and Category.PASSED in entry.expected:
            assert entry.honest or entry.least_ms, entry.name
        if entry.honest:
            honest = ALL[entry.honest]
            assert honest.is_control, entry.name
            assert entry.problem.stem.endswith(honest.problem.stem), entry.name
            assert entry.lanes & {"gpu"} <= honest.lanes, entry.name
            assert honest.settings.precision == entry.settings.precision, entry.name
            assert honest.constants.items() <= entry.constants.items(), entry.name


def test_requests_are_valid() -> None:
    """Every program makes a request for its lanes, on the cpu lane with few calls; a wrong lane is refused."""
    for entry in ALL.values():
        for lane in entry.lanes:
            request = entry.request(lane)
            assert request.kernel_label == entry.name
            if lane == "cpu":
                assert entry.backend in CPU_BACKENDS, entry.name
                assert request.settings.timing.calls <= 16
        for kind in entry.lanes:
            for source in entry.sources(kind):
                ast.parse(source)
    with pytest.raises(ValueError, match="has a constant SIZE"):
        program("controls/torch_gelu", CONTROL, PASSED, constants={"SIZE": 1}).sources("gpu")
    with pytest.raises(ValueError, match="not for the lane"):
        next(entry for entry in ALL.values() if "cpu" not in entry.lanes).request("cpu")


def test_the_report_is_what_the_results_say() -> None:
    """docs/integrity.md is generated: run tests/integrity/report.py after changing programs or results."""
    assert report.REPORT.read_text(encoding="utf-8") == report.report()


def test_the_pictures_are_drawn_from_the_results() -> None:
    """They hold the digest of the data that they were drawn from, and each has something to show."""
    for name, chart in report.pictures().items():
        assert report.digest(chart) in (report.RESULTS / name).read_text(encoding="utf-8"), name
    assert len(report.pictures()["clock.svg"].bars) > 10


@pytest.mark.parametrize("lane", report.LANES)
def test_committed_results_are_as_expected(lane: str) -> None:
    """What is committed as the corpus's results holds no cheat that passed and no false accusation."""
    for name, row in report.results(lane).get("programs", {}).items():
        assert Judgement(row["judgement"]).good, (name, row)


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
        (
            _cheat(PASSED),
            Facts(PASSED, 1.0, "cpu_clock", 9.0),
            Facts(PASSED, 1.0, "gpu_clock", 1.0),
            Judgement.OK,
        ),
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
    """A cheat that passes, a dishonest time and a false accusation are told apart from what is expected."""
    assert judge(entry, facts, "gpu", honest) is judgement


@pytest.fixture(scope="module")
def standing(judge_environment: None) -> Iterator[Rig]:
    """A judge that serves one request after the other, as a slot's does."""
    with Rig(stands=True) as rig:
        yield rig


@pytest.mark.slow("judges each program of a corpus")
@pytest.mark.parametrize("entry", CPU_LANE, ids=lambda entry: entry.name)
def test_a_program_ends_as_expected(standing: Rig, entry: Program) -> None:
    """On the cpu lane, one after the other: the category; of times only those that a sleep makes certain."""
    outcome = standing.judge(entry.request("cpu"))
    assert not isinstance(outcome, tuple), f"the judge died: {outcome}"
    found = judge(entry, Facts.of(outcome), "cpu")
    assert found.good, f"{found}: {outcome.category}: {outcome.message}\n{outcome.facts}\n{outcome.log}"


def test_the_kernels_hide_nothing_from_the_reader() -> None:
    """Sources parse; a program names no path of this repository."""
    for file in (HERE / "programs").rglob("*.py"):
        source = Path(file).read_text(encoding="utf-8")
        ast.parse(source)
        assert "tests/integrity" not in source, file
