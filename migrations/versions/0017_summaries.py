"""What pages add up and sort: a narrow row for each verdict, and one for each batch.

Verdicts are wide and lie where they were written, so whoever counts those of one problem or batch would read the whole
table. Triggers keep the rows, whoever writes evaluations and verdicts. What was there before is copied, while
others wait to write: with a million evaluations for a minute or two.
"""

from __future__ import annotations

from typing import Final

import sqlalchemy as sa
from alembic import op

revision = "0017"
down_revision = "0016"
branch_labels = None
depends_on = None

#: All run with their owner's rights, as producers write no batches and workers no summaries: nothing in them is looked
#: up where their callers could have put something else.
SUMMARISE: Final = """
CREATE FUNCTION {schema}.kqueue_summarise() RETURNS trigger
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    INSERT INTO {schema}.summaries
    SELECT v.evaluation_id, e.problem_hash, e.kernel_hash, e.batch, v.category, v.runtime_ms, v.speedup,
           v.reused_from IS NOT NULL, v.finished_at
    FROM added AS v JOIN {schema}.evaluations AS e ON e.id = v.evaluation_id
    WHERE NOT e.probe;
    RETURN NULL;
END
$$
"""
#: Retention changes no verdict in these columns; an operator may, by hand.
CORRECT: Final = """
CREATE FUNCTION {schema}.kqueue_correct() RETURNS trigger
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    UPDATE {schema}.summaries
    SET category = NEW.category, runtime_ms = NEW.runtime_ms, speedup = NEW.speedup,
        reused = NEW.reused_from IS NOT NULL, finished_at = NEW.finished_at
    WHERE evaluation_id = NEW.evaluation_id;
    RETURN NULL;
END
$$
"""
#: A batch's row is written at most once a second, or its producers would wait for each other. In the order of names,
#: or two of them might wait for each other for ever.
ENLIST: Final = """
CREATE FUNCTION {schema}.kqueue_enlist() RETURNS trigger
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    INSERT INTO {schema}.batches AS b
    SELECT given.batch, given.last_at
    FROM (SELECT a.batch, max(a.submitted_at) AS last_at FROM added AS a WHERE a.batch IS NOT NULL GROUP BY 1) AS given
    WHERE NOT EXISTS (
        SELECT FROM {schema}.batches AS known
        WHERE known.name = given.batch AND known.last_at > given.last_at - interval '1 s'
    )
    ORDER BY given.batch
    ON CONFLICT (name) DO UPDATE SET last_at = greatest(b.last_at, excluded.last_at);
    RETURN NULL;
END
$$
"""
_NEW: Final = "REFERENCING NEW TABLE AS added FOR EACH STATEMENT"
_TRIGGERS: Final = {
    "kqueue_summarise": ("verdicts", "INSERT", _NEW, "Writes the summaries of verdicts."),
    "kqueue_correct": (
        "verdicts",
        "UPDATE OF category, runtime_ms, speedup, reused_from, finished_at",
        "FOR EACH ROW",
        "Changes the summary of a verdict that is changed.",
    ),
    "kqueue_enlist": ("evaluations", "INSERT", _NEW, "Writes which batches there are."),
}
_INDEXES: Final = {
    "ix_summaries_problem": "summaries (problem_hash, category, finished_at, evaluation_id) INCLUDE (speedup, reused)",
    "ix_summaries_board": (
        "summaries (problem_hash, speedup DESC NULLS LAST, runtime_ms, evaluation_id) "
        "WHERE category = 'passed' AND NOT reused AND runtime_ms IS NOT NULL"
    ),
    "ix_summaries_kernel": (
        "summaries (kernel_hash, problem_hash, runtime_ms, finished_at, evaluation_id) "
        "WHERE category = 'passed' AND NOT reused AND runtime_ms IS NOT NULL"
    ),
    "ix_summaries_batch": (
        "summaries (batch, category, speedup DESC NULLS LAST, runtime_ms, evaluation_id) "
        "INCLUDE (problem_hash, finished_at, reused) WHERE batch IS NOT NULL"
    ),
    "ix_batches_last_at": "batches (last_at)",
    "ix_evaluations_batch_open": "evaluations (batch, problem_hash) WHERE state <> 'done' AND batch IS NOT NULL",
    "ix_evaluations_probe_problem": "evaluations (problem_hash) WHERE probe",
    "ix_evaluations_probe_kernel": "evaluations (kernel_hash) WHERE probe",
    "ix_evaluations_problem_hash_submitted_at": "evaluations (problem_hash, submitted_at) INCLUDE (kernel_hash)",
}


def upgrade() -> None:
    """Copy what there is, and have it kept."""
    op.create_table(
        "summaries",
        sa.Column("evaluation_id", sa.Uuid(), nullable=False),
        sa.Column("problem_hash", sa.Text(), nullable=False),
        sa.Column("kernel_hash", sa.Text(), nullable=False),
        sa.Column("batch", sa.Text(), nullable=True),
        sa.Column("category", sa.Text(), nullable=False),
        sa.Column("runtime_ms", sa.Double(), nullable=True),
        sa.Column("speedup", sa.Double(), nullable=True),
        sa.Column("reused", sa.Boolean(), nullable=False),
        sa.Column("finished_at", sa.DateTime(timezone=True), nullable=False),
        sa.ForeignKeyConstraint(
            ["evaluation_id"],
            ["verdicts.evaluation_id"],
            name=op.f("fk_summaries_evaluation_id_verdicts"),
            ondelete="CASCADE",
        ),
        sa.PrimaryKeyConstraint("evaluation_id", name=op.f("pk_summaries")),
        comment="What pages add up and sort of a verdict: a narrow row for each, but for those of probes.",
    )
    op.create_table(
        "batches",
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("last_at", sa.DateTime(timezone=True), nullable=False),
        sa.PrimaryKeyConstraint("name", name=op.f("pk_batches")),
        comment="A batch, and when its last evaluation was submitted, within a second.",
    )
    schema: str = op.get_bind().scalar(sa.text("SELECT quote_ident(current_schema())"))
    for function in (SUMMARISE, CORRECT, ENLIST):
        op.execute(function.format(schema=schema))
    for name, (table, event, how, meaning) in _TRIGGERS.items():
        op.execute(f"COMMENT ON FUNCTION {name} IS '{meaning}'")
        op.execute(f"REVOKE ALL ON FUNCTION {name} FROM PUBLIC")
        op.execute(f"CREATE TRIGGER {name} AFTER {event} ON {table} {how} EXECUTE FUNCTION {name}()")
    # From here on nobody else writes either table until this is committed: a trigger is made under a lock.
    op.execute("""
        INSERT INTO summaries
        SELECT v.evaluation_id, e.problem_hash, e.kernel_hash, e.batch, v.category, v.runtime_ms, v.speedup,
               v.reused_from IS NOT NULL, v.finished_at
        FROM verdicts AS v JOIN evaluations AS e ON e.id = v.evaluation_id WHERE NOT e.probe
    """)
    op.execute("""
        INSERT INTO batches SELECT batch, max(submitted_at) FROM evaluations WHERE batch IS NOT NULL GROUP BY batch
    """)
    op.execute("DROP INDEX ix_evaluations_problem_hash_submitted_at")
    for name, on in _INDEXES.items():
        op.execute(f"CREATE INDEX {name} ON {on}")
    # Until they were counted, the planner would read them whole.
    op.execute("ANALYZE summaries, batches")


def downgrade() -> None:
    """Nothing is lost: all of it stands in evaluations and verdicts."""
    for name, (table, *_) in _TRIGGERS.items():
        op.execute(f"DROP TRIGGER {name} ON {table}")
        op.execute(f"DROP FUNCTION {name}")
    op.execute("DROP TABLE summaries")
    op.execute("DROP TABLE batches")
    for name, on in _INDEXES.items():
        if on.startswith("evaluations"):
            op.execute(f"DROP INDEX {name}")
    op.execute("CREATE INDEX ix_evaluations_problem_hash_submitted_at ON evaluations (problem_hash, submitted_at)")
