"""The gallery has every category. test_demo.py judges it."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from kqueue import backends
from kqueue.categories import Blame, Category
from tests.gallery import gallery

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


ENTRIES = {entry.name: entry for entry in gallery.entries()}
CPU_GOOD = [e for e in gallery.entries("cpu") if e.expected is Category.PASSED]
#: No static policy and no detection of cheats decides a verdict yet.
NOT_REACHED = {Category.REJECTED_BY_POLICY, Category.REWARD_HACK}
GPU_ONLY = {
    Category.ILLEGAL_MEMORY_ACCESS, Category.CUDA_ERROR, Category.LAUNCH_RESOURCES_EXCEEDED, Category.GPU_OUT_OF_MEMORY,
}  # fmt: skip


def test_every_category_of_candidate_and_problem_is_shown() -> None:
    """The gpu lane has every category of a kernel or problem, and the cpu lane all except the GPU's."""
    caused = {c for c in Category if c.blame in (Blame.CANDIDATE, Blame.PROBLEM, Blame.NONE)} - NOT_REACHED
    caused.remove(Category.TESTS_FAILED)  # no kernel causes this
    assert gallery.categories_covered("gpu") == caused
    assert gallery.categories_covered("cpu") == caused - GPU_ONLY


def test_every_problem_has_a_good_kernel_and_every_backend_too() -> None:
    """At least ten problems have a right kernel on the gpu lane, and so does every backend."""
    good = [e for e in gallery.entries("gpu") if e.expected is Category.PASSED]
    faulty = {e.problem for e in ENTRIES.values() if e.expected.blame is Blame.PROBLEM}
    solved = {e.problem for e in good}
    assert solved == set((EXAMPLES / "problems").glob("*.py")) - faulty
    assert len(solved) >= 10
    assert {e.backend for e in good} == set(backends.registered())
    assert {e.backend for e in CPU_GOOD} == set(backends.on_cpu())


def test_every_file_is_in_the_table() -> None:
    """Every kernel file is in the table, and each source except one parses and has a docstring."""
    assert len(ENTRIES) == len(gallery.entries())
    assert {e.kernel for e in ENTRIES.values()} == set((EXAMPLES / "kernels").rglob("*.py"))
    assert {e.problem for e in ENTRIES.values()} == set((EXAMPLES / "problems").glob("*.py"))
    for file in {*(e.kernel for e in ENTRIES.values()), *(e.problem for e in ENTRIES.values())}:
        source = file.read_text(encoding="utf-8")
        if file.stem == "syntax_error":
            with pytest.raises(SyntaxError):
                ast.parse(source)
        else:
            assert ast.get_docstring(ast.parse(source)), file


def test_requests_are_valid() -> None:
    """Every entry makes a valid request for its lanes, with few calls on the cpu lane, and refuses another lane."""
    for lane in ("cpu", "gpu", "gpu.h200"):
        for entry in gallery.entries(lane):
            request = entry.request(lane)
            assert (request.lane, request.kernel_label) == (lane, entry.name)
            if lane == "cpu":
                assert request.backend in backends.on_cpu()
                assert request.settings.checks <= 3
                assert request.settings.timing.calls <= 20
    with pytest.raises(ValueError, match="not for the lane 'cpu'"):
        ENTRIES["good/cuda/gelu"].request("cpu")
