"""Logs stay small while their writers run."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from kqueue.local import process


def test_a_log_that_has_grown_is_emptied_under_its_writer(tmp_path: Path) -> None:
    """The old content is kept in one file, and new lines start at the beginning."""
    log = tmp_path / "part.log"
    reader, writer = os.pipe()
    program = f"import os\nfor line in os.fdopen({reader}): print(line * 40, end='', flush=True)"
    child = process.Child([sys.executable, "-c", program], log=log, environment={}, keep=[reader])
    os.close(reader)
    with os.fdopen(writer, "w") as orders:

        def say(word: str) -> None:
            before = log.stat().st_size
            orders.write(word + "\n")
            orders.flush()
            process.wait_until_ready(child, "the writer", lambda: log.stat().st_size >= before + 40 * len(word), 30)

        say("small")
        process.bound_log(log, most_bytes=1000)
        assert not (tmp_path / "part.log.1").exists()
        say("a line that is longer than that")
        process.bound_log(log, most_bytes=1000)
        assert log.stat().st_size == 0
        say("after")
    assert child.wait(30)
    assert log.read_text() == "after\n" * 40
    before = tmp_path / "part.log.1"
    assert before.read_text().startswith("small\n")
    assert before.stat().st_mode & 0o777 == 0o600
