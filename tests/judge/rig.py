"""A judge for tests: a place, its fork server, records in memory, and a child for each evaluation."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import Self

from kqueue.config import load
from kqueue.contract import Outcome, Request
from workers.judge.api import Judges
from workers.judge.deaths import JudgeDied
from workers.judge.host import linux, uids
from workers.judge.keeper import handle
from workers.judge.place import Place
from workers.judge.ports import InMemoryRecords
from workers.judge.sandbox.seal import Role


class Rig:
    """Judges requests one after the other."""

    def __init__(
        self,
        device: str = "cpu",
        siblings: int = 1,
        number: int = 0,
        lock: Path | None = None,
        *,
        keeps: bool = False,
        disk: Path | None = None,
        stands: bool = False,
        builds: Path | str = "",
    ) -> None:
        """With ``stands`` one judge serves all requests; else each has one that is forked as this process is then."""
        self._directory = tempfile.TemporaryDirectory(prefix="kqueue-rig-", dir=disk)
        root = Path(self._directory.name)
        root.chmod(0o711)
        self._uid = uids.hold(load().candidate_uid) if os.getuid() == 0 else None
        self.place = Place(
            name=f"rig-{number}",
            number=number,
            device=device,
            siblings=siblings,
            scratch=root / "place",
            lock=lock or root / "device.lock",
            uid=self._uid.uid if self._uid else None,
            keeps_processes=keeps,
            build_store=str(builds),
            build_store_bytes=1 << 30,
        )
        self.records = InMemoryRecords()
        self.forkserver = handle.start(self.place)
        self._judges: Judges | None = None
        self._stands = stands

    def __enter__(self) -> Self:
        self.forkserver.wait_ready()
        return self

    def __exit__(self, *_: object) -> None:
        if self._judges is not None:
            self._judges.stop()
        self.forkserver.stop()
        self._directory.cleanup()
        if self._uid:
            self._uid.release()

    def judge(self, request: Request) -> Outcome:
        """The outcome, also of a judge that died."""
        return self.judge_at(self.place, request)

    def judge_at(self, place: Place, request: Request) -> Outcome:
        """As :meth:`judge`, at another place with the same fork server."""
        if self._judges is None:
            self._judges = Judges(self.forkserver)
        try:
            return self._judges.judge(request, place, self.records)
        except JudgeDied as died:
            return died.outcome
        finally:
            if not self._stands:
                self._judges.leave()
                self._judges = None

    def sealed(self, *roles: Role) -> list[int]:
        """The living sealed processes of these roles."""
        found: list[int] = []
        uid = self.place.uid
        # Linux's list of children can miss one while others end.
        by_uid = [pid for each in uids.all_of(uid) for pid in linux.living_of_uid(each)] if uid is not None else None
        for pid in linux.children(self.forkserver.pid) if by_uid is None else by_uid:
            with contextlib.suppress(OSError):  # it has ended
                name = Path(f"/proc/{pid}/comm").read_text().strip()
                if not linux.is_zombie(pid) and name in {f"kq-{role}" for role in roles}:
                    found.append(pid)
        return found

    def end_kept(self) -> None:
        """End what is kept, as the fork server does when its time is over."""
        for pid in self.sealed(Role.REFERENCE, Role.CANDIDATE):
            os.kill(pid, signal.SIGKILL)


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
        good = outcome.category is entry.expected
        shown = f"{outcome.category} {outcome.message[:150]!r}"
        if outcome.runtime and outcome.baseline:
            runtime, baseline = outcome.runtime, outcome.baseline
            shown += f" {runtime.median_ms:.4f} [{runtime.q1_ms:.4f} {runtime.q3_ms:.4f}] of {baseline.median_ms:.4f}"
            shown += f" ms ({runtime.count} by {runtime.basis}, null {runtime.null_ms:.4f})"
        different += not good
        print("ok  " if good else "BAD ", f"{took:6.2f}s", entry.name, "->", shown, flush=True)
        if not good:
            print("     expected", entry.expected, outcome.facts, "\n    ", outcome.log[-1500:], outcome.evidence)
    return different


if __name__ == "__main__":
    lane, *wanted = sys.argv[1:]
    device = "cpu"
    if lane == "gpu":
        from workers.judge.gpu.devices import devices

        device = devices()[0].uuid
    else:
        os.environ["TRITON_INTERPRET"] = "1"
    number = int(os.environ.get("RIG_NUMBER", "0"))
    siblings = int(os.environ.get("RIG_SIBLINGS", "1"))
    with Rig(device, siblings, number, Path("/tmp/rig.lock")) as rig:
        print("isolation", rig.forkserver.isolation)
        sys.exit(1 if gallery(rig, lane, wanted) else 0)
