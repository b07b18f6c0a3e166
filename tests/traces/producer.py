"""A producer that uses OpenTelemetry: it submits under a span and prints the evaluations' ids.

Arguments: `direct`, or a server's URL and a token, then the request's fields as JSON.
"""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any

from opentelemetry import trace
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor

import kqueue

provider = TracerProvider(resource=Resource.create({"service.name": "producer"}))
provider.add_span_processor(SimpleSpanProcessor(OTLPSpanExporter()))
trace.set_tracer_provider(provider)
tracer = trace.get_tracer("a producer's own")


async def in_a_loop(client: Any, fields: dict[str, Any]) -> str:
    async with client as kq:
        [ticket] = await kq.submit_batch([fields])
    return str(ticket.evaluation_id)


*way, fields = sys.argv[1:]
request = json.loads(fields)
with tracer.start_as_current_span("step 12"):
    if way == ["direct"]:
        first, second = kqueue.Client(), kqueue.AsyncClient()
    else:
        first, second = (kind(way[0], token=way[1]) for kind in (kqueue.RemoteClient, kqueue.AsyncRemoteClient))
    with first as kq:
        print(*(ticket.evaluation_id for ticket in kq.submit_each([request])))
    print(asyncio.run(in_a_loop(second, request)))
provider.shutdown()
