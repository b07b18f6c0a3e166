"""Rewards for batches of answers, and a multi-turn environment.

::

    rewards = await reward(problems, completions, backend="triton", score="speedup")  # None: mask it

    env = KernelEnv([REFERENCE], backend="triton", max_turns=4)
    observation, info = env.reset(seed=0)
    observation, reward, terminated, truncated, info = env.step(answer)

The environment derives from ``gymnasium.Env`` if gymnasium is installed.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import logging
import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar
from uuid import UUID

from kqueue.client import AsyncClient, Client
from kqueue.contract import Request, Verdict
from kqueue.errors import InvalidRequest, LaneUnavailable, WaitTimeout
from kqueue.feedback import instruction
from kqueue.integrations.common import (
    Answer,
    Connection,
    Score,
    connect,
    connect_async,
    judge,
    request_for,
    scorer,
    take_from,
)
from kqueue.integrations.extraction import Taken

_log = logging.getLogger(__name__)

#: Score of an answer that is not a kernel, equal to the score of a failed kernel.
FAILED = 0.0
_UNSCORED = "have a verdict without a score. If they passed but were not timed, use score='correctness'"


async def reward(
    problems: str | Sequence[str],
    completions: Sequence[Answer],
    *,
    score: Score = "speedup",
    client: AsyncClient | None = None,
    run: str | None = None,
    timeout: float | None = None,
    **arguments: Any,
) -> list[float | None]:
    """Judge a batch of answers and return their rewards in order.

    Args:
        problems: source of the reference, one for all answers or one for each.
        completions: the answers, as text or a chat's messages. See :func:`~kqueue.integrations.extraction.take`. The
            location of each kernel in its answer is logged at the level INFO.
        score: ``speedup``, ``inverse_runtime``, ``correctness``, or a function of the :class:`~kqueue.Verdict`.
        client: the client to use, which the caller closes. By default a client from the environment's settings.
        run: a name for this batch, such as ``run-3/step-120``. A second call with the same name, after a crash, returns
            the existing verdicts of the same answers.
        timeout: seconds for the whole batch, or None for no limit. Evaluations without a verdict are then cancelled,
            and their rewards are None.
        arguments: arguments of :func:`~kqueue.kernelbench.request_of`, such as ``backend``, ``lane``,
            ``num_correct_trials`` and ``queue_wait_s``.

    Returns:
        A number for each answer, or None if its kernel's quality is unknown: the fleet or the problem failed, no
        worker serves the lane, the evaluation was cancelled, expired, late or needs a GPU, or the kernel passed but was
        not timed and the score needs a time. Mask these. They are not bad kernels.
    """
    if isinstance(completions, str):
        raise InvalidRequest("completions: give a list of answers, not one text")
    of = scorer(score)
    each = [problems] * len(completions) if isinstance(problems, str) else list(problems)
    if len(each) != len(completions):
        raise InvalidRequest(
            f"problems: {len(each)} for {len(completions)} completions: give one for each, or one for all"
        )
    entries = list[Request | InvalidRequest]()
    for index, (problem, answer) in enumerate(zip(each, completions, strict=True)):
        taken = take_from(answer)
        _log.info("answer %d: taken: %s", index, taken)
        keyed = {"idempotency_key": f"{run}/{index}"} if run else {}
        entries.append(request_for(problem, taken.kernel, **arguments, **keyed))
    async with connect_async() if client is None else contextlib.nullcontext(client) as used:
        verdicts = iter(await _judge(used, [entry for entry in entries if isinstance(entry, Request)], timeout))
    results = [next(verdicts) if isinstance(entry, Request) else entry for entry in entries]
    rewards = [FAILED if isinstance(one, InvalidRequest) else None if one is None else of(one) for one in results]
    masked = [one for one, number in zip(results, rewards, strict=True) if number is None]
    unscored = sum(isinstance(one, Verdict) and one.judged for one in masked)
    for count, why in (len(masked) - unscored, "have no verdict"), (unscored, _UNSCORED):
        if count:
            _log.warning("%d of %d rewards are masked because these kernels %s", count, len(rewards), why)
    return rewards


async def _judge(client: AsyncClient, requests: Sequence[Request], timeout: float | None) -> list[Verdict | None]:
    verdicts = dict[UUID, Verdict]()
    for result in (results := await client.submit_each(requests)):
        if isinstance(result, InvalidRequest) and not isinstance(result, LaneUnavailable):
            raise result
    tickets = {result.evaluation_id: result for result in results if not isinstance(result, InvalidRequest)}
    try:
        async for ticket, verdict in client.as_completed([*tickets.values()], timeout):
            verdicts[ticket.evaluation_id] = verdict
    except WaitTimeout:
        await asyncio.gather(*(tickets[late].cancel() for late in tickets.keys() - verdicts.keys()))
    return [None if isinstance(result, InvalidRequest) else verdicts.get(result.evaluation_id) for result in results]


def _gymnasium() -> tuple[Any, Any]:
    try:
        gymnasium = importlib.import_module("gymnasium")
    except ImportError:
        return object, None

    class Text(gymnasium.spaces.Space):
        """A space of any text. Gymnasium's own ``Text`` limits length and alphabet."""

        def __init__(self) -> None:
            super().__init__(None, None)

        def sample(self, mask: Any = None, probability: Any = None) -> str:  # noqa: ARG002 gymnasium's
            # Constant, because gymnasium's checker expects equal results for equal actions, and verdicts have ids
            # and times.
            return ""

        def contains(self, x: Any) -> bool:
            return isinstance(x, str)

    return gymnasium.Env, Text()


_Env, _SPACE = _gymnasium()


class KernelEnv(_Env):
    """An environment whose episodes are problems. Each turn judges an answer, and the observation is feedback on it.

    An episode ends after ``max_turns`` turns (truncated), or when a score reaches ``target`` (terminated).
    Observations and actions are text. ``info`` has ``problem`` (its number), ``turn``, ``score``, ``best`` (the
    best score of the episode), ``correct``, ``verdict`` (:meth:`kqueue.Verdict.summary`, or None before the first turn
    and for an answer that is not a kernel) and ``taken`` (the location of the kernel in the answer, such as
    ``block 2 of 3 (python), lines 10-48, reasoning dropped``, or None before the first turn).
    """

    metadata: ClassVar[dict[str, Any]] = {"render_modes": []}
    observation_space: Any = _SPACE
    action_space: Any = _SPACE

    def __init__(
        self,
        problems: Sequence[str],
        *,
        max_turns: int = 8,
        score: Score = "speedup",
        target: float | None = None,
        client: Client | None = None,
        **arguments: Any,
    ) -> None:
        """Configure an environment with arguments of :func:`~kqueue.kernelbench.request_of`. The first turn connects.

        ``score`` is the reward of a turn, as for :func:`reward`. A given client stays open.
        """
        if not problems:
            raise InvalidRequest("problems: give at least one")
        if max_turns < 1:
            raise InvalidRequest(f"max_turns: must be at least 1, not {max_turns}")
        for problem in problems:
            request_for(problem, "", **arguments)
        self._problems = list(problems)
        self._max_turns = max_turns
        self._score: Callable[[Verdict], float | None] = scorer(score)
        self._target = target
        self._given = client
        self._own = Connection(connect)
        self._arguments = arguments
        self._random = random.Random()  # noqa: S311 no secret
        self._problem = 0
        self._turn = max_turns
        self._best: float | None = None

    def reset(self, *, seed: int | None = None, options: Mapping[str, Any] | None = None) -> tuple[str, dict[str, Any]]:
        """Begin an episode, and return the task as text, and ``info``.

        ``seed`` seeds the random choice of problems. ``options`` can have ``problem``, the number of the one to use.
        """
        if _SPACE is not None:
            super().reset(seed=seed)
        if seed is not None:
            self._random.seed(seed)
        chosen = (options or {}).get("problem")
        if chosen is None:
            chosen = self._random.randrange(len(self._problems))
        if not isinstance(chosen, int) or not 0 <= chosen < len(self._problems):
            raise InvalidRequest(f"problem: must be a number from 0 to {len(self._problems) - 1}, not {chosen!r}")
        self._problem, self._turn, self._best = chosen, 0, None
        return instruction(self._problems[chosen], self._arguments.get("backend", "cuda")), self._info(None, None, None)

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """Judge an answer, and return feedback, reward, terminated, truncated and ``info``.

        Raises:
            EvaluationFailed: the kernel has no verdict. The turn does not count, so step again.
            LaneUnavailable, ServiceError: see :meth:`kqueue.Client.submit`. The turn does not count either.
        """
        if self._turn >= self._max_turns or self._reached():
            raise InvalidRequest("step: the episode is over: call reset first")
        client, problem = self._given or self._own.client(), self._problems[self._problem]
        score, verdict, observation, taken = judge(client.evaluate, problem, action, self._score, **self._arguments)
        self._turn += 1
        self._best = score if self._best is None else max(self._best, score)
        terminated = self._reached()
        truncated = not terminated and self._turn >= self._max_turns
        return observation, score, terminated, truncated, self._info(verdict, score, taken)

    def close(self) -> None:
        """Close the connection that this environment opened."""
        if (client := self._own.take()) is not None:
            client.close()

    def _reached(self) -> bool:
        return self._target is not None and self._best is not None and self._best >= self._target

    def _info(self, verdict: Verdict | None, score: float | None, taken: Taken | None) -> dict[str, Any]:
        return {
            "problem": self._problem,
            "turn": self._turn,
            "score": score,
            "best": self._best,
            "correct": verdict is not None and verdict.passed,
            "verdict": None if verdict is None else verdict.summary(),
            "taken": None if taken is None else str(taken),
        }
