"""The harness of a repository's tests: unpack the files, and become the program that runs them.

The sealed process itself becomes that program. So the seal and its own ``/proc`` are those that kernels have, and the
fork server, which watches and ends it, tells how the tests' process ended.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Final

from workers.judge.candidate import archive, started
from workers.judge.candidate.harness import Harness, ProblemError
from workers.judge.channel import lines
from workers.judge.channel.protocol import Command, Order, Reply, Testing

#: The program's module; the folder of the repository and the file of the order in its working directory.
_PROGRAM: Final = "workers.testing.sealed"
REPOSITORY: Final = "repository"
ORDER: Final = "order.json"
#: What compute-sanitizer writes. The judge reads it by a descriptor, which comes before all others.
_LOG: Final = "tool.log"
#: What kernels have in their environment and tests would not expect: how torch takes memory, and what it asks for GPUs.
_NOT_THEIRS: Final = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_NVML_BASED_CUDA_CHECK")


class Tester(Harness):
    """Tests of one repository."""

    def __init__(self, page: memoryview[int], directory: Path | None = None) -> None:
        super().__init__(page, directory)
        self.orders = {Order.TEST: self._become}

    @property
    def on_gpu(self) -> bool:
        """False: only the program opens the device."""
        return False

    def _become(self, command: Command) -> Reply:
        """Become the program; what is returned was never reached.

        Raises:
            ProblemError: the archive is none.
        """
        asked: Testing = command.payload
        [said] = command.descriptors
        try:
            archive.unpack(asked.archive, Path(REPOSITORY))
        except archive.NotAnArchive as error:
            raise ProblemError(str(error)) from None
        Path(ORDER).write_text(asked.order, encoding="utf-8")
        for name in [name for name in os.environ if name in _NOT_THEIRS or name.startswith("KQUEUE_")]:
            del os.environ[name]
        signal.signal(signal.SIGTERM, signal.SIG_DFL)  # the fork server ignores it
        sys.stdout.flush()
        sys.stderr.flush()
        program = started.words(_PROGRAM, str(Path.cwd() / ORDER), str(Path.cwd() / REPOSITORY), str(said))
        if asked.sanitizer:
            log = str(Path.cwd() / _LOG)
            lines.say(said, b"", (os.open(log, os.O_RDWR | os.O_CREAT, 0o600),))
            program = [*started.watching(asked.sanitizer, log), *program]
        os.set_inheritable(said, True)
        os.execv(program[0], program)  # noqa: S606 -- the seal stays; the channel closes, which tells the judge
