"""The exception that ends an evaluation early with its outcome."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kqueue.categories import Category
from kqueue.contract import Outcome, Phase
from kqueue.evidence import Facts

if TYPE_CHECKING:
    from workers.judge.channel.protocol import Reply


class EvaluationEnded(Exception):
    """Raised with the outcome once it is known, so that only cleanup remains.

    ``reply`` is the sealed process's reply if an exception in that process is the reason. ``faults`` has the fault
    of wrong values by each profile.
    """

    def __init__(
        self, category: Category, message: str, phase: Phase | None = None, *, reply: Reply | None = None, **facts: Any
    ) -> None:
        super().__init__(f"{category}: {message}")
        self.outcome = Outcome(category=category, message=message, phase=phase, facts=Facts(**facts))
        self.reply = reply
        self.faults: dict[str, str] = {}
