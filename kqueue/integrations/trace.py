"""A guide and an agent for Trace's optimizers, such as PrioritySearch.

::

    agent = KernelAgent(initial_kernel_code=REFERENCE)
    guide = KernelGuide(gpu="H200", backend="triton", score="speedup")
    PrioritySearch(agent, optimizer).train(guide, {"inputs": [TASK], "infos": [REFERENCE]}, ...)

Both derive from Trace's classes if Trace (``opto``) is installed. Without it they have the same methods.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Mapping
from hashlib import sha256
from typing import Any
from uuid import uuid4

from kqueue.client import Client
from kqueue.contract import Request, Verdict
from kqueue.errors import ConfigError, InvalidRequest
from kqueue.integrations import common
from kqueue.integrations.common import Connection, Score, judge, lane_of, scorer, starting_kernel

#: Score of a kernel without a verdict. Searches need a number.
UNKNOWN = -1.0


def _from_opto(module: str, name: str, otherwise: Any = None) -> Any:
    try:
        return getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError):
        return otherwise


_Guide: Any = _from_opto("opto.trainer.guide", "Guide", object)
_Module: Any = _from_opto("opto.trace.modules", "Module", object)
_node: Callable[..., Any] | None = _from_opto("opto.trace", "node")
_bundle: Callable[..., Any] | None = _from_opto("opto.trace", "bundle")


class KernelGuide(_Guide):
    """A scorer of kernels with feedback. Threads can share it. Pickles and copies do not include its connection.

    Trace evaluates a candidate several times. A guide and its copies evaluate each kernel once and then repeat the
    result, unless the fleet failed.
    """

    def __init__(
        self,
        gpu: str = "any",
        verbose: bool = False,
        num_correct_trials: int = 5,
        num_perf_trials: int = 100,
        *,
        score: Score = "inverse_runtime",
        connect: Callable[[], Client] = common.connect,
        run: str | None = None,
        **arguments: Any,
    ) -> None:
        """Configure a guide with arguments of :func:`~kqueue.kernelbench.request_of`. The first kernel connects it.

        Args:
            gpu: the GPU's model, such as ``L40S``, or ``any``, ``auto``, ``cpu``.
            verbose: write each feedback to stderr.
            score: see :func:`~kqueue.integrations.common.scorer`. If the guide is pickled, a function must be at a
                module's top level.
            connect: creates the client, once per process, for example
                ``functools.partial(RemoteClient, url, token=...)``.
            run: guides with the same name share verdicts, even between processes. By default a guide shares them only
                with its copies.
        """
        timed = num_perf_trials > 0 and arguments.get("measure_performance", True)
        if score in ("inverse_runtime", "speedup", "bandwidth") and not timed:
            raise ConfigError(f"score: {score} needs timing: set num_perf_trials above 0, or score='correctness'")
        self._score = scorer(score)
        self._verbose = verbose
        self._run = run or uuid4().hex
        self._connection = Connection(connect)
        self._arguments: dict[str, Any] = {
            "lane": lane_of(gpu),
            "num_correct_trials": num_correct_trials,
            "num_perf_trials": num_perf_trials,
            "purpose": "rank",
            **arguments,
        }

    def get_feedback(
        self,
        task: Any = None,  # noqa: ARG002 Trace's
        response: Any = None,
        info: Any = None,
        **kwargs: Any,
    ) -> tuple[float, str]:
        """Evaluate a kernel.

        Args:
            response: the kernel's source, or an answer that contains the kernel.
            info: source of the reference, or a mapping that has it as ``ref_arch_src``.
            kwargs: can have ``reference`` if ``info`` is None. The rest is ignored.

        Returns:
            The score (-1.0 if the kernel has no verdict) and the feedback (:func:`~kqueue.feedback.describe`), which
            names the location of the kernel in the answer.
        """
        reference = info if info is not None else kwargs.get("reference")
        if isinstance(reference, Mapping):
            reference = reference.get("ref_arch_src")
        if not isinstance(reference, str):
            raise InvalidRequest("info: give the reference's source, or a mapping that has it as ref_arch_src")
        score, _, feedback, _ = judge(self._verdict, reference, str(response or ""), self._known, **self._arguments)
        if self._verbose:
            sys.stderr.write(f"score {score:g}\n{feedback}\n")
        return score, feedback

    def __call__(self, *args: Any, **kwargs: Any) -> tuple[float, str]:
        return self.get_feedback(*args, **kwargs)

    def metric(self, task: Any = None, response: Any = None, info: Any = None, **kwargs: Any) -> float:
        """Return the score of :meth:`get_feedback`."""
        return self.get_feedback(task, response, info, **kwargs)[0]

    def close(self) -> None:
        """Close the connection that this process's copies share. The next kernel opens another one."""
        if (client := self._connection.take()) is not None:
            client.close()

    def _known(self, verdict: Verdict) -> float:
        score = self._score(verdict)
        return UNKNOWN if score is None else score

    def _verdict(self, request: Request) -> Verdict:
        client = self._connection.client()
        digest = sha256(request.model_dump_json().encode()).hexdigest()
        attempt = 0
        while True:
            keyed = request.model_copy(update={"idempotency_key": f"{self._run}/{digest}/{attempt}"})
            ticket = client.submit(keyed)
            verdict = ticket.wait()
            if verdict.judged or ticket.created:
                return verdict
            # An earlier evaluation gave no result: try again under another key.
            attempt += 1


class KernelAgent(_Module):
    """The holder of the kernel that an optimizer changes. A call with a task returns the kernel.

    ``kernel_code`` is a trainable node if Trace is installed, or else a string.
    """

    def __init__(self, initial_kernel_code: str) -> None:
        """Start from a kernel, or from a reference that :func:`starting_kernel` converts."""
        kernel = starting_kernel(initial_kernel_code)
        self.kernel_code: Any = kernel if _node is None else _node(kernel, trainable=True)

    def forward(self, task: str) -> Any:
        """Return the kernel."""
        return _answer(task, self.kernel_code)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.forward(*args, **kwargs)


def _submitted(task: str, kernel_code: str) -> str:  # noqa: ARG001 the optimizer sees that the answer is for the task
    """[kernel] The kernel that is submitted for the task."""
    return kernel_code


_answer: Callable[[Any, Any], Any] = _submitted if _bundle is None else _bundle()(_submitted)
