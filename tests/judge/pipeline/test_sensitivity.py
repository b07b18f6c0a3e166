"""Sensitivity of a reference's answer to its inputs, and the requirements on kernels that follow."""

from __future__ import annotations

import random
import secrets
import textwrap
from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.judge.loopback import first_of, reference
from workers.judge.channel.bits import checksum
from workers.judge.pipeline import case_cache, compare, sensitivity
from workers.judge.pipeline.reference import BOUNDS, Reference

pytestmark = pytest.mark.slow("asks references often")

SOURCE = """
import torch
class Model(torch.nn.Module):
    def forward(self, {names}):
        {forward}
def get_inputs():
    {inputs}
"""
RANDN = "return [torch.randn(16, 8)]"
#: Inputs that :func:`little_room` holds one at a time and varies like inputs of any size.
LARGE = f"return [torch.rand({10 << 6}, 1 << 12)]"
#: Inputs like ``LARGE``, but small enough for many quick answers.
MANY = "return [torch.rand(512, 512)]"


@pytest.fixture
def little_room(monkeypatch: pytest.MonkeyPatch) -> None:
    """Divide the bounds of the memory for cases by 16."""
    monkeypatch.setattr(case_cache, "_ROOMY_BYTES", case_cache._ROOMY_BYTES // 16)


def loaded(forward: str, inputs: str = RANDN, names: str = "x", **settings: Any) -> Reference:
    forward = textwrap.indent(forward, " " * 8).strip()
    return reference(SOURCE.format(forward=forward, inputs=inputs, names=names), **settings)


# Noise -------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("little_room")
@pytest.mark.parametrize("inputs", [RANDN, LARGE], ids=["held together", "one at a time"])
def test_noise_is_what_rounding_errors_of_the_inputs_do(inputs: str) -> None:
    made = loaded("return x * 2, x * 1e4 - (x * 1e4).round()", inputs, bounds=replace(BOUNDS["cpu"], quick_s=0.0))
    first = first_of(made)
    before = checksum(first.inputs[0])
    made.cache.clear()
    sensitivity.learn(made, first)
    plain, cancelled = made.cache.fresh().noise
    assert 2e-8 < plain < 4e-7
    assert cancelled > 100 * plain
    made.answer(first)
    assert checksum(first.inputs[0]) == before
    assert first.noise == [plain, cancelled]


NORMALISED = """
import torch
class Model(torch.nn.BatchNorm1d):
    pass
def get_inputs():
    return [torch.randn(64, 8)]
def get_init_inputs():
    return [8]
"""


def test_noise_of_a_reference_with_buffers_is_that_of_its_outputs() -> None:
    made = reference(NORMALISED, bounds=replace(BOUNDS["cpu"], quick_s=0.0))
    first = first_of(made)
    sensitivity.learn(made, first)
    assert len(first.noise) == 1 < len(first.outputs)
    assert compare.check_values(first.outputs, first, made.settings).errors.strict_correct


# Regions -----------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("little_room")
@pytest.mark.parametrize(
    ("forward", "kind"),
    [
        ("return x * 2", "region_4096"),
        ("return x.mean(dim=1)", "region_4096"),
        ("return x.mean()", "region_256"),
        ("return (x - x).sum(dim=1)", None),
    ],
    ids=["elementwise", "by rows", "all", "nothing moves it"],
)
def test_a_region_is_as_small_as_moves_the_answer(forward: str, kind: str | None) -> None:
    made = loaded(forward, LARGE, checks=1)
    first = first_of(made)
    made.more_cases(first)
    before = first.inputs[0].clone()
    region = sensitivity.learn(made, first)
    assert (region and region.kind) == kind
    if region is None:
        return
    assert region.slot is None
    assert made.answer(region) == [region]
    changed = (region.inputs[0] != before).reshape(-1).nonzero()[:, 0]
    length = int(before.numel() / int(region.kind.partition("_")[2]))
    assert length * 0.99 <= len(changed) <= length
    assert int(changed[-1] - changed[0]) < length
    assert float(region.inputs[0].min()) >= 0
    assert float(region.inputs[0].max()) <= 1
    made.answer(first)
    assert torch.equal(first.inputs[0], before)


# Inputs that must be read ------------------------------------------------------------------------------


MIXED = "return [torch.randn(512, 512), torch.randn(512, 512), torch.randint(2, (512, 512))]"
#: Rows of which most are masked.
FEW = "m = torch.zeros(512, 1); m[::13] = 1; return [torch.randn(512, 512), m]"

#: Forward, inputs, and the least and most share of their bytes.
NEEDS = {
    "mean": ("return x.mean()", MANY, 0.8, 1.0),
    "elementwise": ("return x * 2", MANY, 0.8, 1.0),
    "half of the columns": ("return x[:, :256].sum(dim=1)", MANY, 0.05, 0.65),
    "one row": ("return x[0]", MANY, 0.0, 0.05),
    "sorted": ("return x[:, -1]", "return [torch.rand(512, 512).sort(dim=1).values]", 0.0, 0.1),
    "cut off": ("return x[:1] + torch.relu(x - 2)", MANY, 0.0, 0.05),
    "a view": ("return x.t()", MANY, 0.0, 0.0),
    "random answers": ("return x + torch.randn(x.shape)", MANY, 0.0, 1.0),
    "triangular": ("return x @ x", "return [torch.rand(512, 512).tril()]", 0.05, 0.65),
    "symmetric": ("return x @ x", "a = torch.rand(512, 512); return [(a + a.T) / 2]", 0.4, 0.51),
    "repeated": ("return x.cumsum(1)", "a = torch.rand(512, 256); return [torch.cat((a, a), dim=1)]", 0.2, 0.25),
    "a table": ("return x * 2", "return [torch.ones(512, 512)]", 0.0, 0.0),
    "decay": (
        "h = x[0]\nfor t in range(1, 448): h = 0.9 * h + x[t]\nreturn h", "return [torch.randn(448, 64)]", 0.0, 0.4
    ),
    "masked": ("return (x.exp() * y).sum(0)", FEW, 0.0, 0.3),
    "whole numbers beside": ("return (x * y).square().mean() + z.float().mean()", MIXED, 0.1, 0.5),
    "a table beside": (
        "return (x * y[0]).sum(1)",
        "return [torch.rand(512, 512) + torch.randn(512, 512), torch.ones(4096, 512)]", 0.0, 0.12,
    ),
}  # fmt: skip
GATE = {"elementwise", "half of the columns", "cut off", "a view", "symmetric", "decay", "masked", "a table beside"}


@pytest.mark.parametrize(
    "name", [name if name in GATE else pytest.param(name, marks=pytest.mark.nightly) for name in NEEDS]
)
def test_what_must_be_read(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # The share comes from 24 positions. By chance, nearly all of them could be in one half.
    monkeypatch.setattr(secrets, "randbits", random.Random(0).getrandbits)
    forward, inputs, least, most = NEEDS[name]
    made = loaded(forward, inputs, names="x, y=None, z=None")
    needed = sensitivity.needed_bytes(made, first_of(made), 0)
    assert least * made.cache.input_bytes <= needed <= most * made.cache.input_bytes


def test_nothing_must_be_read_where_nobody_knows() -> None:
    hurried = loaded("return x * 2", MANY)
    first = first_of(hurried)
    for left_s in (0.0, 0.01):
        hurried.proxy.left_s = left_s
        assert sensitivity.needed_bytes(hurried, first, 0) == 0
    for fault in ("x = x + (self.n % 5 == 0) * 1e-3", "assert self.n < 9"):
        made = loaded(f"self.n = getattr(self, 'n', 0) + 1\n{fault}\nreturn x[:16].sum(1)", MANY)
        assert sensitivity.needed_bytes(made, first_of(made), 0) <= 0.15 * made.cache.input_bytes
