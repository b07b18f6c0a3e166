"""A judge without a queue: a slot, its fork server, a database, and a child for each evaluation."""

from __future__ import annotations

import os
import pickle
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, Self
from uuid import uuid4

from kqueue.config import load
from kqueue.contract import Outcome, Phase, Request
from kqueue.store import engine as engines
from kqueue.store import evaluations
from kqueue.store import workers as fleet
from workers.judge.host import uids
from workers.judge.host.blackbox import BlackBox
from workers.judge.keeper import handle as launch
from workers.judge.trial import run
from workers.slot import Slot

_FORK_SERVER = """
import socket, sys
from workers.judge.keeper import forkserver
from workers.judge.candidate import harness
harness.preload()
forkserver.main(socket.socket(fileno=int(sys.argv[1])), int(sys.argv[2]), int(sys.argv[3]) or None)
"""


def start_forkserver(slot: Slot) -> launch.ForkServer:
    """A fork server of its own interpreter: this process may hold anything."""
    launch.prepare_scratch(slot)
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs:
        process = subprocess.Popen(
            [sys.executable, "-c", _FORK_SERVER, str(theirs.fileno()), str(os.getpid()), str(slot.uid or 0)],
            env=launch.clean_environment(os.environ),
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
        )
    process.returncode = 0  # reaped by the handle below
    return launch.ForkServer(slot, process.pid, ours)


class Rig:
    """Judges requests one after the other, each in a forked child as the fleet does."""

    def __init__(
        self, database_url: str, device: str = "cpu", siblings: int = 1, number: int = 0, lock: Path | None = None
    ) -> None:
        self._directory = tempfile.TemporaryDirectory(prefix="kqueue-rig-")
        root = Path(self._directory.name)
        root.chmod(0o711)
        self._uid = uids.hold(load().candidate_uid) if os.getuid() == 0 else None
        self.slot = Slot(
            worker_id=uuid4(),
            name=f"rig-{number}",
            number=number,
            device=device,
            lanes=("cpu",) if device == "cpu" else ("gpu",),
            siblings=siblings,
            scratch=root / "slot",
            lock=lock or root / "device.lock",
            uid=self._uid.uid if self._uid else None,
        )
        self.url = database_url
        self.engine = engines.connect(database_url, application="rig")
        fleet.register(
            self.engine,
            id=self.slot.worker_id,
            name=self.slot.name,
            host="localhost",
            pid=os.getpid(),
            lanes=list(self.slot.lanes),
            device=device,
        )
        self.blackbox = BlackBox()
        self.forkserver = start_forkserver(self.slot)

    def __enter__(self) -> Self:
        self.forkserver.wait_ready()
        return self

    def __exit__(self, *_: object) -> None:
        self.forkserver.stop()
        fleet.stop(self.engine, self.slot.worker_id)
        self.engine.dispose()
        self._directory.cleanup()
        if self._uid:
            self._uid.release()

    def judge(self, request: Request) -> Outcome | tuple[int, Phase | None, bool]:
        """The outcome; where the judge died instead: its wait status, its last phase, and whether it was overdue."""
        lane = self.slot.lanes[0]
        [submitted] = evaluations.submit(self.engine, [request.model_copy(update={"lane": lane})])
        claim = evaluations.claim(self.engine, submitted.evaluation_id, worker_id=self.slot.worker_id, lease_s=600)
        assert claim is not None
        self.blackbox.open(claim.evaluation_id, claim.number)
        reader, writer = os.pipe()
        pid = os.fork()
        if pid == 0:
            self._judge_in_child(claim, writer)
        os.close(writer)
        with os.fdopen(reader, "rb") as stream:
            data = stream.read()
        _, status = os.waitpid(pid, 0)
        if not data:
            record = self.blackbox.read()
            assert record is not None
            return status, record.phase, record.overdue
        outcome: Any = pickle.loads(data)
        if isinstance(outcome, str):
            raise AssertionError(outcome)
        return outcome

    def _judge_in_child(self, claim: Any, writer: int) -> None:
        import traceback

        try:
            self.engine.dispose(close=False)
            outcome: Any = run.evaluate(claim, self.slot, self.blackbox, self.forkserver, self.engine)
        except BaseException:  # noqa: BLE001 -- told to the parent
            outcome = traceback.format_exc()
        with os.fdopen(writer, "wb") as stream:
            pickle.dump(outcome, stream)
        os._exit(0)


def gallery(rig: Rig, lane: str, names: list[str]) -> int:
    """Judge gallery entries by name and print what came of them; returns how many differ."""
    sys.path.insert(0, str(Path(__file__).parents[2]))
    from examples.gallery import entries

    different = 0
    for entry in entries(lane):
        wanted = [name for name in names if not name.startswith("-")]
        if wanted and not any(name in entry.name for name in wanted):
            continue
        if any(name[1:] in entry.name for name in names if name.startswith("-")):
            continue
        begun = time.monotonic()
        outcome = rig.judge(entry.request(lane))
        took = time.monotonic() - begun
        if isinstance(outcome, tuple):
            shown = f"judge died: {outcome}"
            good = entry.expected.blame == "problem"
        else:
            good = outcome.category is entry.expected
            times = outcome.evidence.get("durations_s")
            shown = f"{outcome.category} {outcome.message[:150]!r}"
            if outcome.runtime and outcome.baseline:
                runtime, baseline = outcome.runtime, outcome.baseline
                shown += (
                    f" {runtime.median_ms:.4f} [{runtime.q1_ms:.4f} {runtime.q3_ms:.4f}] of {baseline.median_ms:.4f}"
                )
                shown += f" ms ({runtime.count} by {runtime.basis}, null {runtime.null_ms:.4f})"
            shown += f" {times}"
        different += not good
        print("ok  " if good else "BAD ", f"{took:6.2f}s", entry.name, "->", shown, flush=True)
        if not good and not isinstance(outcome, tuple):
            print("     expected", entry.expected, outcome.facts, "\n    ", outcome.log[-1500:])
    return different


if __name__ == "__main__":
    from kqueue.local.postgres import Postgres
    from kqueue.store import schema

    lane, *wanted = sys.argv[1:]
    device = "cpu"
    if lane == "gpu":
        from workers.judge.gpu.devices import devices

        device = devices()[0].uuid
    else:
        os.environ["TRITON_INTERPRET"] = "1"
    with tempfile.TemporaryDirectory() as place, Postgres(Path(place) / "pg", durable=False) as postgres:
        schema.upgrade(postgres.url)
        number = int(os.environ.get("RIG_NUMBER", "0"))
        siblings = int(os.environ.get("RIG_SIBLINGS", "1"))
        with Rig(postgres.url, device, siblings, number, Path("/tmp/rig.lock")) as rig:
            print("isolation", rig.forkserver.isolation)
            sys.exit(1 if gallery(rig, lane, wanted) else 0)
