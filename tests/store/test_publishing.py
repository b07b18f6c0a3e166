"""Which messages are due."""

from __future__ import annotations

from sqlalchemy import Engine, text

from kqueue.store import evaluations
from tests.store.steps import LOST, change, count, finish


class TestPublishing:
    """Which messages may be missing."""

    def test_due(self, engine: Engine, submit, claim) -> None:
        """Queued and due ones that were never published, or are lost; nothing that runs, waits or is done."""
        never, lost, sent, running, later = (submit() for _ in range(5))
        claim(running)
        evaluations.mark_published(engine, [lost, sent])
        evaluations.mark_published(engine, [lost, running], lost=True)
        change(engine, "UPDATE evaluations SET available_at = now() + interval '1 min' WHERE id = :id", id=later)
        change(engine, "UPDATE evaluations SET submitted_at = now() - interval '11 s'")
        due = evaluations.due_for_publishing(engine, limit=10)
        assert {s.evaluation_id for s in due} == {never, lost}
        assert evaluations.published(engine) == {"cpu": {sent}}
        assert len(evaluations.due_for_publishing(engine, limit=1)) == 1

    def test_noting_waits_for_nobody(self, engine: Engine, submit) -> None:
        """What another process holds at this moment is left out, the rest is noted."""
        held, free = submit(), submit()
        with engine.connect() as holder:
            holder.execute(text("SELECT 1 FROM evaluations WHERE id = :id FOR UPDATE"), {"id": held})
            evaluations.mark_published(engine, [held, free])
        due = evaluations.due_for_publishing(engine, patience_s=0, limit=10)
        assert count(engine, "evaluations", "published_at IS NOT NULL") == 1
        assert held in {s.evaluation_id for s in due}

    def test_what_is_being_submitted_is_left_to_its_producer(self, engine: Engine, submit, claim) -> None:
        """A moment old and unpublished: its producer is at it. A retry has no producer and is due at once."""
        submit()
        retried = submit()
        finish(engine, claim(retried), LOST)
        due = evaluations.due_for_publishing(engine, limit=10)
        assert [s.evaluation_id for s in due] == [retried]
