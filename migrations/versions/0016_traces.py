"""The trace of an evaluation, if its producer named one."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0016"
down_revision = "0015"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Add a column, which producers write. It is null for earlier submissions."""
    op.add_column("evaluations", sa.Column("traceparent", sa.Text(), nullable=True))


def downgrade() -> None:
    """Remove the column."""
    op.drop_column("evaluations", "traceparent")
