"""The JSON between clients and `kqueue serve`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final
from uuid import UUID, uuid4

from kqueue.client.transport import Accepted
from kqueue.contract import Request
from kqueue.errors import (
    AccessRefused,
    BrokerUnavailable,
    BudgetSpent,
    DatabaseUnavailable,
    IdempotencyConflict,
    InvalidRequest,
    KqueueError,
    LaneUnavailable,
    SchemaMismatch,
    ServerUnavailable,
    UnknownEvaluation,
    UnknownLane,
    UnknownProblem,
)

#: The most that goes into one request if a submission may be split: entries, and characters of source.
_CHUNK: Final = (200, 4 << 20)
#: What the idempotency keys begin with that are made here.
_OWN_KEYS: Final = "remote-"
#: The exceptions of the server's codes. Each takes the error's detail.
_ERRORS: Final[dict[str, type[KqueueError]]] = {
    "lane_unavailable": LaneUnavailable,
    "unknown_lane": UnknownLane,
    "invalid_request": InvalidRequest,
    "malformed_request": InvalidRequest,
    "too_large": InvalidRequest,
    "unauthenticated": AccessRefused,
    "forbidden": AccessRefused,
    "database_unavailable": DatabaseUnavailable,
    "broker_unavailable": BrokerUnavailable,
    "schema_mismatch": SchemaMismatch,
    "too_many_queued": ServerUnavailable,
    "stopping": ServerUnavailable,
}


def with_key(request: Request) -> Request:
    """Return the request with an idempotency key, so that it may be sent twice."""
    if request.idempotency_key is not None:
        return request
    return request.model_copy(update={"idempotency_key": f"{_OWN_KEYS}{uuid4().hex}"})


def chunks(requests: Iterable[Request]) -> Iterator[list[Request]]:
    """Split requests into lists that are small enough for one HTTP request each."""
    chunk: list[Request] = []
    size = 0
    for request in requests:
        length = len(request.problem) + len(request.kernel)
        if chunk and (len(chunk) == _CHUNK[0] or size + length > _CHUNK[1]):
            yield chunk
            chunk, size = [], 0
        chunk.append(request)
        size += length
    if chunk:
        yield chunk


def dump_request(request: Request) -> dict[str, Any]:
    """Return the fields that the producer gave. The others have the server's defaults."""
    return request.model_dump(mode="json", exclude_unset=True)


def load_accepted(request: Request, answer: Mapping[str, Any]) -> Accepted:
    """Return the evaluation that the server made of ``request``, or found for it."""
    # Nobody else submits under a key that was made here: the evaluation is that of a try whose answer was lost.
    own = (request.idempotency_key or "").startswith(_OWN_KEYS)
    return Accepted(UUID(answer["evaluation_id"]), own or answer["created"])


def load_result(request: Request, result: Mapping[str, Any]) -> Accepted | InvalidRequest:
    """Return what became of one request of several.

    Raises:
        KqueueError: a failure that is not the request's.
    """
    if result["error"] is None:
        return load_accepted(request, result["evaluation"])
    error = load_error(result["error"])
    if isinstance(error, AccessRefused):
        # The token may not bring this entry's problem. The other entries stand.
        return InvalidRequest(str(error))
    if not isinstance(error, InvalidRequest):
        raise error
    return error


def load_error(problem: Mapping[str, Any]) -> KqueueError:
    """Return the exception that a problem (RFC 9457) stands for."""
    code, detail = problem["code"], problem["detail"]
    if code == "idempotency_conflict":
        return IdempotencyConflict(problem["keys"])
    if code == "budget_spent":
        return BudgetSpent(problem["budget_s"], problem["window_s"], problem["retry_after_s"])
    if code == "unknown_problem":
        return UnknownProblem(problem["problem_hashes"])
    if code == "unknown_evaluation":
        error = UnknownEvaluation("")
        error.args = (detail,)
        return error
    return _ERRORS.get(code, KqueueError)(detail)
