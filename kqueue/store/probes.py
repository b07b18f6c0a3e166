"""Probes: scheduling, results and pauses. All times are by the database's clock.

A sweeper calls :func:`step` every few seconds. It settles the probes that have verdicts, pauses the devices that judged
wrongly, and submits the probes that are due. A device is a GPU, or all CPU slots of a host.

- A cheat that passed pauses its device at once, because it cannot be chance.
- Any other wrong finding must be confirmed by further probes of the same kind on the lane: two of a device's last three
  must be wrong. Workers cannot be chosen, so other devices can get some of these probes. Their number is limited.

Every function is one transaction unless noted, and raises :class:`~kqueue.errors.DatabaseUnavailable` if Postgres
cannot be used.
"""

from __future__ import annotations

import random
import statistics
from collections import defaultdict
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any, Final
from uuid import UUID, uuid4

from sqlalchemy import ColumnElement, Connection, Engine, Row, func, literal, or_, select, text, update
from sqlalchemy.dialects.postgresql import JSONB, insert

from kqueue import probes
from kqueue.probes import Judgement
from kqueue.states import Finding, ProbeKind
from kqueue.store import clean, gpus
from kqueue.store.engine import transaction
from kqueue.store.evaluations import REAL, VERDICTS, to_verdict
from kqueue.store.models import Attempt, Evaluation, Probe, ProbeLane, ProbePause, Verdict, Worker
from kqueue.store.sql import any_text, any_uuid, read

#: Maximum age in seconds of the ended evaluations that count after a period without a sweeper.
_COUNTED_S: Final = 600.0
#: Number of a device's last probes of a kind among which wrong ones are counted.
_LAST: Final = 3
#: Number of wrong ones among them that rules out chance.
_WRONG: Final = 2
#: Number of confirming probes after a wrong finding, for each device of the lane.
_CONFIRMING: Final = 4
#: Maximum number of confirming probes for a lane.
_MOST_CONFIRMING: Final = 24
#: Time after which an unconfirmed finding counts as chance.
_RECENT: Final = timedelta(hours=6)
#: Findings that are not evidence against the judge.
_GOOD: Final = (Finding.AGREED, Finding.VOID)
_REASON_CHARACTERS: Final = 300
#: Default period of :func:`record`.
_DAY: Final = timedelta(days=1)
#: Maximum number of suspect verdicts that are counted for a pause. :func:`doubted` lists all.
MOST_DOUBTED: Final = 10_000
#: Key of the advisory lock with which only one sweeper settles and submits.
_LOCK: Final = 0x6B71_7565_7565_0004


@dataclass(frozen=True, slots=True)
class Settled:
    """A probe with a verdict, and the finding that follows.

    Attributes:
        evaluation_id, lane, kind, idea: the probe.
        finding, words, bias: the result (:class:`~kqueue.probes.Judgement`).
        worker, host, device: the worker that judged it. None if no worker did.
        judged_at: time of the verdict, UTC.
    """

    evaluation_id: UUID
    lane: str
    kind: ProbeKind
    idea: str
    finding: Finding
    words: str
    bias: float | None
    worker: str | None
    host: str | None
    device: str | None
    judged_at: datetime | None


@dataclass(frozen=True, slots=True)
class Pause:
    """A device that was taken out of service because of probes.

    Attributes:
        id: the pause's number.
        host, device: the device. ``device`` is a GPU's UUID, or ``cpu``.
        probes: the evaluations that are evidence for it.
        doubted_since: time of the device's last good probe of that kind, UTC. None if there was none.
        paused_at, resumed_at: start and end of the pause, UTC.
        doubted: number of suspect verdicts, which the device reached on real evaluations since
            ``doubted_since``, at most :data:`MOST_DOUBTED`.
    """

    id: int
    host: str
    device: str
    finding: Finding
    reason: str
    probes: tuple[UUID, ...]
    doubted_since: datetime | None
    paused_at: datetime
    resumed_at: datetime | None
    doubted: int


@dataclass(frozen=True, slots=True)
class Step:
    """The actions of one :func:`step`.

    Attributes:
        settled: the probes whose verdicts were evaluated.
        paused: the devices that were taken out of service.
        submitted: the probes that were submitted. The sweeper sends their messages.
    """

    settled: tuple[Settled, ...] = ()
    paused: tuple[Pause, ...] = ()
    submitted: tuple[UUID, ...] = ()


@dataclass(frozen=True, slots=True)
class Clock:
    """The timing errors of known-duration kernels on one kind of device.

    Attributes:
        resource: ``cpu`` or ``gpu``.
        spins: number of known-duration kernels.
        bias: median error of the measured time, relative to the known duration.
        worst: the error with the largest absolute value.
    """

    resource: str
    spins: int
    bias: float
    worst: float


@dataclass(frozen=True, slots=True)
class Record:
    """The results of probes over a period.

    Attributes:
        judged: number of probes with a finding.
        void: number of probes without one, because the fleet failed or no worker judged them.
        cheats, honest, spins: number of judged probes of each kind.
        findings: number of probes for each finding except ``void``.
        clocks: the timing errors of known-duration kernels.
        places: number of devices that judged a probe.
        unmet: names of live workers that judged none.
        pauses: the devices that are out of service now.
    """

    judged: int
    void: int
    cheats: int
    honest: int
    spins: int
    findings: dict[Finding, int]
    clocks: tuple[Clock, ...]
    places: int
    unmet: tuple[str, ...]
    pauses: tuple[Pause, ...]

    @property
    def cheats_accepted(self) -> int:
        """Number of cheats that passed."""
        return self.findings.get(Finding.CHEAT_ACCEPTED, 0)

    @property
    def honest_refused(self) -> int:
        """Number of honest kernels that did not pass."""
        return self.findings.get(Finding.HONEST_REFUSED, 0)

    @property
    def wrong(self) -> int:
        """Number of probes with any wrong finding."""
        return sum(number for finding, number in self.findings.items() if finding not in _GOOD)


def step(engine: Engine, *, share: float, live_s: float) -> Step:
    """Settle probes, pause devices that judged them wrongly, and submit due probes, in several transactions.

    Concurrent sweepers are safe: only one settles each probe, and each due probe is submitted once.

    Args:
        share: number of probes for each judged evaluation. 0 submits none.
        live_s: seconds without a heartbeat for which a worker counts as alive.
    """
    with transaction(engine) as connection:
        connection.execute(select(func.pg_advisory_xact_lock(_LOCK)))
        settled = _settle(connection)
        paused = _pause_all(connection)
    if share <= 0:
        return Step(settled, paused)
    with transaction(engine) as connection:
        connection.execute(select(func.pg_advisory_xact_lock(_LOCK)))
        submitted = _submit_due(connection, share, live_s)
    return Step(settled, paused, submitted)


def submit(engine: Engine, lane: str, kind: ProbeKind | None = None) -> UUID:
    """Submit a probe now, due or not, and return its evaluation.

    Args:
        kind: its kind. None for a random kind.
    """
    with transaction(engine) as connection:
        return _write(connection, probes.draw(lane, kind), confirms=False)


def held(engine: Engine, host: str) -> str | None:
    """Return the reason why a host's CPU slots must accept no evaluations, or None if they can."""
    query = select(ProbePause.reason).where(
        ProbePause.host == host, ProbePause.device == "cpu", ProbePause.resumed_at.is_(None)
    )
    with transaction(engine) as connection:
        return connection.scalars(query.order_by(ProbePause.id).limit(1)).first()


def resume(engine: Engine, host: str) -> int:
    """End all pauses of a host's CPU slots and return their number. The supervisor then resumes the workers."""
    ended = update(ProbePause).where(
        ProbePause.host == host, ProbePause.device == "cpu", ProbePause.resumed_at.is_(None)
    )
    with transaction(engine) as connection:
        return connection.execute(ended.values(resumed_at=func.now())).rowcount


def pauses(engine: Engine, *, since: datetime | None = None) -> list[Pause]:
    """Return the current pauses, and with ``since`` also the ended ones that began later, the latest first."""
    now = ProbePause.resumed_at.is_(None)
    with transaction(engine) as connection:
        return _pauses(connection, now if since is None else or_(now, ProbePause.paused_at >= since))


def doubted(engine: Engine, pause_id: int) -> list[UUID]:
    """Return the evaluations with suspect verdicts of a pause, the earliest first, or none for an unknown pause."""
    with transaction(engine) as connection:
        row = connection.execute(select(*ProbePause.__table__.columns).where(ProbePause.id == pause_id)).one_or_none()
        if row is None:
            return []
        query = _doubted(row, Evaluation.id).order_by(Verdict.finished_at, Evaluation.id)
        return list(connection.scalars(query))


def listing(engine: Engine, *, since: datetime, limit: int) -> list[Settled]:
    """Return the probes that were settled since a time, the latest first."""
    columns = [getattr(Probe, name) for name in Settled.__dataclass_fields__]
    query = select(*columns).where(Probe.settled_at >= since).order_by(Probe.settled_at.desc(), Probe.evaluation_id)
    with transaction(engine) as connection:
        return read(Settled, connection.execute(query.limit(limit)))


def record(engine: Engine, *, live_s: float, since: datetime | None = None) -> Record:
    """Return the results of probes.

    Args:
        live_s: seconds without a heartbeat for which a worker counts as alive.
        since: start of the period. None for the last day.
    """
    columns = (Probe.kind, Probe.finding, Probe.bias, Probe.lane, Probe.worker, Probe.host, Probe.device)
    with transaction(engine) as connection:
        begun = func.now() - _DAY if since is None else since
        rows = connection.execute(select(*columns).where(Probe.settled_at >= begun)).all()
        live = connection.scalars(
            select(Worker.name).where(
                Worker.stopped_at.is_(None), Worker.heartbeat_at >= func.now() - timedelta(seconds=live_s)
            )
        ).all()
        paused = _pauses(connection, ProbePause.resumed_at.is_(None))
    judged = [row for row in rows if row.finding != Finding.VOID]
    findings: defaultdict[Finding, int] = defaultdict(int)
    kinds: defaultdict[str, int] = defaultdict(int)
    biases: defaultdict[str, list[float]] = defaultdict(list)
    for row in judged:
        findings[Finding(row.finding)] += 1
        kinds[row.kind] += 1
        if row.bias is not None:
            biases["cpu" if row.device == "cpu" else "gpu"].append(row.bias)
    return Record(
        judged=len(judged),
        void=len(rows) - len(judged),
        cheats=kinds[ProbeKind.CHEAT],
        honest=kinds[ProbeKind.HONEST],
        spins=kinds[ProbeKind.SPIN],
        findings={finding: findings[finding] for finding in Finding if findings[finding]},
        clocks=tuple(
            Clock(resource, len(of), statistics.median(of), max(of, key=abs)) for resource, of in sorted(biases.items())
        ),
        places=len({(row.host, row.device) for row in judged}),
        unmet=tuple(sorted(set(live) - {row.worker for row in judged})),
        pauses=tuple(paused),
    )


# Results of probes -------------------------------------------------------------------------------------


def _settle(connection: Connection) -> tuple[Settled, ...]:
    """Settle the probes that have verdicts. A probe whose evaluation was removed is void."""
    gone = ~select(Evaluation.id).where(Evaluation.id == Probe.evaluation_id).exists()
    judged = select(Verdict.evaluation_id).where(Verdict.evaluation_id == Probe.evaluation_id).exists()
    open_ones = connection.execute(
        select(Probe.evaluation_id, Probe.lane, Probe.kind, Probe.idea, Probe.spin_ms)
        .where(Probe.settled_at.is_(None), or_(judged, gone))
        .order_by(Probe.submitted_at)
    ).all()
    if not open_ones:
        return ()
    ids = [row.evaluation_id for row in open_ones]
    verdicts: dict[UUID, Any] = {}
    for row in connection.execute(VERDICTS.where(Verdict.evaluation_id == any_uuid(ids))).mappings():
        with suppress(ValueError):  # a verdict of another version must not stop the sweep
            verdicts[row["evaluation_id"]] = to_verdict(row)
    by = {
        row.evaluation_id: row
        for row in connection.execute(
            select(Verdict.evaluation_id, Worker.name, Worker.host, Worker.device)
            .join(Attempt, Attempt.id == Verdict.attempt_id)
            .join(Worker, Worker.id == Attempt.worker_id)
            .where(Verdict.evaluation_id == any_uuid(ids))
        )
    }
    settled = [_settled(row, verdicts.get(row.evaluation_id), by.get(row.evaluation_id)) for row in open_ones]
    for one in settled:
        names = ("finding", "words", "bias", "judged_at", "worker", "host", "device")
        values = {name: getattr(one, name) for name in names}
        connection.execute(
            update(Probe).where(Probe.evaluation_id == one.evaluation_id).values(settled_at=func.now(), **values)
        )
    return tuple(settled)


def _settled(row: Row[*tuple[Any, ...]], verdict: Any, by: Row[*tuple[Any, ...]] | None) -> Settled:
    kind = ProbeKind(row.kind)
    if verdict is None:
        judgement = Judgement(Finding.VOID, "the evaluation was removed, or its verdict cannot be read")
    elif by is None:
        judgement = Judgement(Finding.VOID, f"{verdict.category}: no worker judged it")
    else:
        judgement = probes.judge(verdict, kind=kind, spin_ms=row.spin_ms)
    return Settled(
        evaluation_id=row.evaluation_id,
        lane=row.lane,
        kind=kind,
        idea=row.idea,
        finding=judgement.finding,
        words=judgement.words,
        bias=judgement.bias,
        worker=by.name if by else None,
        host=by.host if by else None,
        device=by.device if by else None,
        judged_at=verdict.finished_at if verdict else None,
    )


# Pauses ------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Suspicion:
    """The last probes of a kind on a device that judged one of them wrongly, the latest first."""

    host: str
    device: str
    kind: ProbeKind
    last: list[Row[*tuple[Any, ...]]]

    @property
    def wrong(self) -> list[Row[*tuple[Any, ...]]]:
        """The probes that were judged wrongly."""
        return [row for row in self.last if row.finding not in _GOOD]

    @property
    def is_sure(self) -> bool:
        """True if chance is ruled out."""
        return len(self.wrong) >= _WRONG or any(row.finding == Finding.CHEAT_ACCEPTED for row in self.wrong)

    @property
    def is_open(self) -> bool:
        """True if one more probe could confirm the suspicion."""
        return bool(self.wrong) and not self.is_sure and self.last.index(self.wrong[0]) < _LAST - _WRONG + 1


#: Query for the last probes of each device and kind with a recent wrong finding.
_SUSPECTED: Final = text("""
    WITH suspected AS (
        SELECT DISTINCT host, device, kind FROM probes
        WHERE settled_at > now() - :recent AND NOT spent AND finding NOT IN ('agreed', 'void') AND host IS NOT NULL
    )
    SELECT host, device, kind, last.* FROM suspected CROSS JOIN LATERAL (
        SELECT p.evaluation_id, p.lane, p.finding, p.words, p.worker, p.judged_at, p.settled_at FROM probes AS p
        WHERE p.host = suspected.host AND p.device = suspected.device AND p.kind = suspected.kind
          AND p.settled_at > now() - :recent AND NOT p.spent AND p.finding <> 'void'
        ORDER BY p.settled_at DESC, p.judged_at DESC LIMIT :last
    ) AS last
    ORDER BY host, device, kind, settled_at DESC
""")


def _suspicions(connection: Connection) -> list[_Suspicion]:
    suspicions: dict[tuple[str, str, str], _Suspicion] = {}
    for row in connection.execute(_SUSPECTED, {"recent": _RECENT, "last": _LAST}):
        key = row.host, row.device, row.kind
        suspicions.setdefault(key, _Suspicion(row.host, row.device, ProbeKind(row.kind), [])).last.append(row)
    return list(suspicions.values())


def _pause_all(connection: Connection) -> tuple[Pause, ...]:
    paused = [_pause(connection, one) for one in _suspicions(connection) if one.is_sure]
    return tuple(pause for pause in paused if pause is not None)


def _pause(connection: Connection, one: _Suspicion) -> Pause | None:
    """Take a device out of service if it is not. Its earlier probes no longer count, so that it can be resumed."""
    wrong = [row for row in one.wrong if row.finding == Finding.CHEAT_ACCEPTED] or one.wrong
    latest = wrong[0]
    here = (Probe.host == one.host, Probe.device == one.device)
    good = connection.scalar(
        select(func.max(Probe.judged_at)).where(
            *here,
            Probe.kind == one.kind,
            Probe.finding == Finding.AGREED,
            # A judge that fails intermittently can agree between two wrong findings.
            Probe.judged_at < min(row.judged_at for row in wrong),
        )
    )
    reason = clean.text(f"probes were judged wrongly: {latest.words} by {latest.worker}")[:_REASON_CHARACTERS]
    connection.execute(update(Probe).where(*here, Probe.settled_at.is_not(None)).values(spent=True))
    since = select(ProbePause.id).where(
        ProbePause.host == one.host, ProbePause.device == one.device, ProbePause.resumed_at.is_(None)
    )
    if connection.scalars(since.limit(1)).first() is not None:
        return None  # already paused, and these probes had begun before
    pause_id = connection.scalars(
        insert(ProbePause)
        .values(
            host=one.host,
            device=one.device,
            finding=latest.finding,
            reason=reason,
            probes=[row.evaluation_id for row in wrong],
            doubted_since=good,
        )
        .returning(ProbePause.id)
    ).one()
    if one.device == "cpu":
        # The workers are paused at once, so that claims before the supervisor's next check are refused. The supervisor
        # ends the pause.
        mine = (Worker.host == one.host, Worker.device == "cpu", Worker.stopped_at.is_(None))
        connection.execute(update(Worker).where(*mine).values(paused=reason))
    else:
        gpus.quarantine(connection, one.device, reason=reason)
    [pause] = _pauses(connection, ProbePause.id == pause_id)
    return pause


def _pauses(connection: Connection, which: ColumnElement[bool]) -> list[Pause]:
    rows = connection.execute(select(*ProbePause.__table__.columns).where(which).order_by(ProbePause.id.desc())).all()
    few = [_doubted(row, Verdict.evaluation_id).limit(MOST_DOUBTED).subquery() for row in rows]
    counts = [connection.scalar(select(func.count()).select_from(one)) for one in few]
    return [read(Pause, [row], doubted=number)[0] for row, number in zip(rows, counts, strict=True)]


def _doubted(pause: Row[*tuple[Any, ...]], column: Any) -> Any:
    """Return the query for a column of the real evaluations that a paused device judged since its last good probe."""
    query = (
        select(column)
        .select_from(Verdict)
        .join(Attempt, Attempt.id == Verdict.attempt_id)
        .join(Worker, Worker.id == Attempt.worker_id)
        .join(Evaluation, Evaluation.id == Verdict.evaluation_id)
        .where(
            Worker.host == pause.host,
            Worker.device == pause.device,
            Verdict.finished_at <= func.coalesce(pause.resumed_at, func.now()),
            REAL,
        )
    )
    return query if pause.doubted_since is None else query.where(Verdict.finished_at > pause.doubted_since)


# Submission --------------------------------------------------------------------------------------------

#: Statement that counts the judges' verdicts of each lane since its last execution. Verdicts that commit meanwhile are
#: missed, which is harmless.
_COUNT: Final = text("""
    WITH counted AS (
        SELECT e.lane, count(*) AS number
        FROM verdicts AS v
        JOIN evaluations AS e ON e.id = v.evaluation_id
        JOIN probe_lanes AS l ON l.lane = e.lane
        WHERE v.finished_at > greatest(:oldest, now() - make_interval(secs => :counted_s))
          AND v.finished_at > l.looked_at AND v.attempt_id IS NOT NULL AND NOT e.probe
        GROUP BY e.lane
    )
    UPDATE probe_lanes AS l
    SET ended = l.ended + coalesce((SELECT number FROM counted WHERE counted.lane = l.lane), 0), looked_at = now()
    WHERE EXISTS (SELECT FROM counted) AND l.lane = ANY(:lanes)
""")


def _submit_due(connection: Connection, share: float, live_s: float) -> tuple[UUID, ...]:
    """Submit at most one probe for each lane that has no open one."""
    free = _free_lanes(connection, live_s)
    if not free:
        return ()
    fresh = [{"lane": lane, "due_after": _interval(share)} for lane in sorted(free)]
    connection.execute(insert(ProbeLane).on_conflict_do_nothing(), fresh)
    oldest = connection.scalar(select(func.min(ProbeLane.looked_at)).where(ProbeLane.lane == any_text(free)))
    connection.execute(_COUNT, {"oldest": oldest, "counted_s": _COUNTED_S, "lanes": list(free)})
    busy = set(connection.scalars(select(Probe.lane).where(Probe.settled_at.is_(None)).distinct()))
    due = {
        row.lane: row.due_after
        for row in connection.execute(
            select(ProbeLane.lane, ProbeLane.due_after).where(
                ProbeLane.lane == any_text(free), ProbeLane.ended >= ProbeLane.due_after
            )
        )
    }
    submitted: list[UUID] = []
    for lane, kind in _wanted(connection, free).items():
        if lane not in busy:
            submitted.append(_write(connection, probes.draw(lane, kind), confirms=True))
            busy.add(lane)
    for lane in sorted(due.keys() - busy):
        submitted.append(_write(connection, probes.draw(lane), confirms=False))
        connection.execute(
            update(ProbeLane).where(ProbeLane.lane == lane).values(ended=0.0, due_after=_interval(share))
        )
    return tuple(submitted)


def _interval(share: float) -> float:
    """Return a random number of evaluations until the next probe, about ``1 / share``."""
    # It is random so that no producer can predict a probe.
    return random.SystemRandom().uniform(0.5, 1.5) / share


def _free_lanes(connection: Connection, live_s: float) -> dict[str, int]:
    """Return the lanes that some live and unpaused worker serves, with their numbers of devices."""
    devices: defaultdict[str, set[tuple[str, str]]] = defaultdict(set)
    alive = (Worker.stopped_at.is_(None), Worker.heartbeat_at >= func.now() - timedelta(seconds=live_s))
    query = select(Worker.lanes, Worker.host, Worker.device).where(*alive, Worker.paused.is_(None))
    for lanes, host, device in connection.execute(query):
        for lane in lanes:
            devices[lane].add((host, device))
    return {lane: len(of) for lane, of in devices.items()}


def _wanted(connection: Connection, free: dict[str, int]) -> dict[str, ProbeKind]:
    """Return, by lane, the kind of probe that could still confirm a wrong finding there."""
    wanted: dict[str, ProbeKind] = {}
    for one in _suspicions(connection):
        first = min(one.wrong, key=lambda row: row.settled_at) if one.wrong else None
        if first is None or not one.is_open or first.lane not in free:
            continue
        tried = connection.scalar(
            select(func.count()).where(
                Probe.lane == first.lane,
                Probe.kind == one.kind,
                Probe.confirms.is_(True),
                Probe.submitted_at >= first.settled_at,
            )
        )
        if (tried or 0) < min(_CONFIRMING * free[first.lane], _MOST_CONFIRMING):
            wanted.setdefault(first.lane, one.kind)
    return wanted


def _write(connection: Connection, probe: probes.Probe, *, confirms: bool) -> UUID:
    identity, request = uuid4(), probe.request
    # A function of the database writes the probe, because sweepers lack the right to write sources and evaluations.
    fields = {
        "id": str(identity),
        "problem": request.problem,
        "kernel": request.kernel,
        "backend": request.backend.value,
        "lane": request.lane,
        "settings": request.settings.model_dump(mode="json"),
        "queue_wait_s": request.queue_wait_s,
        "kind": probe.kind.value,
        "idea": probe.idea,
        "spin_ms": probe.spin_ms,
        "confirms": confirms,
    }
    connection.execute(select(func.kqueue_probe(literal(fields, JSONB))))
    return identity
