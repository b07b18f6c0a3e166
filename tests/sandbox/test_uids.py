"""Uids of sealed processes: no two fleets of a host have the same."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from workers.judge.host import uids

#: Beyond those of fleets, so that nobody's processes have it.
FIRST = 63000


@pytest.mark.skipif(os.geteuid() != 0, reason="only root's fleets have uids to give")
def test_who_has_other_temporary_files_gets_another_uid(tmp_path: Path) -> None:
    """As jobs of a cluster have: else each fleet would kill the other's candidates."""
    mine = uids.hold(FIRST)
    program = f"from workers.judge.host import uids; print(uids.hold({FIRST}).uid)"
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, env=os.environ | {"TMPDIR": str(tmp_path)}, capture_output=True, text=True)
    mine.release()
    assert int(done.stdout) > mine.uid, done.stderr
