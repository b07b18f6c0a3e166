"""The words about compilers' errors: real ones of all compilers, without the compilers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from kqueue.categories import Category
from kqueue.contract import Facts, Outcome, Phase
from kqueue.feedback import describe
from workers.judge.candidate.compilers import complaint

#: Texts of Triton 3.9, nvcc and NVRTC 13.0, GCC, Numba 0.68, TileLang 0.1.15 and CuTe DSL 4.8, each with its kernel,
#: the reason in it, and the kernel's line if the text names one.
_ERRORS = [json.loads(line) for line in Path(__file__).with_name("recorded").joinpath("compile_errors.jsonl").open()]


@pytest.mark.parametrize("error", _ERRORS, ids=[f"{error['compiler']} {error['name']}" for error in _ERRORS])
def test_an_error_begins_with_its_reason_and_line(error: dict[str, Any]) -> None:
    """The verdict's message begins with the kernel's line and the compiler's reason, and its words show that line."""
    message = complaint(error["text"], error["kernel"])
    where = "" if error["line"] is None else f"line {error['line']}: "
    assert message.partition("\n")[0] == where + error["reason"]
    outcome = Outcome(
        category=Category.COMPILE_ERROR, message=message, phase=Phase.LOAD, facts=Facts(exception="Error")
    )
    words = describe(outcome, error["kernel"])
    assert words.startswith(f"FAILED: compile_error in the phase load: {where}{error['reason'][:40]}")
    assert not any(noise in words for noise in ("-MMD", "[1/", "ninja", "LED: [", "(step", "#include <tl", "/tmp/"))
    if error["line"] is not None:
        assert f"> {error['line']:4d} | {error['kernel'].splitlines()[error['line'] - 1]}" in words


def test_an_error_without_words_has_no_message() -> None:
    """A verdict then names the exception. A line that occurs twice in the kernel is not guessed."""
    assert complaint("", "") == ""
    twice = "main.cpp:1:1: error: no\n    1 | f();\n      | ^\n"
    assert complaint(twice, "f();\n").startswith("line 1: no\n")
    assert complaint(twice, "f();\nf();\n").startswith("no\n")
