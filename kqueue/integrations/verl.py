"""The reward function of verl's trainers.

Its path is ``pkg://kqueue.integrations.verl``. A row's ``reward_model.ground_truth`` is the source of its reference.
"""

from __future__ import annotations

from typing import Any, Final

from kqueue.integrations.common import Answer, Connection, Score, connect
from kqueue.integrations.rl import scored

#: Arguments of verl's reward models, which have no meaning here.
_UNUSED: Final = ("reward_router_address", "reward_model_tokenizer")
_connection: Final = Connection(connect)


def compute_score(
    data_source: str,  # noqa: ARG001 verl's
    solution_str: Answer,
    ground_truth: str,
    extra_info: Any = None,  # noqa: ARG001 verl's
    *,
    score: Score = "speedup",
    **arguments: Any,
) -> float:
    """Return the reward of an answer (:func:`~kqueue.integrations.rl.scored`), or raise, never a number, without one.

    Args:
        solution_str: the answer, from which the kernel is extracted.
        ground_truth: source of the reference.
        arguments: arguments of :func:`~kqueue.kernelbench.request_of`, such as ``backend`` and ``lane``.
    """
    given = {name: value for name, value in arguments.items() if name not in _UNUSED}
    return scored(_connection.client(), ground_truth, solution_str, score, **given)
