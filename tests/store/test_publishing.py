"""The messages in Redis."""

from __future__ import annotations

from pathlib import Path

from sqlalchemy import Engine, text

from kqueue.contract import Request
from kqueue.store import evaluations
from kqueue.trees import pack
from tests.store.steps import change, together


def test_one_caller_sends(engine: Engine, submit) -> None:
    """One of the concurrent senders of a message gets it to send."""
    ids = [submit() for _ in range(5)]
    told = together(6, lambda _: [message.evaluation_id for message in evaluations.publish(engine, ids)])
    assert sorted(identity for each in told for identity in each) == sorted(ids)
    assert evaluations.published(engine) == {"cpu": set(ids)}


def test_what_is_not_queued_needs_no_message(engine: Engine, submit, claim) -> None:
    """Running, done, unknown and already published evaluations are left out."""
    running, done, sent, queued = (submit() for _ in range(4))
    claim(running)
    evaluations.cancel(engine, done)
    assert [m.evaluation_id for m in evaluations.publish(engine, [sent])] == [sent]
    assert [m.evaluation_id for m in evaluations.publish(engine, [queued, running, done, sent])] == [queued]
    assert evaluations.unpublish(engine, [running, done, sent]) == 1
    assert evaluations.published(engine) == {"cpu": {queued}}


def test_noting_waits_for_nobody(engine: Engine, submit) -> None:
    """A row that another process has locked is skipped, and the rest is recorded."""
    held, free = submit(), submit()
    with engine.connect() as holder:
        holder.execute(text("SELECT 1 FROM evaluations WHERE id = :id FOR UPDATE"), {"id": held})
        assert [m.evaluation_id for m in evaluations.publish(engine, [held, free])] == [free]


def test_a_producer_sends_what_fits(engine: Engine, fields) -> None:
    """The producer sends a window per lane, and the fleet sends the rest and later ones."""
    size = evaluations.window(1)
    many = [Request(**fields(n)) for n in range(size + 3)]
    first = evaluations.submit(engine, [*many, Request(**fields(lane="gpu"))], slots={"cpu": 1})
    assert [s.next for s in first] == [True] * size + [False] * 3 + [True]
    assert [s.next for s in evaluations.submit(engine, many[:1], slots={"cpu": 1})] == [False]
    assert [s.next for s in evaluations.submit(engine, many[:1], slots={"cpu": 100})] == [True]
    change(engine, "UPDATE evaluations SET state = 'running' WHERE lane = 'cpu'")
    assert [s.next for s in evaluations.submit(engine, many[:1], slots={"cpu": 1})] == [True]


def test_each_shape_has_all_deadlines(engine: Engine, fields) -> None:
    """Celery's hard limit grows with the number of a problem's shapes, so that it blames no worker for them."""
    tree = pack(Path(__file__).parent)
    problems = ("class Model: ...", 'SHAPES = [{"name": "a"}, {"name": "b"}, {"name": "c"}]', "SHAPES = malformed",
                tree.line(build=["make"]))  # fmt: skip
    given = [{}, {}, {}, {"trees": [tree.text]}]
    requests = [Request(**fields(problem=one, **more)) for one, more in zip(problems, given, strict=True)]
    told = [evaluations.submit(engine, [request], slots={})[0].evaluation_id for request in requests]
    evaluations.unpublish(engine, told)
    one, three, malformed, built = (message.deadlines_s for message in evaluations.publish(engine, told))
    assert (three, malformed, built) == (3 * one, one, 2 * one)


def test_a_known_key_is_sent_once(engine: Engine, fields) -> None:
    """An evaluation that was accepted before already has its message."""
    request = Request(**fields(idempotency_key="k"))
    told = [evaluations.submit(engine, [request, request], slots={}) for _ in range(2)]
    assert [[s.next for s in each] for each in told] == [[True, False], [False, False]]
