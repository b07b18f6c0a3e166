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
from workers.judge.pipeline.stages.measure import _Checks  # pyright: ignore[reportPrivateUsage]


@pytest.mark.parametrize(("are_copies", "calls", "expected"), [(True, 1, 2), (False, 2, "again"), (False, 1, 1)])
def test_a_wrong_answer_is_confirmed_and_repeated(are_copies: bool, calls: int, expected: int | str) -> None:
    """The reference finds its own errors to be as large, or withdraws its answer. Copies are then compared again."""
    given, variant = Case(seed=1), Case(seed=2, kind="sparse", outputs=[torch.zeros(4)])
    made: list[Case] = []

    def answer(case: Case) -> list[torch.Tensor]:
        made.append(case)
        return [] if case is given else [torch.ones(4)]

    def confirm(_: Case) -> None:
        variant.outputs = [torch.ones(4)] if expected != 1 else []

    reference = SimpleNamespace(answer=lambda case: [case] if case is given or case.outputs else [], confirm=confirm)
    steps = SimpleNamespace(timed=contextlib.nullcontext, backstop=contextlib.nullcontext, enter=str)
    anything: Any = SimpleNamespace(
        settings=Settings(checks=1), steps=steps, evidence=None, compared=None, reference=reference, baseline=None
    )
    candidate: Any = SimpleNamespace(answer=answer, check_inputs=str)
    checks: Any = _Checks(anything, anything, candidate)
    checks._caller = SimpleNamespace(call=lambda cases: [answer(*cases)]) if are_copies else None
    if isinstance(expected, int):
        assert sum(checks._check(case, None) is not None for case in (given, variant)) == expected
    else:
        with pytest.raises(EvaluationEnded, match=expected):
            [checks._check(case, None) for case in (given, variant)]
    assert made == [given] + [variant] * calls
