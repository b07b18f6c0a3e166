"""The order of evaluations.

Evaluations of one producer, lane and priority are ordered by submission. The producer with the least recent use goes
first: device seconds divided by its weight, halved after every :data:`HALF_LIFE_S` seconds. A running attempt counts
with the mean duration of that producer's attempts, or its actual duration if that is longer. ``interactive`` precedes
``batch``, which keeps :data:`BATCH_SHARE` of the seconds. ``idle`` comes last on its lane.

The order is not fixed at submission: each query for the next evaluations applies the current one.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from copy import deepcopy
from dataclasses import dataclass, field
from datetime import datetime
from typing import Final
from uuid import UUID

from sqlalchemy import (
    CTE,
    Connection,
    Double,
    Engine,
    cast,
    false,
    func,
    insert,
    literal,
    select,
    text,
    true,
    union_all,
)

from kqueue.states import Priority
from kqueue.store.engine import transaction
from kqueue.store.evaluations.conditions import REAL
from kqueue.store.models import Attempt, Evaluation, Share

#: Seconds after which used device seconds count half. A producer that had all devices for long waits for about as long
#: when another one comes that has used none.
HALF_LIFE_S: Final = 300.0
#: Share of the devices' time that ``batch`` gets while ``interactive`` evaluations wait.
BATCH_SHARE: Final = 0.1
#: Number of half-lives after which rows are removed.
_FORGOTTEN: Final = 100
#: Expected seconds of an attempt while nothing is known of its producer or its resource.
_UNKNOWN_S: Final = 1.0
#: Number of messages in Redis for each slot of a lane. A worker that ends an evaluation finds the next one there, even
#: if the window is not refilled for some seconds.
_PER_SLOT: Final = 3
#: Minimum number of messages in Redis for a lane.
_LEAST: Final = 8

#: Numeric columns of ``shares``.
_NUMBERS: Final = ("seconds", "squares", "ended")
#: Factor with which these columns count now. ``power`` raises an error for results that are too small.
_FADE: Final = func.power(
    0.5, func.least(500.0, func.greatest(0.0, func.extract("epoch", func.now() - Share.at)) / HALF_LIFE_S)
)
#: Query for the next evaluations of each lane, priority and producer. It finds each group with one step through an
#: index, however many evaluations the group has. With many groups, it reads few rows of each. A second pass over each
#: group finds evaluations that were never tried behind those that were. The inner query reads from the start of a group
#: in the order of its index, and the outer one drops rows behind the group. With equality instead, if one producer has
#: most of the evaluations, the planner uses the index by time of submission and reads all of them to find another
#: producer's first one.
_HEADS: Final = text("""
    WITH RECURSIVE groups AS (
        (
            SELECT lane, priority, producer FROM evaluations WHERE state = 'queued'
            ORDER BY lane, priority, producer LIMIT 1
        )
        UNION ALL
        SELECT later.* FROM groups CROSS JOIN LATERAL (
            SELECT e.lane, e.priority, e.producer FROM evaluations AS e
            WHERE e.state = 'queued'
              AND (e.lane, e.priority, e.producer) > (groups.lane, groups.priority, groups.producer)
            ORDER BY e.lane, e.priority, e.producer LIMIT 1
        ) AS later
    )
    SELECT DISTINCT groups.lane, groups.priority, groups.producer, head.*
    FROM groups CROSS JOIN (VALUES (false), (true)) AS kind(untried) CROSS JOIN LATERAL (
        SELECT first.id, first.submitted_at, first.attempts, first.published
        FROM (
            SELECT e.lane, e.priority, e.producer, e.id, e.submitted_at, e.attempts,
                   e.published_at IS NOT NULL AS published
            FROM evaluations AS e
            WHERE e.state = 'queued'
              AND (e.lane, e.priority, e.producer) >= (groups.lane, groups.priority, groups.producer)
              AND e.available_at <= now() AND NOT (kind.untried AND e.attempts > 0)
              AND (e.attempts > 0 OR e.expires_at IS NULL OR e.expires_at > now())
            ORDER BY e.lane, e.priority, e.producer, e.submitted_at, e.id
            LIMIT :most
        ) AS first
        WHERE first.lane = groups.lane AND first.priority = groups.priority AND first.producer = groups.producer
        ORDER BY first.submitted_at, first.id
        LIMIT (SELECT least(:most, 2 + 4 * :most / count(*)) FROM groups AS g WHERE g.lane = groups.lane)
    ) AS head
    ORDER BY groups.lane, groups.priority, groups.producer, head.submitted_at, head.id
""")
_RESOURCE: Final = func.split_part(Evaluation.lane, ".", 1)
_WHOSE: Final = (Share.producer, Share.resource, Share.priority)
#: Query for ended and running attempts in one statement. Between two statements an attempt could end and be in neither.
_USED: Final = union_all(
    select(
        *_WHOSE, *(func.sum(getattr(Share, name) * _FADE).label(name) for name in _NUMBERS), false().label("runs")
    ).group_by(*_WHOSE),
    select(Evaluation.producer, _RESOURCE, Evaluation.priority)
    .add_columns(
        cast(func.extract("epoch", func.now() - Attempt.started_at), Double), literal(0.0), literal(0.0), true()
    )
    .join(Attempt, Attempt.evaluation_id == Evaluation.id)
    .where(Attempt.ended_at.is_(None)),
)
_TALLY: Final = text("""
    WITH gone AS (DELETE FROM shares RETURNING *)
    INSERT INTO shares (producer, resource, priority, seconds, squares, ended, at)
    SELECT producer, resource, priority, sum(seconds * fade), sum(squares * fade), sum(ended * fade), now()
    FROM gone CROSS JOIN LATERAL (
        SELECT power(0.5, least(500, greatest(0, extract(epoch FROM now() - at)) / :half_life)) AS fade
    ) AS fades
    GROUP BY producer, resource, priority
    HAVING max(at) > now() - make_interval(secs => :forgotten)
""")
_WEIGHTS: Final = text("SELECT 'token:' || id AS producer, weight FROM tokens WHERE weight <> 1")
#: Query for the number of attempts that tokens with an upper limit of running attempts can begin now.
_ROOM: Final = text("""
    SELECT 'token:' || t.id AS producer, greatest(0, (t.limits ->> 'running')::int - count(a.id)) AS room
    FROM tokens AS t LEFT JOIN attempts AS a ON a.payer = 'token:' || t.id AND a.ended_at IS NULL
    WHERE t.limits ? 'running' GROUP BY t.id
""")


@dataclass(frozen=True, slots=True)
class Next:
    """An evaluation that is among the next of its lane. ``published`` is True if it has a message in Redis."""

    id: UUID
    priority: Priority
    producer: str
    submitted_at: datetime
    attempts: int
    published: bool


@dataclass(slots=True)
class Used:
    """The recent use of one resource by the attempts of one producer and priority.

    Attributes:
        seconds: seconds of ended attempts, plus the expected seconds of running ones.
        ended: the decayed number of the ended attempts in ``seconds`` and ``squares``.
        mean_s: mean duration in seconds of an attempt.
        squares: the sum of the squares of the ended attempts' seconds.
    """

    seconds: float = 0.0
    ended: float = 0.0
    mean_s: float = _UNKNOWN_S
    squares: float = 0.0


@dataclass(slots=True)
class Shares:
    """The recent use of one resource by all producers, and the mean duration of an attempt."""

    used: dict[tuple[Priority, str], Used] = field(default_factory=dict)
    weights: Mapping[str, float] = field(default_factory=dict)
    mean_s: float = _UNKNOWN_S

    def of(self, priority: Priority, producer: str) -> Used:
        """Return the use by a producer in a priority. Changes to the object take effect."""
        return self.used.setdefault((priority, producer), Used(mean_s=self.mean_s))

    def burden(self, producer: str) -> float:
        """Return a producer's weighted use. The producer with the lowest one goes first."""
        return sum(self.of(p, producer).seconds for p in Priority) / self.weights.get(producer, 1.0)

    def batch_is_due(self) -> bool:
        """Return True if ``batch`` has used less than its share."""
        of = {p: sum(used.seconds for (of, _), used in self.used.items() if of is p) for p in Priority}
        return of[Priority.BATCH] < BATCH_SHARE * (of[Priority.BATCH] + of[Priority.INTERACTIVE])


def window(slots: int) -> int:
    """Return the number of messages to keep in Redis for a lane with this number of live workers."""
    return max(_LEAST, _PER_SLOT * slots)


def upcoming(engine: Engine, slots: Mapping[str, int]) -> dict[str, list[Next]]:
    """Return the next evaluations of each lane in order, as many as its window holds.

    Evaluations with earlier attempts are extra, up to as many again, because the free worker might have to refuse them.
    Lanes without waiting evaluations are omitted. ``slots`` is the number of live workers of each lane.
    """
    most = max(map(window, (0, *slots.values())))
    heads: defaultdict[str, list[Next]] = defaultdict(list)
    with transaction(engine) as connection:
        for row in connection.execute(_HEADS, {"most": most}):
            priority = Priority(row.priority)
            head = Next(row.id, priority, row.producer, row.submitted_at, row.attempts, row.published)
            heads[row.lane].append(head)
        _leave_out(heads, room(connection))
        contested = any(len({(one.priority, one.producer) for one in waiting}) > 1 for waiting in heads.values())
        shares = read_shares(connection) if contested else defaultdict(Shares)
    return {
        lane: list(_merged(waiting, deepcopy(shares[lane.partition(".")[0]]), window(slots.get(lane, 0))))
        for lane, waiting in heads.items()
    }


def room(connection: Connection) -> dict[str, int]:
    """Within the caller's transaction, return how many attempts the producers with an upper limit can begin now."""
    return {row.producer: row.room for row in connection.execute(_ROOM)}


def read_shares(connection: Connection) -> defaultdict[str, Shares]:
    """Within the caller's transaction, return the recent use of each resource."""
    weights = {row.producer: row.weight for row in connection.execute(_WEIGHTS)}
    shares: defaultdict[str, Shares] = defaultdict(lambda: Shares(weights=weights))
    rows = connection.execute(_USED).all()
    for row in rows:
        if not row.runs:
            used = Used(row.seconds, row.ended, squares=row.squares)
            shares[row.resource].used[Priority(row.priority), row.producer] = used
    for share in shares.values():
        if ended := sum(used.ended for used in share.used.values()):
            share.mean_s = sum(used.seconds for used in share.used.values()) / ended
        for used in share.used.values():
            used.mean_s = used.seconds / used.ended if used.ended > 0 else share.mean_s
    for row in rows:
        if row.runs:
            used = shares[row.resource].of(Priority(row.priority), row.producer)
            used.seconds += max(row.seconds, used.mean_s)
    return shares


def tally(engine: Engine) -> None:
    """Merge the rows of ``shares``, and remove those that no longer count. Only one process can do this at a time."""
    with transaction(engine) as connection:
        connection.execute(_TALLY, {"half_life": HALF_LIFE_S, "forgotten": _FORGOTTEN * HALF_LIFE_S})


def charge(closed: CTE) -> CTE:
    """Return the part of a statement that charges an attempt's seconds to its producer.

    An attempt that could not be ended while Postgres was unavailable counts until its lease expired. Probes have no
    producer and are not charged. ``closed`` is the part that ends the attempt and returns its columns.
    """
    until = func.least(closed.c.ended_at, closed.c.lease_until)
    seconds = cast(func.greatest(0.0, func.extract("epoch", until - closed.c.started_at)), Double)
    used = (
        select(Evaluation.producer, _RESOURCE, Evaluation.priority, seconds)
        .add_columns(seconds * seconds, literal(1.0), func.now())
        .join(closed, closed.c.evaluation_id == Evaluation.id)
        .where(REAL)
    )
    return insert(Share).from_select(["producer", "resource", "priority", *_NUMBERS, "at"], used).cte("charged")


def _leave_out(heads: Mapping[str, list[Next]], room: Mapping[str, int]) -> None:
    """Remove the evaluations for whose attempts their producers have no room, if all of it were used on their lane."""
    for waiting in heads.values():
        left = {**room}
        waiting.sort(key=lambda one: list(Priority).index(one.priority))
        for one in waiting.copy():
            if left.get(one.producer) == 0:
                waiting.remove(one)
            elif one.producer in left:
                left[one.producer] -= 1


def _merged(waiting: Iterable[Next], shares: Shares, most: int) -> Iterator[Next]:
    """Yield at most ``most`` evaluations without and ``most`` with earlier attempts, in order. Charge ``shares``."""
    queues: dict[Priority, dict[str, list[Next]]] = {priority: {} for priority in Priority}
    for one in waiting:
        queues[one.priority].setdefault(one.producer, []).append(one)
    for queue in queues.values():
        for of_one in queue.values():
            of_one.reverse()
    burdens = {producer: shares.burden(producer) for queue in queues.values() for producer in queue}

    def first(priority: Priority) -> str:
        queue = queues[priority]
        return min(queue, key=lambda name: (burdens[name], queue[name][-1].submitted_at, name))

    # The remaining number of evaluations to yield, with earlier attempts and without.
    left = {True: most, False: most}
    while left[False]:
        ready = [priority for priority in Priority if queues[priority]]
        if not ready:
            return
        priority = Priority.BATCH if Priority.BATCH in ready and shares.batch_is_due() else ready[0]
        producer = first(priority)
        if priority is Priority.INTERACTIVE and queues[priority][producer][-1].attempts and queues[Priority.BATCH]:
            # Otherwise a producer could delay other producers by interactive evaluations that fail again and again.
            other = first(Priority.BATCH)
            if burdens[other] < burdens[producer]:
                priority, producer = Priority.BATCH, other
        queue = queues[priority]
        one = queue[producer].pop()
        if not queue[producer]:
            del queue[producer]
        if not left[one.attempts > 0]:
            continue
        left[one.attempts > 0] -= 1
        yield one
        used = shares.of(priority, producer)
        used.seconds += used.mean_s
        burdens[producer] = shares.burden(producer)
