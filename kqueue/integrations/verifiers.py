"""A taskset for ``verifiers`` (0.4): one task for each problem, rewarded by the fleet's verdict.

For verifiers to find the taskset by name, export it from a package::

    from kqueue.integrations.verifiers import KernelTaskset

    __all__ = ["KernelTaskset"]
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from kqueue.errors import ConfigError
from kqueue.feedback import instruction
from kqueue.integrations.common import SHARED_ASYNC, Judging, judge_async

# Imported by name, so that types can be checked without verifiers.
vf: Any = importlib.import_module("verifiers.v1")


class KernelData(vf.TaskData):
    """A problem."""

    reference: str


class KernelTaskConfig(Judging, vf.TaskConfig):
    """Settings for judging a task's kernels."""


class KernelTask(vf.Task[KernelData, vf.State, KernelTaskConfig]):
    """A task that rewards the kernel in the last reply."""

    @vf.reward
    async def kernel(self, trace: Any) -> float:
        """Return the kernel's score. Without a verdict, verifiers records an error and no reward."""
        return await judge_async(SHARED_ASYNC.client(), self.data.reference, trace.last_reply, self.config)


class KernelTasksetConfig(vf.TasksetConfig):
    """The problems of a taskset."""

    task: KernelTaskConfig = KernelTaskConfig()
    problems: Path = Path()
    """A folder of references (``*.py``), searched recursively."""


class KernelTaskset(vf.Taskset[KernelTask, KernelTasksetConfig]):
    """One task for each file, named after it."""

    def load(self) -> Iterator[KernelTask]:
        """Yield the tasks in the order of their files' paths."""
        files = sorted(self.config.problems.rglob("*.py"))
        if not files:
            raise ConfigError(f"problems: {self.config.problems} holds no *.py: name a folder of references")
        for file in files:
            reference = file.read_text(encoding="utf-8")
            data = KernelData(
                name=file.stem, prompt=instruction(reference, self.config.task.backend), reference=reference
            )
            yield KernelTask(data, self.config.task)


__all__ = ["KernelTaskset"]
