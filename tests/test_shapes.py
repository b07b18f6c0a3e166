"""The shapes that a problem lists: read from its text, and cut from it where they are held out."""

from __future__ import annotations

import ast
from typing import Any
from unittest.mock import Mock

import pytest

from kqueue import shapes
from kqueue.categories import Category
from kqueue.errors import InvalidRequest
from kqueue.evidence import Facts
from kqueue.features.autopsy.shrink import Autopsy, refused
from kqueue.feedback import instruction
from kqueue.judging import request_of
from tests.samples import ended

SOURCE = """\
SHAPES = [
    {"name": "small", "args": {"n": 8}},
    {"args": {"n": 4097, "bias": True}, "held_out": True},  # not a power of two
    {"args": {"n": 16}, "weight": 2.0},
]; other = "é"
class Model: ...
def get_inputs(n): return [n]
def get_init_inputs(n=3, *, bias=False): return [n, bias]
"""


def ran(source: str) -> dict[str, Any]:
    names: dict[str, Any] = {}
    exec(source, names)
    return names


def test_each_shape_is_a_problem() -> None:
    """Shapes that are held out come last and without a name, and each function gets the arguments that it takes."""
    known = shapes.read(SOURCE)
    assert [(one.name, one.weight, one.held_out) for one in known] == [
        ("small", 1.0, False), ("n=16", 2.0, False), ("held out 1", 1.0, True),
    ]  # fmt: skip
    made = [ran(shapes.problem_of(SOURCE, shape)) for shape in known]
    assert [(one["get_inputs"](), one["get_init_inputs"]()) for one in made] == [
        ([8], [8, False]), ([16], [16, False]), ([4097], [4097, True]),
    ]  # fmt: skip
    alone = shapes.problem_of(SOURCE, known[0])
    assert shapes.read(alone) == ()
    assert "4097" not in alone
    assert alone.splitlines().index("class Model: ...") == SOURCE.splitlines().index("class Model: ...")
    assert shapes.count(SOURCE) == 3
    assert shapes.count("class Model: ...") == shapes.count("SHAPES = 3") == shapes.count("not Python") == 1


def test_many_assignments_are_two(monkeypatch: pytest.MonkeyPatch) -> None:
    """More are refused like two, and their places would take quadratic time. A parser's fault in a thread is no end."""
    parsed = ast.parse(many := "SHAPES = 1\n" * 9)
    monkeypatch.setattr(ast, "parse", Mock(side_effect=[SystemError, parsed]))
    assert len(shapes.assigned(many, "SHAPES")) == 2


def test_what_is_held_out_is_not_shown() -> None:
    """The public source lists the other shapes in the same lines, and a model's task has it."""
    public = shapes.public(SOURCE)
    assert [one.name for one in shapes.read(public)] == ["small", "n=16"]
    assert public.splitlines()[5:] == SOURCE.splitlines()[5:]
    assert shapes.public(public) == public
    for text in (public, instruction(SOURCE, "torch")):
        assert "4097" not in text
        assert "power of two" not in text
        assert "def get_inputs" in text
    for hidden in ('SHAPES = [{"n": 4097, "held_out": True}]', SOURCE + "def"):
        assert "4097" not in shapes.public(hidden)
    other = "SHAPES = ((4097, 2), (8, 2))"
    assert shapes.public(other) == other


@pytest.mark.parametrize(
    ("listed", "words"),
    [
        ("{}", "as 1 to 32 literals"),
        ("[{}]\nSHAPES = [{}]", "lists its shapes once"),
        (f"[{'{}, ' * 33}]", "as 1 to 32 literals"),
        ('[{"args": {"n": 2**3}}]', "SHAPES[0]: is no literal"),
        ('[{"args": {"n": 8}}, {"arg": {}}]', r"SHAPES[1]['arg']"),
        ('[{"weight": 0.0}]', "SHAPES[0]['weight']"),
        ('[{"args": {"n": 1e999}}]', "values must be numbers"),
        ('[{"args": {"n": 1 << 3}}]', "is no literal"),
        ('[{"args": {"n": [[[[1]]]]}}]', "nested 3 deep"),
        ('[{"args": {"n": "' + "x" * 20_000 + '"}}]', "16384 characters"),
        ('[{"args": {"class": 1}}]', "'class' is no name of an argument"),
        ('[{"name": "held out 1"}]', "must not begin with `held out`"),
        ('[{"name": "a"}, {"name": "a"}]', "are called 'a'"),
        ('[{"held_out": True}]', "at least one must be shown"),
    ],
)
def test_malformed_shapes(listed: str, words: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        shapes.read(f"SHAPES = {listed}\n")
    assert words in str(refused.value)


def test_an_argument_that_nothing_takes() -> None:
    source = SOURCE.replace('"bias"', '"beta"')
    with pytest.raises(InvalidRequest, match="the argument 'beta', which neither"):
        shapes.problem_of(source, shapes.read(source)[2])


def test_an_autopsy_takes_the_shape_on_which_the_kernel_failed() -> None:
    """It has none for a shape that is held out."""
    request = request_of(problem=SOURCE, kernel="class ModelNew: ...", backend="torch")
    failed = ended(Category.WRONG_VALUES)
    named = failed.model_copy(update={"facts": failed.facts.model_copy(update={"shape": "n=16"})})
    assert ran(next(Autopsy(request, named).rounds())[0].problem)["get_inputs"]() == [16]
    assert refused(named) is None
    hidden = failed.model_copy(update={"facts": Facts(shape="held out 1", withheld=True)})
    assert "held out" in (refused(hidden) or "")
