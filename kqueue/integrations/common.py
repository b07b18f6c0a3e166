"""The parts that the adapters share: a model's answer as a request, lanes, scores, clients, and initial kernels."""

from __future__ import annotations

import ast
import logging
import os
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Final, Generic, Literal, NamedTuple, Self, TypeVar, get_args

from pydantic import BaseModel

from kqueue.client import AsyncClient, connect
from kqueue.config import names_server
from kqueue.contract import Request, Verdict, gpu_model
from kqueue.errors import ConfigError, EvaluationFailed, InvalidRequest
from kqueue.feedback import describe
from kqueue.integrations.extraction import Taken, take
from kqueue.kernelbench import request_of, result_of
from kqueue.states import Purpose
from kqueue.text import clean

#: A text, or the messages of a chat, whose content is text or parts with text.
Answer = str | Sequence[Mapping[str, Any]]

_log = logging.getLogger(__name__)

_VALID: Final = "class ModelNew: ..."


def take_from(answer: Answer) -> Taken:
    """Return the kernel in an answer, or in the assistant's last message of a chat."""
    if isinstance(answer, str):
        return take(answer)
    replies = [message for message in answer if message.get("role", "assistant") == "assistant"] or answer[-1:]
    content: object = replies[-1].get("content") if replies else None
    if isinstance(content, Sequence) and not isinstance(content, str):
        content = "\n".join(_text_of(part) for part in content)
    return take(str(content or ""))


def _text_of(part: object) -> str:
    """Return the text of a part of a message. Empty for reasoning, a picture or a tool call."""
    if isinstance(part, Mapping):
        return str(part.get("text") or "") if part.get("type", "text") in ("text", "output_text") else ""
    return str(part)


def request_for(problem: str, kernel: str, **arguments: Any) -> Request | InvalidRequest:
    """Build the request for a kernel that a model wrote, with arguments of :func:`~kqueue.kernelbench.request_of`.

    The default ``purpose`` is ``train``. The :class:`InvalidRequest` of an invalid kernel is returned, because it is
    the model's failure and not the caller's. It is raised if the problem or the arguments are invalid for any kernel.
    """
    arguments = {"purpose": Purpose.TRAIN} | arguments
    try:
        return request_of(problem, kernel, **arguments)
    except InvalidRequest as error:
        request_of(problem, _VALID, **arguments)
        return error


def lane_of(gpu_type: str) -> str:
    """Return the lane for a GPU type: ``A100``, ``A100-80GB`` and ``NVIDIA A100-SXM4-80GB`` give ``gpu.a100``.

    ``any`` gives ``gpu``, ``cpu`` the lane without GPUs, and ``auto`` leaves the choice to the client. Variants that
    differ in memory share a lane. Modal's ``!`` (no upgrade) is ignored, because kqueue substitutes another model only
    where ``KQUEUE_GPU_FALLBACK`` names it.
    """
    name, _, count = gpu_type.strip().rstrip("!").partition(":")
    if count not in {"", "1"}:
        raise InvalidRequest(f"gpu_type: {gpu_type!r} asks for {count} GPUs, but an evaluation uses one: omit :{count}")
    kind = name.lower()
    if not any(char.isalnum() for char in kind):
        raise InvalidRequest(f"gpu_type: {gpu_type!r} names no GPU: use a model such as A100, or any, auto or cpu")
    if kind in {"auto", "cpu"}:
        return kind
    return "gpu" if kind in {"any", "gpu"} else f"gpu.{gpu_model(kind)}"


def result_for(
    request: Request, verdict: Verdict, *, verbose: bool = False, threshold: float | None = None, **metadata: Any
) -> dict[str, Any]:
    """Return KernelBench's result (:func:`~kqueue.kernelbench.result_of`) of a verdict.

    Raise EvaluationFailed if the fleet or the problem failed, so that the kernel's quality is unknown.

    Args:
        verbose: write the verdict to stderr.
        threshold: speedup above which ``metadata`` has ``excessive_speedup``. None never adds it.
        metadata: entries to add to the result's metadata. It gets ``lane_asked`` if another lane was requested.
    """
    if verbose:
        sys.stderr.write(clean(describe(verdict, request.kernel)) + "\n")
    if not verdict.judged:
        raise EvaluationFailed(verdict)
    if request.lane not in {"auto", verdict.lane}:
        metadata["lane_asked"] = request.lane
    if threshold is not None and verdict.speedup is not None and verdict.speedup > threshold:
        _log.warning(
            "a speedup of %.3g is above %.3g: evaluation %s", verdict.speedup, threshold, verdict.evaluation_id
        )
        metadata["excessive_speedup"] = True
    result = result_of(verdict)
    result["metadata"] |= metadata
    return result


#: The names of policies.
Policy = Literal["inverse_runtime", "speedup", "speedup_estimate", "bandwidth", "correctness"]
#: A policy's name, or a function that returns a score, or None if the kernel's quality is unknown.
Score = Policy | Callable[[Verdict], float | None]


def scorer(score: Score) -> Callable[[Verdict], float | None]:
    """Return the function for a policy.

    A failed kernel scores 0. A correct one scores 1 / seconds under ``inverse_runtime``, the lower end of its speedup's
    95 % interval under ``speedup``, the speedup itself under ``speedup_estimate``, its share of the memory bandwidth
    under ``bandwidth`` (on a GPU: the time to read the inputs and write the outputs once, divided by its runtime), and
    1 under ``correctness``. The score is None if it is unknown: the fleet or the problem failed, the evaluation was
    cancelled, expired or needs a GPU, or (except for ``correctness``) the kernel was not timed.
    """
    if callable(score):
        return score
    if score not in get_args(Policy):
        raise ConfigError(f"score: unknown policy {score!r}: use {', '.join(get_args(Policy))} or a function")
    return partial(_score, score)


def _score(policy: Policy, verdict: Verdict) -> float | None:
    runtime, floor = verdict.runtime_ms, verdict.evidence.floor
    if not verdict.judged:
        return None
    if not verdict.passed:
        return 0.0
    scores: dict[Policy, float | None] = {
        "correctness": 1.0,
        "speedup": verdict.speedup_interval[0] if verdict.speedup_interval else verdict.speedup,
        "speedup_estimate": verdict.speedup,
        "bandwidth": floor.floor_ms / runtime if floor is not None and runtime else None,
        "inverse_runtime": 1e3 / runtime if runtime else None,
    }
    return scores[policy]


class Judging(BaseModel):
    """Settings of other packages' tasks: arguments of :func:`~kqueue.kernelbench.request_of`."""

    backend: str = "triton"
    lane: str = "auto"
    score: Policy = "speedup"
    precision: str = "fp32"
    num_correct_trials: int = 5
    num_perf_trials: int = 100


def known(verdict: Verdict, score: Score) -> float:
    """Return a verdict's score (:func:`scorer`), or raise EvaluationFailed if it is unknown."""
    number = scorer(score)(verdict)
    if number is None:
        raise EvaluationFailed(verdict)
    return number


class Judged(NamedTuple):
    """A judged answer. An answer that is not a kernel has no verdict, and the score 0 of a failed kernel."""

    score: float
    verdict: Verdict | None
    feedback: str
    taken: Taken


def judge(
    evaluate: Callable[[Request], Verdict], problem: str, answer: Answer, score: Score = "speedup", **arguments: Any
) -> Judged:
    """Judge one answer with arguments of :func:`~kqueue.kernelbench.request_of`, and score it by :func:`scorer`.

    Raise EvaluationFailed if the kernel has no verdict.
    """
    taken = take_from(answer)
    request = request_for(problem, taken.kernel, **arguments)
    if isinstance(request, InvalidRequest):
        return Judged(0.0, None, f"FAILED: {request}\n{taken.note}".rstrip(), taken)
    verdict = evaluate(request)
    return Judged(known(verdict, score), verdict, describe(verdict, taken.kernel, note=taken.note), taken)


async def judge_async(client: AsyncClient, problem: str, answer: Answer, settings: Judging) -> float:
    """Judge one answer and return its score. See :func:`judge`."""
    taken = take_from(answer)
    _log.info("taken: %s", taken)
    arguments = settings.model_dump(include=set(Judging.model_fields))
    score = arguments.pop("score")
    request = request_for(problem, taken.kernel, **arguments)
    return 0.0 if isinstance(request, InvalidRequest) else known(await client.evaluate(request), score)


def connect_async(token: str | None = None) -> AsyncClient:
    """Return the client of :func:`kqueue.client.connect` for asyncio. ``token`` replaces the configured token."""
    if not names_server():
        return AsyncClient()
    from kqueue.client.remote import AsyncRemoteClient

    return AsyncRemoteClient(token=token)


ClientT = TypeVar("ClientT")


class Connection(Generic[ClientT]):
    """A client that ``connect`` creates on first use. Threads and copies share it.

    Another process (forked, or given a pickle) creates its own.
    """

    def __init__(self, connect: Callable[[], ClientT]) -> None:
        self._connect = connect
        self._lock = threading.Lock()
        self._client: ClientT | None = None
        self._process = 0

    def client(self) -> ClientT:
        """Return this process's client, creating it if necessary."""
        with self._lock:
            if self._client is None or self._process != os.getpid():
                self._client, self._process = self._connect(), os.getpid()
            return self._client

    def take(self) -> ClientT | None:
        """Return this process's client, if any, for the caller to close. :meth:`client` then creates another one."""
        with self._lock:
            client, self._client = self._client, None
            return client if self._process == os.getpid() else None

    def __deepcopy__(self, _: dict[int, Any]) -> Self:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self._connect,)


def starting_kernel(source: str) -> str:
    """Return a working kernel to start a search from.

    A reference becomes a kernel by renaming ``Model`` to ``ModelNew``. Comments and layout stay. The result uses plain
    torch, so it passes under every backend of the lane. A kernel is returned unchanged.
    """
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError) as error:
        raise InvalidRequest(f"the initial kernel: not valid Python: {error}") from None
    classes = {node.name for node in tree.body if isinstance(node, ast.ClassDef)}
    if "ModelNew" in classes:
        return source
    if "Model" not in classes:
        raise InvalidRequest("the initial kernel: defines neither ModelNew nor Model: give a kernel or a reference")
    lines = source.encode().splitlines(keepends=True)
    positions: set[tuple[int, int]] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and node.id == "Model":
            positions.add((node.lineno, node.col_offset))
        elif isinstance(node, ast.ClassDef) and node.name == "Model":
            positions.add((node.lineno, lines[node.lineno - 1].index(b"Model", node.col_offset + len("class"))))
    # From the end, so that earlier positions stay valid. Columns are in bytes.
    for line, column in sorted(positions, reverse=True):
        text = lines[line - 1]
        lines[line - 1] = text[:column] + b"ModelNew" + text[column + len("Model") :]
    return b"".join(lines).decode()


#: The clients that an adapter's functions share in a process.
SHARED: Final = Connection(connect)
SHARED_ASYNC: Final = Connection(connect_async)
