"""Problems, kernels, evaluations, attempts, verdicts, workers, environments, baselines, and four views."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects import postgresql

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None

#: Views by name, with their comments and queries.
VIEWS = [
    (
        "evaluation_overview",
        "One wide row for each evaluation: its request, state, outcome and environment.",
        """
        SELECT
            e.id, e.batch, e.problem_label, e.problem_hash, e.kernel_label, e.kernel_hash, k.backend, e.lane,
            e.settings ->> 'precision' AS precision,
            e.state, e.attempts, v.category, v.blame, v.compiled, v.correctness, v.phase, v.message,
            v.runtime_ms, v.baseline_ms, v.speedup, v.written_by,
            n.device, n.host, n.driver, n.cuda, n.torch, n.triton,
            w.name AS worker,
            e.submitted_at, first.started_at AS first_started_at, v.finished_at,
            extract(epoch FROM first.started_at - e.submitted_at)::double precision AS queued_s,
            extract(epoch FROM v.finished_at - e.submitted_at)::double precision AS total_s
        FROM evaluations AS e
        JOIN kernels AS k ON k.hash = e.kernel_hash
        LEFT JOIN verdicts AS v ON v.evaluation_id = e.id
        LEFT JOIN attempts AS first ON first.evaluation_id = e.id AND first.number = 1
        LEFT JOIN attempts AS last ON last.evaluation_id = e.id AND last.number = e.attempts
        LEFT JOIN workers AS w ON w.id = last.worker_id
        LEFT JOIN environments AS n ON n.hash = last.environment_hash
        """,
    ),
    (
        "outcomes",
        "How many evaluations ended in each category, by UTC day, lane and backend, and whose failure it was.",
        """
        SELECT
            (v.finished_at AT TIME ZONE 'UTC')::date AS day, e.lane, k.backend, v.category, v.blame,
            count(*) AS evaluations
        FROM verdicts AS v
        JOIN evaluations AS e ON e.id = v.evaluation_id
        JOIN kernels AS k ON k.hash = e.kernel_hash
        GROUP BY day, e.lane, k.backend, v.category, v.blame
        """,
    ),
    (
        "best_verdicts",
        "The fastest kernel that passed, for each problem, precision and device model.",
        """
        SELECT DISTINCT ON (e.problem_hash, precision, n.device)
            e.problem_hash, e.problem_label, e.settings ->> 'precision' AS precision, n.device,
            e.kernel_hash, e.kernel_label, k.backend, v.runtime_ms, v.baseline_ms, v.speedup,
            v.evaluation_id, v.finished_at
        FROM verdicts AS v
        JOIN evaluations AS e ON e.id = v.evaluation_id
        JOIN kernels AS k ON k.hash = e.kernel_hash
        JOIN attempts AS a ON a.id = v.attempt_id
        LEFT JOIN environments AS n ON n.hash = a.environment_hash
        WHERE v.category = 'passed' AND v.runtime_ms IS NOT NULL
        ORDER BY e.problem_hash, precision, n.device, v.runtime_ms, v.finished_at
        """,
    ),
    (
        "fleet_utilisation",
        "Each worker that lived within the last hour: whether it lives, and how busy it was in that hour.",
        """
        SELECT
            w.id, w.name, w.host, w.device, w.lanes,
            w.stopped_at IS NULL AND w.heartbeat_at > now() - interval '60 seconds' AS alive,
            coalesce(done.busy_s, 0) / greatest(
                extract(epoch FROM
                    coalesce(w.stopped_at, now()) - greatest(w.started_at, now() - interval '1 hour')
                )::double precision,
                0.001
            ) AS busy_share,
            coalesce(done.evaluations, 0) AS evaluations,
            done.current_evaluation,
            w.started_at, w.heartbeat_at, w.stopped_at
        FROM workers AS w
        LEFT JOIN LATERAL (
            SELECT
                sum(extract(epoch FROM
                    least(coalesce(a.ended_at, a.lease_until), now())
                    - greatest(a.started_at, now() - interval '1 hour')
                ))::double precision AS busy_s,
                count(a.ended_at) AS evaluations,
                (array_agg(a.evaluation_id ORDER BY a.id DESC) FILTER (WHERE a.ended_at IS NULL))[1]
                    AS current_evaluation
            FROM attempts AS a
            WHERE a.worker_id = w.id AND coalesce(a.ended_at, a.lease_until) > now() - interval '1 hour'
        ) AS done ON true
        WHERE coalesce(w.stopped_at, w.heartbeat_at) > now() - interval '1 hour'
        """,
    ),
]


def upgrade() -> None:
    """Create all tables and views."""
    op.create_table(
        "environments",
        sa.Column("hash", sa.Text(), nullable=False),
        sa.Column("device", sa.Text(), nullable=False),
        sa.Column("driver", sa.Text(), nullable=True),
        sa.Column("cuda", sa.Text(), nullable=True),
        sa.Column("torch", sa.Text(), nullable=False),
        sa.Column("triton", sa.Text(), nullable=True),
        sa.Column("python", sa.Text(), nullable=False),
        sa.Column("host", sa.Text(), nullable=False),
        sa.Column("facts", postgresql.JSONB(), nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), server_default=sa.text("now()"), nullable=False),
        sa.PrimaryKeyConstraint("hash", name=op.f("pk_environments")),
        comment="Facts on which times depend, identified by their hash.",
    )
    op.create_table(
        "kernels",
        sa.Column("hash", sa.Text(), nullable=False),
        sa.Column("backend", sa.Text(), nullable=False),
        sa.Column("source", sa.Text(), nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), server_default=sa.text("now()"), nullable=False),
        sa.PrimaryKeyConstraint("hash", name=op.f("pk_kernels")),
        comment="A candidate's source and backend, identified by the hash of both.",
    )
    op.create_table(
        "problems",
        sa.Column("hash", sa.Text(), nullable=False),
        sa.Column("source", sa.Text(), nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), server_default=sa.text("now()"), nullable=False),
        sa.PrimaryKeyConstraint("hash", name=op.f("pk_problems")),
        comment="A reference, identified by the hash of its source.",
    )
    op.create_table(
        "workers",
        sa.Column("id", sa.Uuid(), nullable=False),
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("host", sa.Text(), nullable=False),
        sa.Column("pid", sa.Integer(), nullable=False),
        sa.Column("lanes", postgresql.ARRAY(sa.Text()), nullable=False),
        sa.Column("device", sa.Text(), nullable=False),
        sa.Column("started_at", sa.DateTime(timezone=True), server_default=sa.text("now()"), nullable=False),
        sa.Column("heartbeat_at", sa.DateTime(timezone=True), server_default=sa.text("now()"), nullable=False),
        sa.Column("stopped_at", sa.DateTime(timezone=True), nullable=True),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_workers")),
        comment="A slot's worker process, one row for each start.",
    )
    op.create_index(
        "ix_workers_alive", "workers", ["heartbeat_at"], unique=False, postgresql_where=sa.text("stopped_at IS NULL")
    )
    op.create_table(
        "baselines",
        sa.Column("problem_hash", sa.Text(), nullable=False),
        sa.Column("environment_hash", sa.Text(), nullable=False),
        sa.Column("settings_key", sa.Text(), nullable=False),
        sa.Column("measurement", postgresql.JSONB(), nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), server_default=sa.text("now()"), nullable=False),
        sa.ForeignKeyConstraint(
            ["environment_hash"], ["environments.hash"], name=op.f("fk_baselines_environment_hash_environments")
        ),
        sa.ForeignKeyConstraint(["problem_hash"], ["problems.hash"], name=op.f("fk_baselines_problem_hash_problems")),
        sa.PrimaryKeyConstraint("problem_hash", "environment_hash", "settings_key", name=op.f("pk_baselines")),
        comment="The reference's own time in one environment, cached.",
    )
    op.create_table(
        "evaluations",
        sa.Column("id", sa.Uuid(), nullable=False),
        sa.Column("problem_hash", sa.Text(), nullable=False),
        sa.Column("kernel_hash", sa.Text(), nullable=False),
        sa.Column("problem_label", sa.Text(), nullable=True),
        sa.Column("kernel_label", sa.Text(), nullable=True),
        sa.Column("lane", sa.Text(), nullable=False),
        sa.Column("settings", postgresql.JSONB(), nullable=False),
        sa.Column("batch", sa.Text(), nullable=True),
        sa.Column("idempotency_key", sa.Text(), nullable=True),
        sa.Column("state", sa.Text(), server_default="queued", nullable=False),
        sa.Column("attempts", sa.Integer(), server_default="0", nullable=False),
        sa.Column("submitted_at", sa.DateTime(timezone=True), server_default=sa.text("now()"), nullable=False),
        sa.Column("available_at", sa.DateTime(timezone=True), server_default=sa.text("now()"), nullable=False),
        sa.Column("expires_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("published_at", sa.DateTime(timezone=True), nullable=True),
        sa.CheckConstraint("state IN ('queued', 'running', 'done')", name=op.f("ck_evaluations_state")),
        sa.ForeignKeyConstraint(["kernel_hash"], ["kernels.hash"], name=op.f("fk_evaluations_kernel_hash_kernels")),
        sa.ForeignKeyConstraint(["problem_hash"], ["problems.hash"], name=op.f("fk_evaluations_problem_hash_problems")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_evaluations")),
        sa.UniqueConstraint("idempotency_key", name=op.f("uq_evaluations_idempotency_key")),
        comment="One request to judge one kernel against one problem.",
    )
    op.create_index(
        "ix_evaluations_batch", "evaluations", ["batch"], unique=False, postgresql_where=sa.text("batch IS NOT NULL")
    )
    op.create_index("ix_evaluations_kernel_hash", "evaluations", ["kernel_hash"], unique=False)
    op.create_index(
        "ix_evaluations_open",
        "evaluations",
        ["state", "available_at"],
        unique=False,
        postgresql_where=sa.text("state <> 'done'"),
    )
    op.create_index("ix_evaluations_problem_hash", "evaluations", ["problem_hash"], unique=False)
    op.create_index("ix_evaluations_submitted_at", "evaluations", ["submitted_at"], unique=False)
    op.create_table(
        "attempts",
        sa.Column("id", sa.BigInteger(), sa.Identity(always=True), nullable=False),
        sa.Column("evaluation_id", sa.Uuid(), nullable=False),
        sa.Column("number", sa.Integer(), nullable=False),
        sa.Column("worker_id", sa.Uuid(), nullable=False),
        sa.Column("environment_hash", sa.Text(), nullable=True),
        sa.Column("started_at", sa.DateTime(timezone=True), server_default=sa.text("now()"), nullable=False),
        sa.Column("lease_until", sa.DateTime(timezone=True), nullable=False),
        sa.Column("ended_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("category", sa.Text(), nullable=True),
        sa.Column("message", sa.Text(), nullable=True),
        sa.Column("outcome", postgresql.JSONB(), nullable=True),
        sa.Column("written_by", sa.Text(), nullable=True),
        sa.ForeignKeyConstraint(
            ["environment_hash"], ["environments.hash"], name=op.f("fk_attempts_environment_hash_environments")
        ),
        sa.ForeignKeyConstraint(
            ["evaluation_id"],
            ["evaluations.id"],
            name=op.f("fk_attempts_evaluation_id_evaluations"),
            ondelete="CASCADE",
        ),
        sa.ForeignKeyConstraint(["worker_id"], ["workers.id"], name=op.f("fk_attempts_worker_id_workers")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_attempts")),
        sa.UniqueConstraint("evaluation_id", "number", name=op.f("uq_attempts_evaluation_id_number")),
        comment="One execution of an evaluation by one worker.",
    )
    op.create_index(
        "ix_attempts_running", "attempts", ["lease_until"], unique=False, postgresql_where=sa.text("ended_at IS NULL")
    )
    op.create_index("ix_attempts_worker_id", "attempts", ["worker_id", "id"], unique=False)
    op.create_index(
        "ix_attempts_busy",
        "attempts",
        ["worker_id", "id"],
        unique=False,
        postgresql_where=sa.text("ended_at IS NULL"),
    )
    op.create_table(
        "verdicts",
        sa.Column("evaluation_id", sa.Uuid(), nullable=False),
        sa.Column("attempt_id", sa.BigInteger(), nullable=True),
        sa.Column("category", sa.Text(), nullable=False),
        sa.Column("blame", sa.Text(), nullable=False),
        sa.Column("compiled", sa.Boolean(), nullable=True),
        sa.Column("correctness", sa.Boolean(), nullable=True),
        sa.Column("phase", sa.Text(), nullable=True),
        sa.Column("message", sa.Text(), nullable=False),
        sa.Column("runtime_ms", sa.Double(), nullable=True),
        sa.Column("baseline_ms", sa.Double(), nullable=True),
        sa.Column("speedup", sa.Double(), nullable=True),
        sa.Column("facts", postgresql.JSONB(), nullable=False),
        sa.Column("runtime", postgresql.JSONB(), nullable=True),
        sa.Column("baseline", postgresql.JSONB(), nullable=True),
        sa.Column("evidence", postgresql.JSONB(), nullable=False),
        sa.Column("log", sa.Text(), nullable=False),
        sa.Column("written_by", sa.Text(), nullable=False),
        sa.Column("finished_at", sa.DateTime(timezone=True), server_default=sa.text("now()"), nullable=False),
        sa.ForeignKeyConstraint(["attempt_id"], ["attempts.id"], name=op.f("fk_verdicts_attempt_id_attempts")),
        sa.ForeignKeyConstraint(
            ["evaluation_id"],
            ["evaluations.id"],
            name=op.f("fk_verdicts_evaluation_id_evaluations"),
            ondelete="CASCADE",
        ),
        sa.PrimaryKeyConstraint("evaluation_id", name=op.f("pk_verdicts")),
        comment="The one final outcome of an evaluation.",
    )
    op.create_index("ix_verdicts_category_finished_at", "verdicts", ["category", "finished_at"], unique=False)
    op.create_index("ix_verdicts_finished_at", "verdicts", ["finished_at"], unique=False)
    for name, meaning, query in VIEWS:
        op.execute(f"CREATE VIEW {name} AS {query}")
        op.execute(f"COMMENT ON VIEW {name} IS '{meaning}'")


def downgrade() -> None:
    """Drop all tables and views."""
    for name, _, _ in reversed(VIEWS):
        op.execute(f"DROP VIEW {name}")
    for table in (
        "verdicts",
        "attempts",
        "evaluations",
        "baselines",
        "workers",
        "problems",
        "kernels",
        "environments",
    ):
        op.drop_table(table)
