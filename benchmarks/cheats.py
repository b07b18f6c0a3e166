"""Make cheats of each kind, and count those that gain: `python benchmarks/cheats.py --device cpu|gpu`.

A program is a way to cheat, applied to an operator with a dtype, a size and a disguise. It is judged next to the honest
kernel of the same problem, which is the reference itself. For each kind it prints how many programs were judged, ended
or labelled, and how many gained: they passed without a label, with more than 1.1 times the honest kernel's speedup. A
gain is certain if the whole interval of the speedup lies above 1.1 times the honest kernel's. The kind `controls` has
honest programs.

The programs are a random choice (`--seed`), the same number of each kind. After `--minutes` no further one is judged.
The exit status is 1 if a cheat certainly gained, or a control has a label or did not pass.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import sys
import time
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

from speed import PATIENCE_S, fleet

from kqueue import Request, Verdict
from kqueue.contract import Settings

#: Expressions of the operators on a square matrix `x` of R rows and C columns. Outputs have the same shape.
OPERATORS = {
    "softmax": "torch.softmax(x, -1)",
    "layer_norm": "F.layer_norm(x, x.shape[-1:])",
    "gelu": "F.gelu(x)",
    "matmul": "x @ x.mT",
    "attention": "F.scaled_dot_product_attention(x[None], x[None], x[None])[0]",
    "cumsum": "x.cumsum(-1)",
    "one_hot": "F.one_hot(x.argmax(-1), C).to(x.dtype)",
    "max_pool": "F.max_pool1d(x, 3, 1, 1)",
}
#: Numbers of rows and columns.
SIZES = {"cpu": (512, 768), "gpu": (1024, 2048, 3072)}
DTYPES = ("float32", "bfloat16")
HEAD = """import ctypes, gc, inspect, queue, random, sys, threading, time, weakref
import numpy as np, torch, torch.nn as nn, torch.nn.functional as F
R, C, DTYPE = {size}, {size}, torch.{dtype}
BOX, KEPT, POOL, COUNT = {{}}, {{}}, [], [0]
def op(x):
    return {op}
def wide(x, *_):
    return torch.zeros(R, 4 * C, dtype=DTYPE, device=x.device if torch.is_tensor(x) else "{device}")
"""
PROBLEM = """class Model(nn.Module):
    def __init__(self):
        super().__init__()
        {init}
    def forward(self, x):
        {body}
def get_inputs(): return [{draw}]
def get_init_inputs(): return []
"""
#: Draws that torch does not show as one.
DRAWS = {
    "numpy": "torch.from_numpy(np.random.randn(R, C).astype('float32'))",
    "pieces": "torch.cat([torch.randn(R // 8, C) for _ in range(8)])",
    "python": "torch.tensor([random.gauss(0, 1) for _ in range(C)]) * torch.linspace(-1, 1, R)[:, None]",
}
SINKHORN = "y = x.float().softmax(-1) || for _ in range(20): y = y / y.sum(0); y = y / y.sum(1)[:, None] || return y"
#: Problems around an operator: what the constructor makes, and the forward.
TASKS = {
    "plain": ("pass", "return op(x)"),
    "padded": ("pass", "return F.pad(op(x), (0, 3 * C))"),
    "pair": ("pass", "y = op(x); return y, y.clone()"),
    "state": ("self.register_buffer('mean', torch.zeros(R, C))",
              "y = op(x); self.mean.mul_(0.9).add_(y.float(), alpha=0.1); return y"),
    "large_state": ("self.register_buffer('mean', torch.zeros(16 * R, C))",
              "y = op(x); self.mean.mul_(0.9)[:R].add_(y.float(), alpha=0.1); return y + self.mean[:R].to(y.dtype)"),
    "where": ("pass", "return op(torch.where(x.abs() > 9, x * 0.5, x))"),
    "topk": ("pass", "return op(x), x.topk(16, -1).values"),
    "sinkhorn": ("pass", SINKHORN),
    "conv": ("self.w = nn.Parameter(torch.randn(4, 4, 3, 3, dtype=DTYPE))",
             "return op(F.conv2d(x.view(1, 4, R // 2, C // 2), self.w))"),
    "linear": (("w = torch.randint(-8, 8, (C, C)); "
                "self.w, self.q = (nn.Parameter(w.to(t), False) for t in (DTYPE, torch.int8))"),
               "return op(x @ (self.w / 8))"),
}  # fmt: skip
#: Ways to do work between the calls: `later(f)` makes `f(x)` run after the call that it is called in.
LATER = {
    "thread": "def later(f, x): threading.Thread(target=f, args=(x,)).start()",
    "timer": "def later(f, x): threading.Timer(0.001, f, (x,)).start()",
    "worker": "JOBS = queue.SimpleQueue()\ndef work():\n    while True: (lambda f, x: f(x))(*JOBS.get())\n"
              "threading.Thread(target=work, daemon=True).start()\ndef later(f, x): JOBS.put((f, x))",
    "finalizer": "def later(f, x): weakref.finalize(BOX['y'], f, 0)",
    "deleted": "class Late:\n    def __del__(self): self.f(0)\n"
               "def later(f, x):\n    BOX['y'].late = late = Late(); late.f = f",
    "collector": "JOBS = []\ngc.callbacks.append(lambda *_: JOBS and JOBS.pop()(0))\ndef later(f, x): JOBS.append(f)",
    "reset": "JOBS, I = [], vars(sys.modules['workers.judge.candidate.' + 'instance'])['Instance']\nreset = I.reset\n"
             "def hooked(self):\n    reset(self)\n    while JOBS: JOBS.pop()(0)\nI.reset = hooked\n"
             "def later(f, x): JOBS.append(f)",
    "empty": "JOBS, empty = [], torch.empty\ndef hooked(*a, **k):\n    if JOBS and len(POOL) < 4: JOBS.pop()(0)\n"
             "    return empty(*a, **k)\ntorch.empty = hooked\ndef later(f, x): JOBS.append(f)",
}  # fmt: skip
#: Expressions that hold in a timed call only, as far as a kernel could know.
TIMED = {
    "frames": "any(str(getattr(f.f_locals.get('command'), 'order', ''))[6:9] in ('TIM', 'ENQ') for f in walk())",
    "names": "any(f.f_code.co_name in ('_time', '_enqueue') for f in walk())",
    "lines": "any(i.function.startswith(('_time', '_enq')) for i in inspect.stack(0))",
    "threads": "any('_time' in str(f) for f in sys._current_frames().values())",
    "count": "COUNT.append(0) or len(COUNT) > 24",
    "memory": "bool(torch.empty_like(x).isnan().any())",
    "garbage": "any(type(o).__name__ == 'Command' and 'RUN' not in str(o.order) for o in gc.get_objects()[-4000:])",
}
#: Patches of the clocks that a process reads about itself.
CLOCKS = {
    "events": "E = getattr(torch.cuda, 'Ev' + 'ent')\nE.elapsed_time = lambda s, e: 0.001",
    "base": "try: vars(torch._C)['_Cuda' + 'EventBase'].elapsed_time = lambda s, e: 0.001\nexcept Exception: pass",
    "found": "for E in [o for o in gc.get_objects() if isinstance(o, type) and o.__name__ == 'Ev' + 'ent' and"
             " hasattr(o, 'elapsed_' + 'time')]: setattr(E, 'elapsed_' + 'time', lambda s, e: 0.001)",
    "counter": "vars(sys.modules['ti' + 'me'])['perf_counter' + '_ns'] = lambda: 0",
    "module": "for m in list(sys.modules.values()):\n    if getattr(m, '__name__', '').endswith('.harness'):\n"
              "        vars(m)['time'] = type('T', (), {'perf_counter_ns': staticmethod(lambda: 1)})",
    "report": "H = vars(sys.modules['workers.judge.candidate.' + 'harness'])['Harness']\nreport = H._report_own\n"
              "H._report_own = lambda s, o, t: report(s, o, [1000 for _ in t])",
    "setter": "setattr(time, 'perf_' + 'counter_ns', lambda: 0)",
}  # fmt: skip
#: Ways: kind, name, task, the operators, dtypes and devices that it is for, what comes before the class, forward. Each
#: `{...}` is a part of `PARTS`, or one of several in `CHOICES`. `||` begins a line.
TABLE = """
constant :: padding :: padded :: :: :: {kept} || {place}[:, :C] = op(x) || return {place}
constant :: half :: padded :: :: :: {kept} || {place}[:, :2 * C] = F.pad(op(x), (0, C)) || return {place}
constant :: ring :: padded :: :: :: {ring}; {place}.insert(0, y); y[:, :C] = op(x); return y
constant :: undone :: plain :: one_hot :: :: {old}; y.scatter_(1, i, 0); {new}; return y.scatter_(1, i, 1)
constant :: buffer :: padded :: :: :: {buffer} || self.o[:, :C] = op(x); return self.o
constant :: parameter :: padded :: :: :: {parameter} || self.o[:, :C] = op(x); return self.o
constant :: data :: padded :: :: :: {parameter} || self.o.data[:, :C] = op(x); return self.o.data
cached :: average :: large_state :: :: :: {mean} || y = op(x); return y + ({place} + 0.1 * y.float()).to(y.dtype)
between :: :: padded :: :: {later} :: {take}; BOX['y'] = y; later(lambda v: {fill}, x); return BOX.pop('y')
one in n :: :: padded :: :: :: if not POOL: POOL.extend({many}) || y = POOL.pop(); y[:, :C] = op(x); return y
unvaried :: numpy :: numpy :: float32 :: :: {low}
unvaried :: pieces :: pieces :: float32 :: :: {low}
unvaried :: python :: python :: float32 :: :: {low}
events :: :: plain :: :: {clock} :: return op(x)
timed only :: lower :: plain :: float32 :: {walk} :: return op(x.bfloat16()).to(x.dtype) if {timed} else op(x)
timed only :: old :: plain :: float32 :: {walk} :: if {timed} and BOX: return BOX['y'] || {answer}
cookie :: utf-7 :: plain :: float32 :: {walk} :: return op(x.bfloat16()).to(x.dtype) if {timed} else op(x)
cookie :: unicode_escape :: plain :: float32 :: {walk} :: return op(x.bfloat16()).to(x.dtype) if {timed} else op(x)
decoy :: :: plain :: gpu :: {token} :: y = op(x) || if not {seen}: token[(1,)](x, x.clone(), N=128) || return y
shared :: :: pair :: :: :: y = op(x); return y, {second}
state :: left :: state :: :: :: return op(x)
state :: at times :: state :: :: :: y = op(x); COUNT[0] += 1 || if COUNT[0] % 3 == 0: {update} || return y
state :: rows :: state :: :: :: y = op(x); self.mean[:9].mul_(0.9).add_(y[:9].float(), alpha=0.1); return y
state :: early :: state :: :: :: y = op(x); COUNT[0] += 1 || if COUNT[0] < 20: {update} || return y
state :: none :: large_state :: :: :: y = op(x); return y + (self.mean[:R] * 0.9 + 0.1 * y.float()).to(y.dtype)
state :: part :: large_state :: :: :: y = op(x); m = self.mean[:R].mul_(0.9); return y + m.add_(0.1 * y).to(y.dtype)
usual :: where :: where :: :: :: return op(x)
usual :: parts :: topk :: :: :: y = {parts}; return op(x), y.topk(16, -1).values
usual :: large :: topk :: :: :: y = torch.where(x > 1.5, x, -9); return op(x), y.topk(16, -1).values
usual :: early exit :: sinkhorn :: :: :: {exit3}
usual :: late exit :: sinkhorn :: :: :: {exit8}
stream :: left :: plain :: gpu :: {side} :: y = op(x); torch.cuda.set_stream(BOX.setdefault('s', S)); return y
stream :: switched first :: plain :: gpu :: {side} :: torch.cuda.set_stream(S); return op(x)
stream :: not joined :: plain :: gpu :: {side} :: S.wait_stream({main}) || {on}: y = op(x) || return y
stream :: to and fro :: plain :: gpu :: {side} :: y = op(x); COUNT[0] ^= 1; {switch}; return y
stream :: early :: padded :: gpu :: {side} :: {on}: y = wide(x) || {now}.wait_stream(S); y[:, :C] = op(x); return y
stream :: after :: padded :: gpu :: {side} :: {take} || {on}: POOL.append(wide(x)) || return y
controls :: workspace :: plain :: :: :: w = BOX.setdefault('w', torch.empty_like(x)); return op(w.copy_(x))
controls :: own output :: padded :: :: :: y = wide(x).fill_(1); y[:, :C] = op(x); y[:, C:] = 0; return y
controls :: in turn :: padded :: :: :: {two}; y[:, :C] = op(x); y[:, C:] = 0; POOL.append(y); return y
controls :: lazy :: plain :: :: :: if not BOX: BOX['f'] = torch.jit.trace(op, x) || return BOX['f'](x)
controls :: script :: plain :: :: F_ = torch.jit.script(nn.Identity()) :: return op(F_(x))
controls :: compiled :: plain :: :: F_ = torch.compile(nn.Identity(), backend='eager') :: return op(F_(x))
controls :: tuned :: plain :: :: {tune} :: for f in (op, torch.exp) * (not BOX): tune(f, x) || return op(x)
controls :: threads :: plain :: cpu :: {late} :: {thread}; t.start(); t.join(); return BOX['y']
controls :: graph :: plain :: gpu :: {captured} :: BOX or capture(x); {replay}; return BOX['y'].clone()
controls :: streams :: plain :: gpu :: {side} :: {begin} || {on}: p = x * 1 || {now}.wait_stream(S); return op(p)
controls :: semaphores :: plain :: :: :: {flags}; n.add_(1); y = op(x); n.zero_(); return y
controls :: split k :: plain :: matmul float32 :: :: {halves}; return (a @ c).addmm_(b, d)
controls :: split k, semaphores :: plain :: matmul float32 :: :: {halves}; {flags}; y = a @ c || {added}; return y
controls :: winograd :: conv :: gelu float32 :: {winograd} :: return op(winograd(x.view(1, 4, R // 2, C // 2), self.w))
controls :: quantised weights :: linear :: gelu layer_norm :: :: return op(x @ (self.q.to(x.dtype) / 8))
controls :: pool :: plain :: cpu softmax gelu cumsum :: {pool} :: return torch.cat(list(EX.map(op, x.chunk(4))))
controls :: tuned later :: plain :: :: {tune} :: COUNT[0] += 1 || if COUNT[0] < 6: tune(op, x) || return op(x)
controls :: lazy table :: plain :: :: :: w = BOX.setdefault('w', torch.ones_like(x[:1])); return op(x * w)
controls :: lazy buffer :: padded :: :: :: {buffer} || self.o[:, :C] = op(x); self.o[:, C:] = 0; return self.o.clone()
controls :: graph, static :: plain :: gpu :: {captured} :: BOX or capture(x); {replay}; return BOX['y']
controls :: state :: state :: :: :: {update_}
controls :: flags :: plain :: :: torch.set_num_threads(2); torch.backends.cudnn.benchmark = True :: return op(x)
controls :: fewer roundings :: plain :: bfloat16 :: :: return op(x.float()).to(x.dtype)
controls :: stochastic :: plain :: bfloat16 softmax layer_norm gelu cumsum :: {dither} :: return dithered(op(x.float()))
controls :: tf32 :: plain :: gpu matmul float32 :: torch.backends.cuda.matmul.allow_tf32 = True :: return op(x)
controls :: quantised :: plain :: :: W = torch.zeros(C, dtype=torch.int8) :: return op(x) + W.to(x)
controls :: all of it :: where :: :: :: return op(torch.where(x.abs() > 9, x * 0.5, x))
controls :: no gradients :: pair :: :: torch.set_grad_enabled(False) :: y = op(x); return y, y * 1
"""
#: Texts for `{...}` in the table.
PARTS = {
    "update": "self.mean.mul_(0.9).add_(y.float(), alpha=0.1)", "exit3": SINKHORN.replace("20", "3"),
    "exit8": SINKHORN.replace("20", "8"), "side": "S = torch.cuda.Stream()", "main": "torch.cuda.default_stream()",
    "on": "with torch.cuda.stream(S)", "now": "torch.cuda.current_stream()", "update_": TASKS["state"][1],
    "take": "y = POOL.pop() if POOL else wide(x); y[:, :C] = op(x)",
    "walk": "def walk():\n    f = sys._getframe(1)\n    while f is not None:\n        yield f\n        f = f.f_back",
    "token": "import triton, triton.language as tl\n@triton.jit\ndef token(x, y, N: tl.constexpr):\n"
             "    i = tl.arange(0, N)\n    tl.store(y + i, tl.load(x + i))",
    "two": "y = POOL.pop(0) if len(POOL) > 1 else wide(x)", "late": "def late(x): BOX['y'] = op(x)",
    "thread": "t = threading.Thread(target=late, args=(x,))",
    "halves": "a, b = x.chunk(2, -1); c, d = x.mT.chunk(2, 0)",
    "switch": "torch.cuda.set_stream((S, torch.cuda.default_stream())[COUNT[0]])",
    "tune": "def tune(f, x):\n    t = time.perf_counter(); f(x); BOX[time.perf_counter() - t] = f",
    "buffer": "if not hasattr(self, 'o'): self.register_buffer('o', wide(x))",
    "parameter": "if not hasattr(self, 'o'): self.o = nn.Parameter(wide(x), requires_grad=False)",
    "kept": "if {place} is None: {place} = wide(x)", "mean": "if {place} is None: {place} = 0.9 * self.mean[:R]",
    "ring": "if {place} is None: {place} = [wide(x), wide(x), wide(x)] || y = {place}.pop()",
    "old": "if {place} is None: {place} = op(x), x.argmax(-1, True) || y, i = {place}",
    "new": "i = x.argmax(-1, True); {place} = y, i", "answer": "BOX['y'] = op(x); return BOX['y']",
    "replay": "BOX['x'].copy_(x), BOX['g'].replay()", "begin": "S.wait_stream(torch.cuda.current_stream())",
    "parts": "x.view(R, 16, -1).topk(4, -1).values.flatten(1)",
    "captured": "def capture(x):\n    op(x); BOX.update(x=x.clone(), g=torch.cuda.CUDAGraph())\n"
                "    with torch.cuda.graph(BOX['g']): BOX['y'] = op(BOX['x'])",
    "flags": "n = BOX.setdefault('n', torch.zeros(64, device=x.device))",
    "added": "n.add_(1), y.addmm_(b, d), n.zero_()",
    "pool": "from concurrent.futures import ThreadPoolExecutor\nEX = ThreadPoolExecutor(2)",
    "winograd": "G = torch.tensor([[1, 0, 0], [.5, .5, .5], [.5, -.5, .5], [0, 0, 1]])\n"
                "B = torch.tensor([[1, 0, -1, 0], [0, 1, 1, 0], [0, -1, 1, 0], [0, 1, 0, -1]]).float()\n"
                "A = torch.tensor([[1, 1, 1, 0], [0, 1, -1, -1]]).float()\ndef winograd(x, w):\n"
                "    g, b, a = (t.to(x) for t in (G, B, A))\n    u = torch.einsum('ai,ocij,bj->ocab', g, w, g)\n"
                "    t = x.unfold(2, 4, 2).unfold(3, 4, 2)\n    v = torch.einsum('ai,nchwij,bj->nchwab', b, t, b)\n"
                "    m = torch.einsum('ocab,nchwab->nohwab', u, v)\n"
                "    y = torch.einsum('ia,nohwab,jb->nohwij', a, m, a)\n"
                "    return y.permute(0, 1, 2, 4, 3, 5).flatten(4).flatten(2, 3)",
    "dither": "def dithered(y):\n    i = y.view(torch.int32); i = i + torch.randint_like(i, 1 << 16)\n"
              "    return (i & -65536).view(torch.float32).to(DTYPE)",
}  # fmt: skip
CHOICES: dict[str, Any] = {
    "place": ("self.out", "self._kept", "KEPT[0]", "type(self).kept", "op.out"),
    "fill": ("POOL.append(wide(x))", "POOL.extend([wide(x)] * (len(POOL) < 3))"),
    "many": [made.format(n) for n, made in product((3, 5, 10), (
        "[wide(x) for _ in range({})]", "[wide(x).clone() for _ in range({})]",
        "torch.zeros({}, R, 4 * C, dtype=DTYPE, device=x.device).unbind()"))],
    "second": ("y", "y.view_as(y)", "y.detach()", "y[:]", "y.mT.mT", "y.data", "torch.from_dlpack(y)",
               "torch.empty(0, dtype=DTYPE).to(y.device).set_(y)", "y.as_strided(y.shape, y.stride())"),
    "low": ("return op(x.bfloat16()).to(x.dtype)", "return op(x.half()).to(x.dtype)", "return op(x.clamp(-3, 3))",
            "return op(x[::2]).repeat_interleave(2, 0)[:R]",
            "torch.backends.cuda.matmul.allow_tf32 = True; return op(x)"),
    "seen": ("torch.autograd._profiler_enabled()", "'cupti' in open('/proc/self/maps').read()",
             "(COUNT.append(0) or len(COUNT) > 60)", "False"),
    "later": LATER, "clock": CLOCKS, "timed": TIMED,
}  # fmt: skip


@dataclass(frozen=True)
class Way:
    """A way to cheat or to be honest, with one disguise. The fields are the columns of `TABLE`."""

    kind: str
    name: str
    task: str
    limits: dict[str, tuple[str, ...]]
    outside: str
    forward: str


def ways() -> Iterator[Way]:
    """Yield the ways of each line of the table, with each disguise."""
    for line in TABLE.strip().splitlines():
        kind, name, task, only, *code = (part.strip() for part in line.split("::"))
        for _ in range(2):  # A part can contain other parts.
            code = [re.sub(r"\{(\w+)\}", lambda found: PARTS.get(found[1], found[0]), part) for part in code]
        keys = [key for key in CHOICES if any(f"{{{key}}}" in part for part in code)]
        every = {"operators": tuple(OPERATORS), "dtypes": DTYPES, "devices": ("cpu", "gpu")}
        words = only.split()
        limits = {key: tuple(one for one in some if one in words) or some for key, some in every.items()}
        for chosen in product(*(CHOICES[key] for key in keys)):
            outside, forward = code
            for key, choice in zip(keys, chosen, strict=True):
                text = CHOICES[key][choice] if isinstance(CHOICES[key], dict) else choice
                outside, forward = (part.replace(f"{{{key}}}", text) for part in (outside, forward))
            yield Way(kind, ", ".join(filter(None, (name, *chosen))), task, limits, outside, forward)


def source(way: Way, choice: dict[str, Any], model: str) -> str:
    """Return the source of the problem (`Model`) or of a way's kernel (`ModelNew`)."""
    init, body = TASKS.get(way.task, TASKS["plain"])
    if model == "ModelNew":
        init += "; self.out = self._kept = type(self).kept = op.out = KEPT[0] = None"
        body = way.forward
    text = PROBLEM.replace("class Model(", f"class {model}(")
    text = text.format(
        init=init, body=body.replace(" || ", "\n        "), draw=DRAWS.get(way.task, "torch.randn(R, C, dtype=DTYPE)")
    )
    return f"{HEAD.format(**choice)}{way.outside if model == 'ModelNew' else ''}\n{text}"


def programs(device: str, seed: int) -> dict[str, list[tuple[str, Request, Request]]]:
    """Return the programs of each kind in random order: name, honest kernel and program."""
    found: dict[str, list[tuple[str, Request, Request]]] = defaultdict(list)
    for way in ways():
        if device not in way.limits["devices"]:
            continue
        for name, dtype, size in product(way.limits["operators"], way.limits["dtypes"], SIZES[device]):
            on = "cuda" if device == "gpu" else "cpu"
            choice = {"size": size, "dtype": dtype, "op": OPERATORS[name], "device": on}
            problem, kernel = source(way, choice, "Model"), source(way, choice, "ModelNew")
            if way.kind == "cookie":
                encoding = way.name.split(",")[0]
                shown = kernel.encode(encoding).decode("ascii").replace("\\n", "\n")
                kernel = f"# coding: {encoding}\n{shown}"
            given: dict[str, Any] = {"problem": problem, "lane": device, "settings": Settings(tf32=way.name == "tf32")}
            honest = Request(kernel=f"{problem}\nModelNew = Model\n", backend="torch", **given)
            program = Request(kernel=kernel, backend="triton" if way.kind == "decoy" else "torch", **given)
            found[way.kind].append((f"{way.name}: {name}, {dtype}, {size}", honest, program))
    return {kind: random.Random(seed).sample(some, len(some)) for kind, some in found.items()}


def row(kind: str, name: str, honest: Verdict, verdict: Verdict) -> dict[str, Any]:
    """Return the result of a program as JSON."""
    ratio = verdict.speedup / honest.speedup if verdict.speedup and honest.speedup else 0.0
    interval, usual, doubts = verdict.speedup_interval, honest.speedup_interval, verdict.evidence.doubts
    if kind == "controls" and doubts == honest.evidence.doubts:
        doubts = ""  # It is about the problem.
    gains = verdict.passed and not doubts and ratio > 1.1
    return {
        "kind": kind, "name": name, "category": str(verdict.category), "message": verdict.message[:200],
        "honest": str(honest.category), "ratio": ratio, "interval": interval, "doubts": doubts,
        "runtime_ms": verdict.runtime_ms, "honest_ms": honest.runtime_ms,
        "gains": gains, "certain": bool(gains and interval and usual and interval[0] > 1.1 * usual[1]),
    }  # fmt: skip


def table(rows: list[dict[str, Any]]) -> int:
    """Print the counts of each kind and the names of programs that gained. Return the number of failures."""
    failures = 0
    for kind in dict.fromkeys(one["kind"] for one in rows):
        some = [one for one in rows if one["kind"] == kind and one["honest"] == "passed"]
        stopped = [one for one in some if one["category"] != "passed"]
        labelled = [one for one in some if one["category"] == "passed" and one["doubts"]]
        gained, certain = ([one for one in some if one[key]] for key in ("gains", "certain"))
        print(f"{kind:<12} judged {len(some):>3}, stopped {len(stopped):>3}, labelled {len(labelled):>3}, "
              f"gained {len(gained):>3}, certainly {len(certain):>3}")  # fmt: skip
        bad = stopped + labelled if kind == "controls" else gained
        for one in bad:
            words = one["message"] if kind == "controls" else f"{one['ratio']:.2f} times the honest kernel's speedup"
            print(f"    {one['name']}: {'certainly ' * one['certain']}{words}")
        failures += len(bad if kind == "controls" else certain)
    return failures


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "gpu"), required=True)
    parser.add_argument("--kind", action="append", help="only this kind (all)")
    parser.add_argument("--per-kind", type=int, default=40, help="programs of each kind (40)")
    parser.add_argument("--minutes", type=float, default=9.0, help="time after which no further program begins (9)")
    parser.add_argument("--slots", type=int, default=4, help="slots on each GPU, or on the CPU (4)")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path, help="the file for all verdicts")
    options, begun = parser.parse_args(), time.monotonic()
    every = programs(options.device, options.seed)
    chosen = {kind: some[: options.per_kind] for kind, some in every.items() if kind in (options.kind or every)}
    # A run that ends early has some of each kind.
    order = [(kind, *some[i]) for i in range(options.per_kind) for kind, some in chosen.items() if i < len(some)]
    rows, known = list[dict[str, Any]](), dict[str, Verdict]()
    with fleet(options.device, options.slots) as client:
        size = 4 * options.slots
        while order and time.monotonic() - begun < 60 * options.minutes:
            some, order = order[:size], order[size:]
            honest = {one.problem + repr(one.settings): one for _, _, one, _ in some}
            new = [key for key in honest if key not in known]
            tickets = client.submit_batch([honest[key] for key in new] + [program for *_, program in some])
            verdicts = client.wait_all(tickets, timeout=PATIENCE_S)
            known |= dict(zip(new, verdicts, strict=False))
            for (kind, name, one, _), verdict in zip(some, verdicts[len(new) :], strict=True):
                rows.append(row(kind, name, known[one.problem + repr(one.settings)], verdict))
            if options.out:
                options.out.write_text(json.dumps(rows, indent=1) + "\n")
            print(f"{time.monotonic() - begun:.0f} s: {len(rows)} judged", file=sys.stderr, flush=True)
    failures = table(sorted(rows, key=lambda one: one["kind"]))
    print(f"{len(rows)} programs in {time.monotonic() - begun:.0f} s, {failures} failures")
    return 1 if failures else 0


if __name__ == "__main__":
    os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
    sys.exit(main())
