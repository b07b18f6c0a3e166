"""The build: what the kernel's source has compiled at import is compiled by a process of its own.

A builder is sealed like the candidate, with another uid and no GPU. Final are only a compiler's deadline, what breaks
the seal, and, where the candidate has no GPU either, a compiler's word. A module may ask for the GPU behind torch's
back, and hand its compiler other flags where there is none: beside a GPU only the candidate's compiler refuses.
On anything else, such as a module that asks torch for a GPU at import, the candidate compiles for itself what is
missing.
"""

from __future__ import annotations

import re
import time
from pathlib import Path
from typing import Any, Final

import torch

from kqueue.categories import Category
from kqueue.contract import Backend, Deadlines, Phase
from workers.judge.channel.protocol import Job, Order
from workers.judge.ending import EvaluationEnded
from workers.judge.keeper.control import End
from workers.judge.keeper.handle import ForkServer, ForkServerError
from workers.judge.keeper.process import SealedProcess
from workers.judge.sandbox.seal import Profile

#: The backends whose sources torch's extension builder compiles.
BACKENDS: Final = frozenset({Backend.CUDA, Backend.CPP})
_FINAL: Final = frozenset({Category.COMPILE_TIMEOUT, Category.SANDBOX_VIOLATION})
#: How long a builder may take to get ready, in seconds.
_PREPARE_S: Final = 60.0


class Build:
    """One build, from the builder's fork to its end."""

    def __init__(
        self, forkserver: ForkServer, profile: Profile, deadlines: Deadlines, source: str, *, on_gpu: bool
    ) -> None:
        """Have a builder forked, and do not wait. None of the kernel's code runs yet.

        Args:
            forkserver: the slot's.
            profile: the builder's bounds; ``built`` is the candidate's.
            deadlines: the evaluation's.
            source: the kernel's.
            on_gpu: whether the candidate has a GPU.

        Raises:
            ForkServerError: the fork server is gone.
        """
        assert profile.built is not None
        self.process = SealedProcess(forkserver, profile, deadlines.compile_s)
        self._deadlines = deadlines
        self._built = Path(profile.built)
        self._architectures = _architectures() if on_gpu else ""
        #: Compilers here have all that the candidate's would have.
        self._final = _FINAL if on_gpu else _FINAL | {Category.COMPILE_ERROR}
        self._compiled = True
        # It learns nothing else of the evaluation.
        bare = Job(source, "", device="cpu", dtype=torch.float32, seed=0, memory_fraction=1.0)
        self._opening = self.process.send(Order.OPEN, payload=bare)

    @property
    def log(self) -> str:
        """The end of what it wrote; empty where the candidate imports the source as it did, and writes the same."""
        return self.process.ended.log if self.process.ended is not None and self._compiled else ""

    def run(self) -> dict[str, Any]:
        """Build, and end the builder.

        Returns:
            for the evidence: ``where`` the kernel is compiled, ``builder`` or ``candidate``, and what it took.

        Raises:
            EvaluationEnded: a compiler refused where its word is final, or took too long, or the kernel broke out.
            ForkServerError: the builder could not be made ready or ended.
        """
        begun = time.monotonic()
        self.process.enter(Phase.PREPARE, _PREPARE_S)
        self.process.start_clock()
        try:
            self.process.receive(self._opening)
        except EvaluationEnded as ended:
            raise ForkServerError(f"a builder could not be made ready: {ended}") from None
        self.process.stop_clock()
        self.process.enter(Phase.LOAD, self._deadlines.load_s)
        skipped = ""
        try:
            self.process.order(Order.BUILD, payload=self._architectures)
        except EvaluationEnded as ended:
            if ended.outcome.category in self._final:
                raise
            skipped = ended.outcome.message
        report = self.process.stop()
        if report.reason is End.STUCK:
            raise self.process.died()
        # Where a build was cut short, compilers of other threads may have been at work: they are swept, and no more.
        if report.leftovers and not skipped:
            raise EvaluationEnded(
                Category.SANDBOX_VIOLATION,
                f"the kernel left {report.leftovers} process(es) behind when it was built",
                Phase.LOAD,
                leftovers=report.leftovers,
            )
        libraries = len(list(self._built.glob("*/*.so")))
        self._compiled = libraries > 0
        found: dict[str, Any] = {
            "where": "builder" if libraries else "candidate",
            "libraries": libraries,
            "seconds": round(time.monotonic() - begun, 6),
            "peak_bytes": report.peak_bytes,
        }
        return found | {"skipped": skipped} if skipped else found


def _architectures() -> str:
    """What torch's builder would compile for beside this GPU, which it does not see; never more than torch knows."""
    known = [int(re.sub(r"\D", "", name)) for name in torch.cuda.get_arch_list() if name.startswith("sm_")]
    major, minor = min(torch.cuda.get_device_capability(), divmod(max(known), 10))
    return f"{major}.{minor}+PTX"
