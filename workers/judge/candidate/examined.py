"""The program that runs under a profiler or sanitizer: import a kernel and its problem, then make one call.

:mod:`workers.judge.candidate.examiner` starts the tool, which starts this program in the same sealed process. The
program compares and times nothing and sends no replies. Only the tool's output counts.
"""

from __future__ import annotations

import contextlib
import json
import sys
import time
from collections.abc import Generator
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

import torch

from workers.judge.candidate import gradients
from workers.judge.candidate.harness import Harness, import_file
from workers.judge.channel import flags
from workers.judge.channel.arguments import of_constructor, put_together, take_apart
from workers.judge.channel.buffers import form_of
from workers.judge.channel.layout import put_back, taken_apart
from workers.judge.channel.orders import Binding, Examine, Job, Order
from workers.judge.channel.randomness import set_seed
from workers.judge.channel.wire import Command

#: Names of the files that :mod:`workers.judge.candidate.examiner` writes for the program.
PROBLEM: Final = "problem.py"
JOB: Final = "job.json"
#: File that the program creates when it is ready, and the file that it then waits for.
READY: Final = "ready"
GO: Final = "go"
#: Interval in seconds at which the program checks for the second file.
_LOOK_S: Final = 0.005
#: Number of calls before the profiled call. In them libraries compile, select algorithms and fill caches.
_WARMUP: Final = 2


def task_from(text: str) -> tuple[str, Job]:
    """Return the device and the job that :func:`task_to` encoded."""
    device, fields = json.loads(text)
    return device, Job(**fields | {"dtype": getattr(torch, fields["dtype"])})


def task_to(asked: Examine) -> str:
    """Return as JSON the part of an order that the program needs."""
    fields = asdict(asked.job) | {"dtype": str(asked.job.dtype).removeprefix("torch.")}
    return json.dumps([asked.device, fields])


def main(tool: str) -> None:
    """Import the problem and the kernel from the working directory, and call the model once.

    Nsight Compute (``ncu``) profiles only the last call, so warm-up calls precede it.
    """
    Path(READY).touch()
    while not Path(GO).exists():
        time.sleep(_LOOK_S)
    profile = tool == "ncu"
    kernel = _Kernel(flags.attach(flags.create()))
    kernel.begin(*task_from(Path(JOB).read_text(encoding="utf-8")))
    initial, *inputs = kernel.arguments_of(import_file(Path(PROBLEM)))
    kernel.construct(initial)
    with torch.no_grad():
        for _ in range(_WARMUP if profile else 0):
            kernel.call(*inputs)
        with kernel.looked_at() if profile else contextlib.nullcontext():
            kernel.call(*inputs)


class _Kernel(Harness):
    """A candidate's harness that takes no orders."""

    def begin(self, device: str, job: Job) -> None:
        """Open the device and prepare the job."""
        self.device = device
        self.watch_compiler()
        self.take_job(job)
        if self.on_gpu:
            torch.cuda.init()

    def arguments_of(self, problem: Any) -> tuple[Any, Any, list[torch.Tensor]]:
        """Return the constructor's arguments, and a call's arrangement and its tensors in separate allocations."""
        torch.manual_seed(self._job.seed)
        initial = problem.get_init_inputs() if callable(getattr(problem, "get_init_inputs", None)) else []
        set_seed(self._job.seed)
        try:
            with torch.device(self.device):
                drawn = problem.get_inputs()
        except Exception:  # noqa: BLE001 -- the problem needs a CPU generator
            drawn = problem.get_inputs()
        arrangement, tensors = take_apart(drawn)
        roots, views = taken_apart(tensors)
        meta = [torch.empty(root.shape, dtype=self.dtype_of(root), device="meta") for root in roots]
        self._form = Binding(tuple(map(form_of, meta)), arrangement, tuple(views))
        placed = put_back([self.to_device(root).clone() for root in roots], views)
        for tensor, needs in zip(placed, gradients.marks(tensors), strict=True):
            tensor.requires_grad_(self._job.backward and needs)
        return of_constructor(initial, problem.Model), arrangement, placed

    def construct(self, initial: Any) -> None:
        """Import the kernel's source, construct its model and set it up."""
        self._load(Command(Order.LOAD, 0, 0, self._job, ()))
        self._construct(Command(Order.CONSTRUCT, 0, 0, initial, ()))
        self.set_up(Command(Order.SET_UP, 0, 0, self._form, ()))

    @contextlib.contextmanager
    def looked_at(self) -> Generator[None]:
        """Restrict profiling to the ``with`` block."""
        if not self.on_gpu:
            yield
            return
        cudart: Any = torch.cuda.cudart()
        cudart.cudaProfilerStart()
        yield
        cudart.cudaProfilerStop()

    def call(self, arrangement: Any, tensors: list[torch.Tensor]) -> None:
        """Call the model, with its gradients if the job needs them, and wait for the device."""
        set_seed(self._job.seed)
        if self._job.backward:
            gradients.learned(self.own.model, arrangement, tensors)
        else:
            positional, keywords = put_together(arrangement, tensors)
            self.own.model(*positional, **keywords)
        self.settle()


if __name__ == "__main__":
    main(*sys.argv[1:])
