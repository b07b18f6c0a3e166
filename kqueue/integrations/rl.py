"""Rewards for batches of answers, and an environment with several turns.

::

    rewards = await reward(problems, completions, backend="triton", score="speedup")  # None: mask it

    env = KernelEnv([REFERENCE], backend="triton", max_turns=4)
    observation, info = env.reset(seed=0)
    observation, reward, terminated, truncated, info = env.step(answer)

Where gymnasium is installed the environment derives from ``gymnasium.Env``.
"""

from __future__ import annotations

import asyncio
import importlib
import logging
import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar
from uuid import UUID

from kqueue.client import AsyncClient, Client
from kqueue.contract import Request, Verdict
from kqueue.errors import EvaluationFailed, InvalidRequest, LaneUnavailable, WaitTimeout
from kqueue.feedback import describe, instruction
from kqueue.integrations.answers import Answer, kernel_of, request_for
from kqueue.integrations.connection import Connection
from kqueue.integrations.scores import Score, scorer

_log = logging.getLogger(__name__)

#: The score of an answer that cannot be a kernel, as of one that failed.
FAILED = 0.0


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
    """The rewards of a batch of answers, in order.

    Args:
        problems: source of the reference, one for all or one each.
        completions: answers: text, or a chat's messages. The kernel is a fenced block or the whole.
        score: ``speedup``, ``inverse_runtime``, ``correctness``, or a function of the :class:`~kqueue.Verdict`.
        client: whom to ask; the caller closes it. By default a client by the environment's settings.
        run: a name of this batch, such as ``run-3/step-120``: called again with it, after a crash, the same
            answers get the verdicts that they have already.
        timeout: seconds for all together; what has no verdict then is cancelled and None. None for ever.
        arguments: of :func:`~kqueue.kernelbench.request_of`: ``backend``, ``lane``, ``num_correct_trials``,
            ``queue_wait_s`` and others.

    Returns:
        a number each; None where nothing is known of the kernel (the fleet or the problem failed, no worker
        serves the lane, it was cancelled, expired or too late): to be masked, never to be taken for a bad kernel.

    Raises:
        InvalidRequest: a problem or an argument is wrong, or there are not as many problems as answers.
        ServiceError: the fleet's services cannot be reached.
    """
    of = scorer(score)
    each = [problems] * len(completions) if isinstance(problems, str) else list(problems)
    if len(each) != len(completions):
        raise InvalidRequest(f"problems: {len(each)} for {len(completions)} completions; give one each, or one for all")
    slots = [
        request_for(problem, kernel_of(answer), **arguments, **({"idempotency_key": f"{run}/{place}"} if run else {}))
        for place, (problem, answer) in enumerate(zip(each, completions, strict=True))
    ]
    requests = [slot for slot in slots if isinstance(slot, Request)]
    if client is not None:
        found = iter(await _judge(client, requests, timeout))
    else:
        async with AsyncClient() as own:
            found = iter(await _judge(own, requests, timeout))
    verdicts = [next(found) if isinstance(slot, Request) else slot for slot in slots]
    rewards = [FAILED if isinstance(slot, InvalidRequest) else None if slot is None else of(slot) for slot in verdicts]
    if masked := sum(number is None for number in rewards):
        _log.warning("%d of %d rewards are masked: nothing is known of these kernels", masked, len(rewards))
    return rewards


async def _judge(client: AsyncClient, requests: Sequence[Request], timeout: float | None) -> list[Verdict | None]:
    verdicts = dict[UUID, Verdict]()
    slots = await client.submit_each(requests)
    for slot in slots:
        if isinstance(slot, InvalidRequest) and not isinstance(slot, LaneUnavailable):
            raise slot
    tickets = {slot.evaluation_id: slot for slot in slots if not isinstance(slot, InvalidRequest)}
    try:
        async for ticket, verdict in client.as_completed([*tickets.values()], timeout):
            verdicts[ticket.evaluation_id] = verdict
    except WaitTimeout:
        await asyncio.gather(*(tickets[late].cancel() for late in tickets.keys() - verdicts.keys()))
    return [None if isinstance(slot, InvalidRequest) else verdicts.get(slot.evaluation_id) for slot in slots]


def _gymnasium() -> tuple[Any, Any]:
    try:
        gymnasium = importlib.import_module("gymnasium")
    except ImportError:
        return object, None

    class Text(gymnasium.spaces.Space):
        """Text of any length in any characters; gymnasium's own ``Text`` has a length and an alphabet."""

        def __init__(self) -> None:
            super().__init__(None, None)

        def sample(self, mask: Any = None, probability: Any = None) -> str:  # noqa: ARG002 gymnasium's
            # gymnasium's checker wants the same of the same action, and verdicts have ids and times.
            return ""

        def contains(self, x: Any) -> bool:
            return isinstance(x, str)

    return gymnasium.Env, Text()


_Env, _SPACE = _gymnasium()


class KernelEnv(_Env):
    """An episode is one problem: each turn an answer is judged, and the observation says what to mend.

    It ends after ``max_turns`` turns (truncated), or when a score reaches ``target`` (terminated).
    Observations and actions are text. ``info`` has ``problem`` (its number), ``turn``, ``score``, ``best`` (the
    best score of the episode), ``correct`` and ``verdict`` (:meth:`kqueue.Verdict.summary`; None before the first
    turn, and for an answer that cannot be a kernel).
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
        """Name the problems; nothing is connected before the first turn.

        Args:
            problems: sources of the references.
            max_turns: turns of an episode.
            score: the reward of a turn: as :func:`reward`'s.
            target: a score that ends the episode.
            client: whom to ask; the caller closes it. By default a client by the environment's settings.
            arguments: of :func:`~kqueue.kernelbench.request_of`.

        Raises:
            InvalidRequest: there is no problem, a problem or an argument is wrong.
        """
        if not problems:
            raise InvalidRequest("problems: at least one is needed")
        if max_turns < 1:
            raise InvalidRequest(f"max_turns: at least 1 is needed, not {max_turns}")
        for problem in problems:
            request_for(problem, "", **arguments)
        self._problems = list(problems)
        self._max_turns = max_turns
        self._score: Callable[[Verdict], float | None] = scorer(score)
        self._target = target
        self._given = client
        self._own = Connection(Client)
        self._arguments = arguments
        self._random = random.Random()  # noqa: S311 no secret
        self._problem = 0
        self._turn = max_turns
        self._best: float | None = None

    def reset(self, *, seed: int | None = None, options: Mapping[str, Any] | None = None) -> tuple[str, dict[str, Any]]:
        """Begin an episode.

        Args:
            seed: of the choice of problems from here on.
            options: ``problem``, its number, instead of one at random.

        Returns:
            the task in words, and ``info``.

        Raises:
            InvalidRequest: there is no such problem.
        """
        if _SPACE is not None:
            super().reset(seed=seed)
        if seed is not None:
            self._random.seed(seed)
        chosen = (options or {}).get("problem")
        if chosen is None:
            chosen = self._random.randrange(len(self._problems))
        if not isinstance(chosen, int) or not 0 <= chosen < len(self._problems):
            raise InvalidRequest(f"problem: a number from 0 to {len(self._problems) - 1} is needed, not {chosen!r}")
        self._problem, self._turn, self._best = chosen, 0, None
        problem = self._problems[chosen]
        return instruction(problem, self._arguments.get("backend", "cuda")), self._info(None, None)

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """Judge an answer.

        Returns:
            what to mend, the reward, terminated, truncated, ``info``.

        Raises:
            EvaluationFailed: nothing became known of the kernel: the turn does not count, step again.
            InvalidRequest: the episode is over: ``reset`` first.
            LaneUnavailable, ServiceError: as :meth:`kqueue.Client.submit`; the turn does not count either.
        """
        if self._turn >= self._max_turns or self._reached():
            raise InvalidRequest("step: the episode is over; call reset first")
        kernel = kernel_of(action)
        request = request_for(self._problems[self._problem], kernel, **self._arguments)
        if isinstance(request, InvalidRequest):
            verdict, score, observation = None, FAILED, f"FAILED: {request}"
        else:
            verdict = (self._given or self._own.client()).submit(request).wait()
            score = self._score(verdict)
            if score is None:
                raise EvaluationFailed(verdict)
            observation = describe(verdict, kernel)
        self._turn += 1
        self._best = score if self._best is None else max(self._best, score)
        terminated = self._reached()
        truncated = not terminated and self._turn >= self._max_turns
        return observation, score, terminated, truncated, self._info(verdict, score)

    def close(self) -> None:
        """Let go of the connection that this environment made."""
        if (client := self._own.take()) is not None:
            client.close()

    def _reached(self) -> bool:
        return self._target is not None and self._best is not None and self._best >= self._target

    def _info(self, verdict: Verdict | None, score: float | None) -> dict[str, Any]:
        return {
            "problem": self._problem,
            "turn": self._turn,
            "score": score,
            "best": self._best,
            "correct": verdict is not None and verdict.passed,
            "verdict": None if verdict is None else verdict.summary(),
        }
