"""The JSON between clients and `kqueue serve`."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from typing import Any, Final
from uuid import UUID, uuid4

from kqueue import errors, tracing
from kqueue.client.transport import Accepted
from kqueue.contract import Request, Verdict
from kqueue.errors import AccessRefused, InvalidRequest, KqueueError

#: Maximum number of entries, and of characters of source, in one request of a submission that can be split.
_CHUNK: Final = (200, 4 << 20)
#: Prefix of the idempotency keys that :func:`with_key` creates.
_OWN_KEYS: Final = "remote-"
#: Exceptions by error code. Their only argument is the error's detail.
_ERRORS: Final[dict[str, type[KqueueError]]] = {
    "lane_unavailable": errors.LaneUnavailable,
    "unknown_lane": errors.UnknownLane,
    "invalid_request": InvalidRequest,
    "malformed_request": InvalidRequest,
    "too_large": InvalidRequest,
    "unauthenticated": AccessRefused,
    "forbidden": AccessRefused,
    "session_spent": AccessRefused,
    "database_unavailable": errors.DatabaseUnavailable,
    "broker_unavailable": errors.BrokerUnavailable,
    "schema_mismatch": errors.SchemaMismatch,
    "too_many_queued": errors.ServerUnavailable,
    "stopping": errors.ServerUnavailable,
}


def with_key(request: Request) -> Request:
    """Return the request with an idempotency key, so that it can be sent twice."""
    if request.idempotency_key is not None:
        return request
    return request.model_copy(update={"idempotency_key": f"{_OWN_KEYS}{uuid4().hex}"})


def chunks(requests: Iterable[Request]) -> Iterator[list[Request]]:
    """Split requests into lists that are small enough for one HTTP request each."""
    chunk: list[Request] = []
    size = 0
    for request in requests:
        length = len(request.problem) + len(request.kernel) + sum(map(len, request.trees))
        if chunk and (len(chunk) == _CHUNK[0] or size + length > _CHUNK[1]):
            yield chunk
            chunk, size = [], 0
        chunk.append(request)
        size += length
    if chunk:
        yield chunk


def dump_request(request: Request) -> dict[str, Any]:
    """Return the fields that the producer gave. The remaining fields get the server's defaults."""
    return request.model_dump(mode="json", exclude_unset=True)


def load_accepted(request: Request, answer: Mapping[str, Any]) -> Accepted:
    """Return the evaluation that the server created or found for ``request``."""
    # A key of `with_key` is unique. If its evaluation exists, an earlier try created it and the answer was lost.
    own = (request.idempotency_key or "").startswith(_OWN_KEYS)
    return Accepted(UUID(answer["evaluation_id"]), own or answer["created"])


def load_result(request: Request, result: Mapping[str, Any]) -> Accepted | InvalidRequest:
    """Return the result of one request of several, or raise an error that the request did not cause."""
    if result["error"] is None:
        return load_accepted(request, result["evaluation"])
    error = load_error(result["error"])
    if isinstance(error, AccessRefused):
        # The token lacks the scope for this entry's new problem. The other entries are unaffected.
        return InvalidRequest(str(error))
    if not isinstance(error, InvalidRequest):
        raise error
    return error


def load_error(problem: Mapping[str, Any]) -> KqueueError:
    """Return the exception for an error answer (RFC 9457)."""
    code, detail = problem["code"], problem["detail"]
    if code == "idempotency_conflict":
        return errors.IdempotencyConflict(problem["keys"])
    if code == "budget_spent":
        return errors.BudgetSpent(problem["budget_s"], problem["window_s"], problem["retry_after_s"])
    if code == "unknown_problem":
        return errors.UnknownProblem(problem["problem_hashes"])
    if code == "unknown_evaluation":
        error = errors.UnknownEvaluation("")
        error.args = (detail,)
        return error
    return _ERRORS.get(code, KqueueError)(detail)


class Operations:
    """The operations of the API on evaluations, by means of :meth:`~kqueue.client.server.Server.ask`."""

    ask: Callable[..., Coroutine[Any, Any, dict[str, Any]]]

    async def submit(self, requests: Sequence[Request], allow_idle_lane: bool = False) -> list[Accepted]:
        """Submit all requests, or raise the error of one of them and submit none."""
        if not requests:
            return []
        requests = [with_key(request) for request in requests]
        entries = [dump_request(request) for request in requests]
        path, body = ("", entries[0]) if len(entries) == 1 else ("/batch", {"entries": entries})
        answer = await self._submit(path, body, len(entries), allow_idle_lane)
        accepted = [answer] if len(entries) == 1 else answer["evaluations"]
        return [load_accepted(request, one) for request, one in zip(requests, accepted, strict=True)]

    async def submit_each(
        self, entries: Sequence[Request | InvalidRequest], allow_idle_lane: bool = False
    ) -> list[Accepted | InvalidRequest]:
        """Submit every valid request, in several requests if they are large, and return the results in order."""
        good = [with_key(entry) for entry in entries if isinstance(entry, Request)]
        results: list[Accepted | InvalidRequest] = []
        for chunk in chunks(good):
            body = {"entries": [dump_request(request) for request in chunk]}
            answer = await self._submit("/each", body, len(chunk), allow_idle_lane)
            results += [load_result(request, one) for request, one in zip(chunk, answer["results"], strict=True)]
        rest = iter(results)
        return [next(rest) if isinstance(entry, Request) else entry for entry in entries]

    async def _submit(self, path: str, body: Any, count: int, allow_idle_lane: bool) -> dict[str, Any]:
        with tracing.submission(count) as traceparent:
            headers = {} if traceparent is None else {tracing.HEADER: traceparent}
            idle = {"allow_idle_lane": allow_idle_lane}
            return await self.ask("POST", f"/v1/evaluations{path}", body=body, query=idle, headers=headers)

    async def verdicts(self, evaluation_ids: Iterable[UUID], hold_s: float) -> list[Verdict]:
        """Return the verdicts as soon as there is one, or none after ``hold_s`` seconds. Raise UnknownEvaluation."""
        body = {"evaluation_ids": [str(identity) for identity in evaluation_ids], "timeout": hold_s}
        answer = await self.ask("POST", "/v1/evaluations/wait", body=body)
        if answer["unknown"]:
            raise errors.UnknownEvaluation(answer["unknown"][0])
        return [Verdict.load(fields) for fields in answer["verdicts"]]

    async def cancel(self, evaluation_id: UUID) -> bool:
        """Cancel an evaluation. Return False if it had its verdict."""
        return (await self.ask("POST", f"/v1/evaluations/{evaluation_id}/cancel"))["cancelled"]
