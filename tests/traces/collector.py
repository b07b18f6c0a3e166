"""A collector of OpenTelemetry that accepts OTLP over HTTP on loopback and stores the spans."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)

from tests.receiver import Answer, receiver


@dataclass(frozen=True)
class Span:
    """A received span."""

    service: str
    name: str
    trace: str
    identity: str
    above: str
    kind: int
    begin_ns: int
    end_ns: int
    status: int
    attributes: dict[str, Any]


@dataclass
class Collector:
    """Received spans and bodies, and the status of the next answer."""

    url: str = ""
    status: int = 200
    spans: list[Span] = field(default_factory=list)
    bodies: list[bytes] = field(default_factory=list)
    refused: int = 0

    def variables(self) -> dict[str, str]:
        """Return the environment variables for this collector."""
        return {"OTEL_EXPORTER_OTLP_ENDPOINT": self.url, "OTEL_EXPORTER_OTLP_TIMEOUT": "3"}

    def of(self, evaluation: object) -> list[Span]:
        """Return the spans of an evaluation's trace once its root has come."""
        identity = str(evaluation)
        traces = {span.trace for span in self.spans if span.attributes.get("kqueue.evaluation.id") == identity}
        return [span for span in self.spans if span.trace in traces]


@contextmanager
def collector() -> Iterator[Collector]:
    """Receive spans until the block ends."""
    kept = Collector()

    def answer(request: BaseHTTPRequestHandler, body: bytes) -> Answer:
        if request.path != "/v1/traces":
            return 404, {}, b""
        if kept.status != 200:
            kept.refused += 1
            return kept.status, {}, b""
        kept.bodies.append(body)
        kept.spans += read(body)
        return 200, {}, ExportTraceServiceResponse().SerializeToString()

    with receiver(answer) as kept.url:
        yield kept


def read(body: bytes) -> list[Span]:
    """Return the spans of a request."""
    return [
        Span(
            service=next(a.value.string_value for a in group.resource.attributes if a.key == "service.name"),
            name=span.name,
            trace=span.trace_id.hex(),
            identity=span.span_id.hex(),
            above=span.parent_span_id.hex(),
            kind=span.kind,
            begin_ns=span.start_time_unix_nano,
            end_ns=span.end_time_unix_nano,
            status=span.status.code,
            attributes={a.key: getattr(a.value, a.value.WhichOneof("value")) for a in span.attributes},
        )
        for group in ExportTraceServiceRequest.FromString(body).resource_spans
        for scope in group.scope_spans
        for span in scope.spans
    ]
