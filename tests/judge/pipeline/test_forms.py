"""Problems of every form, judged in real processes on a CPU slot: correct kernels pass, and cheats fail."""

from __future__ import annotations

import pytest

from kqueue.categories import Category
from kqueue.contract import Comparison, Outcome, Policies, Policy, Purpose, Request, Settings, Timing
from kqueue.profiles import Protocol
from tests.judge.rig import Rig
from tests.judge.sources import kernel, problem

pytestmark = pytest.mark.slow("judges many kernels")

QUICK = Settings(checks=2, timing=Timing().off())
TIMED = Settings(checks=2, timing=Timing(calls=20, warmup=1))


def judge(rig: Rig, source: str, forward: str, settings: Settings = QUICK) -> Outcome:
    return rig.judge(Request(problem=source, kernel=kernel(forward), backend="torch", settings=settings))


ATTENTION = problem(
    "q, mask: torch.softmax((q @ q.T).masked_fill(~mask, -1e9), -1) @ q",
    "return [torch.randn(16, 8), torch.rand(16, 16) > 0.5]",
)


#: Attention with a mask of -inf, which gives the same result as a large negative number if no row is fully masked.
ATTENDED = "q, mask: torch.softmax((q @ q.T).masked_fill(~mask, -float('inf')), -1) @ q"


def test_a_kernel_may_rely_on_what_its_inputs_are_like(rig: Rig) -> None:
    outcome = judge(rig, ATTENTION, ATTENDED)
    assert outcome.category is Category.PASSED, outcome.message
    assert outcome.evidence.checks is not None
    assert outcome.evidence.checks > QUICK.checks


def test_ties_may_be_resolved_otherwise_in_an_input_that_is_a_view(rig: Rig) -> None:
    inputs = "return [torch.randint(0, 50, (64, 64)).float()[:, ::2]]"
    last = "x: 31 - torch.sort(x.flip(-1), dim=-1, descending=True, stable=True).indices[:, :4]"
    outcome = judge(rig, problem("x: torch.topk(x, 4).indices", inputs), last)
    assert outcome.category is Category.PASSED, outcome.message


def test_arguments_may_be_nested(rig: Rig) -> None:
    dropped = "torch.nn.functional.dropout(pair[0] * k, 0.5)"
    source = problem(
        f"pair, state, k: ({dropped} + state['mask'] + pair[1].sum(), {{'a': (state['w'][0] * 2, [k * pair[0]])}})",
        "return [[torch.randn(4, 8), torch.randint(0, 9, (4,))],"
        " {'w': (torch.randn(8).half(), None), 'mask': torch.rand(4, 8) > 0.5}, 3]",
    )
    # Changes to a list in one call are not visible in the next.
    right = (
        f"pair, state, k: ({dropped} + state['mask'] + pair.pop().sum(),"
        " {'a': (state['w'][0].half() * 2, [k * pair[0]])})"
    )
    outcome = judge(rig, source, right)
    assert outcome.category is Category.PASSED, outcome.message


@pytest.mark.parametrize(("number", "category"), [(128, Category.PASSED), (129, Category.INVALID_PROBLEM)])
def test_a_call_can_have_many_tensors(rig: Rig, number: int, category: Category) -> None:
    inputs = f"return [[torch.randn(4, 4) for _ in range({number})]]"
    source = problem("experts: [torch.relu(one) for one in experts]", inputs)
    outcome = judge(rig, source, "experts: [torch.clamp(one, 0) for one in experts]")
    assert outcome.category is category, outcome.message
    assert category is Category.PASSED or "at most 128" in outcome.message


def test_a_dict_of_inputs_is_keyword_arguments(rig: Rig) -> None:
    source = problem("*, a, b: a - b", "return {'b': torch.randn(4, 8), 'a': torch.randn(4, 8)}")
    assert judge(rig, source, "a, b: a - b").category is Category.PASSED
    assert judge(rig, source, "b, a: b - a").category is Category.WRONG_VALUES


@pytest.mark.parametrize(
    ("forward", "close"),
    [
        ("x: x * 1.2e-6", True),
        ("x: (setattr(self, 'n', getattr(self, 'n', 0) + 1), x * 1.2e-6 + (self.n > 2))[1]", False),
    ],
    ids=["close", "close-at-first"],
)
def test_both_verdicts_are_told_whichever_decides(rig: Rig, forward: str, close: bool) -> None:
    outcome = judge(rig, problem("x: x * 1e-6", "return [torch.randn(8, 8)]"), forward)
    assert outcome.category is Category.WRONG_VALUES
    assert outcome.facts.errors.kernelbench_correct is True
    told = outcome.evidence.comparison
    assert told is not None
    assert (told.strict_correct, told.kernelbench_correct) == (False, close)


def test_a_problem_s_own_tolerance_is_heeded_and_told(rig: Rig) -> None:
    source = problem("x: x + 0", "return [torch.randn(8, 8)]") + "OUTPUT_TOLERANCE = {'atol': 0, 'rtol': 0.1}"
    outcome = judge(rig, source, "x: x * 1.05")
    assert outcome.category is Category.PASSED, outcome.message
    assert outcome.evidence.tolerance is not None
    assert (outcome.evidence.tolerance.rtol, outcome.evidence.tolerance.by) == (0.1, "problem")


#: A model whose second step differs from the first.
STEPS = """
import torch
CALLS = 2
class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("m", torch.zeros(8, 8))
        self.register_buffer("t", torch.zeros((), dtype=torch.int64))
    def forward(self, g):
        self.t += 1
        self.m.mul_(0.9).add_(g, alpha=0.1)
        return {"m": self.m, "step": [self.m / (1 - 0.9 ** self.t)]}
def get_inputs():
    return [torch.randn(8, 8)]
"""


def test_calls_can_follow_each_other_without_a_reset(rig: Rig) -> None:
    """Each is compared, also where the model returns its state. A kernel that is wrong from the second is refused."""
    forward = STEPS.partition("def get_inputs")[0].replace("Model", "ModelNew")
    right, wrong = (
        rig.judge(Request(problem=problem, kernel=source, backend="torch", settings=Settings(timing=Timing(calls=5))))
        for problem, source in ((STEPS, forward), (STEPS, forward.replace("0.9 ** self.t", "0.9")))
    )
    assert right.passed, right
    assert right.evidence.calls == 2
    assert wrong.message.startswith("output 3 at ['call 2']['step'][0]: "), wrong
    for text, words in (
        (STEPS + "BACKWARD = True", "CALLS and gradients cannot be combined"),
        (STEPS.replace("CALLS = 2", "CALLS = 10"), "CALLS = 2 is stated once, at the top level, for 2 to 9 forwards"),
    ):
        ended = rig.judge(Request(problem=text, kernel=forward, backend="torch"))
        assert (ended.category, ended.message[: len(words)]) == (Category.INVALID_PROBLEM, words)


def test_patches_of_torch_s_builder_are_the_same_in_all_calls(rig: Rig) -> None:
    names = "_jit_compile", "_run_ninja_build", "_check_and_build_extension_h_precompiler_headers"
    forward = (
        f"x: (fs := [getattr(torch.utils.cpp_extension, n) for n in {names}], seen.append([*map(id, fs)]),"
        f" x * (2 + (seen[0] != seen[-1] or [f.__name__ for f in fs] != {[*names]})))[2]"
    )
    request = Request(
        problem=problem("x: x * 2"),
        kernel="import torch.utils.cpp_extension\nseen = []\n" + kernel(forward),
        backend="torch",
        settings=Settings(checks=2, timing=Timing(calls=5, warmup=1)),
    )
    outcome = rig.judge(request)
    assert outcome.category is Category.PASSED, outcome.message


@pytest.mark.parametrize(
    ("inputs", "forward", "strides"),
    [
        ("return [torch.randn(2, 8, 4, 4).to(memory_format=torch.channels_last)]", "x: x * 2", "[(128, 1, 32, 8)]"),
        ("return [torch.randn(8, 32)[:, 4:20:2], torch.randn(8, 1).expand(8, 8)]", "x, y: x * y", "[(32, 2), (1, 0)]"),
        ("x = torch.randn(64); return [x.unfold(0, 8, 1), x]", "x, y: x.sum(1) + y[7:]", "[(1, 1), (1,)]"),
    ],
    ids=["channels-last", "slice-expanded", "windows-shared"],
)
def test_inputs_keep_their_layout(rig: Rig, inputs: str, forward: str, strides: str) -> None:
    checked = f"        assert [t.stride() for t in locals().values() if isinstance(t, torch.Tensor)] == {strides}\n"
    asserting = kernel(forward).replace("        return", checked + "        return")
    outcome = rig.judge(Request(problem=problem(forward, inputs), kernel=asserting, backend="torch", settings=QUICK))
    assert outcome.category is Category.PASSED, outcome.message


def test_inputs_that_cannot_be_shared_are_named(rig: Rig) -> None:
    outcome = judge(rig, problem("x: x.to_dense()", "return [torch.eye(8).to_sparse()]"), "x: x.to_dense()")
    assert outcome.category is Category.INVALID_PROBLEM
    assert "as input 0 a sparse_coo tensor" in outcome.message


def test_attributes_can_hide_methods_of_a_module(rig: Rig) -> None:
    hiding = "parameters, buffers, modules = (lambda *_: 1), 2, 3\n    def forward"
    request = Request(
        problem=problem("x: torch.relu(x)"),
        kernel=kernel("x: torch.relu(x)").replace("def forward", hiding),
        backend="torch",
        settings=QUICK,
    )
    outcome = rig.judge(request)
    assert outcome.category is Category.PASSED, outcome.message


RESULT = "from dataclasses import dataclass\n@dataclass\nclass Result:\n    b: object\n    a: object = None\n"


def test_outputs_can_have_any_structure_of_python(rig: Rig) -> None:
    source = RESULT + problem("x: (Result(b={'p': x * 2, 1: [None, -x]}), torch.max(x, 1))")
    outcome = judge(rig, source, "x: ({'a': None, 'b': {1: [None, -x], 'p': x + x}}, tuple(torch.max(x, 1)))")
    assert outcome.category is Category.PASSED, outcome.message
    outcome = judge(rig, source, "x: ({'a': None, 'b': {1: [None, x * 2], 'p': x + x}}, tuple(torch.max(x, 1)))")
    assert outcome.message.startswith("output 1 at [0]['b'][1][1]: "), outcome.message
    outcome = judge(rig, problem("x: (x, None)"), "x: (x, x)")
    assert outcome.message == "the output is (Tensor, Tensor), the reference's is (Tensor, None)"
    outcome = judge(rig, problem("x: {'a': 1.0, 'b': x}"), "x: x")
    assert outcome.category is Category.INVALID_PROBLEM
    assert outcome.message.endswith("It returned {'a': <float>, 'b': Tensor}")


def test_inputs_and_outputs_can_have_every_dtype(rig: Rig) -> None:
    byte = "torch.randint(0, 256, (8, 16), dtype=torch.uint8)"
    inputs = f"return [torch.randn(8, 16), {byte}.view(torch.float4_e2m1fn_x2)[:, ::2], {byte}.view(torch.uint64)]"
    floats = "float8_e5m2 float8_e4m3fnuz float8_e8m0fnu complex32 complex64 uint16"
    made = [f"x.abs().to(torch.{name})" for name in floats.split()]
    made += ["y.clone()", "u.clone()", "u.view(torch.uint32)"]
    answer = f"x, y, u: ({', '.join(made)})"
    outcome = judge(rig, problem(answer, inputs), answer)
    assert outcome.category is Category.PASSED, outcome.message
    outcome = judge(
        rig, problem(answer, inputs), answer.replace("u.clone()", "(u.view(torch.int64) + 1).view(u.dtype)")
    )
    assert outcome.message.startswith("output 7: 16 of 16 values"), outcome.message
    outcome = judge(rig, problem("x: torch.quantize_per_tensor(x, 0.1, 0, torch.qint8)"), "x: x")
    assert outcome.category is Category.INVALID_PROBLEM
    assert "torch.qint8, which cannot be shared: a quantized tensor has a scale" in outcome.message


def test_arguments_can_be_objects_of_torch_and_made_on_a_gpu(rig: Rig) -> None:
    init = "    def __init__(self, act, *, layer):\n        super().__init__(); self.act, self.layer = act, layer\n"
    answer = "norm, x, linear, g: self.layer(self.act(norm(x, (8,)))) + linear(x) + torch.randn(8, generator=g)"
    inputs = (
        "assert isinstance(torch.Generator('cuda'), torch.Generator | None)\n"
        "    yield from (torch.nn.functional.layer_norm, torch.randn(4, 8, device='cuda').cuda(0).to('cuda'),"
        " torch.nn.Linear(8, 8), torch.Generator().manual_seed(3))"
    )
    source = problem(answer, inputs).replace("    def forward", init + "    def forward")
    source += (
        "def get_init_inputs():\n"
        "    layers = torch.nn.Linear(8, 8), torch.nn.ReLU()\n"
        "    return [[torch.nn.functional.gelu], {'layer': torch.nn.Sequential(*layers)}]"
    )
    right = kernel(answer).replace("    def forward", init + "    def forward")
    outcome = rig.judge(Request(problem=source, kernel=right, backend="torch", settings=QUICK))
    assert outcome.category is Category.PASSED, outcome.message


def test_a_reference_can_use_autograd(rig: Rig) -> None:
    source = problem("x: torch.autograd.grad((x * x).sum(), x)[0]", "return [torch.randn(4, 8, requires_grad=True)]")
    for right in ("x: 2 * x.detach()", "x: torch.autograd.grad((x * x).sum(), x)[0]"):
        outcome = judge(rig, source, right)
        assert outcome.category is Category.PASSED, outcome.message


def test_no_kernel_is_accused_of_a_shape_that_the_reference_has_too(rig: Rig) -> None:
    """Most calls are timed on inputs that the reference has not answered."""
    forward = "x: x[: 2 - int(x.sum() > 2)].clone()"
    settings = Settings(checks=1, comparison=Comparison.KERNELBENCH, timing=Timing(purpose=Purpose.PUBLISH))
    outcome = judge(rig, problem(forward), forward, settings)
    assert outcome.category is Category.INVALID_PROBLEM
    assert outcome.message.startswith("the reference must return the same structure, shapes and dtypes"), (
        outcome.message
    )


def test_a_kernel_finds_a_plain_command_line_and_can_be_in_a_fence(rig: Rig) -> None:
    source = "from argparse import ArgumentParser\nArgumentParser().parse_args()\n" + kernel("x: (x.mul_(2), None)[1]")
    request = Request(
        problem=problem("x: (x.add_(x), None)[1]"),
        kernel=f"My kernel:\n```python\n{source}```\n",
        backend="torch",
        settings=QUICK,
    )
    outcome = rig.judge(request)
    assert outcome.category is Category.PASSED, outcome.message
    assert outcome.evidence.findings is not None
    assert outcome.evidence.findings[0].rule == "markdown_fence"
    outcome = judge(rig, problem("x: x"), "x: x\nraise SystemExit(0)")
    assert outcome.category is Category.IMPORT_ERROR


@pytest.mark.parametrize(
    ("right", "category"),
    [
        ("x, y: (x.mul_(2), x.sum(1))[1]", Category.PASSED),
        ("x, y: 2 * x.sum(1)", Category.WRONG_VALUES),
        ("x, y: (x.mul_(2), x.sum(1), y.zero_())[1]", Category.INPUT_MUTATED),
    ],
    ids=["same", "skipped", "more"],
)
def test_changes_of_inputs_are_a_part_of_the_answer(rig: Rig, right: str, category: Category) -> None:
    source = problem("x, y: (x.mul_(2), x.sum(1))[1]", "return [torch.randn(8, 8)[:, ::2], torch.randn(4)]")
    outcome = judge(rig, source, right)
    assert outcome.category is category, outcome.message


NORM = problem("x: self.norm(x)").replace(
    "    def forward",
    "    def __init__(self):\n        super().__init__()\n        self.norm = torch.nn.BatchNorm1d(8)\n    def forward",
)
NORMED = NORM.partition("def get_inputs")[0].replace("Model", "ModelNew")
WITHOUT = NORMED.replace("self.norm(x)", "(x - x.mean(0)) / (x.var(0, unbiased=False) + 1e-5).sqrt()")
KEPT = "setattr(self.norm, 'running_mean', self.norm.running_mean * 0.9 + x.mean(0) * 0.1)"
REBOUND = WITHOUT.replace("return", f"return {KEPT} or")
REJECT = QUICK.model_copy(update={"policies": Policies(buffers=Policy.REJECT)})


@pytest.mark.parametrize(
    ("source", "settings", "category", "told", "unkept"),
    [
        (NORMED, TIMED, Category.PASSED, "", ""),
        (WITHOUT, QUICK, Category.PASSED, "", "norm.num_batches_tracked, norm.running_mean, norm.running_var"),
        (REBOUND, QUICK, Category.PASSED, "", "num_batches_tracked, norm.running_var"),
        (NORMED.replace("(8)", "(8, momentum=0.2)"), QUICK, Category.WRONG_VALUES, "model's norm.r", ""),
        (WITHOUT, REJECT, Category.REJECTED_BY_POLICY, "norm.running_mean", "norm.running_mean"),
    ],
    ids=["kept", "not-kept", "one-rebound", "wrong", "strict"],
)
def test_running_statistics_are_compared_where_the_kernel_keeps_them(
    rig: Rig, source: str, settings: Settings, category: Category, told: str, unkept: str
) -> None:
    outcome = rig.judge(Request(problem=NORM, kernel=source, backend="torch", settings=settings))
    assert outcome.category is category, outcome.message
    assert told in outcome.message
    findings = [found.evidence for found in outcome.evidence.findings or () if found.rule == "buffers_not_kept"]
    assert [unkept in found for found in findings] == [True] * bool(unkept)
    if category is Category.WRONG_VALUES:
        assert outcome.facts.errors.kernelbench_correct is True


#: A model that changes a buffer of 17 MiB and a parameter, which its output does not show.
STATE = problem("x: (self.b.add_((x > 0).sum()), self.w.add_(x.mean()), x.relu())[2]").replace(
    "    def forward",
    """    def __init__(self):
        super().__init__()
        self.register_buffer("b", torch.zeros(17 << 17).long())
        self.w = torch.nn.Parameter(torch.ones(8))
    def forward""",
)
UPDATED = STATE.partition("def get_inputs")[0].replace("Model", "ModelNew")


@pytest.mark.parametrize(
    ("source", "category", "told"),
    [
        (UPDATED, Category.PASSED, ""),
        (kernel("x: x.relu()"), Category.PASSED, "b, w"),
        (UPDATED.replace("x > 0", "x > 1"), Category.WRONG_VALUES, ""),
    ],
    ids=["kept", "not-kept", "wrong"],
)
def test_large_buffers_and_parameters_that_change_are_compared(
    rig: Rig, source: str, category: Category, told: str
) -> None:
    """The message of a kernel that leaves them unchanged says so."""
    outcome = rig.judge(Request(problem=STATE, kernel=source, backend="torch", settings=QUICK))
    assert outcome.category is category, outcome.message
    findings = [found.evidence for found in outcome.evidence.findings or () if found.rule == "buffers_not_kept"]
    assert (findings, "does not change its model" in outcome.message) == ([told] * bool(told), bool(told))


GATED = problem("x: x + self.gate * self.branch(x).tanh()").replace(
    "    def forward",
    """    def __init__(self):
        super().__init__()
        self.branch, self.gate = torch.nn.Linear(8, 8), torch.nn.Parameter(torch.zeros(8))
    def forward""",
)
GATE_KEPT = GATED.partition("def get_inputs")[0].replace("Model", "ModelNew")


@pytest.mark.parametrize("source", [GATE_KEPT, GATE_KEPT.replace("tanh", "sin"), kernel("x: x + 0")])
def test_a_branch_behind_zeros_is_labelled_unless_the_kernel_follows_it(rig: Rig, source: str) -> None:
    """A kernel with the reference's gate gets the gate's random values, and must answer as the reference does."""
    outcome = rig.judge(Request(problem=GATED, kernel=source, backend="torch", settings=QUICK))
    assert outcome.category is Category.PASSED, outcome.message
    hidden = [found.evidence for found in outcome.evidence.findings or () if found.rule == "weights_hidden"]
    assert hidden == ["branch.weight, branch.bias"] * (source is not GATE_KEPT)


LARGE_STATE = problem("x: x + self.step(x)").replace(
    "    def forward",
    """    def __init__(self):
        super().__init__()
        self.gate, self.seen = torch.nn.Parameter(torch.zeros(8)), torch.nn.BatchNorm1d(8)
        self.register_buffer("mean", torch.zeros(64, 8))
    def step(self, x):
        self.seen(x)
        return self.gate * self.mean.mul_(0.9)[:4].add_(x.mean(0), alpha=0.1)
    def forward""",
)
STATE_KEPT = LARGE_STATE.partition("def get_inputs")[0].replace("Model", "ModelNew")
PART_KEPT = STATE_KEPT.replace("self.mean.mul_(0.9)[:4]", "self.mean[:4].mul_(0.9)")


@pytest.mark.parametrize("source", [STATE_KEPT, PART_KEPT])
def test_state_that_is_zeros_at_first_is_labelled_unless_the_kernel_changes_all_of_it(rig: Rig, source: str) -> None:
    outcome = rig.judge(Request(problem=LARGE_STATE, kernel=source, backend="torch", settings=QUICK))
    assert outcome.category is Category.PASSED, outcome.message
    hidden = [found.evidence for found in outcome.evidence.findings or () if found.rule == "weights_hidden"]
    assert [("mean" in names) for names in hidden] == [True] * (source is PART_KEPT)


def test_statistics_that_are_wrong_only_in_later_calls_are_found(rig: Rig) -> None:
    late = NORMED.replace(
        "return", "self.n = getattr(self, 'n', 0) + 1; self.norm.momentum = 0.1 + (self.n > 16)\n        return"
    )
    outcome = rig.judge(Request(problem=NORM, kernel=late, backend="torch", settings=TIMED))
    assert outcome.category is Category.NONDETERMINISTIC
    assert "model's norm.running_" in outcome.message


def test_profiles_are_told_beside_the_verdict(rig: Rig) -> None:
    """A kernel that folds batch norm is wrong, passes in ``eval()`` mode, and changes no other verdict by that."""
    folded = "(x - self.norm.running_mean) / (self.norm.running_var + 1e-5).sqrt()"
    profiles = (Protocol.KERNELBENCH_EVAL, Protocol.KERNELBENCH_2025)
    for forward, category, passed in (
        (folded, Category.WRONG_VALUES, [True, False]),
        ("self.norm(x) + 1e-3", Category.WRONG_VALUES, [False, True]),
        ("self.norm(x)", Category.PASSED, [True, True]),
        ("self.nothing", Category.RUNTIME_ERROR, [None, None]),
    ):
        settings = TIMED.model_copy(update={"profiles": profiles})
        source = NORMED.replace("self.norm(x)", forward)
        outcome = rig.judge(Request(problem=NORM, kernel=source, backend="torch", settings=settings))
        assert outcome.category is category, outcome.message
        rows = outcome.evidence.profiles or ()
        assert [(one.name, one.passed) for one in rows] == [*zip(profiles, passed, strict=True)]
        assert all(bool(one.why) is not one.passed for one in rows)


TWO, ONE = "x: (x.relu(), x.clamp(0))", Category.WRONG_OUTPUT_STRUCTURE


@pytest.mark.parametrize(
    ("reference", "right", "category"),
    [
        (TWO, "x: (lambda y: (y, y))(x.relu())", ONE),
        ("x: (x.relu(), x[-1:].relu())", "x: (lambda y: (y, y[-1:]))(x.relu())", ONE),
        ("x: (lambda y: (y, y))(x.relu())", "x: (lambda y: (y, y))(x.relu())", Category.PASSED),
        ("x: (lambda y: (y, y))(x.mean(1, True).expand(4, 8))", "x: (x.mean(1, True) + 0 * x,) * 2", Category.PASSED),
        (TWO, "x: torch.stack((x, x)).relu().unbind()", Category.PASSED),
        (TWO, "x: torch.stack((x, x), -1).relu().unbind(-1)", Category.PASSED),
    ],
    ids=["same", "part", "as-the-reference", "expanded", "halves", "between-each-other"],
)
def test_outputs_share_memory_only_where_the_reference_s_do(
    rig: Rig, reference: str, right: str, category: Category
) -> None:
    """Views of one buffer that do not overlap are separate memory."""
    outcome = judge(rig, problem(reference), right)
    assert outcome.category is category, outcome.message
    assert outcome.passed or "output 1 shares memory with output 0" in outcome.message


def test_a_missing_effect_on_an_input_is_named(rig: Rig) -> None:
    outcome = judge(rig, problem("y, x: x.mul_(2) + y", "return [torch.randn(8), torch.randn(8)]"), "y, x: x * 2 + y")
    assert outcome.category is Category.WRONG_VALUES
    assert outcome.message.startswith("input 1 after the call: ")


SETUP = """
    times = 0
    def setup({parameters}):
        self.times += 1
        {body}
    def forward"""
PLAN = "self.plan = (x.is_meta, tuple(x.shape), x.stride()) == (True, (4, 8), (16, 1))"


@pytest.mark.parametrize(
    ("parameters", "body", "forward", "category", "told"),
    [
        ("self", "self.weight = torch.ones(8) + 1", "x: x * self.weight * self.times", Category.PASSED, True),
        ("self, x", PLAN, "x: x * 2 * self.plan * self.times", Category.PASSED, True),
        ("self, stage", "pass", "x: x * (2 + self.times)", Category.PASSED, False),
        ("self, x", "self.sum = float(x.sum())", "x: x * 2", Category.INIT_ERROR, False),
    ],
    ids=["weights", "shapes", "undeclared", "values"],
)
def test_a_declared_setup_runs_once_without_values_and_is_timed_apart(
    rig: Rig, parameters: str, body: str, forward: str, category: Category, told: bool
) -> None:
    declared = SETUP.format(parameters=parameters, body=body)
    source = problem("x: x * self.factor", "return [torch.randn(4, 16)[:, :8]]").replace(
        "    def forward", SETUP.format(parameters="self", body="self.factor = 2")
    )
    judged = kernel(forward).replace("    def forward", declared)
    outcome = rig.judge(Request(problem=source, kernel=judged, backend="torch", settings=TIMED))
    assert outcome.category is category, outcome.message
    assert outcome.evidence.reference_setup_ms
    assert (outcome.evidence.setup_ms is not None) is told
