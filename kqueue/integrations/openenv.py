"""The environment of :mod:`kqueue.integrations.rl` for OpenEnv (``pip install openenv``).

::

    app = create_app(partial(KernelEnvironment, PROBLEMS, backend="triton"), KernelAction, KernelObservation)

Any ASGI server serves the ``app``. Clients reset, step and close over WebSocket, and list the problems as tasks.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import Any, Final
from uuid import uuid4

from pydantic import Field

from kqueue.errors import EvaluationFailed
from kqueue.integrations.rl import KernelEnv

# Imported by name, so that types can be checked without OpenEnv.
_server: Any = importlib.import_module("openenv.core.env_server")
#: The split with all problems.
_SPLIT: Final = "train"


class KernelAction(_server.Action):
    """A model's answer."""

    kernel: str = Field(description="The kernel's source, or an answer that contains the kernel.")


class KernelObservation(_server.Observation):
    """The result of a turn. ``reward`` is None before the first turn, and if the kernel has no verdict."""

    text: str = Field(description="The task, or feedback on the last answer.")
    turn: int = Field(description="Number of turns so far that count.")
    correct: bool = Field(default=False, description="True if the kernel was correct.")
    best: float | None = Field(default=None, description="The best score of the episode.")
    verdict: dict[str, Any] | None = Field(default=None, description="The verdict's summary.")
    taken: str | None = Field(default=None, description="The location of the kernel in the answer.")


class KernelState(_server.State):
    """An episode's state."""

    problem: int | None = Field(default=None, description="The problem's number.")
    best: float | None = Field(default=None, description="The best score of the episode.")


class KernelEnvironment(_server.Environment[KernelAction, KernelObservation, KernelState]):
    """:class:`~kqueue.integrations.rl.KernelEnv` with OpenEnv's interface. Sessions share nothing."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self, problems: Sequence[str], **arguments: Any) -> None:
        """Create an environment with the arguments of :class:`~kqueue.integrations.rl.KernelEnv`."""
        super().__init__()
        self._env = KernelEnv(problems, **arguments)
        self._tasks = [{"index": index} for index in range(len(problems))]
        self._state = KernelState()

    def list_splits(self) -> list[str]:
        """Return the name of the one split."""
        return [_SPLIT]

    def list_tasks(self, split: str) -> list[dict[str, int]]:
        """Return the numbers of a split's problems."""
        return self._tasks if split == _SPLIT else []

    def num_tasks(self, split: str) -> int:
        """Return the number of a split's problems."""
        return len(self.list_tasks(split))

    def get_task(self, split: str, index: int) -> dict[str, int]:
        """Return the number of a problem. Raise IndexError if there is none."""
        return self.list_tasks(split)[index]

    def get_task_range(self, split: str, start: int | None = None, stop: int | None = None) -> list[dict[str, int]]:
        """Return the numbers of problems from ``start`` to ``stop``."""
        return self.list_tasks(split)[start:stop]

    def reset(
        self,
        seed: int | None = None,
        episode_id: str | None = None,
        problem: int | None = None,
        index: int | None = None,
        **_: Any,
    ) -> KernelObservation:
        """Begin an episode with problem number ``index`` (or ``problem``), or a random one."""
        chosen = index if problem is None else problem
        text, info = self._env.reset(seed=seed, options=None if chosen is None else {"problem": chosen})
        self._state = KernelState(episode_id=episode_id or str(uuid4()), step_count=0, problem=info["problem"])
        return KernelObservation(text=text, turn=0)

    def step(self, action: KernelAction, timeout_s: float | None = None, **_: Any) -> KernelObservation:  # noqa: ARG002
        """Judge an answer.

        ``timeout_s`` is ignored, because the evaluation has its own deadlines. If the fleet or the problem failed, the
        reward is None and the turn does not count.
        """
        try:
            text, reward, terminated, truncated, info = self._env.step(action.kernel)
        except EvaluationFailed as failure:
            return KernelObservation(
                text=f"NOT JUDGED: {failure}",
                turn=self._state.step_count,
                best=self._state.best,
                verdict=failure.verdict.summary(),
            )
        self._state.step_count, self._state.best = info["turn"], info["best"]
        of_turn = {name: info[name] for name in ("turn", "correct", "best", "verdict", "taken")}
        return KernelObservation(text=text, done=terminated or truncated, reward=reward, **of_turn)

    @property
    def state(self) -> KernelState:
        """The episode's state."""
        return self._state

    def close(self) -> None:
        """Close the connection."""
        self._env.close()
