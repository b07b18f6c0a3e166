"""Submission: all or none, and once per key."""

from __future__ import annotations

from uuid import uuid4

import pytest
from pydantic import ValidationError
from sqlalchemy import Engine

from kqueue.contract import Request
from kqueue.errors import IdempotencyConflict, UnknownProblem
from kqueue.store import evaluations, workers
from tests.store.steps import change, count, together


class TestSubmit:
    """Submissions in one transaction, with sources by content and unique keys."""

    def test_sources_are_stored_once(self, engine: Engine, fields) -> None:
        """Equal problems and kernels share a row, and the answers keep the order of the requests."""
        submitted = evaluations.submit(engine, [Request(**fields(n % 2, problem_label=f"p{n}")) for n in range(6)])
        assert (count(engine, "problems"), count(engine, "kernels"), count(engine, "evaluations")) == (1, 2, 6)
        assert [s.message.label.split()[1] for s in submitted] == [f"problem=p{n}" for n in range(6)]
        assert all(s.created and s.message.lane == "cpu" for s in submitted)

    def test_a_known_key_gives_the_same_evaluation(self, engine: Engine, fields) -> None:
        """Only the first submission of a key creates an evaluation, also within one batch."""
        request = Request(**fields(idempotency_key="k"))
        first = evaluations.submit(engine, [request, request])
        again = evaluations.submit(engine, [request])
        assert [s.created for s in first + again] == [True, False, False]
        assert len({s.evaluation_id for s in first + again}) == 1

    def test_a_key_for_another_kernel_is_refused_whole(self, engine: Engine, fields) -> None:
        """Another kernel's verdict is never returned, and no part of the batch is written."""
        evaluations.submit(engine, [Request(**fields(1, idempotency_key="k"))])
        with pytest.raises(IdempotencyConflict, match="'k'") as caught:
            evaluations.submit(engine, [Request(**fields(2)), Request(**fields(3, idempotency_key="k"))])
        assert caught.value.keys == {"k"}
        assert (count(engine, "evaluations"), count(engine, "kernels")) == (1, 1)

    @pytest.mark.parametrize("other", [{"settings": {"checks": 2}}, {"lane": "gpu"}])
    def test_a_key_for_what_is_judged_otherwise_is_refused(self, engine: Engine, fields, other) -> None:
        """A verdict under other settings or of another lane is not the requested one."""
        evaluations.submit(engine, [Request(**fields(idempotency_key="k"))])
        with pytest.raises(IdempotencyConflict, match="'k'"):
            evaluations.submit(engine, [Request(**fields(idempotency_key="k") | other)])
        assert count(engine, "evaluations") == 1

    def test_a_key_for_the_same_judgement(self, engine: Engine, fields) -> None:
        """Labels, priority and queue limit do not affect a verdict, and a lane chosen by the fleet matches any lane."""
        [first] = evaluations.submit(engine, [Request(**fields(idempotency_key="k"))])
        names = {"batch": "b", "kernel_label": "l", "producer": "p", "priority": "interactive", "queue_wait_s": 9}
        for request, any_lane in ((names, ()), ({"lane": "gpu"}, ("k",))):
            [again] = evaluations.submit(engine, [Request(**fields(idempotency_key="k") | request)], any_lane=any_lane)
            assert (again.evaluation_id, again.created) == (first.evaluation_id, False)

    def test_settings_of_an_older_version_are_the_same(self, engine: Engine, fields) -> None:
        """A setting that an older version did not write has its default."""
        request = Request(**fields(idempotency_key="k"))
        evaluations.submit(engine, [request])
        change(engine, "UPDATE evaluations SET settings = settings - 'comparison'")
        assert [s.created for s in evaluations.submit(engine, [request])] == [False]
        change(engine, """UPDATE evaluations SET settings = settings || '{"speculative_checks": 3}'""")
        with pytest.raises(IdempotencyConflict):
            evaluations.submit(engine, [request])

    def test_whose_it_is(self, engine: Engine, fields) -> None:
        """Priority and producer are stored, and a producer cannot have a token's name."""
        evaluations.submit(engine, [Request(**fields()), Request(**fields(priority="interactive", producer="me"))])
        assert count(engine, "evaluations", "priority = 'interactive' AND producer = 'me'") == 1
        assert count(engine, "evaluations", "priority = 'batch' AND producer = ''") == 1
        with pytest.raises(ValidationError, match="reserved for tokens"):
            Request(**fields(producer="token:me"))

    def test_a_stored_problem_is_named_by_its_hash(self, engine: Engine, fields) -> None:
        """The hash replaces a source that was submitted before, and the judge gets the source."""
        source = Request(**fields(1))
        evaluations.submit(engine, [source])
        named = Request(**fields(2, problem=f"sha256:{source.problem_hash}"))
        assert (named.names_problem, named.problem_hash) == (True, source.problem_hash)
        [submitted] = evaluations.submit(engine, [named])
        worker = uuid4()
        workers.register(engine, id=worker, name="w", host="h", pid=1, lanes=["cpu"], device="cpu")
        claimed = evaluations.claim(engine, submitted.evaluation_id, worker_id=worker, lease_s=30)
        assert claimed.request.problem == source.problem
        assert count(engine, "problems") == 1

    def test_a_problem_that_nobody_stored_is_unknown(self, engine: Engine, fields) -> None:
        """No part of the batch is written. A source in the same batch counts as stored."""
        unknown = fields(1, problem=f"sha256:{'a' * 64}")
        with pytest.raises(UnknownProblem, match="unknown problem sha256:aaa") as caught:
            evaluations.submit(engine, [Request(**fields(2)), Request(**unknown)])
        assert caught.value.hashes == {"a" * 64}
        assert (count(engine, "evaluations"), count(engine, "problems"), count(engine, "kernels")) == (0, 0, 0)
        source = Request(**fields(3))
        named = Request(**fields(4, problem=f"sha256:{source.problem_hash}"))
        assert len(evaluations.submit(engine, [named, source])) == 2
        assert count(engine, "problems") == 1

    def test_one_key_from_many_at_once(self, engine: Engine, fields) -> None:
        """Eight threads with the same keys in different orders create each key once without an error."""
        requests = [Request(**fields(n, idempotency_key=f"k{n}")) for n in range(10)]
        answers = together(8, lambda n: evaluations.submit(engine, requests[:: 1 if n % 2 else -1]))
        assert sum(s.created for answer in answers for s in answer) == 10
        assert len({s.evaluation_id for answer in answers for s in answer}) == 10
