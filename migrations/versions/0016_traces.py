"""The trace that an evaluation belongs to, where its producer named one."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0016"
down_revision = "0015"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Add a column, which producers write; null for what was submitted before."""
    op.add_column("evaluations", sa.Column("traceparent", sa.Text(), nullable=True))


def downgrade() -> None:
    """Remove it again."""
    op.drop_column("evaluations", "traceparent")
