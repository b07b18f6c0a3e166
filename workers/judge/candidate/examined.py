"""The program that a tool watches: a kernel with its problem, from its import to one call.

:mod:`workers.judge.candidate.examiner` starts it below a tool, in the sealed process that both share. Nothing is
compared or timed here, and it answers nobody: only what the tool sees counts.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import sys
import time
from collections.abc import Generator
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

import torch

from workers.judge.candidate.harness import Harness
from workers.judge.channel import flags
from workers.judge.channel.arguments import put_together, take_apart
from workers.judge.channel.protocol import Command, Examine, Job, Order
from workers.judge.channel.randomness import set_seed

#: The names of the files that :mod:`workers.judge.candidate.examiner` writes for it.
PROBLEM: Final = "problem.py"
JOB: Final = "job.json"
#: The file by which the program says that it is ready, and the one for which it waits then.
READY: Final = "ready"
GO: Final = "go"
#: Seconds between two looks for it.
_LOOK_S: Final = 0.005
#: Calls before the one that is profiled: they compile, choose and fill caches of the libraries.
_WARMUP: Final = 2


def task_from(text: str) -> tuple[str, Job]:
    """Return the device and the job that :func:`task_to` has written."""
    device, fields = json.loads(text)
    return device, Job(**fields | {"dtype": getattr(torch, fields["dtype"])})


def task_to(asked: Examine) -> str:
    """Return as JSON what the program must know of an order."""
    fields = asdict(asked.job) | {"dtype": str(asked.job.dtype).removeprefix("torch.")}
    return json.dumps([asked.device, fields])


def main(tool: str) -> None:
    """Import the problem and the kernel in the working directory when told to, and make one call.

    Args:
        tool: what watches. For Nsight Compute there are some calls before, and it looks at the last one alone.

    Raises:
        Exception: whatever the two raise.
    """
    Path(READY).touch()
    while not Path(GO).exists():
        time.sleep(_LOOK_S)
    profile = tool == "ncu"
    kernel = _Kernel(flags.attach(flags.create()))
    kernel.begin(*task_from(Path(JOB).read_text(encoding="utf-8")))
    problem = _import(Path(PROBLEM))
    initial, inputs = kernel.arguments_of(problem)
    kernel.construct(initial)
    positional, keywords = inputs
    with torch.no_grad():
        for _ in range(_WARMUP if profile else 0):
            kernel.call(positional, keywords)
        with kernel.looked_at() if profile else contextlib.nullcontext():
            kernel.call(positional, keywords)


class _Kernel(Harness):
    """A candidate's harness that obeys nobody."""

    def begin(self, device: str, job: Job) -> None:
        """Open the device, and get ready for the job."""
        self.device = device
        self.take_job(job)
        if self.on_gpu:
            torch.cuda.init()

    def arguments_of(self, problem: Any) -> tuple[Any, tuple[list[Any], dict[str, Any]]]:
        """Return the constructor's arguments, and those of a call, each tensor in an allocation of its own."""
        torch.manual_seed(self._job.seed)
        initial = problem.get_init_inputs() if callable(getattr(problem, "get_init_inputs", None)) else []
        set_seed(self._job.seed)
        try:
            with torch.device(self.device):
                drawn = problem.get_inputs()
        except Exception:  # noqa: BLE001 -- one that makes its inputs on a CPU, by a generator there
            drawn = problem.get_inputs()
        arrangement, tensors = take_apart(drawn)
        placed = [self.to_device(tensor).clone(memory_format=torch.contiguous_format) for tensor in tensors]
        return take_apart(initial)[0], put_together(arrangement, placed)

    def construct(self, initial: Any) -> None:
        """Import the kernel's source and construct its model."""
        self._load(Command(Order.LOAD, 0, 0, self._job, ()))
        self._construct(Command(Order.CONSTRUCT, 0, 0, initial, ()))

    @contextlib.contextmanager
    def looked_at(self) -> Generator[None]:
        """Have a profiler look at the block alone."""
        if not self.on_gpu:
            yield
            return
        cudart: Any = torch.cuda.cudart()
        cudart.cudaProfilerStart()
        yield
        cudart.cudaProfilerStop()

    def call(self, positional: list[Any], keywords: dict[str, Any]) -> None:
        """Call the model, and wait for the device."""
        set_seed(self._job.seed)
        with self._compiler_watched():
            self.own.model(*positional, **keywords)
        self.settle()


def _import(path: Path) -> Any:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    return module
