"""Searches for fast kernels: their runs, steps and proposals."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects import postgresql

revision = "0011"
down_revision = "0010"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Create the three tables."""
    op.create_table(
        "search_runs",
        sa.Column("id", sa.Uuid(), nullable=False),
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("plan", postgresql.JSONB(none_as_null=True, astext_type=sa.Text()), nullable=False),
        sa.Column("state", sa.Text(), server_default="running", nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), server_default=sa.text("now()"), nullable=False),
        sa.Column("ended_at", sa.DateTime(timezone=True), nullable=True),
        sa.CheckConstraint("state IN ('running', 'stopped', 'done')", name=op.f("ck_search_runs_state")),
        sa.CheckConstraint("name ~ '^[A-Za-z0-9][A-Za-z0-9._+-]{0,99}$'", name=op.f("ck_search_runs_name")),
        sa.CheckConstraint("jsonb_typeof(plan) = 'object'", name=op.f("ck_search_runs_plan")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_search_runs")),
        sa.UniqueConstraint("name", name=op.f("uq_search_runs_name")),
        comment="A search for a fast kernel in many steps.",
    )
    op.create_index(op.f("ix_search_runs_created_at"), "search_runs", ["created_at"])
    op.create_table(
        "search_steps",
        sa.Column("run_id", sa.Uuid(), nullable=False),
        sa.Column("number", sa.Integer(), nullable=False),
        sa.Column("digest", sa.Text(), nullable=True),
        sa.Column("summary", sa.Text(), nullable=True),
        sa.Column("best", sa.Integer(), nullable=True),
        sa.Column("test", postgresql.JSONB(none_as_null=True, astext_type=sa.Text()), nullable=True),
        sa.Column("started_at", sa.DateTime(timezone=True), server_default=sa.text("now()"), nullable=False),
        sa.Column("ended_at", sa.DateTime(timezone=True), nullable=True),
        sa.ForeignKeyConstraint(
            ["run_id"], ["search_runs.id"], name=op.f("fk_search_steps_run_id_search_runs"), ondelete="CASCADE"
        ),
        sa.PrimaryKeyConstraint("run_id", "number", name=op.f("pk_search_steps")),
        comment="A step of a search: some kernels are chosen, and proposals made from each.",
    )
    op.create_table(
        "search_proposals",
        sa.Column("run_id", sa.Uuid(), nullable=False),
        sa.Column("number", sa.Integer(), nullable=False),
        sa.Column("step", sa.Integer(), nullable=False),
        sa.Column("parent", sa.Integer(), nullable=True),
        sa.Column("prompt", sa.Text(), nullable=True),
        sa.Column("answer", sa.Text(), nullable=True),
        sa.Column("kernel", sa.Text(), nullable=True),
        sa.Column("error", sa.Text(), nullable=True),
        sa.Column("evaluation_id", sa.Uuid(), nullable=True),
        sa.Column("category", sa.Text(), nullable=True),
        sa.Column("message", sa.Text(), nullable=True),
        sa.Column("runtime_ms", sa.Double(), nullable=True),
        sa.Column("speedup", sa.Double(), nullable=True),
        sa.Column("scores", postgresql.JSONB(none_as_null=True, astext_type=sa.Text()), nullable=True),
        sa.Column("feedback", sa.Text(), nullable=True),
        sa.Column("asked_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("ended_at", sa.DateTime(timezone=True), nullable=True),
        sa.ForeignKeyConstraint(
            ["run_id", "step"],
            ["search_steps.run_id", "search_steps.number"],
            name=op.f("fk_search_proposals_run_id_step_search_steps"),
            ondelete="CASCADE",
        ),
        sa.PrimaryKeyConstraint("run_id", "number", name=op.f("pk_search_proposals")),
        comment="A kernel that was proposed in a search, and its result.",
    )
    op.create_index(op.f("ix_search_proposals_run_id_step"), "search_proposals", ["run_id", "step"])


def downgrade() -> None:
    """Drop the tables. The evaluations that searches submitted stay."""
    op.drop_table("search_proposals")
    op.drop_table("search_steps")
    op.drop_table("search_runs")
