"""The tables. ``migrations/`` creates the same schema, and a test compares the two, comments included.

An evaluation has attempts (more than one only if the fleet failed) and finally exactly one verdict. Times are UTC, set
by the database's clock, never by a worker's.
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
    Computed,
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
        """Use the first line of a table's docstring as its comment in the database."""
        super().__init_subclass__()
        cast("Table", cls.__table__).comment = (cls.__doc__ or "").splitlines()[0]


def _one_of(values: type[StrEnum], column: str = "state") -> str:
    """Return the SQL condition that a column has one of these values."""
    return f"{column} IN ({', '.join(repr(value.value) for value in values)})"


#: Number of characters at the start of a source or log that are indexed for the search of words.
_WORDS_CHARACTERS: Final = 100_000


def words(column: str) -> str:
    """Return the SQL for the words of a text, as its index stores them: letters and digits between ASCII punctuation.

    For example, ``tl.load(x_ptr)`` has the words ``tl``, ``load``, ``x`` and ``ptr``. Without this step Postgres would
    parse parts of a source as hosts, paths and tags. Only the first characters count, because an index entry is
    limited.
    """
    signs = punctuation.replace("'", "''")
    blanks = " " * len(punctuation)
    cut = f'"left"({column}, {_WORDS_CHARACTERS})'
    return f"to_tsvector('simple'::regconfig, translate({cut}, '{signs}', '{blanks}'))"


def _words_index(table: str, column: str, **more: Any) -> Index:
    # The colon is escaped because SQLAlchemy would read it as the start of a parameter.
    expression = text(words(column).replace(":", r"\:"))
    return Index(f"ix_{table}_words", expression, postgresql_using="gin", **more)


def _hash(text: str) -> str:
    """Return the condition that a text has its hash. Erased evaluations refer to an empty source."""
    return f"hash = encode(sha256(convert_to({text}, 'UTF8')), 'hex') OR hash = repeat('0', 64) AND source = ''"


#: Owner of rows that were written without a credential, or before there were owners.
LOCAL: Final = "local"
#: Pattern of the name of a token's or login's owner. It excludes the owner of probes, "kqueue's probes".
OWNER_NAME: Final = "[a-z0-9][a-z0-9._-]{0,62}"
#: The owner for whom the database session acts.
ME: Final = text("(SELECT kqueue_owner())")


def _owner(**more: Any) -> Mapped[str]:
    """Return the column of a row's owner. By default the row belongs to the owner of the session that writes it."""
    return mapped_column(server_default=text("kqueue_owner()"), **more)


def _agents_session() -> Mapped[str | None]:
    """Return the column of the agent's session in which a row was written. Null for all other rows."""
    return mapped_column(server_default=text("kqueue_session()"))


#: Condition of indexes on evaluations without a verdict.
_OPEN: Final = text(f"state <> '{EvaluationState.DONE}'")
#: Condition of the index on evaluations whose kernels were to be profiled.
PROFILED: Final = text("(settings -> 'examine' ->> 'profile') = 'true'")


class Problem(Base):
    """A reference, identified by the hash of its source within its owner."""

    __tablename__ = "problems"
    __table_args__ = (_words_index("problems", "source"), CheckConstraint(_hash("source"), name="hash"))

    hash: Mapped[str] = mapped_column(primary_key=True)
    owner: Mapped[str] = _owner(primary_key=True)
    source: Mapped[str]
    created_at: Mapped[datetime] = mapped_column(server_default=func.now())
    session: Mapped[str | None] = _agents_session()
    shared_from: Mapped[str | None]
    """The owner whose shared problem this is a copy of. Null for a source that its owner submitted."""


class SharedProblem(Base):
    """A problem that its owner shares with all owners."""

    __tablename__ = "shared_problems"
    __table_args__ = (CheckConstraint("hash = encode(sha256(convert_to(source, 'UTF8')), 'hex')", name="hash"),)

    hash: Mapped[str] = mapped_column(primary_key=True)
    owner: Mapped[str] = _owner(primary_key=True)
    label: Mapped[str]
    source: Mapped[str]
    leaderboard: Mapped[bool] = mapped_column(server_default=text("false"))
    """True if owners see each other's times for it."""
    settings: Mapped[dict[str, Any]] = mapped_column(server_default=text("'{}'"))
    """The settings by which its leaderboard ranks."""
    created_at: Mapped[datetime] = mapped_column(server_default=func.now())


class Kernel(Base):
    """A candidate's source and backend, identified by the hash of both within its owner."""

    __tablename__ = "kernels"
    __table_args__ = (
        Index("ix_kernels_created_at", "created_at", "hash"),
        CheckConstraint(_hash(r"backend, 'UTF8') || '\x00'\:\:bytea || convert_to(source"), name="hash"),
    )

    hash: Mapped[str] = mapped_column(primary_key=True)
    owner: Mapped[str] = _owner(primary_key=True)
    backend: Mapped[str]
    source: Mapped[str]
    created_at: Mapped[datetime] = mapped_column(server_default=func.now())


class Evaluation(Base):
    """One request to judge one kernel against one problem."""

    __tablename__ = "evaluations"
    __table_args__ = (
        CheckConstraint(_one_of(EvaluationState), name="state"),
        CheckConstraint(_one_of(Priority, "priority"), name="priority"),
        ForeignKeyConstraint(["problem_hash", "owner"], ["problems.hash", "problems.owner"]),
        ForeignKeyConstraint(["kernel_hash", "owner"], ["kernels.hash", "kernels.owner"]),
        UniqueConstraint("owner", "idempotency_key"),
        Index("ix_evaluations_owner_submitted_at", "owner", "submitted_at"),
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
            postgresql_include=["kernel_hash", "owner"],
        ),
        Index("ix_evaluations_kernel_hash_submitted_at", "kernel_hash", "submitted_at"),
        Index("ix_evaluations_probe_problem", "problem_hash", postgresql_where=text("probe")),
        Index("ix_evaluations_probe_kernel", "kernel_hash", postgresql_where=text("probe")),
        Index("ix_evaluations_token_open", "token_id", postgresql_where=_OPEN),
        Index("ix_evaluations_profiled", "problem_hash", postgresql_where=PROFILED),
        Index("ix_evaluations_session", "session", postgresql_where=text("session IS NOT NULL")),
    )

    id: Mapped[UUID] = mapped_column(primary_key=True)
    owner: Mapped[str] = _owner()
    problem_hash: Mapped[str]
    kernel_hash: Mapped[str]
    problem_label: Mapped[str | None]
    kernel_label: Mapped[str | None]
    lane: Mapped[str]
    settings: Mapped[dict[str, Any]]
    """The settings (:class:`kqueue.contract.Settings`)."""
    batch: Mapped[str | None]
    idempotency_key: Mapped[str | None]
    state: Mapped[str] = mapped_column(server_default=EvaluationState.QUEUED)
    """The state (:class:`~kqueue.states.EvaluationState`)."""
    attempts: Mapped[int] = mapped_column(Integer, server_default="0")
    """Number of started attempts, which is the running or last attempt's number."""
    submitted_at: Mapped[datetime] = mapped_column(server_default=func.now())
    available_at: Mapped[datetime] = mapped_column(server_default=func.now())
    """Time before which no worker claims it, because of the backoff after a failure of the fleet."""
    expires_at: Mapped[datetime | None]
    """Time at which it ends as ``expired`` if it was never started."""
    published_at: Mapped[datetime | None]
    """Time of its last message to Redis. Null while it is not among the next of its lane."""
    priority: Mapped[str] = mapped_column(server_default=Priority.BATCH)
    """The priority (:class:`~kqueue.states.Priority`)."""
    producer: Mapped[str] = mapped_column(server_default="")
    """The producer, which shares the devices with other producers: ``token:`` and the token's id, or a declared
    name."""
    token_id: Mapped[UUID | None] = mapped_column(ForeignKey("tokens.id"))
    """The token with which it was submitted over HTTP."""
    reuse: Mapped[bool] = mapped_column(server_default=text("false"))
    """True if the verdict of an equal evaluation is accepted."""
    probe: Mapped[bool] = mapped_column(server_default=text("false"))
    """True for a probe, which the fleet submits to test its judge (:mod:`kqueue.features.probes`)."""
    traceparent: Mapped[str | None]
    """The producer's span in the format of W3C's trace context. Null if the producer named none."""
    session: Mapped[str | None] = _agents_session()


class Share(Base):
    """A producer's recent use of the devices, which decides the order of evaluations.

    Each attempt that ends adds a row, so that no attempt waits for another's lock. Sweeps merge the rows.
    """

    __tablename__ = "shares"

    id: Mapped[int] = mapped_column(BigInteger, Identity(always=True), primary_key=True)
    producer: Mapped[str]
    resource: Mapped[str]
    """``cpu`` or ``gpu``, the prefix of a lane's name."""
    priority: Mapped[str]
    seconds: Mapped[float] = mapped_column(server_default=text("0"))
    """Seconds of its ended attempts. This and the next two columns decay (:mod:`kqueue.store.evaluations.order`)."""
    squares: Mapped[float] = mapped_column(server_default=text("0"))
    """Sum of the squares of those seconds."""
    ended: Mapped[float] = mapped_column(server_default=text("0"))
    """Number of those attempts."""
    at: Mapped[datetime] = mapped_column(server_default=func.now())
    """Time for which the numbers hold."""


class Worker(Base):
    """A slot's worker process, one row for each start."""

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
    """Reason why it accepts no evaluations at present. Null if it does."""
    waits_for: Mapped[str | None]
    """Process outside its fleet that holds the device for which it waits. Null while it does not wait."""
    waits_since: Mapped[datetime | None]
    """Time since which it waits."""
    fingerprint: Mapped[str | None]
    """Hash of all properties of the worker on which its verdicts depend. Null before its first kernel ran."""


class Gpu(Base):
    """A GPU that a host's fleet uses, and its state."""

    __tablename__ = "gpus"
    __table_args__ = (CheckConstraint(_one_of(GpuState), name="state"),)

    uuid: Mapped[str] = mapped_column(primary_key=True)
    host: Mapped[str]
    index: Mapped[int]
    """NVML's index on that host."""
    name: Mapped[str]
    state: Mapped[str] = mapped_column(server_default=GpuState.SERVING)
    """The state (:class:`~kqueue.states.GpuState`)."""
    reason: Mapped[str | None]
    since: Mapped[datetime] = mapped_column(server_default=func.now())
    """Time since which it is in its state."""
    failures: Mapped[int] = mapped_column(Integer, server_default="0")
    """Number of consecutive failed self-tests."""
    check_at: Mapped[datetime | None]
    """Time of the next self-test by its supervisor. Null if none is planned."""
    reset_at: Mapped[datetime | None]
    """Latest time at which its workers are ended for a reset. Null if no reset was requested."""
    facts: Mapped[dict[str, Any]] = mapped_column(server_default=text("'{}'::jsonb"))
    """Latest facts from NVML and the Linux kernel's log."""
    memory: Mapped[dict[str, Any] | None]
    """Its reserved memory (:class:`kqueue.store.gpus.Memory`). Null while there are no reservations."""
    seen_at: Mapped[datetime] = mapped_column(server_default=func.now())


class Environment(Base):
    """The facts on which times depend, identified by their hash."""

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
    """All columns above and the other facts that the worker reported."""
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
    """Last recorded step. Null for an attempt that ended within a second or two."""
    ended_at: Mapped[datetime | None]
    category: Mapped[str | None]
    message: Mapped[str | None]
    outcome: Mapped[dict[str, Any] | None]
    """Result of the attempt (:class:`kqueue.contract.Outcome`)."""
    written_by: Mapped[str | None]
    """The process that recorded it (:class:`~kqueue.states.Writer`)."""
    handed_back: Mapped[bool] = mapped_column(server_default=text("false"))
    """True if it was aborted because its worker was asked to stop. It does not count, nor suggest a bad kernel."""
    payer: Mapped[str | None]
    """Producer whose budget pays for its seconds, if that is a token."""


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
    """Hash of problem, kernel and settings. Null if no judge gave a result for the kernel."""
    reusable: Mapped[bool | None]
    """True if equal evaluations can reuse it."""
    reused_from: Mapped[UUID | None]
    """Evaluation whose verdict was reused. Retention can have removed it since. Null if this one was judged itself."""
    judged_at: Mapped[datetime | None]
    """Time at which that evaluation finished."""
    environment_hash: Mapped[str | None] = mapped_column(ForeignKey("environments.hash"))
    """Environment of a reused verdict. For other verdicts the attempt has it."""
    owner: Mapped[str] = _owner()
    """Owner of the evaluation."""


class Summary(Base):
    """The columns of a verdict by which pages sum and sort, one narrow row each, without probes.

    The database function that writes verdicts writes it too. All queries over a whole problem or batch are answered by
    its indexes, in which the rows of one problem or batch are adjacent.
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
            postgresql_include=["finished_at", "reused", "owner"],
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
            postgresql_include=["problem_hash", "finished_at", "reused", "owner"],
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
    owner: Mapped[str] = _owner()


class Batch(Base):
    """A batch, and the time of its last submission within a second.

    Each submission updates it.
    """

    __tablename__ = "batches"
    __table_args__ = (Index("ix_batches_last_at", "last_at"),)

    name: Mapped[str] = mapped_column(primary_key=True)
    owner: Mapped[str] = _owner(primary_key=True)
    last_at: Mapped[datetime]


class Callback(Base):
    """A URL that gets the verdict of an evaluation, or the result of a batch."""

    __tablename__ = "callbacks"
    __table_args__ = (
        ForeignKeyConstraint(["batch", "owner"], ["batches.name", "batches.owner"], ondelete="CASCADE"),
        UniqueConstraint("evaluation_id"),
        UniqueConstraint("owner", "batch"),
        Index("ix_callbacks_due", "owner", "next_at", postgresql_where=text("next_at IS NOT NULL")),
        Index("ix_callbacks_waiting", "id", postgresql_where=text("next_at IS NULL AND attempts = 0")),
    )

    id: Mapped[UUID] = mapped_column(primary_key=True, server_default=text("gen_random_uuid()"))
    owner: Mapped[str] = _owner()
    evaluation_id: Mapped[UUID | None] = mapped_column(ForeignKey("evaluations.id", ondelete="CASCADE"))
    """The evaluation. Null for the callback of a batch."""
    batch: Mapped[str | None]
    url: Mapped[str]
    """The URL, which can contain secrets: only servers can read it."""
    host: Mapped[str] = mapped_column(Computed(r"substring(url, '//(\[[^]]*\]|[^/:?#]*)'::text)"), nullable=True)
    attempts: Mapped[int] = mapped_column(Integer, server_default="0")
    """Number of attempts to send it."""
    next_at: Mapped[datetime | None]
    """Time of the next attempt. Null before the verdict, and after the last attempt."""
    delivered_at: Mapped[datetime | None]
    error: Mapped[str | None]
    """The reason why the last attempt failed."""


class Baseline(Base):
    """The reference's own time in one environment, cached."""

    __tablename__ = "baselines"

    problem_hash: Mapped[str] = mapped_column(primary_key=True)
    environment_hash: Mapped[str] = mapped_column(ForeignKey("environments.hash"), primary_key=True)
    settings_key: Mapped[str] = mapped_column(primary_key=True)
    """The settings on which the time depends: precision, seed, L2 and the method. It names the owner too."""
    measurement: Mapped[dict[str, Any]]
    """The time (:class:`kqueue.contract.Measurement`)."""
    created_at: Mapped[datetime] = mapped_column(server_default=func.now())
    owner: Mapped[str] = _owner()


class Token(Base):
    """A credential for the HTTP server, and the rights of its holder."""

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
    digest: Mapped[str | None] = mapped_column(unique=True)
    """SHA-256 of the secret in hexadecimal. The secret itself is shown once and never stored. Null for a token without
    a secret, which only browser sessions use."""
    scopes: Mapped[list[str]]
    """Some of :class:`kqueue.store.tokens.Scope`."""
    created_at: Mapped[datetime] = mapped_column(server_default=func.now())
    expires_at: Mapped[datetime | None]
    revoked_at: Mapped[datetime | None]
    last_used_at: Mapped[datetime | None]
    priority: Mapped[str] = mapped_column(server_default="interactive")
    """The highest :class:`~kqueue.states.Priority` that its holder can request."""
    weight: Mapped[float] = mapped_column(server_default=text("1"))
    """Its share of the devices, relative to other producers, which have 1 by default."""
    budget_s: Mapped[float | None]
    """Slot seconds available in any window of ``budget_window_s`` seconds. Null for no limit."""
    budget_window_s: Mapped[float | None]
    budget_then: Mapped[str | None]
    """Treatment of submissions when they are used up (:class:`~kqueue.states.Spent`)."""
    owner: Mapped[str] = _owner()
    """Owner of its submissions, whose work alone it sees unless a scope permits more."""
    limits: Mapped[dict[str, Any]] = mapped_column(server_default=text("'{}'::jsonb"))
    """Upper limits of the numbers in its requests, by path (:mod:`kqueue.upper_limits`)."""


class Login(Base):
    """A login of the database that submits for an owner."""

    __tablename__ = "logins"

    name: Mapped[str] = mapped_column(primary_key=True)
    owner: Mapped[str]
    limits: Mapped[dict[str, Any]] = mapped_column(server_default=text("'{}'::jsonb"))
    """Greatest accepted settings by dotted path, such as ``deadlines.check_s``."""


class Probe(Base):
    """A probe of the fleet's own judge: an evaluation with a known outcome, and its result.

    It is kept when the evaluation is removed.
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
    """The kind (:class:`~kqueue.states.ProbeKind`)."""
    idea: Mapped[str]
    """Name of the probe within its kind."""
    duration_ms: Mapped[float | None]
    """Duration in milliseconds of a known-duration kernel's ``forward``. Null for other kinds."""
    confirms: Mapped[bool] = mapped_column(server_default=text("false"))
    """True if it was submitted because another probe was judged wrongly."""
    submitted_at: Mapped[datetime] = mapped_column(server_default=func.now())
    settled_at: Mapped[datetime | None]
    """Time at which its verdict was evaluated. Before that, it and all following columns are null."""
    finding: Mapped[str | None]
    """The finding (:class:`~kqueue.states.Finding`)."""
    words: Mapped[str | None]
    """The finding as text."""
    bias: Mapped[float | None]
    """Error of the measured time of a known-duration kernel, relative to its duration."""
    judged_at: Mapped[datetime | None]
    """Time of its verdict."""
    worker: Mapped[str | None]
    """Name of the worker that judged it. Null if none did."""
    host: Mapped[str | None]
    device: Mapped[str | None]
    """A GPU's UUID, or ``cpu``."""
    spent: Mapped[bool] = mapped_column(server_default=text("false"))
    """True if its device was paused since, so that it no longer counts."""


class ProbeLane(Base):
    """The number of evaluations of a lane since its last probe."""

    __tablename__ = "probe_lanes"

    lane: Mapped[str] = mapped_column(primary_key=True)
    ended: Mapped[float] = mapped_column(server_default=text("0"))
    """Number of evaluations with a judge's verdict, without probes."""
    due_after: Mapped[float]
    """Number of evaluations after which the next probe is due. It is random."""
    looked_at: Mapped[datetime] = mapped_column(server_default=func.now())
    """Time up to which evaluations are counted."""


class ProbePause(Base):
    """A GPU, or a host's CPU slots, that was taken out of service because probes were judged wrongly."""

    __tablename__ = "probe_pauses"
    __table_args__ = (Index("ix_probe_pauses_open", "host", postgresql_where=text("resumed_at IS NULL")),)

    id: Mapped[int] = mapped_column(BigInteger, Identity(always=True), primary_key=True)
    host: Mapped[str]
    device: Mapped[str]
    """A GPU's UUID, or ``cpu``."""
    finding: Mapped[str]
    """The cause (:class:`~kqueue.states.Finding`)."""
    reason: Mapped[str]
    """The cause as text."""
    probes: Mapped[list[UUID]]
    """Evaluations that are evidence for it."""
    doubted_since: Mapped[datetime | None]
    """Time of its last good probe of that kind. Null if there was none."""
    paused_at: Mapped[datetime] = mapped_column(server_default=func.now())
    resumed_at: Mapped[datetime | None]
    """Time at which an operator returned it to service. Null before."""


class Session(Base):
    """A browser that is logged in with a token, or a link that logs one in."""

    __tablename__ = "sessions"
    __table_args__ = (Index("ix_sessions_token_id", "token_id"), Index("ix_sessions_ends_at", "ends_at"))

    digest: Mapped[str] = mapped_column(primary_key=True)
    """SHA-256 of the secret in hexadecimal. The secret itself is in the browser's cookie or in the link."""
    token_id: Mapped[UUID] = mapped_column(ForeignKey("tokens.id", ondelete="CASCADE"))
    """The token whose rights it has while the token is valid."""
    is_link: Mapped[bool] = mapped_column(server_default=text("false"))
    """True for a link, which is valid for one login."""
    created_at: Mapped[datetime] = mapped_column(server_default=func.now())
    ends_at: Mapped[datetime]
    """Time from which it is refused."""
    seen_at: Mapped[datetime] = mapped_column(server_default=func.now())
    """Time of its last request. It is updated at most once a minute."""


class AuditEntry(Base):
    """An entry of the audit log: who did what. Only the owner of the tables reads or removes entries."""

    __tablename__ = "audit"
    __table_args__ = (Index("ix_audit_at", "at"),)

    id: Mapped[int] = mapped_column(BigInteger, Identity(always=True), primary_key=True)
    at: Mapped[datetime] = mapped_column(server_default=func.now())
    actor: Mapped[str]
    """Name of the token, person or user. Empty if it is unknown."""
    owner: Mapped[str | None]
    """Owner for whom the actor acts."""
    token_id: Mapped[UUID | None]
    """Id of the token, which can be removed later."""
    action: Mapped[str]
    """One of :class:`kqueue.store.audit.Action`."""
    subject: Mapped[str]
    """Id, name or address that the action concerned."""


#: Pattern of a search's name, which becomes part of a folder's name.
SEARCH_NAME: Final = "[A-Za-z0-9][A-Za-z0-9._+-]{0,99}"


class SearchRun(Base):
    """A search for a fast kernel in many steps."""

    __tablename__ = "search_runs"
    __table_args__ = (
        CheckConstraint(_one_of(SearchState), name="state"),
        CheckConstraint(f"name ~ '^{SEARCH_NAME}$'", name="name"),
        CheckConstraint("jsonb_typeof(plan) = 'object'", name="plan"),
        UniqueConstraint("owner", "name"),
        Index("ix_search_runs_created_at", "created_at"),
    )

    id: Mapped[UUID] = mapped_column(primary_key=True)
    owner: Mapped[str] = _owner()
    name: Mapped[str]
    plan: Mapped[dict[str, Any]]
    """The requested search (:class:`kqueue.features.search.plan.Plan`)."""
    state: Mapped[str] = mapped_column(server_default=SearchState.RUNNING)
    """The state (:class:`~kqueue.states.SearchState`)."""
    created_at: Mapped[datetime] = mapped_column(server_default=func.now())
    ended_at: Mapped[datetime | None]


class SearchStep(Base):
    """A step of a search: some kernels are chosen, and proposals made from each.

    Step 0 has one proposal, the initial kernel.
    """

    __tablename__ = "search_steps"

    run_id: Mapped[UUID] = mapped_column(ForeignKey("search_runs.id", ondelete="CASCADE"), primary_key=True)
    number: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    digest: Mapped[str | None]
    """Report of failures and improvements before this step. Null unless the algorithm has a summariser."""
    summary: Mapped[str | None]
    """The summariser's text from the digest."""
    best: Mapped[int | None]
    """The best proposal at the end of the step."""
    test: Mapped[dict[str, Any] | None]
    """Result of judging the best kernel once more. Null if the step had no test."""
    started_at: Mapped[datetime] = mapped_column(server_default=func.now())
    ended_at: Mapped[datetime | None]


class SearchProposal(Base):
    """A kernel that was proposed in a search, and its result."""

    __tablename__ = "search_proposals"
    __table_args__ = (
        ForeignKeyConstraint(["run_id", "step"], ["search_steps.run_id", "search_steps.number"], ondelete="CASCADE"),
        Index("ix_search_proposals_run_id_step", "run_id", "step"),
    )

    run_id: Mapped[UUID] = mapped_column(primary_key=True)
    number: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    step: Mapped[int]
    parent: Mapped[int | None]
    """The proposal from which it was made. Null for the initial kernel."""
    prompt: Mapped[str | None]
    """The proposer's prompt."""
    answer: Mapped[str | None]
    """The proposer's answer. Null until it arrives."""
    kernel: Mapped[str | None]
    """The kernel in the answer."""
    error: Mapped[str | None]
    """Reason why there is no answer. Null if there is one."""
    evaluation_id: Mapped[UUID | None]
    """Its evaluation. It can belong to another fleet, and retention can remove it: the columns below are kept."""
    category: Mapped[str | None]
    """Null for a text that cannot be a kernel, which is not judged."""
    message: Mapped[str | None]
    runtime_ms: Mapped[float | None]
    speedup: Mapped[float | None]
    scores: Mapped[dict[str, Any] | None]
    """The score by each metric's name. Null if the verdict has no result for the kernel."""
    feedback: Mapped[str | None]
    """The verdict as text for the proposers of its children."""
    asked_at: Mapped[datetime | None]
    ended_at: Mapped[datetime | None]
    """Time at which all columns were complete."""
