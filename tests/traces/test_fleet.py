"""Fleets that send traces, and fleets that cannot."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from importlib import metadata
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest

from kqueue import logs
from tests.fleet.told import Fleet, Services
from tests.traces.collector import Collector
from tests.waiting import proc
from workers.exporter import ENDPOINTS, Exporter, is_wanted
from workers.judge.host import linux

PRODUCER = Path(__file__).with_name("producer.py")
PROBLEM = """
import torch

Model = torch.nn.ReLU
get_inputs = lambda: [torch.randn(64)]
get_init_inputs = lambda: []
"""
#: A kernel that prints the variables and modules of a trace that it can see.
KERNEL = """
import os, sys
import torch

print(sorted(name for name in os.environ if name.startswith(("OTEL", "TRACE"))))
print([name for name in sys.modules if name.startswith("opentelemetry")])

class ModelNew(torch.nn.Module):
    def forward(self, x):
        return x.clamp(min=0)
"""
#: The protocol's numbers of span kinds.
INTERNAL, PRODUCES, CONSUMES = 1, 4, 5


@pytest.fixture
def start(start_fleet: Callable[..., Fleet]) -> Iterator[Callable[..., Fleet]]:
    """Return a function that starts a fleet for one test, so that the next test's fleet has the queue for itself."""
    started: list[Fleet] = []

    def begin(**how: Any) -> Fleet:
        started.append(start_fleet(**how))
        return started[-1]

    yield begin
    for fleet in started:
        fleet.stop()


def sender(fleet: Fleet) -> list[int]:
    """Return the process that sends a fleet's traces."""
    return [pid for pid in linux.children(fleet.process.pid) if "workers.traces" in proc(pid, "cmdline").split("\0")]


@pytest.mark.nightly
@pytest.mark.parametrize("true", [False, True], ids=["scripted", "real"])
def test_one_trace_from_submit_to_verdict(
    services: Services, start: Callable[..., Fleet], taking: Collector, true: bool
) -> None:
    """A trace has the producer's spans, the wait and the attempt. A real one has the judge's steps too.

    It is hidden from the kernel.
    """
    fleet = start(true=true, variables=taking.variables())
    request = {"problem": PROBLEM, "kernel": KERNEL if true else "known ok", "backend": "torch", "lane": "cpu"}
    request |= {"settings": {"checks": 1, "timing": {"calls": 5, "warmup": 0}}}
    done = subprocess.run(
        [sys.executable, str(PRODUCER), "direct", json.dumps(request)],
        env=os.environ | services.config().environment() | taking.variables(),
        capture_output=True,
        text=True,
        timeout=90,
    )
    assert done.returncode == 0, done.stderr
    ids = [UUID(line) for line in done.stdout.split()]
    for identity in ids:
        verdict = services.verdict(identity)
        assert verdict.passed, (verdict.message, verdict.log)
        assert not true or "[]\n[]" in verdict.log
        spans = services.until(lambda identity=identity: taking.of(identity), what="the trace")
    assert {span.service for span in spans} == {"producer", "kqueue"}
    [step] = [span for span in spans if span.name == "step 12"]
    submits = [span for span in spans if span.name == "submit"]
    roots = [span for span in spans if span.name == "evaluation"]
    assert [(span.above, span.kind, span.attributes) for span in submits] == [
        (step.identity, PRODUCES, {"kqueue.evaluations": 1})
    ] * 2
    # The submissions of a thread and of asyncio's loop each have their evaluation below them.
    assert {span.attributes["kqueue.evaluation.id"]: span.above for span in roots} == {
        str(identity): span.identity for identity, span in zip(ids, submits, strict=True)
    }
    for root in roots:
        assert root.kind == CONSUMES
        assert {root.attributes[f"kqueue.{name}"] for name in ("category", "blame", "lane", "backend")} == {
            *("passed", "none", "cpu", "torch")
        }
        assert root.attributes["kqueue.device"]
        below = [span for span in spans if span.above == root.identity]
        assert sorted(span.name for span in below) == ["attempt 1", "queue"]
        attempt, queue = sorted(below, key=lambda span: span.name)
        assert (queue.begin_ns, queue.end_ns) == (root.begin_ns, attempt.begin_ns)
        assert attempt.attributes["kqueue.worker"] == fleet.live()[0].name
        assert attempt.attributes["host.name"] == socket.gethostname()
        steps = [span for span in spans if span.above == attempt.identity]
        assert not true or {"reference", "construct", "check", "alone_measure", "time"} <= {one.name for one in steps}
        assert all(attempt.begin_ns <= span.begin_ns <= span.end_ns <= attempt.end_ns for span in steps)
        assert {span.kind for span in (*below, *steps)} == {INTERNAL}
    text = b"".join(taking.bodies)
    assert request["kernel"].encode() not in text
    assert services.config().require_database().encode() not in text


def test_opentelemetry_s_own_variables_switch_it_on() -> None:
    """Only OpenTelemetry's variables decide, without a setting of kqueue."""
    named = {ENDPOINTS[1]: "http://127.0.0.1:4318"}
    assert is_wanted({ENDPOINTS[0]: "http://127.0.0.1:4318/v1/traces"})
    assert is_wanted(named)
    for off in (
        {},
        {ENDPOINTS[1]: " "},
        named | {"OTEL_SDK_DISABLED": "True"},
        named | {"OTEL_TRACES_EXPORTER": "none"},
    ):
        assert not is_wanted(off)


def test_without_the_extra_the_fleet_says_what_to_install(config, monkeypatch, capfd) -> None:
    """Without the extra the fleet logs the install command and runs without traces."""

    def missing(name: str) -> str:
        raise PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "version", missing)
    monkeypatch.setenv(ENDPOINTS[1], "http://127.0.0.1:4318")
    logs.configure(config)
    sends = Exporter(config)
    sends.step(time.monotonic())
    assert sends.pids() == set()
    sends.stop()
    assert "pip install 'kqueue[telemetry]'" in capfd.readouterr().err


@pytest.mark.nightly
class TestMore:
    def test_a_collector_that_does_not_answer_changes_nothing(
        self, services: Services, start: Callable[..., Fleet]
    ) -> None:
        """With a collector that accepts connections without answering, verdicts come and the fleet stops in time."""
        with socket.create_server(("127.0.0.1", 0)) as silent:
            fleet = start(variables={ENDPOINTS[1]: f"http://127.0.0.1:{silent.getsockname()[1]}"})
            services.until(lambda: sender(fleet), what="the process")
            ids = [services.submit("ok") for _ in range(5)]
            assert all(services.verdict(identity).passed for identity in ids)
            silent.settimeout(60)
            held, _ = silent.accept()
            with held:
                [waits] = sender(fleet)
                began = time.monotonic()
                assert fleet.stop(15) == 0
                assert time.monotonic() - began < 60
                assert not services.alive(waits)
