"""The judge's figures have their places in the evidence of an outcome."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from kqueue.categories import Category
from kqueue.contract import Backend, Settings
from kqueue.evidence import Evidence
from tests.samples import ended
from workers.judge.trial import compare, physics, provenance, static
from workers.judge.trial.cases import Case

KERNEL = """
import time, torch, triton
@triton.jit
def add_kernel(x): pass
class ModelNew(torch.nn.Module):
    def forward(self, x):
        time.sleep(1)
        torch.cuda.synchronize = None
        return x
"""


def comparison(kind: str) -> dict[str, Any]:
    ref = torch.arange(1, 65, dtype=torch.float32)
    case = Case(0, outputs=[ref], kind=kind, exact=[ref.double()])
    return compare.merge_errors([compare.check_values([ref + 1e-6], case, Settings())])


@pytest.mark.parametrize(
    "evidence",
    [
        {"findings": static.findings(KERNEL, Backend.TRITON)},
        {"provenance": provenance.assess([("add_kernel", 9, 1), ("nvjet", 1, 1)], KERNEL, Backend.TRITON)},
        {"provenance": provenance.assess([], KERNEL, Backend.CUDA)},
        {"floor": physics.floor(32, 4096, 4e12)},
        {"comparison": comparison("given")},
        {"comparison": comparison("scaled")},
    ],
    ids=lambda evidence: next(iter(evidence)),
)
def test_what_a_judge_finds_is_kept_as_it_is(evidence: dict[str, Any]) -> None:
    outcome = ended(Category.CRASHED).model_copy(update={"evidence": evidence})
    assert outcome.evidence.model_dump(mode="json") == evidence
    assert Evidence.model_validate_json(outcome.evidence.model_dump_json()) == outcome.evidence
