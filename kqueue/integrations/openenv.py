"""The environment of :mod:`kqueue.integrations.rl` for OpenEnv (``pip install openenv-core``).

::

    app = create_app(partial(KernelEnvironment, PROBLEMS, backend="triton"), KernelAction, KernelObservation)

An ``app`` of OpenEnv's ``create_app`` is served by any ASGI server; its clients reset, step and close by WebSocket.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import Any
from uuid import uuid4

from pydantic import Field

from kqueue.errors import EvaluationFailed
from kqueue.integrations.rl import KernelEnv

# By name: who has no OpenEnv can still check this file's types.
_server: Any = importlib.import_module("openenv.core.env_server")


class KernelAction(_server.Action):
    """An answer."""

    kernel: str = Field(description="The kernel's source, or an answer with it in a fenced block.")


class KernelObservation(_server.Observation):
    """What came of it. ``reward`` is None before the first turn, and where nothing is known of the kernel."""

    text: str = Field(description="The task in words, or what to mend.")
    turn: int = Field(description="Turns that count so far.")
    correct: bool = Field(default=False, description="Whether the kernel was right.")
    best: float | None = Field(default=None, description="The best score of the episode.")
    verdict: dict[str, Any] | None = Field(default=None, description="The verdict in short.")


class KernelState(_server.State):
    """An episode's state."""

    problem: int | None = Field(default=None, description="The problem's number.")
    best: float | None = Field(default=None, description="The best score of the episode.")


class KernelEnvironment(_server.Environment[KernelAction, KernelObservation, KernelState]):
    """:class:`~kqueue.integrations.rl.KernelEnv` with OpenEnv's interface. Sessions share nothing."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self, problems: Sequence[str], **arguments: Any) -> None:
        """As :class:`~kqueue.integrations.rl.KernelEnv`."""
        super().__init__()
        self._env = KernelEnv(problems, **arguments)
        self._state = KernelState()

    def reset(
        self, seed: int | None = None, episode_id: str | None = None, problem: int | None = None, **_: Any
    ) -> KernelObservation:
        """Begin an episode: of ``problem``, or of one at random."""
        text, info = self._env.reset(seed=seed, options=None if problem is None else {"problem": problem})
        self._state = KernelState(episode_id=episode_id or str(uuid4()), step_count=0, problem=info["problem"])
        return KernelObservation(text=text, turn=0)

    def step(self, action: KernelAction, timeout_s: float | None = None, **_: Any) -> KernelObservation:  # noqa: ARG002
        """Judge an answer. Deadlines are the evaluation's own; ``timeout_s`` would leave it without an answer.

        Where the fleet or the problem failed the reward is None, and the turn does not count.
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
        return KernelObservation(
            text=text,
            done=terminated or truncated,
            reward=reward,
            turn=info["turn"],
            correct=info["correct"],
            best=info["best"],
            verdict=info["verdict"],
        )

    @property
    def state(self) -> KernelState:
        """The episode's state."""
        return self._state

    def close(self) -> None:
        """Let go of the connection."""
        self._env.close()
