"""Rules that find cheats in a source and accept sane idioms."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kqueue import backends
from kqueue.categories import Category
from kqueue.contract import Phase, Policy, Request
from kqueue.evidence import Finding
from tests.integrity.compose import compose
from tests.integrity.corpus import KERNELS
from workers.judge.ending import EvaluationEnded
from workers.judge.pipeline import grades, static
from workers.judge.pipeline.findings import RULES

GOOD = Path(__file__).parents[3] / "examples" / "kernels" / "good"
#: Controls of the corpus by name, and the gallery's correct kernels by backend and name.
RIGHT = {
    **{name: text for name, text in KERNELS.items() if name.startswith("controls/")},
    **{f"{path.parent.name}/{path.stem}": path.read_text(encoding="utf-8") for path in sorted(GOOD.rglob("*.py"))},
}


def find(source: str, backend: str = "torch", own_s: float = 10.0) -> list[Finding]:
    return static.findings(source, backend, own_s=own_s)


def ours(source: str, backend: str = "torch", own_s: float = 10.0) -> dict[str, tuple[str, int]]:
    """Return kqueue's findings: severity and first line by rule."""
    found = [finding for finding in find(source, backend, own_s) if finding.by == "kqueue"]
    return {finding.rule: (finding.severity, finding.line) for finding in reversed(found)}


def forward(body: str, top: str = "") -> str:
    lines = "\n".join("        " + line for line in body.splitlines())
    head = f"import torch\nimport torch.nn.functional as F\n{top}\nclass ModelNew(torch.nn.Module):\n"
    return f"{head}    def forward(self, x):\n{lines}\n"


CHEATS = {
    "import torch\ntorch.cuda.Event = Quick": "patched_clock",
    "import torch.cuda as tc\ntc.synchronize = lambda: None": "patched_clock",
    "from torch.cuda import Event as E\nE.elapsed_time = lambda *_: 1e-3": "patched_clock",
    "from torch import cuda\nsetattr(cuda, 'Event', Quick)": "patched_clock",
    "import torch\nalias = torch.cuda\nalias.Event = Quick": "patched_clock",
    "import torch\nvars(torch.cuda)['synchronize'] = print": "patched_clock",
    "import torch\ntorch.cuda.__dict__.update(synchronize=print)": "patched_clock",
    "import sys\nsys.modules['time'].perf_counter = lambda: 0": "patched_clock",
    "__import__('time').perf_counter = lambda: 0": "patched_clock",
    "import time\nfor n in ('time', 'monotonic'):\n    setattr(time, n, lambda: 0)": "patched_clock",
    "import time\ndel time.perf_counter": "patched_clock",
    "from unittest import mock\nmock.patch('time.perf_counter', new=print).start()": "patched_clock",
    "import torch\nfrom unittest import mock\nmock.patch.object(torch.cuda, 'synchronize').start()": "patched_clock",
    "import triton.testing\ntriton.testing.do_bench = print": "patched_clock",
    "import statistics\nstatistics.median = lambda x: 0": "patched_clock",
    "import torch\ntorch.allclose = lambda *_: True": "patched_comparison",
    "import torch\ntorch.Tensor.__eq__ = lambda *_: True": "patched_comparison",
    "import torch.testing\ntorch.testing.assert_close = print": "patched_comparison",
    "import torch\ntorch.manual_seed = lambda s: None": "patched_seed",
    "import torch\ntorch.random.manual_seed = torch.randn = print": "patched_seed",
    "import sys\nsys.modules['torch.testing'] = object()": "planted_module",
    "from workers.judge.candidate import harness": "evaluator_import",
    "import importlib\nimportlib.import_module('workers.judge.pipeline.run')": "evaluator_import",
    "import ctypes\nctypes.CDLL(None).process_vm_readv(1)": "process_memory",
    "open('/proc/self/mem', 'r+b')": "process_memory",
    "S = 'void f() { ptrace(16, pid, 0, 0); }'": "process_memory",
    "S = '''\nextern \"C\" cudaError_t cudaEventElapsedTime(float* ms, cudaEvent_t a, cudaEvent_t b) { *ms = 0; }'''": (
        "interposed_clock"
    ),
}
SUSPICIOUS = {
    "import torch\ntorch.tanh = slow": "patched_library",
    "import builtins\nbuiltins.print = quiet": "patched_library",
    "import sys\nf = sys._getframe(1)": "stack_walk",
    "import inspect\nfor f in inspect.stack(): pass": "stack_walk",
    "def f(frame): return frame.f_back": "stack_walk",
    "import gc\nx = gc.get_objects()": "heap_walk",
    "import ctypes\nctypes.memmove(1, b'', 0)": "native_memory",
    "p = '/proc/self/maps'": "proc_files",
    "import socket": "network",
    "import subprocess": "processes",
    "import os\nos._exit(0)": "processes",
    "import os\nos.write(5, b'passed')": "descriptors",
    "import torch\nclass Lazy(torch.Tensor):\n    pass": "tensor_subclass",
    "class Lazy:\n    @classmethod\n    def __torch_function__(cls, *_): pass": "tensor_subclass",
    forward("out = torch.empty_like(x)\nfor n in names:\n    setattr(out, n, later)\nreturn out"): "instance_override",
    forward("out = torch.empty_like(x)\nout.clone = later\nreturn out"): "instance_override",
    forward("try:\n    return launch(x)\nexcept Exception:\n    return F.gelu(x)"): "fallback",
    forward("k = (x.data_ptr(), 1)\nif k in cache: return cache[k]"): "pointer_key",
    forward("return cache[id(x)]"): "pointer_key",
    forward("if x._version == self.seen: return self.out"): "pointer_key",
    forward("if torch.equal(x, self.last): return self.out"): "content_key",
    forward("self.calls += 1\nif self.calls > 10: return self.out"): "call_count",
    forward(
        "return helper(x)", "n = 0\ndef helper(x):\n    global n\n    n += 1\n    return x if n < 3 else y"
    ): "call_count",
    forward("torch.manual_seed(0)\nreturn torch.randn(3)"): "seed_in_forward",
    forward("torch.save(x, 'here')"): "files_in_forward",
    forward("threading.Thread(target=f).start()", "import threading"): "threads_in_forward",
    forward("time.sleep(1)", "import time"): "sleep_in_forward",
    forward("with torch.cuda.stream(s):\n    return x @ x", "s = torch.cuda.Stream()"): "unjoined_stream",
    forward("s.wait_stream(torch.cuda.current_stream())", "s = torch.cuda.Stream()"): "unjoined_stream",
    "S = '''\ncudaStreamCreate(&s);\nkernel<<<1, 1, 0, s>>>();\n'''": "unjoined_stream",
    "S = 'cudaLaunchHostFunc(s, f, 0);'": "host_callback",
    "S = 'cudaIpcOpenMemHandle(&p, h, 1);'": "shared_device_memory",
    "S = 'a.hitProp = cudaAccessPropertyPersisting; f();'": "persisting_l2",
}
NOTES = {
    "import torch\ntorch.backends.cuda.matmul.allow_tf32 = True": "global_flag",
    "import torch\ntorch.set_float32_matmul_precision('high')": "global_flag",
    "import torch\ng = torch.cuda.CUDAGraph()": "cuda_graph",
    "import torch\nf = torch.compile(g)": "torch_compile",
    "import torch\ntorch.manual_seed(0)": "seed",
    forward("return self.workspaces[x.shape]"): "shape_key",
    "import sys\nsys.modules[name] = module": "registered_module",
    "exec(code)": "dynamic_code",
}

#: Sources with idioms of honest authors.
SANE = {
    "autotuned Triton, imported where there is one": """
try:
    import triton
    import triton.language as tl
except ImportError:
    triton = None
import torch

@triton.autotune(configs=[triton.Config({"B": 64})], key=["n"])
@triton.jit
def kernel(x, y, n, B: tl.constexpr):
    i = tl.program_id(0) * B + tl.arange(0, B)
    tl.store(y + i, tl.load(x + i, mask=i < n, eviction_policy="evict_last"), mask=i < n)

class ModelNew(torch.nn.Module):
    def forward(self, x):
        assert x.data_ptr() % 16 == 0
        y = torch.empty_like(x)
        kernel[lambda meta: (triton.cdiv(x.numel(), meta["B"]),)](x, y, x.numel())
        return y
""",
    "streams that are joined, a graph, a workspace": """
import torch

class ModelNew(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.side, self.other = torch.cuda.Stream(), torch.cuda.Stream()
        self.graph, self.workspaces, self.time = None, {}, 0.0

    def forward(self, x):
        if x.shape not in self.workspaces:
            self.workspaces[x.shape] = torch.empty_like(x)
        self.side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.side):
            y = x * 2
        torch.cuda.current_stream().wait_stream(self.side)
        return y
""",
    "an extension compiled at import, and a benchmark for the author": '''
import os, time
import torch
from torch.utils.cpp_extension import load_inline
os.environ["TORCH_CUDA_ARCH_LIST"] = "9.0"
os.environ.setdefault("MAX_JOBS", "4")
torch.backends.cudnn.benchmark = True
SOURCE = """
#include <torch/extension.h>
// ptrace( is not called here, nor int clock_gettime(int a) {
__global__ void scale(float* x, int n) { int i = blockIdx.x * blockDim.x + threadIdx.x; if (i < n) x[i] *= 2; }
torch::Tensor run(torch::Tensor x) {
  cudaEvent_t start; cudaEventCreate(&start); cudaEventRecord(start);
  cudaError_t e = cudaDeviceSynchronize();
  if (e != cudaSuccess) { return x; }
  scale<<<(x.numel() + 255) / 256, 256>>>(x.data_ptr<float>(), x.numel()); return x; }
"""
module = load_inline("m", "torch::Tensor run(torch::Tensor x);", SOURCE, functions=["run"])

class ModelNew(torch.nn.Module):
    def forward(self, x):
        return module.run(x.clone())

def test_model():
    """Not like `open('/proc/self/mem')` or torch.cuda.Event = Fake."""
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begun = time.perf_counter()
    start.record()
    torch.cuda.synchronize()
    assert torch.allclose(ModelNew()(torch.ones(3)), torch.ones(3) * 2)
    return start.elapsed_time(end), time.perf_counter() - begun
''',
}


@pytest.mark.parametrize(("source", "rule"), CHEATS.items())
def test_what_serves_nothing_else_is_a_cheat(source: str, rule: str) -> None:
    """Changed clocks, comparisons, seeds, modules and memory are found under any name."""
    assert ours(source)[rule][0] == "cheat"


@pytest.mark.parametrize(("source", "rule"), SUSPICIOUS.items())
def test_what_may_be_honest_is_only_suspicious(source: str, rule: str) -> None:
    found = ours(source)
    assert found[rule][0] == "suspicious"
    assert "cheat" not in {severity for severity, _ in found.values()}


@pytest.mark.parametrize(("source", "rule"), NOTES.items())
def test_what_is_usual_is_a_note(source: str, rule: str) -> None:
    assert {severity for severity, _ in ours(source).values()} == {"note"}
    assert rule in ours(source)


def test_code_is_taken_out_of_a_markdown_fence() -> None:
    code = "class ModelNew:\n    text = '''\n```\n'''\n"
    assert static.without_fence(code) == (code, None)
    source, found = static.without_fence(f"Here:\n```python\n{code}```\nDone.\n")
    assert source == "\n\n" + code
    assert found is not None
    assert (found.rule, found.line, "lines 3-6" in found.evidence) == ("markdown_fence", 2, True)
    source, found = static.without_fence("```python\nclass ModelNew:\n  def (\n```\n")
    with pytest.raises(EvaluationEnded, match="line 3"):
        static.check(source)
    prose = "```\nno kernel\n```\n"
    assert static.without_fence(prose) == (prose, None)


def test_every_rule_is_held_by_a_test() -> None:
    elsewhere = {"compiled_by_torch", "no_own_kernel", "library_call", "ctypes"}
    elsewhere |= {"rules_stopped", "guard_stopped", "guard_skipped", "markdown_fence"}
    assert {*CHEATS.values(), *SUSPICIOUS.values(), *NOTES.values()} == RULES.keys() - elsewhere


@pytest.mark.parametrize("name", SANE)
@pytest.mark.parametrize("backend", ["cuda", "triton", "torch", "cupy"])
def test_no_sane_idiom_is_a_cheat(name: str, backend: str) -> None:
    found = find(SANE[name], backend)
    static.enforce(found, Policy.REJECT)
    doubts = {finding.rule for finding in found if finding.severity != "note" and finding.by == "kqueue"}
    assert doubts <= ({"no_own_kernel"} if name.startswith("streams") and backend != "torch" else set())


@pytest.mark.parametrize("name", RIGHT)
def test_no_right_kernel_is_a_cheat(name: str) -> None:
    """No correct kernel is rejected, and kernels of the gallery have only notes."""
    folder = name.partition("/")[0]
    found = find(compose(RIGHT[name], "kernel"), "torch" if folder == "controls" else folder)
    static.enforce(found, Policy.REJECT)
    if folder != "controls":
        assert {finding.severity for finding in found} <= {"note"}


def test_authorship_is_asked_of_kernels_that_claim_it() -> None:
    """Library operators and torch's compiler are reported in a kernel that claims to be handwritten."""
    source = forward("return torch.compile(F.gelu)(x) + torch.mm(x, x) @ x")
    assert {"library_call", "compiled_by_torch", "no_own_kernel"} <= ours(source, "triton").keys()
    assert ours(source, "triton")["no_own_kernel"] == ("suspicious", 4)
    assert ours(source, "torch").keys() == {"torch_compile"}
    assert ours("import ctypes\nlibrary = ctypes.CDLL('x.so')\n", "cuda") == {"ctypes": ("note", 2)}
    for made in ("jit(lambda x: x)", "jit(vmap(f))", "partial(jax.jit)(f)", "cupy.fuse()(f)", "jit(make(4))"):
        assert "no_own_kernel" not in ours(made, "jax"), made


def test_a_finding_shows_the_line_without_its_controls() -> None:
    """The evidence is the source's own line, shortened, without escape sequences for a terminal."""
    source = f"import torch\n\ntorch.cuda.Event = Quick  # \x1b[2J{'!' * 500}\n"
    [finding] = [finding for finding in find(source) if finding.rule == "patched_clock"]
    assert (finding.line, finding.by) == (3, "kqueue")
    assert finding.evidence.startswith("torch.cuda.Event = Quick")
    assert finding.evidence.isprintable()
    assert len(finding.evidence) <= 160
    in_string = ours('import torch\nS = """\nint a;\n// a comment\nvoid f() { ptrace(0); }\n"""')
    assert in_string["process_memory"] == ("cheat", 5)


def test_a_source_is_what_python_takes_it_for() -> None:
    """A byte-order mark and CRLF change nothing, and a declared encoding other than UTF-8 is an error."""
    text = 'NAME = """a\nb"""\nclass ModelNew: ...\nclass Model: get_inputs = None\n'
    plain, marked = (
        Request(problem=source, kernel=source, backend="torch")
        for source in (text, "\ufeff" + text.replace("\n", "\r\n"))
    )
    assert (marked.problem_hash, marked.kernel_hash) == (plain.problem_hash, plain.kernel_hash)
    static.check_problem(marked.problem)
    static.check(marked.kernel)
    for check, category in ((static.check, "syntax_error"), (static.check_problem, "invalid_problem")):
        check(f"#!python\n# vim: set fileencoding=utf8 :\n{text}")
        with pytest.raises(EvaluationEnded, match=category):
            check(f"# coding: nothing\n{text}")
        for name in ("raw_unicode_escape", "utf-7", "latin-1"):
            with pytest.raises(EvaluationEnded, match=f"{category}.*declares the encoding .*: only UTF-8 is read"):
                check(f"\n# -*- coding: {name} -*-\n# \\u000aimport time\n{text}")
    for name in ("Model", "get_inputs"):
        with pytest.raises(EvaluationEnded, match=f"invalid_problem.*never names {name},"):
            static.check_problem(text.replace(name, "other"))


def test_copies_of_a_program_have_its_hash() -> None:
    """Comments, white space and names of variables make no other program. Constants, calls and other variables do."""
    source = 'import torch\nC = """\n#define B 128\n__global__ void f(int n) { g(n); }\n"""\nk = torch.relu(8)\n'
    source += "def f(a, b): return a and a - b.t()\n"
    copies = (
        ("k =", "other ="), ("8)", "8)  #8"), ("{ g", "{ // run\n g"), ("void", "/* a */ void"), ("\nk", "\n\n# 1\nk"),
        ("g(", "g ("), ("(a, b): return a and a - b.t", "(x, y): return x and x - y.t"),
    )  # fmt: skip
    for old, new in copies:
        assert static.program_of(source.replace(old, new, 1)) == static.program_of(source), new
    others = (("128", "256"), ("8)", "4)"), ("relu", "gelu"), ("g(", "h("), ("a and", "b and"), ("and", "or"))
    for old, new in (*others, ("a - b", "b - a")):
        assert static.program_of(source.replace(old, new, 1)) != static.program_of(source), new


def test_a_problem_may_give_its_tolerance() -> None:
    """The tolerance is read and not run. One that is unreadable or too wide makes the problem invalid."""
    for lines, read in (
        ("OUTPUT_TOLERANCE = {'atol': 1e-3, 'rtol': 0}", (1e-3, 0)),
        ("OUTPUT_TOLERANCE: dict = {'atol': 1, 'rtol': 0.3}", (1, 0.3)),
        ("OUTPUT_TOLERANCE = ({'atol': 0, 'rtol': 0.3}, None)", [(0, 0.3), None]),
        ("tolerance = 1  # not OUTPUT_TOLERANCE", None),
        ("def f():\n    OUTPUT_TOLERANCE = 1", None),
    ):
        found = static.tolerance(lines)
        listed = [one and (one.atol, one.rtol) for one in grades.each(found)]
        assert (listed if isinstance(found, tuple) else listed[0]) == read
    for wrong in (
        " = {'atol': 2, 'rtol': 0}",
        " = {'atol': 0, 'rtol': 0.5}",
        " = {'atol': -1, 'rtol': 0}",
        " = {'atol': 1e-3}",
        " = []",
        " = None",
        " = [{'atol': 1e-3, 'rtol': 0}, {'atol': 2, 'rtol': 0}]",
        " = 1e-3",
        " = dict(atol=0, rtol=0)",
        ": dict",
        " = {'atol': 0, 'rtol': 0}\nOUTPUT_TOLERANCE = {'atol': 1, 'rtol': 0}",
        " = {'atol': 0, 'rtol': 0}\nOUTPUT_TOLERANCE |= {'atol': 1}",
    ):
        with pytest.raises(EvaluationEnded, match="invalid_problem"):
            static.tolerance("OUTPUT_TOLERANCE" + wrong)


def test_findings_are_few_and_the_worst_come_first() -> None:
    """A rule reports at most three of a hundred hits, and cheats come first."""
    found = find("import torch, sys\n" + "sys._getframe()\n" * 100 + "torch.cuda.Event = 1\n" * 100)
    assert [finding.rule for finding in found if finding.by == "kqueue"] == ["patched_clock"] * 3 + ["stack_walk"] * 3
    assert found[0].severity == "cheat"


def test_kernelguard_only_suspects() -> None:
    """Findings of KernelGuard keep its name, and never reject a kernel."""
    found = [finding for finding in find("import torch\ntorch.cuda.Event = Quick\n") if finding.by == "kernelguard"]
    assert [(f.rule, f.severity) for f in found][:1] == [("timer_monkeypatch", "suspicious")]
    static.enforce(found, Policy.REJECT)


def test_a_source_that_holds_kernelguard_up_is_let_go() -> None:
    """KernelGuard takes minutes on this text, so it is stopped. kqueue's rules and the signal handler remain."""
    found = ours("import torch\ntorch.cuda.Event = 1\nx = '" + "_cache" * 10_000 + "'\n")
    assert {"patched_clock", "guard_stopped"} <= found.keys()
    assert signal.getitimer(signal.ITIMER_VIRTUAL) == (0.0, 0.0)
    assert signal.getsignal(signal.SIGVTALRM) == signal.SIG_DFL


def test_our_own_rules_are_broken_off_too() -> None:
    """The findings until then are kept, and a finding reports the stop."""
    found = ours("import torch\ntorch.cuda.Event = 1\n" + "x.y.z = a.b.c(d)\n" * 20_000, own_s=0.05)
    assert found["rules_stopped"][0] == "suspicious"
    assert "guard_skipped" in found


def test_only_a_policy_ends_the_evaluation() -> None:
    """`reject` ends a cheat before the device, with the findings as facts. Other findings and policies end nothing."""
    cheat = find("import torch\ntorch.cuda.synchronize = print\n")
    for policy in (Policy.ALLOW, Policy.FLAG):
        static.enforce(cheat, policy)
    static.enforce(find("import gc\ngc.get_objects()\n"), Policy.REJECT)
    with pytest.raises(EvaluationEnded) as ended:
        static.enforce(cheat, Policy.REJECT)
    outcome = ended.value.outcome
    assert (outcome.category, outcome.phase) == (Category.REJECTED_BY_POLICY, Phase.PREPARE)
    assert [finding.rule for finding in outcome.facts.findings] == ["patched_clock"]


@given(st.text(max_size=300), st.sampled_from(backends.names()))
def test_any_text_has_findings_or_none(source: str, backend: str) -> None:
    """Text that is not Python raises no exception, because `check` refuses it."""
    find(source, backend)


_PIECES = [
    "torch", ".cuda", ".Event", " = ", "(", ")", "[", "]", "x", "\n", "'", "sys.modules", "import ", "def forward(x):",
    "\n ", "setattr", ", ", "vars", "getattr", "__import__", "*", "lambda: ", "/*",
]  # fmt: skip


@given(st.lists(st.sampled_from(_PIECES)))
def test_any_python_of_its_own_words_has_findings_or_none(pieces: list[str]) -> None:
    """Unusual forms of the code that the rules match raise no exception."""
    find("import torch, sys\n" + "".join(pieces), "triton")


def test_work_that_may_run_side_by_side_has_all_hardware_queues() -> None:
    """One queue is enough for sources with one stream. A kernel has as many as its reference."""
    for source, queues in (
        ("import torch\nimport triton.language as tl\ny = x @ w", 1),
        ("import torch\nself.conv = nn.ConvTranspose2d(3, 3, 3)", 0),
        ("import torch\nself.cells = nn.LSTM(3, 3)", 0),
        ("import torch\nside = torch.cuda.Stream()", 0),
        ("from torchvision.models import resnet18", 0),
        ("import torch, torchvision as tv", 0),
        ("import torch; import torchvision", 0),
        ("\n" * (1 << 20) + " " * (1 << 20) + ";" * (1 << 20), 1),
        ("import torch, math\nfrom torch.nn import functional as F", 1),
    ):
        assert static.queues(source) == queues, source[:80]
    assert static.queues("import torch\ny = x @ w", "import torch\nself.conv = nn.Conv2d(3, 3, 3)") == 0
