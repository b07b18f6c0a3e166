"""Evaluations that a judge finishes by static checks, without a record of the backend."""

from __future__ import annotations

from typing import Any, cast

import pytest

from kqueue.contract import Policies, Policy, Request, Settings
from tests.judge.linear import PROBLEM, right
from workers.judge.api import Judges

pytestmark = pytest.mark.slow("judges many kernels")


class _Asked(Exception):
    """A request of the judge to its backend."""


class _NoBackend:
    """A backend that raises an exception at every request."""

    def __getattr__(self, name: str) -> Any:
        raise _Asked(name)


def _judge(judges: Judges, kernel: str, problem: str = PROBLEM) -> Any:
    settings = Settings(policies=Policies(findings=Policy.REJECT))
    request = Request(problem=problem, kernel=kernel, backend="torch", settings=settings)
    return judges.judge(request, judges.forkserver.slot, cast("Any", _NoBackend()))


@pytest.mark.parametrize(
    ("kernel", "problem", "category"),
    [
        ("def f(:\n", PROBLEM, "syntax_error"),
        ("x = 1\n", PROBLEM, "entry_point_missing"),
        (right(), "class Model(:\n", "invalid_problem"),
        (right() + "(" * 5000, PROBLEM, "syntax_error"),
        (right("import ctypes; ctypes.CDLL(None).ptrace(0, 0, 0, 0)"), PROBLEM, "rejected_by_policy"),
    ],
)
def test_reading_uses_no_process_up(judges: Judges, kernel: str, problem: str, category: str) -> None:
    assert _judge(judges, kernel, problem).category == category
    assert not judges.status_page.used


def test_judging_uses_the_process_up_before_it_begins(judges: Judges) -> None:
    with pytest.raises(_Asked):
        _judge(judges, right())
    assert judges.status_page.used
