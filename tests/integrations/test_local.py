"""The evaluator that starts a fleet, where one runs. test_real.py has it start one."""

from __future__ import annotations

import pytest

from kqueue import EvaluationFailed, InvalidRequest
from kqueue.config import Config
from kqueue.integrations import local
from kqueue.integrations.local import LocalKernelEvaluator
from tests.integrations.sources import BROKEN_REFERENCE, QUICK, REFERENCE, RIGHT, WRONG


def test_a_fleet_that_is_up_is_used(config: Config, capsys: pytest.CaptureFixture[str]) -> None:
    """The settings' fleet is used, and results have KernelBench's form."""
    with LocalKernelEvaluator(gpu="cpu", config=config, **QUICK) as evaluator:
        right = evaluator.evaluate(REFERENCE, RIGHT)
        wrong = evaluator.evaluate(REFERENCE, WRONG, True)
        with pytest.raises(EvaluationFailed):
            evaluator.evaluate(BROKEN_REFERENCE, RIGHT)
        with pytest.raises(InvalidRequest, match="fortran"):
            evaluator.evaluate(REFERENCE, RIGHT, backend="fortran")
        untimed = evaluator.evaluate(REFERENCE, RIGHT, measure_performance=False)
    assert (right["compiled"], right["correctness"]) == (True, True)
    assert right["runtime_stats"]["num_trials"] == 5
    assert (wrong["compiled"], wrong["correctness"], wrong["runtime"]) == (True, False, -1.0)
    assert (untimed["correctness"], untimed["runtime"]) == (True, -1.0)
    assert capsys.readouterr().err.startswith("FAILED: wrong_values")
    evaluator.close()
    client = local._warm_fleet(config.home_path)._client
    assert client is not None  # others' fleets are kept in use
    client.close()
