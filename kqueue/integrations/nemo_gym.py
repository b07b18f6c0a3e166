"""A resources server for NeMo-Gym, which needs Python 3.12: rewards of kernels by the fleet's verdicts."""

from __future__ import annotations

import importlib
from typing import Any, Final

from kqueue.integrations.common import Connection, Policy, connect_async
from kqueue.integrations.rl import scored_async

# Imported by name, so that types can be checked without NeMo-Gym.
_base: Any = importlib.import_module("nemo_gym.base_resources_server")

_connection: Final = Connection(connect_async)


class KernelResourcesServerConfig(_base.BaseResourcesServerConfig):
    """Settings for judging kernels. They have the meaning of :func:`~kqueue.kernelbench.request_of`'s arguments."""

    backend: str = "triton"
    lane: str = "auto"
    score: Policy = "speedup"
    precision: str = "fp32"
    num_correct_trials: int = 5
    num_perf_trials: int = 100


class KernelVerifyRequest(_base.BaseVerifyRequest):
    """A reply to verify. ``reference`` is a column of the dataset."""

    reference: str


class KernelResourcesServer(_base.SimpleResourcesServer):
    """A server that rewards the kernel in a model's reply."""

    config: KernelResourcesServerConfig

    async def verify(self, body: KernelVerifyRequest) -> Any:
        """Return the reply with its reward.

        Raises:
            EvaluationFailed: the kernel has no verdict. NeMo-Gym's client gets the status 500 and no reward.
        """
        settings = self.config.model_dump(include=set(KernelResourcesServerConfig.__annotations__))
        reward = await scored_async(_connection.client(), body.reference, body.response.output_text, **settings)
        return _base.BaseVerifyResponse(**body.model_dump(), reward=reward)
