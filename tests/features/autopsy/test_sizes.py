"""Sizes in a problem's source: their detection, their replacement, and fixed inputs."""

from __future__ import annotations

import pytest

from kqueue import shapes
from kqueue.contract import Request
from kqueue.features.autopsy import shrink
from kqueue.features.autopsy.shrink import Fill

PROBLEM = '''"""Größen: 7 stands in a text."""
import torch

BATCH, WIDTH = 16, 2 * 300  # ü
OUTPUT_TOLERANCE = {"atol": 2}
EPS = 1e-5
FLAG, HEADS = True, 24


class Model(torch.nn.Module):
    def __init__(self, BATCH=99):
        self.heads = [HEADS for _ in range(BATCH)]


def rows(n=5):
    return f"{44}" and n


def unused():
    return 77


def get_inputs():
    return [torch.randn(rows(), WIDTH), 1, "ä", 33]


def get_init_inputs():
    return [WIDTH]
'''


def test_sizes_are_numbers_of_constants_and_of_what_makes_inputs() -> None:
    """Numbers in classes, or read by them, in unused functions, texts and the tolerance, or below 2, are no sizes."""
    found = shapes.sizes_of(PROBLEM)
    constants = [("(BATCH, WIDTH)", value, 4) for value in (16, 2, 300)]
    made = [("rows()", 5, 15), ("get_inputs()", 33, 24)]
    assert [(number.name, number.value, number.line) for number in found] == constants + made


def test_only_the_numbers_are_rewritten() -> None:
    """The rest of the source is unchanged, including multi-byte characters."""
    found = shapes.sizes_of(PROBLEM)
    assert shapes.with_sizes(PROBLEM, found, [number.value for number in found]) == PROBLEM
    changed = PROBLEM.replace("16, 2 * 300  # ü", "1, 2 * 129  # ü").replace("n=5", "n=3").replace('"ä", 33', '"ä", 4')
    assert shapes.with_sizes(PROBLEM, found, [1, 2, 129, 3, 4]) == changed


@pytest.mark.parametrize("source", ["def (", "x = 5\n" * 65, "(" * 5000])
def test_a_source_that_cannot_be_read_or_is_data_has_no_sizes(source: str) -> None:
    assert shapes.sizes_of(source) == ()


def test_fixed_inputs_keep_the_source_and_are_a_valid_problem() -> None:
    """Fixed inputs are appended, so that the problem's line numbers stay valid."""
    made = shrink.fixed(PROBLEM, (3, 4), Fill.ONES, (0, 5))
    assert made.startswith(PROBLEM)
    assert made.rstrip().endswith("get_inputs = _fixed_inputs(get_inputs, (3, 4), 'ones', (0, 5))")
    Request(problem=made, kernel="class ModelNew: ...", backend="torch")  # type: ignore[arg-type]
