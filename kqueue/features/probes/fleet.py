"""Probes on a fleet: scheduling, results and pauses. All times are by the database's clock.

A sweeper calls :func:`sweep` every few seconds, which settles the probes that have verdicts, pauses the devices that
judged wrongly, and submits the probes that are due. A device is a GPU, or all CPU slots of a host.

- A cheat that passed pauses its device at once, because it cannot be chance.
- Any other wrong finding must be confirmed by further probes of the same kind on the lane: two of a device's last three
  must be wrong. Workers cannot be chosen, so other devices can get some of these probes. Their number is limited.

Every function is one transaction unless noted, and raises :class:`~kqueue.errors.DatabaseUnavailable` if Postgres
cannot be used.
"""

from __future__ import annotations

import logging
import random
import statistics
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any, ClassVar, Final, NamedTuple, Self
from uuid import UUID, uuid4

from sqlalchemy import ColumnElement, Connection, Engine, Row, func, literal, literal_column, or_, select, text, update
from sqlalchemy.dialects.postgresql import JSONB, insert
from sqlalchemy.exc import NoResultFound

from kqueue.contract import Request
from kqueue.errors import InvalidRequest
from kqueue.features.probes import drawing
from kqueue.features.probes.drawing import Judgement
from kqueue.figures import age
from kqueue.states import Finding, ProbeKind
from kqueue.store import clean, gpus
from kqueue.store.engine import transaction
from kqueue.store.evaluations import REAL, VERDICTS, to_verdict
from kqueue.store.models import Attempt, Evaluation, Probe, ProbeLane, ProbePause, Verdict, Worker
from kqueue.store.sql import any_text, read

if TYPE_CHECKING:
    from kqueue.config import Config
    from kqueue.doctor import Result

_log = logging.getLogger(__name__)

#: After a period without a sweeper, evaluations that ended more than this many seconds ago do not count towards the
#: next probe.
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
#: Period of a :class:`Record`.
_DAY: Final = timedelta(days=1)
#: Maximum number of suspect verdicts that are counted for a pause. :func:`suspect_verdicts` lists all.
MOST_SUSPECT: Final = 10_000
#: Statement after which only one sweeper settles and submits. Reading and writing the table go on.
_ALONE: Final = text("LOCK TABLE probe_lanes IN SHARE UPDATE EXCLUSIVE MODE")


@dataclass(frozen=True, slots=True)
class Settled:
    """A probe with a verdict. The fields are columns of :class:`~kqueue.store.models.Probe`."""

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


_SETTLED: Final[list[ColumnElement[Any]]] = [getattr(Probe, name) for name in Settled.__dataclass_fields__]


@dataclass(frozen=True, slots=True)
class Pause:
    """A device that was taken out of service because of probes.

    The other fields are the columns of :class:`~kqueue.store.models.ProbePause`.

    Attributes:
        doubted: number of suspect verdicts, which the device reached on real evaluations since
            ``doubted_since``, at most :data:`MOST_SUSPECT`.
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
    """The probes that one :func:`step` settled and submitted, and the devices that it paused."""

    settled: tuple[Settled, ...] = ()
    paused: tuple[Pause, ...] = ()
    submitted: tuple[UUID, ...] = ()


@dataclass(frozen=True, slots=True)
class Clock:
    """The timing errors of known-duration kernels on one kind of device, relative to the known duration.

    Attributes:
        resource: ``cpu`` or ``gpu``.
        kernels: number of known-duration kernels.
        bias, worst: median error of the measured time, and the error with the largest absolute value.
    """

    resource: str
    kernels: int
    bias: float
    worst: float


@dataclass(frozen=True, slots=True)
class Record:
    """The results of probes in the last day.

    Attributes:
        judged: number of probes with a finding.
        void: number of probes without one, because the fleet failed or no worker judged them.
        cheats, honest, known_durations: number of judged probes of each kind.
        findings: number of probes for each finding except ``void``.
        clocks: the timing errors of known-duration kernels.
        places: number of devices that judged a probe.
        unmet: names of live workers that judged none.
        pauses: the devices that are out of service now.
        cheats_accepted, honest_refused, wrong: number of cheats that passed, of honest kernels that did not, and of
            probes with any wrong finding.
    """

    most_doubted: ClassVar[int] = MOST_SUSPECT
    judged: int
    void: int
    cheats: int
    honest: int
    known_durations: int
    findings: dict[Finding, int]
    clocks: tuple[Clock, ...]
    places: int
    unmet: tuple[str, ...]
    pauses: tuple[Pause, ...]
    cheats_accepted: int
    honest_refused: int
    wrong: int

    @classmethod
    def read(cls, engine: Engine, *, live_s: float) -> Self:
        """Return the record. A worker counts as alive for ``live_s`` seconds without a heartbeat."""
        with transaction(engine) as connection:
            rows = connection.execute(select(*_SETTLED).where(Probe.settled_at >= func.now() - _DAY)).all()
            live = connection.scalars(select(Worker.name).where(*_alive(live_s))).all()
            paused = _pauses(connection, ProbePause.resumed_at.is_(None))
        judged = [row for row in rows if row.finding != Finding.VOID]
        findings, kinds = Counter(row.finding for row in judged), Counter(row.kind for row in judged)
        biases: defaultdict[str, list[float]] = defaultdict(list)
        for row in judged:
            if row.bias is not None:
                biases["cpu" if row.device == "cpu" else "gpu"].append(row.bias)
        return cls(
            judged=len(judged),
            void=len(rows) - len(judged),
            cheats=kinds[ProbeKind.CHEAT],
            honest=kinds[ProbeKind.HONEST],
            known_durations=kinds[ProbeKind.KNOWN_DURATION],
            findings={finding: findings[finding] for finding in Finding if findings[finding]},
            clocks=tuple(
                Clock(of, len(by), statistics.median(by), max(by, key=abs)) for of, by in sorted(biases.items())
            ),
            places=len({(row.host, row.device) for row in judged}),
            unmet=tuple(sorted(set(live) - {row.worker for row in judged})),
            pauses=tuple(paused),
            cheats_accepted=findings[Finding.CHEAT_ACCEPTED],
            honest_refused=findings[Finding.HONEST_REFUSED],
            wrong=sum(row.finding not in _GOOD for row in judged),
        )

    def lines(self) -> Iterator[tuple[str, str]]:
        """Yield the record as text, each line with its style."""
        if self.judged:
            line = (
                f"the judge: {self.judged} probes in the last day: {self.cheats_accepted} of {self.cheats} cheats "
                f"accepted, {self.honest_refused} of {self.honest + self.known_durations} honest kernels refused"
            )
            for one in self.clocks:
                line += f", the {one.resource} clock {one.bias:+.1%} (at worst {one.worst:+.1%}, {one.kernels} kernels)"
            yield line, "yellow" if self.wrong else ""
        for one in self.pauses:
            line = f"{one.device} of {one.host} is paused by probes since {age(one.paused_at)}: {one.reason}"
            yield f"{line}. {one.doubted} verdicts are in doubt (`kqueue probe doubted {one.id}`)", "bold red"

    def check(self, config: Config) -> Result:
        """Return the doctor's check."""
        from kqueue.doctor import Result, State

        words = "; ".join(line for line, _ in self.lines())
        if self.pauses:
            fix = "see docs/gpu-health.md#probes. `kqueue probe pauses` lists them with the number of verdicts in doubt"
            return Result(words, fix, State.FAIL)
        if self.wrong:
            fix = "see `kqueue probe list`. Further probes confirm a single wrong verdict before a device is paused"
            return Result(words, fix)
        off = "KQUEUE_PROBE_SHARE is 0 here" if config.probe_share == 0 else "none was judged within a day"
        return Result(words) if self.judged else Result(off, state=State.INFO)

    def gauges(self) -> Iterator[tuple[str, str, tuple[str, ...], dict[tuple[str, ...], float]]]:
        """Yield the metrics: the name, the description, the labels, and the values by the labels' values."""
        findings = {(one.value,): float(self.findings.get(one, 0)) for one in Finding if one is not Finding.VOID}
        yield "probes_day", "Probes of the judge in the last day, by finding.", ("finding",), findings
        bias: dict[tuple[str, ...], float] = {(one.resource,): one.bias for one in self.clocks}
        words = "Median relative excess of the measured times of known-duration kernels in the last day."
        yield "probe_clock_bias_ratio", words, ("device",), bias
        paused, doubted = Counter[tuple[str, ...]](), Counter[tuple[str, ...]]()
        for one in self.pauses:
            where = one.host, "cpu" if one.device == "cpu" else "gpu"
            paused[where] += 1
            doubted[where] += one.doubted
        words = "Slots that are paused because probes were judged wrongly."
        yield "probe_paused", words, ("host", "device"), {**paused}
        words = "Verdicts of these slots since their last correctly judged probe."
        yield "probe_suspect_verdicts", words, ("host", "device"), {**doubted}


def sweep(engine: Engine, config: Config | None, *, live_s: float) -> bool:
    """Do one :func:`step` and log the wrong verdicts. Return True if it submitted probes, none without settings."""
    done = step(engine, share=0.0 if config is None else config.probe_share, live_s=live_s)
    for pause in done.paused:
        where = f"{pause.device} of {pause.host} is paused ({pause.id}), {pause.doubted} verdicts are in doubt"
        _log.error("probes were judged wrongly: %s: %s", where, pause.reason)
    for one in done.settled:
        if one.finding not in _GOOD:
            _log.warning("a probe was judged wrongly: %s: %s by %s", one.evaluation_id, one.words, one.worker)
    return bool(done.submitted)


def honest(lane: str) -> Request:
    """Return the request of an honest kernel, which any correct judge passes."""
    return drawing.draw(lane, ProbeKind.HONEST).request


def step(engine: Engine, *, share: float, live_s: float) -> Step:
    """Settle probes, pause devices that judged them wrongly, and submit due probes, in several transactions.

    Concurrent sweepers are safe: only one settles each probe, and each due probe is submitted once. ``share`` probes
    are submitted for each judged evaluation. A worker counts as alive for ``live_s`` seconds without a heartbeat.
    """
    with transaction(engine) as connection:
        connection.execute(_ALONE)
        settled = _settle(connection)
        paused = [_pause(connection, one) for one in _suspicions(connection) if one.is_sure]
    done = Step(tuple(settled), tuple(filter(None, paused)))
    if share <= 0:
        return done
    with transaction(engine) as connection:
        connection.execute(_ALONE)
        return replace(done, submitted=_submit_due(connection, share, live_s))


def submit(engine: Engine, lane: str, kind: ProbeKind | None = None) -> UUID:
    """Submit a probe now, due or not, and return its evaluation. Without a ``kind`` it is random."""
    with transaction(engine) as connection:
        return _write(connection, drawing.draw(lane, kind), confirms=False)


def held(engine: Engine, host: str) -> str | None:
    """Return the reason why a host's CPU slots must accept no evaluations, or None if they can."""
    query = select(ProbePause.reason).where(*_paused(host, "cpu")).order_by(ProbePause.id).limit(1)
    with transaction(engine) as connection:
        return connection.scalars(query).first()


def resume(engine: Engine, host: str) -> int:
    """End all pauses of a host's CPU slots and return their number. The supervisor then resumes the workers."""
    with transaction(engine) as connection:
        ended = update(ProbePause).where(*_paused(host, "cpu")).values(resumed_at=func.now())
        return connection.execute(ended).rowcount


def pauses(engine: Engine, *, since: datetime | None = None) -> list[Pause]:
    """Return the current pauses, and with ``since`` also the ended ones that began later, the latest first."""
    now = ProbePause.resumed_at.is_(None)
    with transaction(engine) as connection:
        return _pauses(connection, now if since is None else or_(now, ProbePause.paused_at >= since))


def suspect_verdicts(engine: Engine, pause_id: int) -> list[UUID]:
    """Return the evaluations with suspect verdicts of a pause, the earliest first. Refuse an unknown pause."""
    with transaction(engine) as connection:
        if connection.scalar(select(ProbePause.id).where(ProbePause.id == pause_id)) is None:
            raise InvalidRequest(f"no pause has the number {pause_id}: see `kqueue probe pauses --days 3660`")
        query = _suspect(Evaluation.id).where(ProbePause.id == pause_id)
        return list(connection.scalars(query.order_by(Verdict.finished_at, Evaluation.id)))


def listing(engine: Engine, *, since: datetime, limit: int) -> list[Settled]:
    """Return the probes that were settled since a time, the latest first."""
    query = select(*_SETTLED).where(Probe.settled_at >= since).order_by(Probe.settled_at.desc(), Probe.evaluation_id)
    with transaction(engine) as connection:
        return read(Settled, connection.execute(query.limit(limit)))


def _alive(live_s: float) -> tuple[ColumnElement[bool], ...]:
    return Worker.stopped_at.is_(None), Worker.heartbeat_at >= func.now() - timedelta(seconds=live_s)


def _paused(host: str, device: str) -> tuple[ColumnElement[bool], ...]:
    return ProbePause.host == host, ProbePause.device == device, ProbePause.resumed_at.is_(None)


# Results of probes -------------------------------------------------------------------------------------


def _settle(connection: Connection) -> list[Settled]:
    """Settle the probes that have verdicts. A probe whose evaluation was removed is void."""
    query = (
        select(Probe.evaluation_id, Probe.kind, Probe.duration_ms, Verdict.finished_at.label("judged_at"))
        .add_columns(Worker.name.label("worker"), Worker.host, Worker.device)
        .outerjoin(Evaluation, Evaluation.id == Probe.evaluation_id)
        .outerjoin(Verdict, Verdict.evaluation_id == Evaluation.id)
        .outerjoin(Attempt, Attempt.id == Verdict.attempt_id)
        .outerjoin(Worker, Worker.id == Attempt.worker_id)
        .where(Probe.settled_at.is_(None), or_(Verdict.evaluation_id.is_not(None), Evaluation.id.is_(None)))
        .order_by(Probe.submitted_at)
    )
    settled: list[Settled] = []
    for row in connection.execute(query).all():
        judgement = _judgement(connection, row)
        values = {"finding": judgement.finding, "words": judgement.words, "bias": judgement.bias}
        values |= {name: getattr(row, name) for name in ("judged_at", "worker", "host", "device")}
        this = update(Probe).where(Probe.evaluation_id == row.evaluation_id)
        settled += read(Settled, connection.execute(this.values(settled_at=func.now(), **values).returning(*_SETTLED)))
    return settled


def _judgement(connection: Connection, row: Row[*tuple[Any, ...]]) -> Judgement:
    try:
        of = VERDICTS.where(Verdict.evaluation_id == row.evaluation_id)
        verdict = to_verdict(connection.execute(of).mappings().one())
    except (NoResultFound, ValueError):  # a verdict of another version must not stop the sweep
        return Judgement(Finding.VOID, "the evaluation was removed, or its verdict cannot be read")
    if row.worker is None:
        return Judgement(Finding.VOID, f"{verdict.category}: no worker judged it")
    return drawing.judge(verdict, kind=ProbeKind(row.kind), duration_ms=row.duration_ms)


# Pauses ------------------------------------------------------------------------------------------------


class _Suspicion(NamedTuple):
    """The wrong ones among the last probes of a kind on a device, the latest first. There is at least one.

    ``is_sure`` is True if chance is ruled out, and ``is_open`` if one more probe could rule it out.
    """

    wrong: Sequence[Row[*tuple[Any, ...]]]
    is_sure: bool
    is_open: bool


def _suspicions(connection: Connection) -> list[_Suspicion]:
    recent = (Probe.settled_at > func.now() - _RECENT, Probe.spent.is_(False), Probe.finding != Finding.VOID)
    suspects = select(Probe.host).where(*recent, Probe.finding.not_in(_GOOD))
    query = select(*_SETTLED, Probe.settled_at).where(*recent, Probe.host.in_(suspects))
    by_device: defaultdict[tuple[str, str, str], list[Row[*tuple[Any, ...]]]] = defaultdict(list)
    for row in connection.execute(query.order_by(Probe.settled_at.desc(), Probe.judged_at.desc())):
        by_device[row.host, row.device, row.kind].append(row)
    suspicions: list[_Suspicion] = []
    for _, rows in sorted(by_device.items()):
        last = rows[:_LAST]
        if wrong := [row for row in last if row.finding not in _GOOD]:
            is_sure = len(wrong) >= _WRONG or any(row.finding == Finding.CHEAT_ACCEPTED for row in wrong)
            is_open = not is_sure and last.index(wrong[0]) < _LAST - _WRONG + 1
            suspicions.append(_Suspicion(wrong, is_sure, is_open))
    return suspicions


def _pause(connection: Connection, one: _Suspicion) -> Pause | None:
    """Take a device out of service if it is not. Its earlier probes no longer count, so that it can be resumed."""
    wrong = [row for row in one.wrong if row.finding == Finding.CHEAT_ACCEPTED] or one.wrong
    latest = wrong[0]
    host, device = latest.host, latest.device
    here = (Probe.host == host, Probe.device == device)
    good = connection.scalar(
        select(func.max(Probe.judged_at)).where(
            *here,
            Probe.kind == latest.kind,
            Probe.finding == Finding.AGREED,
            # A judge that fails intermittently can agree between two wrong findings.
            Probe.judged_at < min(row.judged_at for row in wrong),
        )
    )
    connection.execute(update(Probe).where(*here, Probe.settled_at.is_not(None)).values(spent=True))
    if connection.scalars(select(ProbePause.id).where(*_paused(host, device)).limit(1)).first() is not None:
        return None  # already paused, and these probes had begun before
    reason = clean.text(f"probes were judged wrongly: {latest.words} by {latest.worker}")[:_REASON_CHARACTERS]
    values = {"host": host, "device": device, "finding": latest.finding, "reason": reason, "doubted_since": good}
    values |= {"probes": [row.evaluation_id for row in wrong]}
    pause_id = connection.scalars(insert(ProbePause).values(values).returning(ProbePause.id)).one()
    if device == "cpu":
        # The workers are paused at once, so that claims before the supervisor's next check are refused. The supervisor
        # ends the pause.
        mine = (Worker.host == host, Worker.device == "cpu", Worker.stopped_at.is_(None))
        connection.execute(update(Worker).where(*mine).values(paused=reason))
    else:
        gpus.quarantine(connection, device, reason=reason)
    [pause] = _pauses(connection, ProbePause.id == pause_id)
    return pause


def _pauses(connection: Connection, which: ColumnElement[bool]) -> list[Pause]:
    # Usually there are none. Then the state of the fleet is known even while the table of verdicts is locked.
    if connection.scalar(select(ProbePause.id).where(which).limit(1)) is None:
        return []
    few = _suspect(Verdict.evaluation_id).correlate(ProbePause).limit(MOST_SUSPECT).subquery()
    number = select(func.count()).select_from(few).scalar_subquery().label("doubted")
    query = select(*ProbePause.__table__.columns, number).where(which).order_by(ProbePause.id.desc())
    return read(Pause, connection.execute(query))


def _suspect(column: Any) -> Any:
    """Return the query for a column of the real evaluations that a paused device judged since its last good probe."""
    return (
        select(column)
        .select_from(Verdict)
        .join(Attempt, Attempt.id == Verdict.attempt_id)
        .join(Worker, Worker.id == Attempt.worker_id)
        .join(Evaluation, Evaluation.id == Verdict.evaluation_id)
        .where(
            Worker.host == ProbePause.host,
            Worker.device == ProbePause.device,
            Verdict.finished_at > func.coalesce(ProbePause.doubted_since, literal_column("'-infinity'::timestamptz")),
            Verdict.finished_at <= func.coalesce(ProbePause.resumed_at, func.now()),
            REAL,
        )
    )


# Submission --------------------------------------------------------------------------------------------

#: Statement that counts the judges' verdicts of each lane since its last execution. Verdicts that commit meanwhile are
#: missed, which is harmless.
_COUNT: Final = text("""
    WITH counted AS (
        SELECT e.lane, count(*) AS number
        FROM verdicts AS v
        JOIN evaluations AS e ON e.id = v.evaluation_id
        JOIN probe_lanes AS l ON l.lane = e.lane
        WHERE v.finished_at > greatest(
                (SELECT min(looked_at) FROM probe_lanes WHERE lane = ANY(:lanes)),
                now() - make_interval(secs => :counted_s)
            )
          AND v.finished_at > l.looked_at AND v.attempt_id IS NOT NULL AND NOT e.probe
        GROUP BY e.lane
    )
    UPDATE probe_lanes AS l
    SET ended = l.ended + coalesce((SELECT number FROM counted WHERE counted.lane = l.lane), 0), looked_at = now()
    WHERE EXISTS (SELECT FROM counted) AND l.lane = ANY(:lanes)
""")


def _submit_due(connection: Connection, share: float, live_s: float) -> tuple[UUID, ...]:
    """Submit at most one probe for each lane that has no open one."""
    query = select(func.unnest(Worker.lanes), Worker.host, Worker.device).distinct()
    served = connection.execute(query.where(*_alive(live_s), Worker.paused.is_(None)))
    free = Counter(lane for lane, _, _ in served)  # with the numbers of their devices
    if not free:
        return ()
    fresh = [{"lane": lane, "due_after": _interval(share)} for lane in sorted(free)]
    connection.execute(insert(ProbeLane).on_conflict_do_nothing(), fresh)
    connection.execute(_COUNT, {"counted_s": _COUNTED_S, "lanes": list(free)})
    busy = set(connection.scalars(select(Probe.lane).where(Probe.settled_at.is_(None)).distinct()))
    confirming = {lane: kind for lane, kind in _wanted(connection, free).items() if lane not in busy}
    submitted = [_write(connection, drawing.draw(lane, kind), confirms=True) for lane, kind in confirming.items()]
    mine = (ProbeLane.lane == any_text(free.keys() - busy - confirming.keys()), ProbeLane.ended >= ProbeLane.due_after)
    for lane in connection.scalars(select(ProbeLane.lane).where(*mine).order_by(ProbeLane.lane)).all():
        submitted.append(_write(connection, drawing.draw(lane), confirms=False))
        reset = update(ProbeLane).where(ProbeLane.lane == lane)
        connection.execute(reset.values(ended=0.0, due_after=_interval(share)))
    return tuple(submitted)


def _interval(share: float) -> float:
    """Return a random number of evaluations until the next probe, about ``1 / share``."""
    # It is random so that no producer can predict a probe.
    return random.SystemRandom().uniform(0.5, 1.5) / share


def _wanted(connection: Connection, free: dict[str, int]) -> dict[str, ProbeKind]:
    """Return, by lane, the kind of probe that could still confirm a wrong finding there."""
    wanted: dict[str, ProbeKind] = {}
    for first in (one.wrong[-1] for one in _suspicions(connection) if one.is_open):
        if first.lane not in free:
            continue
        same = (Probe.lane == first.lane, Probe.kind == first.kind, Probe.confirms)
        tried = connection.scalar(select(func.count()).where(*same, Probe.submitted_at >= first.settled_at))
        if (tried or 0) < min(_CONFIRMING * free[first.lane], _MOST_CONFIRMING):
            wanted.setdefault(first.lane, ProbeKind(first.kind))
    return wanted


def _write(connection: Connection, probe: drawing.Probe, *, confirms: bool) -> UUID:
    identity, request = uuid4(), probe.request
    # A function of the database writes the probe, because sweepers lack the right to write sources and evaluations.
    fields = request.model_dump(
        mode="json", include={"problem", "kernel", "backend", "lane", "settings", "queue_wait_s"}
    )
    fields |= {"id": str(identity), "kind": probe.kind, "idea": probe.idea, "duration_ms": probe.duration_ms}
    connection.execute(select(func.kqueue_probe(literal(fields | {"confirms": confirms}, JSONB))))
    return identity
