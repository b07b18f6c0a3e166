"""``/metrics``: each verdict counted once, the current state, and no figures for clients without the scope."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any
from uuid import UUID, uuid4

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families
from sqlalchemy import Engine, text

from kqueue.categories import Category
from kqueue.config import Config
from kqueue.contract import Outcome
from kqueue.evidence import Evidence
from kqueue.features.probes import fleet as probes
from kqueue.states import ProbeKind
from kqueue.store import evaluations, gpus, workers
from tests.http.standin import Served, submit
from tests.samples import ended, passed, request_fields
from tests.store.steps import change
from tests.waiting import until


@pytest.fixture
def http(
    serve: Callable[[Config], Served], config: Config, worker_id: UUID, token: Callable[..., str]
) -> Iterator[httpx.Client]:
    """A client of a server that has not counted yet. Its token sees the work of all owners."""
    with serve(config).client(token("admin", "read:all")) as client:
        yield client


def samples(http: httpx.Client) -> dict[str, dict[tuple[tuple[str, str], ...], float]]:
    """Return the samples by name and labels, as Prometheus parses them."""
    answer = http.get("/metrics").raise_for_status()
    assert answer.headers["content-type"].startswith("text/plain; version=")
    found: dict[str, dict[tuple[tuple[str, str], ...], float]] = {}
    for family in text_string_to_metric_families(answer.text):
        for sample in family.samples:
            found.setdefault(sample.name, {})[tuple(sorted(sample.labels.items()))] = sample.value
    return found


def only(found: dict[tuple[tuple[str, str], ...], float], **labels: str) -> float:
    """Return the sum of the samples with these labels."""
    return sum(value for known, value in found.items() if labels.items() <= dict(known).items())


def test_every_verdict_is_counted_once(
    http: httpx.Client, judge, engine: Engine, serve, config: Config, token: Callable[..., str]
) -> None:
    """Scrapes and late commits count no verdict twice, and a server starts at zero."""
    first, second, third, late, waiting = (submit(http, number) for number in range(5))
    for one in (first, second):
        judge(one)
    judge(third, ended(Category.WRONG_VALUES))
    for _ in range(2):
        found = samples(http)
        count = found["kqueue_evaluations_total"]
        assert only(count, category="passed", blame="none", lane="cpu") == 2
        assert only(count, category="wrong_values", blame="candidate") == 1
        assert sum(count.values()) == 3
        assert only(found["kqueue_wait_seconds_count"], priority="batch") == 3
        assert only(found["kqueue_verdict_seconds_count"], lane="cpu") == 3
        assert only(found["kqueue_queued"], lane="cpu") == 2
        assert only(found["kqueue_recorded_total"], by="judge") == 3
    judge(late)
    with engine.begin() as connection:  # like a transaction that began earlier and took longer
        earlier = "UPDATE verdicts SET finished_at = (SELECT min(finished_at) FROM verdicts) WHERE evaluation_id = :id"
        connection.execute(text(earlier), {"id": late})
    http.post(f"/v1/evaluations/{waiting}/cancel").raise_for_status()
    found = samples(http)
    assert sum(found["kqueue_evaluations_total"].values()) == 5
    assert only(found["kqueue_recorded_total"], by="client") == 1
    assert "kqueue_queued" not in found
    ahead = "UPDATE verdicts SET finished_at = now() + interval '10 min' WHERE evaluation_id = :id"
    judge(far := submit(http, 5))
    change(engine, ahead, id=far)
    for _ in range(2):
        assert sum(samples(http)["kqueue_evaluations_total"].values()) == 6, "minutes lie between two verdicts"
    with serve(config).client(token("read:all")) as another:
        assert sum(samples(another).get("kqueue_evaluations_total", {}).values()) == 0


def test_steps_and_other_attempts_are_told(http: httpx.Client, engine: Engine, worker_id: Any) -> None:
    """Seconds of exclusive device use are summed, and only failed attempts are counted."""

    def judged(number: int, *outcomes: Outcome, changed: str = "") -> None:
        identity = submit(http, number)
        for outcome in outcomes:
            claimed = evaluations.claim(engine, identity, worker_id=worker_id, lease_s=30)
            assert claimed is not None
            evaluations.finish(engine, identity, claimed.number, outcome, written_by="judge", retry_delay_s=0)
        if changed:
            change(engine, f"UPDATE verdicts SET {changed} WHERE evaluation_id = :id", id=identity)

    lost, right = ended(Category.WORKER_LOST), passed(evidence=Evidence(durations_s={"alone_a": 0.25, "check": 0.5}))
    judged(0, lost, right)
    judged(1, lost, right, changed="reused_from = gen_random_uuid(), judged_at = now()")
    judged(2, lost, right, changed="""evidence = '{"attempts": [{"category": "worker_lost", "handed_back": true}]}'""")
    found = samples(http)
    assert only(found["kqueue_failed_attempts_total"], category="worker_lost") == 1
    assert found["kqueue_failed_attempts_total"][(("category", "judge_error"),)] == 0, "it is there before it rises"
    assert (("blame", "fleet"), ("category", "judge_error"), ("lane", "cpu")) in found["kqueue_evaluations_total"]
    assert only(found["kqueue_reused_total"], lane="cpu") == 1
    assert only(found["kqueue_device_exclusive_seconds_total"], lane="cpu") == pytest.approx(0.25)
    assert only(found["kqueue_step_seconds_sum"], step="check") == pytest.approx(0.5)


def test_devices_and_slots_are_told(http: httpx.Client, engine: Engine) -> None:
    """A GPU has state, temperature, clock and memory, and slots are counted by state."""
    gpus.register(engine, host="far", index=3, uuid="GPU-3", name="NVIDIA H200")
    facts = {"temperature_c": 61, "sm_mhz": 1980, "memory_used_bytes": 5, "throttle": ["SwThermalSlowdown"]}
    gpus.see(engine, {"GPU-3": facts})
    gpus.register(engine, host="far", index=0, uuid="GPU-old", name="NVIDIA H200")
    gpus.drain(engine, "GPU-old", reason="broken")
    gpus.register(engine, host="far", index=0, uuid="GPU-new", name="NVIDIA H200")
    lanes = ["gpu", "gpu.h200"]
    workers.register(engine, id=uuid4(), name="g", host="far", pid=1, lanes=lanes, device="GPU-3", paused="no room")
    gpus.drain(engine, "GPU-3", reason="dust")
    submit(http, 0)
    change(engine, "UPDATE evaluations SET submitted_at = now() - interval '100 s'")

    def drained() -> dict[str, Any] | None:
        found = samples(http)
        return found if only(found.get("kqueue_gpu_state", {}), host="far", gpu="3", state="drained") == 1 else None

    found = until(drained, what="the drained GPU")  # the view of the fleet is cached for a second
    assert only(found["kqueue_gpu_state"], state="serving", gpu="3") == 0
    assert only(found["kqueue_gpu_state"], state="serving", gpu="0") == 1, "the one that was put in last"
    assert only(found["kqueue_gpu_state"], state="drained", gpu="0") == 0
    assert only(found["kqueue_serving"], lane="cpu") == 1
    assert only(found["kqueue_serving"], lane="gpu") == 0
    assert only(found["kqueue_gpu_serves"], gpu="3") == 0
    assert only(found["kqueue_gpu_temperature_celsius"], name="NVIDIA H200") == 61
    assert only(found["kqueue_gpu_clocks_reason"], reason="SwThermalSlowdown") == 1
    assert only(found["kqueue_slots"], host="far", device="gpu", state="paused") == 1
    assert only(found["kqueue_slots"], device="cpu", state="idle") == 1
    assert 100 <= only(found["kqueue_oldest_queued_seconds"], lane="cpu") < 1000
    assert "kqueue_gpu_memory_bytes" not in found, "what is not known is not told"


def test_lanes_are_bounded(http: httpx.Client, engine: Engine, judge: Callable[..., None]) -> None:
    """Lanes from the 33rd on share one label, because each label costs memory in Prometheus."""
    entries = [request_fields(number) for number in range(36)]
    batch = http.post("/v1/evaluations/batch", json={"entries": entries}).raise_for_status().json()
    for number, entry in enumerate(batch["evaluations"]):
        judge(entry["evaluation_id"])
        with engine.begin() as connection:
            given = {"lane": f"gpu.made-up-{number}", "id": entry["evaluation_id"]}
            connection.execute(text("UPDATE evaluations SET lane = :lane WHERE id = :id"), given)
    count = samples(http)["kqueue_evaluations_total"]
    assert len({dict(labels)["lane"] for labels in count}) == 33
    assert only(count, lane="other") == 5
    assert "cpu" in {dict(labels)["lane"] for labels in count}, "a lane with a live worker has its name"
    assert sum(count.values()) == 36


def test_probes_are_told_and_counted_as_nobodys(http: httpx.Client, judge, engine: Engine, worker_id: Any) -> None:
    """Metrics have the probes' results, the lanes paused by them, and the number of suspect verdicts."""
    judge(submit(http, 0))
    probed = probes.submit(engine, "cpu", ProbeKind.CHEAT)
    assert "kqueue_queued" not in samples(http)
    judge(probed)
    probes.step(engine, share=0, live_s=60)
    # The view of the fleet is cached for up to a second.
    until(lambda: sum(samples(http).get("kqueue_probes_day", {}).values()), what="the record")
    found = samples(http)
    assert sum(found["kqueue_evaluations_total"].values()) == 1
    assert only(found["kqueue_probes_day"], finding="cheat_accepted") == sum(found["kqueue_probes_day"].values()) == 1
    for name in ("kqueue_probe_paused", "kqueue_probe_suspect_verdicts"):
        assert only(found[name], device="cpu") == 1
    assert "kqueue_probe_clock_bias_ratio" not in found


def test_only_readers_of_all_owners_see_evaluations(http: httpx.Client, judge, token: Callable[..., str]) -> None:
    """Without ``read:all``, and in an agent's session, the metrics are those of queues, slots, GPUs and probes."""
    judge(submit(http, 0))
    submit(http, 1)
    everything = samples(http)
    load = {"kqueue_queued", "kqueue_oldest_queued_seconds", "kqueue_running", "kqueue_slots", "kqueue_serving"}
    for headers in ({"Authorization": f"Bearer {token('admin')}"}, {"Kqueue-Session": "s"}):
        answer = http.get("/metrics", headers=headers).raise_for_status()
        seen = {family.name for family in text_string_to_metric_families(answer.text)}
        assert load <= seen
        assert all(re.match("kqueue_(gpu|probe)", name) for name in seen - load)
        assert "passed" not in answer.text
    assert {"kqueue_evaluations_total", "kqueue_step_seconds_sum", "kqueue_owner_step_seconds_total"} <= {*everything}
