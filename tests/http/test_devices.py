"""GPUs by number, with a real supervisor of fake GPUs: preferred, listed, tested and reset."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any
from uuid import uuid4

import httpx
import pytest

from kqueue import backends
from kqueue.store import gpus
from tests.fleet.told import Fleet, Services
from tests.health.gpus import Gpus, Watcher
from tests.http.standin import Served

pytestmark = pytest.mark.timeout(600)


@pytest.fixture(scope="module")
def fleet(start_gpu_fleet: Callable[..., Fleet]) -> Fleet:
    """A slot on each of two GPUs."""
    return start_gpu_fleet()


@pytest.fixture(scope="module")
def http(services: Services, fleet: Fleet) -> Iterator[httpx.Client]:
    """A server of this fleet."""
    served = Served(services.config(http_tokens="trust-local-users"))
    with served.client() as client:
        client.timeout = httpx.Timeout(300)
        yield client
    served.close()


@pytest.fixture(autouse=True)
def _both_serve(services: Services, fleet: Fleet, fake: Gpus, watcher: Watcher) -> None:
    """Return both GPUs to service, with live workers and self-tests that pass."""
    fake.ends("pass")
    for number in (0, 1):
        if watcher.gpu(number).state == "drained":
            gpus.resume(services.engine, fake.uuids[number])
        watcher.until_state("serving", number)
    services.until(lambda: len([w for w in fleet.live() if w.paused is None]) == 2, 90, "both workers")


def evaluate(http: httpx.Client, what: str, **changes: Any) -> httpx.Response:
    """Submit a distinct evaluation for a scripted judge."""
    kernel = f"{what} {uuid4().hex}"
    return http.post("/eval", json={"original_model_src": "p", "custom_model_src": kernel, "backend": "cuda"} | changes)


def test_what_is_told_of_devices(http: httpx.Client, services: Services, fake: Gpus, watcher: Watcher) -> None:
    """GPUs are numbered by host and index, with the supervisor's last observation, and idle ones are available."""
    found = services.until(lambda: (h := http.get("/health").json())["available_gpu_devices"] == 2 and h)
    assert (found["status"], found["total_gpu_devices"], found["available_device_ids"]) == ("healthy", 2, [0, 1])
    assert found["supported_backends"] == list(backends.registered())
    assert http.get("/status").json()["device_status"] == {"cuda:0": "idle", "cuda:1": "idle"}
    fake.say(1, temperature=66)
    shown = services.until(
        lambda: (s := http.get("/gpu_status").json())["devices"][1]["facts"].get("temperature_c") == 66 and s
    )
    assert (shown["total_devices"], shown["devices"][1]["uuid"]) == (2, fake.uuids[1])
    assert shown["devices"][1]["memory_allocated"] == 1 << 30
    gpus.see_memory(services.engine, fake.uuids[1], booked_bytes=60, capacity_bytes=100, waiting=[("gpu1-0", 90, 5.0)])
    first, second = services.until(lambda: (g := http.get("/v1/fleet").json()["gpus"])[1]["memory"] and g, 30)
    assert first["memory"] is None
    [waits] = second["memory"].pop("waiting")
    assert second["memory"] == {"booked_bytes": 60, "capacity_bytes": 100}
    assert (waits["label"], waits["wanted_bytes"]) == ("gpu1-0", 90)
    gpus.see_memory(services.engine, fake.uuids[1], booked_bytes=0, capacity_bytes=None, waiting=())
    gpus.drain(services.engine, fake.uuids[1], reason="a new fan")
    found = services.until(lambda: (h := http.get("/health").json())["failing_gpu_devices"] and h)
    assert (found["status"], found["available_device_ids"]) == ("degraded", [0])
    assert [device["status"] for device in found["devices"]] == ["healthy", "error"]
    assert "a new fan" in found["devices"][1]["error"]
    assert http.get("/status").json()["device_status"]["cuda:1"] == "error"
    answer = http.post("/reset_gpu/7")
    assert answer.status_code == 400
    assert "1 (NVIDIA H200" in answer.json()["detail"], "the answer names those there are"
    assert http.post("/reset_gpu/x").status_code == 422


def test_a_reset_ends_the_workers_and_tests_the_gpu(http, services, fleet, fake) -> None:
    """A reset hands evaluations back after a grace, restarts the workers and tests the GPU. The other GPU continues."""
    before = {worker.device: worker.pid for worker in fleet.live()}
    running = [services.submit("sleep-once", lane="gpu") for _ in range(2)]
    attempts = [services.started(identity) for identity in running]
    device = next(w for w in fleet.live() if w.id == attempts[0].worker_id).device
    number, tests = fake.uuids.index(device), len(fake.tests())
    answer = http.post(f"/reset_gpu/{number}", params={"grace_s": 1})
    assert answer.status_code == 200
    assert (answer.json()["status"], answer.json()["device_id"]) == ("reset", number)
    assert fake.tests()[tests:] == [device]
    after = {worker.device: worker.pid for worker in fleet.live()}
    assert after[device] != before[device]
    assert after[fake.uuids[1 - number]] == before[fake.uuids[1 - number]]
    assert services.verdict(running[0]).passed
    assert services.attempts(running[0])[0].handed_back
    assert not services.attempts(running[1])[0].handed_back
    httpx.post(f"{http.base_url}/v1/evaluations/{running[1]}/cancel").raise_for_status()


def test_what_probes_took_out_of_service_stays_there(http, services, fake, watcher) -> None:
    """Passed self-tests do not return it, only the operator's command does, and the answer names that command."""
    with services.engine.begin() as connection:
        gpus.quarantine(connection, fake.uuids[0], reason="a cheat passed")
    tests = len(fake.tests())
    answer = http.post("/reset_gpu/0", params={"grace_s": 0})
    assert answer.status_code == 409
    assert "a cheat passed" in answer.json()["detail"]
    assert "kqueue gpu resume" in answer.json()["detail"]
    for path in ("/cleanup", "/reset_devices"):
        assert http.post(path, params={"wait_s": 60}).status_code == 200
    assert watcher.gpu(0).is_left_alone
    assert fake.uuids[0] not in fake.tests()[tests:]
    gpus.resume(services.engine, fake.uuids[0])
    watcher.until_state("serving", 0)


@pytest.mark.nightly
def test_a_preferred_device_and_one_that_does_not_pass(http, services: Services, fake: Gpus) -> None:
    """An evaluation goes to the GPU's lane, and a GPU out of service is skipped until it passes a self-test."""
    result = evaluate(http, "ok", preferred_device=1).json()
    assert (result["metadata"]["lane"], result["metadata"]["preferred_device"]) == ("gpu.h200", 1)
    assert result["metadata"]["device"] == f"cuda:{result['metadata']['device_id']}"
    refused = evaluate(http, "ok", preferred_device=2)
    assert (refused.status_code, "0 (NVIDIA H200" in refused.json()["detail"]) == (400, True)
    fake.ends("fail")
    answer = http.post("/reset_gpu/1", params={"grace_s": 0})
    assert (answer.status_code, answer.json()["status"]) == (200, "quarantined")
    services.until(lambda: http.get("/health").json()["failing_gpu_devices"] == 1)
    result = evaluate(http, "ok", preferred_device=1).json()
    assert (result["metadata"]["lane"], result["metadata"]["device_id"]) == ("gpu", 0)
    fake.ends("pass")
    reset = http.post("/reset_devices", params={"wait_s": 120}).json()
    assert [device["status"] for device in reset["devices"]] == ["healthy", "healthy"]
