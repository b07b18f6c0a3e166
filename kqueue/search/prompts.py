"""The prompts for proposers: the task, the kernel to improve with its verdict, and a summary of earlier attempts."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Final

from kqueue.feedback import instruction
from kqueue.store.searches import Proposal

_MOST_FAILURES: Final = 12
_MOST_GAINS: Final = 12
_MESSAGE_CHARACTERS: Final = 300


def prompt(problem: str, backend: str, kernel: str, feedback: str, summary: str | None) -> str:
    """Return the text that asks for a kernel better than ``kernel``."""
    so_far = f"\nLessons of earlier attempts:\n{summary.strip()}\n" if summary else ""
    return (
        f"{instruction(problem, backend)}\n"
        f"Start from this kernel:\n\n```python\n{kernel.strip()}\n```\n\n"
        f"Its verdict:\n{feedback.strip()}\n{so_far}\n"
        "If it failed, repair it. If it is correct, make it faster. Change the parts that the verdict points to."
    )


def digest(proposals: Sequence[Proposal]) -> str:
    """Return the failures and improvements of a search so far as text, the latest first."""
    ended = {one.number: one for one in proposals if one.ended_at is not None}
    lines: list[str] = []
    failures: dict[str, list[Proposal]] = defaultdict(list)
    for one in reversed(ended.values()):
        if one.category != "passed" and one.scores is not None:
            failures[f"{one.category or 'no kernel'}: {_first_line(one.message)}"].append(one)
    if failures:
        lines.append("Failed:")
    for failure, proposals_failed in list(failures.items())[:_MOST_FAILURES]:
        lines.append(f"- {failure} ({_numbers(proposals_failed)})")
    gains = [
        (one, ended[one.parent])
        for one in reversed(ended.values())
        if one.parent in ended and _better(one, ended[one.parent])
    ]
    if gains:
        lines.append("Better than their parents:")
    for one, parent in gains[:_MOST_GAINS]:
        lines.append(f"- proposal {one.number}: {_scores(parent)} -> {_scores(one)}")
    slower = sum(
        one.category == "passed" and one.parent in ended and not _better(one, ended[one.parent])
        for one in ended.values()
    )
    if slower:
        lines.append(f"Correct, but no better than their parents: {slower}.")
    return "\n".join(lines) or "Nothing was tried yet."


def summary_request(problem: str, text: str) -> str:
    """Return the text that asks a model for advice based on a digest."""
    return (
        "Many kernels were tried as replacements of this PyTorch reference:\n\n"
        f"```python\n{problem.strip()}\n```\n\nThese were the results:\n\n{text}\n\n"
        "Write in at most ten short lines what to avoid and what to try next. Answer with these lines only."
    )


def _better(one: Proposal, parent: Proposal) -> bool:
    if one.scores is None or parent.scores is None:
        return False
    before = parent.scores
    return one.scores != before and all(score >= before.get(name, score) for name, score in one.scores.items())


def _scores(one: Proposal) -> str:
    return ", ".join(f"{name} {score:.4g}" for name, score in (one.scores or {}).items())


def _numbers(proposals: Sequence[Proposal]) -> str:
    shown = ", ".join(str(one.number) for one in proposals[:5])
    return f"proposal {shown}" if len(proposals) == 1 else f"{len(proposals)} times: proposals {shown}"


def _first_line(message: str | None) -> str:
    return (message or "").partition("\n")[0][:_MESSAGE_CHARACTERS]
