"""The checked calls of one candidate, counted without processes."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace
from typing import Any

from kqueue.categories import Category
from kqueue.contract import Phase, Settings
from workers.judge.ending import EvaluationEnded
from workers.judge.pipeline.cases import Case
from workers.judge.pipeline.evidence import Comparisons, Observed
from workers.judge.pipeline.stages.measure import _Checks  # pyright: ignore[reportPrivateUsage]


def test_a_variant_without_a_confirmed_answer_does_not_count_as_checked() -> None:
    """The kernel is wrong on the variant, and the reference then withdraws its own answer to it."""
    given, variant = Case(seed=1), Case(seed=2, kind="sparse")
    wrong: dict[str, Any] = {"output": 0, "kind": "sparse", "wrong": 1, "of": 1, "first": []}
    withdrawn: list[Case] = []

    def run(case: Case) -> tuple[None, dict[str, str]]:
        if case is given:
            return None, {}
        raise EvaluationEnded(Category.WRONG_VALUES, "wrong", Phase.CHECK, **wrong)

    def answer(case: Case) -> list[Case]:
        return [] if case in withdrawn else [case]

    anything: Any = SimpleNamespace(
        settings=Settings(checks=1),
        steps=SimpleNamespace(timed=contextlib.nullcontext, backstop=contextlib.nullcontext, enter=str),
        evidence=Observed(),
        compared=Comparisons(),
        reference=SimpleNamespace(
            answer=answer,
            confirm=withdrawn.append,
            form=SimpleNamespace(output_specs=()),
            forward_s=0.0,
            constant_outputs=[],
        ),
        cases=(given, variant),
        later=0,
        baseline=None,
    )
    candidate: Any = SimpleNamespace(prepare_calls=lambda *_: None, run=run)
    assert _Checks(anything, anything, candidate).run() == 1
    assert anything.evidence.checks == 1
