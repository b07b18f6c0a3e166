"""Results of `kqueue pytest --fleet` from a verdict."""

from __future__ import annotations

import json
import time
from concurrent.futures import Future
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from uuid import uuid4

import pytest

from kqueue.client import Ticket
from kqueue.contract import Verdict
from workers.testing import fleet

NOW = datetime.now(UTC).isoformat()
END = {"at": "end", "status": 0, "enough": False, "fault": ""}


def concluded(
    *words: dict[str, Any],
    category: str = "passed",
    sanitized: bool = False,
    findings: str | None = None,
    **fields: Any,
) -> fleet.Evaluation:
    """Return a process of tests with this verdict."""
    known: dict[str, Any] = {"evaluation_id": str(uuid4()), "category": category, "message": "", "backend": "pytest"}
    known |= {"lane": "cpu", "attempts": 1, "written_by": "worker", "submitted_at": NOW, "finished_at": NOW}
    tests = {"words": "\n".join(map(json.dumps, words)), "findings": findings}
    verdict = Verdict.load({**known, "evidence": {"tests": tests}, **fields})
    future: Future[Verdict] = Future()
    future.set_result(verdict)
    ticket = cast("Ticket", SimpleNamespace(watch=lambda: future))
    evaluation = fleet.Evaluation(ticket, Path("/home/me/project"), 3.0, sanitized=sanitized)
    assert evaluation.watch()
    return evaluation


def test_the_last_end_with_a_status_counts() -> None:
    """The last end counts, like in the judge, because a test can write earlier ones."""
    assert concluded({"at": "end", "status": "x"}, END | {"status": 5}, END, END | {"status": True}).status == 0
    assert concluded({"at": "end", "status": "x", "fault": ""}).status is None


LATE = {"category": "timeout", "phase": "check", "message": "the check phase did not end within its deadline"}
TOGETHER = "the tests of one process can take 720 s together, imports and collection included"


@pytest.mark.parametrize(
    ("said", "fields", "why"),
    [
        (["start"], {}, ""),
        (["start", "finish", "start"], {}, ""),
        (["start", "finish"], {}, f"was ended: {LATE['message']}"),
        (["start"], {"message": TOGETHER}, f"was ended: {TOGETHER}"),
        ([], {"phase": "load", "message": "the load phase did not end"}, "was ended: the load phase did not end"),
    ],
)
def test_a_test_s_limit_is_named_where_it_was_a_test_s(said: list[str], fields: dict[str, str], why: str) -> None:
    """The test is named, except when imports, a module's teardown, or all tests together took too long."""
    found = concluded(*({"at": at, "nodeid": "x", "location": None} for at in said), **LATE | fields)
    assert (found.overdue, found.why) == (not why, why)


def test_a_log_names_the_folder_here() -> None:
    """The folder's name can contain characters with a special meaning in a pattern's replacement."""
    there = f"/tmp/kqueue-0/slot-1/{'0a' * 16}/repository"
    for root in (Path("/home/me/project"), Path("/home/\\g<9>\\1")):
        log = f'File "{there}/a.py", line 1\n-I{there}/b file://{there}/c\n{there}-not'
        expected = f'File "{root}/a.py", line 1\n-I{root}/b file:{root}/c\n{there}-not'
        assert fleet.here(log, root) == expected


def test_a_log_is_read_in_time_that_grows_with_it() -> None:
    """Reading takes linear time for the slowest content that a host can send."""
    for piece in ("/", "/a", "a", "/" + "0" * 32, "a/" * 5 + " "):
        log = (piece * (48 << 10))[: 48 << 10]
        began = time.process_time()
        assert fleet.here(log, Path("/x")) == log
        assert time.process_time() - began < 2


def test_what_a_host_says_commands_no_terminal() -> None:
    """Reports, captured output and a tool's findings contain no terminal commands."""
    title = "\x1b]0;mine\x07"
    found = concluded(
        {"at": "stop", "how": "exit", "reason": title, "status": None}, END, log=f"a{title}\x1b[31mb\n", findings=title
    )
    shown = [word.get("reason") for word in found.heard()] + [found.output().decode(), found.findings, found.last_words]
    assert not any("\x1b]" in text or "\x07" in text for text in shown if text)
    assert "\x1b[31mb" in found.last_words


def test_nothing_is_too_deep() -> None:
    """A message can be nested as deeply as JSON's reader accepts."""
    for depth in range(100, 1200, 50):
        said = '{"at": "x", "y": ' + "[" * depth + "]" * depth + "}\n" + json.dumps(END)
        verdict = SimpleNamespace(evidence=SimpleNamespace(tests=SimpleNamespace(words=said)))
        assert fleet.words(cast("Verdict", verdict))[-1] == END


def test_a_tool_that_could_not_begin_is_named() -> None:
    """The cause of its process's end is reported, unless the tool has findings."""
    found = concluded(category="crashed", message="no device", sanitized=True, phase="load", facts={"status": 256})
    assert found.findings.startswith("crashed: no device")
    found = concluded(END, sanitized=True, findings="Invalid read")
    assert found.findings == "Invalid read"
