"""Checked calls on large inputs share the device, and the work of other judges is not blamed on a kernel."""

from __future__ import annotations

from typing import Any

import pytest

from kqueue.categories import Category
from kqueue.contract import Deadlines, Outcome, Phase, Request, Settings, Timing
from tests.judge.rig import Rig
from tests.judge.sources import kernel, problem
from workers.judge.pipeline.cases import Case
from workers.judge.pipeline.context import Context
from workers.judge.pipeline.exchange import Candidate

pytestmark = pytest.mark.slow("judges several kernels at once")

SHARES = "workers.judge.pipeline.stages.measure.shares_checks"

PROBLEM, KERNEL = problem("x: torch.relu(x)"), kernel("x: torch.relu(x)")
SLOW = KERNEL.replace("return", "import time; time.sleep(0.05)\n        return")
HANGING = KERNEL.replace("return", "import time; time.sleep(1000)\n        return")
QUICK = Settings(checks=2, timing=Timing(calls=5, warmup=1), deadlines=Deadlines(check_s=20))


@pytest.fixture(autouse=True)
def _shared_checks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the checks of every problem share the GPU. The judges are forked from this process."""

    def shares(context: Context, _: Any) -> bool:
        return not context.granted

    monkeypatch.setattr(SHARES, shares)


def judge(rig: Rig, source: str, settings: Settings = QUICK) -> Outcome:
    return rig.judge(Request(problem=PROBLEM, kernel=source, backend="torch", settings=settings))


def test_only_the_timing_has_the_device_alone(rig: Rig) -> None:
    outcome = judge(rig, KERNEL)
    assert outcome.category is Category.PASSED
    durations = outcome.evidence.durations_s
    assert durations is not None
    assert 0 < durations["check"] <= durations["untimed_check"]
    assert 0 < durations["time"] <= durations["alone_measure"]

    outcome = judge(rig, KERNEL.replace("relu", "tanh"))
    assert outcome.category is Category.WRONG_VALUES
    assert "alone_measure" not in (outcome.evidence.durations_s or {})


def test_one_whose_time_others_have_taken_is_checked_alone(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    answer = Candidate.answer
    calls: list[Case] = []

    def answered(candidate: Candidate, case: Case) -> list[Any]:
        if not calls:
            candidate.process.enter(Phase.CHECK, 0.02)  # all the time that other judges leave
        calls.append(case)
        return answer(candidate, case)

    monkeypatch.setattr(Candidate, "answer", answered)
    outcome = judge(rig, SLOW)
    assert outcome.category is Category.PASSED
    assert "untimed_check" not in (outcome.evidence.durations_s or {})


def test_one_that_never_ends_is_a_timeout(rig: Rig) -> None:
    outcome = judge(rig, HANGING, QUICK.model_copy(update={"deadlines": Deadlines(check_s=1)}))
    assert (outcome.category, outcome.phase) == (Category.TIMEOUT, Phase.CHECK)
    assert "untimed_check" not in (outcome.evidence.durations_s or {})
    assert "alone_measure" in (outcome.evidence.durations_s or {})
