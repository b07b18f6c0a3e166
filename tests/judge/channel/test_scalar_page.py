"""The scalar page, on which a reference reports values: any content decodes to values or raises one error."""

from __future__ import annotations

import contextlib
import json
import math
import struct
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from workers.judge.channel import scalar_page
from workers.judge.channel.bits import same_bits
from workers.judge.channel.protocol import Export, ProtocolError
from workers.judge.channel.scalar_page import ScalarPageError
from workers.judge.channel.tensors import DTYPES

MAGIC = scalar_page.encode(None)[:4]
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**200), 2**200) | st.floats() | st.text() | st.binary(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.tuples(inner, inner) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=20,
)
KINDS = ["tuple", "set", "frozenset", "size", "dict", "slice", "range", "complex", "bytes", "dtype", "device"]
#: Text that is nearly a scalar page's: the known kinds, with arbitrary contents.
TOLD = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5) | st.integers(0, 10**30),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.fixed_dictionaries({"is": st.sampled_from(KINDS) | inner}, optional={"of": inner})
        | st.fixed_dictionaries(
            {
                "is": st.just("tensor"),
                "dtype": st.sampled_from([*map(str, DTYPES), "torch.save"]) | inner,
                "shape": st.lists(st.integers(-3, 10**6), max_size=4) | inner,
                "at": st.integers(-8, 64) | inner,
            }
        )
    ),
    max_leaves=12,
)


def page(text: bytes, tensors: bytes = b"") -> bytes:
    return MAGIC + struct.pack("=QQ", len(text), len(tensors)) + text + tensors


def same(a: Any, b: Any) -> bool:
    """Return whether values are equal in type and order. NaN equals NaN."""
    if isinstance(a, float):
        return isinstance(b, float) and (a == b or (math.isnan(a) and math.isnan(b)))
    if isinstance(a, (list, tuple)):
        return type(a) is type(b) and len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, dict):
        return type(b) is dict and list(a) == list(b) and all(same(a[key], b[key]) for key in a)
    return type(a) is type(b) and a == b


@given(VALUES)
def test_values_survive_the_way(value: Any) -> None:
    assert same(value, scalar_page.decode(scalar_page.encode(value)))


def test_other_values_survive_too() -> None:
    plain = [torch.Size((2, 3)), slice(1, None, 2), range(9), {1, 2}, frozenset("ab"), 1j, torch.float16]
    assert scalar_page.decode(scalar_page.encode(plain)) == plain
    assert scalar_page.decode(scalar_page.encode(torch.device("cpu"))) == torch.device("cpu")
    for dtype in DTYPES:
        for shape in ((), (0, 3), (2, 3)):
            tensor = torch.full((*shape, dtype.itemsize), 64, dtype=torch.uint8).view(dtype).reshape(shape)
            [read, again] = scalar_page.decode(scalar_page.encode([tensor, tensor]))
            assert (read.dtype, read.shape) == (dtype, tensor.shape)
            assert all(same_bits(each, tensor) for each in (read, again))


@given(st.binary(max_size=200), st.sampled_from(["bare", "headed", "framed"]))
def test_no_bytes_do_more_than_be_refused(data: bytes, how: str) -> None:
    whole = {"bare": data, "headed": MAGIC + data, "framed": page(data[:100], data[100:])}[how]
    with contextlib.suppress(ScalarPageError):
        scalar_page.decode(whole)


@given(TOLD, st.binary(max_size=64))
def test_no_words_do_more_than_be_refused(told: Any, tensors: bytes) -> None:
    with contextlib.suppress(ScalarPageError):
        scalar_page.decode(page(json.dumps(told).encode(), tensors))


@pytest.mark.parametrize(
    ("told", "tensors"),
    [
        ([{"is": "tensor", "dtype": "torch.uint8", "shape": [1 << 20], "at": 0}] * 9000, 1 << 20),
        ([{"is": "tensor", "dtype": "torch.uint8", "shape": [0, 1 << 62, 1 << 62], "at": 0}], 0),
        ([{"is": "tensor", "dtype": "torch.int64", "shape": [-1], "at": 8}], 64),
        ({"is": "bytes", "of": 10**12}, 0),
        ({"is": "set", "of": [(2**61 - 1) * i for i in range(30_000)]}, 0),
        ({"is": "dict", "of": [[(2**61 - 1) * i, 0] for i in range(30_000)]}, 0),
        ({"is": "dict", "of": [[[], 1]]}, 0),
        ({"is": "complex", "of": [10**400, 0]}, 0),
        ({"is": "device", "of": "cuda:" + "9" * 11}, 0),
    ],
)
def test_what_would_cost_much_is_refused(told: Any, tensors: int) -> None:
    with pytest.raises(ScalarPageError):
        scalar_page.decode(page(json.dumps(told).encode(), bytes(tensors)))


def test_text_that_is_not_a_scalar_pages_is_refused() -> None:
    for text in (b"[" * 100_000, b"[" + b"9" * 5000 + b"]", b"\xff\xfe", b"", b'{"is"', b"{}", b"NaN,"):
        with pytest.raises(ScalarPageError):
            scalar_page.decode(page(text))


@given(st.binary(max_size=200), st.integers(0, 4), st.booleans())
def test_no_bytes_are_more_than_an_export(data: bytes, descriptors: int, headed: bool) -> None:
    whole = (Export(0, 1, (1,), (0,)).pack()[:4] if headed else b"") + data
    with contextlib.suppress(ProtocolError):
        export = Export.unpack(whole, list(range(descriptors)))
        assert len(export.sizes) == descriptors
        assert 0 < descriptors <= export.total
