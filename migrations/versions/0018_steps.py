"""The current step of a running evaluation, and an index of a problem's profiled evaluations."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0018"
down_revision = "0017"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Add a column, which supervisors write unless their version is older, and an index."""
    op.add_column("attempts", sa.Column("step", sa.Text(), nullable=True))
    op.create_index(
        "ix_evaluations_profiled",
        "evaluations",
        ["problem_hash"],
        postgresql_where=sa.text("(settings -> 'examine' ->> 'profile') = 'true'"),
    )


def downgrade() -> None:
    """Remove both. The evidence of verdicts still has the time of each step."""
    op.drop_index("ix_evaluations_profiled", "evaluations")
    op.drop_column("attempts", "step")
