"""The results of a check of real trees, with a scripted judge."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from uuid import uuid4

import pytest

from kqueue.categories import Category
from kqueue.contract import Request, Result, Verdict, named_tree
from kqueue.evidence import SIZES_RULE, Environment, Evidence, Finding, Sanitized
from kqueue.features.check.operators import Operators, read
from kqueue.features.check.run import Check, Row, Side, State
from kqueue.features.duel.duels import Duel
from kqueue.trees import pack
from tests.features.check.repositories import LIST, OPS, PARTS
from tests.samples import ended, passed

RIGHT = passed()
WRONG = ended(Category.WRONG_VALUES, message="far off")
MISSING = ended(Category.IMPORT_ERROR, message="No module named 'einops'").model_copy(deep=True)
MISSING = MISSING.model_copy(
    update={"facts": MISSING.facts.model_copy(update={"exception": "builtins.ModuleNotFoundError"})}
)
NO_GPU = ended(Category.IMPORT_ERROR, message="no device")
SLOWLY = ended(Category.TIMEOUT)
LOST = ended(Category.WORKER_LOST, message="gone")
BAD_PROBLEM = ended(Category.REFERENCE_ERROR, message="it raised TypeError")
FINDING = Finding(
    rule=SIZES_RULE, severity="note", line=None, evidence="n: 31 instead of 32: far", by="kqueue", meaning="m"
)
LABELLED = RIGHT.model_copy(update={"evidence": Evidence(findings=(FINDING,))})
SLOW = Duel(id="1", reason="faster", winner="a", ratio=0.97, interval=(0.96, 0.98))
FAST = Duel(id="2", reason="faster", winner="b", ratio=1.03, interval=(1.02, 1.04))
SAME = Duel(id="3", reason="equal", ratio=1.0, interval=(0.995, 1.005))


BASE = {"kqueue.toml": LIST, "src/mine/__init__.py": "", "src/mine/ops.py": OPS, "src/mine/parts.py": PARTS}


@pytest.fixture
def both(tmp_path: Path) -> Callable[..., tuple[Side, Side]]:
    """Return a function that packs a base, and a head with some other files, or without those whose text is None."""

    def made(changes: Mapping[str, str | None], base: Mapping[str, str | None] = BASE) -> tuple[Side, Side]:
        sides: list[Side] = []
        for name, files in (("base", base), ("head", {**base, **changes})):
            for path, text in files.items():
                (tmp_path / name / path).parent.mkdir(parents=True, exist_ok=True)
                if text is not None:
                    (tmp_path / name / path).write_text(text)
            listed = tmp_path / name / "kqueue.toml"
            operators = read(listed, "list") if listed.exists() else Operators("src", {})
            sides.append(Side(name, "", tmp_path / name, pack(tmp_path / name), operators))
        return sides[0], sides[1]

    return made


def rows(
    base: Side, head: Side, results: list[Result], duels: list[Duel] | None = None, **options: object
) -> list[Row]:
    """Return the rows of a check whose evaluations and duels have these results, all of which are used."""
    left, fights = iter(results), iter(duels or ())
    judged: list[Request] = []

    def judge(request: Request) -> Result:
        judged.append(request)
        assert request.tree_names == request.tree_texts.keys()
        return next(left)

    def fight(a: Request, b: Request) -> Duel:
        assert [named_tree(one.kernel).hash for one in (a, b)] == [side.tree.name[7:] for side in (base, head)]
        assert a.settings.timing.purpose == b.settings.timing.purpose == "rank"
        return next(fights)

    changed = options.pop("changed", None)
    found = [task() for task in Check(base, head, judge, fight, **options).tasks(changed)]
    assert not [*left, *fights], "a result was not needed"
    return found


@pytest.mark.parametrize(
    ("results", "duels", "state", "words"),
    [
        ([WRONG, RIGHT], [], State.WRONG, "wrong_values: far off"),
        ([WRONG, WRONG], [], State.WRONG, "base too; wrong_values: far off"),
        ([RIGHT, RIGHT], [SAME], State.RIGHT, "right; no difference in speed found"),
        ([RIGHT, RIGHT], [SLOW, SLOW], State.SLOWER, "3 % slower than base"),
        ([RIGHT, RIGHT], [SLOW, SAME], State.RIGHT, "right; no difference in speed found"),
        ([RIGHT, RIGHT], [SLOW, FAST], State.RIGHT, "right; no difference in speed found"),
        ([RIGHT, RIGHT], [FAST, FAST], State.RIGHT, "right; 3 % faster than base"),
        ([RIGHT, RIGHT], [Duel(reason="rounds", ratio=0.9, interval=(0.6, 1.1))], State.UNJUDGED,
         "right, but not its speed; too noisy: head could be 40 % slower"),
        ([RIGHT, RIGHT], [Duel(reason="rounds", ratio=1, interval=(0.98, 1.1))], State.RIGHT,
         "right; no difference in speed found"),
        ([RIGHT, RIGHT], [Duel(reason="void")], State.UNJUDGED, "right, but not its speed; no decision"),
        ([RIGHT, RIGHT], [Duel(reason="failed", winner="a", b_failed="crashed")], State.WRONG,
         "crashed, when judged again"),
        ([RIGHT, RIGHT], [Duel(reason="failed", winner="b", a_failed="crashed")], State.RIGHT,
         "right; base itself is wrong, so their speeds are not compared: crashed, when judged again"),
        ([RIGHT, WRONG], [], State.RIGHT,
         "right; base itself is wrong, so their speeds are not compared: wrong_values: far off"),
        ([RIGHT, ended(Category.COMPILE_ERROR)], [], State.RIGHT, "base does not build, so their speeds are not"),
        ([RIGHT, LOST], [], State.UNJUDGED, "right, but base could not be judged; worker_lost: gone"),
        ([LOST], [], State.UNJUDGED, "worker_lost: gone"),
        ([BAD_PROBLEM], [], State.UNJUDGED, "reference_error: it raised TypeError; see its `reference_call`"),
        ([MISSING, MISSING], [], State.UNJUDGED, "base too; import_error: No module named 'einops'"),
        ([NO_GPU, NO_GPU], [], State.UNJUDGED, "base too; import_error: no device"),
        ([SLOWLY, SLOWLY], [], State.UNJUDGED, "base too; timeout: "),
        ([SLOWLY, RIGHT], [], State.WRONG, "timeout: "),
        ([NO_GPU, MISSING], [], State.WRONG, "import_error: no device"),
        ([MISSING, RIGHT], [], State.WRONG, "import_error: No module named 'einops'"),
        ([LABELLED, RIGHT], [], State.WRONG,
         "wrong at n=31 (right at m=4, n=32, and base is right at other sizes too): far"),
        ([LABELLED, LABELLED], [SAME], State.RIGHT, "right at its own sizes only, like base"),
    ],
)  # fmt: skip
def test_a_change(both, results: list[Result], duels: list[Duel], state: State, words: str) -> None:
    """A change of speed needs two duels. No fault of base, the fleet, or the problem makes head fail."""
    [row] = rows(*both({"src/mine/parts.py": PARTS + "\n"}), results, duels)
    assert (row.state, row.name) == (state, "scale[m=4, n=32, fp32]")
    assert words in row.words


@pytest.mark.parametrize(
    ("messages", "state", "words"),
    [(("no nvcc", "no nvcc"), State.UNJUDGED, "base too; compile_error: no nvcc"),
     (("a.cu:1: error", "b.cu:1: error"), State.WRONG, "compile_error: a.cu:1: error")],
)  # fmt: skip
def test_a_build_that_fails_on_both_sides(both, messages: tuple[str, str], state: State, words: str) -> None:
    """The same failure of both is not head's. The command is a part of the kernels."""
    base, head = both({"src/mine/parts.py": PARTS + "\n"}, BASE | {"kqueue.toml": 'build = ["make", "a b"]\n' + LIST})
    assert head.line.endswith("src\n# kqueue build make 'a b'\n")
    [row] = rows(base, head, [ended(Category.COMPILE_ERROR, message=message) for message in messages])
    assert (row.state, row.words) == (state, words)


@pytest.mark.parametrize(
    ("allowed", "state", "words"),
    [(0.01, State.SLOWER, "3 % slower"), (0.03, State.RIGHT, "not surely by more than the allowed 3 %")],
)
def test_slower_than_allowed(both, allowed: float, state: State, words: str) -> None:
    """The whole interval must lie below the allowed speed. A new definition is told."""
    [row] = rows(*both({"kqueue.toml": LIST + f"slower = {allowed}\n"}), [RIGHT, RIGHT], [SLOW, SLOW])
    assert row.state is state
    assert words in row.words
    assert "its definition changed" in row.words


NEW = LIST.partition('"src"\n')[2].replace('"scale"', '"new"').replace("ops:scale", "fresh:scale")


@pytest.mark.parametrize(
    ("files", "results", "expected"),
    [
        ({"kqueue.toml": LIST + NEW, "src/mine/fresh.py": OPS}, [RIGHT, RIGHT, RIGHT], [
            (State.RIGHT, "right; no difference in speed found"),
            (State.RIGHT, "right; new: there is no module mine.fresh below src in base")]),
        ({"kqueue.toml": LIST + NEW, "src/mine/fresh.py": OPS}, [RIGHT, RIGHT, WRONG], [
            (State.RIGHT, "right; no difference in speed found"), (State.WRONG, "wrong_values: far off")]),
        ({"kqueue.toml": LIST.replace('"scale"', '"other"')}, [RIGHT, RIGHT], [
            (State.SKIPPED, "removed: only base lists it"), (State.RIGHT, "right; no difference in speed found")]),
        ({"src/mine/ops.py": "def other(): ...\n"}, [], [
            (State.WRONG, "src/mine/ops.py defines no scale in head, and base has it")]),
        ({"kqueue.toml": LIST.replace('"scale"', '"x"').replace("ops:scale", "fresh:scale")}, [], [
            (State.SKIPPED, "removed"), (State.UNJUDGED, "there is no module mine.fresh below src, neither in head")]),
        ({"kqueue.toml": LIST.replace('"torch:mul"', '"base"').replace("scale", "new"), "src/mine/ops.py":
          OPS.replace("scale", "new")}, [], [
            (State.SKIPPED, "removed"), (State.UNJUDGED, "in base, which is its reference: give another")]),
    ],
    ids=["new", "new and wrong", "renamed", "lost", "nowhere", "new without a reference"],
)  # fmt: skip
def test_an_operator_on_one_side(
    both, files: dict[str, str | None], results: list[Result], expected: list[tuple[State, str]]
) -> None:
    """A new one is right or wrong only, a removed one is told, and one that head lost is wrong."""
    duels = [SAME] * sum("no difference" in words for _, words in expected)
    found = rows(*both(files), results, duels)
    assert [row.state for row in found] == [state for state, _ in expected]
    assert all(words in row.words for row, (_, words) in zip(found, expected, strict=True)), found


def test_the_backend_of_the_module_that_defines_an_operator(both) -> None:
    """Other modules of its package, and what they import, do not decide."""
    package = {"src/mine/all.py": "from mine.cu import cuda\nfrom mine.tri import scale\n",
               "src/mine/cu.py": "import cutlass\n", "src/mine/tri.py": "import triton\nimport mine.cu\n",
               "kqueue.toml": LIST.replace("mine.ops", "mine.all")}  # fmt: skip
    base, _ = both({}, BASE | package)
    assert base.backend(base.operators.by_name["scale"]) == "triton"
    package = {
        "src/mine/__init__.py": "from .ops import scale\nfrom .tri import g\n",
        "src/mine/tri.py": "import triton\n",
    }
    base, _ = both({}, BASE | package)
    assert base.backend(base.operators.by_name["scale"]) == "torch"


def test_what_is_said_of_a_row(both) -> None:
    """Ranges name a row on each lane alike. The drawn size, an earlier verdict and the changed file end its words."""
    listed = LIST.replace("n = 32", "n = [5, 5]")
    changes = {"src/mine/parts.py": PARTS + "\n", "kqueue.toml": listed}
    before = Verdict.model_construct(**dict(RIGHT), environment=None, reused_from=uuid4(), evaluation_id=uuid4())
    options = {"changed": frozenset({"src/mine/parts.py"}), "timed": False}
    for lanes in (("",), ("auto",)):
        [row] = rows(*both(changes, BASE | {"kqueue.toml": listed}), [before, RIGHT], lanes=lanes, **options)
        assert row.name == "scale[m=4, n=5..5, fp32]"
        assert row.words == "right; judged before; at n=5; src/mine/ops.py imports the changed src/mine/parts.py"


def test_triton_is_not_timed_on_a_cpu(both) -> None:
    """Its interpreter's times mean nothing, so no duel is fought, unless the settings request them."""
    place = Environment(device="a CPU", torch="2", python="3", host="h")
    base, head = both({}, BASE | {"kqueue.toml": LIST + 'backend = "triton"\n'})
    [row] = rows(base, head, [RIGHT, RIGHT], environment=place)
    assert (row.state, row.words) == (State.RIGHT, "right; not timed: Triton's interpreter runs on a CPU")
    for given in ({"environment": place.model_copy(update={"cuda": "13"})},
                  {"environment": place, "settings": {"timing": {"interpreter": True}}}):  # fmt: skip
        [row] = rows(base, head, [RIGHT, RIGHT], [SAME], **given)
        assert row.speed == SAME.ratio


def test_only_changed_operators(both) -> None:
    """One is judged if the change touches its files or its definition, and base needs no list of operators."""
    base, head = both({"kqueue.toml": LIST}, BASE | {"kqueue.toml": None})
    assert [row.state for row in rows(base, head, [RIGHT, RIGHT], [SAME], changed=frozenset())] == [State.RIGHT]
    head = replace(base, operators=head.operators)
    [row] = rows(head, head, [], changed=frozenset({"README.md"}))
    assert (row.state, row.name) == (State.SKIPPED, "scale")


def runs(**fields: object) -> Result:
    run = Sanitized(tool="memcheck", seconds=1.0, **fields)
    return RIGHT.model_copy(update={"evidence": Evidence(sanitized=(run,))})


@pytest.mark.parametrize(
    ("result", "state"),
    [(runs(errors=0), State.RIGHT), (runs(error="no tool"), State.UNJUDGED), (RIGHT, State.UNJUDGED)],
)
def test_qualifying(both, result: Result, state: State) -> None:
    """Head is examined on each lane. Without the tools a right kernel could not be judged."""
    base, head = both({})
    more = [RIGHT] * (state is State.RIGHT)
    found = rows(base, head, [result, *more] * 2, lanes=("gpu.a", "gpu.b"), qualify=True, timed=False)
    assert [(row.state, row.lane) for row in found] == [(state, "gpu.a"), (state, "gpu.b")]


def test_sources_of_other_operators(both) -> None:
    """A class, a reference's file and a reference in the tree are judged by the sources of the right revisions."""
    text = LIST.replace('"torch:mul"\nreference_call = "entry(x, 2)"', '"refs.py"').replace(
        "shapes", 'init = { n = "n" }\nshapes'
    )
    other = LIST.partition('"src"\n')[2].replace('"scale"', '"tree"').replace("torch:mul", "mine.parts:twice")
    lists = BASE | {"kqueue.toml": text + other, "refs.py": "class Model: ...\n"}
    sources: list[Request] = []
    base, after = both({"refs.py": "class Model: pass\n"}, lists)

    def judge(request: Request) -> Result:
        sources.append(request)
        return WRONG

    for task in Check(base, after, judge, lambda *_: SAME).tasks(None):
        task()
    file, _, tree, _ = sources
    assert file.problem.startswith(f"{base.line}class Model: ...\n")
    assert "def get_init_inputs():\n    return {'n': n}" in file.problem
    assert tree.problem.startswith(base.line)
    assert "from mine.parts import twice as entry" in tree.problem
    assert tree.kernel.startswith(after.line)
