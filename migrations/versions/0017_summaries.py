"""Summaries for the sums and sorting of pages: a narrow row for each verdict, and one for each batch.

Verdicts are wide and stored in the order of writing, so a count by problem or batch would read the whole table.
``kqueue_conclude`` writes a summary with each verdict. Copying existing verdicts blocks writers: with a million
evaluations for a minute or two.
"""

from __future__ import annotations

import importlib
from typing import Final

import sqlalchemy as sa
from alembic import op

revision = "0017"
down_revision = "0016"
branch_labels = None
depends_on = None

#: The statement of ``kqueue_conclude`` to replace, and its replacement.
_WRITES: Final = "INSERT INTO {schema}.verdicts VALUES (given.*) ON CONFLICT DO NOTHING;"
_SUMMARISES: Final = """INSERT INTO {schema}.verdicts VALUES (given.*) ON CONFLICT DO NOTHING;
    IF FOUND THEN
        INSERT INTO {schema}.summaries
        SELECT given.evaluation_id, e.problem_hash, e.kernel_hash, e.batch, given.category, given.runtime_ms,
               given.speedup, given.reused_from IS NOT NULL, given.finished_at
        FROM {schema}.evaluations AS e WHERE e.id = given.evaluation_id AND NOT e.probe;
    END IF;"""
#: Updates the summary of a verdict that an operator changes by hand. Retention does not change these columns. It runs
#: with its owner's rights, so its names must not resolve to objects of its caller.
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
_INDEXES: Final = {
    "ix_summaries_problem": (
        "summaries (problem_hash, category, speedup DESC NULLS LAST, runtime_ms, evaluation_id) "
        "INCLUDE (finished_at, reused)"
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
    """Create the summaries, and copy existing verdicts and batches."""
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
        comment="The columns of a verdict by which pages sum and sort, one narrow row each, without probes.",
    )
    op.create_table(
        "batches",
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("last_at", sa.DateTime(timezone=True), nullable=False),
        sa.PrimaryKeyConstraint("name", name=op.f("pk_batches")),
        comment="A batch, and the time of its last submission within a second.",
    )
    schema = _schema()
    op.execute(_conclude().replace(_WRITES.format(schema=schema), _SUMMARISES.format(schema=schema)))
    op.execute(CORRECT.format(schema=schema))
    op.execute("COMMENT ON FUNCTION kqueue_correct IS 'Changes the summary of a verdict that is changed.'")
    op.execute("REVOKE ALL ON FUNCTION kqueue_correct FROM PUBLIC")
    # Its lock blocks writers of verdicts until this migration is committed.
    op.execute("""
        CREATE TRIGGER kqueue_correct
        AFTER UPDATE OF category, runtime_ms, speedup, reused_from, finished_at ON verdicts
        FOR EACH ROW EXECUTE FUNCTION kqueue_correct()
    """)
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
    # Without statistics the planner would scan them sequentially.
    op.execute("ANALYZE summaries, batches")


def downgrade() -> None:
    """Drop the summaries. Nothing is lost, because evaluations and verdicts hold the same data."""
    op.execute(_conclude())
    op.execute("DROP TRIGGER kqueue_correct ON verdicts")
    op.execute("DROP FUNCTION kqueue_correct")
    op.execute("DROP TABLE summaries")
    op.execute("DROP TABLE batches")
    for name, on in _INDEXES.items():
        if on.startswith("evaluations"):
            op.execute(f"DROP INDEX {name}")
    op.execute("CREATE INDEX ix_evaluations_problem_hash_submitted_at ON evaluations (problem_hash, submitted_at)")


def _conclude() -> str:
    """Return the definition of ``kqueue_conclude`` before this migration."""
    reuse = importlib.import_module("migrations.versions.0010_reuse")
    written: str = reuse.CONCLUDE.format(schema=_schema(), content=reuse._CONTENT)
    assert written.count(_WRITES.format(schema=_schema())) == 1
    return written


def _schema() -> str:
    schema: str = op.get_bind().scalar(sa.text("SELECT quote_ident(current_schema())"))
    return schema
