"""GPUs and their state, workers that pause, attempts that were handed back, tokens."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects import postgresql

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Add GPUs, pauses of workers, handed-back attempts, and tokens for HTTP."""
    op.create_table(
        "gpus",
        sa.Column("uuid", sa.Text(), nullable=False),
        sa.Column("host", sa.Text(), nullable=False),
        sa.Column("index", sa.Integer(), nullable=False),
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("state", sa.Text(), server_default="serving", nullable=False),
        sa.Column("reason", sa.Text(), nullable=True),
        sa.Column("since", sa.DateTime(timezone=True), server_default=sa.text("now()"), nullable=False),
        sa.Column("failures", sa.Integer(), server_default="0", nullable=False),
        sa.Column("check_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("reset_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("facts", postgresql.JSONB(), server_default=sa.text("'{}'::jsonb"), nullable=False),
        sa.Column("seen_at", sa.DateTime(timezone=True), server_default=sa.text("now()"), nullable=False),
        sa.CheckConstraint("state IN ('serving', 'drained', 'quarantined')", name=op.f("ck_gpus_state")),
        sa.PrimaryKeyConstraint("uuid", name=op.f("pk_gpus")),
        comment="A GPU that a host's fleet uses, and its state.",
    )
    op.add_column("workers", sa.Column("paused", sa.Text(), nullable=True))
    op.add_column("attempts", sa.Column("handed_back", sa.Boolean(), server_default=sa.text("false"), nullable=False))
    op.create_table(
        "tokens",
        sa.Column("id", sa.Uuid(), nullable=False),
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("digest", sa.Text(), nullable=False),
        sa.Column("scopes", postgresql.ARRAY(sa.Text()), nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), server_default=sa.text("now()"), nullable=False),
        sa.Column("expires_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("revoked_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("last_used_at", sa.DateTime(timezone=True), nullable=True),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_tokens")),
        sa.UniqueConstraint("digest", name=op.f("uq_tokens_digest")),
        comment="A credential for HTTP, and its scopes.",
    )
    op.add_column("evaluations", sa.Column("token_id", sa.Uuid(), nullable=True))
    op.create_foreign_key(op.f("fk_evaluations_token_id_tokens"), "evaluations", "tokens", ["token_id"], ["id"])
    op.create_index(
        "ix_evaluations_token_open", "evaluations", ["token_id"], postgresql_where=sa.text("state <> 'done'")
    )
    # For the sweeper's queries every second, which must not slow down with the queue, and for removing old evaluations.
    op.create_index(
        "ix_evaluations_unpublished",
        "evaluations",
        ["available_at"],
        postgresql_where=sa.text("state = 'queued' AND published_at IS NULL"),
    )
    op.create_index(
        "ix_evaluations_expires_at", "evaluations", ["expires_at"], postgresql_where=sa.text("state = 'queued'")
    )
    op.create_index(
        "ix_verdicts_whole",
        "verdicts",
        ["finished_at"],
        postgresql_where=sa.text("NOT (evidence ? 'emptied_at')"),
    )
    op.create_index("ix_verdicts_attempt_id", "verdicts", ["attempt_id"])


def downgrade() -> None:
    """Remove them. Drained GPUs and all tokens are lost."""
    for name in ("ix_verdicts_attempt_id", "ix_verdicts_whole"):
        op.drop_index(name, table_name="verdicts")
    for name in ("ix_evaluations_expires_at", "ix_evaluations_unpublished"):
        op.drop_index(name, table_name="evaluations")
    op.drop_column("evaluations", "token_id")
    op.drop_table("tokens")
    op.drop_column("attempts", "handed_back")
    op.drop_column("workers", "paused")
    op.drop_table("gpus")
