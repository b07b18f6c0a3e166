"""The memory of GPUs that evaluations have booked."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects import postgresql

revision = "0006"
down_revision = "0005"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Add a column, which supervisors write. It is null while no memory is booked."""
    op.add_column("gpus", sa.Column("memory", postgresql.JSONB(), nullable=True))


def downgrade() -> None:
    """Remove the column. The ledgers themselves are files of the hosts."""
    op.drop_column("gpus", "memory")
