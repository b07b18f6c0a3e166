"""The devices for which workers wait because processes outside of their fleet hold them."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0009"
down_revision = "0008"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Add two columns, which supervisors write. They are null while a worker does not wait."""
    op.add_column("workers", sa.Column("waits_for", sa.Text(), nullable=True))
    op.add_column("workers", sa.Column("waits_since", sa.DateTime(timezone=True), nullable=True))


def downgrade() -> None:
    """Remove the columns. The evidence of verdicts still names the holder of a device."""
    op.drop_column("workers", "waits_since")
    op.drop_column("workers", "waits_for")
