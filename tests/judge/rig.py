"""A judge for tests: a slot, its fork server, a backend in memory, and a child for each evaluation."""

from __future__ import annotations

import contextlib
import os
import signal
import tempfile
from pathlib import Path
from typing import Self

from kqueue.config import load
from kqueue.contract import Outcome, Request
from workers.judge.api import Judges
from workers.judge.backend import InMemoryBackend
from workers.judge.deaths import JudgeDied
from workers.judge.forkserver import handle
from workers.judge.host import linux, uids
from workers.judge.sandbox.seal import Role
from workers.judge.slot_config import SlotConfig


class Rig:
    """Judges requests one after the other."""

    def __init__(
        self,
        device: str = "cpu",
        *,
        disk: Path | None = None,
        keeps: bool = False,
        stands: bool = False,
        builds: Path | str = "",
    ) -> None:
        """With ``stands`` one judge serves all requests. Otherwise each request gets a newly forked judge."""
        self._directory = tempfile.TemporaryDirectory(prefix="kqueue-rig-", dir=disk)
        root = Path(self._directory.name)
        root.chmod(0o711)
        self._uid = uids.hold(load().candidate_uid) if os.getuid() == 0 else None
        self.slot = SlotConfig(
            name="rig-0",
            number=0,
            device=device,
            siblings=1,
            scratch=root / "place",
            lock=root / "device.lock",
            uid=self._uid.uid if self._uid else None,
            keeps_processes=keeps,
            build_store=str(builds),
            build_store_bytes=1 << 30,
        )
        self.backend = InMemoryBackend()
        self.forkserver = handle.start(self.slot)
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

    def judge(self, request: Request, caches: str = "") -> Outcome:
        """Return the outcome, even if the judge died. ``caches`` differs for owners."""
        return self.judge_at(self.slot, request, caches)

    def judge_at(self, slot: SlotConfig, request: Request, caches: str = "") -> Outcome:
        """Return the outcome of a request in another slot with the same fork server."""
        if self._judges is None:
            self._judges = Judges(self.forkserver)
        try:
            return self._judges.judge(request, slot, self.backend, caches)
        except JudgeDied as died:
            return died.outcome
        finally:
            if not self._stands:
                self._judges.leave()
                self._judges = None

    def sealed(self, *roles: Role) -> list[int]:
        """Return the living sealed processes of these roles."""
        found: list[int] = []
        uid = self.slot.uid
        # Linux's list of children can miss one while other children end.
        by_uid = [pid for each in uids.all_of(uid) for pid in linux.living_of_uid(each)] if uid is not None else None
        for pid in linux.children(self.forkserver.pid) if by_uid is None else by_uid:
            with contextlib.suppress(OSError):  # the process has ended
                name = Path(f"/proc/{pid}/comm").read_text().strip()
                if not linux.is_zombie(pid) and name in {f"kq-{role}" for role in roles}:
                    found.append(pid)
        return found

    def end_kept(self) -> None:
        for pid in self.sealed(Role.REFERENCE, Role.CANDIDATE):
            os.kill(pid, signal.SIGKILL)
