"""The label ``precision_downgrade``: set for the error of a lower precision, and for no other error."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from kqueue.contract import Precision, Settings
from workers.judge.ending import EvaluationEnded
from workers.judge.pipeline.cases import Case
from workers.judge.pipeline.compare import check_values

#: Number of terms of a product.
_WIDTH = 512


def truncated(x: torch.Tensor) -> torch.Tensor:
    """Convert to TF32 by truncation of the last 13 bits of the fraction, as tensor cores do with raw fp32 bits."""
    return (x.view(torch.int32) & ~0x1FFF).view(torch.float32)


def rounded(x: torch.Tensor) -> torch.Tensor:
    """Convert to TF32 by rounding to nearest."""
    return ((x.view(torch.int32) + 0x1000) & ~0x1FFF).view(torch.float32)


LOWER: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "tf32_truncated": truncated,
    "tf32_rounded": rounded,
    "fp16": lambda x: x.half().float(),
    "bf16": lambda x: x.bfloat16().float(),
}


def label(out: torch.Tensor, ref: torch.Tensor, exact: torch.Tensor | None = None, **settings: object) -> bool:
    """Return the label, whether the output passes or not. Without ``exact`` the reference's noise is known."""
    case = Case(0, outputs=[ref], exact=None if exact is None else [exact], noise=[] if exact is not None else [1e-7])
    try:
        found = check_values([out], case, Settings.model_validate(settings))
    except EvaluationEnded as ended:
        return bool(ended.outcome.facts.errors.precision_downgrade)
    return found.errors.precision_downgrade


def factors(*, positive: bool = False, scale: float = 1.0) -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(21)
    draw = torch.rand if positive else torch.randn
    return draw(256, _WIDTH) * scale, draw(_WIDTH, 128)


@pytest.mark.parametrize("known", [True, False], ids=["exact", "noise"])
@pytest.mark.parametrize("scale", [1e-3, 1.0, 1e3])
@pytest.mark.parametrize("positive", [False, True], ids=["signs", "positive"])
@pytest.mark.parametrize("name", list(LOWER))
def test_a_product_in_a_lower_precision_is_labelled(name: str, positive: bool, scale: float, known: bool) -> None:
    a, b = factors(positive=positive, scale=scale)
    exact = a.double() @ b.double()
    out = LOWER[name](a) @ LOWER[name](b)
    assert label(out, a @ b, exact if known else None)
    assert label(out, a @ b, exact if known else None, tolerance={"atol": 1e9, "rtol": 0.0})
    assert not label(torch.stack([a @ half for half in b.split(64, 1)], 1).reshape(256, 128), a @ b, exact)


@pytest.mark.parametrize("layers", [3, 12])
@pytest.mark.parametrize("name", ["tf32_rounded", "fp16", "bf16"])
def test_layers_in_a_lower_precision_are_labelled(name: str, layers: int) -> None:
    torch.manual_seed(23)
    x = torch.randn(64, _WIDTH)
    weights = [torch.randn(_WIDTH, _WIDTH) / _WIDTH**0.5 for _ in range(layers)]
    out, ref, exact = x, x, x.double()
    for weight in weights:
        out = torch.tanh(LOWER[name](out) @ LOWER[name](weight))
        ref, exact = torch.tanh(ref @ weight), torch.tanh(exact @ weight.double())
    assert label(out, ref, exact)


@pytest.mark.parametrize(
    ("precision", "kind", "lower"),
    [
        (Precision.FP16, torch.float16, torch.float8_e4m3fn),
        (Precision.FP16, torch.float16, torch.float8_e5m2),
        (Precision.BF16, torch.bfloat16, torch.float8_e5m2),
    ],
)
def test_fp8_in_the_place_of_16_bits_is_labelled(precision: Precision, kind: torch.dtype, lower: torch.dtype) -> None:
    a, b = (x.to(kind).double() for x in factors(scale=0.1))
    out, ref = a.to(lower).float() @ b.to(lower).float(), (a @ b).to(kind)
    assert label(out.to(kind), ref, a @ b, precision=precision)
    assert not label(torch.zeros_like(ref), ref, a @ b, precision=precision)


def _corner(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    out = a @ b
    out[-1, -1] = 0.0
    return out


def _with(value: float) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
    def product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        out = LOWER["fp16"](a) @ LOWER["fp16"](b)
        out[3, 5] = value
        return out

    return product


#: Wrong products, and offsets and factors of the sizes that fp16 and bf16 cause.
FAULTS: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "zeros": lambda a, b: (a @ b).zero_(),
    "swapped_weights": lambda a, b: a @ b.roll(1, 0),
    "transposed": lambda a, b: (b.T @ a.T).reshape(256, 128),
    "garbage": lambda a, b: torch.randn(256, 128) * 20,
    "negated": lambda a, b: -(a @ b),
    "a_term_less": lambda a, b: a[:, 1:] @ b[1:],
    "a_bias_less": lambda a, b: a @ b + torch.randn(128),
    "nan": lambda a, b: torch.full((256, 128), torch.nan),
    "one_nan": _with(torch.nan),
    "inf": lambda a, b: torch.full((256, 128), torch.inf),
    "one_inf": _with(-torch.inf),
    "a_corner": _corner,
    **{f"offset_{size:g}": lambda a, b, size=size: a @ b + size for size in (1e-3, 1e-2, 0.1, 1.0, 100.0)},
    **{f"factor_{size:g}": lambda a, b, size=size: a @ b * size for size in (1.0001, 1.001, 0.99, 1.1, 10.0)},
}


@pytest.mark.parametrize("known", [True, False], ids=["exact", "noise"])
@pytest.mark.parametrize("name", list(FAULTS))
def test_other_errors_are_not_labelled(name: str, known: bool) -> None:
    a, b = factors()
    assert label(FAULTS[name](a, b), a @ b, a.double() @ b.double() if known else None) is False


def test_few_values_and_infinite_ones_explain_nothing() -> None:
    """An offset of one value is as likely as a rounding error. A masked value is in both outputs."""
    a, b = factors()
    ref, exact, out = a @ b, a.double() @ b.double(), LOWER["bf16"](a) @ LOWER["bf16"](b)
    assert not label(out[0, :3], ref[0, :3], exact[0, :3])
    for tensor in (ref, exact, out):
        tensor[0, 0] = -torch.inf
    assert not label(out, ref, exact)
