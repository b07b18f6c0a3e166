"""compute-sanitizer, under which failed tests are run once more."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

import pytest

from kqueue.errors import ConfigError
from workers.judge.candidate import started
from workers.judge.host import toolchain

#: Number of characters of its findings that a report shows.
_SHOWN: Final = 10_000
#: Factor by which tests' time limits grow under it.
SLOWDOWN: Final = 10


def command() -> list[str]:
    """Return the command that runs a program under it, with ``%s`` for the file of the findings."""
    program = toolchain.program("compute-sanitizer")
    if program is None:
        raise ConfigError(
            "--kqueue-sanitize: compute-sanitizer is neither on PATH nor below CUDA_HOME. Install the CUDA toolkit"
        )
    return started.watching(program, "%s")


def findings(log: Path) -> str:
    """Return the findings in a log, shortened for a report."""
    try:
        return shown(log.read_text(errors="replace"))
    except OSError:
        return shown("")


def shown(text: str) -> str:
    """Return compute-sanitizer's output shortened for a report."""
    text = text.strip()
    if not text:
        return "it wrote nothing"
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}\n... and {len(text) - _SHOWN} characters more"


def add(report: pytest.TestReport, title: str, text: str) -> None:
    """Add findings to a failed report, where the terminal and JUnit's XML show them."""
    longrepr: Any = report.longrepr
    if hasattr(longrepr, "addsection"):
        longrepr.addsection(title, text)
    else:
        report.longrepr = f"{report.longreprtext}\n--- {title} ---\n{text}"
