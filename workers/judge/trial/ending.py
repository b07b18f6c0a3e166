"""How an evaluation's course is broken off: by raising its outcome."""

from __future__ import annotations

from typing import Any

from kqueue.categories import Category
from kqueue.contract import Outcome, Phase


class EvaluationEnded(Exception):
    """The outcome is known; nothing is left to do but to clean up."""

    def __init__(self, category: Category, message: str, phase: Phase | None = None, **facts: Any) -> None:
        super().__init__(f"{category}: {message}")
        self.outcome = Outcome(category=category, message=message, phase=phase, facts=facts)
