"""Messages of verdicts about code whose exceptions cannot be read."""

from __future__ import annotations

import pytest

from kqueue.categories import Category
from kqueue.contract import Limits
from tests.judge.linear import QUICK, judge, right
from tests.judge.rig import Rig

pytestmark = pytest.mark.slow("judges kernels")

#: Exceptions whose text or attributes raise another exception, and the message that replaces them.
UNREADABLE = {
    "def __str__(self): raise KeyError": "kernel.E: <its text cannot be read: builtins.KeyError>",
    "def __str__(self): return 5": "kernel.E: <its text cannot be read: builtins.TypeError>",
    "def __str__(self): raise SystemExit(3)": "kernel.E: <its text cannot be read: builtins.SystemExit>",
    "error_code = property(lambda self: 1 / 0)": "kernel.E: x",
    "__module__ = 'm\\ud800'": "m?.E: x",
    "def __str__(self): return '\\ud800'": "kernel.E: ?",
}
#: Exceptions of Python and of the judge, and their message.
SHORT = {
    right("raise MemoryError"): "MemoryError: memory was refused (setting limits.host_memory_bytes)",
    right("raise ValueError('x')"): "ValueError: x",
    right("raise ValueError('\\x1b[1m\\x1b[31mx\\x1b[0m')"): "ValueError: x",
    right("raise StopIteration"): "StopIteration",
    "ModelNew = 1": "the source defines no class ModelNew derived from torch.nn.Module",
}


@pytest.mark.parametrize("body", UNREADABLE)
def test_an_exception_without_a_text_is_reported_as_itself(rig: Rig, body: str) -> None:
    outcome = judge(rig, right("raise E('x')", f"class E(Exception):\n    {body}\n"))
    assert (outcome.category, outcome.message) == (Category.RUNTIME_ERROR, UNREADABLE[body])


@pytest.mark.parametrize(("source", "message"), SHORT.items(), ids=["memory", "text", "colours", "none", "entry"])
def test_a_message_names_no_internal_module(rig: Rig, source: str, message: str) -> None:
    assert judge(rig, source).message == message


def test_the_memory_limit_is_named_whatever_fills_it(rig: Rig) -> None:
    """Memory of a memfd counts towards the limit, although it belongs to no process."""
    if (groups := rig.forkserver.isolation["cgroup_memory"]) is not True:
        pytest.skip(f"cgroup_memory: {groups}")
    fill = "import os; fd = os.memfd_create('x'); [os.write(fd, bytes(1 << 20)) for _ in range(2048)]"
    settings = QUICK.model_copy(update={"limits": Limits(host_memory_bytes=512 << 20)})
    outcome = judge(rig, right(fill), settings)
    assert outcome.category is Category.HOST_OUT_OF_MEMORY
    limit = f"the memory limit of {512 << 20} bytes was exceeded (setting limits.host_memory_bytes): "
    assert outcome.message == f"{limit}{outcome.facts.peak_bytes} bytes were in use at most"
