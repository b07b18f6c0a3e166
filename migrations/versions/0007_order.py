"""The order of evaluations: their priorities, their producers, and what each producer has used."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0007"
down_revision = "0006"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Queue existing evaluations as batch work of their tokens. All producers begin without usage."""
    op.add_column("evaluations", sa.Column("priority", sa.Text(), server_default="batch", nullable=False))
    op.add_column("evaluations", sa.Column("producer", sa.Text(), server_default="", nullable=False))
    op.create_check_constraint(op.f("ck_evaluations_priority"), "evaluations", "priority IN ('interactive', 'batch')")
    # Dropped before the update, which would have to write to it.
    op.drop_index("ix_evaluations_unpublished", table_name="evaluations")
    # From now on Redis holds only a window of the queued evaluations.
    op.execute("""
        UPDATE evaluations
        SET producer = coalesce('token:' || token_id, ''),
            published_at = CASE WHEN state = 'queued' THEN NULL ELSE published_at END
        WHERE state <> 'done' AND (token_id IS NOT NULL OR (state = 'queued' AND published_at IS NOT NULL))
    """)
    op.create_index(
        "ix_evaluations_queue",
        "evaluations",
        ["lane", "priority", "producer", "submitted_at", "id"],
        postgresql_where=sa.text("state = 'queued'"),
    )
    op.create_index(
        "ix_evaluations_published",
        "evaluations",
        ["lane"],
        postgresql_where=sa.text("state = 'queued' AND published_at IS NOT NULL"),
    )
    op.create_table(
        "shares",
        sa.Column("id", sa.BigInteger(), sa.Identity(always=True), nullable=False),
        sa.Column("producer", sa.Text(), nullable=False),
        sa.Column("resource", sa.Text(), nullable=False),
        sa.Column("priority", sa.Text(), nullable=False),
        sa.Column("seconds", sa.Double(), server_default=sa.text("0"), nullable=False),
        sa.Column("squares", sa.Double(), server_default=sa.text("0"), nullable=False),
        sa.Column("ended", sa.Double(), server_default=sa.text("0"), nullable=False),
        sa.Column("at", sa.DateTime(timezone=True), server_default=sa.text("now()"), nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_shares")),
        comment="A producer's recent use of the devices, which decides the order of evaluations.",
    )
    op.add_column("tokens", sa.Column("priority", sa.Text(), server_default="interactive", nullable=False))
    op.add_column("tokens", sa.Column("weight", sa.Double(), server_default=sa.text("1"), nullable=False))


def downgrade() -> None:
    """Remove priorities and usage. The oldest evaluation comes first again."""
    op.drop_column("tokens", "weight")
    op.drop_column("tokens", "priority")
    op.drop_table("shares")
    op.create_index(
        "ix_evaluations_unpublished",
        "evaluations",
        ["available_at"],
        postgresql_where=sa.text("state = 'queued' AND published_at IS NULL"),
    )
    op.drop_index("ix_evaluations_published", table_name="evaluations")
    op.drop_index("ix_evaluations_queue", table_name="evaluations")
    op.drop_constraint(op.f("ck_evaluations_priority"), "evaluations")
    op.drop_column("evaluations", "producer")
    op.drop_column("evaluations", "priority")
