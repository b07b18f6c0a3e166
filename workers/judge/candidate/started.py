"""The start of a command line that runs a program under compute-sanitizer."""

from __future__ import annotations


def watching(sanitizer: str, log: str) -> list[str]:
    """Return the prefix of a command line that runs a program under compute-sanitizer with a log file."""
    return [sanitizer, "--tool", "memcheck", "--log-file", log]
