"""The devices that workers wait for, because processes outside of their fleet have them."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0009"
down_revision = "0008"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Add two columns, which supervisors write; null while a worker does not wait."""
    op.add_column("workers", sa.Column("waits_for", sa.Text(), nullable=True))
    op.add_column("workers", sa.Column("waits_since", sa.DateTime(timezone=True), nullable=True))


def downgrade() -> None:
    """Remove them again. The evidence of verdicts still says who had a device."""
    op.drop_column("workers", "waits_since")
    op.drop_column("workers", "waits_for")
