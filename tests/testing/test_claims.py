"""Messages of a process of tests are checked: none ends the run, opens a file here, or controls a terminal."""

from __future__ import annotations

import json
import linecache
import os
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from workers.testing import claims
from workers.testing.controller import Controller, _Run
from workers.testing.groups import Group, moved
from workers.testing.host import Job

WARNING = {"module": "builtins", "name": "UserWarning", "words": "careful", "file": "f.py", "line": 3, "source": "x()"}


@pytest.fixture
def hear(request: pytest.FixtureRequest) -> Callable[[dict[str, Any]], _Run]:
    """Return a function that passes a message about this test to a controlling pytest and returns its state."""
    controller = Controller.__new__(Controller)
    hook = SimpleNamespace(
        pytest_report_from_serializable=request.config.hook.pytest_report_from_serializable,
        pytest_runtest_logreport=dict,
        pytest_warning_recorded=SimpleNamespace(call_historic=dict),
    )
    controller._config = cast("pytest.Config", SimpleNamespace(hook=hook, option=SimpleNamespace(maxfail=0)))
    controller._sanitizes, controller._speaker = False, None
    controller._session = cast("pytest.Session", SimpleNamespace(shouldfail=False, shouldstop=False))

    def heard(word: dict[str, Any]) -> _Run:
        items = cast("list[pytest.Item]", [request.node])
        run = _Run(Group("m", list(items)), Group("m", list(items)))
        job = cast("Job", SimpleNamespace(sanitized=False))
        controller._hear(run, job, json.loads(json.dumps({"nodeid": request.node.nodeid, **word})))
        return run

    return heard


def report(request: pytest.FixtureRequest, **fields: object) -> dict[str, Any]:
    made = pytest.TestReport(request.node.nodeid, ("f.py", 1, "t"), {}, "passed", None, "call", duration=0.5)
    return request.config.hook.pytest_report_to_serializable(config=request.config, report=made) | fields


def test_a_malformed_word_is_noted_and_ends_nothing(hear: Callable[[dict[str, Any]], _Run]) -> None:
    """The run goes on, and the malformed message counts as a failure of its process."""
    warnings = ({"nodeid": None}, {"nodeid": "another.py::test"}, {"warning": {"module": "builtins", "name": "W"}})
    changes = ({"file": 3}, {"line": True}, {"line": 1 << 80}, {"source": None}, {"name": "W\0"}, {"name": "\udc80"})
    for word in (
        *({"at": "warning", "warning": WARNING} | changed for changed in warnings),
        *({"at": "warning", "warning": WARNING | changed} for changed in changes),
        {"at": "end", "status": True, "enough": False, "fault": ""},
        {"at": "end", "status": "x", "enough": False, "fault": ""},
        {"at": "stop", "how": "exit", "reason": "", "status": 1 << 80},
    ):
        assert "cannot be understood" in hear(word).lost, word


def failed(**parts: Any) -> dict[str, Any]:
    """Return fields of a failure report with these parts of its representation."""
    whole = {"reprcrash": None, "reprtraceback": {"reprentries": [], "extraline": None, "style": "long"}}
    return {"outcome": "failed", "longrepr": whole | {"chain": None, "sections": []} | parts}


NATIVE = {"reprentries": [{"type": "ReprEntryNative", "data": {"lines": [3]}}], "extraline": None, "style": "native"}
MALFORMED = [
    {"toterminal": "x"}, {"passed": True}, {"node": "gw0"}, {"_id": "x"}, {"duration": "abc"}, {"duration": True},
    {"start": None}, {"keywords": ["x"]}, {"wasxfail": 3}, {"sections": [["one"]]}, {"sections": [["title", 3]]},
    {"user_properties": [[1, 2]]}, {"outcome": "skipped"}, {"outcome": "skipped", "longrepr": ["f.py", 1]},
    {"outcome": "failed"}, {"outcome": "failed", "longrepr": {"reprcrash": 3}},
    failed(reprcrash={"path": "f.py", "lineno": 1, "message": 3}), failed(reprtraceback=NATIVE),
    {"outcome": "xfailed"}, {"outcome": "no name"}, {"outcome": "x" * 100},
]  # fmt: skip


def test_a_malformed_report_is_noted_and_ends_nothing(
    hear: Callable[[dict[str, Any]], _Run], request: pytest.FixtureRequest
) -> None:
    """The fields of a report must have pytest's types, because plugins rely on them."""
    for fields in MALFORMED:
        run = hear({"at": "report", "data": report(request, **fields)})
        assert ("cannot be understood" in run.lost, bool(run.failed)) == (True, False), fields


def test_a_report_is_heard(hear: Callable[[dict[str, Any]], _Run], request: pytest.FixtureRequest) -> None:
    """Reports of plugins with additional outcomes and fields are accepted."""
    for fields in (
        {},
        {"outcome": "rerun", "rerun": 0},
        {"outcome": "skipped", "longrepr": ["f.py", 1, "Skipped: so"]},
        {"outcome": "skipped", "wasxfail": "reason: known"},
        {"outcome": "failed", "longrepr": "words"},
        {"user_properties": [["size", {"x": 3}]], "sections": [["Captured stdout call", "seen"]]},
        {"_report_type": "SubTestReport", "_subtest.context": {"msg": "m", "kwargs": {"i": "3"}}},
    ):
        assert not hear({"at": "report", "data": report(request, **fields)}).lost, fields


def test_a_warning_opens_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A warning's line of source is the text in the message, or empty if the message has none."""
    secret = tmp_path / "secret"
    secret.write_text("the secret\n")
    monkeypatch.delattr(linecache, "getline")
    from _pytest.warnings import warning_record_to_str

    for source in ("x()", ""):
        told = warning_record_to_str(claims.warning(WARNING | {"file": str(secret), "line": 1, "source": source}))
        assert "the secret" not in told
        assert source in told


def test_no_text_commands_a_terminal() -> None:
    """Colours, tabs and new lines stay, and other control characters are escaped, except in test names."""
    said = {"nodeid": "\x1b", "data": {"nodeid": "\x1b", "more": {"nodeid": "\x1b"}}}
    said["texts"] = ["\x1b[1;31mred\x1b[0m\ttab\r\n", "\x1b]0;title\x07", "\x1b[2J", "\x9b2J", "over\rwritten", 3]
    assert claims.cleaned(said) == {
        "nodeid": "\x1b",
        "data": {"nodeid": "\x1b", "more": {"nodeid": "\\x1b"}},
        "texts": ["\x1b[1;31mred\x1b[0m\ttab\n", "\\x1b]0;title\\x07", "\\x1b[2J", "\\x9b2J", "over\nwritten", 3],
    }


def test_a_folder_is_moved_and_another_with_its_name_is_not() -> None:
    """`/app` is often the root folder in a container, and `backend/app` a different folder in it."""
    order = {
        "tests": ["backend/app/test_a.py::t", "test_b.py::t[one-/app/data]"],
        "options": {"rootdir": "/app", "url": "http://app/x", "n": 3},
        "args": ["--junitxml=/app/x.xml", "/apple", "/app-2/x", "../app/x", os.fspath(Path("/srv/app"))],
    }
    assert moved(order, "/app", "/there") == {
        "tests": ["backend/app/test_a.py::t", "test_b.py::t[one-/there/data]"],
        "options": {"rootdir": "/there", "url": "http://app/x", "n": 3},
        "args": ["--junitxml=/there/x.xml", "/apple", "/app-2/x", "../app/x", "/srv/app"],
    }
