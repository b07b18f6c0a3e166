"""The reward function of verl's trainers.

::

    reward.custom_reward_function.path=pkg://kqueue.integrations.verl
    reward.custom_reward_function.name=compute_score
    +reward.custom_reward_function.reward_kwargs.backend=triton

A row's ``reward_model.ground_truth`` is the source of its reference.
"""

from __future__ import annotations

from typing import Any, Final

from kqueue.client import Client
from kqueue.integrations.common import Answer, Connection, Score
from kqueue.integrations.rl import scored

#: Arguments of verl's reward models, which have no meaning here.
_UNUSED: Final = ("reward_router_address", "reward_model_tokenizer")
_client: Final = Connection(Client)


def compute_score(
    data_source: str,  # noqa: ARG001 verl's
    solution_str: Answer,
    ground_truth: str,
    extra_info: Any = None,  # noqa: ARG001 verl's
    *,
    score: Score = "speedup",
    **arguments: Any,
) -> float:
    """Return the reward of an answer.

    Args:
        data_source: ignored.
        solution_str: the answer, from which the kernel is extracted.
        ground_truth: source of the reference.
        extra_info: ignored.
        score: see :func:`~kqueue.integrations.common.scorer`.
        arguments: arguments of :func:`~kqueue.kernelbench.request_of`, such as ``backend`` and ``lane``.

    Raises:
        EvaluationFailed: the kernel has no verdict. A reward of 0 would teach the model that it was bad.
        InvalidRequest: the reference or an argument is wrong, or no worker serves the lane.
        ServiceError: the fleet cannot be reached.
    """
    given = {name: value for name, value in arguments.items() if name not in _UNUSED}
    return scored(_client.client(), ground_truth, solution_str, score, **given)
