"""The harness of a repository's tests: unpack the files, then replace this process by the program that runs them.

The sealed process itself becomes that program, so tests get the same seal and private ``/proc`` as kernels. The fork
server, which supervises the process, reports how it ended.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Final

from kqueue.program import PYTHON
from workers.judge.candidate import archive, started
from workers.judge.candidate.harness import Harness, ProblemError
from workers.judge.channel import lines
from workers.judge.channel.orders import Order, Testing
from workers.judge.channel.protocol import Reply
from workers.judge.channel.wire import Command

#: Module of the program. Below it: the repository's folder and the order's file, both in the working directory.
_PROGRAM: Final = "workers.testing.sealed"
REPOSITORY: Final = "repository"
ORDER: Final = "order.json"
#: Output file of compute-sanitizer. The judge reads it through a descriptor, which is sent before all other messages.
_LOG: Final = "tool.log"
#: Variables that only kernels need: the settings of torch's allocator and of its check for GPUs.
_NOT_THEIRS: Final = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_NVML_BASED_CUDA_CHECK")


class Tester(Harness):
    """The harness that runs a repository's tests."""

    def __init__(self, page: memoryview[int], directory: Path | None = None) -> None:
        super().__init__(page, directory)
        self.orders = {Order.TEST: self._become}

    @property
    def on_gpu(self) -> bool:
        """Return False: only the program opens the device."""
        return False

    def _become(self, command: Command) -> Reply:
        """Replace this process by the program."""
        asked: Testing = command.payload
        [report_fd] = command.descriptors
        try:
            archive.unpack(asked.archive, Path(REPOSITORY))
        except archive.NotAnArchive as error:
            raise ProblemError(str(error)) from None
        Path(ORDER).write_text(asked.order, encoding="utf-8")
        for name in [name for name in os.environ if name in _NOT_THEIRS or name.startswith("KQUEUE_")]:
            del os.environ[name]
        sys.stdout.flush()
        sys.stderr.flush()
        order, repository = str(Path.cwd() / ORDER), str(Path.cwd() / REPOSITORY)
        program = [*PYTHON, _PROGRAM, order, repository, str(report_fd)]
        if asked.sanitizer:
            log = str(Path.cwd() / _LOG)
            lines.say(report_fd, b"", (os.open(log, os.O_RDWR | os.O_CREAT, 0o600),))
            program = [*started.watching(asked.sanitizer, log), *program]
        os.set_inheritable(report_fd, True)
        os.execv(program[0], program)  # noqa: S606 -- the seal stays, and the closed channel informs the judge
