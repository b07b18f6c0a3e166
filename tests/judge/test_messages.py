"""Messages of verdicts about code whose exceptions cannot be read."""

from __future__ import annotations

import pytest

from kqueue import feedback
from kqueue.categories import Category
from kqueue.contract import Deadlines, Limits, Request, Settings
from tests.judge.linear import QUICK, judge, right
from tests.judge.rig import Rig
from tests.judge.sources import kernel, problem
from workers.judge.host import linux

pytestmark = pytest.mark.slow("judges kernels")

#: Exceptions whose text or attributes raise another exception, and the message that replaces them.
UNREADABLE = {
    "def __str__(self): raise SystemExit(3)": "kernel.E: <its text cannot be read: builtins.SystemExit>",
    "error_code = property(lambda self: 1 / 0)": "kernel.E: x",
    "__module__ = 'm\\ud800'": "m?.E: x",
    "def __str__(self): return '\\ud800'": "kernel.E: ?",
}
NEXT_TO = "Only the source and installed files are here: write the content of files next to it into the source"
#: Exceptions of Python and of the judge, and their message.
SHORT = {
    right("raise MemoryError"): "MemoryError: memory was refused (Linux refuses what the host does not have)",
    "import not_here; ModelNew = 1": (
        "ModuleNotFoundError: No module named 'not_here': this worker lacks it. Do without it, or install it for the"
        f" workers. {NEXT_TO}, or judge the package with its tree (`kqueue check`)"
    ),
    "ModelNew = open('data.csv')": f"FileNotFoundError: [Errno 2] No such file or directory: 'data.csv'. {NEXT_TO}",
    "from . import ModelNew": f"ImportError: attempted relative import with no known parent package. {NEXT_TO}",
    right("raise ValueError('\\x1b[1m\\x1b[31mx\\x1b[0m')"): "ValueError: x",
    right("raise StopIteration"): "StopIteration",
    "ModelNew = 1": "the source defines no class ModelNew derived from torch.nn.Module (ModelNew is of type int)",
    right(top="# ModelNew").replace("class ModelNew", "class Fast"): (
        "the source defines no class ModelNew derived from torch.nn.Module, only Fast"
    ),
}
#: Bodies that end the process, and settings under which they do.
ENDS = {
    "import ctypes; ctypes.string_at(0)": QUICK,
    "while True: pass": QUICK.model_copy(update={"deadlines": Deadlines(check_s=1)}),
}


@pytest.mark.parametrize("body", UNREADABLE)
def test_an_exception_without_a_text_is_reported_as_itself(rig: Rig, body: str) -> None:
    outcome = judge(rig, right("raise E('x')", f"class E(Exception):\n    {body}\n"))
    assert (outcome.category, outcome.message) == (Category.RUNTIME_ERROR, UNREADABLE[body])


@pytest.mark.parametrize(
    ("source", "message"),
    SHORT.items(),
    ids=["memory", "module", "file", "relative", "colours", "none", "entry", "other"],
)
def test_a_message_names_no_internal_module(rig: Rig, source: str, message: str) -> None:
    assert judge(rig, source).message == message


@pytest.mark.parametrize(
    ("answer", "inputs", "words"),
    [
        ("x + 0", "return [torch.randn(4, 8)]", "output 0 is input 0 or a view of it, and the reference's has its own"),
        ("x", "return [torch.randn(4 + torch.initial_seed() % 4099, 8)]", "SHAPES. It returned inputs[0] = a tensor"),
        ("x", "return [torch.randn(4, 8), [torch.initial_seed()]]", "SHAPES. It returned inputs[1][0] = "),
    ],
)
def test_a_message_names_the_input_and_the_remedy(rig: Rig, answer: str, inputs: str, words: str) -> None:
    """An output that is an input must be copied, and inputs of another form than before are shown with both forms."""
    request = Request(problem=problem(f"x, *_: {answer}", inputs), kernel=kernel("x, *_: x"), backend="torch")
    assert words in rig.judge(request.model_copy(update={"settings": QUICK})).message


@pytest.mark.parametrize(("body", "settings"), ENDS.items(), ids=["crash", "timeout"])
def test_the_line_at_which_a_process_ended_is_told(rig: Rig, body: str, settings: Settings) -> None:
    """The log ends with the kernel's calls, without the judge's own below them."""
    source = right(body)
    outcome = judge(rig, source, settings)
    line = next(number for number, text in enumerate(source.splitlines(), 1) if body in text)
    assert f"At line {line}, in forward:" in feedback.describe(outcome, source)
    assert not any(part in outcome.log for part in ("spawn.py", "Extension modules"))


@pytest.mark.parametrize("host_gib", [None, 1])
def test_the_memory_limit_is_named_whatever_fills_it(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, host_gib: int | None
) -> None:
    """Memory of a memfd counts towards the limit, although it belongs to no process. A small host has its own limit."""
    if (groups := rig.forkserver.isolation["cgroup_memory"]) is not True:
        pytest.skip(f"cgroup_memory: {groups}")
    fill = "import os; fd = os.memfd_create('x'); [os.write(fd, bytes(1 << 20)) for _ in range(2048)]"
    named = "setting limits.host_memory_bytes"
    if host_gib is not None:
        monkeypatch.setattr(linux, "physical_bytes", lambda: host_gib << 30)
        named = f"50% of the host's memory, the most that the {named} gives"
    limits = Limits(host_memory_bytes=512 << 20 if host_gib is None else 4 << 30)
    outcome = judge(rig, right(fill), QUICK.model_copy(update={"limits": limits}))
    assert outcome.category is Category.HOST_OUT_OF_MEMORY
    limit = f"the memory limit of {512 << 20} bytes was exceeded ({named}): "
    assert outcome.message == f"{limit}{outcome.facts.peak_bytes} bytes were in use at most"
