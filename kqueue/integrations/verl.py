"""The reward function of verl's trainers.

Its path is ``pkg://kqueue.integrations.verl``. A row's ``reward_model.ground_truth`` is the source of its reference.
"""

from __future__ import annotations

from typing import Any

from kqueue.integrations.common import SHARED, Answer, judge


def compute_score(
    data_source: str,  # noqa: ARG001 verl's
    solution_str: Answer,
    ground_truth: str,
    extra_info: Any = None,  # noqa: ARG001 verl's
    reward_router_address: Any = None,  # noqa: ARG001 verl's
    reward_model_tokenizer: Any = None,  # noqa: ARG001 verl's
    **arguments: Any,
) -> float:
    """Return the reward of an answer by the reference ``ground_truth``. Raise, and never return a number, without one.

    ``arguments`` are ``score`` and the other arguments of :func:`~kqueue.integrations.common.judge`.
    """
    return judge(SHARED.client().evaluate, ground_truth, solution_str, **arguments).score
