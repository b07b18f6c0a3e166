"""A resources server for NeMo-Gym, which needs Python 3.12: rewards of kernels by the fleet's verdicts."""

from __future__ import annotations

import importlib
from typing import Any

from kqueue.integrations.common import SHARED_ASYNC, Judging, judge_async

# Imported by name, so that types can be checked without NeMo-Gym.
_base: Any = importlib.import_module("nemo_gym.base_resources_server")


class KernelResourcesServerConfig(Judging, _base.BaseResourcesServerConfig):
    """Settings of the server, with those for judging kernels."""


class KernelVerifyRequest(_base.BaseVerifyRequest):
    """A reply to verify. ``reference`` is a column of the dataset."""

    reference: str


class KernelResourcesServer(_base.SimpleResourcesServer):
    """A server that rewards the kernel in a model's reply."""

    config: KernelResourcesServerConfig

    async def verify(self, body: KernelVerifyRequest) -> Any:
        """Return the reply with its reward. Without a verdict, NeMo-Gym's client gets the status 500 and no reward."""
        reward = await judge_async(SHARED_ASYNC.client(), body.reference, body.response.output_text, self.config)
        return _base.BaseVerifyResponse(**body.model_dump(), reward=reward)
