"""An extension that is compiled with fewer headers behaves as with all headers."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from kqueue.categories import Category
from kqueue.contract import Request
from tests.judge.extension import PROBLEM, QUICK
from tests.judge.rig import Rig
from workers.judge.candidate import headers

pytestmark = pytest.mark.slow("compiles with torch's headers")

#: Code whose meaning could depend on a header: overloads of abs, and conversions of arguments.
KERNEL = """
from pathlib import Path
import os
import torch
from torch.utils.cpp_extension import load_inline
WHO = Path("/proc/self/comm").read_text().strip().removeprefix("kq-")
m = load_inline("meant", r'''
#include <cmath>
at::Tensor twice(std::vector<at::Tensor> xs, c10::optional<double> by, std::string what,
                 std::map<std::string, int> more) {
    TORCH_CHECK(what == "twice" && more["a"] == 1, "conversions");
    auto out = torch::empty_like(xs[0]);
    at::mul_out(out, xs[0], abs(-2.5) - 0.5 + by.value_or(0));
    return torch::cat({out.slice(0, 0, 1), out.slice(0, 1)}) + torch::zeros_like(out);
}
''', functions={"twice": "doubles"}, extra_cflags=["-O0"])
if WHO == "builder":
    for log in Path(os.environ["TORCH_EXTENSIONS_DIR"]).rglob("*.headers/log"):
        few = "all" if "error:" in log.read_text() else "few"
        print(f"{WHO}: {log.parent.name} {few}", flush=True)
class ModelNew(torch.nn.Module):
    def forward(self, x):
        return m.twice([x], None, "twice", {"a": 1})
"""


@pytest.mark.nightly
def test_an_extension_does_the_same_with_fewer_headers(rig: Rig) -> None:
    outcome = rig.judge(Request(problem=PROBLEM, kernel=KERNEL, backend="cpp", settings=QUICK))
    assert outcome.category is Category.PASSED, outcome
    assert (outcome.evidence.build.where, outcome.evidence.build.libraries) == ("builder", 1)
    assert "builder: main.o.headers few\n" in outcome.log


NINJA = """
cxx = c++
cflags = -isystem /torch
post_cflags = {post}

rule compile
  command = $cxx -MMD -MF $out.d $cflags -c $in -o $out $post_cflags
  depfile = $out.d
  deps = gcc

rule link
  command = $cxx $in $ldflags -o $out

build main.o: compile {source}

build x.so: link main.o
"""


def test_only_sources_that_cannot_tell_are_compiled_with_fewer_headers(tmp_path: Path) -> None:
    path = tmp_path / "main.cpp"
    (tmp_path / "own.h").write_text("")
    for source, post, fewer in (
        ("#include <torch/extension.h>\nint a;", "", True),
        ("#define A(x) x##_out\n", "", False),
        ("TORCH_LIBRARY(a, m) {}", "", False),
        ("#if TORCH_VERSION_MAJOR > 1\n#endif", "", False),
        ('#include "own.h"', "", False),
        ('#include "elsewhere.h"', "", True),
        ("int a;", "-I/elsewhere", False),
    ):
        path.write_text(source)
        text = NINJA.format(source=path, post=post)
        (tmp_path / "build.ninja").write_text(text)
        headers.try_fewer(lambda directory: None, str(tmp_path))
        written = (tmp_path / "build.ninja").read_text()
        assert (f"build main.o: compile_with_few {path}" in written) is fewer, source
        for line in text.replace(f"build main.o: compile {path}", "").splitlines():
            assert line in written


def test_a_compiler_s_message_is_that_of_all_headers(tmp_path: Path) -> None:
    path = tmp_path / "main.cpp"

    def ninja(directory: str) -> str:
        command = ["ninja", "-v", "-C", directory, "main.o"]
        return subprocess.run(command, capture_output=True, text=True, check=False).stdout

    text = NINJA.format(source=path, post="-Wall")
    for source, message in (
        ("int f() { return missing; }", "was not declared"),
        ("int f() { int unused; return 0; }", "unused variable"),
    ):
        path.write_text(source)
        (tmp_path / "build.ninja").write_text(text)  # torch writes this for every build
        assert headers.try_fewer(ninja, str(tmp_path)).count(message) == 1
    assert (tmp_path / "main.o").exists()
