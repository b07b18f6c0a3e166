"""The tables. ``migrations/`` makes the same schema; a test compares the two.

The unit is the evaluation. An evaluation has attempts (more than one only when the fleet failed) and, in
the end, exactly one verdict. Times are UTC, set by the database's clock, never by a worker's.
"""

from __future__ import annotations

from datetime import datetime
from enum import StrEnum
from string import punctuation
from typing import Any, ClassVar, Final, cast
from uuid import UUID

from sqlalchemy import (
    BigInteger,
    CheckConstraint,
    DateTime,
    Double,
    ForeignKey,
    ForeignKeyConstraint,
    Identity,
    Index,
    Integer,
    MetaData,
    Table,
    Text,
    UniqueConstraint,
    Uuid,
    func,
    text,
)
from sqlalchemy.dialects.postgresql import ARRAY, JSONB
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

from kqueue.states import EvaluationState, Finding, GpuState, Priority, ProbeKind, SearchState, Spent


class Base(DeclarativeBase):
    """Types and constraint names shared by all tables."""

    metadata = MetaData(
        naming_convention={
            "ix": "ix_%(table_name)s_%(column_0_N_name)s",
            "uq": "uq_%(table_name)s_%(column_0_N_name)s",
            "ck": "ck_%(table_name)s_%(constraint_name)s",
            "fk": "fk_%(table_name)s_%(column_0_N_name)s_%(referred_table_name)s",
            "pk": "pk_%(table_name)s",
        }
    )
    type_annotation_map: ClassVar[dict[Any, Any]] = {
        datetime: DateTime(timezone=True),
        dict[str, Any]: JSONB(none_as_null=True),
        list[str]: ARRAY(Text),
        list[UUID]: ARRAY(Uuid),
        str: Text,
        float: Double,
    }

    def __init_subclass__(cls) -> None:
        """Take the first line of a table's docstring as its comment in the database."""
        super().__init_subclass__()
        cast("Table", cls.__table__).comment = (cls.__doc__ or "").splitlines()[0]


def _one_of(values: type[StrEnum], column: str = "state") -> str:
    """The condition that a column holds one of these."""
    return f"{column} IN ({', '.join(repr(value.value) for value in values)})"


#: The characters of a source or log in which words are looked for.
_WORDS_CHARACTERS: Final = 100_000


def words(column: str) -> str:
    """Return the SQL of a text's words: letters and digits between ASCII's other signs, as indexes have them.

    So ``tl.load(x_ptr)`` has the words ``tl``, ``load``, ``x`` and ``ptr``. Postgres itself would take parts of a
    source for hosts, paths and tags. What comes after so many characters is left out: an index does not take more.
    """
    signs = punctuation.replace("'", "''")
    blanks = " " * len(punctuation)
    cut = f'"left"({column}, {_WORDS_CHARACTERS})'
    return f"to_tsvector('simple'::regconfig, translate({cut}, '{signs}', '{blanks}'))"


def _words_index(table: str, column: str, **more: Any) -> Index:
    # A colon would name a parameter.
    expression = text(words(column).replace(":", r"\:"))
    return Index(f"ix_{table}_words", expression, postgresql_using="gin", **more)


#: The condition of indexes on evaluations without a verdict.
_OPEN: Final = text(f"state <> '{EvaluationState.DONE}'")
#: The condition of the index on evaluations whose kernels were to be profiled.
PROFILED: Final = text("(settings -> 'examine' ->> 'profile') = 'true'")


class Problem(Base):
    """A reference, identified by the hash of its source."""

    __tablename__ = "problems"
    __table_args__ = (_words_index("problems", "source"),)

    hash: Mapped[str] = mapped_column(primary_key=True)
    source: Mapped[str]
    created_at: Mapped[datetime] = mapped_column(server_default=func.now())


class Kernel(Base):
    """A candidate's source and backend, identified by the hash of both."""

    __tablename__ = "kernels"
    __table_args__ = (Index("ix_kernels_created_at", "created_at", "hash"),)

    hash: Mapped[str] = mapped_column(primary_key=True)
    backend: Mapped[str]
    source: Mapped[str]
    created_at: Mapped[datetime] = mapped_column(server_default=func.now())


class Evaluation(Base):
    """One request to judge one kernel against one problem."""

    __tablename__ = "evaluations"
    __table_args__ = (
        CheckConstraint(_one_of(EvaluationState), name="state"),
        CheckConstraint(_one_of(Priority, "priority"), name="priority"),
        UniqueConstraint("idempotency_key"),
        Index("ix_evaluations_open", "state", "available_at", postgresql_where=_OPEN),
        Index(
            "ix_evaluations_queue",
            "lane",
            "priority",
            "producer",
            "submitted_at",
            "id",
            postgresql_where=text(f"state = '{EvaluationState.QUEUED}'"),
        ),
        Index(
            "ix_evaluations_published",
            "lane",
            postgresql_where=text(f"state = '{EvaluationState.QUEUED}' AND published_at IS NOT NULL"),
        ),
        Index("ix_evaluations_expires_at", "expires_at", postgresql_where=text(f"state = '{EvaluationState.QUEUED}'")),
        Index("ix_evaluations_submitted_at", "submitted_at"),
        Index("ix_evaluations_lane_state", "lane", "state"),
        Index("ix_evaluations_batch_submitted_at", "batch", "submitted_at", postgresql_where=text("batch IS NOT NULL")),
        Index(
            "ix_evaluations_batch_open",
            "batch",
            "problem_hash",
            postgresql_where=text(f"state <> '{EvaluationState.DONE}' AND batch IS NOT NULL"),
        ),
        Index(
            "ix_evaluations_problem_hash_submitted_at",
            "problem_hash",
            "submitted_at",
            postgresql_include=["kernel_hash"],
        ),
        Index("ix_evaluations_kernel_hash_submitted_at", "kernel_hash", "submitted_at"),
        Index("ix_evaluations_probe_problem", "problem_hash", postgresql_where=text("probe")),
        Index("ix_evaluations_probe_kernel", "kernel_hash", postgresql_where=text("probe")),
        Index("ix_evaluations_token_open", "token_id", postgresql_where=_OPEN),
        Index("ix_evaluations_profiled", "problem_hash", postgresql_where=PROFILED),
    )

    id: Mapped[UUID] = mapped_column(primary_key=True)
    problem_hash: Mapped[str] = mapped_column(ForeignKey("problems.hash"))
    kernel_hash: Mapped[str] = mapped_column(ForeignKey("kernels.hash"))
    problem_label: Mapped[str | None]
    kernel_label: Mapped[str | None]
    lane: Mapped[str]
    settings: Mapped[dict[str, Any]]
    """A :class:`kqueue.contract.Settings`."""
    batch: Mapped[str | None]
    idempotency_key: Mapped[str | None]
    state: Mapped[str] = mapped_column(server_default=EvaluationState.QUEUED)
    """An :class:`~kqueue.states.EvaluationState`."""
    attempts: Mapped[int] = mapped_column(Integer, server_default="0")
    """Attempts begun; the running or last attempt's number."""
    submitted_at: Mapped[datetime] = mapped_column(server_default=func.now())
    available_at: Mapped[datetime] = mapped_column(server_default=func.now())
    """No worker claims it before: the backoff after a failure of the fleet."""
    expires_at: Mapped[datetime | None]
    """It ends as ``expired`` if it was never started by then."""
    published_at: Mapped[datetime | None]
    """When its message was last given to Redis; null while it is not among the next of its lane."""
    priority: Mapped[str] = mapped_column(server_default=Priority.BATCH)
    """A :class:`~kqueue.states.Priority`."""
    producer: Mapped[str] = mapped_column(server_default="")
    """Who shares the devices with other producers: ``token:`` and its id, or the name that was declared."""
    token_id: Mapped[UUID | None] = mapped_column(ForeignKey("tokens.id"))
    """The token with which it was submitted over HTTP."""
    reuse: Mapped[bool] = mapped_column(server_default=text("false"))
    """True if the verdict of an equal evaluation will do."""
    probe: Mapped[bool] = mapped_column(server_default=text("false"))
    """True for one of the fleet's own, which shows what its judge is worth (:mod:`kqueue.store.probes`)."""
    traceparent: Mapped[str | None]
    """The producer's span, as W3C's trace context writes it; null if the producer named none."""


class Share(Base):
    """What a producer's attempts have used of late, which decides whose turn it is.

    An attempt that ends adds a row, so none waits for another one's. Sweeps add rows up.
    """

    __tablename__ = "shares"

    id: Mapped[int] = mapped_column(BigInteger, Identity(always=True), primary_key=True)
    producer: Mapped[str]
    resource: Mapped[str]
    """``cpu`` or ``gpu``: the first word of a lane's name."""
    priority: Mapped[str]
    seconds: Mapped[float] = mapped_column(server_default=text("0"))
    """Seconds of its ended attempts. This and the next two fade (:mod:`kqueue.store.evaluations.order`)."""
    squares: Mapped[float] = mapped_column(server_default=text("0"))
    """The sum of those seconds' squares."""
    ended: Mapped[float] = mapped_column(server_default=text("0"))
    """The number of those attempts."""
    at: Mapped[datetime] = mapped_column(server_default=func.now())
    """The moment for which the numbers hold."""


class Worker(Base):
    """A slot's worker process: one row for each life of it."""

    __tablename__ = "workers"
    __table_args__ = (Index("ix_workers_alive", "heartbeat_at", postgresql_where=text("stopped_at IS NULL")),)

    id: Mapped[UUID] = mapped_column(primary_key=True)
    name: Mapped[str]
    """Celery's node name, such as ``gpu0-1@host``."""
    host: Mapped[str]
    pid: Mapped[int]
    lanes: Mapped[list[str]]
    device: Mapped[str]
    """A GPU's UUID, or ``cpu``."""
    started_at: Mapped[datetime] = mapped_column(server_default=func.now())
    heartbeat_at: Mapped[datetime] = mapped_column(server_default=func.now())
    stopped_at: Mapped[datetime | None]
    paused: Mapped[str | None]
    """Why it takes no evaluations at present; null if it does."""
    waits_for: Mapped[str | None]
    """The process outside of its fleet that has the device it waits for; null while it waits for none."""
    waits_since: Mapped[datetime | None]
    """Since when it waits."""
    fingerprint: Mapped[str | None]
    """The hash of all that its verdicts depend on beside what is asked for; null before its first kernel ran."""


class Gpu(Base):
    """A GPU that some host's fleet uses, and whether it may be given evaluations."""

    __tablename__ = "gpus"
    __table_args__ = (CheckConstraint(_one_of(GpuState), name="state"),)

    uuid: Mapped[str] = mapped_column(primary_key=True)
    host: Mapped[str]
    index: Mapped[int]
    """NVML's number on that host."""
    name: Mapped[str]
    state: Mapped[str] = mapped_column(server_default=GpuState.SERVING)
    """A :class:`~kqueue.states.GpuState`."""
    reason: Mapped[str | None]
    since: Mapped[datetime] = mapped_column(server_default=func.now())
    """When it came into its state."""
    failures: Mapped[int] = mapped_column(Integer, server_default="0")
    """Tests failed in a row."""
    check_at: Mapped[datetime | None]
    """When its supervisor tests it next; null if nothing calls for a test."""
    reset_at: Mapped[datetime | None]
    """When its workers are ended at the latest, for a reset; null if no reset was asked for."""
    facts: Mapped[dict[str, Any]] = mapped_column(server_default=text("'{}'::jsonb"))
    """The last facts from NVML and the kernel's log."""
    memory: Mapped[dict[str, Any] | None]
    """Its memory as evaluations have booked it, a :class:`kqueue.store.gpus.Memory`; null while nobody books."""
    seen_at: Mapped[datetime] = mapped_column(server_default=func.now())


class Environment(Base):
    """A set of facts that times depend on, identified by its hash."""

    __tablename__ = "environments"

    hash: Mapped[str] = mapped_column(primary_key=True)
    device: Mapped[str]
    """The GPU's or CPU's model name."""
    driver: Mapped[str | None]
    cuda: Mapped[str | None]
    torch: Mapped[str]
    triton: Mapped[str | None]
    python: Mapped[str]
    host: Mapped[str]
    facts: Mapped[dict[str, Any]]
    """All of the above and the other facts that the worker knew."""
    created_at: Mapped[datetime] = mapped_column(server_default=func.now())


class Attempt(Base):
    """One execution of an evaluation by one worker."""

    __tablename__ = "attempts"
    __table_args__ = (
        UniqueConstraint("evaluation_id", "number"),
        Index("ix_attempts_running", "lease_until", postgresql_where=text("ended_at IS NULL")),
        Index("ix_attempts_worker_id", "worker_id", "id"),
        Index("ix_attempts_busy", "worker_id", "id", postgresql_where=text("ended_at IS NULL")),
        Index("ix_attempts_payer", "payer", "ended_at", postgresql_where=text("payer IS NOT NULL")),
    )

    id: Mapped[int] = mapped_column(BigInteger, Identity(always=True), primary_key=True)
    evaluation_id: Mapped[UUID] = mapped_column(ForeignKey("evaluations.id", ondelete="CASCADE"))
    number: Mapped[int]
    worker_id: Mapped[UUID] = mapped_column(ForeignKey("workers.id"))
    environment_hash: Mapped[str | None] = mapped_column(ForeignKey("environments.hash"))
    fingerprint: Mapped[str | None]
    started_at: Mapped[datetime] = mapped_column(server_default=func.now())
    lease_until: Mapped[datetime]
    step: Mapped[str | None]
    """The step that it was last seen at; null of an attempt that was over within a second or two."""
    ended_at: Mapped[datetime | None]
    category: Mapped[str | None]
    message: Mapped[str | None]
    outcome: Mapped[dict[str, Any] | None]
    """The :class:`kqueue.contract.Outcome` that the attempt came to."""
    written_by: Mapped[str | None]
    """A :class:`~kqueue.states.Writer`."""
    handed_back: Mapped[bool] = mapped_column(server_default=text("false"))
    """True if it was broken off because its worker was told to stop: it is no try, and no sign against the kernel."""
    payer: Mapped[str | None]
    """The producer whose budget its seconds count for, if that is a token."""


class Verdict(Base):
    """The one final outcome of an evaluation."""

    __tablename__ = "verdicts"
    __table_args__ = (
        Index("ix_verdicts_category_finished_at", "category", "finished_at"),
        Index("ix_verdicts_finished_at", "finished_at"),
        Index("ix_verdicts_whole", "finished_at", postgresql_where=text("NOT (evidence ? 'emptied_at')")),
        Index("ix_verdicts_attempt_id", "attempt_id"),
        _words_index("verdicts", "log", postgresql_where=text("log <> ''")),
        Index("ix_verdicts_content", "content", "finished_at", postgresql_where=text("content IS NOT NULL")),
    )

    evaluation_id: Mapped[UUID] = mapped_column(ForeignKey("evaluations.id", ondelete="CASCADE"), primary_key=True)
    attempt_id: Mapped[int | None] = mapped_column(ForeignKey("attempts.id"))
    category: Mapped[str]
    blame: Mapped[str]
    compiled: Mapped[bool | None]
    correctness: Mapped[bool | None]
    phase: Mapped[str | None]
    message: Mapped[str]
    runtime_ms: Mapped[float | None]
    baseline_ms: Mapped[float | None]
    speedup: Mapped[float | None]
    facts: Mapped[dict[str, Any]]
    runtime: Mapped[dict[str, Any] | None]
    baseline: Mapped[dict[str, Any] | None]
    evidence: Mapped[dict[str, Any]]
    log: Mapped[str]
    written_by: Mapped[str]
    finished_at: Mapped[datetime] = mapped_column(server_default=func.now())
    content: Mapped[str | None]
    """The hash of problem, kernel and settings; null where no judge said anything of the kernel."""
    reusable: Mapped[bool | None]
    """True if equal evaluations may have it."""
    reused_from: Mapped[UUID | None]
    """The evaluation whose verdict this is, which may have been removed since; null if it was judged itself."""
    judged_at: Mapped[datetime | None]
    """When that one finished."""
    environment_hash: Mapped[str | None] = mapped_column(ForeignKey("environments.hash"))
    """Of a reused verdict: what it was reached on. Of others the attempt has it."""


class Summary(Base):
    """What pages add up and sort of a verdict: a narrow row for each, but for those of probes.

    The function of the database that writes verdicts writes it too. All queries that look at a whole problem or batch
    find what they need in its indexes, where what is of one problem or batch lies side by side.
    """

    __tablename__ = "summaries"
    __table_args__ = (
        Index(
            "ix_summaries_problem",
            "problem_hash",
            "category",
            text("speedup DESC NULLS LAST"),
            "runtime_ms",
            "evaluation_id",
            postgresql_include=["finished_at", "reused"],
        ),
        Index(
            "ix_summaries_kernel",
            "kernel_hash",
            "problem_hash",
            "runtime_ms",
            "finished_at",
            "evaluation_id",
            postgresql_where=text("category = 'passed' AND NOT reused AND runtime_ms IS NOT NULL"),
        ),
        Index(
            "ix_summaries_batch",
            "batch",
            "category",
            text("speedup DESC NULLS LAST"),
            "runtime_ms",
            "evaluation_id",
            postgresql_include=["problem_hash", "finished_at", "reused"],
            postgresql_where=text("batch IS NOT NULL"),
        ),
    )

    evaluation_id: Mapped[UUID] = mapped_column(
        ForeignKey("verdicts.evaluation_id", ondelete="CASCADE"), primary_key=True
    )
    problem_hash: Mapped[str]
    kernel_hash: Mapped[str]
    batch: Mapped[str | None]
    category: Mapped[str]
    runtime_ms: Mapped[float | None]
    speedup: Mapped[float | None]
    reused: Mapped[bool]
    finished_at: Mapped[datetime]


class Batch(Base):
    """A batch, and when its last evaluation was submitted, within a second.

    Whoever submits writes it.
    """

    __tablename__ = "batches"
    __table_args__ = (Index("ix_batches_last_at", "last_at"),)

    name: Mapped[str] = mapped_column(primary_key=True)
    last_at: Mapped[datetime]


class Baseline(Base):
    """The reference's own time in one environment, cached."""

    __tablename__ = "baselines"

    problem_hash: Mapped[str] = mapped_column(ForeignKey("problems.hash"), primary_key=True)
    environment_hash: Mapped[str] = mapped_column(ForeignKey("environments.hash"), primary_key=True)
    settings_key: Mapped[str] = mapped_column(primary_key=True)
    """The settings that the time depends on: precision, seed, L2 and the method."""
    measurement: Mapped[dict[str, Any]]
    """A :class:`kqueue.contract.Measurement`."""
    created_at: Mapped[datetime] = mapped_column(server_default=func.now())


class Token(Base):
    """A credential for the HTTP server, and what its holder may do."""

    __tablename__ = "tokens"
    __table_args__ = (
        CheckConstraint(_one_of(Spent, "budget_then"), name="budget_then"),
        CheckConstraint(
            "(budget_s IS NULL) = (budget_window_s IS NULL) AND (budget_s IS NULL) = (budget_then IS NULL)",
            name="budget",
        ),
    )

    id: Mapped[UUID] = mapped_column(primary_key=True)
    name: Mapped[str]
    digest: Mapped[str] = mapped_column(unique=True)
    """SHA-256 of the secret, in hexadecimal; the secret itself is shown once and kept nowhere."""
    scopes: Mapped[list[str]]
    """Of ``read``, ``submit``, ``problems`` and ``admin``."""
    created_at: Mapped[datetime] = mapped_column(server_default=func.now())
    expires_at: Mapped[datetime | None]
    revoked_at: Mapped[datetime | None]
    last_used_at: Mapped[datetime | None]
    priority: Mapped[str] = mapped_column(server_default="interactive")
    """The highest :class:`~kqueue.states.Priority` that its holder may ask for."""
    weight: Mapped[float] = mapped_column(server_default=text("1"))
    """Its share of the devices beside other producers', each of whom has 1."""
    budget_s: Mapped[float | None]
    """Seconds of slots that it may use in any window of ``budget_window_s`` seconds; null for no limit."""
    budget_window_s: Mapped[float | None]
    budget_then: Mapped[str | None]
    """A :class:`~kqueue.states.Spent`: what becomes of submissions when they are used up."""


class Probe(Base):
    """A probe of the fleet's own judge: an evaluation whose outcome is known, and what it came to.

    It stays when the evaluation is removed.
    """

    __tablename__ = "probes"
    __table_args__ = (
        CheckConstraint(_one_of(ProbeKind, "kind"), name="kind"),
        CheckConstraint(_one_of(Finding, "finding"), name="finding"),
        Index("ix_probes_settled_at", "settled_at"),
        Index("ix_probes_open", "lane", postgresql_where=text("settled_at IS NULL")),
    )

    evaluation_id: Mapped[UUID] = mapped_column(primary_key=True)
    lane: Mapped[str]
    kind: Mapped[str]
    """A :class:`~kqueue.states.ProbeKind`."""
    idea: Mapped[str]
    """Which of its kind."""
    spin_ms: Mapped[float | None]
    """How long its ``forward`` takes; null for one that does not spin."""
    confirms: Mapped[bool] = mapped_column(server_default=text("false"))
    """True if it was submitted because another one was judged wrongly."""
    submitted_at: Mapped[datetime] = mapped_column(server_default=func.now())
    settled_at: Mapped[datetime | None]
    """When its verdict was looked at; null before, and the rest with it."""
    finding: Mapped[str | None]
    """A :class:`~kqueue.states.Finding`."""
    words: Mapped[str | None]
    """The same for people."""
    bias: Mapped[float | None]
    """By how much the judged time of a spin differed from what it took, as a share of that."""
    judged_at: Mapped[datetime | None]
    """When it got its verdict."""
    worker: Mapped[str | None]
    """The worker that judged it, by its name; null if none did."""
    host: Mapped[str | None]
    device: Mapped[str | None]
    """A GPU's UUID, or ``cpu``."""
    spent: Mapped[bool] = mapped_column(server_default=text("false"))
    """True if its place was paused since: it is no evidence any more."""


class ProbeLane(Base):
    """How many evaluations a lane has ended since its last probe."""

    __tablename__ = "probe_lanes"

    lane: Mapped[str] = mapped_column(primary_key=True)
    ended: Mapped[float] = mapped_column(server_default=text("0"))
    """Evaluations that a judge reached a verdict on, without probes."""
    due_after: Mapped[float]
    """After so many of them the next probe is due; drawn by lot each time."""
    looked_at: Mapped[datetime] = mapped_column(server_default=func.now())
    """Those that ended before are counted."""


class ProbePause(Base):
    """A GPU, or a host's CPU slots, that was taken out of service because probes were judged wrongly."""

    __tablename__ = "probe_pauses"
    __table_args__ = (Index("ix_probe_pauses_open", "host", postgresql_where=text("resumed_at IS NULL")),)

    id: Mapped[int] = mapped_column(BigInteger, Identity(always=True), primary_key=True)
    host: Mapped[str]
    device: Mapped[str]
    """A GPU's UUID, or ``cpu``."""
    finding: Mapped[str]
    """What was wrong, a :class:`~kqueue.states.Finding`."""
    reason: Mapped[str]
    """The same for people."""
    probes: Mapped[list[UUID]]
    """The evaluations that showed it."""
    doubted_since: Mapped[datetime | None]
    """Since its last good probe of that kind; null if there was none."""
    paused_at: Mapped[datetime] = mapped_column(server_default=func.now())
    resumed_at: Mapped[datetime | None]
    """When an operator put it back into service; null before."""


class Session(Base):
    """A browser that is logged in with a token, or a link that logs one in."""

    __tablename__ = "sessions"
    __table_args__ = (Index("ix_sessions_token_id", "token_id"), Index("ix_sessions_ends_at", "ends_at"))

    digest: Mapped[str] = mapped_column(primary_key=True)
    """SHA-256 of the secret, in hexadecimal; the secret itself is in the browser's cookie or in the link."""
    token_id: Mapped[UUID] = mapped_column(ForeignKey("tokens.id", ondelete="CASCADE"))
    """The token whose rights it has, for as long as that is valid."""
    is_link: Mapped[bool] = mapped_column(server_default=text("false"))
    """True for a link, which is good for one login."""
    created_at: Mapped[datetime] = mapped_column(server_default=func.now())
    ends_at: Mapped[datetime]
    """It is refused from then on."""


#: What a search may be called. The name becomes part of a folder's.
SEARCH_NAME: Final = "[A-Za-z0-9][A-Za-z0-9._+-]{0,99}"


class SearchRun(Base):
    """A search for a fast kernel, of many steps."""

    __tablename__ = "search_runs"
    __table_args__ = (
        CheckConstraint(_one_of(SearchState), name="state"),
        CheckConstraint(f"name ~ '^{SEARCH_NAME}$'", name="name"),
        CheckConstraint("jsonb_typeof(plan) = 'object'", name="plan"),
        Index("ix_search_runs_created_at", "created_at"),
    )

    id: Mapped[UUID] = mapped_column(primary_key=True)
    name: Mapped[str] = mapped_column(unique=True)
    plan: Mapped[dict[str, Any]]
    """All that was asked for, a :class:`kqueue.search.plan.Plan`."""
    state: Mapped[str] = mapped_column(server_default=SearchState.RUNNING)
    """A :class:`~kqueue.states.SearchState`."""
    created_at: Mapped[datetime] = mapped_column(server_default=func.now())
    ended_at: Mapped[datetime | None]


class SearchStep(Base):
    """A step of a search: some kernels are chosen, and proposals made from each.

    Step 0 has one proposal, the kernel to start from.
    """

    __tablename__ = "search_steps"

    run_id: Mapped[UUID] = mapped_column(ForeignKey("search_runs.id", ondelete="CASCADE"), primary_key=True)
    number: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    digest: Mapped[str | None]
    """What failed and what helped before this step; null unless the algorithm has a summariser."""
    summary: Mapped[str | None]
    """What the summariser made of the digest."""
    best: Mapped[int | None]
    """The best proposal at the end of the step."""
    test: Mapped[dict[str, Any] | None]
    """The best kernel, judged once more; null where the step had no test."""
    started_at: Mapped[datetime] = mapped_column(server_default=func.now())
    ended_at: Mapped[datetime | None]


class SearchProposal(Base):
    """A kernel that was proposed in a search, and what became of it."""

    __tablename__ = "search_proposals"
    __table_args__ = (
        ForeignKeyConstraint(["run_id", "step"], ["search_steps.run_id", "search_steps.number"], ondelete="CASCADE"),
        Index("ix_search_proposals_run_id_step", "run_id", "step"),
    )

    run_id: Mapped[UUID] = mapped_column(primary_key=True)
    number: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    step: Mapped[int]
    parent: Mapped[int | None]
    """The proposal that it was made from; null for the kernel to start from."""
    prompt: Mapped[str | None]
    """What the proposer was asked."""
    answer: Mapped[str | None]
    """What it said; null until it has."""
    kernel: Mapped[str | None]
    """The kernel in the answer."""
    error: Mapped[str | None]
    """Why there is no answer; null if there is one."""
    evaluation_id: Mapped[UUID | None]
    """Its evaluation. It may be another fleet's, and retention may have removed it: the columns below stay."""
    category: Mapped[str | None]
    """Null for a text that cannot be a kernel, which nobody judges."""
    message: Mapped[str | None]
    runtime_ms: Mapped[float | None]
    speedup: Mapped[float | None]
    scores: Mapped[dict[str, Any] | None]
    """The score by each metric's name; null if nothing is known about the kernel."""
    feedback: Mapped[str | None]
    """The verdict in words, as the proposers of its children read it."""
    asked_at: Mapped[datetime | None]
    ended_at: Mapped[datetime | None]
    """When all of this was known."""
