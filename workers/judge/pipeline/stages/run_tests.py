"""Stage ``tests``: a repository's tests run in place of a kernel."""

from __future__ import annotations

from functools import partial

from kqueue.contract import Outcome, Phase
from workers.judge.pipeline import health, plan
from workers.judge.pipeline.context import Context
from workers.judge.pipeline.pytest_run import PytestRun


def run_tests(context: Context) -> Outcome:
    """Run a repository's tests. Their GPU memory use is unknown, so a slot's share is booked."""
    budget, slot = context.budget, context.slot
    budget.book(plan.of_first_draw(**budget.whole, alone=False))
    held = partial(health.held_bytes, slot.device) if slot.on_gpu else lambda: None
    tests = PytestRun(context.processes.begin_tests(), context.request, budget.plan.total, held)
    try:
        with context.steps.untimed("tests"), context.steps.backstop(Phase.CHECK):
            return tests.run()
    finally:
        context.evidence.tests, context.evidence.tests_log = tests.evidence["tests"], tests.log
