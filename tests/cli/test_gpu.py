"""`kqueue gpu`, and GPUs and paused workers in the output of `kqueue status` and `kqueue doctor`."""

from __future__ import annotations

import json
import socket
from typing import Any
from uuid import uuid4

import pytest
from sqlalchemy import Engine

from kqueue.contract import Request
from kqueue.store import evaluations, gpus, workers

UUIDS = ("GPU-11111111-aaaa", "GPU-22222222-bbbb")


@pytest.fixture
def host(engine: Engine) -> str:
    """Register this host with two GPUs and a worker on the first."""
    host = socket.gethostname()
    for index, uuid in enumerate(UUIDS):
        gpus.register(engine, host=host, index=index, uuid=uuid, name="NVIDIA H200")
    gpus.see(engine, {UUIDS[0]: {"temperature_c": 61, "xids": [{"xid": 31, "at": "2026-01-01T00:00:00+00:00"}]}})
    workers.register(engine, id=uuid4(), name="gpu0-0@h", host=host, pid=1, lanes=["gpu", "gpu.h200"], device=UUIDS[0])
    return host


def test_a_gpu_is_drained_and_resumed_by_index_or_uuid(cli: Any, host: str, engine: Engine, services: Any) -> None:
    """The list, the status and the doctor show the drained GPU, as text and as JSON."""
    done = cli("gpu", "drain", "0", "--reason", "dust \x1b[31m")
    assert (done.returncode, done.stdout) == (0, f"GPU 0 of {host} is drained, and 0 evaluations run on it\n")
    listed = cli("gpu", "list").stdout
    assert "drained: dust" in listed
    assert "\x1b" not in listed
    assert "Xid 31" in listed
    records = [json.loads(line) for line in cli("gpu", "list", "--json").stdout.splitlines()]
    assert [(record["state"], record["facts"].get("temperature_c")) for record in records] == [
        ("drained", 61),
        ("serving", None),
    ]
    told = json.loads(cli("status", "--json").stdout)
    assert [gpu["uuid"] for gpu in told["gpus_not_serving"]] == [UUIDS[0]]
    assert told["workers"][0]["paused"].startswith("GPU 0 is drained: dust")
    assert "is out of service" in cli("status").stdout
    assert (services("gpus").state, "GPU 0 is drained" in services("gpus").detail) == ("warn", True)
    assert cli("gpu", "resume", UUIDS[0][:8]).stdout == f"GPU 0 of {host} is in service again\n"
    assert gpus.find(engine)[0].state == "serving"


def test_the_status_tells_who_waits_for_memory(cli: Any, host: str, engine: Engine) -> None:
    """Waiting processes are shown as text and as JSON, but not for a GPU without a live worker."""
    waiting = [("gpu0-0", 90 << 30, 75.0), ("9b2f\x1b[31m", 1 << 29, 2.0)]
    for uuid in UUIDS:
        gpus.see_memory(engine, uuid, booked_bytes=60 << 30, capacity_bytes=126 << 30, waiting=waiting)
    identity = uuid4()
    workers.register(engine, id=identity, name=f"gpu0-0@{host}", host=host, pid=2, lanes=["gpu"], device=UUIDS[0])
    request = Request(problem="class Model: ...", kernel="class ModelNew: ...", backend="cuda", lane="gpu")
    [submitted] = evaluations.submit(engine, [request])
    assert evaluations.claim(engine, submitted.evaluation_id, worker_id=identity, lease_s=30)
    [told] = json.loads(cli("status", "--json").stdout)["gpu_memory"]
    waits = told.pop("waiting")
    assert told == {"uuid": UUIDS[0], "host": host, "index": 0, "booked_bytes": 60 << 30, "capacity_bytes": 126 << 30}
    assert [(one["label"], one["wanted_bytes"], one["evaluation"]) for one in waits] == [
        ("gpu0-0", 90 << 30, str(submitted.evaluation_id)),
        ("9b2f\x1b[31m", 1 << 29, None),
    ]
    status = cli("status").stdout
    assert "waiting for GPU memory" in status
    [line] = [line for line in status.splitlines() if "90.0" in line]
    assert line.split() == f"0 of {host} 60.0 of 126.0 gpu0-0 {submitted.evaluation_id} 90.0 for 1m".split()
    assert "\x1b" not in status
    gpus.see_memory(engine, UUIDS[0], booked_bytes=0, capacity_bytes=None, waiting=())
    assert json.loads(cli("status", "--json").stdout)["gpu_memory"] == []
    assert "waiting for GPU memory" not in cli("status").stdout
