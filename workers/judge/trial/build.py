"""The build: a separate process, the builder, compiles what a kernel's source compiles at import.

A builder is sealed like the candidate, with another uid and without a GPU. Three of its failures are final: a timeout
of the compiler, a breach of the seal, and, on a CPU slot, a compiler's error. On a GPU slot a compiler's error is not
final: a module may detect the GPU without torch, and pass other flags if there is none. After any other failure, such
as a module that asks torch for a GPU at import, the candidate compiles what is missing.
"""

from __future__ import annotations

import re
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
#: Deadline of the builder's preparation.
_PREPARE_S: Final = 60.0


class Build:
    """One build, from the builder's fork to its end."""

    def __init__(
        self, forkserver: ForkServer, profile: Profile, deadlines: Deadlines, source: str, *, on_gpu: bool
    ) -> None:
        """Start forking a builder without waiting. None of the kernel's code runs yet.

        Args:
            forkserver: the slot's fork server.
            profile: the builder's limits, with the candidate's ``built`` directory.
            deadlines: the evaluation's deadlines.
            source: the kernel's source.
            on_gpu: True if the candidate has a GPU.

        Raises:
            ForkServerError: the fork server is gone.
        """
        assert profile.built is not None
        self.process = SealedProcess(forkserver, profile, deadlines.compile_s)
        self._deadlines = deadlines
        self._built = Path(profile.built)
        self._architectures = _architectures() if on_gpu else ""
        #: On a CPU slot the builder's compilers have everything that the candidate's would have.
        self._final = _FINAL if on_gpu else _FINAL | {Category.COMPILE_ERROR}
        self._compiled = True
        # The builder learns nothing else about the evaluation.
        bare = Job(source, "", device="cpu", dtype=torch.float32, seed=0)
        self._opening = self.process.send(Order.OPEN, payload=bare)

    @property
    def log(self) -> str:
        """The end of the builder's log; empty if it compiled nothing, for then the candidate writes the same again."""
        return self.process.ended.log if self.process.ended is not None and self._compiled else ""

    def run(self) -> dict[str, Any]:
        """Build, and end the builder.

        Returns:
            for the evidence: ``where`` the kernel is compiled (``builder`` or ``candidate``), ``libraries``,
            ``seconds``, ``peak_bytes``, and ``skipped``, the reason if the build stopped early.

        Raises:
            EvaluationEnded: the build failed, and its failure is final.
            ForkServerError: the builder could not be prepared or ended.
        """
        self.process.enter(Phase.PREPARE, _PREPARE_S)
        self.process.start_clock()
        try:
            self.process.receive(self._opening)
        except EvaluationEnded as ended:
            raise ForkServerError(f"a builder could not be prepared: {ended}") from None
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
        # If a build stopped early, compilers of other threads may still have run: they are killed without consequence.
        if report.leftovers and not skipped:
            raise EvaluationEnded(
                Category.SANDBOX_VIOLATION,
                f"the kernel's build left {report.leftovers} process(es) behind",
                Phase.LOAD,
                leftovers=report.leftovers,
            )
        libraries = len(list(self._built.glob("*/*.so")))
        self._compiled = libraries > 0
        found: dict[str, Any] = {
            "where": "builder" if libraries else "candidate",
            "libraries": libraries,
            "seconds": round(self.process.waited_s, 6),
            "peak_bytes": report.peak_bytes,
        }
        return found | {"skipped": skipped} if skipped else found


def _architectures() -> str:
    """Return the architecture that torch's builder would target if it saw this GPU, at most the newest it supports."""
    known = [int(re.sub(r"\D", "", name)) for name in torch.cuda.get_arch_list() if name.startswith("sm_")]
    major, minor = min(torch.cuda.get_device_capability(), divmod(max(known), 10))
    return f"{major}.{minor}+PTX"
