"""Names in a kernel's source: their sites, written values, and the unchanged rest."""

from __future__ import annotations

import ast

import pytest

from kqueue.errors import InvalidRequest
from kqueue.features.tune.space import Tunable

SOURCE = '''"""Says #define DOC 1, and is no code."""
import triton
import triton.language as tl

BLOCK = 64  # é
ROWS, COLS = 1, -2.5
WIDE: tl.constexpr = tl.constexpr(32)
MODE = "fast"
MADE = make(1)
TWICE = 3
TWICE = 4
BOTH = 1
CUDA = r"""
// #define GONE 1
/* #define GONE 2
#define GONE 3 */ #define AFTER_COMMENT 7
#define TILE 16 // é
  #  define  SHIFTED  (1 << 3) /* x */
#define CALL(x) x
#define FLAG
#define BOTH 2
const char* s = "/* no comment";
#define AFTER_STRING 9
#define JOINED 1 + \\
   2
"""
CPP = "#define ONE 1\\n#define TWO 2\\n" "#define THREE 3\\n"
FORMATTED = f"""
#define GIVEN {BLOCK}
#define FIXED 5
struct x {{ int a; }};
"""


@triton.jit
def kernel(x, CHUNK: tl.constexpr = 16):
    pass


class ModelNew:
    def __init__(self, size, tile=32, *, fused=True, scale=None):
        self.flags = ["-DOPTION=8", "-O3"]

    def forward(self, x):
        kernel[(1,)](x, BLOCK=BLOCK, num_warps=4)
        kernel[lambda meta: (1,)](x, num_warps=4, stages=0x2)
'''


def changed(source: str, **values: str) -> list[tuple[str, str]]:
    """Return the lines that differ, before and after. The other lines must be equal."""
    after = Tunable(source, list(values)).kernel(values)
    ast.parse(after)
    return [(one, other) for one, other in zip(source.split("\n"), after.split("\n"), strict=True) if one != other]


@pytest.mark.parametrize(
    ("name", "value", "lines"),
    [
        ("BLOCK", "128", [("BLOCK = 64  # é", "BLOCK = 128  # é")]),
        ("COLS", "3", [("ROWS, COLS = 1, -2.5", "ROWS, COLS = 1, 3")]),
        ("WIDE", "8", [("WIDE: tl.constexpr = tl.constexpr(32)", "WIDE: tl.constexpr = tl.constexpr(8)")]),
        ("MODE", "slow", [('MODE = "fast"', "MODE = 'slow'")]),
        ("MODE", "16", [('MODE = "fast"', "MODE = '16'")]),
        ("TILE", "32", [("#define TILE 16 // é", "#define TILE 32 // é")]),
        ("SHIFTED", "9", [("  #  define  SHIFTED  (1 << 3) /* x */", "  #  define  SHIFTED  9 /* x */")]),
        ("AFTER_STRING", "x+1", [("#define AFTER_STRING 9", "#define AFTER_STRING x+1")]),
        ("FIXED", "6", [("#define FIXED 5", "#define FIXED 6")]),
        ("OPTION", "9", [("""["-DOPTION=8", "-O3"]""", """["-DOPTION=9", "-O3"]""")]),
        ("CHUNK", "8", [("def kernel(x, CHUNK: tl.constexpr = 16):", "def kernel(x, CHUNK: tl.constexpr = 8):")]),
        ("tile", "64", [("tile=32", "tile=64")]),
        ("fused", "false", [("fused=True", "fused=False")]),
        ("scale", "0.5", [("scale=None", "scale=0.5")]),
        ("num_warps", "8", [(f"{before}, num_warps=4", f"{before}, num_warps=8") for before in ("BLOCK=BLOCK", "x")]),
        ("stages", "2", []),
        ("BLOCK", "0x40", []),
        ("constant:BOTH", "5", [("BOTH = 1", "BOTH = 5")]),
        ("macro:BOTH", "5", [("#define BOTH 2", "#define BOTH 5")]),
    ],
)
def test_a_value_is_written_in_its_place(name: str, value: str, lines: list[tuple[str, str]]) -> None:
    """The other text stays, and so does an equal value in another notation."""
    found = changed(SOURCE, **{name: value})
    assert len(found) == len(lines)
    for (before, after), (some, other) in zip(found, lines, strict=True):
        assert some in before
        assert after == before.replace(some, other)


def test_macros_of_strings_with_escapes() -> None:
    """Each of several adjacent literals has its own macro, and literals that a preprocessor joins are one value."""
    after = Tunable(SOURCE, ["ONE", "THREE", "JOINED"]).kernel({"ONE": "7", "THREE": "8", "JOINED": "3"})
    assert '"#define ONE 7\\n#define TWO 2\\n" "#define THREE 8\\n"' in after
    assert "#define AFTER_STRING 9\n#define JOINED 3\n" in after


def test_line_ends_stay() -> None:
    source = 'B = 1\r\nC = """\r\n#define D 2\r\n"""\r\nclass ModelNew: ...\r\n'
    after = Tunable(source, ["B", "D"]).kernel({"B": "3", "D": "4"})
    assert after == source.replace("B = 1", "B = 3").replace("D 2", "D 4")


def test_a_name_that_cannot_be_changed() -> None:
    """The error names the searched kinds, or the sites found and the notation that selects one."""
    for name, says in (
        ("NONE", "NONE is not in the kernel. Searched: constants of the module, #define and -D .*BLOCK"),
        ("macro:BLOCK", "BLOCK is not in the kernel. Searched: #define and -D in strings"),
        ("GONE", "is not in the kernel"),
        ("DOC", "is not in the kernel"),
        ("CALL", "is not in the kernel"),
        ("BOTH", "several kinds of places: constant in line 12, macro in line 21. Write constant:BOTH"),
        ("TWICE", "assigned in lines 10, 11"),
        ("MADE", "no plain value in line 9"),
        ("FLAG", "no plain value"),
        ("GIVEN", "no plain value"),
        ("wrong:BLOCK", "'wrong' is not a kind of place. Use constant, macro, launch, argument"),
    ):
        with pytest.raises(InvalidRequest, match=says):
            Tunable(SOURCE, [name])


def test_a_value_that_cannot_be_there() -> None:
    """A value of another kind, or with additional text, is refused."""
    for name, values in {"BLOCK": ("fast", "1 # x", "True"), "fused": ("2",), "TILE": ('1"', "1\n2", "{x}")}.items():
        for value in values:
            with pytest.raises(InvalidRequest, match="cannot be"):
                Tunable(SOURCE, [name]).written(name, value)


@pytest.mark.parametrize(
    ("source", "says"),
    [
        ("#define A 1\n__global__ void f() {}\n", "not valid Python"),
        ("A = B = 64\n", "A has no plain value in line 1"),
        ("A = 64\n\n\ndef f():\n    global A\n    A = 1\n", "A is assigned in lines 1, 5: assign it once"),
        *((f"flags = [{option!r}]\n", "A is not in the kernel") for option in ("say -DA=64", "-DA='6 4'", "-xDA=64")),
    ],
)
def test_a_source_in_which_a_name_cannot_be_changed(source: str, says: str) -> None:
    """Invalid Python, chained and repeated assignments, and words that resemble options are refused."""
    with pytest.raises(InvalidRequest, match=says):
        Tunable(source, ["A"])


@pytest.mark.parametrize(
    "hostile",
    [
        repr('\\"' * 100_000), repr("'x\\" * 100_000), repr("/* \\" * 100_000), 'f"' + "{1}{{" * 20_000 + '"',
        repr("-D" + "-DA=" * 100_000),
    ],
    ids=["quotes", "single-quotes", "comments", "placeholders", "options"],
)  # fmt: skip
def test_large_hostile_sources(hostile: str) -> None:
    """The search for macros takes linear time."""
    source = f"A = 1\nB = {hostile}\n"
    assert Tunable(source, ["A"]).kernel({"A": "2"}) == source.replace("A = 1", "A = 2")


def test_quotes_that_are_not_closed() -> None:
    """They end with their line, and separators of digits are no quotes."""
    source = 'C = """\n#error don\'t // x\n#define BIG 1\'000 /* it\'s */\n#define NEXT 2 // y\n"""\n'
    found = Tunable(source, ["BIG", "NEXT"])
    assert (found.original("BIG"), found.original("NEXT")) == ("1'000", "2")


def test_names_of_one_place() -> None:
    """Two values for one site are refused, but each name works alone."""
    for source, names in (
        ("BLOCK = 64\n", ["BLOCK", "constant:BLOCK"]),
        ("S = '-DBLOCK=64'\n", ["S", "BLOCK"]),
        ("S = '#define BLOCK 64'\n", ["BLOCK", "S"]),
    ):
        with pytest.raises(InvalidRequest, match="are in one place, in line 1"):
            Tunable(source, names)
        for name in names:
            assert Tunable(source, [name]).kernel({name: "2"}) != source


def test_places_are_those_of_the_text() -> None:
    source = "# -*- coding: latin-1 -*-\nX = 'éé'; A = 64\n"
    assert Tunable(source, ["A"]).kernel({"A": "2"}) == source.replace("64", "2")


@pytest.mark.parametrize("option", ["-DBLOCK=64 -O3 -DW=4", "-O3  -DW=4 -DBLOCK=64", "-DBLOCK=64", "-D BLOCK=64"])
def test_options_are_words(option: str) -> None:
    source = f"flags = [{option!r}]\n"
    found = Tunable(source, ["BLOCK"])
    assert found.kernel({"BLOCK": "128"}) == source.replace("64", "128")
    with pytest.raises(InvalidRequest, match="cannot be the value of a macro"):
        found.written("BLOCK", "1 + 2")


@pytest.mark.parametrize(
    "source",
    [
        "A = 1\nX = " + "-" * 1500 + "1\n",
        "A = 1\nif A:\n    pass\n" + "elif A:\n    pass\n" * 1200,
        "A = 0x" + "f" * 10_000 + "\n",
    ],
    ids=["signs", "branches", "digits"],
)
def test_a_source_that_python_gives_up(source: str) -> None:
    """Such a source is read or refused with InvalidRequest."""
    for name, value in (("A", "x"), ("OTHER", "1")):
        with pytest.raises(InvalidRequest):
            Tunable(source, [name]).written(name, value)
