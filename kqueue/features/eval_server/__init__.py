"""The drop-ins for other projects' evaluation servers: KernelBench's and KernelGYM's (`docs/evaluators.md`)."""

from kqueue.registry import Feature

EVAL_SERVER = Feature(name="eval_server", router=f"{__name__}.jobs:forms")
