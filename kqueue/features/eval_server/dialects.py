"""The drop-ins for other evaluation servers: the fields that their requests share, and one evaluation for repeats.

Clients of other evaluation servers post a request and wait on one connection. When it breaks they post again, without a
key. Therefore equal requests of one caller share one evaluation while it runs and for :data:`STANDS_S` seconds after
its answer. A client that wants another evaluation of its kernel sends another ``Idempotency-Key``. A client that sends
the same key gets the same answer for as long as the evaluation is stored, and a conflict if its request differs. If the
fleet failed or the evaluation was cancelled, the next request makes a new evaluation.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Annotated, Any, Final
from uuid import UUID

from fastapi import Header
from fastapi import Request as HttpRequest
from fastapi.responses import JSONResponse
from pydantic import AliasChoices, Field

from kqueue import kernelbench, upper_limits
from kqueue.categories import Blame, Category
from kqueue.client.database import takes_any_lane
from kqueue.contract import Bounded, Request, Verdict
from kqueue.errors import IdempotencyConflict, LaneUnavailable
from kqueue.http import failures
from kqueue.http.auth import Caller
from kqueue.http.devices import View
from kqueue.http.failures import HttpError
from kqueue.http.gateway import Gateway
from kqueue.states import EvaluationState
from kqueue.store import reports
from kqueue.store.reports import Progress

#: Seconds for which an equal request without a key gets the same answer.
STANDS_S: Final = 60.0

IdempotencyKey = Annotated[
    str | None,
    Header(
        alias="Idempotency-Key",
        min_length=1,
        max_length=200,
        description="Requests with the same key share one evaluation. Without a key, equal requests share one until a "
        "minute after its answer.",
    ),
]

#: Errors of these routes in addition to the common ones. 409: the evaluation was cancelled, or the key belongs to
#: another request. 429: the caller has too many evaluations without a verdict.
RESPONSES: Final = failures.documented(409, 429)


#: Sources in the examples of requests.
MODEL: Final = "import torch\nclass Model(torch.nn.Module): ..."
MODEL_NEW: Final = "import torch\nclass ModelNew(torch.nn.Module): ..."
Seed = Annotated[int | None, Field(ge=0, lt=2**63)]
SEED: Final = "Seed that is set before each constructor. By default a secret one."
#: The field with the limit of an execution.
TIMEOUT: Final[Any] = Field(
    gt=0,
    le=3600,
    alias="timeout",
    description="Maximum seconds of each phase of the execution. Queueing does not count.",
)


class KernelRequest(Bounded):
    """One kernel to judge. Unknown fields are ignored.

    Fields have the names of KernelBench's arguments. Their aliases are a dialect's names.
    """

    seed_num: Seed = Field(
        None, validation_alias=AliasChoices("seed_num", "seed"), description=f"{SEED} `seed` is an alias."
    )
    num_correct_trials: int = Field(5, ge=1, le=100, description="Number of input sets to check.")
    num_perf_trials: int = Field(100, ge=0, le=10_000, description="Maximum number of timed calls.")
    backend: str = Field("cuda", description="Name of a backend, such as `cuda` or `triton`.")

    def as_request(self, **arguments: Any) -> Request:
        """Return the request for this kernel and further arguments of :func:`~kqueue.kernelbench.request_of`."""
        # An unknown field of the body can have the name of a shared field, so only declared fields are read.
        given = {name: getattr(self, name) for name in _SHARED & type(self).model_fields.keys()}
        return kernelbench.request_of(**given | arguments)


#: The fields of requests that are arguments of :func:`~kqueue.kernelbench.request_of`.
_SHARED: Final = {"problem", "kernel", "timeout_s", *KernelRequest.model_fields}


@dataclass(frozen=True, slots=True)
class Seen:
    """An evaluation as its clients see it, with KernelBench's result and the reason of a failure, if any."""

    progress: Progress
    device: str | None
    verdict: Verdict | None
    result: dict[str, Any]
    error: str | None


async def see(gateway: Gateway, view: View, progress: Progress, verdict: Verdict | None = None) -> Seen:
    """Return an evaluation with its verdict, which is read unless given. GPUs have the fleet's numbers."""
    device = progress.device and view.name_of(progress.device)
    if verdict is None and progress.state == EvaluationState.DONE:
        verdict = await gateway.client.verdict(progress.evaluation_id)
    if verdict is None:
        return Seen(progress, device, None, {}, None)
    result = kernelbench.result_of(verdict)
    number = result["metadata"]["device_id"] = view.numbered(progress.device or "cpu")
    if number is not None:
        for where in (result["metadata"], result["runtime_stats"], result["ref_runtime_stats"]):
            if "device" in where:
                where["device"] = device
    return Seen(progress, device, verdict, result, None if verdict.passed else f"{verdict.category}: {verdict.message}")


async def accept(
    gateway: Gateway,
    caller: Caller,
    request: Request,
    key: str | None,
    *,
    stands_s: float | None = STANDS_S,
    finished_counts: bool = True,
) -> tuple[UUID, bool]:
    """Return the evaluation for a request, and True if it existed before.

    A new evaluation judges the kernel again if the request has a key or ``finished_counts`` is False. Otherwise it can
    reuse the verdict of any caller's equal evaluation. Raise an HttpError 503 if no live worker can judge the request,
    409 if the key belongs to another one, and 403 and 429 of :meth:`Gateway.submit`.

    Args:
        key: requests with the same key share one evaluation. Without a key, equal requests share one.
        stands_s: seconds for which the answer is returned again without a key, or None for no limit.
        finished_counts: False to make a new evaluation if the earlier one has its verdict.
    """
    request = upper_limits.apply(request, caller.limits)
    name = f"{caller.viewer.session or ''}\0{request.model_dump_json() if key is None else key}".removeprefix("\0")
    stands_s = None if key is not None else stands_s
    kind = "key" if stands_s is None else "same"
    family = f"{kind}:{caller.token_id or 'local'}:{hashlib.sha256(name.encode()).hexdigest()[:32]}:"
    within_s = stands_s if finished_counts else 0.0
    if key is not None or not finished_counts:
        request = request.model_copy(update={"reuse": False})
    any_lane = takes_any_lane(request, gateway.config.gpu_fallback)
    before = await gateway.read(reports.earlier, request, family=family, within_s=within_s, any_lane=any_lane)
    if before is not None and key is not None and not before.same:
        raise _conflict(key)
    if before is not None and before.stands:
        return before.evaluation_id, True
    # Equal requests that arrive at once have the same key: one of them makes the evaluation, and all get it.
    own = family + ("0" if before is None else before.evaluation_id.hex) + ("" if finished_counts else ":fresh")
    try:
        [ticket] = await gateway.submit(caller, [request.model_copy(update={"idempotency_key": own})])
    except LaneUnavailable as error:
        raise HttpError(503, str(error), code="lane_unavailable") from None
    except IdempotencyConflict as error:
        raise error if key is None else _conflict(key) from None
    return ticket.evaluation_id, not ticket.created


def _conflict(key: str) -> HttpError:
    return HttpError(409, str(IdempotencyConflict([key])), code="idempotency_conflict")


async def settle(gateway: Gateway, request: HttpRequest, evaluation_id: UUID) -> Verdict | JSONResponse:
    """Wait for an evaluation and return its verdict, or an error answer if neither kernel nor problem is to blame."""
    verdict = await gateway.wait(request, evaluation_id, None)
    assert verdict is not None
    return refusal(verdict, request.url.path) if verdict.blame in (Blame.FLEET, Blame.NOBODY) else verdict


def refusal(verdict: Verdict, path: str) -> JSONResponse:
    """Return the error answer for a verdict that blames neither the kernel nor the problem."""
    return failures.answer(
        path,
        409 if verdict.category in (Category.CANCELLED, Category.NEEDS_GPU, Category.INVALID_REQUEST) else 503,
        str(verdict.category),
        f"{verdict.category.info.meaning} {verdict.message}".strip(),
        evaluation_ids=[str(verdict.evaluation_id)],
    )
