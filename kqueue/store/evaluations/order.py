"""Whose turn it is.

Evaluations of one producer, lane and priority go in the order of their submission. Between producers the one goes first
that has used the least of late: seconds of devices, divided by its weight, which count half after every
:data:`HALF_LIFE_S` seconds. What runs counts as if it took as long as that producer's attempts usually do, and longer
if it does. Between priorities ``interactive`` goes first, but ``batch`` keeps :data:`BATCH_SHARE` of the seconds.

Nothing of this is fixed when an evaluation is submitted: whoever asks for the next ones gets them in the order that
holds then. What is ``idle`` goes after all else on its lane.
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

#: After so many seconds what a producer has used counts half. A producer that had all devices for long waits for about
#: as long when another one comes that has used none.
HALF_LIFE_S: Final = 300.0
#: The share of the devices' time that ``batch`` gets while ``interactive`` evaluations wait.
BATCH_SHARE: Final = 0.1
#: Half-lives after which nothing is left of what was used.
_FORGOTTEN: Final = 100
#: The seconds that an attempt is expected to take while nothing is known of its producer or its resource.
_UNKNOWN_S: Final = 1.0
#: Messages in Redis for each slot of a lane, and for a lane with few slots or none. A worker that ends an evaluation
#: finds the next one there, even if nobody fills the window for some seconds.
_PER_SLOT: Final = 3
_LEAST: Final = 8

#: The numbers of a row of ``shares``.
_NUMBERS: Final = ("seconds", "squares", "ended")
#: How much they count now. ``power`` refuses results that are too small.
_FADE: Final = func.power(
    0.5, func.least(500.0, func.greatest(0.0, func.extract("epoch", func.now() - Share.at)) / HALF_LIFE_S)
)
#: The next evaluations of each lane, priority and producer. The groups are found by one step through an index for each,
#: however many evaluations a group has. With many groups, few of each are looked at. Those that were never tried are
#: looked for once more behind those that were. The inner statement reads from the beginning of a group on, in the order
#: of its index, and the outer one drops what lies behind the group. With equality instead, the planner takes the index
#: by time of submission where one producer has most of the evaluations, and reads all of them for another one's head.
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
#: Both what ended and what runs, by one statement: between two an attempt could end, and be in neither.
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


@dataclass(frozen=True, slots=True)
class Next:
    """An evaluation that is among the next of its lane.

    Attributes:
        id: the evaluation.
        priority: its priority.
        producer: whose it is.
        submitted_at: when it was submitted.
        attempts: the number of attempts so far.
        published: True if it has a message in Redis.
    """

    id: UUID
    priority: Priority
    producer: str
    submitted_at: datetime
    attempts: int
    published: bool


@dataclass(slots=True)
class Used:
    """What the attempts of one producer and priority have used of one resource of late.

    Attributes:
        seconds: of ended attempts, and what is expected of those that run.
        ended: the number of ended attempts that ``seconds`` and ``squares`` are of, as they count now.
        mean_s: the seconds that an attempt takes.
        squares: the sum of the squares of the ended attempts' seconds.
    """

    seconds: float = 0.0
    ended: float = 0.0
    mean_s: float = _UNKNOWN_S
    squares: float = 0.0


@dataclass(slots=True)
class Shares:
    """What all have used of one resource.

    Attributes:
        used: by priority and producer.
        weights: of producers whose weight is not 1.
        mean_s: the seconds that an attempt takes, whoever's it is.
    """

    used: dict[tuple[Priority, str], Used] = field(default_factory=dict)
    weights: Mapping[str, float] = field(default_factory=dict)
    mean_s: float = _UNKNOWN_S

    def of(self, priority: Priority, producer: str) -> Used:
        """Return what a producer has used in a priority; changes are kept."""
        return self.used.setdefault((priority, producer), Used(mean_s=self.mean_s))

    def burden(self, producer: str) -> float:
        """Return the number by which producers are compared: the lowest goes first."""
        return sum(self.of(p, producer).seconds for p in Priority) / self.weights.get(producer, 1.0)

    def batch_is_due(self) -> bool:
        """Return True if ``batch`` has had less than its share."""
        of = {p: sum(used.seconds for (of, _), used in self.used.items() if of is p) for p in Priority}
        return of[Priority.BATCH] < BATCH_SHARE * (of[Priority.BATCH] + of[Priority.INTERACTIVE])


def window(slots: int) -> int:
    """Return the number of a lane's messages to keep in Redis.

    Args:
        slots: the number of live workers that serve the lane.
    """
    return max(_LEAST, _PER_SLOT * slots)


def upcoming(engine: Engine, slots: Mapping[str, int]) -> dict[str, list[Next]]:
    """Return the next evaluations of each lane, in order, as many as its window holds.

    Those that were tried before take none of these places, as the worker that is free may have to refuse them: there
    are up to as many more. Lanes for which nothing waits are left out.

    Args:
        engine: the database.
        slots: the number of live workers of each lane.
    """
    most = max(map(window, (0, *slots.values())))
    heads: defaultdict[str, list[Next]] = defaultdict(list)
    with transaction(engine) as connection:
        for row in connection.execute(_HEADS, {"most": most}):
            priority = Priority(row.priority)
            known = Next(row.id, priority, row.producer, row.submitted_at, row.attempts, row.published)
            heads[row.lane].append(known)
        contested = any(_contested(waiting) for waiting in heads.values())
        shares = read_shares(connection) if contested else defaultdict(Shares)
    return {
        lane: list(_merged(waiting, deepcopy(shares[_resource(lane)]), window(slots.get(lane, 0))))
        for lane, waiting in heads.items()
    }


def read_shares(connection: Connection) -> defaultdict[str, Shares]:
    """Return what all have used of each resource, within the caller's transaction."""
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
    """Add up what was used, and remove what counts for nothing any more. One at a time may do so."""
    with transaction(engine) as connection:
        connection.execute(_TALLY, {"half_life": HALF_LIFE_S, "forgotten": _FORGOTTEN * HALF_LIFE_S})


def charge(closed: CTE) -> CTE:
    """Return the part of a statement that counts an attempt's seconds as used by its producer.

    What nobody could end, as Postgres was away, counts until its lease ran out. Probes are nobody's, and used by none.

    Args:
        closed: the part that ends the attempt, with what it returns of it.
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


def _resource(lane: str) -> str:
    return lane.partition(".")[0]


def _contested(waiting: Iterable[Next]) -> bool:
    """Return True if more than one priority or producer waits."""
    return len({(one.priority, one.producer) for one in waiting}) > 1


def _merged(waiting: Iterable[Next], shares: Shares, most: int) -> Iterator[Next]:
    """Yield those of the evaluations whose turn it is first. Charges ``shares`` for each.

    Args:
        waiting: the evaluations of one lane, in the order of submission for each priority and producer.
        shares: what their producers have used.
        most: how many that were never tried, at most, and how many that were.
    """
    queues: dict[Priority, dict[str, list[Next]]] = {priority: {} for priority in Priority}
    for one in waiting:
        queues[one.priority].setdefault(one.producer, []).append(one)
    for queue in queues.values():
        for of_one in queue.values():
            of_one.reverse()
    burdens = {producer: shares.burden(producer) for queue in queues.values() for producer in queue}
    # Places for those that were tried before, and for others.
    left = {True: most, False: most}
    while left[False]:
        ready = [priority for priority in Priority if queues[priority]]
        if not ready:
            return
        priority = Priority.BATCH if Priority.BATCH in ready and shares.batch_is_due() else ready[0]
        queue = queues[priority]
        producer = min(queue, key=lambda name: (burdens[name], queue[name][-1].submitted_at, name))
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
