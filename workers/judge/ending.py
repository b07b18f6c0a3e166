"""How the course of an evaluation is broken off: by raising its outcome."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kqueue.categories import Category
from kqueue.contract import Outcome, Phase
from kqueue.evidence import Facts

if TYPE_CHECKING:
    from workers.judge.channel.protocol import Reply


class EvaluationEnded(Exception):
    """The outcome is known; nothing is left to do but to clean up.

    Attributes:
        outcome: the outcome.
        reply: what the sealed process answered, where an exception in it is the reason.
    """

    def __init__(
        self, category: Category, message: str, phase: Phase | None = None, *, reply: Reply | None = None, **facts: Any
    ) -> None:
        super().__init__(f"{category}: {message}")
        self.outcome = Outcome(category=category, message=message, phase=phase, facts=Facts(**facts))
        self.reply = reply
