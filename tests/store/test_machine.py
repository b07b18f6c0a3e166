"""The store against a model: random operations of two owners and two workers, with crashes at any statement."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from inspect import signature
from typing import Any, Final, TypeVar
from uuid import UUID, uuid4

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test
from sqlalchemy import Connection, Engine, event, text

from kqueue.categories import Blame, Category
from kqueue.contract import Request
from kqueue.errors import DatabaseUnavailable, IdempotencyConflict, UnknownEvaluation
from kqueue.states import EvaluationState, Writer
from kqueue.store import erasure, evaluations, workers
from kqueue.store.engine import Viewer, acting
from kqueue.store.evaluations import Claim, Recorded
from tests.samples import ended, request_fields
from tests.store.steps import ENVIRONMENT, change

T = TypeVar("T")

OWNERS: Final = ("ada", "bob")
#: Seconds that no example takes, so that only the machine ends leases.
LONG_S: Final = 3600.0
#: The hashes of the kernels, and of the empty source that replaces erased ones.
KERNELS: Final = {Request(**request_fields(number)).kernel_hash: number for number in range(2)}

READ: Final = text("""
    SELECT e.id, e.owner, e.kernel_hash, (e.settings ->> 'max_attempts')::int AS most, e.reuse,
           e.idempotency_key AS key, e.expires_at <= now() AS expired, e.state, e.attempts,
           e.state = 'queued' AND e.published_at IS NOT NULL AS published,
           v.category, v.written_by, v.reused_from, judged.number, md5(v::text) AS digest,
           ARRAY(SELECT json_build_array(a.worker_id, a.ended_at IS NOT NULL, a.category, a.written_by, a.handed_back,
                                         a.ended_at IS NULL AND a.lease_until < now())
                 FROM attempts AS a WHERE a.evaluation_id = e.id ORDER BY a.number) AS tries
    FROM evaluations AS e LEFT JOIN verdicts AS v ON v.evaluation_id = e.id
    LEFT JOIN attempts AS judged ON judged.id = v.attempt_id ORDER BY v.finished_at
""")
SHOWN: Final = text("""
    SELECT ARRAY(SELECT id FROM evaluations), ARRAY(SELECT evaluation_id FROM verdicts),
           ARRAY(SELECT DISTINCT evaluation_id FROM attempts), ARRAY(SELECT DISTINCT owner FROM kernels)
""")
PASSES: Final = (
    "UPDATE attempts SET lease_until = now() - interval '1 s' WHERE evaluation_id = :id AND ended_at IS NULL",
    "UPDATE evaluations SET expires_at = now() - interval '1 s' WHERE id = :id AND expires_at IS NOT NULL",
)


@dataclass(frozen=True)
class Try:
    """An attempt."""

    worker: UUID
    ended: bool = False
    category: str | None = None
    writer: str | None = None
    back: bool = False
    overdue: bool = False

    @property
    def died(self) -> bool:
        """True if it counts as a try that lost its worker."""
        return not self.back and (self.category == Category.WORKER_LOST or self.writer != Writer.JUDGE)


@dataclass(frozen=True)
class End:
    """A verdict, with the number of the attempt that was judged or the evaluation whose verdict is reused."""

    category: str
    writer: str
    number: int | None = None
    origin: UUID | None = None


@dataclass(frozen=True)
class Entry:
    """An evaluation. An erased one has neither kernel nor key."""

    owner: str
    kernel: int | None
    most: int | None
    reuse: bool
    key: str | None
    expired: bool | None
    state: str = EvaluationState.QUEUED
    published: bool = False
    tries: tuple[Try, ...] = ()
    end: End | None = None

    def finish(self, number: int, category: Category, writer: Writer, *, back: bool = False) -> tuple[Entry, Recorded]:
        """Return the evaluation after an attempt's end."""
        if number > len(self.tries) or self.tries[number - 1].ended:
            return self, Recorded.LATE
        last = replace(self.tries[-1], ended=True, category=category, writer=writer, back=back, overdue=False)
        earlier = [one for one in self.tries[:-1] if not one.back]
        after = replace(self, tries=(*self.tries[:-1], last))
        if self.end is not None:
            return after, Recorded.LATE
        suspected = sum(one.died for one in earlier) >= 2
        assert self.most is not None
        if category.blame is Blame.FLEET and (back or (len(earlier) + 1 < self.most and not suspected)):
            return replace(after, state=EvaluationState.QUEUED, published=False), Recorded.RETRY
        return after.done(End(category, writer, number)), Recorded.FINAL

    def done(self, end: End) -> Entry:
        return replace(self, state=EvaluationState.DONE, published=False, end=end)

    def cancel(self) -> Entry:
        return self if self.end is not None else self.done(End(Category.CANCELLED, Writer.CLIENT))

    def erase(self) -> Entry:
        if self.end is None or any(not one.ended for one in self.tries):
            return self
        return replace(self, kernel=None, most=None, key=None, end=replace(self.end, category=Category.CANCELLED))

    def expire(self) -> Entry:
        if self.state != EvaluationState.QUEUED or self.tries or not self.expired:
            return self
        return self.done(End(Category.EXPIRED, Writer.SWEEPER))

    @property
    def comparable(self) -> bool:
        """True if its verdict counts for the reuse of verdicts."""
        if self.kernel is None or self.end is None or self.end.number is None:
            return False
        blame = Category(self.end.category).blame
        return blame in (Blame.NONE, Blame.CANDIDATE) or sum(one.died for one in self.tries) >= 2


Model = dict[UUID, Entry]


class Breaker:
    """Breaks the connection of an operation: at a statement, before a commit, or after it and before its answer."""

    def __init__(self, engine: Engine) -> None:
        self.at(0)
        event.listen(engine, "before_cursor_execute", lambda connection, *_: self._break(connection, "rollback"))
        event.listen(engine, "commit", lambda connection: self._break(connection, "rollback", "commit"))

    def at(self, place: int) -> None:
        """Break the connection at the n-th place from now. 0 breaks none."""
        self._left, self.broke = place, False

    def _break(self, connection: Connection, *ends: str) -> None:
        for end in ends:
            self._left -= 1
            if self._left == 0:
                # Postgres ends the transaction before the connection breaks, so that nothing meets its locks later.
                raw: Any = connection.connection.driver_connection
                getattr(raw, end)()
                raw.close()
                self.broke = True


#: Places of crashes. Most operations have about five, those on several evaluations more.
CRASHES: Final = st.just(0) | st.integers(1, 5) | st.integers(6, 16)
SLOTS: Final = st.integers(0, 1)
ENDS: Final = st.sampled_from(("passed", "wrong_values", "judge_error", "worker_lost", "handed back"))
#: Fields of a request: the kernel's number, the allowed attempts, the key, and whether it accepts reuse and can expire.
ASKED: Final = st.tuples(SLOTS, st.integers(1, 3), st.none() | st.sampled_from("kl"), st.booleans(), st.booleans())
#: Strategies of the arguments of the machine's operations.
ARGUMENTS: Final[dict[str, st.SearchStrategy[Any]]] = {
    "batch": st.lists(ASKED, min_size=1, max_size=3),
    "owner": st.sampled_from(OWNERS),
    "index": st.integers(0, 9),
    "slot": SLOTS,
    "how": ENDS,
    "at_once": st.none() | ENDS,
    "ago": st.sampled_from((0, 0, 0, 1, -1)),
    "crash": CRASHES,
    "then": CRASHES,
}
OPERATIONS: Final = (
    *("submit", "submit", "claim", "claim", "claim", "finish", "finish", "cancel", "cancel_all", "erase"),
    *("beat", "die", "wait", "sweep", "look_at_queue"),
)


class Machine(RuleBasedStateMachine):
    """Applies each operation to the database and to the model, and compares them."""

    def __init__(self, engine: Engine, breaker: Breaker) -> None:
        super().__init__()
        self.engine, self.breaker = engine, breaker
        change(engine, "TRUNCATE evaluations, problems, kernels, environments, workers CASCADE")
        self.model: Model = {}
        self.digests: dict[UUID, str] = {}
        self.slots = [self.start(), self.start()]
        self.known: set[UUID] = set()
        self.last: dict[UUID, tuple[UUID, int]] = {}
        self.turn, self.agrees = 0, True

    def start(self) -> UUID:
        identity = uuid4()
        # A retry is reserved for a worker with another name, for some seconds: see test_claims.py.
        workers.register(self.engine, id=identity, name="w", host="here", pid=1, lanes=["cpu"], device="cpu")
        return identity

    def pick(self, index: int, suits: Callable[[Entry], object]) -> UUID:
        """Return one of the newest evaluations that suit, or of all."""
        ids = [identity for identity, entry in self.model.items() if suits(entry)] or list(self.model)
        return ids[-1 - index % len(ids)]

    def read(self) -> Model:
        """Return the evaluations in the database. Check that states and attempts agree and that verdicts stay."""
        model: Model = {}
        with self.engine.connect() as connection:
            rows = connection.execute(READ).all()
        for row in rows:
            tries = tuple(Try(UUID(worker), *rest) for worker, *rest in row.tries)
            end = End(row.category, row.written_by, row.number, row.reused_from) if row.category is not None else None
            kernel = KERNELS.get(row.kernel_hash)
            fields = (row.owner, kernel, row.most, row.reuse, row.key, row.expired, row.state, row.published)
            model[row.id] = Entry(*fields, tries, end)
            running = sum(not one.ended for one in tries)
            assert row.attempts == len(tries)
            assert (end is not None) == (row.state == EvaluationState.DONE)
            assert running == (row.state == EvaluationState.RUNNING) or (end is not None and running == 1)
            if kernel is not None:
                assert sum(not one.back for one in tries) <= row.most
                if end is not None:
                    assert self.digests.setdefault(row.id, row.digest) == row.digest
        return model

    def act(
        self,
        crash: int,
        operation: Callable[[], T],
        *stages: Model,
        owner: str | None = None,
        new: Sequence[Entry] = (),
    ) -> T | None:
        """Run an operation, compare database and model, and return the result, or None after a crash.

        ``stages`` are the model after each step of the operation. After a crash each evaluation is in one of these
        stages or unchanged. With one stage, either all evaluations are unchanged or none. ``new`` are added to it.
        """
        result, crashed, self.agrees = None, False, False
        self.breaker.at(crash)
        try:
            with acting(Viewer(owner, held=owner is not None)):
                result = operation()
        except DatabaseUnavailable:
            crashed = self.breaker.broke
            assert crashed
        self.breaker.at(0)
        seen = self.read()
        # Ascending ids are in the order of the batch. After a crash the answer does not name them.
        ids = sorted(seen.keys() - self.model.keys())
        assert len(ids) == len(new) or (crashed and not ids)
        after = stages[-1] | {i: self.answered(entry) for i, entry in zip(ids, new, strict=False)}
        if len(stages) == 1 or not crashed:
            assert seen == after or (crashed and seen == self.model)
        for identity, entry in self.model.items():
            assert seen[identity] in [entry, *(stage[identity] for stage in stages)]
        self.model = {identity: seen[identity] for identity in after}  # in the order of submission
        self.agrees = True
        return result

    def answered(self, entry: Entry) -> Entry:
        """Return the evaluation after a search for a verdict to reuse."""
        fresh = entry.state == EvaluationState.QUEUED and not entry.tries and not entry.expired
        if not entry.reuse or not fresh or self.known.isdisjoint(self.slots):
            return entry
        content = (entry.owner, entry.kernel, entry.most)
        judged = {i: self.model[i] for i in self.digests if i in self.model and self.model[i].comparable}
        judged = {i: e for i, e in judged.items() if e.tries[-1].worker in self.known}
        equal = {i: e for i, e in judged.items() if (e.owner, e.kernel, e.most) == content}
        categories = {Category(e.end.category) for e in equal.values() if e.end is not None}
        origin = next((i for i in reversed(equal) if all(one.back for one in equal[i].tries[:-1])), None)
        if origin is None or len(categories) > 1 or not (category := categories.pop()).info.reusable:
            return entry
        return entry.done(End(category, Writer.DATABASE, origin=origin))

    @initialize()
    def begin(self) -> None:
        """Submit equal evaluations of both owners."""
        for owner in OWNERS:
            self.submit(owner, [(0, most, None, True, False) for most in (1, 2, 2, 3)], 0)

    @rule(data=st.data())
    def step(self, data: st.DataObject) -> None:
        """Do any operation. With a rule for each, most examples would lack several."""
        operation = getattr(self, data.draw(st.sampled_from(OPERATIONS)))
        operation(**{name: data.draw(ARGUMENTS[name]) for name in signature(operation).parameters})

    def submit(self, owner: str, batch: list[tuple[Any, ...]], crash: int) -> None:
        """Write new evaluations, return known ones, and refuse keys of other evaluations."""
        keys: dict[str, UUID | int] = {e.key: i for i, e in self.model.items() if e.key and e.owner == owner}
        requests, new, places, conflict = list[Request](), list[Entry](), list[UUID | int](), False
        for number, most, key, reuse, waits in batch:
            limits = {"settings": {"max_attempts": most}, "queue_wait_s": LONG_S if waits else None}
            requests.append(Request(**request_fields(number, idempotency_key=key, reuse=reuse, **limits)))
            entry = Entry(owner, number, most, reuse, key, False if waits else None)
            place = keys.get(key, len(new)) if key else len(new)
            if place == len(new):
                new.append(entry)
                keys |= {key: place} if key else {}
            other = self.model[place] if isinstance(place, UUID) else new[place]
            conflict |= (other.kernel, other.most) != (number, most) or (other.reuse and not reuse)
            places.append(place)
        submit = partial(evaluations.submit, self.engine, requests, reuse_s=LONG_S)
        if conflict:
            self.act(crash, partial(pytest.raises, IdempotencyConflict, submit), self.model, owner=owner)
            return
        known = len(self.model)
        answer = self.act(crash, submit, self.model, owner=owner, new=new)
        ids = list(self.model)[known:]
        expected = [place if isinstance(place, UUID) else ids[place] for place in places if answer is not None]
        assert [one.evaluation_id for one in answer or ()] == expected

    def cancel(self, index: int, owner: str, crash: int) -> None:
        """Cancel an evaluation for its owner. For another owner it does not exist."""
        identity = self.pick(index, lambda entry: entry.end is None)
        entry = self.model[identity]
        if entry.owner == owner:
            cancel = partial(evaluations.cancel, self.engine, identity)
            cancelled = self.act(crash, cancel, self.model | {identity: entry.cancel()}, owner=owner)
            assert cancelled in (None, entry.end is None)
        else:
            for ask in (evaluations.cancel, evaluations.verdict):
                refused = partial(pytest.raises, UnknownEvaluation, ask, self.engine, identity)
                self.act(0, refused, self.model, owner=owner)

    def cancel_all(self, owner: str, crash: int) -> None:
        """Cancel all evaluations that an owner names, of which only its own exist."""
        after = {i: e.cancel() if e.owner == owner else e for i, e in self.model.items()}
        changed = {i for i in after if after[i] != self.model[i]}
        running = {i for i in changed if self.model[i].state == EvaluationState.RUNNING}
        cancel = partial(evaluations.cancel_all, self.engine, list(self.model))
        assert self.act(crash, cancel, after, owner=owner) in (None, (changed, running))

    def erase(self, owner: str, crash: int) -> None:
        """Erase the work of an owner, except evaluations with an open attempt."""
        cancelled = {i: e.cancel() if e.owner == owner else e for i, e in self.model.items()}
        after = {i: e.erase() if e.owner == owner else e for i, e in cancelled.items()}
        cancel = partial(evaluations.cancel, self.engine)
        self.act(crash, partial(erasure.erase, self.engine, owner, cancel=cancel), cancelled, after)

    def claim(self, index: int, slot: int, crash: int, at_once: str | None, then: int) -> None:
        """Begin an attempt, or end the evaluation as expired or with a reused verdict."""
        identity, worker = self.pick(index, lambda entry: entry.state == EvaluationState.QUEUED), self.slots[slot]
        entry = self.model[identity]
        after = self.answered(entry).expire()
        begins = after.state == EvaluationState.QUEUED
        if begins:
            after = replace(after, state=EvaluationState.RUNNING, published=False, tries=(*after.tries, Try(worker)))
        claim = partial(evaluations.claim, self.engine, identity, worker_id=worker, lease_s=LONG_S)
        claimed: Claim | None = self.act(crash, claim, self.model | {identity: after})
        if len(self.model[identity].tries) > len(entry.tries):
            self.last[worker] = (identity, len(after.tries))
        if claimed is None:
            return
        assert begins
        assert (claimed.number, claimed.owner) == (len(after.tries), entry.owner)
        assert claimed.alone == (sum(one.died for one in entry.tries) >= 2)
        assert claimed.request.kernel_hash == {number: h for h, number in KERNELS.items()}[entry.kernel]
        if at_once is not None:
            evaluations.set_environment(self.engine, claimed.attempt_id, ENVIRONMENT, conditions="")
            self.known.add(worker)
            self.end(identity, claimed.number, at_once, then)

    def finish(self, index: int, ago: int, how: str, crash: int) -> None:
        """End an attempt, sometimes an ended or unknown one, or hand it back."""
        identity = self.pick(index, lambda entry: any(not one.ended for one in entry.tries))
        self.end(identity, max(1, len(self.model[identity].tries) - ago), how, crash)

    def end(self, identity: UUID, number: int, how: str, crash: int) -> None:
        back = how == "handed back"
        category = Category.WORKER_LOST if back else Category(how)
        writer = Writer.WORKER if category is Category.WORKER_LOST else Writer.JUDGE
        after, recorded = self.model[identity].finish(number, category, writer, back=back)
        end = partial(evaluations.finish, self.engine, identity, number, ended(category), written_by=writer)
        told = self.act(crash, partial(end, retry_delay_s=0, handed_back=back), self.model | {identity: after})
        assert told in (None, recorded)

    def beat(self, slot: int, crash: int) -> None:
        """Renew the lease of a worker's last attempt."""
        after = dict(self.model)
        if self.slots[slot] in self.last:
            identity, number = self.last[self.slots[slot]]
            tries = list(after[identity].tries)
            tries[number - 1] = replace(tries[number - 1], overdue=False)
            after[identity] = replace(after[identity], tries=tuple(tries))
        self.act(crash, partial(workers.heartbeat, self.engine, [self.slots[slot]], lease_s=LONG_S), after)

    def die(self, slot: int, crash: int) -> None:
        """End a dead worker's attempts, and start another worker."""
        worker = self.slots[slot]
        its = {i: e for i, e in self.model.items() if e.tries and e.tries[-1].worker == worker}
        ends = {i: e.finish(len(e.tries), Category.WORKER_LOST, Writer.WORKER)[0] for i, e in its.items()}
        after = self.model | ends
        lose = partial(evaluations.lose_worker, self.engine, worker, retry_delay_s=0, message="gone")
        if self.act(crash, lose, after, after) is not None:
            workers.stop(self.engine, worker)
            self.slots[slot] = self.start()

    def wait(self, index: int) -> None:
        """Let the lease of an open attempt end, and the limit of a producer's wait."""
        identity = self.pick(index, lambda entry: entry.end is None)
        for passes in PASSES:
            change(self.engine, passes, id=identity)
        self.model = {i: self.read()[i] for i in self.model}

    def sweep(self, crash: int) -> None:
        """End attempts whose leases have ended. A crashed sweep is repeated later."""
        late = {i: e for i, e in self.model.items() if any(one.overdue for one in e.tries)}
        ends = {i: e.finish(len(e.tries), Category.WORKER_LOST, Writer.SWEEPER) for i, e in late.items()}
        after = self.model | {i: entry for i, (entry, _) in ends.items()}
        swept = self.act(crash, partial(evaluations.expire_leases, self.engine, retry_delay_s=0), after, after)
        assert swept is None or dict(swept) == {i: recorded for i, (_, recorded) in ends.items()}

    def look_at_queue(self, crash: int, then: int) -> None:
        """End evaluations that waited too long, and record that messages of the rest were sent, each once."""
        after = {i: e.expire() for i, e in self.model.items()}
        number = sum(after[i] != self.model[i] for i in after)
        assert self.act(crash, partial(evaluations.expire_queued, self.engine), after) in (None, number)
        queued = {i for i, e in self.model.items() if e.state == EvaluationState.QUEUED}
        unsent = [i for i in self.model if i in queued and not self.model[i].published]
        after = {i: replace(e, published=i in queued) for i, e in self.model.items()}
        sent = self.act(then, partial(evaluations.publish, self.engine, list(self.model)), after)
        assert sent is None or [message.evaluation_id for message in sent] == unsent

    @invariant()
    def an_owner_sees_its_own_work(self) -> None:
        """The two owners in turn see exactly their rows."""
        self.turn += 1
        owner = OWNERS[self.turn % 2]
        with acting(Viewer(owner, held=True)), self.engine.begin() as connection:
            shown, judged, tried, whose = map(set, connection.execute(SHOWN).one())
        mine = {i: e for i, e in self.model.items() if e.owner == owner}
        assert shown == mine.keys()
        assert judged == {i for i, e in mine.items() if e.end is not None}
        assert tried == {i for i, e in mine.items() if e.tries}
        assert whose <= {owner}

    def teardown(self) -> None:
        """Judge everything that is left. Then each evaluation has one verdict."""
        if not self.agrees:
            return
        worker, end = self.start(), {"written_by": Writer.JUDGE, "retry_delay_s": 0}
        for identity, entry in self.model.items():
            evaluations.claim(self.engine, identity, worker_id=worker, lease_s=LONG_S)
            number = len(entry.tries) + (entry.state == EvaluationState.QUEUED)
            evaluations.finish(self.engine, identity, number, ended(Category.PASSED), **end)
        left = self.read()
        assert left.keys() == self.model.keys()
        assert all(e.end is not None and all(one.ended for one in e.tries) for e in left.values())


@pytest.mark.parametrize("nightly", [False, pytest.param(True, marks=[pytest.mark.nightly, pytest.mark.timeout(1200)])])
def test_the_store_follows_the_model(engine: Engine, caplog: pytest.LogCaptureFixture, nightly: bool) -> None:
    """Each operation changes the database as the model says, completely or not at all if it crashes."""
    caplog.set_level(logging.ERROR, "kqueue")
    profile = settings(
        max_examples=300 if nightly else 12,
        stateful_step_count=60 if nightly else 30,
        # Shrinking takes minutes, so the gate shows the first example that fails.
        phases=[Phase.generate, Phase.shrink] if nightly else [Phase.generate],
        derandomize=not nightly,
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    run_state_machine_as_test(partial(Machine, engine, Breaker(engine)), settings=profile)
