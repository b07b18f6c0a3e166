"""The checked calls of one candidate, counted without processes."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kqueue.contract import Settings
from workers.judge.ending import EvaluationEnded
from workers.judge.pipeline.cases import Case
from workers.judge.pipeline.evidence import Comparisons, Observed
from workers.judge.pipeline.stages.measure import _Checks  # pyright: ignore[reportPrivateUsage]


@pytest.mark.parametrize(("answers", "expected"), [([1.0, 1.0], 2), ([1.0, 1.00001], "nondeterministic"), ([1.0], 1)])
def test_a_wrong_answer_to_a_variant_is_confirmed_and_repeated(answers: list[float], expected: int | str) -> None:
    """The reference withdraws its answer, or finds its own errors to be as large. Then equal bits are right."""
    given, variant = Case(seed=1), Case(seed=2, kind="sparse", outputs=[torch.zeros(4)])

    def confirm(_: Case) -> None:
        variant.outputs = [torch.ones(4)] if answers else []

    anything: Any = SimpleNamespace(
        settings=Settings(checks=1),
        steps=SimpleNamespace(timed=contextlib.nullcontext, backstop=contextlib.nullcontext, enter=str),
        evidence=Observed(),
        compared=Comparisons(),
        reference=SimpleNamespace(
            answer=lambda case: [case] if case is given or case.outputs else [],
            confirm=confirm,
            form=SimpleNamespace(output_specs=()),
            forward_s=0.0,
            constant_outputs=[],
        ),
        cases=(given, variant),
        later=0,
        baseline=None,
    )
    candidate: Any = SimpleNamespace(
        prepare_calls=lambda *_: None,
        answer=lambda case: [] if case is given else [torch.full((4,), answers.pop(0))],
        check_inputs=str,
    )
    checks = _Checks(anything, anything, candidate)
    if isinstance(expected, int):
        assert checks.run() == anything.evidence.checks == expected
    else:
        with pytest.raises(EvaluationEnded, match=expected):
            checks.run()
