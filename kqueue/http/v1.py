"""The native API below ``/v1``: resources for the client's methods and the store's reports."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Final, Literal
from uuid import UUID

from fastapi import APIRouter, Body, Depends, Header, Query, Request, Response
from fastapi.responses import PlainTextResponse

from kqueue import contract, receipts
from kqueue.categories import CATEGORIES
from kqueue.client.transport import Accepted, check_each
from kqueue.errors import IdempotencyConflict, InvalidRequest
from kqueue.http import events, failures, shapes
from kqueue.http.auth import Reader, Submitter
from kqueue.http.devices import CurrentFleet
from kqueue.http.failures import HttpError
from kqueue.http.gateway import CurrentGateway
from kqueue.states import ArtifactName
from kqueue.store import evaluations, reports

router: Final = APIRouter(prefix="/v1", tags=["v1"])
router.include_router(events.router)

#: Maximum number of verdicts in one answer. A verdict can contain a log and evidence.
_MOST_VERDICTS: Final = 20

_EXAMPLE: Final[Mapping[str, Any]] = {
    "problem": (
        "import torch\n\nclass Model(torch.nn.Module):\n    def forward(self, x):\n        return torch.relu(x)\n\n"
        "def get_inputs():\n    return [torch.randn(1024)]\n\ndef get_init_inputs():\n    return []\n"
    ),
    "kernel": (
        "import torch\n\nclass ModelNew(torch.nn.Module):\n    def forward(self, x):\n        return x.clamp(min=0)\n"
    ),
    "backend": "torch",
    "problem_label": "relu",
    "kernel_label": "clamp",
    "idempotency_key": "step-12/7",
}

REFUSALS: Final = failures.documented(409, 429)
_Timeout = Annotated[float, Query(ge=0, le=300, allow_inf_nan=False, description="Seconds.")]
_IdleLane = Annotated[
    bool, Query(description="Accept a lane (not `auto`) that no live worker serves now, instead of refusing with 409.")
]
Key = Annotated[
    str | None,
    Header(
        min_length=1,
        max_length=180,
        pattern=r"^[\x20-\x7e]+$",
        description="A repeated key returns the same evaluations. Of several entries, each one without "
        "`idempotency_key` gets this key with `/` and its index appended.",
    ),
]


@dataclass
class KeyedSubmission:
    """A request that submits, with the keys of its evaluations.

    A stored key contains the token's id and an agent's session, so that no other caller can occupy it.
    """

    caller: Submitter
    gateway: CurrentGateway
    allow_idle_lane: _IdleLane = False
    idempotency_key: Key = None

    def __post_init__(self) -> None:
        self._given: dict[str, str] = {}

    async def all(self, requests: Sequence[contract.Request]) -> Sequence[Accepted]:
        """Submit all requests or none. Errors name the caller's keys."""
        try:
            return await self.gateway.submit(self.caller, requests, allow_idle_lane=self.allow_idle_lane)
        except IdempotencyConflict as error:
            raise self.given(error) from None

    def put(self, request: contract.Request, index: int | None = None) -> contract.Request:
        """Return ``request`` with its stored key, made from its own key or the header's.

        ``index`` is the request's index among several. A single request whose key differs from the header's raises
        InvalidRequest.
        """
        key, header = request.idempotency_key, self.idempotency_key
        if header is not None and index is not None:
            header = f"{header}/{index}"
        elif header is not None and key not in (None, header):
            raise InvalidRequest("idempotency_key: the header Idempotency-Key has another key. Send one of the two")
        key = header if key is None else key
        if key is None:
            return request
        kept, token_id, session = key, self.caller.token_id, self.caller.viewer.session
        if token_id is not None or session is not None:
            of_session = "" if session is None else f"{session}:"
            kept = f"token:{token_id}:{of_session}{hashlib.sha256(key.encode()).hexdigest()}"
        self._given[kept] = key
        return request.model_copy(update={"idempotency_key": kept})

    def given(self, error: InvalidRequest | HttpError) -> InvalidRequest | HttpError:
        """Return the error with the caller's keys instead of the stored ones, if it names any."""
        if not isinstance(error, IdempotencyConflict):
            return error
        return IdempotencyConflict(self._given[key] for key in error.keys)


_Submission = Annotated[KeyedSubmission, Depends(KeyedSubmission)]


@router.post(
    "/evaluations",
    status_code=201,
    responses=REFUSALS
    | {200: {"model": Accepted, "description": "An evaluation with this key exists, and is returned."}},
)
async def submit(
    body: Annotated[contract.Request, Body(openapi_examples={"relu": {"value": _EXAMPLE}})],
    answer: Response,
    submission: _Submission,
) -> Accepted:
    """Submit one evaluation. It gets exactly one verdict, even if the connection breaks."""
    [ticket] = await submission.all([submission.put(body)])
    answer.headers["Location"] = f"/v1/evaluations/{ticket.evaluation_id}"
    if not ticket.created:
        answer.status_code = 200
    return ticket


@router.post("/evaluations/batch", status_code=201, responses=REFUSALS)
async def submit_batch(body: shapes.Entries, submission: _Submission) -> shapes.AcceptedBatch:
    """Submit all evaluations or none, in one transaction."""
    submission.gateway.bound(len(body.entries))
    requests = [submission.put(entry, index) for index, entry in enumerate(body.entries)]
    return shapes.AcceptedBatch(evaluations=[*await submission.all(requests)])


@router.post("/evaluations/each", responses=REFUSALS)
async def submit_each(body: shapes.LooseEntries, request: Request, submission: _Submission) -> shapes.EntryResults:
    """Submit every valid entry. The result of a refused entry is its error."""
    gateway = submission.gateway
    gateway.bound(len(body.entries))
    entries = [
        entry if isinstance(entry, InvalidRequest) else submission.put(entry, index)
        for index, entry in enumerate(check_each(body.entries))
    ]
    results = await gateway.submit_each(submission.caller, entries, allow_idle_lane=submission.allow_idle_lane)
    return shapes.EntryResults(
        results=[
            shapes.EntryResult(error=failures.describe(submission.given(result), request.scope["path"]))
            if isinstance(result, InvalidRequest | HttpError)
            else shapes.EntryResult(evaluation=result)
            for result in results
        ]
    )


@router.post("/evaluations/{evaluation_id}/cancel")
async def cancel(evaluation_id: UUID, caller: Submitter, gateway: CurrentGateway) -> shapes.Cancelled:
    """Cancel an evaluation, and kill it if it runs."""
    return shapes.Cancelled(evaluation_id=evaluation_id, cancelled=await gateway.cancel(caller, evaluation_id))


@router.get("/evaluations/{evaluation_id}/wait")
async def wait(
    evaluation_id: UUID, request: Request, _: Reader, gateway: CurrentGateway, timeout: _Timeout = 30.0
) -> shapes.Awaited:
    """Wait for the verdict. A client that disconnects ends the wait, not the evaluation."""
    verdict = await gateway.read(evaluations.verdict, evaluation_id)
    if verdict is None and timeout > 0:
        verdict = await gateway.wait(request, evaluation_id, timeout)
    return shapes.Awaited(evaluation_id=evaluation_id, verdict=verdict)


@router.post("/evaluations/wait")
async def wait_any(body: shapes.WaitFor, request: Request, _: Reader, gateway: CurrentGateway) -> shapes.Verdicts:
    """Wait until one of several evaluations has its verdict, and return all verdicts that exist then."""
    known = await gateway.read(evaluations.existing, body.evaluation_ids)
    unknown = [identity for identity in body.evaluation_ids if identity not in known]
    if unknown or body.timeout == 0:
        # Unknown ids are reported at once.
        verdicts = await gateway.read(evaluations.verdicts, known)
    else:
        verdicts = await gateway.wait_any(request, known, body.timeout)
    return shapes.Verdicts(verdicts=list(verdicts.values())[:_MOST_VERDICTS], unknown=unknown)


@router.get("/evaluations/{evaluation_id}/log", response_class=PlainTextResponse)
async def log(evaluation_id: UUID, _: Reader, gateway: CurrentGateway) -> str:
    """Return the end of the kernel's output, sanitised. The kernel controls the text."""
    verdict = await gateway.read(evaluations.verdict, evaluation_id)
    if verdict is None:
        raise _unfinished(evaluation_id)
    return verdict.log


@router.get("/evaluations/{evaluation_id}/artifacts")
async def artifacts(evaluation_id: UUID, _: Reader, gateway: CurrentGateway) -> shapes.Artifacts:
    """List the files of an evaluation: its sources, and after its verdict also verdict, evidence and log."""
    files = (await gateway.read(reports.show, evaluation_id)).files()
    return shapes.Artifacts(
        artifacts=[
            shapes.Artifact(
                name=name,
                media_type=name.media_type,
                bytes=len(content.encode()),
                href=f"/v1/evaluations/{evaluation_id}/artifacts/{name}",
            )
            for name, content in files.items()
        ]
    )


@router.get(
    "/evaluations/{evaluation_id}/artifacts/{name}",
    response_class=Response,
    responses={
        200: {
            "description": "The file.",
            "content": {"text/plain": {"schema": {"type": "string"}}, "application/json": {"schema": {}}},
        }
    },
)
async def artifact(evaluation_id: UUID, name: ArtifactName, _: Reader, gateway: CurrentGateway) -> Response:
    """Return one file of an evaluation."""
    content = (await gateway.read(reports.show, evaluation_id)).files().get(name)
    if content is None:
        raise _unfinished(evaluation_id)
    return Response(
        content, media_type=name.media_type, headers={"Content-Disposition": f'attachment; filename="{name}"'}
    )


@router.get(
    "/evaluations/{evaluation_id}/receipt", responses=failures.documented(409) | {200: {"model": receipts.Envelope}}
)
async def receipt(
    evaluation_id: UUID,
    _: Reader,
    gateway: CurrentGateway,
    sources: Annotated[bool, Query(description="Include the sources and the log.")] = False,
) -> Response:
    """Return a signed record of a finished evaluation, which `kqueue verify` checks without a network."""
    content = await gateway.receipt(evaluation_id, sources=sources)
    if content is None:
        raise _unfinished(evaluation_id)
    headers = {"Content-Disposition": f'attachment; filename="{evaluation_id}.receipt.json"'}
    return Response(content, media_type="application/json", headers=headers)


@router.get("/keys", openapi_extra={"security": [{}]})
async def keys(gateway: CurrentGateway) -> dict[Literal["keys"], list[shapes.PublicKey]]:
    """List the public keys of receipts: the one that signs now, then those that signed before."""
    public = map(receipts.public_key, receipts.load_keys(gateway.config.receipt_key))
    return {"keys": [shapes.PublicKey(key_id=receipts.key_id(one), public_key=one) for one in public]}


@router.get("/categories")
async def categories(_: Reader) -> shapes.Categories:
    """Return the table of categories, with the blame of each."""
    return shapes.Categories(categories=[shapes.CategoryShape.model_validate(row) for row in CATEGORIES.values()])


@router.get("/fleet")
async def fleet(_: Reader, fleet: CurrentFleet) -> shapes.Fleet:
    """Return the lanes, the live workers, the GPUs' states, and the results of the last day's probes.

    A worker without `busy_with` but with `busy_since` executes an evaluation that the caller cannot read.
    """
    view = await fleet.seen()
    return shapes.Fleet(
        lanes=shapes.lanes_of(view), workers=view.workers, gpus=[device.gpu for device in view.devices], **view.records
    )


def _unfinished(evaluation_id: UUID) -> HttpError:
    return HttpError(404, f"{evaluation_id} has no verdict yet: wait for it", code="not_finished")
